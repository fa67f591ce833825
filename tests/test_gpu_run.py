"""The run of everything that needs a GPU: which commands it runs, how long, and what it writes."""

import argparse
import importlib
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "benchmarks", ROOT / "kernels" / "benchmarks")


@pytest.fixture(scope="module")
def modules():
    """The script and those that it starts, without what they share once the tests are over."""
    before, path = set(sys.modules), sys.path[:]
    sys.path[:0] = map(str, FOLDERS)
    yield {path.stem: importlib.import_module(path.stem) for folder in FOLDERS for path in folder.glob("*.py")}
    sys.path[:] = path
    own = {path.stem for folder in FOLDERS for path in folder.glob("*.py")}
    for name in own & (set(sys.modules) - before):
        del sys.modules[name]


@pytest.fixture
def run(modules, monkeypatch, tmp_path):
    """Runs tasks of one command each: (name, Python code)."""
    gpu = modules["gpu"]

    def call(*programs, minutes=1.0, resume=False):
        made = [gpu.Task(name, "ours", 1, {name: ["-c", code]}) for name, code in programs]
        monkeypatch.setattr(gpu, "tasks", lambda out: made)
        done = gpu.run_tasks(argparse.Namespace(steps=["ours"], out=tmp_path, minutes=minutes, resume=resume))
        return done, (tmp_path / "RESULTS.md").read_text()

    return call


def test_every_benchmark_understands_its_options(modules, monkeypatch):
    """Each command is parsed by the script that it starts."""
    started = []

    def benchmark(name, options, measure):
        started.append((name, options.parts, options.ours, options.minutes))

    monkeypatch.setattr(modules["benchmark"], "run_benchmark", benchmark)
    monkeypatch.setattr(modules["models"], "run_benchmark", benchmark)
    for task in modules["gpu"].tasks(Path("out")):
        for script, *words in task.commands.values():
            words = ["0.5" if word == "LIMIT" else word for word in words]
            if script == "-m":
                assert Path(words[1]).is_dir()
            elif Path(script).stem == "models":
                modules["models"].main(words)
            else:
                module = modules[Path(script).stem]
                (kind,) = (
                    x
                    for x in vars(module).values()
                    if getattr(x, "__module__", "") == module.__name__ and "ours" in vars(x)
                )
                modules["benchmark"].main(kind, words)
    operators = {name for name, *_ in started} - {"models"}
    assert operators == {path.stem for path in modules["gpu"].SCRIPTS}
    assert all(minutes == 0.5 for *_, minutes in started)
    for name in operators:
        own = [(parts[0], ours) for other, parts, ours, _ in started if other == name]
        assert own == [("check", True), ("check", True), ("first", False)]


def test_a_task_that_hangs_or_fails_stops_nothing(run, modules, monkeypatch):
    monkeypatch.setattr(modules["gpu"], "GRACE", 0)
    programs = ("slow", "import time; time.sleep(60)"), ("wrong", "exit('no')"), ("right", "")
    skips = "print('2 measurements did not begin within 1 minutes')"
    done, text = run(*programs, ("short", skips), minutes=0.2)
    assert not done
    assert "- slow: not done after 3 s (3 s)" in text
    assert "- wrong: exit status 1, see wrong.log" in text
    assert "- right: done" in text
    assert "- short: 2 measurements did not begin within 1 minutes" in text
    assert run(("right", ""))[0]


def test_what_broke_the_gpu_is_started_again(run, modules, tmp_path):
    code = f"open('{tmp_path}/count', 'a').write('x'); exit({modules['gpu'].BROKEN})"
    _, text = run(("broken", code))
    assert (tmp_path / "count").read_text() == "xxx"
    assert f"exit status {modules['gpu'].BROKEN}" in text


def test_no_time_is_left(run):
    done, text = run(("late", ""), minutes=0)
    assert not done and "- late: not begun" in text


def test_the_report_has_one_table(run, modules, tmp_path):
    results = modules["measuring"].Results(tmp_path / "wkv.csv", "cpu", 60, "torch 9")
    row = {"part": "operator", "what": "wkv forward", "batch": 8, "heads": 4, "size": 64, "length": 128}
    results.add({**row, "implementation": "subquad", "milliseconds": 2.0, "floor_milliseconds": 0.5, "MiB": 3.0})
    results.add({**row, "implementation": "fla", "milliseconds": 5.0, "note": "a | b"})
    results.add({**row, "implementation": "subquad", "length": 256, "note": "failed: ValueError: no"})
    results.add({**row, "part": "check", "implementation": "subquad", "note": "largest error 0"})
    results.bar.close()
    case = '<testcase classname="tests.test_x" name="test_{}">{}</testcase>'
    cases = case.format("a", ""), case.format("b", "<failure/>"), case.format("c", "<skipped/>")
    (tmp_path / "tests.xml").write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    run(("wkv, ours", ""))
    run(("wkv, others", ""), resume=True)
    lines = (tmp_path / "RESULTS.md").read_text().splitlines()
    assert "torch 9" in lines
    assert "1 passed, 1 failed, 1 skipped" in lines and "- tests.test_x.test_b" in lines
    assert "| wkv forward | 8 x 128 | 4 x 64 | 2 | 0.5 | 25% | 3 | fla 5 (2.50) | fla: a / b |" in lines
    assert "| wkv forward | 8 x 256 | 4 x 64 |  |  |  |  |  | subquad: failed: ValueError: no |" in lines
    assert len([line for line in lines if line.startswith("| wkv")]) == 2
    assert [line.partition(":")[0] for line in lines if line.endswith("s)")] == ["- wkv, ours", "- wkv, others"]

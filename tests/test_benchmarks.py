"""The benchmarks: every part of every script runs, and what is wrong is not measured."""

import contextlib
import csv
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import fake_gpu


ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "benchmarks", ROOT / "kernels" / "benchmarks")
SHARED = ("benchmark", "measuring")
OPERATORS = sorted({path.stem for path in FOLDERS[1].glob("*.py")} - {*SHARED})
CPU = ("--quick", "--device", "cpu")
EAGER = {"triton": "eager", "eager": "eager", "reference": "reference"}


@pytest.fixture(scope="module")
def scripts():
    """Imports a script by its name; the modules are gone once the tests are over."""
    before, path = set(sys.modules), sys.path[:]
    sys.path[:0] = [*map(str, FOLDERS), str(ROOT / "examples")]
    yield importlib.import_module
    sys.path[:] = path
    own = {path.stem for folder in (*FOLDERS, ROOT / "examples") for path in folder.glob("*.py")}
    for name in own & (set(sys.modules) - before):
        del sys.modules[name]


def kind_of(module):
    """The class of the cases that the script of an operator measures."""
    (kind,) = (
        x
        for x in vars(module).values()
        if isinstance(x, type) and x.__module__ == module.__name__ and "ours" in vars(x)
    )
    return kind


@pytest.fixture
def run(scripts, monkeypatch, tmp_path):
    """Runs the script of an operator in its eager form, or that of models; returns the rows that it writes."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(scripts("measuring"), "plot", lambda *how: None)

    def call(name, *options, code=0):
        arguments, module = [*CPU, "--out", str(tmp_path), *options], scripts(name)
        try:
            module.main(arguments) if name == "models" else scripts("benchmark").main(kind_of(module), arguments)
        except SystemExit as error:
            assert error.code == code
        with open(tmp_path / f"{name}.csv", newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    return call


def assert_measured(rows):
    assert not [row["note"] for row in rows if row["note"].startswith(("failed", "out of memory"))]
    assert all(row["part"] == "check" or float(row["milliseconds"]) > 0 for row in rows)


# Operators.


@pytest.mark.quick_cases("wkv", "token_shift")
@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_is_measured(name, scripts, run, tmp_path, capsys):
    rows = run(name)
    assert_measured(rows)
    steps = {"step"} if "step quick" in kind_of(scripts(name)).sizes else set()
    assert {row["part"] for row in rows} == {"check", "operator"} | steps
    report = json.loads((tmp_path / f"{name}.json").read_text())
    assert len(report["rows"]) == len(rows)
    assert report["versions"] in (tmp_path / f"{name}.md").read_text()
    assert "0 of" in capsys.readouterr().out


@pytest.mark.quick_cases("wkv", "chunk_attention")
@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_is_measured_on_a_gpu(name, scripts, run, monkeypatch):
    """The kernels are tested elsewhere: the eager form stands for them."""
    kind = kind_of(scripts(name))
    right = kind.ours
    monkeypatch.setattr(
        kind, "ours", lambda self, backend, *how, **inputs: right(self, EAGER[backend], *how, **inputs)
    )
    with fake_gpu():
        rows = run(name, "--device", "cuda", "--parts", "check", "operator", "step")
    failed = [row["note"] for row in rows if row["note"].startswith(("failed", "out of memory", "not done"))]
    assert [note for note in failed if "does not support backward on CPU" not in note] == []
    steps = {row["what"].rpartition(" step")[2] for row in rows if row["part"] == "step"}
    assert steps == ({"", ", graph"} if "step quick" in kind.sizes else set())


@pytest.mark.parametrize("wrong", ["kernel", "in place", "peer"])
def test_what_is_wrong_is_not_measured(wrong, scripts, run, monkeypatch):
    kind = kind_of(scripts("timestep_decay_norm"))
    ours, plain = kind.ours, kind.plain

    def changed(self, backend, inplace=False, **inputs):
        if wrong == "in place":  # the right result, in new memory
            inputs = {key: x.clone() for key, x in inputs.items()} if inplace else inputs
        out, *states = ours(self, backend, inplace, **inputs)
        return (out * 1.001 if wrong == "kernel" and backend != "reference" else out, *states)

    monkeypatch.setattr(kind, "ours", changed)
    if wrong == "peer":
        monkeypatch.setattr(kind, "plain", lambda self, **inputs: plain(self, **inputs) * 1.001)
    assert {row["part"] for row in run("timestep_decay_norm", code=1)} == {"check"}


def test_a_row_that_fails_stops_nothing(scripts, tmp_path):
    results = scripts("measuring").Results(tmp_path / "rows.csv", "cpu", 60, "versions")
    row = {"part": "operator", "what": "forward", "implementation": "fla", "length": 8}

    def fail(error):
        raise error

    assert not results.measure(row, lambda: fail(torch.OutOfMemoryError("17 GiB")))
    assert not results.measure({**row, "implementation": "subquad"}, lambda: fail(ValueError("no\nsuch thing")))
    assert results.measure({**row, "length": 16}, lambda: {"milliseconds": 2.0})
    results.deadline = 0
    assert not results.measure({**row, "length": 32}, lambda: fail(AssertionError("too late")))
    assert (results.failed, results.skipped) == (1, 1)
    with open(tmp_path / "rows.csv", newline="", encoding="utf-8") as file:
        notes = [row["note"] for row in csv.DictReader(file)]
    assert notes == ["out of memory", "failed: ValueError: no", ""]
    results.bar.close()


def test_ours_is_measured_first_and_the_rest_later(run):
    measured = run("wkv", "--parts", "operator", "step", "--ours")
    assert {row["implementation"] for row in measured} == {"subquad"}
    rows = run("wkv", "--parts", "operator", "step", "--resume")
    assert rows[: len(measured)] == measured  # not again
    assert "subquad" not in {row["implementation"] for row in rows[len(measured) :]}


# Models.


@pytest.mark.thorough
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_model_is_measured(device, scripts, run):
    models = scripts("models")
    parts = set(models.PARTS) - ({"check", "long"} if device == "cuda" else set())
    with fake_gpu() if device == "cuda" else contextlib.nullcontext():
        rows = run("models", "--models", *models.MODELS, "--parts", *parts, "--device", device)
    assert_measured(rows)
    assert {row["part"] for row in rows} == {*parts, "made"}
    found = {(row["what"], row["implementation"]) for row in rows}
    for name in models.MODELS:
        whats = ("all tokens", "training") + ("first token", "one more token") * (name != "avey-b")
        assert found >= {(f"{name} {what}", "subquad") for what in whats}
    assert found >= {("avey first token", "plain"), ("avey-b all tokens", "ModernBERT")}


def test_a_wrong_model_is_not_measured(scripts, run, monkeypatch):
    ours = scripts("models").Ours
    right = ours.logits
    monkeypatch.setattr(ours, "logits", lambda self, ids, **how: right(self, ids, **how) * 1.01)
    rows = run("models", "--models", "avey-b", "--parts", "check", "read", code=1)
    assert {row["part"] for row in rows} == {"check"}


def test_finch_is_measured_on_a_cpu(scripts, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    names = ["subquad float32", "subquad int8", "subquad int4", "llama.cpp F32", "rwkv fp32"]
    scripts("cpu").main(["--quick", "--out", str(tmp_path), "--implementations", *names])
    assert "llama.cpp is left out: there are no compilers of C and C++" in capsys.readouterr().out
    rows = json.loads((tmp_path / "cpu.json").read_text())["rows"]
    assert all(row["milliseconds"] > 0 for row in rows if row["part"] != "error")
    errors = {row["implementation"]: float(row["note"].split()[1]) for row in rows if row["part"] == "error"}
    assert errors["subquad float32"] == 0 < errors["rwkv fp32"] < 1e-4
    assert 1e-3 < errors["subquad int8"] < 0.2 and errors["subquad int8"] < errors["subquad int4"] < 0.5


@pytest.mark.thorough
def test_the_start_is_measured(scripts, tmp_path):
    scripts("startup").main(["--quick", "--out", str(tmp_path)])
    rows = {row["what"]: row for row in json.loads((tmp_path / "startup.json").read_text())["rows"]}
    ready, first = (rows[f"subquad generate: {moment}"]["milliseconds"] for moment in ("ready", "first token"))
    assert 0 < ready < first


@pytest.mark.thorough
def test_the_loss_of_int8_is_measured(scripts, tmp_path):
    scripts("quantised").main(["--quick", "--models", "finch-abc", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "quantised.json").read_text())["rows"]
    losses = {row["dtype"]: float(row["note"].split()[0]) for row in rows if row["part"] == "loss"}
    assert losses["int8"] != losses["float32"]
    assert all(abs(loss / losses["float32"] - 1) < (0.05 if way == "int4" else 0.01) for way, loss in losses.items())


@pytest.mark.thorough
def test_adapters_are_compared(scripts, tmp_path, monkeypatch):
    corpus = scripts("abc_corpus")
    tunes = [f"X:1\nT:A\nM:C\nL:1/8\nK:G\nG2{letter}2 a'z|^f/2 z4 (3DEF|]" for letter in "ABcdefg"]
    monkeypatch.setattr(corpus, "load_corpus", lambda: corpus.Corpus(tunes[2:], tunes[:2], {}))
    chosen = ["state tuning", "low ranks, rank 4"]
    scripts("adapters").main(["--quick", "--adapters", *chosen, "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "adapters.json").read_text())["rows"]
    assert len({row["note"].split()[0] for row in rows}) == 2


# Everything on a GPU, in one run.


def test_every_script_understands_its_options(scripts, monkeypatch):
    """Each command of `make gpu` is parsed by the script that it starts."""
    started = []

    def benchmark(name, options, measure):
        started.append((name, options.minutes))

    for name in ("benchmark", "models"):
        monkeypatch.setattr(scripts(name), "run_benchmark", benchmark)
    for task in scripts("gpu").tasks(Path("out")):
        for script, *words in task.commands.values():
            words, name = ["0.5" if word == "LIMIT" else word for word in words], Path(script).stem
            if script == "-m":
                assert Path(words[1]).is_dir()
            elif name == "models":
                scripts(name).main(words)
            else:
                scripts("benchmark").main(kind_of(scripts(name)), words)
    assert {name for name, _ in started} == {"models", *OPERATORS} and {minutes for _, minutes in started} == {0.5}


def test_a_task_that_hangs_or_fails_stops_nothing(scripts, monkeypatch, tmp_path):
    gpu = scripts("gpu")
    programs = {"slow": "import time; time.sleep(60)", "wrong": "exit('no')", "right": ""}
    made = [gpu.Task(name, "ours", 1, {name: ["-c", code]}) for name, code in programs.items()]
    monkeypatch.setattr(gpu, "tasks", lambda out: made)
    monkeypatch.setattr(gpu, "GRACE", 0)
    options = SimpleNamespace(steps=["ours"], out=tmp_path, minutes=0.15, resume=False)
    assert not gpu.run_tasks(options)
    text = (tmp_path / "RESULTS.md").read_text()
    assert "- slow: not done after 3 s (3 s)" in text
    assert "- wrong: exit status 1, see wrong.log" in text and "- right: done" in text

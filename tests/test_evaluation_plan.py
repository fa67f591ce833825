"""The plan of `python -m examples.evaluation all`, and the spread of seeds."""

import argparse
import json
import sys

import pytest
from examples.evaluation import TASKS, plan, report
from examples.evaluation.__main__ import main, parse_arguments
from examples.evaluation.spread import Spread, by
from test_evaluation import make_task as squares


def test_a_spread_is_of_its_values():
    assert Spread.of([0.25]) == (0.25, 0.25, 0.25, 1) and Spread.of([0.25]).text() == "0.250"
    assert Spread.of(iter([0.5, 0.1, 0.3])).text(".1%") == "30.0% (10.0%–50.0%)"
    with pytest.raises(ValueError, match="at least one value"):
        Spread.of([])
    rows = [{"a": 1, "b": 2, "c": 3}, {"a": 2, "b": 2, "c": 4}, {"a": 1, "b": 2, "c": 5}]
    assert by(rows, "a", "b") == {(1, 2): [rows[0], rows[2]], (2, 2): [rows[1]]}


def test_every_task_has_a_plan_and_a_command_for_each_row():
    """The estimates are those of the records in the repository, and the command of a row chooses that row."""
    tasks = {name: parse_arguments([name]) for name in TASKS}
    jobs = plan.jobs_of(tasks, {name: [] for name in TASKS})
    for name, arguments in tasks.items():
        cells = arguments.module.cells(arguments)
        planned = [cell for job in jobs if job.task == name for cell in job.cells]
        assert len(planned) == len(cells) and all(cell in planned for cell in cells)
        path = report.RESULTS / f"{name}.json"
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []:
            words = report.cell_command(name, row).split()
            assert words[:3] == ["python", "-m", "examples.evaluation"]
            chosen = parse_arguments(words[3:])
            known = getattr(arguments.module, "SHARED", ("architecture", "length"))
            same = [cell for cell in chosen.module.cells(chosen) if all(cell.get(k) == row.get(k) for k in known)]
            assert same or (name, row["architecture"]) in (
                ("positions", "transformer"),
                ("needle", row["architecture"]),
            )


def make_task(calls):
    task = squares(calls)
    task.TITLE, task.SEEDS, task.SHARED = "Cubes", (0, 1), ("architecture", "seed")
    task.settings = lambda arguments: {}
    task.cells = lambda arguments: [
        {"architecture": name, "length": length, "seed": seed}
        for seed in arguments.seeds
        for name in arguments.architectures
        for length in arguments.lengths
    ]
    task.measure = lambda arguments, **cell: calls.append((*cell.values(),)) or {"square": cell["length"] ** 3}
    task.findings = lambda record: [f"{len(record['rows'])} cubes."]
    return task


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """The cells that the only task measures. In the repository's record Eagle takes 10 seconds a cell, Finch 100."""
    calls = []
    monkeypatch.setitem(sys.modules, "examples.evaluation.cubes", make_task(calls))
    for name in list(TASKS):
        monkeypatch.delitem(TASKS, name)
    monkeypatch.setitem(TASKS, "cubes", "cubes of lengths")
    monkeypatch.setattr(report, "RESULTS", tmp_path / "shipped")
    monkeypatch.setattr(plan, "RESULTS", tmp_path / "shipped")
    (tmp_path / "shipped").mkdir()
    rows = [
        {"architecture": name, "length": length, "seed": 7, "square": 0, "seconds": seconds}
        for name, seconds in (("eagle", 10.0), ("finch", 100.0))
        for length in (1, 2)
    ]
    record = {"task": "cubes", "command": "python", "hardware": "CPU", "date": "2026", "versions": {}, "settings": {}}
    (tmp_path / "shipped/cubes.json").write_text(json.dumps({**record, "rows": rows}), encoding="utf-8")
    return calls


def run_all(out, *options):
    main(["all", "--out", str(out), "--threads", "1", *options])


def test_the_first_seeds_come_first_and_what_does_not_fit_is_left(calls, tmp_path, capsys):
    out = tmp_path / "out"
    run_all(out, "--budget", str(245 / 3600), "--dry-run")
    said = capsys.readouterr().out
    assert calls == [] and not out.exists()
    assert "3 jobs of about 0.07 hours fit in 0.0680556 hours:" in said
    assert "  cubes, seed 1 of each cell: 4 cells, 3.7 minutes" in said
    assert "  cubes, seed 2 of each cell: 2 cells, 0.3 minutes" in said
    assert "1 jobs (2 cells, about 0.06 hours) do not fit" in said

    run_all(out, "--budget", str(245 / 3600))
    first = [(name, length, seed) for name, seed in (("eagle", 0), ("finch", 0), ("eagle", 1)) for length in (1, 2)]
    assert calls == first
    assert "6 cubes." in (out / "report.html").read_text(encoding="utf-8")
    record = json.loads((out / "cubes.json").read_text(encoding="utf-8"))
    assert record["command"] == "python -m examples.evaluation cubes --threads 1 --device cpu"
    # It goes on. The cells that are left take no time, as those that the first call measured.
    run_all(out, "--budget", "1")
    assert calls[6:] == [("finch", 1, 1), ("finch", 2, 1)]
    run_all(out, "--budget", "1")
    assert len(calls) == 8


def test_a_run_ends_with_its_budget(calls, tmp_path, capsys, monkeypatch):
    clock = iter(range(0, 10**6, 50))  # a look at the clock every 50 seconds
    monkeypatch.setattr("examples.evaluation.__main__.time", argparse.Namespace(perf_counter=lambda: next(clock)))
    run_all(tmp_path / "out", "--budget", str(240 / 3600))
    assert calls == [("eagle", 1, 0), ("eagle", 2, 0)]  # 50 + 20 fit, 100 + 200 do not
    assert "The budget ends before cubes (finch, 0). The same command goes on from there." in capsys.readouterr().out

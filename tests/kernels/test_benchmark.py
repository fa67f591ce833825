"""The benchmarks of the operators: that every part runs, that nothing wrong is measured, and what they write."""

import ast
import csv
import importlib
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import fake_gpu

from subquad_kernels import delta_wkv, slot_memory, wkv


FOLDER = Path(__file__).parents[2] / "kernels" / "benchmarks"
SHARED = ("benchmark", "measuring")
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in SHARED)
CPU = ("--quick", "--device", "cpu")


@pytest.fixture(scope="module")
def modules():
    """Every script by its name, and what they share."""
    sys.path.insert(0, str(FOLDER))
    yield {name: importlib.import_module(name) for name in (*SHARED, *SCRIPTS)}
    sys.path.remove(str(FOLDER))
    for name in (*SHARED, *SCRIPTS):
        del sys.modules[name]


@pytest.fixture
def run(modules, monkeypatch, tmp_path):
    """Runs a script with the eager form of its operator, and returns the rows that it writes."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    plot = modules["measuring"].plot
    monkeypatch.setattr(modules["measuring"], "plot", lambda *how: plot(*how) if call.draws else None)

    def call(name, *options, code=0):
        arguments = [*CPU, "--out", str(tmp_path), *options]
        if code:
            with pytest.raises(SystemExit) as error:
                modules["benchmark"].main(kind_of(modules[name]), arguments)
            assert error.value.code == code
        else:
            modules["benchmark"].main(kind_of(modules[name]), arguments)
        with open(tmp_path / f"{name}.csv", newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    call.draws = False  # which takes a second
    return call


def kind_of(module):
    """The class of the cases that a script measures."""
    (kind,) = (
        x
        for x in vars(module).values()
        if isinstance(x, type) and x.__module__ == module.__name__ and "ours" in vars(x)
    )
    return kind


def changed(module, monkeypatch, change):
    """Replaces what a script calls as ours: `change(backend, inplace, inputs)` returns the inputs and a factor."""
    kind = kind_of(module)
    right = kind.ours

    def ours(self, backend, inplace=False, **inputs):
        inputs, factor = change(backend, inplace, inputs)
        found = right(self, backend, inplace, **inputs)
        return (found[0] * factor, *found[1:]) if isinstance(found, tuple) else found * factor

    monkeypatch.setattr(kind, "ours", ours)


def test_every_operator_has_a_benchmark():
    package = FOLDER.parent / "torch-ext" / "subquad_kernels"
    operators = {path.parent.name for path in package.glob("*/reference.py")}
    assert set(SCRIPTS) == operators | {"linear"}


@pytest.mark.parametrize("name", [*SHARED, *SCRIPTS])
def test_benchmarks_depend_on_the_kernels_alone(name):
    imported = set()
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module)
    roots = {module.partition(".")[0] for module in imported}
    assert roots <= {*sys.stdlib_module_names, *SHARED, *SCRIPTS, "torch", "tqdm", "matplotlib", "subquad_kernels"}


def without_scale(function):
    def call(r, k, v, w, u, *, scale, initial_state=None, output_final_state):
        assert scale == 1.0
        return function(r, k, v, w, u, initial_state)

    return call


def fla_slot_memory(q, k, v, s, g, *, scale, initial_state=None, output_final_state):
    assert scale == 1.0 and s.shape == g.shape
    if initial_state is not None:
        keys, values = initial_state
        initial_state = torch.cat((keys.mT, values), -1)
    out, state = slot_memory(q, k, v, g, initial_state)
    return out + 0 * s.sum(), (state[..., : k.shape[-1]].mT, state[..., k.shape[-1] :])


def fla_delta_wkv(r, w, k, v, a, b, *, scale, initial_state=None, output_final_state):
    assert scale == 1.0
    state = None if initial_state is None else initial_state.mT
    return delta_wkv(r, k, v, w, -a, -b / a, state)


EAGER = {"triton": "eager", "eager": "eager", "reference": "reference"}
# Stand for the modules of flash-linear-attention.
FLA = {
    "delta_wkv": SimpleNamespace(chunk_rwkv7=fla_delta_wkv, fused_recurrent_rwkv7=fla_delta_wkv),
    "wkv": SimpleNamespace(chunk_rwkv6=without_scale(wkv), fused_recurrent_rwkv6=without_scale(wkv)),
    "slot_memory": SimpleNamespace(chunk_gsa=fla_slot_memory, fused_recurrent_gsa=fla_slot_memory),
}


@pytest.mark.quick_cases("wkv", "token_shift")
@pytest.mark.parametrize("name", SCRIPTS)
def test_every_part_is_measured(name, modules, run, monkeypatch, tmp_path, capsys):
    if name in FLA:
        monkeypatch.setattr(modules[name], "load_fla", lambda module, device: FLA[name])
    rows = run(name)
    parts = {"check", "operator"} | ({"step"} if "step quick" in kind_of(modules[name]).sizes else set())
    assert {row["part"] for row in rows} == parts
    assert not [row["note"] for row in rows if row["note"].startswith(("failed", "out of memory"))]
    for row in rows:
        assert row["part"] == "check" or float(row["milliseconds"]) > 0
        assert torch.__version__ in row["versions"]
    ours = {row["what"].rpartition(" ")[2] for row in rows if row["implementation"] == "subquad"}
    assert ours >= {"forward", "forward+backward"}
    peers = {
        "delta_wkv": {"fla"},
        "wkv": {"fla", "FlashAttention"},
        "slot_memory": {"fla"},
        "split_ranker": {"plain", "plain loop", "plain whole"},
    }
    found = {row["implementation"] for row in rows if row["part"] != "check"}
    assert found >= peers.get(name, {"plain"})
    assert ("reference" in found) == ("step" in parts)
    if name in FLA:
        notes = [row["note"] for row in rows if row["implementation"] == "fla"]
        assert notes and all(float(note.partition("differs from ours by ")[2]) < 1e-5 for note in notes)
    report = json.loads((tmp_path / f"{name}.json").read_text())
    assert len(report["rows"]) == len(rows)
    assert report["versions"] in (tmp_path / f"{name}.md").read_text()
    assert "0 of" in capsys.readouterr().out


def test_a_figure_is_drawn_at_once_and_from_a_record(modules, run, tmp_path):
    pytest.importorskip("matplotlib")
    run.draws = True
    run("token_shift", "--parts", "operator")
    figure = tmp_path / "token_shift.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
    figure.unlink()
    modules["benchmark"].main(kind_of(modules["token_shift"]), [*CPU, "--plot", str(tmp_path / "token_shift.json")])
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.quick_cases("wkv", "token_shift")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_wrong_kernel_is_not_measured(name, modules, run, monkeypatch):
    changed(
        modules[name], monkeypatch, lambda backend, inplace, inputs: (inputs, 1 if backend == "reference" else 1.001)
    )
    assert {row["part"] for row in run(name, code=1)} == {"check"}


@pytest.mark.parametrize(
    "name",
    [
        "cema",
        "delta_wkv",
        "dynamic_mixing",
        "slot_memory",
        "static_mixing",
        "timestep_decay_norm",
        "wkv",
        "working_memory",
    ],
)
def test_what_should_work_in_place_must(name, modules, run, monkeypatch):
    """The right result in new memory is wrong."""

    def change(backend, inplace, inputs):
        return ({key: x.clone() for key, x in inputs.items()} if inplace else inputs), 1

    changed(modules[name], monkeypatch, change)
    (*_, row) = (row for row in run(name, "--parts", "check", code=1) if " in place) of" in row["note"])
    assert row["what"].startswith(name)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the kernels are compiled for a GPU")
def test_the_interpreter_checks_the_kernels(run, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    run("token_shift", "--parts", "check")
    assert "triton against the reference in float64: 0 of 4 cases wrong" in capsys.readouterr().out


def test_a_wrong_peer_is_not_measured(modules, run, monkeypatch):
    kind = kind_of(modules["timestep_decay_norm"])
    right = kind.plain
    monkeypatch.setattr(kind, "plain", lambda self, **inputs: right(self, **inputs) * 1.001)
    rows = run("timestep_decay_norm", "--parts", "operator")
    failed = {(row["what"], row["implementation"]) for row in rows if row["note"].startswith("failed")}
    assert failed == {(f"timestep_decay_norm {what}", "plain") for what in ("forward", "forward+backward")}
    run("timestep_decay_norm", "--parts", "check", code=1)


def test_a_row_that_fails_stops_nothing(modules, tmp_path):
    results = modules["measuring"].Results(tmp_path / "rows.csv", "cpu", 60, "versions")
    row = {"part": "operator", "what": "forward", "implementation": "fla", "length": 8}

    def fail(error):
        raise error

    assert not results.measure(row, lambda: fail(torch.OutOfMemoryError("17 GiB")))
    assert not results.measure(row, lambda: fail(ValueError("no\nsuch thing")))
    assert results.measure({**row, "implementation": "subquad"}, lambda: {"milliseconds": 2.0})
    assert results.failed == 0
    assert not results.measure({**row, "implementation": "subquad"}, lambda: fail(ValueError("wrong")))
    results.deadline = 0
    assert not results.measure(row, lambda: fail(AssertionError("too late")))
    assert (results.failed, results.skipped) == (1, 1)
    with open(tmp_path / "rows.csv", newline="", encoding="utf-8") as file:
        notes = [row["note"] for row in csv.DictReader(file)]
    assert notes == ["out of memory", "failed: ValueError: no", "", "failed: ValueError: wrong"]
    with pytest.raises(SystemExit):
        results.exit(1)
    results.bar.close()


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_part_runs_on_a_gpu(name, modules, run, monkeypatch, capsys):
    """The kernels are tested elsewhere: the eager form stands for them."""
    benchmark, kind = modules["benchmark"], kind_of(modules[name])
    right = kind.ours
    monkeypatch.setattr(
        kind, "ours", lambda self, backend, *how, **inputs: right(self, EAGER[backend], *how, **inputs)
    )
    if name in FLA:
        monkeypatch.setattr(modules[name], "load_fla", lambda module, device: FLA[name])

    def process(command, **how):
        printed = capsys.readouterr().out
        benchmark.main(kind, command[2:])
        found = capsys.readouterr().out
        print(printed)
        return SimpleNamespace(returncode=0, stdout=found, stderr="")

    monkeypatch.setattr(benchmark.subprocess, "run", process)
    if importlib.util.find_spec("triton"):
        driver = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: None))
        monkeypatch.setattr(importlib.import_module("triton").runtime, "driver", driver)
    with fake_gpu():
        rows = run(name, "--device", "cuda")
    failed = [row["note"] for row in rows if row["note"].startswith(("failed", "out of memory", "not done"))]
    assert [note for note in failed if "does not support backward on CPU" not in note] == []
    assert {row["part"] for row in rows} >= {"check", "operator", "first"}
    steps = {row["what"].rpartition(" step")[2] for row in rows if row["part"] == "step"}
    assert steps == ({"", ", graph"} if "step quick" in kind.sizes else set())
    ours = [row for row in rows if row["part"] == "step" and row["implementation"] == "subquad"]
    assert all("times torch.add" in row["note"] for row in ours if row["what"].endswith(" step"))
    found = {row["implementation"] for row in rows}
    assert ("eager" in found) == kind.has_kernels
    assert ("fla" in found) == (name in FLA)
    assert "flex_attention" in found or name != "chunk_attention"


def test_ours_is_measured_first_and_the_rest_later(modules, run, monkeypatch):
    measured = run("wkv", "--parts", "operator", "step", "--ours")
    assert {row["implementation"] for row in measured} == {"subquad"}
    rows = run("wkv", "--parts", "operator", "step", "--resume")
    assert rows[: len(measured)] == measured  # not again
    assert "subquad" not in {row["implementation"] for row in rows[len(measured) :]}
    assert rows == run("wkv", "--parts", "operator", "step", "--resume")
    together = [row["implementation"] == "subquad" for row in run("wkv", "--parts", "operator", "step")]
    assert together == sorted(together, reverse=True)
    assert len(together) == len(rows)


def test_what_failed_of_ours_is_tried_again(modules, tmp_path):
    measuring, path = modules["measuring"], tmp_path / "rows.csv"
    results = measuring.Results(path, "cpu", 60, "versions")
    row = {"part": "operator", "what": "forward", "length": 8}

    def fail():
        raise ValueError("no")

    for name, length in (("subquad", 8), ("fla", 8), ("subquad", 16)):
        results.measure({**row, "implementation": name, "length": length}, fail)
    results.rows[-1]["note"] += " " + measuring.LAST_ROW
    results.add({**row, "implementation": "plain", "milliseconds": 2.5})
    results.bar.close()
    again = measuring.Results(path, "cpu", 60, "versions", resumes=True)
    assert [(row["implementation"], row["length"]) for row in again.rows] == [
        ("fla", 8),
        ("subquad", 16),
        ("plain", 8),
    ]
    assert again.rows[-1]["milliseconds"] == 2.5 and again.rows[-1]["note"] is None
    assert again.measure({**row, "implementation": "subquad"}, lambda: {"milliseconds": 1.0})
    assert not again.measure({**row, "implementation": "plain"}, lambda: {"milliseconds": 1.0})
    again.bar.close()


def test_poison_is_seen(modules):
    assert modules["measuring"].poisoned(lambda: torch.empty(3).isnan().all())
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_first_call_is_one_of_a_new_process(run):
    (row,) = run("token_shift", "--parts", "first")
    assert (row["part"], row["implementation"]) == ("first", "subquad") and float(row["milliseconds"]) > 0


def test_a_peer_that_takes_too_long_or_fails(modules, tmp_path):
    """The rest is measured."""
    script = tmp_path / "script.py"
    script.write_text("import sys, time\nif 'subquad' in sys.argv: sys.exit('no such GPU')\ntime.sleep(60)")
    measuring, case = modules["measuring"], modules["wkv"].Wkv()
    options = measuring.make_parser("", ("check",), minutes=1).parse_args(CPU)
    results = measuring.Results(None, "cpu", 60, "versions")
    modules["benchmark"].measure_first_call(results, str(script), case, "fla", options, patience=0)
    modules["benchmark"].measure_first_call(results, str(script), case, "subquad", options)
    with measuring.within(0.1):
        results.measure({"part": "operator", "what": "forward", "implementation": "fla"}, lambda: time.sleep(60))
    notes = ["not done after 1 s", "failed: RuntimeError: no such GPU", "failed: TimeoutError: the time is up"]
    assert [row["note"] for row in results.rows] == notes
    assert results.failed == 1
    results.bar.close()


def test_targets(modules):
    def row(what, name, milliseconds):
        shape = {"batch": 8, "length": 2048}
        return {"part": "operator", "what": what, "implementation": name, "milliseconds": milliseconds, **shape}

    rows = [row("slot_memory first forward+backward", "subquad", 20100.0), row("slot_memory forward", "subquad", 0.5)]
    rows += [row("slot_memory forward", "fla", 1.0), row("slot_memory forward+backward", "subquad", 7.0)]
    rows += [row("slot_memory forward+backward", "fla", 10.0), row("slot_memory step", "subquad", 1.0)]
    targets = modules["slot_memory"].SlotMemory.targets
    judged_targets = modules["measuring"].judged_targets
    assert judged_targets(rows, targets) == [
        "targets",
        "slot_memory first forward+backward, 8 x 2048: 2.01e+04 ms, at most 20000: missed",
        "slot_memory forward, 8 x 2048: 2.00 times as fast as fla, at least 1.66667: met",
        "slot_memory forward+backward, 8 x 2048: 1.43 times as fast as fla, at least 1.66667: missed",
    ]
    rows[2] = {**rows[2], "milliseconds": None, "note": "failed: ValueError: no"}
    assert judged_targets(rows, targets)[2] == "slot_memory forward, 8 x 2048: no figure of fla"
    # The strictest target of a length counts.
    longer = (("slot_memory forward", "fla", 1, 1.0), ("slot_memory forward", "fla", 2048, 3.0))
    rows[2] = row("slot_memory forward", "fla", 1.0)
    assert judged_targets(rows, longer)[1].endswith("at least 3: missed")


def test_operations_are_counted(modules):
    make = modules["contextualizer"].Contextualizer
    assert make(context=4, length=4, queries=4, size=16).operations(False) == 2 * 2 * 16 * (1 + 2 + 3 + 4)
    assert make(context=4, length=4, queries=1, size=16).operations(False) == 2 * 2 * 16 * 4
    assert modules["static_mixing"].StaticMixing(length=4, size=16).operations(True) == 3 * 2 * 16 * 16
    # Half of the similarities, and the product with the rows.
    assert modules["dynamic_mixing"].DynamicMixing(length=4, size=16).operations(False) == 2 * 16 * (10 + 16)

"""The benchmark of WKV: that every part runs, and what it writes."""

import csv
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from subquad_kernels import wkv


@pytest.fixture
def benchmark(monkeypatch):
    folder = Path(__file__).parents[2] / "kernels" / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # the run sets them
    spec = importlib.util.spec_from_file_location("benchmark_of_wkv", folder / "wkv.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    yield module
    for name in ("measuring", "models"):
        sys.modules.pop(name, None)


def rows_of(folder):
    with open(folder / "wkv.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def without_scale(function):
    def call(r, k, v, w, u, *, scale, initial_state=None, output_final_state):
        assert scale == 1.0
        return function(r, k, v, w, u, initial_state)

    return call


def small_finch():
    from subquad import Rwkv6Config, Rwkv6ForCausalLM

    return Rwkv6ForCausalLM(Rwkv6Config(hidden_size=64, num_hidden_layers=1, vocab_size=50))


def test_every_part_is_measured(benchmark, tmp_path, monkeypatch, capsys):
    fla = SimpleNamespace(chunk_rwkv6=without_scale(wkv), fused_recurrent_rwkv6=without_scale(wkv))
    monkeypatch.setattr(benchmark, "load_fla", lambda device: fla)
    monkeypatch.setattr("models.finches", lambda quick, with_fla: {"subquad": small_finch, "fla": small_finch})
    benchmark.main(["--quick", "--device", "cpu", "--parts", *benchmark.PARTS, "--out", str(tmp_path)])
    rows = rows_of(tmp_path)
    assert {row["part"] for row in rows} == set(benchmark.PARTS)
    assert not [row["note"] for row in rows if row["note"].startswith(("failed", "out of memory"))]
    for row in rows:
        assert row["part"] == "check" or row["what"].startswith("difference") or float(row["milliseconds"]) > 0
        assert torch.__version__ in row["versions"]
    found = {(row["what"], row["implementation"]) for row in rows}
    both = ("forward", "forward+backward", "first forward+backward", "step", "prefill", "training", "generate")
    assert found >= {(what, name) for what in both for name in ("subquad", "fla")}
    assert found >= {("forward", "FlashAttention"), ("forward", "recurrence"), ("first generate", "subquad")}
    (agreement,) = (row["note"] for row in rows if row["what"] == "generate, not compiled" and row["batch"] == "1")
    assert agreement == "8 of 8 tokens as compiled"
    files = {"wkv.csv"}
    if importlib.util.find_spec("matplotlib"):
        files.add("wkv.png")
        assert (tmp_path / "wkv.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == files
    assert "fla" in capsys.readouterr().out


def test_a_wrong_kernel_is_not_measured(benchmark, tmp_path, monkeypatch):
    def wrong(*args, backend, **kwargs):
        out, state = wkv(*args, backend=backend, **kwargs)
        return (out if backend == "reference" else out * 1.001), state

    monkeypatch.setattr(benchmark, "wkv", wrong)
    with pytest.raises(SystemExit) as error:
        benchmark.main(["--quick", "--device", "cpu", "--parts", "check", "decode", "--out", str(tmp_path)])
    assert error.value.code == 1
    assert {row["part"] for row in rows_of(tmp_path)} == {"check"}


def test_a_row_that_fails_stops_nothing(benchmark, tmp_path, capsys):
    results = benchmark.Results(tmp_path / "wkv.csv", "cpu", 60, "versions")
    row = {"part": "operator", "what": "forward", "implementation": "fla", "length": 8}

    def fail(error):
        raise error

    assert not results.measure(row, lambda: fail(torch.OutOfMemoryError("17 GiB")))
    assert not results.measure(row, lambda: fail(ValueError("no\nsuch thing")))
    assert results.measure({**row, "implementation": "subquad"}, lambda: {"milliseconds": 2.0})
    results.deadline = 0
    assert not results.measure(row, lambda: fail(AssertionError("too late")))
    assert (results.failed, results.skipped) == (0, 1)
    assert [row["note"] for row in rows_of(tmp_path)] == ["out of memory", "failed: ValueError: no", ""]
    results.bar.close()


def test_poison_is_seen(benchmark):
    assert benchmark.poisoned(lambda: torch.empty(3).isnan().all())
    assert not torch.are_deterministic_algorithms_enabled()

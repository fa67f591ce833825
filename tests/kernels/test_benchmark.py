"""The benchmarks of WKV, Avey, Avey-B, Raven and Gecko: that every part runs, and what they write."""

import csv
import importlib.util
import itertools
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from subquad_kernels import wkv


pytestmark = pytest.mark.usefixtures("imports_are_no_garbage")  # every measurement of memory looks for garbage


def load(monkeypatch, script):
    folder = Path(__file__).parents[2] / "kernels" / "benchmarks"
    monkeypatch.syspath_prepend(folder)
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # the run sets them
    spec = importlib.util.spec_from_file_location(f"benchmark_of_{script}", folder / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    yield module
    for name in ("measuring", "models", "wkv", "avey", "raven", "gecko_operators"):
        sys.modules.pop(name, None)


@pytest.fixture
def benchmark(monkeypatch):
    yield from load(monkeypatch, "wkv")


@pytest.fixture
def avey(monkeypatch):
    yield from load(monkeypatch, "avey")


@pytest.fixture
def avey_b(monkeypatch):
    yield from load(monkeypatch, "avey_b")


@pytest.fixture
def raven(monkeypatch):
    yield from load(monkeypatch, "raven")


@pytest.fixture
def gecko(monkeypatch):
    yield from load(monkeypatch, "gecko")


def rows_of(folder, name="wkv.csv"):
    with open(folder / name, newline="", encoding="utf-8") as file:
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
    monkeypatch.setattr(benchmark, "load_fla", lambda module, device: fla)
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


# Avey.


def test_every_part_of_avey_is_measured(avey, tmp_path, capsys):
    avey.main(["--quick", "--device", "cpu", "--out", str(tmp_path)])
    rows = rows_of(tmp_path, "avey.csv")
    assert {row["part"] for row in rows} == set(avey.PARTS)
    assert not [row["note"] for row in rows if row["note"].startswith(("failed", "out of memory"))]
    for row in rows:
        assert row["part"] == "check" or float(row["milliseconds"]) >= 0
        assert torch.__version__ in row["versions"]
    found = {(row["what"], row["implementation"]) for row in rows}
    both = ("contextualizer 16 forward", "contextualizer 16 fwd+bwd", "contextualizer 16 last 1", "maxsim one token")
    both += ("training", "one more token", "first token", "all tokens, without head")
    assert found >= {(what, name) for what in both for name in ("subquad", "plain")}
    assert found >= {("maxsim all splits", "plain loop"), ("maxsim all splits", "plain whole")}
    losses = {row["note"].partition("loss ")[2].split(",")[0] for row in rows if row["what"] == "training"}
    assert len(losses) == 1  # both begin with the same weights
    assert {path.name for path in tmp_path.iterdir()} == {"avey.csv", "avey.json", "avey.md"}
    report = json.loads((tmp_path / "avey.json").read_text())
    assert len(report["rows"]) == len(rows)
    assert report["versions"] in (tmp_path / "avey.md").read_text()
    assert "ranker's share" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["contextualizer", "maxsim"])
def test_a_wrong_kernel_of_avey_is_not_measured(avey, tmp_path, monkeypatch, wrong):
    right = getattr(avey, wrong)

    def other(*args, backend="auto", **kwargs):
        out = right(*args, backend=backend, **kwargs)
        return out if backend == "reference" else out * 1.001

    monkeypatch.setattr(avey, wrong, other)
    with pytest.raises(SystemExit) as error:
        avey.main(["--quick", "--device", "cpu", "--parts", "check", "decode", "--out", str(tmp_path)])
    assert error.value.code == 1
    assert {row["part"] for row in rows_of(tmp_path, "avey.csv")} == {"check"}


@torch.no_grad()
def test_plain_avey_is_the_published_model(avey):
    from subquad import AveyConfig

    path = Path(__file__).parents[1] / "golden" / "avey_released.safetensors"
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        config = AveyConfig.from_dict(json.loads(file.metadata()["config"]))
    plain = avey.PlainAvey(config)
    plain.load_state_dict({name[8:]: x for name, x in tensors.items() if name.startswith("weights.")})
    ids, expected = tensors["input_ids"], tensors["logits"]
    torch.testing.assert_close(plain.hidden(ids) @ plain.wte.weight.T, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(plain.next_token(ids), expected[:, -1:], atol=1e-4, rtol=0)


def test_operations_are_counted(avey):
    from subquad import AveyConfig

    config = AveyConfig(vocab_size=64, d_embed=32, n_blocks=1, chunk_size=8, k=2)
    width, half = 32, 64 // 2
    weights = width * 128 + (128 - half) * width
    # One split, behind eight rows that every window shares.
    places = sum(range(9, 17))
    assert avey.products(config, 8) == (2 * weights * 8 + 4 * half * places + 2 * 8 * width * 64, 0)
    assert avey.products(config, 24)[1] == 2 * width * 8 * 8 * (1 + 2)
    assert avey.products(config, 24, last_only=True)[1] == 2 * width * 8 * 8 * 2
    assert avey.mixing(4, 4, 16) == 2 * 2 * 16 * (1 + 2 + 3 + 4)
    assert avey.mixing(4, 1, 16) == 2 * 2 * 16 * 4


# Avey-B.


def test_every_part_of_avey_b_is_measured(avey_b, tmp_path, capsys):
    avey_b.main(["--quick", "--device", "cpu", "--out", str(tmp_path)])
    rows = rows_of(tmp_path, "avey_b.csv")
    assert {row["part"] for row in rows} == set(avey_b.PARTS)
    assert not [row["note"] for row in rows if row["note"].startswith(("failed", "out of memory"))]
    for row in rows:
        assert row["part"] == "check" or float(row["milliseconds"]) > 0
    found = {(row["what"], row["implementation"]) for row in rows}
    both = ("static 16 forward", "static 16 fwd+bwd", "dynamic 16 forward", "dynamic 16 fwd+bwd")
    both += ("static layer 32", "dynamic layer 32", "encoder 32", "training")
    assert found >= {(what, name) for what in both for name in ("subquad", "plain")}
    assert {row["length"] for row in rows if row["implementation"] == "ModernBERT"} == {"8", "40"}
    losses = {row["note"].partition("loss ")[2].split(",")[0] for row in rows if row["what"] == "training"}
    assert len(losses) == 1  # both begin with the same weights
    files = {"avey_b.csv", "avey_b.json", "avey_b.md"}
    if importlib.util.find_spec("matplotlib"):
        files.add("avey_b.png")
        (tmp_path / "avey_b.png").unlink()
        avey_b.main(["--quick", "--device", "cpu", "--plot", str(tmp_path / "avey_b.json")])
        assert (tmp_path / "avey_b.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == files
    printed = capsys.readouterr().out
    assert "ms in all" in printed and "power laws" in printed


@pytest.mark.parametrize("wrong", ["dynamic_mixing", "static_mixing", "inplace"])
def test_a_wrong_kernel_of_avey_b_is_not_measured(avey_b, tmp_path, monkeypatch, wrong):
    name = "static_mixing" if wrong == "inplace" else wrong
    right = getattr(avey_b, name)

    def other(*args, inplace=False, backend="auto", **kwargs):
        if wrong == "inplace":  # the right result, in a place of its own
            return right(*args, backend=backend, **kwargs)
        out = right(*args, inplace=inplace, backend=backend, **kwargs)
        return out if backend == "reference" else out * 1.001

    monkeypatch.setattr(avey_b, name, other)
    with pytest.raises(SystemExit) as error:
        avey_b.main(["--quick", "--device", "cpu", "--parts", "check", "encode", "--out", str(tmp_path)])
    assert error.value.code == 1
    assert {row["part"] for row in rows_of(tmp_path, "avey_b.csv")} == {"check"}


@torch.no_grad()
@pytest.mark.parametrize("variant", ["hub", "paper"])
def test_plain_avey_b_is_the_published_model(avey_b, variant):
    from subquad import AveyBConfig

    with safe_open(Path(__file__).parents[1] / "golden" / f"avey_b_{variant}.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        fields = json.loads(file.metadata()["config"])
    plain = avey_b.PlainAveyB(AveyBConfig(**fields, **(avey_b.PAPER if variant == "paper" else {})))
    weights = {}
    for name, x in tensors.items():
        if name.startswith("weights."):
            name = name.removeprefix("weights.").removeprefix("base_avey_model.").replace("embeddings", "embed")
            weights[name.replace("ctxt.", "").replace("contextualizer.", "").replace("rms_norm", "norm")] = x
    plain.load_state_dict(weights)
    torch.testing.assert_close(plain.logits(tensors["input_ids"]), tensors["logits"], atol=1e-4, rtol=0)


def encoded(implementation, length, tokens_per_second, batch=8):
    milliseconds = batch * length / tokens_per_second * 1e3
    row = {"part": "encode", "implementation": implementation, "batch": batch, "length": length}
    return {**row, "milliseconds": milliseconds, "tokens_per_second": tokens_per_second}


def test_targets_and_power_laws(avey_b):
    rows = [encoded("subquad", n, 300 * n**-0.5) for n in (128, 512, 2048)]
    rows += [encoded("subquad", 32768, 40.0), encoded("ModernBERT", 128, 20.0), encoded("plain, compiled", 128, 30.0)]
    rows += [
        encoded("subquad", 98304, 35.0),
        {"part": "encode", "implementation": "ModernBERT", "note": "out of memory"},
    ]
    rows += [
        encoded("ModernBERT", 32768, 20.0),
        encoded("subquad", 98304, 34.0, 1),
        encoded("ModernBERT", 98304, 8.5, 1),
    ]
    rows += [encoded("subquad, graph", 128, 60.0), encoded("ModernBERT, graph", 128, 61.0)]
    lines = avey_b.targets(rows, 8)
    assert lines[1] == (
        "128 tokens: 1.33 times ModernBERT, at least 1: met; 0.88 times plain, compiled, at least 1.3: missed"
    )
    assert "32,768 tokens: 2.00 times ModernBERT, at least 3.4: missed; no figure of plain, compiled" in lines
    assert "98,304 tokens: 4.00 times ModernBERT (batch 1), at least 3.4: met; no figure of plain, compiled" in lines
    assert lines[-1] == "128 tokens: 0.98 times ModernBERT, graph, at least 1: missed"
    (line,) = avey_b.power_laws(rows[:3], 8)[1:]
    assert line == "subquad: from 128 tokens on alpha 0.50, beta 1.50; over all alpha 0.50, beta 1.50"


def test_operations_of_avey_b_are_counted(avey_b):
    from subquad import AveyBConfig

    config = AveyBConfig(vocab_size=64, d_embed=32, n_layers=2, chunk_size=8, k=1)
    layers = 2 * 2 * (32 * 128 + (128 - 32) * 32) * 8 + 2 * 8 * 8 * 32 * 2 + 8 * 9 * 32
    compressor = 2 * 8 * 8 * 32
    assert avey_b.products(config, 8) == (layers + compressor, 0)
    assert avey_b.products(config, 3) == avey_b.products(config, 8)
    ranker = 2 * 8 * 8 * 32 * (1 + 2)
    assert avey_b.products(config, 24) == (3 * layers + 5 * compressor + ranker, ranker)


# Raven.


FLA = """
import torch

from subquad_kernels import slot_memory

def operator(q, k, v, s, g, *, scale, initial_state=None, output_final_state):
    assert scale == 1.0 and s.shape == g.shape
    if initial_state is not None:
        keys, values = initial_state
        initial_state = torch.cat((keys.mT, values), -1)
    out, state = slot_memory(q, k, v, g, initial_state)
    return out + 0 * s.sum(), (state[..., :k.shape[-1]].mT, state[..., k.shape[-1]:])

chunk_gsa = fused_recurrent_gsa = operator
"""


@pytest.fixture
def fla(tmp_path, monkeypatch):
    """Stands for flash-linear-attention, in the processes that a benchmark starts too."""
    folder = tmp_path / "site"
    for module, text in {"ops/gsa": FLA, "models/raven": "from subquad import RavenConfig, RavenForCausalLM"}.items():
        path = folder / "fla" / f"{module}.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))))
    yield importlib.import_module("fla.ops.gsa")
    for name in [name for name in sys.modules if name.split(".")[0] == "fla"]:
        del sys.modules[name]


def test_every_part_of_raven_is_measured(raven, fla, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(raven, "load_fla", lambda module, device: importlib.import_module(module))
    raven.main(["--quick", "--device", "cpu", "--parts", *raven.PARTS, "--out", str(tmp_path / "out")])
    rows = rows_of(tmp_path / "out", "raven.csv")
    assert {row["part"] for row in rows} == set(raven.PARTS)
    assert not [row["note"] for row in rows if row["note"].startswith(("failed", "out of memory"))]
    found = {(row["what"], row["implementation"]) for row in rows}
    both = ("first forward+backward", "forward", "forward+backward", "against float64", "step", "prefill")
    assert found >= {(what, name) for what in both for name in ("subquad", "fla")}
    assert found >= {("generate, not compiled", "subquad"), ("generate", "fla")}
    assert found >= {("router forward+backward", name) for name in ("subquad", "torch")}
    errors = [row["note"].split()[2:] for row in rows if row["what"] == "against float64"]
    assert len(errors) == 2 and all(float(x.rstrip(",")) < 1e-5 for row in errors for x in row[1::2])
    (same,) = (row["note"] for row in rows if row["implementation"] == "logits")
    assert same == "those of fla differ by 0.0e+00"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"raven.csv", "raven.json", "raven.md"}
    assert "fla" in capsys.readouterr().out


def test_raven_beside_the_recurrence(raven, tmp_path):
    raven.main(["--quick", "--device", "cpu", "--parts", "operator", "decode", "--out", str(tmp_path)])
    rows = rows_of(tmp_path, "raven.csv")
    assert not [row["note"] for row in rows if row["note"].startswith(("failed", "out of memory"))]
    found = {(row["what"], row["implementation"]) for row in rows}
    assert found >= {(what, name) for what in ("forward", "step") for name in ("subquad", "recurrence")}


@pytest.mark.parametrize("wrong", ["slot_memory", "slot_routing", "inplace"])
def test_a_wrong_kernel_of_raven_is_not_measured(raven, tmp_path, monkeypatch, wrong):
    name = "slot_memory" if wrong == "inplace" else wrong
    right = getattr(raven, name)

    def other(*args, backend="auto", **kwargs):
        if wrong == "inplace":  # the right result, in a place of its own
            return right(*args, backend=backend, **{**kwargs, "inplace": False})
        results = right(*args, backend=backend, **kwargs)
        if backend == "reference":
            return results
        return results * 1.001 if wrong == "slot_routing" else (results[0] * 1.001, results[1])

    monkeypatch.setattr(raven, name, other)
    with pytest.raises(SystemExit) as error:
        raven.main(["--quick", "--device", "cpu", "--parts", "check", "decode", "--out", str(tmp_path)])
    assert error.value.code == 1
    assert {row["part"] for row in rows_of(tmp_path, "raven.csv")} == {"check"}


def test_a_peer_that_takes_too_long_or_fails(raven, tmp_path, monkeypatch):
    """The rest is measured."""
    script = tmp_path / "script.py"
    script.write_text("import sys, time\nif 'subquad' in sys.argv: sys.exit('no such GPU')\ntime.sleep(60)")
    monkeypatch.setattr(raven, "__file__", str(script))
    monkeypatch.setattr(raven, "PATIENCE", 0)
    options = raven.parse(["--quick", "--device", "cpu"])
    results = raven.Results(None, "cpu", 60, "versions")
    raven.measure_first_call(results, "fla", options)
    monkeypatch.setattr(raven, "PATIENCE", 60)
    raven.measure_first_call(results, "subquad", options)
    with raven.within(0.1):
        results.measure({"part": "operator", "what": "forward", "implementation": "fla"}, lambda: time.sleep(60))
    notes = ["not done after 1 s", "failed: RuntimeError: no such GPU", "failed: TimeoutError: the time is up"]
    assert [row["note"] for row in results.rows] == notes
    assert results.failed == 1
    results.bar.close()


def test_targets_of_raven(raven):
    def row(part, what, name, milliseconds):
        shape = {"batch": 8, "length": 2048}
        return {"part": part, "what": what, "implementation": name, "milliseconds": milliseconds, **shape}

    rows = [row("first", "first forward+backward", "subquad", 20100.0), row("operator", "forward", "subquad", 0.5)]
    rows += [row("operator", "forward", "fla", 1.0), row("operator", "forward+backward", "subquad", 7.0)]
    rows += [row("operator", "forward+backward", "fla", 10.0), row("models", "generate", "subquad", 10.0)]
    rows += [row("models", "generate", "fla", 100.0), row("models", "generate, not compiled", "subquad", 50.0)]
    assert raven.targets(rows) == [
        "targets on an H200",
        "first forward+backward, 8 x 2048: 20.1 s, at most 20: missed",
        "forward, 8 x 2048: 0.50 of fla's time, at most 0.6: met",
        "forward+backward, 8 x 2048: 0.70 of fla's time, at most 0.6: missed",
        "generate, 8 x 2048: 10.0 times fla's tokens/s, at least 10: met",
    ]
    rows[2] = {**rows[2], "milliseconds": None, "note": "failed: ValueError: no"}
    assert raven.targets(rows)[2] == "forward, 8 x 2048: no figure of fla"


# Gecko.


def test_every_part_of_gecko_is_measured(gecko, tmp_path, capsys):
    gecko.main(["--quick", "--device", "cpu", "--out", str(tmp_path)])
    rows = rows_of(tmp_path, "gecko.csv")
    assert {row["part"] for row in rows} == set(gecko.PARTS)
    assert not [row["note"] for row in rows if row["note"].startswith(("failed", "out of memory"))]
    assert all(row["part"] == "check" or float(row["milliseconds"]) > 0 for row in rows)
    found = {(row["what"], row["implementation"]) for row in rows}
    for operator, name in itertools.product(gecko.OPERATORS, ("subquad", "plain")):
        assert found >= {(f"{operator} {what}", name) for what in ("forward", "forward+backward", "step")}
    assert found >= {(what, "subquad") for what in ("memory step, absorbs", "training", "training, checkpointed")}
    states = {}
    for row in rows:
        if row["note"].startswith("state"):
            states.setdefault((row["part"], row["batch"]), set()).add(row["note"])
    assert [len(notes) for notes in states.values()] == [1, 1]  # however long the text
    ends = [int(row["length"]) for row in rows if row["what"] == "long text, up to"]
    assert ends == list(range(64, 513, 64))
    assert {path.name for path in tmp_path.iterdir()} == {"gecko.csv", "gecko.json", "gecko.md"}
    assert "0 of 13 cases wrong" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["norm", "cema", "attention", "memory", "inplace"])
def test_a_wrong_kernel_of_gecko_is_not_measured(gecko, tmp_path, monkeypatch, wrong):
    right = gecko.ours

    def other(operator, sizes, backend, **inputs):
        if wrong == "inplace" and backend != "reference":  # the right result, in a place of its own
            inputs = {name: x.clone() for name, x in inputs.items()}
        results = right(operator, sizes, backend, **inputs)
        return results if backend == "reference" or operator != wrong else (results[0] * 1.001, *results[1:])

    monkeypatch.setattr(gecko, "ours", other)
    with pytest.raises(SystemExit) as error:
        gecko.main(["--quick", "--device", "cpu", "--parts", "check", "decode", "--out", str(tmp_path)])
    assert error.value.code == 1
    assert {row["part"] for row in rows_of(tmp_path, "gecko.csv")} == {"check"}


def test_a_wrong_peer_of_gecko_is_not_measured(gecko, tmp_path, monkeypatch):
    right = gecko.PLAIN_FORMS["norm"]
    monkeypatch.setitem(gecko.PLAIN_FORMS, "norm", lambda *args, **inputs: right(*args, **inputs) * 1.001)
    gecko.main(["--quick", "--device", "cpu", "--parts", "operator", "--out", str(tmp_path)])
    rows = rows_of(tmp_path, "gecko.csv")
    failed = {(row["what"], row["implementation"]) for row in rows if row["note"].startswith("failed")}
    assert failed == {(f"norm {what}", "plain") for what in ("forward", "forward+backward")}
    with pytest.raises(SystemExit):
        gecko.main(["--quick", "--device", "cpu", "--parts", "check", "--out", str(tmp_path)])

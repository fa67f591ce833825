"""The benchmark of whole models: that every part runs, that what it compares with is as published, and its numbers."""

import csv
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import fake_gpu
from safetensors import safe_open

from subquad import (
    AveyBConfig,
    AveyConfig,
    RavenConfig,
    RavenForCausalLM,
    Rwkv6Config,
    Rwkv6ForCausalLM,
    Rwkv7Config,
    Rwkv7ForCausalLM,
)


ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "benchmarks", ROOT / "kernels" / "benchmarks")
GOLDEN = ROOT / "tests" / "golden"
CPU = ("--quick", "--device", "cpu")


@pytest.fixture(scope="module")
def models():
    """The script, without the modules that it takes from the benchmarks of the kernels once the tests are over."""
    before = set(sys.modules)
    path = sys.path[:]
    sys.path[:0] = map(str, FOLDERS)
    yield importlib.import_module("models")
    sys.path[:] = path
    own = {path.stem for folder in FOLDERS for path in folder.glob("*.py")}
    for name in own & (set(sys.modules) - before):
        del sys.modules[name]


@pytest.fixture
def examples(models, monkeypatch):
    """Lets scripts import the examples."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    yield
    for name in {path.stem for path in (ROOT / "examples").glob("*.py")}:
        sys.modules.pop(name, None)


@pytest.fixture
def quantised(examples):
    return importlib.import_module("quantised")


@pytest.fixture
def adapters(examples):
    return importlib.import_module("adapters")


@pytest.fixture
def startup(models):
    return importlib.import_module("startup")


@pytest.fixture
def cpu(models):
    return importlib.import_module("cpu")


@pytest.fixture
def peers(models):
    return sys.modules["peers"]


@pytest.fixture
def run(models, monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules["measuring"], "plot", lambda *arguments: None)

    def call(*options):
        try:
            models.main([*CPU, "--out", str(tmp_path), *options])
        finally:
            with open(tmp_path / "models.csv", newline="", encoding="utf-8") as file:
                call.rows = list(csv.DictReader(file))
        return call.rows

    return call


def theirs(config_class, model_class):
    """Stands for a module of flash-linear-attention; ours does not have `expand_k` of Finch."""
    renamed = {"num_heads": "num_attention_heads"} if config_class is Rwkv6Config else {}

    def config(expand_k=1.0, **fields):
        return config_class(**{name: x for name, x in fields.items() if name not in renamed})

    names = (kind.__name__.replace("Rwkv", "RWKV") for kind in (config_class, model_class))
    return SimpleNamespace(**dict(zip(names, (config, model_class), strict=True)))


@pytest.fixture
def fla(peers, monkeypatch):
    modules = {
        "rwkv6": theirs(Rwkv6Config, Rwkv6ForCausalLM),
        "rwkv7": theirs(Rwkv7Config, Rwkv7ForCausalLM),
        "raven": theirs(RavenConfig, RavenForCausalLM),
    }
    monkeypatch.setattr(peers, "load_fla", lambda module, device: modules[module.rpartition(".")[2]])


@pytest.mark.thorough
def test_every_part_of_every_model_is_measured(models, run, fla, tmp_path, capsys):
    names = [*models.MODELS]
    parts = set(models.PARTS) - {"profile"}
    rows = run("--models", *names, "--parts", *parts)
    assert {row["part"] for row in rows} == {*parts, "made"}
    assert not [row["note"] for row in rows if row["note"].startswith(("failed", "out of memory"))]
    assert all(row["part"] == "check" or float(row["milliseconds"]) > 0 for row in rows)
    found = {(row["what"], row["implementation"]) for row in rows}
    for name in names:
        assert (f"{name} all tokens", "subquad") in found
    for name in set(names) - {"avey-b"}:
        whats = ("first token", "one more token", "one more token, static cache", "generate", "long text, up to")
        assert found >= {(f"{name} {what}", "subquad") for what in whats}
    for name in models.MODELS:
        assert found >= {(f"{name} {what}", "subquad") for what in ("training", "training, checkpointed")}
    beside = {
        "plain": ("avey first token", "avey all tokens", "avey one more token", "avey training", "avey-b all tokens"),
        "fla": ("finch first token", "finch generate", "goose training", "raven first token", "raven generate"),
        "ModernBERT": ("avey-b all tokens",),
        "stepping": ("eagle first token", "finch first token", "goose first token"),
    }
    assert found >= {(what, name) for name, whats in beside.items() for what in whats}
    for model in ("avey", "avey-b"):
        notes = (row["note"] for row in rows if row["what"] == f"{model} training")
        assert len({note.partition("loss ")[2].split(",")[0] for note in notes}) == 1  # the same weights
    states = {}
    for row in rows:
        if row["note"].startswith("state"):
            states.setdefault((row["what"].split()[0], row["part"], row["batch"]), set()).add(row["note"])
    constant = {name for name, *_ in states if name != "avey"}
    assert constant == set(names) - {"avey", "avey-b"}
    assert all(len(notes) == 1 for (name, *_), notes in states.items() if name in constant)  # at every length
    for name in constant:
        ends = [int(row["length"]) for row in rows if row["what"] == f"{name} long text, up to"]
        assert ends == list(range(64, 513, 64))
    assert {path.name for path in tmp_path.iterdir()} == {"models.csv", "models.json", "models.md"}
    printed = capsys.readouterr().out
    assert "0 of 9 cases wrong" in printed and "latency as N^beta" in printed


@pytest.mark.thorough
def test_every_part_runs_on_a_gpu(models, run, fla):
    parts = set(models.PARTS) - {"check", "long"}  # which are the same on a CPU
    with fake_gpu():
        rows = run("--models", *models.MODELS, "--parts", *parts, "--device", "cuda")
    assert {row["part"] for row in rows} == {*parts, "made"}
    assert not [row["note"] for row in rows if row["note"].startswith(("failed", "out of memory"))]
    assert {row["dtype"] for row in rows} == {"bfloat16"}
    found = {(row["what"], row["implementation"]) for row in rows}
    for what in ("finch first generate", "gecko generate, not compiled", "avey training, compiled"):
        assert (what, "subquad") in found
    assert found >= {("avey-b all tokens, graph", "ModernBERT"), ("avey-b all tokens", "plain, compiled")}


def test_trained_models_are_measured_and_profiled(run):
    rows = run("--models", "finch-abc", "avey-b-abc", "--parts", "read", "profile")
    found = {row["what"]: row for row in rows if row["part"] != "made"}
    assert found.keys() == {
        *("finch-abc first token", "finch-abc all tokens", "finch-abc profile of all tokens"),
        *("avey-b-abc all tokens", "avey-b-abc profile of all tokens"),
    }
    assert " ms (" in found["finch-abc profile of all tokens"]["note"]


def test_static_caches_write_the_same(models, run, monkeypatch):
    monkeypatch.setitem(models.MODELS["finch"].quick, "num_hidden_layers", 1)
    rows = run("--models", "finch", "--parts", "generate", "--compile")
    notes = {row["what"]: row["note"] for row in rows if row["implementation"] == "subquad"}
    assert notes["finch generate, not compiled"] == "16 of 16 tokens as compiled"
    assert {"finch first generate", "finch generate"} <= notes.keys()


def test_the_package_rwkv_computes_the_same(models, peers):
    pytest.importorskip("rwkv")
    options = SimpleNamespace(sizes="quick", quick=True, preset=None, device="cpu", dtype=torch.float32)
    for name in ("eagle", "finch", "goose"):
        ours = models.make_ours(name, options)
        package, ids = peers.rwkv(ours.model), ours.ids(1, 20)
        with torch.no_grad():
            torch.testing.assert_close(package.first_token(ids), ours.first_token(ids), atol=1e-4, rtol=1e-4)
            assert torch.equal(package.generate(ids, 8), ours.generate(ids, 8))


def test_a_wrong_model_is_not_measured(models, run, monkeypatch):
    right = models.Ours.logits
    monkeypatch.setattr(models.Ours, "logits", lambda self, ids, **how: right(self, ids, **how) * 1.01)
    with pytest.raises(SystemExit) as error:
        run("--models", "avey-b", "--parts", "check", "read")
    assert error.value.code == 1
    assert {row["part"] for row in run.rows} == {"check"}


@pytest.mark.fast
def test_random_tokens_are_not_special(models):
    options = SimpleNamespace(sizes="quick", quick=True, preset=None, device="cpu", dtype=torch.float32)
    ours = models.make_ours("gecko", options)
    ours = models.Ours("gecko", ours.model, options)
    special = {ours.config.bos_token_id, ours.config.eos_token_id, 0}
    assert not special & set(ours.ids(4, 500).flatten().tolist())


@torch.no_grad()
def test_plain_avey_is_the_published_model(peers):
    with safe_open(GOLDEN / "avey_released.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        config = AveyConfig.from_dict(json.loads(file.metadata()["config"]))
    plain = peers.PlainAvey(config)
    plain.load_state_dict({name[8:]: x for name, x in tensors.items() if name.startswith("weights.")})
    ids, expected = tensors["input_ids"], tensors["logits"]
    torch.testing.assert_close(plain.logits(ids), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(plain.first_token(ids), expected[:, -1:], atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("variant", ["hub", "paper"])
def test_plain_avey_b_is_the_published_model(models, peers, variant):
    with safe_open(GOLDEN / f"avey_b_{variant}.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        fields = json.loads(file.metadata()["config"])
    (paper,) = models.MODELS["avey-b"].variants
    plain = peers.PlainAveyB(AveyBConfig(**fields, **(paper if variant == "paper" else {})))
    weights = {}
    for name, x in tensors.items():
        if name.startswith("weights."):
            name = name.removeprefix("weights.").removeprefix("base_avey_model.").replace("embeddings", "embed")
            weights[name.replace("ctxt.", "").replace("contextualizer.", "").replace("rms_norm", "norm")] = x
    plain.load_state_dict(weights)
    torch.testing.assert_close(plain.logits(tensors["input_ids"]), tensors["logits"], atol=1e-4, rtol=0)


@pytest.mark.fast
def test_operations_are_counted(peers):
    config = AveyConfig(vocab_size=64, d_embed=32, n_blocks=1, chunk_size=8, k=2)
    width, half = 32, 64 // 2
    weights = width * 128 + (128 - half) * width
    # One split, after eight rows that every window shares.
    pairs = sum(range(9, 17))
    assert peers.avey_products(config, 8) == (2 * weights * 8 + 4 * half * pairs + 2 * 8 * width * 64, 0)
    assert peers.avey_products(config, 24)[1] == 2 * width * 8 * 8 * (1 + 2)
    assert peers.avey_products(config, 24, last_only=True)[1] == 2 * width * 8 * 8 * 2

    config = AveyBConfig(vocab_size=64, d_embed=32, n_layers=2, chunk_size=8, k=1)
    layers = 2 * 2 * (32 * 128 + (128 - 32) * 32) * 8 + 2 * 8 * 8 * 32 * 2 + 8 * 9 * 32
    compressor, head = 2 * 8 * 8 * 32, 2 * 32 * 64
    assert peers.avey_b_products(config, 8) == (layers + compressor + 8 * head, 0)
    assert peers.avey_b_products(config, 3) == (layers + compressor + 3 * head, 0)
    ranker = 2 * 8 * 8 * 32 * (1 + 2)
    assert peers.avey_b_products(config, 24) == (3 * layers + 5 * compressor + ranker + 24 * head, ranker)


def encoded(implementation, length, tokens_per_second, batch=8):
    milliseconds = batch * length / tokens_per_second * 1e3
    row = {"part": "read", "what": "avey-b all tokens", "implementation": implementation, "batch": batch}
    return {**row, "length": length, "milliseconds": milliseconds, "tokens_per_second": tokens_per_second}


def test_power_laws_and_targets(models):
    rows = [encoded("subquad", n, 300 * n**-0.5) for n in (128, 512, 2048)]
    (line,) = models.power_laws(rows)[1:]
    assert line == (
        "avey-b all tokens, subquad, batch 8: from 128 tokens on alpha 0.50, beta 1.50; over all alpha 0.50, beta 1.50"
    )
    rows += [encoded("subquad", 32768, 40.0), encoded("ModernBERT", 128, 20.0), encoded("ModernBERT", 32768, 20.0)]
    lines = models.judged_targets(rows, models.MODELS["avey-b"].targets)
    assert "avey-b all tokens, 8 x 128: 1.33 times as fast as ModernBERT, at least 1: met" in lines
    assert "avey-b all tokens, 8 x 32768: 2.00 times as fast as ModernBERT, at least 3.4: missed" in lines
    assert "avey-b all tokens, 8 x 128: no figure of plain, compiled" in lines


def test_finch_is_measured_on_a_cpu(cpu, tmp_path, capsys):
    names = ["subquad float32", "subquad bfloat16", "subquad int8", "subquad int4", "rwkv fp32"]
    cpu.main(["--quick", "--out", str(tmp_path), "--implementations", *names])
    rows = json.loads((tmp_path / "cpu.json").read_text())["rows"]
    whats = {row["what"] for row in rows if row["implementation"] == "subquad int8"}
    calls = ("next token, 1 text", "next token, 8 texts", "next token, 32 texts", "prompt of 32")
    assert whats == {"logits"} | {f"{what}, {clock}" for what in calls for clock in ("CPU", "wall")}
    assert all(row["milliseconds"] > 0 for row in rows if row["part"] != "error")
    errors = {row["implementation"]: float(row["note"].split()[1]) for row in rows if row["part"] == "error"}
    assert list(errors) == names and errors["subquad float32"] == 0 < errors["rwkv fp32"] < 1e-4
    assert 1e-3 < errors["subquad int8"] < 0.2 and errors["subquad int8"] < errors["subquad int4"] < 0.5
    assert all(f"| {name} |" in capsys.readouterr().out for name in names[:1])


def test_turns_begin_with_the_same_text(cpu):
    read = []

    def runner(name):
        return cpu.Runner(lambda ids: read.append((name, tuple(ids.shape))), lambda: read.append((name, "new")), 1)

    cpu.take_turns({name: runner(name) for name in "ab"}, 2, 1, rounds=2, group=1, vocabulary=9)
    first = [("new"), (2, cpu.BEFORE), (2, 1)]
    assert [what for name, what in read if name == "a"] == [*first, (2, 1), (2, 1)]
    assert "".join(name for name, _ in read) == "aaabbbabab"
    read.clear()
    cpu.take_turns({"a": runner("a")}, 1, 8, rounds=1, group=1, vocabulary=9)
    assert [what for _, what in read] == ["new", (1, 8), "new", (1, 8)]


def test_llama_cpp_is_left_out_where_it_cannot_be_compiled(cpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    cpu.main(["--quick", "--parts", "one", "--implementations", "subquad float32", "llama.cpp F32"])
    printed = capsys.readouterr().out
    assert "llama.cpp is left out: there are no compilers of C and C++" in printed
    assert "| subquad float32 |" in printed and "| llama.cpp F32 |" not in printed


@pytest.mark.thorough
def test_the_start_is_measured(startup, tmp_path):
    startup.main(["--quick", "--out", str(tmp_path)])
    rows = {row["what"]: row for row in json.loads((tmp_path / "startup.json").read_text())["rows"]}
    assert rows["import torch"]["MiB"] < rows["subquad generate: ready"]["MiB"]
    ready, first = (rows[f"subquad generate: {moment}"]["milliseconds"] for moment in ("ready", "first token"))
    assert 0 < ready < first


@pytest.mark.thorough
def test_the_loss_of_int8_is_measured(quantised, tmp_path):
    quantised.main(["--quick", "--models", "finch-abc", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "quantised.json").read_text())["rows"]
    errors = {row["dtype"]: float(row["note"].split("%")[0]) for row in rows if row["what"] == "finch-abc, trained"}
    assert 0 < errors["int8, weights"] < errors["int8, inputs"] < errors["int8, both"] < 2 < errors["int4, both"] < 10
    rows = [row for row in rows if row["part"] == "loss"]
    losses = {row["dtype"]: float(row["note"].split()[0]) for row in rows}
    sizes = {row["dtype"]: float(row["note"].split()[-2]) for row in rows}
    assert list(losses) == list(quantised.WAYS)
    assert losses["int8"] != losses["int8, 7-bit inputs"] != losses["float32"]
    assert all(abs(loss / losses["float32"] - 1) < (0.05 if way == "int4" else 0.01) for way, loss in losses.items())
    assert (
        2 * sizes["bfloat16"] == pytest.approx(sizes["float32"], rel=0.01)
        and sizes["int4"] < sizes["int8"] < sizes["bfloat16"]
    )


@pytest.mark.thorough
def test_adapters_are_compared(adapters, tmp_path, monkeypatch):
    from abc_corpus import Corpus

    tunes = [f"X:1\nT:A\nM:C\nL:1/8\nK:G\nG2{letter}2 a'z|^f/2 z4 (3DEF|]" for letter in "ABcdefg"]
    monkeypatch.setattr("abc_corpus.load_corpus", lambda: Corpus(tunes[2:], tunes[:2], {}))
    chosen = ["state tuning", "both, rank 1", "low ranks, rank 4"]
    adapters.main(["--quick", "--adapters", *chosen, "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "adapters.json").read_text())["rows"]
    losses = {row["what"].removeprefix("spaced, "): float(row["note"].split()[0]) for row in rows}
    assert list(losses) == chosen and len(set(losses.values())) == 3
    assert [int(row["size"]) for row in rows] == [16_384, 14_048, 19_328]
    assert adapters.degrees(tunes[0]).endswith("K:G\n1:22:2 2''z|^7'/2 z:4 (3567|]")

"""The inspection of slot memories: its numbers against the model's own state, its files, and what is refused."""

import json
import sys

import pytest
import torch
import torch.nn.functional as F
from cases import tiny_model
from PIL import Image
from transformers import ByT5Tokenizer

import subquad_cli as cli
from subquad.models.raven.inspect_memory import (
    KINDS,
    classify,
    effective_lengths,
    holdings,
    inspect_memory,
    save,
)
from subquad.models.raven.inspect_memory import _recorded as recorded
from subquad_tokenizers import ByteTokenizer


PROMPT = "The password is 1378, keep it. Now tell me: the password is "
# Memories of all routers, with fewer heads of keys, and behind attention; the fields of a tiny configuration.
ROUTERS = {
    "raven": {},
    "softmax": {"router_score": "softmax", "router_scale": 2, "decay_type": "GLA", "num_kv_heads": 1},
    "gsa": {"router": "gsa", "decay_type": "GLA"},
    "swa": {"router": "swa"},
}
each_router = pytest.mark.parametrize("router", ROUTERS)


def raven(router: str = "raven", **fields):
    """A tiny hybrid: layer 1 is attention."""
    return tiny_model("raven", vocab_size=128, **ROUTERS[router], **fields)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "raven"
    raven().save_pretrained(path)
    ByteTokenizer().save_pretrained(path)
    return path


def run(*arguments) -> int:
    return cli.main(["inspect-memory", *map(str, arguments)])


def refused(capsys, code, *arguments) -> str:
    """Runs a command that fails, and returns the last line of what it says, which is all but for a usage."""
    capsys.readouterr()
    try:
        assert run(*arguments) == code
    except SystemExit as exit_:
        assert exit_.code == code
    captured = capsys.readouterr()
    assert captured.out == ""
    *usage, line = captured.err.splitlines()
    assert not usage or usage[0].startswith("usage: ")
    assert line.startswith("subquad inspect-memory: error: ")
    return line.removeprefix("subquad inspect-memory: error: ")


# --- numbers ---


def random_log_f(tokens=40, heads=2, slots=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    log_f = -(torch.rand(tokens, heads, slots, generator=generator).double() ** 3) * 4
    log_f[torch.rand(log_f.shape, generator=generator) < 0.5] = 0.0
    log_f[torch.rand(log_f.shape, generator=generator) < 0.05] = -torch.inf
    log_f[:, 0, 3] = 0.0  # a slot that nothing is written to
    return log_f


@pytest.mark.fast
def test_holdings_equal_the_recurrence():
    log_f = random_log_f()
    tokens, heads, slots = log_f.shape
    expected = torch.zeros(heads, slots, tokens, dtype=torch.float64)  # of tokens that are unit vectors
    for t in range(tokens):
        f = log_f[t, :, :, None].exp()
        expected = f * expected + (1 - f) * F.one_hot(torch.tensor(t), tokens)
    torch.testing.assert_close(holdings(log_f), expected, atol=1e-15, rtol=1e-13)
    counts = [[sum(float(x) != 0 for x in log_f[:, h, i]) for i in range(slots)] for h in range(heads)]
    assert effective_lengths(log_f).tolist() == counts
    assert counts[0][3] == 0 and holdings(log_f)[0, 3].abs().sum() == 0


@each_router
def test_the_state_is_what_the_slots_hold_of_the_tokens(router):
    model = raven(router).double()
    memories = {layer: model.model.layers[layer].attn for layer in (0, 2)}
    kv_heads = model.config.num_kv_heads
    written = {}
    for layer, memory in memories.items():
        memory.k_norm.register_forward_hook(lambda _, __, out, at=(layer, "k"): written.update({at: out[0]}))
        memory.v_proj.register_forward_hook(lambda _, __, out, at=(layer, "v"): written.update({at: F.silu(out[0])}))
    ids = torch.tensor([ByteTokenizer()(PROMPT)["input_ids"]])
    with torch.no_grad(), recorded(memories, list(range(kv_heads))) as routing:
        cache = model(ids, use_cache=True).cache
    report = inspect_memory(model, ByteTokenizer(), PROMPT, layers="all")
    assert [(memory.layer, memory.head) for memory in report.memories] == [
        (layer, head) for layer in memories for head in range(kv_heads)
    ]
    for memory in report.memories:
        k = written[memory.layer, "k"][:, memory.head]
        v = written[memory.layer, "v"].unflatten(-1, (kv_heads, -1))[:, memory.head]
        held = holdings(routing[memory.layer])[memory.head]
        rebuilt = held @ torch.cat((k, v), -1)
        assert rebuilt.abs().max() > 0.1
        # Heads of queries that share a memory follow one another.
        for state in cache.layers[memory.layer].get("slots")[0].unflatten(0, (kv_heads, -1))[memory.head]:
            assert state.dtype == torch.float64
            torch.testing.assert_close(rebuilt, state, atol=1e-12, rtol=1e-10)
        torch.testing.assert_close(memory.holdings, held.float())
        torch.testing.assert_close(memory.effective_lengths, effective_lengths(routing[memory.layer])[memory.head])


@pytest.mark.fast
def test_kinds():
    held = torch.tensor([[0.09, 0.01], [0.8, 0.2], [0.25, 0.75], [1e-9, 1e-7], [0.0, 0.0], [1.0, 0.0], [0.0, 0.3]])
    marked = torch.tensor([True, False])
    expected = ["marked", "shared", "shared", "other", "empty", "marked", "other"]
    assert classify(held.double(), marked, 0.89) == expected
    assert classify(held.double(), marked, 0.75) == ["marked", "marked", "other", "other", "empty", "marked", "other"]
    assert classify(held.double(), marked, 1.0) == ["shared"] * 4 + ["empty", "marked", "other"]


# --- arguments ---


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        ("1378", range(16, 20)),
        ("password", [*range(4, 12), *range(48, 56)]),
        (["1378", "78, "], range(16, 22)),
        ("s", [6, 7, 14, 50, 51, 58]),
        ((), []),
    ],
)
def test_marks(mark, expected):
    report = inspect_memory(raven(), ByteTokenizer(), PROMPT, mark=mark, heads=[0], layers=[0])
    assert report.marked.nonzero()[:, 0].tolist() == list(expected)
    assert (report.memories[0].kinds is None) == (not expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [0, -1]}, r"`layers` must be numbers from 0 to 2, got -1"),
        ({"layers": [3]}, r"`layers` must be numbers from 0 to 2, got 3"),
        ({"layers": "some"}, r"`layers` must be numbers from 0 to 2, got 's'"),
        ({"layers": [0, 1]}, r"`layers`: layer 1 is softmax attention.* the layers 0, 2\."),
        ({"layers": []}, r"`layers` names none"),
        ({"heads": [3]}, r"`heads` must be numbers from 0 to 2, got 3"),
        ({"heads": [-1]}, r"`heads` must be numbers from 0 to 2, got -1"),
        ({"heads": []}, r"`heads` names none"),
        ({"mark": "1379"}, r"`mark`: no token of the prompt has a part of '1379'"),
        ({"mark": ["1378", ""]}, r"`mark`: no token of the prompt has a part of ''"),
        ({"prompt": ""}, r"`prompt` is empty"),
        ({"threshold": 0.5}, r"`threshold` must be above 0.5 and at most 1, got 0.5"),
        ({"tokenizer": ByT5Tokenizer(), "mark": "1378"}, r"`mark` needs a fast tokenizer.* ByT5Tokenizer"),
    ],
)
def test_wrong_arguments(options, message):
    model = raven()
    model.model.forward = lambda **_: pytest.fail("work was done")
    with pytest.raises(ValueError, match=message):
        inspect_memory(model, **{"tokenizer": ByteTokenizer(), "prompt": PROMPT, **options})


def test_other_models():
    with pytest.raises(ValueError, match="`model` must be a Raven, got Rwkv6ForCausalLM"):
        inspect_memory(tiny_model("rwkv6"), ByteTokenizer(), PROMPT)
    attn = {"layers": [0, 1, 2], "num_heads": 3, "window_size": 9}
    with pytest.raises(ValueError, match="attention alone: it has no slot memories"):
        inspect_memory(raven(attn=attn), ByteTokenizer(), PROMPT)


def test_a_model_is_left_as_it_was():
    model = raven().train()
    model.model.norm.eval()
    before = {name: module.training for name, module in model.named_modules()}
    first, second = (inspect_memory(model, ByteTokenizer(), PROMPT) for _ in range(2))
    for one, other in zip(first.memories, second.memories, strict=True):
        assert torch.equal(one.holdings, other.holdings)  # no noise
        assert not one.holdings.requires_grad
    assert {name: module.training for name, module in model.named_modules()} == before
    model.model.embeddings.forward = broken
    with pytest.raises(ZeroDivisionError):
        inspect_memory(model, ByteTokenizer(), PROMPT)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert not any("route" in vars(module) for module in model.modules())


def broken(*_, **__):
    raise ZeroDivisionError


# --- files ---


def test_the_files(directory, tmp_path, capsys):
    out = tmp_path / "new" / "memory"
    assert run(PROMPT, "--model", directory, "--out", out, "--mark", "1378", "--heads", "0,2", "--threshold", 0.6) == 0
    text = capsys.readouterr().out
    figures = [f"layer{layer:02}-head{head:02}.png" for layer in (0, 2) for head in (0, 2)]
    assert {path.name for path in out.iterdir()} == {"effective_lengths.png", "memory.json", *figures}
    assert all(name in text for name in figures)
    colours = {}
    for path in out.glob("*.png"):
        with Image.open(path) as image:
            pixels = image.convert("RGB").getcolors(1 << 20)
        colours[path.name] = {colour for _, colour in pixels}
        tinted = sum(count for count, colour in pixels if max(colour) - min(colour) > 30)  # not white, black or grey
        assert 0.02 < tinted / sum(count for count, _ in pixels) < 0.5

    model = type(raven()).from_pretrained(directory)
    options = {"mark": "1378", "heads": [0, 2], "threshold": 0.6}
    report = inspect_memory(model, ByteTokenizer(), PROMPT, **options)
    assert report.table() in text and f"{len(PROMPT)} tokens, 4 of them marked" in text
    found = json.loads((out / "memory.json").read_text(encoding="utf-8"))
    assert found == json.loads(json.dumps(report.as_dict()))
    assert (found["router"], found["slots"], found["length"], found["threshold"]) == ("raven", 12, len(PROMPT), 0.6)
    assert "".join(found["tokens"]) == PROMPT and found["ids"] == list(PROMPT.encode())
    assert (found["marks"], found["marked"]) == (["1378"], [16, 17, 18, 19])
    rows = text.splitlines()[2:-1]
    for memory, numbers, row, figure in zip(report.memories, found["memories"], rows, figures, strict=True):
        assert (numbers["layer"], numbers["head"], numbers["figure"]) == (memory.layer, memory.head, figure)
        assert numbers["effective_lengths"] == memory.effective_lengths.tolist()
        held = torch.zeros(12, len(PROMPT))
        for slot, each in enumerate(numbers["holdings"]):
            held[slot, each["tokens"]] = torch.tensor(each["weights"])
        expected = memory.holdings.where(memory.holdings >= found["floor"], 0.0)
        torch.testing.assert_close(held, expected, atol=1e-6, rtol=0)
        weight, marked = memory.holdings.sum(1), memory.holdings[:, 16:20].sum(1)
        torch.testing.assert_close(torch.tensor(numbers["weight"]), weight, atol=2e-6, rtol=0)
        torch.testing.assert_close(torch.tensor(numbers["marked_weight"]), marked, atol=2e-6, rtol=0)
        assert numbers["kinds"] == memory.kinds and sorted(numbers["order"]) == list(range(12))
        lengths = memory.effective_lengths.sort().values
        middle = (lengths[5] + lengths[6]) / 2 / len(PROMPT)
        assert row.split()[:3] == [str(memory.layer), str(memory.head), f"{middle:.3f}"]
        assert row.endswith(f"{memory.kinds.count('marked')} of 12")
        for kind, colour in KINDS.items():  # of the strip beside the slots, and the legend
            rgb = tuple(bytes.fromhex(colour[1:]))
            assert rgb in colours[figure], (kind, figure)


@pytest.mark.parametrize("exists", [False, True])
def test_a_failure_leaves_nothing(exists, directory, tmp_path, capsys, monkeypatch):
    out = tmp_path / "new" / "out"
    if exists:
        out.mkdir(parents=True)
        (out / "notes").touch()
    monkeypatch.setattr("json.dumps", broken)  # the last of the files
    with pytest.raises(ZeroDivisionError):
        run(PROMPT, "--model", directory, "--out", out, "--layers", "0", "--heads", "0", "--debug")
    assert [path.name for path in (out if exists else tmp_path).iterdir()] == (["notes"] if exists else [])


# --- the command ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers=-1"], "argument --layers: must be whole numbers, separated by commas and at least 0, got '-1'"),
        (["--layers", "1"], "--layers: layer 1 is softmax attention, which has no slots"),
        (["--mark", "1379"], "--mark: no token of the prompt has a part of '1379'."),
        (["--threshold", "0.4"], "argument --threshold: must be above 0.5 and at most 1, got '0.4'"),
    ],
)
def test_wrong_options(arguments, message, directory, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    out = tmp_path / "out"
    assert message in refused(capsys, 2, PROMPT, "--model", directory, "--out", out, *arguments)
    assert not out.exists()


def test_refused_models_and_directories(directory, tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "rwkv6"}')
    line = refused(capsys, 2, PROMPT, "--model", tmp_path, "--out", tmp_path / "out")
    assert line == f"{tmp_path} is of type rwkv6: only a model of type raven has slot memories."
    line = refused(capsys, 2, PROMPT, "--model", directory, "--out", tmp_path / "config.json")
    assert line == f"{tmp_path / 'config.json'} is not a directory."
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_without_matplotlib(directory, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = refused(capsys, 1, PROMPT, "--model", directory, "--out", tmp_path / "out")
    assert line.startswith("figures need matplotlib, `pip install 'subquad[inspect]'`")
    report = inspect_memory(raven(), ByteTokenizer(), PROMPT)  # the numbers need none
    with pytest.raises(ImportError, match="subquad\\[inspect\\]"):
        save(report, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []

"""Loss by position, in examples/evaluation: what its numbers are, on tiny models and a few tunes."""

import functools
import itertools
import math
import random
from xml.etree import ElementTree

import pytest
import torch
from evaluation_cases import perturbed
from examples.evaluation import positions
from examples.evaluation.models import make_config, make_model


def make_tunes():
    draw = random.Random(0)
    keys = ("G", "Dmix", "Em", "C", "Ador", "F")
    music = ["".join(draw.choice("GABcdefg|2 \n") for _ in range(draw.randrange(40, 90))) for _ in keys]
    return [f"X:1\nT:{key}\nM:4/4\nL:1/8\nK:{key}\n{body}|]\n" for key, body in zip(keys, music, strict=True)]


TUNES = make_tunes()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of tiny models by architecture."""
    ids = {"vocabulary": 128, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    directories = {}
    for architecture in ("finch", "gecko", "transformer"):
        torch.manual_seed(0)
        model = perturbed(make_model(make_config(architecture, width=32, layers=1, window=16, **ids)), 0.2)
        directories[architecture] = tmp_path_factory.mktemp(architecture)
        model.save_pretrained(directories[architecture])
    return directories


@pytest.fixture
def run(models, monkeypatch, run_task):
    """Calls the task on those models and tunes, and returns its record."""
    monkeypatch.setattr(positions.subquad, "embedded_model", lambda name: models[name.removesuffix("-abc")])
    monkeypatch.setattr(positions, "corpus", lambda: positions.Corpus([], TUNES, {}))
    monkeypatch.setattr(positions, "TRAINED", 16)
    monkeypatch.setattr(positions, "FEWEST", 2)
    return functools.partial(run_task, "positions", "--contexts", "16", "64")


def rows_of(record, **fields):
    return [row for row in record["rows"] if fields.items() <= row.items()]


def plain_bits(model, before, byte):
    """Of one byte given those before it."""
    logits = model(input_ids=torch.tensor([before])).logits[0, -1].double()
    return (torch.logsumexp(logits, 0) - logits[byte]).item() / math.log(2)


@pytest.mark.parametrize(("length", "context"), [(10, 4), (11, 4), (12, 2), (12, 12), (9, 8)])
def test_windows_give_every_byte_half_of_the_context_or_more(length, context):
    text, half = torch.arange(100, 100 + length), context // 2
    pieces = positions.windows(text, context)
    assert torch.cat([piece[half:] for piece in pieces]).equal(text)
    for piece in pieces:
        assert half < len(piece) <= context
        # Neighbours in the ring, and none of them twice.
        assert all((b - a) % length == 1 for a, b in itertools.pairwise(piece))
        assert len(set(piece.tolist())) == len(piece)


def test_the_long_text_is_all_tunes_with_a_boundary_after_each():
    text = positions.long_text(positions.Corpus([], TUNES, {}), 3)
    assert text.equal(positions.long_text(positions.Corpus([], TUNES, {}), 3))
    tunes = bytes(text.tolist()).decode("ascii").split("\0")
    assert tunes.pop() == "" and sorted(tunes) == sorted(TUNES) and tunes != TUNES


@torch.no_grad()
def test_numbers_are_those_of_plain_calls(models, monkeypatch):
    tunes = TUNES[:2]
    model = positions.AutoModelForCausalLM.from_pretrained(models["finch"])
    monkeypatch.setattr(positions, "CALL", 64)  # several calls, of several rows
    text = positions.long_text(positions.Corpus([], tunes, {}), 0)
    measured = positions.in_context(model, text, 32)
    ring = text.tolist()
    # Byte i of a window of 32 that begins at a multiple of 16 has all of the window before it.
    plain = [plain_bits(model, [ring[j] for j in range(i - i % 16 - 16, i)], ring[i]) for i in range(len(ring))]
    assert measured["bits"] == pytest.approx(sum(plain) / len(plain), abs=1e-4)
    parts = [part.mean().item() for part in torch.tensor(plain).tensor_split(positions.PARTS)]
    assert measured["parts"] == pytest.approx(parts, abs=1e-4)

    measured = positions.in_tunes(model, tunes)
    bits, sizes, header, music = {}, [], [], []
    for tune in tunes:
        ids = [*tune.encode(), 0]
        sizes.append(len("".join(tune.splitlines(keepends=True)[:5])))
        for i in range(1, len(ids)):
            bits.setdefault(i // positions.BIN, []).append(plain_bits(model, ids[:i], ids[i]))
            (header if i < sizes[-1] else music).append(bits[i // positions.BIN][-1])
    for name, numbers in (("bits", header + music), ("header", header), ("music", music)):
        assert measured[name] == pytest.approx(sum(numbers) / len(numbers), abs=1e-4), name
    assert measured["header_bytes"] == pytest.approx(sum(sizes) / len(tunes))
    assert measured["counts"] == [len(bits[n]) for n in range(len(bits))]
    assert measured["by_position"] == pytest.approx([sum(bits[n]) / len(bits[n]) for n in range(len(bits))], abs=1e-4)
    # Two tunes: the standard error of two samples is half of their difference.
    first, second = (positions.in_tunes(model, [tune])["by_position"] for tune in tunes)
    both = min(len(first), len(second))
    apart = [abs(a - b) for a, b in zip(first[:both], second[:both], strict=True)]
    assert measured["errors"] == pytest.approx(apart + [0.0] * (len(bits) - both), abs=1e-4)


def test_runs_go_on_and_repeat(run, models, tmp_path, capsys):
    first = run("--architectures", "finch", "transformer")
    assert [(row["architecture"], row["text"], row["context"]) for row in first["rows"]] == [
        ("finch", "tunes", None),
        ("finch", "long", 16),
        ("finch", "long", 64),
    ]
    assert "`--transformer DIR` measures it" in capsys.readouterr().out
    both = ("--architectures", "finch", "transformer", "--transformer", str(models["transformer"]))
    more = run(*both)
    assert more["rows"][:3] == first["rows"] and len(more["rows"]) == 6
    assert "--transformer DIR" not in capsys.readouterr().out
    again = run(*both, "--fresh")
    for row, repeated in zip(more["rows"], again["rows"], strict=True):
        assert {**row, "seconds": 0} == {**repeated, "seconds": 0}
    other = run("--architectures", "finch", "--seed", "1", "--fresh")
    assert other["rows"][0]["bits"] == first["rows"][0]["bits"]  # the order of tunes that are read one by one
    assert other["rows"][1]["bits"] != first["rows"][1]["bits"]

    for name, labels in {
        "positions_tunes": ("position in the tune (bytes)", "loss (bits a byte)"),
        "positions_context": ("length of the context (bytes)", "loss (bits a byte)", "difference (bits a byte)"),
    }.items():
        svg = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
        ElementTree.fromstring(svg)
        assert all(f"<!-- {label} -->" in svg for label in labels) and "seed 1" in svg


def test_gecko_knows_nothing_of_earlier_tunes_unless_told_to(run):
    assert max(map(len, TUNES)) < 128
    record = run("--architectures", "gecko", "--contexts", "16", "256", "512")
    assert len(rows_of(record, text="tunes")) == 1
    apart, joined = (
        {row["context"]: row for row in rows_of(record, text="long", document_boundaries=flag)}
        for flag in (True, False)
    )
    # Whole tunes are in the windows, whatever else is.
    assert apart[512]["parts"] == pytest.approx(apart[256]["parts"], abs=1e-5)
    assert abs(apart[16]["bits"] - apart[256]["bits"]) > 1e-3
    assert max(abs(a - b) for a, b in zip(joined[512]["parts"], joined[256]["parts"], strict=True)) > 1e-3
    assert [row[0] for row in positions.table(record)[1]][-1] == "Gecko (documents joined)"

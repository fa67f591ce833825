"""Associative recall, in examples/evaluation: the rows, the baselines' memories, and runs of a few steps."""

import csv
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.evaluation import baselines, figures, mqar
from examples.evaluation.__main__ import main
from examples.evaluation.models import make_config

from subquad.models.rwkv5.modeling_rwkv5 import Rwkv5TimeMixing


TINY = [
    "--lengths",
    "16",
    "--widths",
    "32",
    "--steps",
    "3",
    "--tokens",
    "64",
    "--validate-every",
    "2",
    "--test-rows",
    "8",
    "--lrs",
    "1e-2",
]


def test_rows_ask_for_every_pair_once():
    generator = torch.Generator().manual_seed(0)
    ids, targets = mqar.make_rows(50, 64, 8, 32, 0.01, generator)
    assert ids.shape == targets.shape == (50, 64)
    for row, told in zip(ids.tolist(), targets.tolist(), strict=True):
        pairs = dict(zip(row[:16:2], row[1:16:2], strict=True))
        assert len(pairs) == 8 and all(1 <= key <= 32 < value <= 64 for key, value in pairs.items())
        asked = {place: row[place] for place in range(16, 64) if row[place] != mqar.BLANK}
        assert sorted(asked.values()) == sorted(pairs)
        assert told == [pairs[asked[place]] if place in asked else mqar.NOTHING for place in range(64)]
    again, _ = mqar.make_rows(50, 64, 8, 32, 0.01, torch.Generator().manual_seed(0))
    assert torch.equal(again, ids)
    # Near places are likelier than far ones.
    places = (targets != mqar.NOTHING).float().mean(0)
    assert places[18:30].sum() > places[50:62].sum()


@pytest.mark.parametrize("size", [1.0, 300.0])
@pytest.mark.parametrize("length", [1, 2, 37])
def test_decayed_average_is_the_recurrence(length, size):
    torch.manual_seed(0)
    k, v = (torch.randn(2, length, 5, dtype=torch.float64) for _ in range(2))
    k, log_w, u = k * size, -torch.rand(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (k, v, log_w, u)]
    out = baselines.decayed_average(*inputs)
    rows = []
    for t in range(length):
        weights = [(t - 1 - i) * log_w + k[:, i] for i in range(t)] + [u + k[:, t]]
        shares = torch.stack(weights, 1).softmax(1)
        rows.append((shares * v[:, : t + 1]).sum(1))
    expected = torch.stack(rows, 1)
    torch.testing.assert_close(out, expected)
    probe = torch.randn_like(out)
    grads = (torch.autograd.grad((x * probe).sum(), inputs, allow_unused=True) for x in (out, expected))
    for got, wanted in zip(*grads, strict=True):
        assert (got is None) == (wanted is None)  # one token has no decay
        if got is not None:
            torch.testing.assert_close(got, wanted)


def test_linear_attention_is_its_sum():
    torch.manual_seed(0)
    mixing = baselines.LinearTimeMixing(
        Rwkv5TimeMixing(make_config("eagle", vocabulary=9, width=64, layers=1), 0), 0.0
    )
    r, k, v = (torch.randn(2, 21, 64) for _ in range(3))
    heads = [x.unflatten(-1, (2, 32)).transpose(1, 2).double() for x in (r, k, v)]
    weights = (1 + F.elu(heads[0])) @ (1 + F.elu(heads[1])).transpose(-1, -2)
    weights = weights.tril() / weights.tril().sum(-1, keepdim=True)
    expected = (weights @ heads[2]).transpose(1, 2).flatten(-2)
    torch.testing.assert_close(mixing.remember(r, k, v).double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", baselines.MIXINGS)
def test_baselines_look_back_only_and_keep_no_state(name):
    torch.manual_seed(0)
    model = baselines.make_baseline(name, make_config("eagle", vocabulary=9, width=32, layers=2)).eval()
    for parameter in model.parameters():  # some begin as zeros
        parameter.data += 0.2 * torch.randn_like(parameter)
    ids = torch.randint(9, (2, 12))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits[:, :7], model(ids[:, :7]).logits)
        changed = ids.clone()
        changed[:, 0] = (ids[:, 0] + 1) % 9
        assert not torch.allclose(model(ids).logits[:, -1], model(changed).logits[:, -1])
    with pytest.raises(ValueError, match="has no state to keep"):
        model(ids, use_cache=True)


def test_a_run_goes_on_and_repeats(tmp_path, capsys):
    def run(*options):
        main(["mqar", *TINY, "--out", str(tmp_path), *options])
        return json.loads((tmp_path / "mqar.json").read_text())

    record = run("--architectures", "finch", "rwkv4")
    assert [row["architecture"] for row in record["rows"]] == ["finch", "rwkv4"]
    more = run()
    assert more["rows"][:2] == record["rows"] and len(more["rows"]) == len(mqar.ARCHITECTURES)
    with (tmp_path / "mqar.csv").open() as file:
        assert [float(row["accuracy"]) for row in csv.DictReader(file)] == [row["accuracy"] for row in more["rows"]]
    with pytest.raises(ValueError, match=r"seed = 0, not 1"):
        run("--seed", "1")
    fresh = run("--fresh", "--architectures", "finch")["rows"][0]
    assert {**fresh, "seconds": 0} == {**record["rows"][0], "seconds": 0}
    root = ElementTree.parse(tmp_path / "mqar.svg").getroot()
    text = "".join(root.itertext())
    assert "python -m examples.evaluation mqar" in text and "seed 0" in text


@pytest.mark.parametrize("options", [["--lengths", "8"], ["--lengths", "512"], ["--tokens-per-pair", "3"]])
def test_impossible_rows_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match=options[0]):
        main(["mqar", *TINY, "--out", str(tmp_path), *options])
    assert not list(tmp_path.iterdir())


def made_record(**accuracies):
    cells = [(64, 32), (64, 64), (256, 32), (256, 64)]
    rows = [
        {"architecture": name.replace("_", "-"), "length": length, "width": width, "pairs": length // 8, "accuracy": x}
        | {"validation": x, "steps": 800, "lr": 3e-3, "parameters": 1000}
        for name, values in accuracies.items()
        for (length, width), x in zip(cells, values, strict=True)
    ]
    said = {"command": "c", "seed": 0, "hardware": "h", "versions": {"torch": "1"}, "date": "d", "settings": {}}
    return {**said, "rows": rows}


def test_findings_follow_the_numbers():
    good = made_record(finch=[0.99] * 4, rwkv4=[0.5, 0.6, 0.1, 0.2])
    text = "\n".join(mqar.findings(good))
    assert "near 100% everywhere: so here." in text and "Finch above RWKV-4: so here." in text
    assert "fall with length: so here." in text and "rise with width: so here." in text
    bad = made_record(finch=[0.1, 0.1, 0.99, 0.2], rwkv4=[0.5, 0.4, 0.99, 0.9])
    text = "\n".join(mqar.findings(bad))
    assert "near 100% everywhere: not so here." in text and "Finch above RWKV-4: not so here in every cell." in text
    assert "fall with length: not so here." in text and "rise with width: not so here." in text
    assert len(mqar.table(good)[1]) == 8
    axes = figures.draw(mqar, good)["mqar"].axes
    assert [a.get_xlabel() for a in axes] == ["width (numbers a token)"] * 2
    assert axes[0].get_ylabel() == "right answers (share)"

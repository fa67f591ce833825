"""Associative recall, in examples/evaluation: its rows, the older memories, and what is said of its numbers."""

import argparse

import pytest
import torch
from examples.evaluation import baselines, mqar
from examples.evaluation.models import make_config, make_model


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def plain_average(weights, v):
    """The average of all values so far, `weights(t, i)` being those of token i for token t, up to a factor of t's."""
    out = []
    for t in range(v.shape[1]):
        logs = torch.stack([weights(t, i) for i in range(t + 1)], dim=1)
        out.append((logs.softmax(1) * v[:, : t + 1]).sum(1))
    return torch.stack(out, dim=1)


def plain_rwkv4(k, v, log_w, u):
    return plain_average(lambda t, i: u + k[:, t] if i == t else (t - 1 - i) * log_w + k[:, i], v)


@pytest.mark.parametrize("length", [1, 2, 7, 16])
def test_the_memory_of_rwkv4_is_equation_2(length):
    tensors = [
        torch.randn(size, generator=seeded(3), dtype=torch.float64) for size in (2 * [(2, length, 5)] + 2 * [5])
    ]
    k, v, log_w, u = tensors[0], tensors[1].flip(-1), -tensors[2].exp(), tensors[3].flip(0)
    inputs = [x.clone().requires_grad_() for x in (k, v, log_w, u)]
    pushed = torch.randn(k.shape, generator=seeded(4), dtype=torch.float64)
    results = []
    for function in (baselines.decayed_average, plain_rwkv4):
        out = function(*inputs)
        results.append([out, *torch.autograd.grad(out, inputs, pushed, allow_unused=True, materialize_grads=True)])
    torch.testing.assert_close(*results)


def make_baseline(name, width=64):
    torch.manual_seed(0)
    model = baselines.make_baseline(name, make_config("eagle", vocabulary=20, width=width, layers=2)).eval()
    with torch.no_grad():
        for parameter in model.rwkv.blocks.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def plain_time_mixing(name, layer, x):
    """Token shift, memory and output in float64, from the weights alone."""
    weights = {key: value.double() for key, value in layer.state_dict().items()}
    x = x.double()
    before = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1)
    parts = []
    for part in ("receptance", "key", "value"):
        mu = weights[f"time_mix_{part}"]
        parts.append((mu * x + (1 - mu) * before) @ weights[f"{part}.weight"].T)
    r, k, v = parts
    if name == "rwkv4":
        out = r.sigmoid() * plain_rwkv4(k, v, -weights["time_decay"].exp(), weights["time_first"])
    else:
        heads = (*x.shape[:2], -1, 32)
        r, k = (torch.where(y > 0, y + 1, y.exp()).view(heads) for y in (r, k))
        v = v.view(heads)
        out = plain_average(lambda t, i: (r[:, t] * k[:, i]).sum(-1, keepdim=True).log(), v).flatten(-2)
    return out @ weights["output.weight"].T


@torch.no_grad()
@pytest.mark.parametrize("name", baselines.MIXINGS)
def test_a_baseline_is_eagle_but_for_its_memory(name):
    model = make_baseline(name)
    x = torch.randn(2, 11, 64, generator=seeded())
    tokens = argparse.Namespace(mask=None, starts=None)
    for block in model.rwkv.blocks:
        expected = plain_time_mixing(name, block.attention, x)
        torch.testing.assert_close(block.attention(x, tokens).double(), expected, rtol=1e-4, atol=1e-4)

    config = make_config("eagle", vocabulary=20, width=64, layers=2)
    models = []
    for make in (make_model, lambda config: baselines.make_baseline(name, config)):
        torch.manual_seed(1)
        models.append(make(config).state_dict())
    eagle, older = models
    added, gone = older.keys() - eagle.keys(), eagle.keys() - older.keys()
    assert {key.rpartition(".")[2] for key in added} == ({"time_first"} if name == "rwkv4" else set())
    assert {"ln_x.weight", "gate.weight", "time_mix_gate"} <= {key.partition("attention.")[2] for key in gone}
    same = [key for key in older.keys() - added if not key.endswith("time_decay")]
    assert len(same) > 30 and all(torch.equal(older[key], eagle[key]) for key in same)


def test_rows_are_pairs_and_then_every_key_once():
    rows, length, pairs, words = 200, 45, 5, 9
    ids, targets = mqar.make_rows(rows, length, pairs, words, 0.01, seeded())
    assert ids.shape == targets.shape == (rows, length)
    firsts = []
    for row, wanted in zip(ids.tolist(), targets.tolist(), strict=True):
        told = dict(zip(row[: 2 * pairs : 2], row[1 : 2 * pairs : 2], strict=True))
        assert len(told) == pairs == len(set(told.values()))
        assert set(told) <= set(range(1, words + 1)) and set(told.values()) <= set(range(words + 1, 2 * words + 1))
        asked = {place: word for place, word in enumerate(row) if place >= 2 * pairs and word != mqar.BLANK}
        assert sorted(asked.values()) == sorted(told) and all(place % 2 == 0 for place in asked)
        assert {place: told[key] for place, key in asked.items()} == {
            place: value for place, value in enumerate(wanted) if value != mqar.NOTHING
        }
        firsts.append(list(told).index(asked[min(asked)]))
    assert set(firsts) == set(range(pairs)) and max(map(firsts.count, firsts)) < rows / 3  # in no order
    assert torch.equal(ids, mqar.make_rows(rows, length, pairs, words, 0.01, seeded())[0])
    assert not torch.equal(ids, mqar.make_rows(rows, length, pairs, words, 0.01, seeded(1))[0])


def test_a_model_learns(run_task):
    options = ("--architectures", "finch", "--steps", "60", "--tokens", "512", "--lrs", "1e-2")
    (row,) = run_task("mqar", *options)["rows"]
    assert row["accuracy"] > 0.8  # a guess among the row's values: 0.5

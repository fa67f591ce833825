"""State tracking, in examples/evaluation: its groups and rows, the Goose that may turn its state around, and runs."""

import argparse
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from evaluation_cases import perturbed
from examples.evaluation import baselines, tracking
from examples.evaluation.models import make_config, make_model


ORDERS = {"parity": 2, "S3": 6, "A5": 60}


@pytest.mark.parametrize("problem", tracking.GROUPS)
def test_tokens_are_a_group(problem):
    table, order = tracking.multiplication_table(problem), ORDERS[problem]
    everything = torch.arange(order)
    assert table.shape == (order, order) and table[0].equal(everything) and table[:, 0].equal(everything)
    assert all(line.sort().values.equal(everything) for line in (*table, *table.T))
    assert table[table].equal(table[everything[:, None, None], table])  # (a b) c = a (b c)
    assert (problem == "parity") == table.equal(table.T)


@pytest.mark.parametrize("problem", tracking.GROUPS)
def test_products_are_what_the_tokens_make_of_things(problem):
    elements, generator = tracking.GROUPS[problem], torch.Generator().manual_seed(0)
    ids, products = tracking.make_rows(problem, 7, 9, generator)
    assert ids.shape == (7, 10) and products.shape == (7, 9)
    assert (ids[:, 0] == tracking.BOUNDARY).all() and ids[:, 1:].min() >= 1 and ids.max() <= len(elements)
    for row, wanted in zip(ids[:, 1:].tolist(), products.tolist(), strict=True):
        things = tuple(range(len(elements[0])))
        for token, product in zip(row, wanted, strict=True):
            things = tuple(things[place] for place in elements[token - 1])
            assert things == elements[product]
    many = tracking.make_rows(problem, 100, 20, generator)[0]
    assert many[:, 1:].unique().tolist() == list(range(1, len(elements) + 1))


def make_goose(name):
    torch.manual_seed(0)
    config = make_config("goose", vocabulary=7, width=64, layers=2)
    return perturbed(baselines.make_baseline(name, config) if name in baselines.BASES else make_model(config), 0.5)


@torch.no_grad()
@pytest.mark.parametrize(("name", "bound"), [("goose", -0.455), ("wide-goose", -1)])
def test_eigenvalues_are_those_of_the_matrices_that_states_are_multiplied_with(name, bound):
    model, ids, taken = make_goose(name), torch.randint(1, 7, (3, 20)), []
    for block in model.rwkv7.blocks:  # what the operator gets
        baselines.change_sequences(block.att, lambda sequences: taken.append(sequences) or sequences)
    lowest = tracking.lowest_eigenvalue(model, ids)
    assert len(taken) == 2 and lowest < 0
    found = []
    for named in taken:
        w, kappa, a = (named[part].double().flatten(0, 2) for part in ("log_w", "kappa", "a"))
        matrices = w.exp().diag_embed() - kappa.unsqueeze(-1) * (a * kappa).unsqueeze(-2)
        found.append(torch.linalg.eigvals(matrices))
    found = torch.cat(found)
    assert found.imag.abs().max() < 1e-6 and found.real.max() <= 1 + 1e-6
    assert bound < found.real.min() and lowest == pytest.approx(found.real.min().item(), abs=1e-4)
    taken.clear()
    model(ids)
    assert len(taken) == 2  # nothing of the measurement stays
    assert tracking.lowest_eigenvalue(make_model(make_config("finch", vocabulary=7, width=32, layers=1)), ids) is None


@torch.no_grad()
def test_a_wide_goose_is_a_goose_but_for_its_rates():
    goose, wide = make_goose("goose"), make_goose("wide-goose")
    same, other = goose.state_dict(), wide.state_dict()
    assert same.keys() == other.keys() and all(torch.equal(same[name], other[name]) for name in same)
    ids, taken = torch.randint(1, 7, (2, 12)), []
    for model in (goose, wide):  # what the operator gets
        baselines.change_sequences(model.rwkv7.blocks[0].att, lambda sequences: taken.append(sequences) or sequences)
    logits = goose(ids).logits
    wide(ids)
    given, widened = taken
    torch.testing.assert_close(widened.pop("a"), given["a"] + given.pop("a") * given["log_w"].exp())
    torch.testing.assert_close(widened, given)
    assert wide(ids).past_key_values is None and (wide(ids).logits - logits).abs().max() > 0.01


def test_shares_are_of_the_products_at_each_place():
    ids, products = tracking.make_rows("S3", 5, 16, torch.Generator().manual_seed(0))
    wrong = torch.zeros_like(products)
    wrong[1, 5], wrong[:, 8:12], wrong[4, 12:] = 1, 1, 1
    calls = []

    def model(input_ids, use_cache):
        start = sum(calls)
        calls.append(len(input_ids))
        said = F.one_hot((products + wrong)[start : sum(calls)], 7).float()
        return SimpleNamespace(logits=F.pad(said, (0, 0, 1, 0)))

    model.device = "cpu"
    shares = tracking.accuracies(model, ids, products, rows=2)
    assert calls == [2, 2, 1] and shares == pytest.approx([1.0, 0.95, 0.0, 0.8])
    assert tracking.reach({"by_position": shares}) == 8
    assert tracking.ends({"by_position": shares}, 8) == (shares[1], shares[3])


def parse(*options):
    parser = argparse.ArgumentParser()
    tracking.add_arguments(parser)
    return argparse.Namespace(**vars(parser.parse_args(options)), seeds=[0], device="cpu", architectures=["finch"])


def test_a_model_learns_what_it_can():
    """Parity of rows that are at least half as long again as those of the training; how long depends on the CPU."""
    options = ["--train-length", "12", "--length", "32", "--rows", "32", "--steps", "200", "--lr", "5e-3"]
    row = tracking.measure(parse(*options, "--test-rows", "50"), "parity", 1, "wide-goose", 0)
    assert tracking.reach(row) >= 18 and row["steps"] < 200 and row["lowest_eigenvalue"] < -0.8

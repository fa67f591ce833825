"""Pairs that repeat, in examples/evaluation: the rows, the least possible losses, and a run of a few steps."""

import math

import pytest
import torch
from examples.evaluation import figures, pairs


def test_every_key_has_one_value():
    ids = pairs.make_rows(16, 400, 6, 32, torch.Generator().manual_seed(0))
    sets, values_of_key_1 = set(), set()
    for row in ids.tolist():
        values: dict[int, int] = {}
        for key, value in zip(row[::2], row[1::2], strict=True):
            assert 1 <= key <= 32 < value <= 64
            assert values.setdefault(key, value) == value
        assert len(values) == 6
        sets.add(frozenset(values))
        values_of_key_1.add(values.get(1))
    assert len(sets) > 10 and len(values_of_key_1) > 2  # new in each row
    full = pairs.make_rows(4, 4000, 32, 32, torch.Generator().manual_seed(0))
    assert all(len(set(row[::2])) == 32 for row in full.tolist())


def test_a_key_is_new_until_its_value_is_seen():
    ids = torch.tensor([[1, 11, 2, 12, 1, 11, 1, 11, 2, 12, 3, 13]])
    assert pairs.new_keys(ids).tolist() == [[True, True, False, False, False, True]]
    # Two chunks of 2 tokens: the pair before a key; of 4: what is in the half of the text that it is in.
    assert pairs.new_keys(ids, 2).tolist() == [[True, True, True, False, True, True]]
    assert pairs.new_keys(ids, 4).tolist() == [[True, True, False, False, True, True]]
    assert pairs.new_keys(ids, 12).tolist() == pairs.new_keys(ids).tolist()


@pytest.mark.parametrize("chunk", [None, 8, 32])
def test_the_least_possible_loss_is_that_of_a_perfect_memory(chunk):
    """A predictor that knows every value that it has seen, and nothing else, has exactly the least possible loss."""
    ids = pairs.make_rows(8, 256, 16, 16, torch.Generator().manual_seed(1))

    def model(input_ids, use_cache):
        logits = torch.zeros(*input_ids.shape, 33)
        logits[..., :17] = -torch.inf
        for row, text in enumerate(input_ids.tolist()):
            for place in range(0, len(text), 2):
                first = 0 if chunk is None else max((place // chunk - 1) * chunk, 0)
                for seen in range(first, place, 2):
                    if text[seen] == text[place]:
                        logits[row, place] = -torch.inf
                        logits[row, place, text[seen + 1]] = 0.0
        return type("Output", (), {"logits": logits})

    losses = pairs.losses_of(model, ids)
    torch.testing.assert_close(losses, math.log(16) * pairs.new_keys(ids, chunk).float())


def test_a_run_measures_gecko_with_and_without_its_memory(run_task, capsys):
    record = run_task("pairs")
    cells = [(row["architecture"], row["part"]) for row in record["rows"]]
    assert sorted(cells) == [("eagle", ""), ("gecko", ""), ("gecko", "working memory")]
    for row in record["rows"]:
        assert len(row["bits"]) == len(row["error"]) == 3 and min(row["bits"]) > 0
    everything, near = pairs.least(record["settings"]), pairs.least(record["settings"], 16)
    assert everything[0] > everything[1] > everything[2] and near[2] > everything[2]
    out = capsys.readouterr().out
    assert "Gecko without working memory" in out and "In figure 4" in out and "Not measured yet: Finch" in out
    (figure,) = figures.draw(pairs, record).values()
    assert "least possible from two chunks of 16" in [text.get_text() for text in figure.legends[0].get_texts()]

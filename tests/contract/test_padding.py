"""Padding anywhere changes nothing."""

import pytest
import torch
from cases import (
    AVEY,
    CASES,
    DEEP_EMBED,
    DEVICE,
    EAGLE,
    FINCH,
    GECKO,
    GENERATING,
    GOOSE,
    GREEDY,
    KINDS,
    RAVEN,
    RAVEN_BOTH,
    READERS,
    TOLERANCE,
    TRAINED_GENERATING,
    VARIANTS,
    VISUAL,
    assert_all_close,
    assert_same_states,
    each_case,
    each_case_and_reader,
    each_case_and_variant,
    each_causal,
    each_text_model_case,
    each_with,
    each_with_side,
    gradients,
    join,
    padded,
    random_ids,
    summed_loss,
    texts,
    tiny_model,
)

from subquad.modeling.padding import Tokens


BATCHES = [("anywhere", (7, 83, 1, 66)), ("left", (5,)), ("left", (12, 70, 3)), ("right", (70, 3, 12))]


@pytest.mark.fast
@each_with("batch", BATCHES, GENERATING, BATCHES[:1], (VISUAL[2], *VARIANTS, *READERS, *TRAINED_GENERATING))
def test_padding(case, batch):
    model, (side, lengths) = case.model(), batch
    rows = texts(case, *lengths)
    inputs = padded(rows, side, more=9 * (len(rows) == 1))  # a batch of one that is padded all the same
    mask, more = inputs["attention_mask"], case.ids(len(rows), 3)
    with torch.no_grad():
        out = model(**inputs)
        # What follows continues every row after its own last token.
        after = model(more, cache=out.cache).logits
        for n, row in enumerate(rows):
            alone = model(**row)
            torch.testing.assert_close(out.logits[n][mask[n] == 1], alone.logits[0], **TOLERANCE)
            torch.testing.assert_close(out.logits[n, -1], alone.logits[0, -1], **TOLERANCE)
            after_alone = model(more[n : n + 1], cache=alone.cache).logits
            torch.testing.assert_close(after[n], after_alone[0], **TOLERANCE)


@pytest.mark.fast
@each_with_side(KINDS, (EAGLE, DEEP_EMBED, VISUAL[1], *VARIANTS, *READERS))
def test_padding_in_a_later_call(case, side):
    model, first, second = case.model(), texts(case, 4, 9), texts(case, 70, 2)
    with torch.no_grad():
        cache = model(**padded(first, "left")).cache
        inputs = padded(second, side)
        out = model(**inputs, cache=cache)
        for n, mask in enumerate(inputs["attention_mask"]):
            alone = model(**join(first[n], second[n])).logits[0, first[n]["input_ids"].shape[1] :]
            torch.testing.assert_close(out.logits[n][mask == 1], alone, **TOLERANCE)


@pytest.mark.quick_cases("*rwkv?-[01]", "avey-*", "raven-*", "gecko-*")
@each_with(
    "batch",
    BATCHES,
    (FINCH, GECKO),
    BATCHES[::2],
    (EAGLE, GOOSE, DEEP_EMBED, AVEY, RAVEN_BOTH, VISUAL[1], CASES["gecko-many-bos"]),
)
def test_padding_in_generate(case, batch):
    model, (side, lengths) = case.model(), batch
    rows = texts(case, *lengths)
    inputs = padded(rows, side, more=4 * (len(rows) == 1))
    out = model.generate(**inputs, max_new_tokens=8, **GREEDY)[:, inputs["input_ids"].shape[1] :]
    for n, row in enumerate(rows):
        assert out[n].tolist() == model.generate(**row, max_new_tokens=8, **GREEDY)[0, -8:].tolist()


@pytest.mark.fast
@each_case_and_reader
def test_padding_between_turns(case):
    """Two turns of a conversation: one call equals two, whose padding meets, and each text alone."""
    model, rows = case.model(), texts(case, 31, 12, 7)
    first = padded(rows, "right", more=2)
    more = [{"input_ids": case.ids(1, n, seed=n)} for n in (1, 9, 27)]
    second = padded(more, "left", more=1)
    mask = torch.cat((first["attention_mask"], second["attention_mask"]), 1)
    both = {**join(first, second), "attention_mask": mask}
    with torch.no_grad():
        whole = model(**both)
        cache = model(**first).cache
        start, second["attention_mask"] = cache.clone(), mask
        out = model(**second, cache=cache)
        assert_same_states(cache, whole.cache)
        # A call gives the tokens of Avey what one call with the whole text up to its end gives them.
        real = mask[:, 33:] == 1
        torch.testing.assert_close(out.logits[real], whole.logits[:, 33:][real], **TOLERANCE)
        for n, (row, rest) in enumerate(zip(rows, more, strict=True)):
            alone = model(**join(row, rest)).logits[0]
            torch.testing.assert_close(whole.logits[n][mask[n] == 1], alone, **TOLERANCE)
    expected = model.generate(**both, max_new_tokens=5, **GREEDY)
    assert torch.equal(model.generate(**both, cache=start, max_new_tokens=5, **GREEDY), expected)
    options = {"cache_implementation": "static", "disable_compile": True, "max_new_tokens": 5, **GREEDY}
    assert torch.equal(model.generate(**both, **options), expected)


@each_text_model_case
def test_positions_under_padding(case):
    """They may count padding or not. Those of padding mean nothing."""
    model, text = case.model(), padded([{"input_ids": case.ids(1, n, seed=n)} for n in (30, 19)], "anywhere", more=3)
    mask = text["attention_mask"]
    counts = mask.cumsum(1) - 1
    with torch.no_grad():
        expected = model(**text).logits[mask == 1]
        for positions in (counts, counts.masked_fill(mask == 0, 1), torch.arange(5, 38)[None]):
            found = model(**text, position_ids=positions).logits[mask == 1]
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.fast
@each_with_side((FINCH, AVEY), (EAGLE, GOOSE, DEEP_EMBED, RAVEN, GECKO, VISUAL[1]))
@torch.no_grad()
def test_loss_under_padding(case, side):
    """That of the texts alone, as a mean, a sum, with shifted labels, and for the count of the Trainer."""
    model, rows = case.model(), texts(case, 7, 20, 2)
    alone = [summed_loss(model, row) for row in rows]
    total, items = (sum(x) for x in zip(*alone, strict=True))
    inputs = padded(rows, side)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    for options, weight in (
        ({}, items),
        ({"num_items_in_batch": 2}, 2),
        ({"shift_labels": shifted}, items),
        ({"num_items_in_batch": (labels[:, 1:] != -100).sum()}, items),
        ({"num_items_in_batch": (shifted != -100).sum().item(), "shift_labels": shifted}, items),
    ):
        found = model(**inputs, labels=labels, **options).loss
        assert found.item() * weight == pytest.approx(total, rel=1e-4)


@each_case
@torch.no_grad()
def test_loss_of_a_later_call(case):
    """The first real token of each row has none: the token before it is in another call."""
    model, first, second = case.model(), texts(case, 4, 9), texts(case, 19, 2)
    alone = [summed_loss(model, row, cache=model(**start).cache) for start, row in zip(first, second, strict=True)]
    inputs = padded(second, "left", more=1)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    loss = model(**inputs, labels=labels, num_items_in_batch=1, cache=model(**padded(first, "right")).cache).loss
    assert loss.item() == pytest.approx(sum(total for total, _ in alone), rel=1e-4)


@pytest.mark.quick_cases("*rwkv*", "avey", "raven", "raven-both", "gecko", "gecko-many-bos")
@each_case_and_variant
def test_gradients_under_padding(case):
    model, rows = case.model(), texts(case, 7, 70)

    def grads(inputs):
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        model.zero_grad()
        # Summed, so that the rows weigh the same in a batch and alone.
        model(**inputs, labels=labels, num_items_in_batch=1).loss.backward()
        return gradients(case, model)

    alone = [grads(padded([row], "left")) for row in rows]
    expected = {name: sum(grads[name] for grads in alone) for name in alone[0]}
    for side in ("left", "right", "anywhere"):
        assert_all_close(grads(padded(rows, side)), expected, atol=1e-3, rtol=1e-3)


@each_causal
def test_classification_is_exact_under_padding(model_type):
    model = tiny_model(model_type, "AutoModelForSequenceClassification", num_labels=4, pad_token_id=0)
    rows = [random_ids(n, seed=n) for n in (3, 70, 12)]
    alone = torch.cat([model(row[None]).logits for row in rows])
    for side in ("left", "right", "anywhere"):
        inputs = padded([{"input_ids": row[None]} for row in rows], side)
        torch.testing.assert_close(model(**inputs).logits, alone, atol=1e-4, rtol=1e-4)
        if side != "anywhere":  # without a mask, the padding id at the ends of a row marks the padding
            torch.testing.assert_close(model(inputs["input_ids"]).logits, alone, atol=1e-4, rtol=1e-4)
    # Inside a text the padding id is a token like any other.
    torch.testing.assert_close(
        model(torch.tensor([[5, 0, 7]])).logits,
        model(torch.tensor([[5, 0, 7]]), attention_mask=torch.ones(1, 3)).logits,
    )


def test_tokens_move_between_devices():
    tokens = Tokens(2, 3, torch.device(DEVICE), torch.tensor([[0, 1, 1], [1, 1, 1]]))
    moved = tokens.to("meta")
    assert moved.mask.device.type == "meta"
    assert tokens.mask.device.type == DEVICE
    assert moved.zero_padding(torch.ones(2, 3, 4, device="meta")).device.type == "meta"
    assert moved.forward_fill(torch.ones(2, 3, 4, device="meta"), None).device.type == "meta"

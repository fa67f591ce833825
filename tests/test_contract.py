"""What every causal model promises."""

import itertools
import re
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from cases import (
    BASE,
    DEVICE,
    GENERATING,
    GREEDY,
    IMAGE_ID,
    RAVEN_BOTH,
    RAVEN_FULL,
    READERS,
    TEXT,
    TRAINED_GENERATING,
    VARIANTS,
    VISUAL,
    assert_same_states,
    batch,
    cut,
    each,
    each_case,
    each_case_and_all,
    each_case_and_reader,
    each_case_and_trained,
    each_case_and_variant,
    each_model_case,
    each_text_case,
    each_text_model_case,
    each_text_model_case_and_trained,
    each_with,
    join,
    padded,
    pick,
    random_ids,
    split,
    tiny_config,
)
from huggingface_hub.errors import StrictDataclassClassValidationError
from kernel_cases import triton
from transformers import DynamicCache, GenerationConfig
from transformers.modeling_layers import GradientCheckpointingLayer


LENGTH = 83  # more than one chunk of the time-parallel operators, and not a multiple
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
each_side = pytest.mark.parametrize("side", ["left", "right", "anywhere"])


def gradients(case, model):
    """Clones of the gradients by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if not re.search(case.dead, name)}


def assert_all_close(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def texts(case, *lengths):
    """One row of each length."""
    return [case.text(1, n, seed=n) for n in lengths]


# 1. Any split of a sequence gives the same logits.

SPLITS = [(82, 1), (1, 82), (1,) * 27 + (40,) + (1,) * 16, (64, 19), (17, 1, 1, 40, 24)]


@pytest.mark.quick_cases(
    "*rwkv*-[0134]", "avey-[0134]", "raven-[0134]", "gecko-[0134]", "raven-*-4", "gecko-*-4", "rwkv6-2", "gecko-2"
)
@each_with("pieces", SPLITS, (*GENERATING, *TRAINED_GENERATING), SPLITS[-1:], (*VARIANTS, *READERS))
def test_any_split(case, pieces):
    model, text = case.model(), case.text(2, LENGTH)
    with torch.no_grad():
        cache = None
        for start, stop in split(text, pieces):
            out = model(**cut(text, start, stop), cache=cache, use_cache=True)
            cache, whole = out.cache, model(**cut(text, 0, stop))
            torch.testing.assert_close(out.logits, whole.logits[:, start:], **TOLERANCE)
    assert cache.get_seq_length() == LENGTH
    assert_same_states(cache, whole.cache)


# 2. Padding changes nothing.

ROWS = [(7, 83, 1, 66), (5,)]


@pytest.mark.quick_cases("*rwkv*", "*-avey-?", "*-raven-?", "*-gecko-?", "[la]*-raven-*", "[la]*-gecko-*")
@pytest.mark.fast
@each_with("lengths", ROWS, (*GENERATING, *TRAINED_GENERATING), ROWS[:1], (*VARIANTS, *READERS))
@each_side
def test_padding(case, side, lengths):
    model, rows = case.model(), texts(case, *lengths)
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
@each_case_and_reader
@each_side
def test_padding_in_a_later_call(case, side):
    model, first, second = case.model(), texts(case, 4, 9), texts(case, 70, 2)
    with torch.no_grad():
        cache = model(**padded(first, "left")).cache
        inputs = padded(second, side)
        out = model(**inputs, cache=cache)
        for n, mask in enumerate(inputs["attention_mask"]):
            alone = model(**join(first[n], second[n])).logits[0, first[n]["input_ids"].shape[1] :]
            torch.testing.assert_close(out.logits[n][mask == 1], alone, **TOLERANCE)


@pytest.mark.quick_cases(
    *("left-*rwkv?-?", "left-avey-?", "left-raven-?", "left-gecko-?", "right-rwkv6-?", "right-gecko-?"),
    *("anywhere-rwkv?-0", "anywhere-avey-0", "anywhere-raven*-0", "anywhere-gecko-0"),
)
@each_with("lengths", [(3, 70, 12), (5,)], (*GENERATING, *TRAINED_GENERATING), [(3, 70, 12)], VARIANTS)
@each_side
def test_padding_in_generate(case, side, lengths):
    model, rows = case.model(), texts(case, *lengths)
    inputs = padded(rows, side, more=4 * (len(rows) == 1))
    out = model.generate(**inputs, max_new_tokens=8, **GREEDY)[:, inputs["input_ids"].shape[1] :]
    for n, row in enumerate(rows):
        assert out[n].tolist() == model.generate(**row, max_new_tokens=8, **GREEDY)[0, -8:].tolist()


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


def summed_loss(model, inputs, **options):
    """The loss of one text, summed, and the number of its labels; images have none."""
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE_ID, -100)
    labels[:, 0] = -100
    return model(**inputs, labels=labels, num_items_in_batch=1, **options).loss.item(), (labels != -100).sum().item()


@pytest.mark.quick_cases("*-rwkv?", "*-avey", "*-raven", "*-gecko", "left-visual*")
@pytest.mark.fast
@each_case_and_variant
@each_side
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
def test_labels_of_another_shape(case):
    model, ids = case.model(), case.ids(2, 9)
    for labels in ({"labels": ids[:, 1:]}, {"labels": ids, "shift_labels": ids[:1]}):
        name, given = labels.copy().popitem()
        with pytest.raises(
            ValueError, match=re.escape(f"`{name}` must be (2, 9), as the logits, got {tuple(given.shape)}")
        ):
            model(ids, **labels)
    with pytest.raises(ValueError, match=re.escape("`labels` must be (2, 4), as the logits, got (2, 9)")):
        model(ids, labels=ids, logits_to_keep=4)
    with torch.no_grad():
        logits = model(ids, labels=ids[:, -4:], logits_to_keep=4)
        expected = torch.nn.functional.cross_entropy(logits.logits[:, :-1].flatten(0, 1), ids[:, -3:].flatten())
        torch.testing.assert_close(logits.loss, expected)


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


# 3. Every way of generating, and the cache's operations.

BEAMS = [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 3}]


@pytest.mark.fast
@each_case_and_trained
def test_greedy_is_the_arg_max(case):
    model, text = case.model(), case.text(2, 6)
    out = model.generate(**text, max_new_tokens=12, **GREEDY)
    logits = []
    with torch.no_grad():
        for n in range(12):
            logits.append(model(**join(text, {"input_ids": out[:, 6 : 6 + n]})).logits[:, -1, : case.new_ids])
    assert out[:, 6:].T.tolist() == [x.argmax(-1).tolist() for x in logits]


@pytest.mark.fast
@each_case
def test_sampling_follows_the_seed(case):
    model, text = case.model(), case.text(2, 5)
    options = {**GREEDY, "max_new_tokens": 12, "do_sample": True, "top_k": 0}
    outs = []
    for seed, use_cache in ((0, True), (0, True), (0, False), (1, True)):
        torch.manual_seed(seed)
        outs.append(model.generate(**text, use_cache=use_cache, **options).tolist())
    assert outs[0] == outs[1] == outs[2] != outs[3]


@pytest.mark.quick_cases("*rwkv?-?", "avey-?", "raven-?", "gecko-?")
@each_with("options", BEAMS, (*GENERATING, *TRAINED_GENERATING), BEAMS[:1], VARIANTS)
def test_beam_search(case, options):
    model, text = case.model(), case.text(2, 5)
    options = {"max_new_tokens": 10, **GREEDY, **options}
    assert torch.equal(model.generate(**text, **options), model.generate(**text, use_cache=False, **options))


@pytest.mark.quick_cases("rwkv7", "avey", "raven", "gecko", "visual-rwkv6")
@each(*GENERATING, *VARIANTS, *TRAINED_GENERATING)
def test_assisted_decoding(case):
    model, text, options = case.model(), join(*[case.text(1, 6)] * 3), {"max_new_tokens": 16, **GREEDY}
    expected = model.generate(**text, **options)
    lookup = model.generate(**text, prompt_lookup_num_tokens=4, **options)
    padded_lookup = model.generate(**padded([text], "left", more=5), prompt_lookup_num_tokens=4, **options)
    assert torch.equal(padded_lookup[:, 5:], lookup)
    assert torch.equal(lookup, expected)

    # An assistant that is right, one that is nearly right, and one that knows nothing.
    nearly = case.model()
    with torch.no_grad():
        for parameter in nearly.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    for assistant in (case.model(), nearly, case.model(seed=5)):
        assert torch.equal(model.generate(**text, assistant_model=assistant, **options), expected)


@pytest.mark.fast
@each_case
def test_early_exit(case):
    model, text, options = case.model(), case.text(1, 6), {"max_new_tokens": 12, **GREEDY}
    assert torch.equal(model.generate(**text, assistant_early_exit=2, **options), model.generate(**text, **options))


@each_case
def test_sampling_with_an_assistant(case):
    model, text = case.model(), case.text(1, 6)
    options = {**GREEDY, "max_new_tokens": 7, "do_sample": True}
    torch.manual_seed(0)
    assert model.generate(**text, assistant_model=case.model(seed=5), **options).shape == (1, 13)
    # With one candidate token left there is nothing to choose.
    out = model.generate(**text, assistant_model=case.model(seed=5), **options, top_k=1)
    assert torch.equal(out, model.generate(**text, max_new_tokens=7, **GREEDY))


@pytest.mark.fast
@each(*GENERATING, *VARIANTS, *TRAINED_GENERATING)
def test_continuing_from_a_returned_cache(case):
    model, text = case.model(), case.text(2, 6)
    expected = model.generate(**text, max_new_tokens=14, **GREEDY)
    first = model.generate(**text, max_new_tokens=5, return_dict_in_generate=True, **GREEDY)
    # `generate` has not yet read the last token it chose.
    assert first.cache.get_seq_length() == 10
    text["input_ids"] = first.sequences
    text["attention_mask"] = torch.ones_like(first.sequences)  # the id of padding may have been generated, too
    second = model.generate(**text, cache=first.cache, max_new_tokens=9, **GREEDY)
    assert torch.equal(second, expected)


def until(row: torch.Tensor, token: int, start: int) -> torch.Tensor:
    """The ids of a row, up to the first such token from `start` on."""
    found = (row[start:] == token).nonzero().flatten().tolist()
    return row[: start + found[0] + 1] if found else row


@pytest.mark.fast
@pytest.mark.quick_cases(
    *("rwkv?-dynamic", "avey-*", "raven-*c", "gecko-*c", "visual-rwkv6-dynamic", "goose-abc-dynamic")
)
@pytest.mark.parametrize(
    "options", [{}, {"cache_implementation": "static", "max_cache_len": 32}], ids=["dynamic", "static"]
)
@each(*GENERATING, *VARIANTS, *TRAINED_GENERATING)
def test_rows_that_end_early(case, options):
    """The state of a row that has ended stays that after its last token, and a second turn goes on from there."""
    model, options = case.model(), {**GREEDY, **options, "return_dict_in_generate": True}
    texts = [case.text(1, n, seed=n) for n in (7, 4, 6)]
    text = padded(texts, "left")
    free = model.generate(**text, max_new_tokens=8, **GREEDY)
    # The token that some row has early, and another late or not at all.
    end = max(free[:, 7:12].flatten().tolist(), key=lambda end: np.ptp([len(until(row, end, 7)) for row in free]))
    first = model.generate(**text, max_new_tokens=8, **{**options, "eos_token_id": end})
    rows = [until(row, end, 7) for row in first.sequences]
    lengths, width = torch.tensor([len(row) for row in rows], device=DEVICE), first.sequences.shape[1]
    assert width - lengths.min() >= 3
    mask = (torch.arange(width, device=DEVICE) < lengths[:, None]).long()
    mask[:, :7] = text["attention_mask"]

    # What was generated, alone, and a second turn.
    said = [join(alone, {"input_ids": row[None, 7:]}) for alone, row in zip(texts, rows, strict=True)]
    turn = case.ids(3, 2, seed=9)
    expected = []
    for row in range(3):
        ids = torch.cat((said[row]["input_ids"], turn[row : row + 1]), 1)
        alone = {**said[row], "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        expected.append(model.generate(**alone, max_new_tokens=5, **GREEDY)[0, -5:])
    text["input_ids"] = torch.cat((first.sequences, turn), 1)
    text["attention_mask"] = torch.cat((mask, torch.ones_like(turn)), 1)
    kept = first.cache.clone()
    second = model.generate(**text, cache=first.cache, max_new_tokens=5, **GREEDY)
    assert torch.equal(second[:, -5:], torch.stack(expected))
    new = {"attention_mask": text["attention_mask"], "cache": kept.clone()}
    rest = text["input_ids"][:, kept.get_seq_length() :]
    with torch.no_grad():
        logits = model(rest, **{**new, "cache": kept.clone()}).logits[:, -1]
    assert torch.equal(logits[:, : case.new_ids].argmax(-1), torch.stack(expected)[:, 0])

    # A mask of other tokens than were read.
    new["attention_mask"] = torch.ones_like(new["attention_mask"])
    with pytest.raises(ValueError, match=rf"`attention_mask`, row \d: 0 of the first {width - 1} tokens are marked"):
        model(rest, **new)
    new["attention_mask"] = text["attention_mask"][:, 1:]
    with pytest.raises(
        ValueError, match=f"`attention_mask` has {width + 1} columns, but `cache` has read {width - 1}"
    ):
        model(rest, **new)
    with pytest.raises(ValueError, match=f"`attention_mask` has {width + 2} columns, but the input has 3 tokens"):
        model(rest, attention_mask=text["attention_mask"])


@pytest.mark.fast
@each_case
def test_inputs_embeds(case):
    model, text = case.model(), case.text(2, 70)
    ids = text["input_ids"]
    # First, because transformers takes the number of rows from the first argument.
    embeds = {"inputs_embeds": model.get_input_embeddings()(ids), **text}
    del embeds["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(model(**embeds).logits, model(**text).logits)
    expected = model.generate(**text, max_new_tokens=6, **GREEDY)
    assert torch.equal(model.generate(**embeds, max_new_tokens=6, **GREEDY), expected[:, 70:])
    # Both: the ids are returned with the continuation, the embeddings are read.
    assert torch.equal(model.generate(ids, **embeds, max_new_tokens=6, **GREEDY), expected)


@pytest.mark.quick_cases(
    *("left-rwkv?", "left-avey", "left-raven", "left-gecko", "right-rwkv6", "right-gecko"),
    *("anywhere-rwkv6", "anywhere-raven", "anywhere-gecko"),
)
@each(*TEXT, *VARIANTS)
@each_side
def test_chunked_prefill(case, side):
    # The short row is padding alone in several of the chunks. Without images, which no chunk may cut.
    model, rows = case.model(), [{"input_ids": case.ids(1, n, seed=n)} for n in (30, 5, 17)]
    options = {**padded(rows, side), "max_new_tokens": 6, **GREEDY}
    expected = model.generate(**options)
    for size in (2, 7, 29):
        assert torch.equal(model.generate(**options, prefill_chunk_size=size), expected)


@pytest.mark.fast
@each_case_and_variant
def test_static_cache_is_the_same_cache(case):
    torch.compiler.reset()  # compiled steps of other models, for which torch 2.11 would make this one's sizes symbols
    model, text = case.model(), case.text(2, 5)
    options = {"max_new_tokens": 6, **GREEDY}
    expected = model.generate(**text, **options)
    for name in ("static", "dynamic"):
        assert torch.equal(model.generate(**text, cache_implementation=name, **options), expected)
    with pytest.raises(ValueError, match="`cache_implementation` 'quantized'"):
        model.generate(**text, cache_implementation="quantized", **options)


READS = [(9,), (1,), (70, 1, 5), (1, 1, 1, 1)]


@pytest.mark.quick_cases("*rwkv?-[12]", "avey-[12]", "raven-?", "gecko-?", "raven-*-2", "gecko-*-2")
@each_with("read", READS, (*GENERATING, *TRAINED_GENERATING), READS[2:3], VARIANTS)
def test_crop(case, read):
    model, text = case.model(), case.text(2, 20 + sum(read))  # no image is among the last tokens
    with torch.no_grad():
        start = model(**cut(text, 0, 20)).cache
        for removed in {0, 1, sum(read) - 1, sum(read)}:
            cache = start.clone()
            cache.activate_past_recording()
            for begin, end in itertools.pairwise(itertools.accumulate(read, initial=20)):
                model(**cut(text, begin, end), cache=cache)
            cache.crop(-removed)
            kept = 20 + sum(read) - removed
            assert cache.get_seq_length() == kept
            expected = model(**cut(text, 0, kept)).cache
            assert_same_states(cache, expected)
            # And again, from the cropped state.
            model(case.ids(2, 4), cache=cache)
            cache.crop(-4)
            assert_same_states(cache, expected)


@pytest.mark.fast
@each(*GENERATING, RAVEN_FULL)
@each_side
def test_crop_of_padded_calls(case, side):
    model, second = case.model(), case.ids(2, 20)
    first = padded([{"input_ids": case.ids(1, n, seed=n)} for n in (21, 13)], side)
    first, mask = first["input_ids"], first["attention_mask"]
    with torch.no_grad():

        def read(*pieces):
            cache = model.new_cache()
            for ids, real in pieces:
                model(ids, attention_mask=real, cache=cache)
            return cache

        recorded = model.new_cache()
        recorded.activate_past_recording()
        model(first, attention_mask=mask, cache=recorded)
        model(second, cache=recorded)
        for removed in (3, 20, 24):
            cache = recorded.clone()
            cache.crop(-removed)
            begun = first.shape[1] - max(removed - 20, 0)
            pieces = [(first[:, :begun], mask[:, :begun])]
            if removed < 20:
                pieces.append((second[:, :-removed], None))
            assert_same_states(cache, read(*pieces))


@pytest.mark.fast
@each_case_and_variant
def test_crop_to_nothing(case):
    model, ids = case.model(), case.ids(1, 5)
    cache = model.new_cache()
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids, cache=cache)
        cache.crop(-5)
        assert cache.get_seq_length() == 0
        torch.testing.assert_close(model(ids, cache=cache).logits, model(ids).logits)


@each_text_case
def test_transformers_may_end_the_record(case):
    model, ids = case.model(), case.ids(1, 20)
    cache = model.new_cache()
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids[:, :12], cache=cache)
        cache.crop(-2)
        for layer in cache.layers:  # as `generate` does on some devices
            layer.record_past = False
        model(ids[:, 10:], cache=cache, cu_seqlens=torch.tensor([0, 4, 10]))
        assert not any(layer.records for layer in cache.all_layers)
        torch.testing.assert_close(
            model(ids[:, :1], cache=cache).logits,
            model(torch.cat((ids[:, 14:], ids[:, :1]), 1)).logits[:, -1:],
            **TOLERANCE,
        )


@each_text_case
def test_record_is_bounded(case):
    # In float64: over a long text rounding might make a router choose another slot.
    model, ids = case.model().double(), case.ids(1, 1500)
    cache = model.new_cache()
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids[:, :700], cache=cache)
        for start in range(700, 1500, 100):
            model(ids[:, start : start + 100], cache=cache)
        for layer in cache.all_layers:
            for record in layer.records.values():
                assert 256 <= record.tokens <= 512
                assert all(
                    x.untyped_storage().nbytes() <= 513 * x[0, 0].numel() * x.element_size() for x in record.updates
                )
        cache.crop(-250)
        expected = model(ids[:, :1250]).cache
    assert_same_states(cache, expected)


@each_case
def test_recording_refuses_packed_documents(case):
    model = case.model()
    cache = model.new_cache()
    cache.activate_past_recording()
    with pytest.raises(ValueError, match="Packed documents"):
        model(case.ids(1, 6), cache=cache, cu_seqlens=torch.tensor([0, 2, 6]))


@each_case
def test_crop_is_refused_if_nothing_was_recorded(case):
    model = case.model()
    with torch.no_grad():
        cache = model(**case.text(1, 5)).cache
    before = cache.clone()
    with pytest.raises(ValueError, match="`tokens_to_remove` is -2.*0 tokens"):
        cache.crop(-2)
    with pytest.raises(ValueError, match="`tokens_to_remove` must be 0 or negative"):
        cache.crop(2)
    assert cache.get_seq_length() == 5
    assert_same_states(cache, before)


@pytest.mark.fast
@each(*GENERATING, *VARIANTS, *TRAINED_GENERATING)
def test_cache_operations(case, tmp_path):
    model, text = case.model(), case.text(3, 9)
    with torch.no_grad():
        cache = model(**text).cache

        def logits(cache, rows):
            return model(torch.full((len(rows), 1), 7), cache=cache.clone()).logits

        rows = torch.tensor([0, 1, 2])
        expected = logits(cache, rows)

        reordered = cache.clone()
        reordered.reorder_cache(torch.tensor([2, 0, 0]))
        torch.testing.assert_close(logits(reordered, rows), expected[[2, 0, 0]])

        selected = cache.clone()
        selected.batch_select_indices(torch.tensor([1]))
        torch.testing.assert_close(logits(selected, rows[:1]), expected[[1]], **TOLERANCE)

        with torch.enable_grad():
            attached = model(**text).cache
            torch.testing.assert_close(logits(attached, rows), expected)

        repeated = cache.clone()
        repeated.batch_repeat_interleave(2)
        torch.testing.assert_close(logits(repeated, range(6)), expected.repeat_interleave(2, 0), **TOLERANCE)

        cache.save(tmp_path / "cache.safetensors")
        loaded = type(cache).load(tmp_path / "cache.safetensors", model.config).to(DEVICE)
        assert loaded.get_seq_length() == 9
        torch.testing.assert_close(logits(loaded, rows), expected)
        assert [file.name for file in tmp_path.iterdir()] == ["cache.safetensors"]

        moved = cache.clone().to("meta").named_states().values()
        assert {state.device.type for state in moved} == {"meta"}

        cache.reset()
        assert cache.get_seq_length() == 0
        torch.testing.assert_close(model(**text, cache=cache).logits, model(**text).logits)


@pytest.mark.fast
@each(*GENERATING, *VARIANTS, *TRAINED_GENERATING)
def test_reset_rows(case, tmp_path):
    """A row that was reset begins anew, and the others go on, with their gradients."""
    model, before, rows = case.model(), texts(case, 70, 9, 33), torch.tensor([False, True, False])
    more, last = case.text(3, 40, seed=1), case.text(3, 2, seed=2)
    alone = [pick(more, n) if reset else join(before[n], pick(more, n)) for n, reset in enumerate(rows)]
    for static in (False, True):
        cache = model.new_cache(static, max_cache_len=128)
        with torch.set_grad_enabled(not static):
            model(**padded(before, "anywhere"), cache=cache)
            states = [state for state in cache.named_states().values() if state.requires_grad]
            cache.reset_rows(rows)
            with pytest.raises(ValueError, match="Rows that were reset must read a token"):
                cache.save(tmp_path / "cache")
            found = model(**more, cache=cache).logits
            for n, text in enumerate(alone):
                torch.testing.assert_close(found[n], model(**text).logits[0, -40:], **TOLERANCE)
        for n, reset in enumerate([] if static else rows):
            gradients = torch.autograd.grad(found[n].sum(), states, allow_unused=True, retain_graph=True)
            assert reset != any(x is not None and bool(x.any()) for x in gradients)
        with torch.no_grad():
            found = model(**last, cache=cache.detach()).logits
            for n, text in enumerate(alone):
                expected = model(**join(text, pick(last, n))).logits[0, -2:]
                torch.testing.assert_close(found[n], expected, **TOLERANCE)
    for wrong in (rows[:2], rows.int(), 1):
        with pytest.raises(ValueError, match=r"`rows` must be bool \(3\), one for each row of the cache, got"):
            cache.reset_rows(wrong)


# 4. The state does not grow.


@pytest.mark.fast
@each_case
def test_state_size(case):
    model = case.model()
    with torch.no_grad():
        sizes = [model(**case.text(1, n)).cache.num_elements for n in (1, 5, 200)]
    assert sizes == case.state_sizes(model.config.get_text_config())


@each_case_and_variant
def test_state_does_not_hold_the_sequence(case):
    model = case.model()
    with torch.no_grad():
        cache = model(**case.text(1, 200)).cache
    for layer in cache.all_layers:
        for state in layer.states.values():
            assert state.untyped_storage().nbytes() == state.numel() * state.element_size()


# 5. Packed documents.


@pytest.mark.fast
@each_case_and_all
def test_packed_documents(case):
    model, lengths = case.model(), (3, 70, 1, 12)
    documents = texts(case, *lengths)
    packed = join(*documents)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        expected = torch.cat([model(**document).logits for document in documents], 1)
        last = model(**documents[-1]).cache
        ways = ({"cu_seqlens": bounds}, {"cu_seq_lens_q": bounds}, {"position_ids": positions})
        for way in ways:
            out = model(**packed, **way)
            torch.testing.assert_close(out.logits, expected, **TOLERANCE)
            assert_same_states(out.cache, last)
        base = model.base_model
        torch.testing.assert_close(
            base(**packed, cu_seq_lens_q=bounds).last_hidden_state,
            base(**packed, cu_seqlens=bounds).last_hidden_state,
        )
        whole = model(**packed).logits
        assert not torch.allclose(whole, expected, **TOLERANCE)
        # Positions that do not restart are one document, wherever they begin.
        for start in (0, 5):
            one = model(**packed, position_ids=torch.arange(start, start + sum(lengths))[None]).logits
            torch.testing.assert_close(one, whole)


@each_case_and_reader
def test_packed_documents_in_several_rows(case):
    model = case.model()
    rows = [join(*texts(case, 6, 14)), case.text(1, 20)]
    text = batch(rows)
    positions = torch.stack((torch.cat((torch.arange(6), torch.arange(14))), torch.arange(20)))
    with torch.no_grad():
        cache = model(case.ids(2, 4)).cache
        out = model(**text, position_ids=positions, cache=cache.clone())
        # The first document of a row continues the cache; the others start anew.
        first, second = cache.clone(), cache.clone()
        first.batch_select_indices(torch.tensor([0]))
        second.batch_select_indices(torch.tensor([1]))
        begin, rest = cut(rows[0], 0, 6), cut(rows[0], 6)
        torch.testing.assert_close(out.logits[:1, :6], model(**begin, cache=first).logits, **TOLERANCE)
        torch.testing.assert_close(out.logits[:1, 6:], model(**rest).logits, **TOLERANCE)
        torch.testing.assert_close(out.logits[1:], model(**rows[1], cache=second).logits, **TOLERANCE)
        out.cache.batch_select_indices(torch.tensor([0]))
        assert_same_states(out.cache, model(**rest).cache)


@each_case_and_reader
@torch.no_grad()
def test_loss_of_packed_documents(case):
    """The first token of a document has none, however the boundaries are given."""
    model, lengths = case.model(), (5, 1, 19, 8)
    documents = texts(case, *lengths)
    alone = [summed_loss(model, document) for document in documents]
    total, items = (sum(x) for x in zip(*alone, strict=True))
    packed = join(*documents)
    positions = torch.cat([torch.arange(n, device=DEVICE) for n in lengths])[None]
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE)
    for way in ({"cu_seqlens": bounds}, {"cu_seq_lens_q": bounds.int()}, {"position_ids": positions}):
        loss = model(**packed, **way, labels=packed["input_ids"]).loss
        assert loss.item() * items == pytest.approx(total, rel=1e-4)
    rows = batch([join(*documents[:3]), case.text(1, 25)])  # two rows, one of them packed
    positions = torch.stack((positions[0, :25], torch.arange(25, device=DEVICE)))
    loss = model(**rows, position_ids=positions, labels=rows["input_ids"], num_items_in_batch=1).loss
    expected = sum(loss for loss, _ in alone[:3]) + summed_loss(model, case.text(1, 25))[0]
    assert loss.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.fast
@each_case_and_variant
def test_gradients_of_packed_documents(case):
    model, documents = case.model().double(), texts(case, 5, 66)

    def grads(**inputs):
        model.zero_grad()
        model(**inputs).logits.square().sum().backward()
        return gradients(case, model)

    alone = [grads(**document) for document in documents]
    packed = grads(**join(*documents), cu_seqlens=torch.tensor([0, 5, 71]))
    expected = {name: sum(grads[name] for grads in alone) for name in packed}
    assert_all_close(packed, expected, atol=1e-5, rtol=1e-6)


# 6. Gradients.


@pytest.mark.quick_cases("*-0", "rwkv6-triton", "raven-triton", "avey-b-triton")
@each_with("backend", ["eager", triton], BASE, ["eager"], VISUAL)
def test_gradient_checkpointing(case, backend, monkeypatch):
    monkeypatch.setenv("SUBQUAD_BACKEND", backend)
    layers, size = (3, (2, 70)) if backend == "eager" else (1, (1, 9))
    model, text = case.model(num_hidden_layers=layers).train(), case.text(*size)

    def grads():
        model.zero_grad()
        torch.manual_seed(0)  # of what noise a router has in training
        model(**text, labels=text["input_ids"]).loss.backward()
        return gradients(case, model)

    expected = grads()
    assert all(grad.abs().sum() > 0 for grad in expected.values())
    for use_reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        assert_all_close(grads(), expected)
        model.gradient_checkpointing_disable()


@pytest.mark.quick_cases("*rwkv?", "*-avey", "*-raven", "*-raven-both", "*-gecko")
@each(*GENERATING, RAVEN_FULL, RAVEN_BOTH)
@pytest.mark.parametrize("detached", [False, True])
def test_gradient_checkpointing_in_pieces(case, detached):
    """A text in pieces: gradients go back through the states, or end where they are detached."""
    model = case.model(**case.quiet).train()
    text = padded([{"input_ids": case.ids(1, n, seed=n)} for n in (70, 22)], "anywhere")

    def read():
        model.zero_grad()
        cache, total = None, 0
        for start, stop in split(text, (40, 1, 29)):
            piece = {name: x[:, start:stop] for name, x in text.items()}
            out = model(**piece, labels=piece["input_ids"], num_items_in_batch=9, cache=cache, use_cache=True)
            cache, total = out.cache, total + out.loss
            if detached:
                assert cache.detach() is cache
                assert not any(state.requires_grad for state in cache.named_states().values())
                with torch.no_grad():  # which writes over no state that the gradients need
                    model(case.ids(2, 1), cache=cache)
        total.backward()
        return cache, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    block = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)][-1]
    next(block.children()).register_forward_pre_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    runs = []
    cache, expected = read()
    for use_reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        runs = []
        again, found = read()
        assert sum(runs) == 3 * (2 - use_reentrant)  # with gradients; the block has computed each piece twice
        assert_same_states(again, cache)
        assert_all_close(found, expected, atol=1e-4, rtol=1e-4)
        model.gradient_checkpointing_disable()


@pytest.mark.fast
@each_case
def test_gradient_checkpointing_and_caches(case):
    model, text = case.model(), case.text(1, 8)
    cache = model(**text).cache
    cache.activate_past_recording()
    model.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="`cache` records the past"):
        model(**text, cache=cache)
    assert cache.get_seq_length() == 8
    assert model(**text).cache is None
    assert model.eval()(**text, cache=cache).cache.get_seq_length() == 16


@pytest.mark.quick_cases(
    "padded-eager-*", "padded-triton-rwkv7", "padded-triton-raven", "padded-triton-avey*", "packed-eager-rwkv6"
)
@each_text_model_case
@pytest.mark.parametrize("backend", ["eager", triton])
@pytest.mark.parametrize("way", ["rows", "padded", "packed"])
def test_backends_agree(case, backend, way, monkeypatch):
    layers = 1 if backend == "triton" else 2  # the interpreter is slow
    model = case.model(num_hidden_layers=layers)
    if way == "rows":
        inputs = case.text(2, 20)
    elif way == "padded":
        inputs = padded(texts(case, 20, 7), "anywhere", more=2)
    else:
        inputs = {**join(*texts(case, 7, 1, 20)), "cu_seqlens": torch.tensor([0, 7, 8, 28])}
    results = []
    for one in (backend, "reference"):
        monkeypatch.setenv("SUBQUAD_BACKEND", one)
        model.zero_grad()
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        results.append({"loss": loss.detach(), **gradients(case, model)})
    assert_all_close(*results, **TOLERANCE)


@pytest.mark.quick_cases("dynamic-rwkv7", "dynamic-avey", "dynamic-raven")
@each_text_case
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_of_every_backend(case, cache, monkeypatch):
    # The interpreter is slow; a chunk of 8 ends all the same while tokens are generated.
    model, results = case.model(num_hidden_layers=2), []
    inputs = padded(texts(case, 14, 5), "anywhere", more=2)
    backends = ["reference", "eager"] + ["triton"] * (find_spec("triton") is not None)
    for backend in backends:
        monkeypatch.setenv("SUBQUAD_BACKEND", backend)
        options = {"max_new_tokens": 4, "cache_implementation": cache, "disable_compile": True, **GREEDY}
        results.append(model.generate(**inputs, **options))
    assert all(torch.equal(x, results[0]) for x in results)


# 7. torch.compile.


@pytest.fixture
def graphs():
    """A list that a test's own compiler adds graphs to."""
    torch.compiler.reset()
    yield []
    torch.compiler.reset()


@pytest.mark.quick_cases("rwkv6", "avey-b")
@each(*BASE, *VISUAL, RAVEN_FULL, RAVEN_BOTH)
def test_compiled_training(case, graphs):
    model = case.model(num_hidden_layers=max(2, case.layer_kinds)).train()
    inputs = padded(texts(case, 61, 70), "anywhere")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    def grads(model):
        model.zero_grad()
        torch.manual_seed(0)
        model(**inputs, labels=inputs["input_ids"]).loss.backward()

    grads(compiled)
    found = gradients(case, model)
    grads(model)
    assert_all_close(found, gradients(case, model), **TOLERANCE)


@pytest.mark.quick_cases("rwkv6", "gecko")
@each(*BASE, RAVEN_FULL, RAVEN_BOTH)
def test_compiled_packed_documents(case, graphs):
    """Positions that restart are read between two graphs, and are an error where there must be one."""
    model = case.model(num_hidden_layers=case.layer_kinds)
    compiled = torch.compile(model, backend="aot_eager")

    def grads(call, ids, positions):
        model.zero_grad()
        call(input_ids=ids, position_ids=positions, labels=ids).loss.backward()
        return gradients(case, model)

    for lengths in ((5, 1, 9), (15,), (3, 4, 6, 2)):
        ids = case.ids(1, 15, seed=len(lengths))
        positions = torch.cat([torch.arange(n, device=DEVICE) for n in lengths])[None]
        expected = grads(model, ids, positions)
        assert_all_close(grads(compiled, ids, positions), expected, **TOLERANCE)
    with pytest.raises(Exception, match="a graph cannot read where: pass `cu_seqlens` instead"):
        torch.compile(model, backend="eager", fullgraph=True)(input_ids=ids, position_ids=positions)
    with pytest.raises(ValueError, match="compiled models read packed documents in one"):
        compiled(input_ids=case.ids(2, 15), position_ids=positions)


@pytest.mark.quick_cases("rwkv6", "raven")
@each(*GENERATING, RAVEN_FULL, RAVEN_BOTH)
def test_compiled_decode_step(case, graphs):
    model, text = case.model(num_hidden_layers=case.layer_kinds), case.text(2, 10)
    ids = case.ids(2, 10)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        cache = model(**text).cache
        logits = [compiled(ids[:, t : t + 1], cache=cache, use_cache=True).logits for t in range(10)]
        expected = [model(**join(text, {"input_ids": ids[:, : t + 1]})).logits[:, -1:] for t in range(10)]
        torch.testing.assert_close(logits, expected, **TOLERANCE)
    assert len(graphs) <= case.decode_graphs


@pytest.mark.quick_cases("rwkv6")
@each(*BASE, *VISUAL, RAVEN_FULL, RAVEN_BOTH)
def test_compiled_with_a_default_device(case, graphs):
    """It is a mode of torch, under which Dynamo traces also those methods of tensors that are written in Python."""
    model, text = case.model(num_hidden_layers=case.layer_kinds), case.text(2, 10)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.device(DEVICE), torch.no_grad():
        found, expected = compiled(**text), model(**text)
        torch.testing.assert_close(found.logits, expected.logits, **TOLERANCE)
        if case.causal:
            found = compiled(case.ids(2, 1), past_key_values=found.past_key_values).logits
            expected = model(case.ids(2, 1), past_key_values=expected.past_key_values).logits
            torch.testing.assert_close(found, expected, **TOLERANCE)


# 8. Number formats.


@each_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(case, dtype, tmp_path):
    model, text = case.model(), case.text(2, 20)
    model.save_pretrained(tmp_path)
    low = type(model).from_pretrained(tmp_path, dtype=dtype)
    assert low.dtype == dtype
    with torch.no_grad():
        expected, out = model(**text), low(**text)
    assert out.logits.dtype == dtype
    error = (out.logits.float() - expected.logits).norm() / expected.logits.norm()
    assert error < (0.1 if dtype == torch.bfloat16 else 0.02)
    for name in case.float32_states:
        states = [layer.states[name] for layer in out.cache.all_layers if name in layer.states]
        assert {state.dtype for state in states} == {torch.float32}
    rows = pick(text, 0), pick(text, 1)
    left = padded([cut(rows[0], 0, 13), rows[1]], "left")
    alone = low(**cut(rows[0], 0, 13)).logits
    torch.testing.assert_close(low(**left).logits[:1, 7:], alone, atol=0.1, rtol=0.1)
    assert low.generate(**text, max_new_tokens=3, **GREEDY).shape == (2, 23)
    low.train()(**text, labels=text["input_ids"]).loss.backward()
    assert all(grad.isfinite().all() for grad in gradients(case, low).values())


@each_text_model_case_and_trained
def test_autocast(case):
    model, ids = case.model().train(), random_ids(2, 20)
    expected = model(ids, labels=ids).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, atol=0.1, rtol=0.05)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


# 9. Wrong input is refused by name, before any work.


@each_model_case
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "Exactly one of `input_ids` and `inputs_embeds`"),
        ({"input_ids": [[1, 2]], "inputs_embeds": [[[0.0] * 48]]}, "Exactly one of"),
        ({"input_ids": [[]]}, "`input_ids` must be"),
        ({"input_ids": [1, 2]}, "`input_ids` must be"),
        ({"input_ids": [[1, 98]]}, "`input_ids` holds 98, but `vocab_size` is {}"),
        ({"input_ids": [[1, -1]]}, "`input_ids` holds -1"),
        (
            {"input_ids": [[1, 2, 3, 4]], "attention_mask": [[1, 0, 0, 1]], "position_ids": [[0, 1, 1, 0]]},
            "`position_ids` restart inside a row with padding",
        ),
        (
            {"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]], "cu_seqlens": [0, 1, 3]},
            "`cu_seqlens` describes one row without padding",
        ),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1]]}, "`attention_mask` must be"),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[[[1, 1, 1]]]]}, "`attention_mask` must be"),
        ({"input_ids": [[1, 2, 3]], "position_ids": [[0, 1]]}, "`position_ids` must be"),
        ({"input_ids": [[1, 2, 3]], "position_ids": [[0, 1, 2]] * 2}, "`position_ids` must be"),
        (
            {"input_ids": [[1, 2, 3]], "attention_mask": [[0, 1, 1]], "position_ids": [[0, 1, 0]]},
            "`position_ids` restart inside a row with padding",
        ),
        ({"input_ids": [[1, 2], [3, 4]], "cu_seqlens": [0, 2]}, "`cu_seqlens` describes one row"),
        ({"input_ids": [[1, 2, 3]], "cu_seqlens": [0, 30]}, r"`cu_seqlens` must increase from 0 to 3.*got \[0, 30\]"),
        ({"input_ids": [[1, 2, 3]], "cu_seqlens": [0, 3, 3]}, "`cu_seqlens` must increase"),
        ({"input_ids": [[1, 2, 3]], "cu_seqlens": [[0, 3]]}, "`cu_seqlens` must be int32 or int64"),
        ({"inputs_embeds": [[[0.0] * 47]]}, r"`inputs_embeds` must be \(batch, length, 48\)"),
    ],
)
def test_wrong_input(case, inputs, message):
    model = case.model()
    with pytest.raises(ValueError, match=r"`input_ids` must be int64 or int32, got torch.float32"):
        model(torch.ones(1, 2))
    inputs = {
        name: torch.tensor(value, dtype=torch.float32 if name == "inputs_embeds" else torch.long)
        for name, value in inputs.items()
    }
    with pytest.raises(ValueError, match=message.replace("{}", str(case.vocabulary))):
        model(**inputs)


@pytest.mark.fast
@each_case
def test_foreign_caches(case, tmp_path):
    model, text = case.model(), case.text(2, 4)
    deeper, cache_class = case.config(num_hidden_layers=4), type(model.new_cache())
    for empty in (DynamicCache(), DynamicCache(config=model.config)):
        out = model(**text, cache=empty, use_cache=True)
        assert_same_states(out.cache, model(**text).cache)
        with pytest.raises(ValueError, match="`cache` is a DynamicCache that was given before, and is still empty"):
            model(**text, cache=empty)
    options = {"max_new_tokens": 2, **GREEDY}
    generated = model.generate(**text, **options, past_key_values=DynamicCache())
    assert torch.equal(generated, model.generate(**text, **options))
    filled = DynamicCache()
    filled.update(torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 8), 0)
    with pytest.raises(ValueError, match=f"`cache` must be a {cache_class.__name__}.*DynamicCache"):
        model(**text, cache=filled)
    other = tiny_config(case.other_type)
    other.chunk_size = 8  # which the caches of Avey and Gecko read
    with pytest.raises(ValueError, match=f"`cache` is the cache of another model: `model_type` '{case.other_type}'"):
        model(**text, cache=cache_class(other))
    with pytest.raises(ValueError, match="`num_hidden_layers` 4, not 3"):
        model(**text, cache=cache_class(deeper.get_text_config()))
    wider = cache_class(case.config(hidden_size=96).get_text_config())
    with pytest.raises(ValueError, match="`hidden_size` 96, not 48"):
        model(**text, cache=wider)
    cache = model(**text).cache
    with pytest.raises(ValueError, match="`cache` holds the state of 2 sequences, the input has 3"):
        model(case.ids(3, 1), cache=cache)
    with pytest.raises(ValueError, match="`states`: 'layers.3.output' is in none of the layers layers.0, "):
        cache.clone().set_states({"layers.3.output": torch.zeros(2, 48)})
    cache.save(tmp_path / "cache.safetensors")
    with pytest.raises(ValueError, match="`num_hidden_layers` 3, not 4"):
        cache_class.load(tmp_path / "cache.safetensors", deeper)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not hold a cache"):
        cache_class.load(tmp_path / "model.safetensors", model.config)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("case", "fields", "message"),
    [
        pytest.param(case, fields, message, id=f"{case.name}-{next(iter(fields))}-{next(iter(fields.values()))}")
        for case in (*BASE, *VISUAL)
        for fields, message in (({"vocab_size": 0}, "`vocab_size` must be at least 1, got 0"), *case.wrong)
    ],
)
def test_wrong_configuration(case, fields, message):
    with pytest.raises(StrictDataclassClassValidationError, match=message):
        case.config(**fields)


@pytest.mark.fast
@each_case
def test_generation_config_is_saved(case, tmp_path):
    model = case.model()
    model.generation_config = GenerationConfig(max_new_tokens=3, **GREEDY)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    text = case.text(1, 5)
    assert torch.equal(loaded.generate(**text), model.generate(**text))

"""Any split of a text gives the same, and a cache can be cropped, reordered, saved and moved."""

import copy
import itertools

import pytest
import torch
from cases import (
    BASE,
    DEEP_EMBED,
    DEVICE,
    GENERATING,
    GREEDY,
    KINDS,
    RAVEN_BOTH,
    READERS,
    TOLERANCE,
    TRAINED_GENERATING,
    VARIANTS,
    VISUAL,
    assert_same_states,
    cut,
    each,
    each_cache,
    each_case,
    each_case_and_variant,
    each_kind,
    each_text_case,
    each_with,
    each_with_side,
    join,
    padded,
    pick,
    split,
    texts,
    tiny_config,
)
from transformers import (
    DynamicCache,
    StaticCache,
)


LENGTH = 83  # more than one chunk of the time-parallel operators, and not a multiple


SPLITS = [(82, 1), (1, 82), (1,) * 11 + (53,) + (1,) * 9 + (10,), (17, 1, 1, 40, 24)]


@pytest.mark.quick_cases("*rwkv*-[013]", "avey-[013]", "raven-[013]", "gecko-*", "raven-*-3", "rwkv6-2")
@each_with("pieces", SPLITS, GENERATING, SPLITS[-1:], (VISUAL[2], *VARIANTS, *READERS, *TRAINED_GENERATING))
def test_any_split(case, pieces):
    model, text = case.model(), case.text(2, LENGTH)
    with torch.no_grad():
        cache, whole = None, model(**text)
        for start, stop in split(text, pieces):
            out = model(**cut(text, start, stop), cache=cache, use_cache=True)
            cache, expected = out.cache, model(**cut(text, 0, stop)) if case.splits else whole
            torch.testing.assert_close(out.logits, expected.logits[:, start:stop], **TOLERANCE)
    assert cache.get_seq_length() == LENGTH
    assert_same_states(cache, whole.cache)


READS = [(70, 1, 5), (1, 1, 1, 1)]


@pytest.mark.quick_cases("*rwkv?-0", "avey-*", "raven*", "gecko*")
@each_with("read", READS, GENERATING, READS[:1], VARIANTS)
def test_crop(case, read):
    model, text = case.model(), case.text(2, 20 + sum(read))  # no image is among the last tokens
    with torch.no_grad():
        recorded = model(**cut(text, 0, 20)).cache
        recorded.activate_past_recording()
        for begin, end in itertools.pairwise(itertools.accumulate(read, initial=20)):
            model(**cut(text, begin, end), cache=recorded)
        for removed in {0, 1, sum(read) - 1, sum(read)}:
            cache = recorded.clone()
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
@each_with_side(KINDS, (DEEP_EMBED, VISUAL[1], RAVEN_BOTH))
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
@each_cache
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


@each(*KINDS, DEEP_EMBED)
def test_record_is_bounded(case):
    # In float64: over a long text rounding might make a router choose another slot.
    model, ids = case.model().double(), case.ids(1, 940)
    cache = model.new_cache()
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids[:, :540], cache=cache)
        for start in range(540, 940, 100):
            model(ids[:, start : start + 100], cache=cache)
        for layer in cache.all_layers:
            for record in layer.records.values():
                assert 256 <= record.tokens <= 512
                assert all(
                    x.untyped_storage().nbytes() <= 513 * x[0, 0].numel() * x.element_size() for x in record.updates
                )
        cache.crop(-250)
        expected = model(ids[:, :690]).cache
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


def addresses(cache):
    return {x.data_ptr() for layer in cache.all_layers for x in layer.states.values()}


@pytest.mark.fast
@each_cache
def test_cache_operations(case, tmp_path):
    """Of dynamic and of static caches, whose states stay at their addresses."""
    model, text = case.model(), padded(texts(case, 9, 4, 7), "left")
    cache_class, rows = type(model.new_cache()), torch.tensor([0, 1, 2])

    def logits(cache, rows):
        return model(torch.full((len(rows), 1), 7), cache=cache.clone()).logits

    attached = model(**text).cache
    for static in (False, True):
        with torch.no_grad():
            cache = model.new_cache(static, max_cache_len=64)
            model(**text, cache=cache)
            expected = logits(cache, rows)
            torch.testing.assert_close(logits(attached, rows), expected)

            reordered = cache.clone()
            assert reordered.is_compileable == static and not addresses(reordered) & addresses(cache)
            before = addresses(reordered)
            reordered.reorder_cache(torch.tensor([2, 0, 0]))
            assert not static or addresses(reordered) == before
            torch.testing.assert_close(logits(reordered, rows), expected[[2, 0, 0]])

            selected = cache.clone()
            selected.batch_select_indices(torch.tensor([1]))
            torch.testing.assert_close(logits(selected, rows[:1]), expected[[1]], **TOLERANCE)
            selected.batch_repeat_interleave(2)
            assert selected.batch_size == 2
            torch.testing.assert_close(logits(selected, rows[:2]), expected[[1, 1]], **TOLERANCE)

            cache.save(tmp_path / "cache.safetensors")
            for other in (False, True):
                loaded = cache_class.load(tmp_path / "cache.safetensors", model.config, static=other).to(DEVICE)
                assert loaded.get_seq_length() == 9 and loaded.is_compileable == other
                assert_same_states(loaded, cache)
            assert [file.name for file in tmp_path.iterdir()] == ["cache.safetensors"]

            moved = cache.clone().to("meta").named_states().values()
            assert {state.device.type for state in moved} == {"meta"}

            cache.reset()
            assert cache.get_seq_length() == 0
            torch.testing.assert_close(model(**text, cache=cache).logits, model(**text).logits)
            cache.save(tmp_path / "cache.safetensors")
            assert_same_states(cache_class.load(tmp_path / "cache.safetensors", model.config).to(DEVICE), cache)


@pytest.mark.fast
@each_cache
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
            cache.save(tmp_path / "cache")
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


@pytest.mark.fast
@each_case
def test_state_size(case):
    model = case.model()
    with torch.no_grad():
        sizes = [model(**case.text(1, n)).cache.num_elements for n in (1, 5, 200)]
    assert sizes == case.state_sizes(model.config.get_text_config())


@each_cache
def test_state_does_not_hold_the_sequence(case):
    model = case.model()
    with torch.no_grad():
        cache = model(**case.text(1, 200)).cache
    for layer in cache.all_layers:
        for state in layer.states.values():
            assert state.untyped_storage().nbytes() == state.numel() * state.element_size()


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
@each(*BASE, VISUAL[1], *VARIANTS)
def test_layer_types(case):
    config = case.config()
    text = config.get_text_config()
    assert len(text.layer_types) == text.num_hidden_layers
    text.validate_layer_type()
    if case.causal:  # a cache of transformers can be made, although no model takes it
        assert len(DynamicCache(config=config)) == len(StaticCache(config, max_cache_len=4)) == text.num_hidden_layers
    assert "layer_types" not in config.to_dict()
    setattr(text, text.attribute_map.get("num_hidden_layers", "num_hidden_layers"), 0)
    assert text.layer_types is None


@each_case_and_variant
def test_a_cache_has_the_layers_that_transformers_expects(case):
    model, text = case.model(), case.text(2, 20)
    types = model.config.get_text_config().layer_types
    for static in (False, True):
        cache = model.new_cache(static, max_cache_len=32)
        assert isinstance(cache, StaticCache) == cache.is_compileable == static
        assert len(cache) == len(cache.layers) == len(types)
        assert not any(cache.is_linear)  # or `generate` would not ask how many tokens it has read
        assert not any(cache.is_sliding)
        for tokens, count in ((None, 0), (text, 20)):
            if tokens is not None:
                with torch.no_grad():
                    model(**tokens, cache=cache)
            assert cache.get_seq_length() == count
            for number, (layer, kind) in enumerate(zip(cache.layers, types, strict=True)):
                if kind == "linear_attention":
                    assert cache.has_previous_state(number) == bool(count) >= bool(layer.states)
                    found = [state for state in layer.recurrent_states.values() if state is not None]
                    assert bool(found) == bool(layer.states.keys() & {*case.float32_states} - {"sums"})
                    assert any(layer.is_recurrent_states_initialized.values()) == bool(found)
                    assert all(state.dim() == 3 for state in layer.conv_states.values() if state is not None)
                elif kind == "full_attention" and count:
                    assert layer.keys.shape == layer.values.shape == (2, 1, layer.keys.shape[2], 16)
                    assert layer.keys[:, :, 20:].any() == False < layer.keys[:, :, :20].any()  # noqa: E712
                else:
                    assert layer.keys is None is layer.values
        for other in (cache.clone(), copy.deepcopy(cache)):
            assert type(other) is type(cache)
            if static:
                other.activate_past_recording()
                assert not other.is_compileable
        cache.reset()
        if "linear_attention" in types:
            assert not cache.has_previous_state(types.index("linear_attention"))


@pytest.mark.fast
@each_kind
def test_what_a_cache_has_read_is_not_read_again(case):
    model, text = case.model(), case.text(2, 9)
    options = {**GREEDY, "return_dict_in_generate": True}
    for cache in (None, "static"):
        out = model.generate(**text, **options, max_new_tokens=5, cache_implementation=cache, max_cache_len=32)
        whole, read = out.sequences, out.cache
        for ids in (text["input_ids"], whole[:, -1:], whole[:, :13]):
            wrong = rf"`cache` has read 13 tokens, but the text has {ids.shape[1]}\. Give the whole text"
            with pytest.raises(ValueError, match=wrong):
                model.generate(ids, **options, cache=read.clone(), max_new_tokens=3)
        expected = model.generate(**text, **options, max_new_tokens=8).sequences
        mask = torch.ones_like(whole)  # the id of padding may have been generated, too
        on = model.generate(whole, **options, attention_mask=mask, cache=read.clone(), max_new_tokens=3)
        assert torch.equal(on.sequences, expected)
        on = model.generate(whole[:, -1:], **options, attention_mask=mask, cache=read, max_new_tokens=3)
        assert torch.equal(on.sequences, expected[:, 13:])

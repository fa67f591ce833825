"""What every causal model promises."""

import itertools
from importlib.util import find_spec

import pytest
import torch
from architectures import (
    CAUSAL,
    RWKV,
    VOCABULARY,
    assert_same_states,
    each_causal,
    each_causal_and_trained,
    each_model,
    each_model_and_trained,
    random_ids,
    tiny_config,
    tiny_model,
)
from huggingface_hub.errors import StrictDataclassClassValidationError
from kernel_cases import triton
from transformers import DynamicCache, GenerationConfig


LENGTH = 83  # more than one chunk of the time-parallel operators, and not a multiple
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


def padded(rows, side, value=0):
    """Rows of different lengths as one batch, with its mask."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), value)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for row, (i, m) in zip(rows, zip(ids, mask, strict=True), strict=True):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        i[place], m[place] = row, 1
    return ids, mask


# 1. Any split of a sequence gives the same logits.


@each_causal_and_trained
@pytest.mark.parametrize("pieces", [(82, 1), (1, 82), (1,) * LENGTH, (64, 19), (17, 1, 1, 40, 24)])
def test_any_split(model_type, pieces):
    model, ids = tiny_model(model_type), random_ids(2, LENGTH)
    with torch.no_grad():
        cache, start = None, 0
        for piece in pieces:
            out = model(ids[:, start : start + piece], past_key_values=cache, use_cache=True)
            cache, start = out.past_key_values, start + piece
            whole = model(ids[:, :start])
            torch.testing.assert_close(out.logits, whole.logits[:, -piece:], **TOLERANCE)
    assert cache.get_seq_length() == LENGTH
    assert_same_states(cache, whole.past_key_values)


# 2. Padding changes nothing.


@each_causal_and_trained
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("lengths", [(7, 83, 1, 66), (5,)])
def test_padding(model_type, side, lengths):
    model = tiny_model(model_type)
    rows = [random_ids(n, seed=n) for n in lengths]
    ids, mask = padded(rows, side)
    if len(rows) == 1:  # a batch of one that is padded all the same
        pad = (9, 0) if side == "left" else (0, 9)
        ids, mask = (torch.nn.functional.pad(x, pad) for x in (ids, mask))
    with torch.no_grad():
        batch = model(ids, attention_mask=mask)
        # What follows continues every row after its own last token.
        after = model(random_ids(len(rows), 3), past_key_values=batch.past_key_values).logits
        for n, row in enumerate(rows):
            alone = model(row[None])
            torch.testing.assert_close(batch.logits[n][mask[n] == 1], alone.logits[0], **TOLERANCE)
            torch.testing.assert_close(batch.logits[n, -1], alone.logits[0, -1], **TOLERANCE)
            next_alone = model(random_ids(len(rows), 3)[n : n + 1], past_key_values=alone.past_key_values).logits
            torch.testing.assert_close(after[n], next_alone[0], **TOLERANCE)


@each_causal
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_in_a_later_call(model_type, side):
    model = tiny_model(model_type)
    first, second = [random_ids(n, seed=n) for n in (4, 9)], [random_ids(n, seed=n) for n in (70, 2)]
    with torch.no_grad():
        ids, mask = padded(first, "left")
        cache = model(ids, attention_mask=mask).past_key_values
        ids, mask = padded(second, side)
        out = model(ids, attention_mask=mask, past_key_values=cache)
        for n in range(2):
            alone = model(torch.cat((first[n], second[n]))[None]).logits[0, len(first[n]) :]
            torch.testing.assert_close(out.logits[n][mask[n] == 1], alone, **TOLERANCE)


@each_causal_and_trained
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("lengths", [(3, 70, 12), (5,)])
def test_padding_in_generate(model_type, side, lengths):
    model = tiny_model(model_type)
    rows = [random_ids(n, seed=n) for n in lengths]
    ids, mask = padded(rows, side)
    if len(rows) == 1:
        ids, mask = (torch.nn.functional.pad(x, (4, 0) if side == "left" else (0, 4)) for x in (ids, mask))
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]
    for n, row in enumerate(rows):
        assert out[n].tolist() == model.generate(row[None], **options)[0, len(row) :].tolist()


@each_causal
def test_gradients_under_padding(model_type):
    model = tiny_model(model_type)
    rows = [random_ids(n, seed=n) for n in (7, 70)]

    def grads(ids, mask):
        labels = ids.masked_fill(mask == 0, -100)
        model.zero_grad()
        # Summed, so that the rows weigh the same in a batch and alone.
        model(ids, attention_mask=mask, labels=labels, num_items_in_batch=1).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    alone = [sum(pair) for pair in zip(*(grads(*padded([row], "left")) for row in rows), strict=True)]
    for side in ("left", "right"):
        for grad, expected in zip(grads(*padded(rows, side)), alone, strict=True):
            torch.testing.assert_close(grad, expected, atol=1e-3, rtol=1e-3)


# 3. Every way of generating, and the cache's operations.


@each_causal_and_trained
def test_greedy_is_the_arg_max(model_type):
    model, ids = tiny_model(model_type), random_ids(2, 5)
    out = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        expected = [model(out[:, :n]).logits[:, -1].argmax(-1).tolist() for n in range(5, 17)]
    assert out[:, 5:].T.tolist() == expected


@each_causal
def test_sampling_follows_the_seed(model_type):
    model, ids = tiny_model(model_type), random_ids(2, 5)
    options = {"max_new_tokens": 12, "do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}
    outs = []
    for seed, use_cache in ((0, True), (0, True), (0, False), (1, True)):
        torch.manual_seed(seed)
        outs.append(model.generate(ids, use_cache=use_cache, **options).tolist())
    assert outs[0] == outs[1] == outs[2] != outs[3]


@each_causal_and_trained
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 3}])
def test_beam_search(model_type, options):
    model, ids = tiny_model(model_type), random_ids(2, 5)
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


@each_causal_and_trained
def test_assisted_decoding(model_type):
    model, ids = tiny_model(model_type), random_ids(1, 6).repeat(1, 3)
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    lookup = model.generate(ids, prompt_lookup_num_tokens=4, **options)
    left = torch.nn.functional.pad(ids, (5, 0))
    padded_lookup = model.generate(left, attention_mask=(left != 0).long(), prompt_lookup_num_tokens=4, **options)
    assert torch.equal(padded_lookup[:, 5:], lookup)
    assert torch.equal(lookup, expected)

    # An assistant that is right, one that is nearly right, and one that knows nothing.
    nearly = tiny_model(model_type)
    with torch.no_grad():
        for parameter in nearly.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    for assistant in (tiny_model(model_type), nearly, tiny_model(model_type, seed=5)):
        assert torch.equal(model.generate(ids, assistant_model=assistant, **options), expected)


@each_causal
def test_early_exit(model_type):
    model, ids = tiny_model(model_type), random_ids(1, 6)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, assistant_early_exit=2, **options), model.generate(ids, **options))


@each_causal
def test_sampling_with_an_assistant(model_type):
    model, ids = tiny_model(model_type), random_ids(1, 6)
    options = {"max_new_tokens": 7, "do_sample": True, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    out = model.generate(ids, assistant_model=tiny_model(model_type, seed=5), **options)
    assert out.shape == (1, 13)
    # With one candidate token left there is nothing to choose.
    options["top_k"] = 1
    out = model.generate(ids, assistant_model=tiny_model(model_type, seed=5), **options)
    assert torch.equal(out, model.generate(ids, max_new_tokens=7, do_sample=False, eos_token_id=None, pad_token_id=0))


@each_causal_and_trained
def test_continuing_from_a_returned_cache(model_type):
    model, ids = tiny_model(model_type), random_ids(2, 6)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, max_new_tokens=14, **options)
    first = model.generate(ids, max_new_tokens=5, return_dict_in_generate=True, **options)
    # `generate` has not yet read the last token it chose.
    assert first.past_key_values.get_seq_length() == 10
    second = model.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=9, **options)
    assert torch.equal(second, expected)


@each_causal
def test_inputs_embeds(model_type):
    model, ids = tiny_model(model_type), random_ids(2, 70)
    embeds = model.get_input_embeddings()(ids)
    with torch.no_grad():
        torch.testing.assert_close(model(inputs_embeds=embeds).logits, model(ids).logits)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(inputs_embeds=embeds, **options), expected[:, 70:])
    # Both: the ids are returned with the continuation, the embeddings are read.
    assert torch.equal(model.generate(ids, inputs_embeds=embeds, **options), expected)


@each_causal
@pytest.mark.parametrize("side", ["left", "right"])
def test_chunked_prefill(model_type, side):
    model = tiny_model(model_type)
    # The short row is padding alone in several of the chunks.
    ids, mask = padded([random_ids(n, seed=n) for n in (30, 5, 17)], side)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, attention_mask=mask, **options)
    for size in (2, 7, 29):
        assert torch.equal(model.generate(ids, attention_mask=mask, prefill_chunk_size=size, **options), expected)


@each_causal
def test_static_cache_is_the_same_cache(model_type):
    model, ids = tiny_model(model_type), random_ids(2, 5)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    for name in ("static", "dynamic"):
        assert torch.equal(model.generate(ids, cache_implementation=name, **options), expected)
    with pytest.raises(ValueError, match="`cache_implementation` 'quantized'"):
        model.generate(ids, cache_implementation="quantized", **options)


@each_causal_and_trained
@pytest.mark.parametrize("read", [(9,), (1,), (70, 1, 5), (1, 1, 1, 1)])
def test_crop(model_type, read):
    model, ids = tiny_model(model_type), random_ids(2, 20 + sum(read))
    with torch.no_grad():
        start = model(ids[:, :20]).past_key_values
        for removed in {0, 1, sum(read) - 1, sum(read)}:
            cache = start.clone()
            cache.activate_past_recording()
            at = 20
            for piece in read:
                model(ids[:, at : at + piece], past_key_values=cache)
                at += piece
            cache.crop(-removed)
            kept = ids.shape[1] - removed
            assert cache.get_seq_length() == kept
            expected = model(ids[:, :kept]).past_key_values
            assert_same_states(cache, expected)
            # And again, from the cropped state.
            model(ids[:, :4], past_key_values=cache)
            cache.crop(-4)
            assert_same_states(cache, expected)


@each_causal
@pytest.mark.parametrize("side", ["left", "right"])
def test_crop_of_padded_calls(model_type, side):
    model = tiny_model(model_type)
    (first, mask), second = padded([random_ids(n, seed=n) for n in (21, 13)], side), random_ids(2, 20)
    with torch.no_grad():

        def read(*pieces):
            cache = model.new_cache()
            for ids, real in pieces:
                model(ids, attention_mask=real, past_key_values=cache)
            return cache

        recorded = model.new_cache()
        recorded.activate_past_recording()
        model(first, attention_mask=mask, past_key_values=recorded)
        model(second, past_key_values=recorded)
        for removed in (3, 20, 24):
            cache = recorded.clone()
            cache.crop(-removed)
            begun = first.shape[1] - max(removed - 20, 0)
            pieces = [(first[:, :begun], mask[:, :begun])]
            if removed < 20:
                pieces.append((second[:, :-removed], None))
            assert_same_states(cache, read(*pieces))


@each_causal
def test_crop_to_nothing(model_type):
    model, ids = tiny_model(model_type), random_ids(1, 5)
    cache = model.new_cache()
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids, past_key_values=cache)
        cache.crop(-5)
        assert cache.get_seq_length() == 0
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, model(ids).logits)


@each_causal
def test_record_is_bounded(model_type):
    # In float64: over a long text rounding might make a router choose another slot.
    model, ids = tiny_model(model_type).double(), random_ids(1, 1500)
    cache = model.new_cache()
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids[:, :700], past_key_values=cache)
        for start in range(700, 1500, 100):
            model(ids[:, start : start + 100], past_key_values=cache)
        for layer in cache.layers:
            for record in layer.records.values():
                assert 256 <= record.tokens <= 512
                assert all(
                    x.untyped_storage().nbytes() <= 513 * x[0, 0].numel() * x.element_size() for x in record.updates
                )
        cache.crop(-250)
        expected = model(ids[:, :1250]).past_key_values
    assert_same_states(cache, expected)


@each_causal
def test_recording_refuses_packed_documents(model_type):
    model = tiny_model(model_type)
    cache = model.new_cache()
    cache.activate_past_recording()
    with pytest.raises(ValueError, match="Packed documents"):
        model(random_ids(1, 6), past_key_values=cache, cu_seqlens=torch.tensor([0, 2, 6]))


@each_causal
def test_crop_is_refused_where_nothing_was_recorded(model_type):
    model, ids = tiny_model(model_type), random_ids(1, 5)
    with torch.no_grad():
        cache = model(ids).past_key_values
    before = cache.clone()
    with pytest.raises(ValueError, match="`tokens_to_remove` is -2.*0 tokens"):
        cache.crop(-2)
    with pytest.raises(ValueError, match="`tokens_to_remove` must be 0 or negative"):
        cache.crop(2)
    assert cache.get_seq_length() == 5
    assert_same_states(cache, before)


@each_causal_and_trained
def test_cache_operations(model_type, tmp_path):
    model, ids = tiny_model(model_type), random_ids(3, 9)
    with torch.no_grad():
        cache = model(ids).past_key_values

        def logits(cache, rows):
            return model(torch.full((len(rows), 1), 7), past_key_values=cache.clone()).logits

        rows = torch.tensor([0, 1, 2])
        expected = logits(cache, rows)

        reordered = cache.clone()
        reordered.reorder_cache(torch.tensor([2, 0, 0]))
        torch.testing.assert_close(logits(reordered, rows), expected[[2, 0, 0]])

        selected = cache.clone()
        selected.batch_select_indices(torch.tensor([1]))
        torch.testing.assert_close(logits(selected, rows[:1]), expected[[1]], **TOLERANCE)

        with torch.enable_grad():
            attached = model(ids).past_key_values
            torch.testing.assert_close(logits(attached, rows), expected)

        repeated = cache.clone()
        repeated.batch_repeat_interleave(2)
        torch.testing.assert_close(logits(repeated, range(6)), expected.repeat_interleave(2, 0), **TOLERANCE)

        cache.save(tmp_path / "cache.safetensors")
        loaded = type(cache).load(tmp_path / "cache.safetensors", model.config)
        assert loaded.get_seq_length() == 9
        torch.testing.assert_close(logits(loaded, rows), expected)
        assert [file.name for file in tmp_path.iterdir()] == ["cache.safetensors"]

        assert {state.device.type for layer in cache.clone().to("meta").layers for state in layer.states.values()} == {
            "meta"
        }

        cache.reset()
        assert cache.get_seq_length() == 0
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, model(ids).logits)


# 4. The state does not grow.


@each_causal
def test_state_size(model_type):
    model = tiny_model(model_type)
    with torch.no_grad():
        sizes = [model(random_ids(1, n)).past_key_values.num_elements for n in (1, 5, 200)]
    c = model.config
    if model_type == "avey":  # the embeddings, with room for 1, 1 and 32 splits, their scores, and the length
        assert sizes == [n * (c.chunk_size * c.d_embed + 1) + 1 for n in (1, 1, 32)]
    elif model_type == "raven":  # two slot memories, and keys and values of one head in a window
        slots = c.num_heads * c.num_slots * (c.head_k_dim + c.head_v_dim)
        assert set(sizes) == {2 * slots + 2 * c.attn["window_size"] * c.hidden_size // c.attn["num_heads"]}
    elif model_type == "gecko":  # moments, CEMA, two chunks, the memory and its normalizer
        moments, ema = 3 * c.timenorm_num_groups, 2 * c.model_dim * c.cema_ndim
        chunks, memory = 2 * c.chunk_size * (2 * c.z_dim + c.value_dim), c.z_dim * c.value_dim // c.num_heads + c.z_dim
        assert set(sizes) == {c.num_layers * (moments + ema + chunks + memory)}
    else:
        assert set(sizes) == {c.num_hidden_layers * (2 * c.hidden_size + c.attention_hidden_size * c.head_size)}


@each_causal
def test_state_does_not_hold_the_sequence(model_type):
    model = tiny_model(model_type)
    with torch.no_grad():
        cache = model(random_ids(1, 200)).past_key_values
    for layer in cache.layers:
        for state in layer.states.values():
            assert state.untyped_storage().nbytes() == state.numel() * state.element_size()


# 5. Packed documents.


@each_causal_and_trained
def test_packed_documents(model_type):
    model, lengths = tiny_model(model_type), (3, 70, 1, 12)
    documents = [random_ids(1, n, seed=n) for n in lengths]
    packed = torch.cat(documents, 1)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        expected = torch.cat([model(document).logits for document in documents], 1)
        last = model(documents[-1]).past_key_values
        ways = ({"cu_seqlens": bounds}, {"cu_seq_lens_q": bounds}, {"position_ids": positions})
        for way in ways:
            out = model(packed, **way)
            torch.testing.assert_close(out.logits, expected, **TOLERANCE)
            assert_same_states(out.past_key_values, last)
        base = model.base_model
        torch.testing.assert_close(
            base(packed, cu_seq_lens_q=bounds).last_hidden_state, base(packed, cu_seqlens=bounds).last_hidden_state
        )
        whole = model(packed).logits
        assert not torch.allclose(whole, expected, **TOLERANCE)
        # Positions that do not restart are one document, wherever they begin.
        for start in (0, 5):
            one = model(packed, position_ids=torch.arange(start, start + packed.shape[1])[None]).logits
            torch.testing.assert_close(one, whole)


@each_causal
def test_packed_documents_in_several_rows(model_type):
    model = tiny_model(model_type)
    ids = random_ids(2, 20)
    positions = torch.stack((torch.cat((torch.arange(6), torch.arange(14))), torch.arange(20)))
    with torch.no_grad():
        cache = model(random_ids(2, 4)).past_key_values
        out = model(ids, position_ids=positions, past_key_values=cache.clone())
        # The first document of a row continues the cache; the others start anew.
        first, second = cache.clone(), cache.clone()
        first.batch_select_indices(torch.tensor([0]))
        second.batch_select_indices(torch.tensor([1]))
        torch.testing.assert_close(out.logits[:1, :6], model(ids[:1, :6], past_key_values=first).logits, **TOLERANCE)
        torch.testing.assert_close(out.logits[:1, 6:], model(ids[:1, 6:]).logits, **TOLERANCE)
        torch.testing.assert_close(out.logits[1:], model(ids[1:], past_key_values=second).logits, **TOLERANCE)
        out.past_key_values.batch_select_indices(torch.tensor([0]))
        assert_same_states(out.past_key_values, model(ids[:1, 6:]).past_key_values)


@each_causal
def test_gradients_of_packed_documents(model_type):
    model, lengths = tiny_model(model_type).double(), (5, 66)
    documents = [random_ids(1, n, seed=n) for n in lengths]

    def grads(**inputs):
        model.zero_grad()
        model(**inputs).logits.square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    alone = [sum(pair) for pair in zip(*(grads(input_ids=x) for x in documents), strict=True)]
    packed = grads(input_ids=torch.cat(documents, 1), cu_seqlens=torch.tensor([0, 5, 71]))
    for grad, expected in zip(packed, alone, strict=True):
        torch.testing.assert_close(grad, expected, atol=1e-6, rtol=1e-6)


# 6. Gradients.


@each_model
@pytest.mark.parametrize("backend", ["eager", triton])
def test_gradient_checkpointing(model_type, backend, monkeypatch):
    monkeypatch.setenv("SUBQUAD_BACKEND", backend)
    layers, size = (3, (2, 70)) if backend == "eager" else (1, (1, 9))
    model, ids = tiny_model(model_type, num_hidden_layers=layers).train(), random_ids(*size)

    def grads():
        model.zero_grad()
        torch.manual_seed(0)  # of what noise a router has in training
        model(ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = grads()
    assert all(grad.abs().sum() > 0 for grad in expected)
    for use_reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        for grad, grad_expected in zip(grads(), expected, strict=True):
            torch.testing.assert_close(grad, grad_expected)
        model.gradient_checkpointing_disable()


@each_causal
def test_gradient_checkpointing_and_caches(model_type):
    model, ids = tiny_model(model_type), random_ids(1, 8)
    cache = model(ids).past_key_values
    model.train().gradient_checkpointing_enable()
    assert model(ids, use_cache=True).past_key_values is None
    with pytest.raises(ValueError, match="`past_key_values` cannot be continued in training with gradient"):
        model(ids, past_key_values=cache)
    assert model.eval()(ids, past_key_values=cache).past_key_values.get_seq_length() == 16


@each_model
@pytest.mark.parametrize("backend", ["eager", triton])
@pytest.mark.parametrize("batch", ["rows", "padded", "packed"])
def test_backends_agree(model_type, backend, batch, monkeypatch):
    layers = 1 if backend == "triton" else 2  # the interpreter is slow
    model, ids, inputs = tiny_model(model_type, num_hidden_layers=layers), random_ids(2, 20), {}
    if batch == "padded":
        ids, inputs["attention_mask"] = padded([random_ids(n, seed=n) for n in (20, 7)], "left")
    elif batch == "packed":
        ids, inputs["cu_seqlens"] = random_ids(1, 40), torch.tensor([0, 7, 8, 40])
    results = []
    for one in (backend, "reference"):
        monkeypatch.setenv("SUBQUAD_BACKEND", one)
        model.zero_grad()
        loss = model(ids, labels=ids, **inputs).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for x, expected in zip(*results, strict=True):
        torch.testing.assert_close(x, expected, **TOLERANCE)


@each_causal
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_of_every_backend(model_type, cache, monkeypatch):
    # The interpreter is slow; a chunk of 8 ends all the same while tokens are generated.
    model, results = tiny_model(model_type, num_hidden_layers=2), []
    ids, mask = padded([random_ids(n, seed=n) for n in (22, 9)], "left")
    backends = ["reference", "eager"] + ["triton"] * (find_spec("triton") is not None)
    for backend in backends:
        monkeypatch.setenv("SUBQUAD_BACKEND", backend)
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "disable_compile": True}
        results.append(
            model.generate(ids, attention_mask=mask, max_new_tokens=4, cache_implementation=cache, **options)
        )
    assert all(torch.equal(x, results[0]) for x in results)


# 7. torch.compile.


@each_model
def test_compiled_training(model_type, layers=2):
    model, ids = tiny_model(model_type, num_hidden_layers=layers).train(), random_ids(2, 70)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    def grads(model):
        model.zero_grad()
        torch.manual_seed(0)
        model(ids, attention_mask=mask, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    for grad, expected in zip(grads(compiled), grads(model), strict=True):
        torch.testing.assert_close(grad, expected, **TOLERANCE)


@each_causal
def test_compiled_decode_step(model_type, layers=2):
    model, ids = tiny_model(model_type, num_hidden_layers=layers), random_ids(2, 20)
    torch.compiler.reset()
    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        cache = model(ids[:, :10]).past_key_values
        logits = [compiled(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits for t in range(10, 20)]
        expected = [model(ids[:, : t + 1]).logits[:, -1:] for t in range(10, 20)]
        torch.testing.assert_close(logits, expected, **TOLERANCE)
    # Once for a given number of tokens read, once for any; and both again where the room for embeddings grows.
    assert len(compiles) <= (4 if model_type == "avey" else 2)


# 8. Number formats.


@each_causal
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(model_type, dtype, tmp_path):
    model, ids = tiny_model(model_type), random_ids(2, 20)
    model.save_pretrained(tmp_path)
    low = type(model).from_pretrained(tmp_path, dtype=dtype)
    assert low.dtype == dtype
    with torch.no_grad():
        expected, out = model(ids), low(ids)
    assert out.logits.dtype == dtype
    error = (out.logits.float() - expected.logits).norm() / expected.logits.norm()
    assert error < (0.1 if dtype == torch.bfloat16 else 0.02)
    sums = {"avey": ["sums"], "raven": ["slots"], "gecko": ["timenorm", "cema", "memory", "normalizer"]}
    for name in sums.get(model_type, ["wkv"]):
        states = [layer.states[name] for layer in out.past_key_values.layers if name in layer.states]
        assert {state.dtype for state in states} == {torch.float32}
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    alone = low(ids[:1, 7:]).logits
    torch.testing.assert_close(low(ids, attention_mask=mask).logits[:1, 7:], alone, atol=0.1, rtol=0.1)
    assert low.generate(ids, max_new_tokens=3, eos_token_id=None, pad_token_id=0).shape == (2, 23)
    low.train()(ids, labels=ids).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in low.parameters())


@each_model_and_trained
def test_autocast(model_type):
    model, ids = tiny_model(model_type).train(), random_ids(2, 20)
    expected = model(ids, labels=ids).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, atol=0.1, rtol=0.05)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


# 9. Wrong input is refused by name, before any work.


@each_model
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "Exactly one of `input_ids` and `inputs_embeds`"),
        ({"input_ids": [[1, 2]], "inputs_embeds": [[[0.0] * 48]]}, "Exactly one of"),
        ({"input_ids": [[]]}, "`input_ids` must be"),
        ({"input_ids": [1, 2]}, "`input_ids` must be"),
        ({"input_ids": [[1, VOCABULARY]]}, f"`input_ids` holds {VOCABULARY}, but `vocab_size` is {VOCABULARY}"),
        ({"input_ids": [[1, -1]]}, "`input_ids` holds -1"),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]}, "hole in row 0"),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1]]}, "`attention_mask` must be"),
        ({"input_ids": [[1, 2, 3]], "attention_mask": [[[[1, 1, 1]]]]}, "`attention_mask` must be"),
        ({"input_ids": [[1, 2, 3]], "position_ids": [[0, 1]]}, "`position_ids` must be"),
        ({"input_ids": [[1, 2, 3]], "position_ids": [[0, 1, 2]] * 2}, "`position_ids` must be"),
        (
            {"input_ids": [[1, 2, 3]], "attention_mask": [[0, 1, 1]], "position_ids": [[0, 1, 0]]},
            "`position_ids` restart inside a row with padding",
        ),
        ({"input_ids": [[1, 2], [3, 4]], "cu_seqlens": [0, 2]}, "`cu_seqlens` describes one row"),
        ({"input_ids": [[1, 2, 3]], "cu_seqlens": [0, 30]}, r"`cu_seqlens` must rise from 0 to 3.*got \[0, 30\]"),
        ({"input_ids": [[1, 2, 3]], "cu_seqlens": [0, 3, 3]}, "`cu_seqlens` must rise"),
        ({"input_ids": [[1, 2, 3]], "cu_seqlens": [[0, 3]]}, "`cu_seqlens` must be int32 or int64"),
        ({"inputs_embeds": [[[0.0] * 47]]}, r"`inputs_embeds` must be \(batch, length, 48\)"),
    ],
)
def test_wrong_input(model_type, inputs, message):
    model = tiny_model(model_type)
    with pytest.raises(ValueError, match=r"`input_ids` must be int64 or int32, got torch.float32"):
        model(torch.ones(1, 2))
    inputs = {
        name: torch.tensor(value, dtype=torch.float32 if name == "inputs_embeds" else torch.long)
        for name, value in inputs.items()
    }
    with pytest.raises(ValueError, match=message):
        model(**inputs)


@each_causal
def test_foreign_caches(model_type, tmp_path):
    model, ids = tiny_model(model_type), random_ids(2, 4)
    other_type = {"rwkv5": "rwkv6"}.get(model_type, "rwkv5")
    deeper, cache_class = tiny_config(model_type, num_hidden_layers=4), type(model.new_cache())
    with pytest.raises(ValueError, match=f"`past_key_values` must be a {cache_class.__name__}.*DynamicCache"):
        model(ids, past_key_values=DynamicCache(config=model.config))
    with pytest.raises(
        ValueError, match=f"`past_key_values` is the cache of another model: `model_type` '{other_type}'"
    ):
        other = tiny_config(other_type)
        other.chunk_size = 8
        model(ids, past_key_values=cache_class(other))
    with pytest.raises(ValueError, match="`num_hidden_layers` 4, not 3"):
        model(ids, past_key_values=cache_class(deeper))
    wider = cache_class(tiny_config(model_type, hidden_size=96))
    with pytest.raises(ValueError, match="`hidden_size` 96, not 48"):
        model(ids, past_key_values=wider)
    cache = model(ids).past_key_values
    with pytest.raises(ValueError, match="`past_key_values` holds the state of 2 sequences, the input has 3"):
        model(random_ids(3, 1), past_key_values=cache)
    cache.save(tmp_path / "cache.safetensors")
    with pytest.raises(ValueError, match="`num_hidden_layers` 3, not 4"):
        cache_class.load(tmp_path / "cache.safetensors", deeper)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no cache"):
        cache_class.load(tmp_path / "model.safetensors", model.config)


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        *((name, {"vocab_size": 0}, "`vocab_size` must be at least 1, got 0") for name in CAUSAL),
        *((name, {"num_hidden_layers": 0}, "`num_hidden_layers` must be at least 1, got 0") for name in RWKV),
        *((name, {"hidden_size": 50, "head_size": 16}, "`attention_hidden_size`") for name in RWKV),
        *((name, {"num_attention_heads": 5, "head_size": 16}, "`num_attention_heads`") for name in RWKV),
        ("avey", {"n_blocks": 0}, "`n_blocks` must be at least 1, got 0"),
        ("avey", {"n_layers": 3}, r"`n_layers` \(3\) is a field of Avey-B"),
        ("avey", {"chunk_size": 0}, "`chunk_size` must be at least 1, got 0"),
        ("avey", {"k": -1}, "`k` must be at least 1, got -1"),
        ("avey", {"context_proportion": 0.0}, "`context_proportion` must be above 0 and at most 1.*, got 0.0"),
        ("avey", {"context_proportion": 1.5}, "`context_proportion` must be above 0 and at most 1.*, got 1.5"),
        ("avey", {"context_proportion": float("nan")}, "`context_proportion` must be above 0 .*, got nan"),
        ("avey", {"rms_norm_eps": -1.0}, "`rms_norm_eps` must be above 0, got -1.0"),
        ("avey", {"extended_len": 33}, r"`extended_len` \(33\) must be `k` \(4\) times `chunk_size` \(8\)"),
        ("avey", {"score_normalization": "sum"}, "`score_normalization` must be 'first' or 'max', got 'sum'"),
    ],
)
def test_wrong_configuration(model_type, fields, message):
    with pytest.raises(StrictDataclassClassValidationError, match=message):
        tiny_config(model_type, **fields)


@each_causal
def test_generation_config_is_saved(model_type, tmp_path):
    model = tiny_model(model_type)
    model.generation_config = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    ids = random_ids(1, 4)
    assert torch.equal(loaded.generate(ids), model.generate(ids))

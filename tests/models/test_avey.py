"""Avey against the published logits and against its equations, written out split by split in float64."""

import json

import pytest
import torch
import torch.nn.functional as F
from cases import GREEDY, assert_same_states, random_ids, tiny_config, tiny_model
from golden_files import read_golden
from safetensors.torch import save_file
from torch._dynamo import lookup_backend
from transformers import AutoModel, AutoModelForCausalLM

from subquad import AveyForCausalLM
from subquad.modeling.layers import relu_squared
from subquad.models.avey import positions_avey


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """A model directory as published, the ids of two texts, and the published model's logits."""
    path = tmp_path_factory.mktemp("avey")
    tensors, weights, config = read_golden("avey_released")
    (path / "config.json").write_text(json.dumps({**config, "model_type": "avey"}))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path, tensors["input_ids"], tensors["logits"]


def rms_norm(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-10).rsqrt() * weight


def plain(model, ids, normalization="first"):
    """Logits (batch, length, vocabulary), and what each block makes of the tokens, of a model in float64."""
    c, logits, states = model.config, [], []
    size, weights = c.chunk_size, model.model.wte.weight
    for row in ids:
        x = F.pad(weights[row], (0, 0, 0, -len(row) % size)).unflatten(0, (-1, size))
        y = x / (x.norm(dim=-1, keepdim=True) + 1e-8)
        windows = []
        for i in range(len(x)):
            scores = [(y[i] @ y[j].T).amax(1).sum() for j in range(i)]
            best = sorted(sorted(range(i), key=lambda j: -scores[j])[: c.k - 1])
            if best:
                chosen = torch.stack([scores[j] for j in best])
                chosen = chosen / ((chosen[0] if normalization == "first" else chosen.max()) + 1e-8)
            rows = torch.cat([*(x[j] * w for j, w in zip(best, chosen if best else [], strict=True)), x[i]])
            windows.append(F.pad(rows, (0, 0, c.extended_len - len(rows), 0)))
        h = torch.stack(windows)
        seen = [h]
        for block in model.model.blocks:
            z = F.relu(block.ctxt.enricher(rms_norm(h, block.rms_norm.weight))).square()
            tail, gate, head = z.split([c.tail_size // 2, c.tail_size // 2, z.shape[-1] - c.tail_size], -1)
            n = tail / (tail.square().sum(-1, keepdim=True) + 1e-8).sqrt()
            mixed = (block.ctxt.contextualizer.spatial_proj.tril() * (n @ n.transpose(1, 2))) @ tail
            h = h + block.ctxt.fuser(torch.cat((mixed * gate, head), -1))
            seen.append(h)
        seen[-1] = rms_norm(h, model.model.ln_f.weight)
        seen = [h[:, -size:].flatten(0, 1)[: len(row)] for h in seen]
        logits.append(seen[-1] @ weights.T)
        states.append(torch.stack(seen))
    return torch.stack(logits), torch.stack(states, 1)


def rows_seen(model):
    """Collects the number of rows that go through the first block."""
    seen = []
    model.model.blocks[0].register_forward_pre_hook(lambda _module, inputs: seen.append(len(inputs[0])))
    return seen


# The published model.


@pytest.mark.fast
def test_published_logits(golden):
    path, ids, expected = golden
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert isinstance(model, AveyForCausalLM)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.score_normalization == "first"
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(model(ids, use_cache=False).logits, expected, atol=1e-4, rtol=0)
    base = AutoModel.from_pretrained(path)
    torch.testing.assert_close(base(ids).last_hidden_state @ base.wte.weight.T, expected, atol=1e-4, rtol=0)


def test_initialisation():
    torch.manual_seed(0)
    model = AveyForCausalLM(tiny_config("avey", d_embed=64, chunk_size=32))
    block = model.model.blocks[0]
    assert model.lm_head.weight is model.model.wte.weight
    for weight in (model.model.wte.weight, block.ctxt.contextualizer.spatial_proj):
        assert weight.std().item() == pytest.approx((2 / sum(weight.shape)) ** 0.5, rel=0.1)
    for linear in (block.ctxt.enricher, block.ctxt.fuser):
        for weight in (linear.weight, linear.bias):
            assert weight.abs().max().item() == pytest.approx(linear.in_features**-0.5, rel=0.1)
    assert (block.rms_norm.weight == 1).all()


def test_logits_to_keep_is_a_number_of_tokens():
    model, ids = tiny_model("avey"), random_ids(1, 9)
    cache = model(ids).cache
    for inputs in ({}, {"cache": cache}):
        with pytest.raises(ValueError, match="`logits_to_keep` must be 0 or more, got -1"):
            model(ids, logits_to_keep=-1, **inputs)
        with pytest.raises(ValueError, match="`logits_to_keep` must be a number of tokens, 0 or more, got -1"):
            model.model(ids, logits_to_keep=-1, **inputs)
    assert cache.get_seq_length() == 9
    assert model(ids, logits_to_keep=20).logits.shape[1] == 9


# The equations.


@pytest.mark.parametrize(
    ("fields", "length", "normalization"),
    [
        *(({}, length, "first") for length in (1, 7, 8, 9, 32, 75)),
        ({}, 1, "max"),
        ({}, 24, "max"),
        ({"k": 1}, 20, "max"),
        ({"k": 2}, 20, "first"),
        ({"chunk_size": 1, "k": 3}, 9, "first"),
        ({"chunk_size": 5, "k": 7}, 48, "max"),
        ({"context_proportion": 1.0, "expansion_factor": 3}, 20, "max"),
        ({"context_proportion": 0.013}, 20, "first"),
    ],
)
def test_equations_and_gradients(fields, length, normalization):
    model = tiny_model("avey", score_normalization=normalization, **fields).double()
    ids, names = random_ids(2, length), [name for name, _ in model.named_parameters()]
    out = model(ids, output_hidden_states=True)
    logits, states = plain(model, ids, normalization)
    torch.testing.assert_close(out.logits, logits, atol=1e-9, rtol=1e-9)
    for state, expected in zip(out.hidden_states, states, strict=True):
        torch.testing.assert_close(state, expected, atol=1e-9, rtol=1e-9)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = torch.autograd.grad((out.logits * weights).sum(), list(model.parameters()), allow_unused=True)
    expected = torch.autograd.grad((logits * weights).sum(), list(model.parameters()), allow_unused=True)
    for name, grad, grad_expected in zip(names, grads, expected, strict=True):
        torch.testing.assert_close(
            grad, grad_expected, atol=1e-8, rtol=1e-7, msg=lambda text, name=name: f"{name} {text}"
        )


# What is computed, and what is not.


@torch.no_grad()
def test_rows_of_missing_splits_are_computed_once():
    model, ids = tiny_model("avey"), random_ids(2, 40)
    expected = [model(ids[:, : t + 1]).logits[:, -1] for t in range(40)]
    seen, cache = rows_seen(model), model.new_cache()
    for t in range(40):
        torch.testing.assert_close(
            model(ids[:, t : t + 1], cache=cache).logits[:, 0], expected[t], atol=1e-4, rtol=1e-4
        )
    # Three splits may be missing; a window holds the retrieved splits and its own up to the new token.
    assert seen == [24 * (t == 0) + 2 * (8 * min(t // 8, 3) + t % 8 + 1) for t in range(40)]


@torch.no_grad()
def test_prefill_contextualises_the_last_split_alone():
    model, ids = tiny_model("avey"), random_ids(2, 77)
    expected = model(ids).logits
    seen = rows_seen(model)
    for kept, windows, end in ((1, 1, 5), (5, 1, 5), (6, 2, 8), (13, 2, 8)):
        torch.testing.assert_close(model(ids, logits_to_keep=kept).logits, expected[:, -kept:], atol=1e-4, rtol=1e-4)
        assert seen.pop() == 2 * windows * (24 + end)
    mask = torch.ones_like(ids)
    mask[0, :60] = 0
    masked = model(ids, attention_mask=mask).logits[:, -5:]
    seen.clear()
    torch.testing.assert_close(model(ids, attention_mask=mask, logits_to_keep=5).logits, masked, atol=1e-4, rtol=1e-4)
    # The last five of 17 tokens lie in two splits; those of 77 lie in one, but every row gets as many windows.
    assert seen == [24 + (8 + 8) + (16 + 8) + 2 * (24 + 8)]
    assert len(model.generate(ids, max_new_tokens=1, **GREEDY)[0]) == 78


def test_training_leaves_missing_splits_out():
    model, ids = tiny_model("avey").train(), random_ids(3, 48)
    seen = rows_seen(model)
    model(ids, labels=ids).loss.backward()
    assert seen == [24 + 3 * 8 * (1 + 2 + 3 + 4 + 4 + 4)]


def test_packed_documents_cost_what_they_would_alone():
    model, seen = tiny_model("avey"), []
    lengths = [5, 8, 1, 20] * 3
    ids, borders = random_ids(1, sum(lengths)), torch.tensor([0, *lengths]).cumsum(0)
    seen = rows_seen(model)
    model(ids, cu_seqlens=borders, use_cache=False)
    assert seen == [24 + 3 * (8 + 8 + 8 + 8 * (1 + 2 + 3))]


@torch.no_grad()
def test_long_texts_go_through_the_blocks_in_parts(monkeypatch):
    model, ids = tiny_model("avey"), random_ids(2, 203)
    expected = model(ids, output_hidden_states=True)
    seen = rows_seen(model)
    for limit in (1, 40, 300):
        monkeypatch.setattr(positions_avey, "MAX_ROWS", limit)
        seen.clear()
        for use_cache in (True, False):
            out = model(ids, output_hidden_states=True, use_cache=use_cache)
            torch.testing.assert_close(out.logits, expected.logits, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(out.hidden_states, expected.hidden_states, atol=1e-4, rtol=1e-4)
        assert max(seen) <= max(limit, 32) + 24
        assert len(seen) > 2


@torch.no_grad()
def test_recording_reads_tokens_one_by_one():
    """So that a draft which is refused has no part in the logits of the tokens before it."""
    model, ids = tiny_model("avey"), random_ids(2, 45)
    cache = model.new_cache()
    model(ids[:, :19], cache=cache)
    cache.activate_past_recording()
    logits = model(ids[:, 19:], cache=cache).logits
    for t in range(19, 45):
        torch.testing.assert_close(logits[:, t - 19], model(ids[:, : t + 1]).logits[:, -1], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits[:, :5], model(ids).logits[:, 19:24], atol=1e-2)
    assert_same_states(cache, model(ids).cache)
    # From the first token on too, and padding or not.
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for inputs in ({}, {"attention_mask": mask}):
        cache = model.new_cache()
        cache.activate_past_recording()
        some = model(ids, cache=cache, logits_to_keep=12, **inputs).logits
        assert some.shape[1] == 12
        torch.testing.assert_close(some[1], logits[1, -12:], atol=1e-4, rtol=1e-4)


def test_compiled_activation_writes_over_nothing():
    # Dynamo of torch 2.11 makes an output of each tensor of an autograd function. Two names of one tensor then share
    # a gradient, which it gives to the wrong one.
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    torch.compiler.reset()
    x = torch.linspace(-2, 2, 5, requires_grad=True)
    torch.compile(lambda x: relu_squared(x), fullgraph=True, backend=backend)(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([0.0, 0.0, 0.0, 2.0, 4.0]))
    forward = graphs[0].fwd_body_0.graph
    assert not [x for x in forward.nodes if x.op == "call_method" and x.target.endswith("_")]


# The cache.


@torch.no_grad()
def test_room():
    model, ids = tiny_model("avey"), random_ids(2, 30)
    cache = model.new_cache(static=True, max_cache_len=20)
    with pytest.raises(ValueError, match="`cache` is static, with a `max_cache_len` of 24 tokens; 30 would"):
        model(ids, cache=cache)
    assert not cache.is_initialized
    model(ids[:, :20], cache=cache)
    before = cache.clone()
    with pytest.raises(ValueError, match="`max_cache_len` of 24 tokens; 25 would"):
        model(ids[:, :5], cache=cache)
    assert_same_states(cache, before)
    with pytest.raises(ValueError, match="`max_cache_len` of 24 tokens; 25 would"):
        model.generate(ids[:, :21], cache=cache, max_new_tokens=5, **GREEDY)
    assert model.generate(ids[:, :21], cache=cache, max_new_tokens=4, **GREEDY).shape == (2, 25)

    with pytest.raises(ValueError, match="`max_cache_len` must be a whole number of at least 1, got -5"):
        model.new_cache(static=True, max_cache_len=-5)
    # `generate` makes room in a cache that was given none.
    cache = model.new_cache(static=True)
    expected = model.generate(ids[:, :9], max_new_tokens=12, **GREEDY)
    assert torch.equal(model.generate(ids[:, :9], cache=cache, max_new_tokens=12, **GREEDY), expected)

    cache, rooms = model.new_cache(), []
    for t in range(30):
        model(ids[:, t : t + 1], cache=cache)
        rooms.append(cache.after_blocks.states["embeddings"].shape[1])
    assert rooms == [8] * 8 + [16] * 8 + [32] * 14


@torch.no_grad()
def test_saved_caches_find_room(tmp_path):
    model, ids = tiny_model("avey"), random_ids(2, 40)
    model(ids[:, :16], cache=(cache := model.new_cache()))
    cache.save(tmp_path / "cache.safetensors")
    expected = model(ids).logits[:, 16:]
    for static, room in ((False, 64), (True, 40)):
        loaded = type(cache).load(
            tmp_path / "cache.safetensors", model.config, static=static, max_cache_len=40 if static else None
        )
        torch.testing.assert_close(model(ids[:, 16:], cache=loaded).logits, expected, atol=1e-4, rtol=1e-4)
        assert loaded.after_blocks.states["embeddings"].shape[1] == room
    full = type(cache).load(tmp_path / "cache.safetensors", model.config, static=True)
    with pytest.raises(ValueError, match="`max_cache_len` of 16 tokens; 17 would"):
        model(ids[:, 16:17], cache=full)
    with pytest.raises(ValueError, match="`max_cache_len` of 8 tokens; 16 would"):
        type(cache).load(tmp_path / "cache.safetensors", model.config, static=True, max_cache_len=8)


@torch.no_grad()
def test_a_cache_of_another_dtype():
    model, ids = tiny_model("avey"), random_ids(1, 20)
    expected = model(ids).logits[:, 12:]
    cache = model.to(torch.bfloat16)(ids[:, :12]).cache
    logits = model.float()(ids[:, 12:], cache=cache).logits
    assert (logits - expected).norm() / expected.norm() < 0.1


def test_one_packed_token_with_a_cache():
    model, ids = tiny_model("avey"), random_ids(1, 14)
    cache = model(ids[:, :13]).cache
    logits = model(ids[:, 13:], cache=cache, cu_seqlens=torch.tensor([0, 1])).logits
    torch.testing.assert_close(logits, model(ids).logits[:, 13:], atol=1e-4, rtol=1e-4)


@pytest.mark.thorough
def test_compiled_calls_of_many_lengths():
    model = tiny_model("avey", n_blocks=1, k=2)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    with torch.no_grad():
        for length in range(4, 84, 8):  # more numbers of splits than graphs of one function are kept
            ids = random_ids(2, length)
            out = compiled(ids, use_cache=False).logits
            torch.testing.assert_close(out, model(ids, use_cache=False).logits, atol=1e-4, rtol=1e-4)


def test_blocks_on_another_device():
    """What comes out of blocks that lie elsewhere is indexed there."""
    model = tiny_model("avey")
    model.model.blocks[1:].to("meta")
    model.model.ln_f.to("meta")
    model.model.blocks[1].register_forward_pre_hook(lambda _module, inputs: (inputs[0].to("meta"), inputs[1]))
    ids, mask = random_ids(2, 20), torch.ones(2, 20)
    mask[0, :9] = 0
    for inputs in ({}, {"attention_mask": mask}):
        out = model.model(ids, output_hidden_states=True, use_cache=False, **inputs)
        assert out.last_hidden_state.device.type == "meta"
        assert out.hidden_states[1].device.type == "cpu"


def test_tokens_are_added_in_place():
    model, ids = tiny_model("avey"), random_ids(1, 12)
    with torch.inference_mode():
        cache = model(ids[:, :9]).cache
        place = cache.after_blocks.states["embeddings"].data_ptr()
        model(ids[:, 9:10], cache=cache)
        assert cache.after_blocks.states["embeddings"].data_ptr() == place
    with torch.no_grad():  # what was made in inference mode may not be written outside of it
        logits = model(ids[:, 10:11], cache=cache).logits
        torch.testing.assert_close(logits, model(ids[:, :11]).logits[:, -1:], atol=1e-4, rtol=1e-4)


def test_gradients_through_the_cache():
    model, ids = tiny_model("avey").double(), random_ids(2, 30)
    grads = []
    for pieces in ((30,), (17, 5, 1, 7)):
        model.zero_grad()
        cache = model.new_cache()
        for piece, end in zip(pieces, torch.tensor(pieces).cumsum(0).tolist(), strict=True):
            logits = model(ids[:, end - piece : end], cache=cache).logits
        logits[:, -7:].square().sum().backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*grads, atol=1e-8, rtol=1e-6)


@torch.no_grad()
def test_rows_that_are_padding_alone():
    model = tiny_model("avey")
    ids, mask = random_ids(3, 11), torch.ones(3, 11, dtype=torch.long)
    mask[1] = 0
    out = model(ids, attention_mask=mask)
    assert out.logits[1].abs().max() == 0
    assert out.cache.after_blocks.states["lengths"].tolist() == [11, 0, 11]
    torch.testing.assert_close(out.logits[2], model(ids[2:]).logits[0], atol=1e-4, rtol=1e-4)
    # The row begins with a later call.
    logits = model(ids[:, :4], cache=out.cache).logits
    torch.testing.assert_close(logits[1], model(ids[1:2, :4]).logits[0], atol=1e-4, rtol=1e-4)
    # And its last token repeats where one step more is padding.
    mask = torch.tensor([[1], [0], [1]])
    again = model(ids[:, :1], attention_mask=mask, cache=out.cache).logits
    torch.testing.assert_close(again[1, 0], logits[1, -1], atol=1e-4, rtol=1e-4)


def test_padding_at_the_border_of_a_split():
    model, ids = tiny_model("avey"), random_ids(1, 16)
    with torch.no_grad():
        cache = model(ids).cache
        padded = model(ids[:, :1], attention_mask=torch.zeros(1, 1), cache=cache).logits
        torch.testing.assert_close(padded, model(ids).logits[:, -1:], atol=1e-4, rtol=1e-4)
        following = model(ids[:, :1], cache=cache).logits
    expected = model(torch.cat((ids, ids[:, :1]), 1)).logits[:, -1:]
    torch.testing.assert_close(following, expected, atol=1e-4, rtol=1e-4)


def test_what_training_keeps():
    """Of a row and a block its input, the norm (twice on a CPU), the enriched and the fuser's features; no window."""
    model, ids = tiny_model("avey", d_embed=64, chunk_size=16, k=8).train(), random_ids(4, 128)
    seen, kept = rows_seen(model), {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes(), x  # kept alive: an address is used once
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(ids, labels=ids).loss
    assert (
        sum(size for size, _ in kept.values()) < 1.3 * seen[0] * model.config.n_blocks * 10 * model.config.d_embed * 4
    )
    assert not any(x.shape[-2:] == (128, 128) and x.dim() > 2 for _, x in kept.values())

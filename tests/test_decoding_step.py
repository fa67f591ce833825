"""Decoding steps equal the model itself. The C library is used only if no hook, gradient or trace could observe it."""

import copy
import functools
import threading

import pytest
import torch
from cases import LIVELY, lively
from torch.nn.utils import prune

from subquad import (
    Int4Config,
    Int8Config,
    Rwkv6Config,
    Rwkv6ForCausalLM,
    Rwkv7Config,
    Rwkv7DeepEmbedConfig,
    Rwkv7DeepEmbedForCausalLM,
    Rwkv7ForCausalLM,
)
from subquad.decoding import cpu, step
from subquad.decoding.fused import find_block
from subquad.decoding.watch import Watch
from subquad.models import REGISTRY
from subquad_kernels.c import native
from subquad_kernels.c.fused_blocks import FusedBlock, FusedBlocks


pytestmark = pytest.mark.skipif(
    native.library() is None and "no C compiler" in native.explain()[1], reason="there is no C compiler"
)


@pytest.fixture(params=["finch", "goose-7a"])
def model(request):
    """One of each block program; `each_model` adds their other kinds of blocks."""
    return make(request.param)


each_model = pytest.mark.parametrize("model", LIVELY, indirect=True)


weights = functools.cache(lively)


def make(name):
    return copy.deepcopy(weights(name))


@pytest.fixture
def calls(monkeypatch):
    """The number of rows of every token that the library has read."""
    rows, run = [], FusedBlocks.__call__

    def count(self, x, *args, **cores):
        rows.append(x.shape[0])
        return run(self, x, *args, **cores)

    monkeypatch.setattr(FusedBlocks, "__call__", count)
    return rows


def read(model, ids, cache=None, masks=None):
    """The logits of every token, one call for each, and the cache."""
    cache = model.new_cache() if cache is None else cache
    step = model.decoding_step(cache, ids.shape[0])
    masks = [None] * ids.shape[1] if masks is None else masks.split(1, dim=1)
    return torch.stack([step(*pair) for pair in zip(ids.split(1, dim=1), masks, strict=True)], dim=1), cache


def plainly(function, *args, **kwargs):
    """What the model's own `forward` gives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(step.MAKERS, "cpu")
        return function(*args, **kwargs)


def random_ids(*shape):
    return torch.randint(1, 300, shape, generator=torch.Generator().manual_seed(1))


def first_block(model, number=0):
    """A block and its time mixing."""
    block = model.base_model.blocks[number]
    return block, getattr(block, "att", None) or block.attention


@each_model
@pytest.mark.parametrize(("dtype", "batch"), [(torch.float32, 3), (torch.bfloat16, 1), (torch.float16, 8)])
def test_equals_the_blocks(model, dtype, batch, calls):
    if dtype not in native.library().dtypes:
        pytest.skip("needs conversions of float16")
    model.to(dtype)
    ids = random_ids(batch, 6)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    logits, cache = read(model, ids)
    assert calls == 6 * [batch]
    expected, states = plainly(read, model, ids)
    assert len(calls) == 6
    scale = expected.abs().max()
    torch.testing.assert_close(logits / scale, expected / scale, rtol=0, atol=tolerance)
    for layer, other in zip(cache.layers, states.layers, strict=True):
        assert layer.states.keys() == other.states.keys()
        for name, x in layer.states.items():
            assert x.dtype == other.states[name].dtype and x.shape == other.states[name].shape
            torch.testing.assert_close(x.float(), other.states[name].float(), rtol=tolerance, atol=4 * tolerance)
    with torch.no_grad():
        whole = model(ids).logits
    torch.testing.assert_close(logits / scale, whole / scale, rtol=0, atol=tolerance)


@each_model
def test_stream_beyond_float16(model, calls):
    """In float16, what the blocks read and put out is float32."""
    if torch.float16 not in native.library().dtypes:
        pytest.skip("needs conversions of float16")
    with torch.no_grad():
        for name, x in model.named_parameters():
            x.copy_(
                (
                    x * 2**16 if name.endswith(("output.weight", "ffn.value.weight", "forward.value.weight")) else x
                ).half()
            )
    ids = random_ids(2, 6)
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True)
    assert expected.hidden_states[1].abs().max() > 65504
    logits, _ = read(model.half(), ids)
    assert calls == 6 * [2]
    assert (logits - expected.logits).norm() < 4e-3 * expected.logits.norm()


@pytest.mark.parametrize(
    ("model", "method"),
    [("eagle", Int4Config), ("finch", Int8Config), ("goose", Int8Config), ("goose-7a", Int4Config)],
    indirect=["model"],
)
def test_integers(model, method, calls, tmp_path):
    model.save_pretrained(tmp_path)
    small = type(model).from_pretrained(tmp_path, quantization_config=method())
    logits, _ = read(small, random_ids(2, 5))
    assert len(calls) == 5
    expected, _ = plainly(read, small, random_ids(2, 5))
    # A value that lies between two integers may be rounded to the other one.
    torch.testing.assert_close(logits, expected, rtol=0, atol=0.02 * expected.abs().max().item())


def test_widths(calls):
    """Numbers of channels of the heads, the feed-forward network and the low ranks that are unlike each other."""
    torch.manual_seed(0)
    finch = Rwkv6Config(vocab_size=300, hidden_size=160, num_hidden_layers=2, attention_hidden_size=192, head_size=96,
                        intermediate_size=208, lora_rank_tokenshift=7, lora_rank_decay=19)  # fmt: skip
    goose = Rwkv7Config(vocab_size=300, hidden_size=160, num_hidden_layers=2, head_dim=80, intermediate_size=208,
                        decay_low_rank_dim=7, a_low_rank_dim=9, v_low_rank_dim=33, gate_low_rank_dim=50)  # fmt: skip
    deep = Rwkv7DeepEmbedConfig(**goose.to_diff_dict(), deep_embed_rank=5)
    for model in (Rwkv6ForCausalLM(finch), Rwkv7ForCausalLM(goose), Rwkv7DeepEmbedForCausalLM(deep)):
        for x in model.parameters():
            torch.nn.init.normal_(x, std=0.3)
        logits, _ = read(model, random_ids(1, 4))
        assert len(calls) == 4
        expected, _ = plainly(read, model, random_ids(1, 4))
        scale = expected.abs().max()
        torch.testing.assert_close(logits / scale, expected / scale, rtol=0, atol=1e-5)
        calls.clear()


def test_padding_and_beams(model, calls):
    ids, mask = random_ids(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    for decoding in ({}, {"num_beams": 3}, {"cache_implementation": "static"}):
        calls.clear()
        tokens = model.generate(ids, **options, **decoding)
        assert calls, decoding
        assert tokens.equal(plainly(model.generate, ids, **options, **decoding)), decoding


def test_padding_of_one_token(model, calls):
    """A row without a token in this call: its state stays."""
    _, cache = read(model, random_ids(2, 3))
    before = [layer.states["wkv"].clone() for layer in cache.layers]
    calls.clear()
    read(model, random_ids(2, 1), cache=cache, masks=torch.tensor([[1], [0]]))
    assert calls == [2]
    for layer, state in zip(cache.layers, before, strict=True):
        assert layer.states["wkv"][1].equal(state[1]) and not layer.states["wkv"][0].equal(state[0])


def test_a_recorded_past(model, calls):
    """Speculative decoding rolls back: the tokens' contributions must be kept."""
    ids = random_ids(1, 6).repeat(1, 3)
    tokens = model.generate(ids, prompt_lookup_num_tokens=3, max_new_tokens=12, do_sample=False)
    assert not calls
    assert tokens.equal(model.generate(ids, max_new_tokens=12, do_sample=False)) and calls


def test_states_of_other_caches_stay(model):
    """A copy of a cache does not change with the cache."""
    _, cache = read(model, random_ids(1, 3))
    kept = copy.deepcopy(cache)
    states = [x.clone() for layer in kept.layers for x in layer.states.values()]
    read(model, random_ids(1, 2), cache=cache)
    assert all(x.equal(y) for x, y in zip((x for y in kept.layers for x in y.states.values()), states, strict=True))


def test_more_rows_than_it_is_made_for(model, calls):
    logits, _ = read(model, random_ids(9, 2))
    assert not calls
    torch.testing.assert_close(logits[:8], read(model, random_ids(9, 2)[:8])[0], rtol=1e-4, atol=1e-4)
    assert calls


def test_gradients(model, calls):
    """A step has none, and the model itself does."""
    logits, cache = read(model, random_ids(1, 2))
    assert calls and not logits.requires_grad
    calls.clear()
    model(random_ids(1, 1), cache=cache).logits.sum().backward()
    assert not calls and model.get_output_embeddings().weight.grad is not None


def noted(function, seen):
    return lambda *args, **kwargs: seen.append(1) or function(*args, **kwargs)


def another_class(module, seen):
    return type("Other", (type(module),), {"forward": noted(type(module).forward, seen)})


# What has to run, of any module.
OTHERS = {
    "hook": lambda patch, x, seen: patch.setitem(x._forward_hooks, 0, lambda *_: seen.append(1)),
    "forward": lambda patch, x, seen: patch.setitem(vars(x), "forward", noted(x.forward, seen)),
    "forward of a class": lambda patch, x, seen: patch.setattr(type(x), "forward", noted(type(x).forward, seen)),
    "class": lambda patch, x, seen: patch.setattr(x, "__class__", another_class(x, seen)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_must_run_runs(name, model, calls):
    """Also after the first token; once it is gone, the library runs again."""
    ids, (block, mixing) = random_ids(1, 2), first_block(model)
    first = read(model, ids)[0]
    for module in (mixing.key, mixing, mixing.ln_x, block.ln2):
        calls.clear()
        seen = []
        with pytest.MonkeyPatch.context() as patch:
            OTHERS[name](patch, module, seen)
            torch.testing.assert_close(read(model, ids)[0], first, rtol=1e-4, atol=1e-4)
        assert len(seen) >= 2 and not calls, type(module)
        assert read(model, ids)[0].equal(first) and len(calls) == 2


def replace(patch, x, change, name="weight"):
    patch.setitem(x._parameters, name, torch.nn.Parameter(change(x.weight.detach())))


def add_layer(patch, block, mixing):
    patch.setitem(mixing._modules, "value", torch.nn.Sequential(mixing.value, torch.nn.ReLU()))


# What a block computes with. Negative views have the memory of the weight, and torch changes the sign when it reads.
CHANGES = {
    "bias": lambda patch, block, mixing: replace(patch, mixing.key, lambda x: x[:, 0], "bias"),
    "layer": add_layer,
    "epsilon of heads": lambda patch, block, mixing: patch.setattr(mixing.ln_x, "eps", 1.0),
    "epsilons": lambda patch, block, mixing: [patch.setattr(norm, "eps", 1.0) for norm in (block.ln1, block.ln2)],
    "weight": lambda patch, block, mixing: replace(patch, mixing.key, lambda x: x / 2),
    "negative view": lambda patch, block, mixing: replace(patch, mixing.key, torch._neg_view),
    "negative view of a norm": lambda patch, block, mixing: replace(patch, block.ln1, torch._neg_view),
}


@pytest.mark.parametrize("name", CHANGES)
def test_numbers_that_change(name, model, calls):
    """The step computes with them, and with the earlier ones when these are back."""
    ids = random_ids(1, 2)
    first = read(model, ids)[0]
    calls.clear()
    with pytest.MonkeyPatch.context() as patch:
        CHANGES[name](patch, *first_block(model))
        changed = read(model, ids)[0]
        assert not torch.allclose(changed, first)
        assert len(calls) == (2 if name.startswith(("epsilon", "weight")) else 0)
        torch.testing.assert_close(changed, plainly(read, model, ids)[0], rtol=1e-4, atol=1e-4)
    assert read(model, ids)[0].equal(first)


def test_operators_that_are_replaced(model, calls):
    """`use_kernels=True` gives an operator, which the package `kernels` has made a module, another `forward`."""
    ids, operator = random_ids(1, 2), torch.nn.Identity()
    for block in model.base_model.blocks:
        block._kernel_funcs = {"token_shift": operator}  # as that package does
    read(model, ids)
    assert len(calls) == 2
    operator.forward = lambda x: x
    read(model, ids)
    assert len(calls) == 2


def test_parameters_that_are_computed(model, calls):
    """torch's weight norm and pruning make a weight of others before every call."""
    ids = random_ids(1, 2)
    block, mixing = first_block(model, 1)
    name = "v0" if hasattr(mixing, "v0") else "time_decay"
    for module, parameter in ((mixing.key, "weight"), (block.ln2, "weight"), (mixing, name)):
        first = read(model, ids)[0]
        prune.random_unstructured(module, parameter, 0.5)
        calls.clear()
        pruned = read(model, ids)[0]
        assert not calls and not torch.allclose(pruned, first)
        torch.testing.assert_close(pruned, plainly(read, model, ids)[0], rtol=1e-4, atol=1e-4)
        prune.remove(module, parameter)
        torch.testing.assert_close(read(model, ids)[0], pruned, rtol=1e-4, atol=1e-4)


def test_states_that_do_not_fit(model):
    """They are not read beyond their end: the error is that of the operators."""
    for name in ("attention_shift", "feed_forward_shift", "wkv"):
        _, cache = read(model, random_ids(2, 2))
        states = cache.layers[1].states
        states[name] = states[name][:1].clone()
        with pytest.raises(ValueError, match="must have shape"):
            read(model, random_ids(2, 1), cache=cache)


def test_without_memory(model, monkeypatch):
    """The block is not run again: its state may have been changed."""
    _, cache = read(model, random_ids(1, 2))
    monkeypatch.setattr(cpu._prepared[model].blocks, "_run", lambda *args: 1)
    with pytest.raises(MemoryError, match="no memory"):
        read(model, random_ids(1, 1), cache=cache)


def test_without_the_first_block(calls):
    """The first block of Goose that runs writes the values that others read, whether or not it could read some."""
    model = make("goose")
    model.base_model.blocks = model.base_model.blocks[1:]
    found, _ = read(model, random_ids(2, 3))
    assert not calls
    torch.testing.assert_close(found, model(random_ids(2, 3)).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(step.Unsuitable, match="There is no `ln0`"):
        cpu.make(REGISTRY.values(), model, model.new_cache(), 1)


def test_modes(model, calls):
    """Who watches torch's functions sees them. A default device does not watch."""

    class Names(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            names.append(getattr(function, "__name__", ""))
            return function(*args, **kwargs or {})

    names = []
    with Names():
        read(model, random_ids(1, 1))
    assert "layer_norm" in names and not calls
    with torch.device("cpu"):
        read(model, random_ids(1, 1))
    assert len(calls) == 1


def test_weights_that_change(model, calls):
    ids = random_ids(1, 3)
    first, _ = read(model, ids)
    _, mixing = first_block(model)
    with torch.no_grad():
        mixing.key.weight.mul_(2)  # where it is
    inside = read(model, ids)[0]
    assert not inside.equal(first) and torch.allclose(inside, plainly(read, model, ids)[0], atol=1e-4)
    with torch.no_grad():
        mixing.key.weight.div_(2)
    model.double()
    calls.clear()
    torch.testing.assert_close(read(model, ids)[0].float(), first, rtol=1e-4, atol=1e-4)
    assert not calls  # the library does not compute in float64
    torch.testing.assert_close(read(model.float(), ids)[0], first)
    assert len(calls) == 3
    # A copy has its own addresses.
    other = copy.deepcopy(model)
    with torch.no_grad():
        for x in model.parameters():
            x.zero_()
    torch.testing.assert_close(read(other, ids)[0], first)


def test_threads(model):
    """Several threads with caches of their own may run one model."""
    texts = [random_ids(1, 30) + n for n in range(4)]
    expected, found = [read(model, ids % 300)[0] for ids in texts], {}
    threads = [
        threading.Thread(target=lambda n=n, ids=ids: found.update({n: read(model, ids % 300)[0]}))
        for n, ids in enumerate(texts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[n].equal(x) for n, x in enumerate(expected))


@each_model
def test_refuses_parameters_that_do_not_fit(model, monkeypatch):
    """What would be read beyond its end."""
    made, init = [], FusedBlock.__init__
    monkeypatch.setattr(
        FusedBlock,
        "__init__",
        lambda self, *args, **numbers: made.append((*args, numbers)) or init(self, *args, **numbers),
    )
    read(model, random_ids(1, 1))
    kind, parameters, numbers = made[-1]
    assert len(parameters) > 20
    for name, x in parameters.items():
        with pytest.raises(ValueError, match=r"must|is \(|cannot be"):
            FusedBlock(kind, {**parameters, name: x[..., : x.shape[-1] // 2].contiguous()}, **numbers)
        with pytest.raises(ValueError, match="must be|does not read"):
            FusedBlock(kind, {**parameters, name: x.double()}, **numbers)
        freed = x.clone()
        freed.untyped_storage().resize_(x.nbytes - 1)
        for other in (
            x.new_empty((*x.shape, 2))[..., 0],
            torch._neg_view(x),
            torch.cat((x, x), -1),
            x.to("meta"),
            freed,
            x.mT.contiguous() if x.dim() > 1 and x.shape[-2] > 1 and x.shape != x.mT.shape else x[None, :0],
        ):
            with pytest.raises(ValueError, match="`.*` must|must be multiples of 16"):
                FusedBlock(kind, {**parameters, name: other}, **numbers)
        with pytest.raises(ValueError, match=f"There must be a tensor `{name}`|`.*down` must|has no `"):
            FusedBlock(kind, {key: y for key, y in parameters.items() if key != name}, **numbers)
    with pytest.raises(ValueError, match="has no `more`, `key.scale`"):
        FusedBlock(kind, {**parameters, "more": x, "key.scale": x}, **numbers)
    for heads in (0, 3):
        with pytest.raises(ValueError, match=f"{heads} heads"):
            FusedBlock(kind, parameters, **{**numbers, "heads": heads})


@pytest.mark.parametrize("method", [Int8Config, Int4Config])
def test_refuses_integers_that_do_not_fit(method, monkeypatch, tmp_path):
    made, init = [], FusedBlock.__init__
    monkeypatch.setattr(
        FusedBlock,
        "__init__",
        lambda self, *args, **numbers: made.append((*args, numbers)) or init(self, *args, **numbers),
    )
    make("goose").save_pretrained(tmp_path)
    read(Rwkv7ForCausalLM.from_pretrained(tmp_path, quantization_config=method()), random_ids(1, 1))
    kind, parameters, numbers = made[-1]
    for name in ("key", "output", "ffn_key", "ffn_value"):
        weight, scale = parameters[f"{name}.weight"], parameters[f"{name}.scale"]
        wrong = {
            "weight": [
                weight.to(torch.int16),
                weight.flatten(),
                weight[:-1],
                torch.cat((weight, weight), 1),
                weight.mT,
            ],
            "scale": [scale.to(torch.int8), scale.half(), scale[:1], scale.double(), torch._neg_view(scale)],
        }
        for part, tensors in wrong.items():
            for x in tensors:
                with pytest.raises(ValueError, match="`.*` must be|multiples of 16"):
                    FusedBlock(kind, {**parameters, f"{name}.{part}": x}, **numbers)
        with pytest.raises(ValueError, match=f"There must be a tensor `{name}.scale`"):
            FusedBlock(kind, {key: x for key, x in parameters.items() if key != f"{name}.scale"}, **numbers)


@each_model
def test_tokens_that_do_not_fit(model, monkeypatch):
    """The block is not run in one call: nothing is read from memory that holds other numbers."""
    given, run = [], FusedBlocks.__call__

    def keep(self, *args, **cores):
        given.append((self, args, cores))
        return run(self, *args, **cores)

    monkeypatch.setattr(FusedBlocks, "__call__", keep)
    read(model, random_ids(1, 2))
    blocks, (x, *states, inplace, _), cores = given[-1]
    run_with_cores = functools.partial(run, **cores)
    assert run_with_cores(blocks, x, *states, inplace) is not None
    for other in unlike(x):
        assert run_with_cores(blocks, other, *states, inplace) is None
    for number, of_blocks in enumerate(states):
        for other in unlike(of_blocks[-1]):
            wrong = [*of_blocks[:-1], other]
            assert run_with_cores(blocks, x, *states[:number], wrong, *states[number + 1 :], inplace) is None, number
    for other in (*unlike(cores["cores"]), None) if cores else [x.new_zeros(2, 1, 1, 32, 32)]:
        assert run(blocks, x, *states, inplace, cores=other) is None
    by_unit = blocks.copy_by_unit(0)
    assert run_with_cores(blocks, x, *states, inplace, [None, by_unit]) is not None
    for other in (by_unit[:-1], by_unit.repeat(2)[::2], by_unit.to("meta"), by_unit.to(torch.int8)):
        assert run_with_cores(blocks, x, *states, inplace, [other, None]) is None


def unlike(x):
    return x.double(), torch._neg_view(x), x.to("meta"), torch.stack((x, x), -1)[..., 0], x[..., : x.shape[-1] // 2]


@each_model
def test_blocks_that_do_not_fit_each_other(model):
    """The library makes room for the first one."""
    fused, watch = REGISTRY[model.config.model_type].fused, Watch([])
    first, block = (find_block(fused, watch, block, FusedBlock) for block in model.base_model.blocks)
    for name in ("kind", "dtype", "width", "inner", "middle", "state_shape", "rank"):
        other = copy.copy(block)
        setattr(other, name, None)
        with pytest.raises(ValueError, match=f"Block [12] has the {name} None"):
            FusedBlocks([block, other] if block.kind == "wkv" else [first, block, other])


def test_generate_looks_for_changes_of_others(model, calls, monkeypatch):
    """Once if nothing but transformers' code runs between the tokens, and at each token if a user's does."""
    looks, look = [], Watch.is_unchanged
    monkeypatch.setattr(Watch, "is_unchanged", lambda self: looks.append(1) or look(self))
    how = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(random_ids(1, 4), **how)
    assert len(calls) == 7 and len(looks) <= 2

    def forbid(row, ids):
        if len(ids) == 8:  # adapters, or research code, may do this
            with torch.no_grad():
                head = model.get_output_embeddings()
                head.weight = torch.nn.Parameter(head.weight.flip(0))
        return range(300)

    looks.clear()
    other = model.generate(random_ids(1, 4), prefix_allowed_tokens_fn=forbid, **how)
    assert len(looks) >= 7 and not other.equal(expected) and other[:, :8].equal(expected[:, :8])


def test_a_sealed_step_keeps_its_weights(model):
    """What the library reads stays in memory, so that it reads what it read before."""
    _, cache = read(model, random_ids(1, 3))
    token = random_ids(1, 1)
    expected = model.decoding_step(cache.clone(), 1)(token)
    sealed = step.make_step(model, cache, alone=True)
    for name, x in model.base_model.blocks.named_parameters():
        if x.dim() == 2 and "s_emb" not in name:  # torch reads the tables of RWKV-7a
            x.data = torch.zeros_like(x)
    torch.testing.assert_close(sealed(token), expected)

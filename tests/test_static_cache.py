"""Static caches: states at constant addresses, and a decoding step that is compiled once."""

import os
import shutil

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
    GOOSE,
    GREEDY,
    RAVEN,
    RAVEN_BOTH,
    RAVEN_FULL,
    RAVEN_PURE,
    RAVEN_SWA,
    TEXT,
    VISUAL,
    assert_same_states,
    each,
    each_text_case,
    each_with,
    padded,
    random_ids,
    tiny_model,
)
from functorch.compile import make_boxed_func
from kernel_cases import TRITON
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CompileConfig

from subquad.decoding import step
from subquad.modeling.layer_state import LayerState


@pytest.fixture
def graphs():
    """What [`compiling`] collects."""
    torch.compiler.reset()
    yield []
    torch.compiler.reset()


def compiling(graphs, **options):
    """Options of `generate` with which it compiles on a CPU as on a GPU; the graphs are kept and run as they are."""

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    config = CompileConfig(**{"fullgraph": True, "mode": "default", "backend": backend, **options})
    config._compile_all_devices = True
    return {"cache_implementation": "static", "compile_config": config}


def prompts(case, rows, padding, length=9):
    """The inputs of `generate`; the first row begins with padding."""
    return padded([case.text(1, length - padding * (n == 0), seed=n) for n in range(rows)], "left")


def addresses(cache):
    states = [state for layer in cache.all_layers for state in layer.states.values()]
    return [x.data_ptr() for x in (*states, cache.seen_tokens)]


def assert_same_caches(cache, expected):
    assert cache.get_seq_length() == expected.get_seq_length()
    assert_same_states(cache, expected)


def both_caches(model, ids):
    """A dynamic and a static cache that have read the same tokens."""
    caches = model.new_cache(), model.new_cache(static=True, max_cache_len=64)
    with torch.no_grad():
        for cache in caches:
            model(ids, cache=cache)
    return caches


# The compiled step.

WAYS = ["eager", pytest.param("triton", marks=TRITON)]


@pytest.mark.quick_cases("rwkv6-1", "gecko-1")
@each_with(
    "way",
    [(False, 1, 0), (True, 3, 4)],
    (GOOSE, AVEY),
    [(True, 3, 4)],
    (EAGLE, FINCH, DEEP_EMBED, GECKO, RAVEN_BOTH, RAVEN_SWA, VISUAL[1]),
)
def test_compiled_generation(case, way, graphs):
    tied, rows, padding = way
    model = case.model(tie_word_embeddings=tied, num_hidden_layers=case.layer_kinds)
    config = compiling(graphs)
    for choice in ({}, {"do_sample": True, "top_k": 0}):
        options = {**prompts(case, rows, padding), **GREEDY, **choice, "max_new_tokens": 20}
        torch.manual_seed(0)
        expected = model.generate(**options)
        for _ in range(2):
            torch.manual_seed(0)
            assert torch.equal(model.generate(**options, **config), expected)
            assert len(graphs) == 1


@pytest.mark.quick_cases("rwkv6-*")
@each_with("backend_name", WAYS, (FINCH, RAVEN), WAYS[:1], (EAGLE, GOOSE, DEEP_EMBED, AVEY, GECKO))
def test_only_static_inputs_are_written(case, backend_name, graphs, monkeypatch):
    """Or else CUDA graphs would be skipped: see `check_for_mutation` in torch/_inductor/cudagraph_utils.py."""

    def compile_graph(graph, inputs):
        places = graph.graph.find_nodes(op="placeholder")
        copies = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        written = {places.index(node.args[0]) for node in copies}
        graphs.append((written, set(TracingContext.get().fw_metadata.static_input_indices)))
        return make_boxed_func(graph.forward)

    def backend(graph, inputs):
        return aot_autograd(fw_compiler=compile_graph, keep_inference_input_mutations=True)(graph, inputs)

    model, (chunk_size, steps) = case.model(num_hidden_layers=case.layer_kinds), (7, 2)
    if backend_name == "triton":
        chunk_size, steps = None, 1
    options = {**prompts(case, 2, 4, length=14 if chunk_size else 9), **GREEDY, "max_new_tokens": 3}
    expected, (_, cache) = model.generate(**options), both_caches(model, options["input_ids"])
    monkeypatch.setenv("SUBQUAD_BACKEND", backend_name)
    config = compiling(graphs, backend=backend)
    assert torch.equal(model.generate(**options, **config, prefill_chunk_size=chunk_size), expected)
    assert len(graphs) == steps  # a whole chunk and one token; or one token alone
    states = sum(len(layer.states) for layer in cache.all_layers) + 1  # and the number of tokens
    for written, static in graphs:
        assert written <= static
    # A token without a mask does not change the count of padding.
    assert [len(written) for written, _ in graphs] == [states, states - 1][-steps:]


@each_text_case
def test_nothing_is_left_on_the_cpu(case):
    """A single tensor of another device would keep the step out of CUDA graphs."""
    with torch.device("meta"):
        model, ids = case.model(), torch.ones(2, 1, dtype=torch.long)
    cache, devices = model.new_cache(static=True, max_cache_len=64), set()

    class Devices(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            devices.update(x.device.type for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor))
            return out

    with torch.no_grad():
        model(ids, cache=cache)
        with Devices():
            model(ids, attention_mask=torch.ones_like(ids), cache=cache)
    assert devices == {"meta"}


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler")
def test_inductor(graphs):
    model, options = (
        tiny_model("rwkv6", num_hidden_layers=1),
        {**prompts(CASES["rwkv6"], 3, 4), **GREEDY, "max_new_tokens": 20},
    )
    config = compiling(graphs, backend="inductor", mode="reduce-overhead")
    assert torch.equal(model.generate(**options, **config), model.generate(**options))


@pytest.mark.quick_cases("gecko")
@each(GECKO, DEEP_EMBED, RAVEN_FULL)
def test_compiled_continuation(case, graphs):
    model, ids = case.model(num_hidden_layers=case.layer_kinds), random_ids(2, 6)
    expected = model.generate(ids, **GREEDY, max_new_tokens=20)
    config = compiling(graphs)
    options = {"max_new_tokens": 5, "max_cache_len": 26, "return_dict_in_generate": True}
    mask = torch.ones(2, 11, dtype=torch.long)  # given, because transformers would take a token of id 0 for padding
    out = model.generate(ids, attention_mask=mask[:, :6], **GREEDY, **config, **options)
    cache = out.cache
    before = addresses(cache)
    del config["cache_implementation"]
    options = {"cache": cache, "attention_mask": mask, "max_new_tokens": 15}
    out = model.generate(out.sequences, **options, **GREEDY, **config)
    assert torch.equal(out, expected)
    assert len(graphs) == 1
    assert addresses(cache) == before
    assert cache.get_seq_length() == 25


@pytest.mark.quick_cases("rwkv6")
@each(FINCH, AVEY, RAVEN, GECKO)
def test_compiled_chunks(case, graphs):
    model = case.model(num_hidden_layers=case.layer_kinds)
    options = {**prompts(case, 3, 0, length=18), **GREEDY, "max_new_tokens": 6}
    expected, config = model.generate(**options), compiling(graphs)
    for _ in range(2):
        assert torch.equal(model.generate(**options, **config, prefill_chunk_size=7), expected)
        # A whole chunk, the rest, and one token.
        assert len(graphs) == 3


# The cache.


@pytest.mark.fast
@each(*TEXT, RAVEN_PURE, RAVEN_FULL, RAVEN_BOTH, RAVEN_SWA)
def test_addresses_are_constant(case):
    model, ids = case.model(), random_ids(2, 20)
    _, cache = both_caches(model, ids[:, :5])
    before = addresses(cache)
    for start, stop in ((5, 12), (12, 13), (13, 20)):
        # With gradients enabled too: a static cache keeps none.
        model(ids[:, start:stop], cache=cache)
        assert addresses(cache) == before
    assert_same_caches(cache, both_caches(model, ids)[0])
    cache.reset()
    assert (addresses(cache), cache.get_seq_length()) == (before, 0)
    model(ids, cache=cache)
    assert addresses(cache) == before
    assert_same_caches(cache, both_caches(model, ids)[0])


@each_text_case
def test_recording_the_past(case):
    model, ids = case.model(), random_ids(1, 9)
    dynamic, static = both_caches(model, ids[:, :4])
    static.activate_past_recording()
    # What was recorded must not be overwritten.
    assert not static.is_compileable
    with torch.no_grad():
        model(ids[:, 4:], cache=static)
    static.crop(-5)
    assert_same_caches(static, dynamic)
    options = {**GREEDY, "max_new_tokens": 12}
    cache = model.new_cache(static=True, max_cache_len=64)
    out = model.generate(ids, cache=cache, prompt_lookup_num_tokens=3, **options)
    assert torch.equal(out, model.generate(ids, **options))


@torch.no_grad()
def test_what_was_written_in_place_is_not_copied():
    layer = LayerState(static=True)
    layer.write("state", torch.zeros(2, 3))
    state = layer.get("state").add_(1)
    version = state._version
    layer.write("state", state)
    assert layer.get("state") is state
    assert state._version == version


@pytest.mark.quick_cases("avey")
@each(AVEY, RAVEN_FULL, EAGLE)
def test_a_shorter_text_needs_no_other_graph(case, graphs):
    model, compiled = case.model(num_hidden_layers=case.layer_kinds), compiling(graphs)
    for new in (80, 4):
        options = {**prompts(case, 2, 0), **GREEDY, "max_new_tokens": new}
        assert torch.equal(model.generate(**options, **compiled), model.generate(**options))
        assert len(graphs) == 1


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU compiles the decoding step")
def test_on_a_cpu_nothing_is_compiled_without_a_word(monkeypatch):
    model, said = tiny_model("rwkv6"), []
    monkeypatch.setattr(step.logger, "warning_once", said.append)
    for options in ({}, {"disable_compile": True}, {"cache_implementation": None}):
        model.generate(random_ids(1, 4), **GREEDY, max_new_tokens=2, **{"cache_implementation": "static", **options})
    assert len(said) == 1 and "does not compile the decoding step on a CPU" in said[0]


@each_text_case
def test_a_static_cache_in_training(case):
    model, ids, grads = case.model(), random_ids(2, 12), []
    for cache in (model.new_cache(), model.new_cache(static=True, max_cache_len=64)):
        model.zero_grad()
        for piece in ids.split(4, dim=1):
            model(piece, cache=cache, labels=piece).loss.backward()
            for layer in cache.all_layers:
                layer.apply(torch.detach)
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)


@each_text_case
def test_a_static_cache_made_in_inference_mode(case):
    model, ids = case.model(), random_ids(2, 12)
    cache, expected = model.new_cache(static=True, max_cache_len=64), model.new_cache()
    with torch.inference_mode():
        model(ids[:, :5], cache=cache)
    with torch.no_grad():
        model(ids[:, 5:], cache=cache)
        model(ids, cache=expected)
    assert_same_caches(cache, expected)

"""A token replayed as a CUDA graph equals the model itself, whatever is done with cache and model in between."""

import contextlib
import copy
import dataclasses
import functools
import gc
import threading
import weakref

import pytest
import torch
from cases import (
    AVEY,
    CASES,
    DEVICE,
    EAGLE,
    FINCH,
    GECKO,
    GENERATING,
    GOOSE,
    GREEDY,
    RAVEN_BOTH,
    RAVEN_FULL,
    RAVEN_PURE,
    VARIANTS,
    VISUAL,
    assert_same_states,
    each,
    each_with,
    padded,
    random_ids,
    tiny_model,
)
from fake_gpu import Graph, fake_graphs
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import GenerationConfig

from subquad.decoding import cuda_graph, step, tape
from subquad.decoding.continuous_batching.batch import Batch
from subquad.decoding.continuous_batching.requests import Options, Request
from subquad.models import REGISTRY
from subquad_kernels import backend, fused_step
from subquad_kernels.backend import KernelError


CAPTURED = [case for case in (*GENERATING, *VARIANTS) if case is not AVEY]


class Calls:
    """The number of captures and replays."""

    captures = replays = 0


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    monkeypatch.setitem(step.MAKERS, DEVICE, functools.partial(cuda_graph.make, REGISTRY.values()))
    monkeypatch.setattr(cuda_graph, "_kept", [])
    made = Calls()
    capture, read = cuda_graph.CapturedToken._capture, cuda_graph.CapturedToken.read

    def count_capture(self, *args):
        made.captures += 1
        return capture(self, *args)

    def count_replay(self, *args):
        made.replays += 1
        return read(self, *args)

    monkeypatch.setattr(cuda_graph.CapturedToken, "_capture", count_capture)
    monkeypatch.setattr(cuda_graph.CapturedToken, "read", count_replay)
    with contextlib.nullcontext() if DEVICE == "cuda" else fake_graphs():
        yield made


@pytest.fixture
def said(monkeypatch):
    """What is logged."""
    texts = []
    for logger in (cuda_graph.logger, step.logger):
        monkeypatch.setattr(logger, "info", lambda text, *args: texts.append(text % args))
        monkeypatch.setattr(logger, "warning_once", texts.append)
    return texts


@torch.no_grad()
def start(model, rows=2, length=5, seed=0):
    """Two equal caches after a text."""
    ids = random_ids(rows, length, seed=seed)
    return [model(ids, use_cache=True).cache for _ in range(2)]


@torch.no_grad()
def compare(model, cache, other, tokens=4, masks=False, read=None, seed=1):
    """Reads tokens by a decoding step and by the model itself."""
    read = read or model.decoding_step(cache)
    rows, found = cache.batch_size, []
    for n in range(tokens):
        ids = random_ids(rows, 1, seed=seed + n)
        mask = (torch.arange(rows, device=ids.device)[:, None] != n % rows).long() if masks else None
        expected = model(ids, attention_mask=mask, cache=other, logits_to_keep=1).logits[:, -1]
        found.append((read(ids, mask), expected))
    for logits, expected in found:  # later tokens have not changed them
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert_same_states(cache, other)
    assert cache.get_seq_length() == other.get_seq_length()
    return read


@pytest.mark.quick_cases("rwkv6-0", "raven-both-1", "gecko-1")
@each_with("rows", [1, 3], (FINCH, RAVEN_BOTH), [3], [case for case in CAPTURED if case not in (FINCH, RAVEN_BOTH)])
def test_equals_the_model(case, rows, calls):
    model = case.model(num_hidden_layers=case.layer_kinds)
    cache, other = start(model, rows)
    read = compare(model, cache, other, 4)
    assert (read.kind, calls.captures, calls.replays) == ("cuda_graph", 1, 3)
    compare(model, cache, other, 4, masks=rows > 1, read=read)  # a row that has ended reads nothing
    assert (calls.captures, calls.replays) == (1 + (rows > 1), 7)
    compare(model, cache, other, 2, read=read)
    with torch.no_grad():  # then some tokens at once
        ids = random_ids(rows, 3)
        torch.testing.assert_close(
            model(ids, cache=cache).logits, model(ids, cache=other).logits, atol=1e-4, rtol=1e-4
        )
    compare(model, cache, other, 3, read=read)
    assert calls.captures == 1 + (rows > 1)


@pytest.fixture
def fused(monkeypatch):
    """Kernels of whole blocks run, in the interpreter if there is no GPU. What they have read."""
    pytest.importorskip("triton")
    rows, run = [], fused_step.StepBlocks.__call__

    def count(self, x, *args):
        rows.append(len(x))
        return run(self, x, *args)

    monkeypatch.setattr(fused_step.StepBlocks, "__call__", count)
    if DEVICE == "cpu":
        monkeypatch.setattr(fused_step, "choose_backend", lambda *args: "triton")
    return rows


@pytest.mark.quick_cases("rwkv6")
@each(EAGLE, FINCH, GOOSE, RAVEN_PURE, dataclasses.replace(GECKO, fields={**GECKO.fields, **GECKO.wide}))
def test_fused_blocks(case, calls, fused):
    model = case.model()
    cache, other = start(model, 2)
    read = compare(model, cache, other, 3)
    compare(model, cache, other, 3, masks=True, read=read)
    compare(model, *start(model, 2, seed=1), 3)
    assert fused == [2] * 6 and (calls.captures, calls.replays) == (3, 7)
    compare(model, *start(model, fused_step.MOST_ROWS + 1), 3)
    assert len(fused) == 6 and calls.captures == 4


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU compiles them")
def test_fused_blocks_that_do_not_compile(calls, fused, said, monkeypatch):
    """The third kernel fails, when states have changed. The model itself is captured."""
    from subquad_kernels.fused_step import triton_kernels

    launched, launch = [], triton_kernels.launch

    def fail_in_time(*args, **constants):
        launched.append(args)
        if len(launched) > 2:
            raise KernelError("no registers")
        launch(*args, **constants)

    monkeypatch.setattr(triton_kernels, "launch", fail_in_time)
    monkeypatch.setattr(fused_step, "choose_backend", lambda *args: "auto")
    monkeypatch.setattr(backend, "_works", lambda device: True)
    model = tiny_model("rwkv6")
    with pytest.warns(RuntimeWarning, match="`fused_step` runs in plain torch: no registers"):
        compare(model, *start(model))
    assert (calls.captures, calls.replays) == (1, 3) and fused == [2] and not said


def test_models_that_are_not_fused(calls, fused, said):
    """A layer of another class is captured as it is."""
    model = tiny_model("rwkv6")
    layer = model.base_model.blocks[0].feed_forward.key
    layer.__class__ = type("Other", (type(layer),), {})
    compare(model, *start(model))
    assert calls.captures == 1 and not fused and "`feed_forward.key` is a Other" in said[-1]


OPTIONS = {
    "greedy": {},
    "sample": {"do_sample": True, "top_k": 0},
    "beams": {"num_beams": 3},
    "guidance": {"guidance_scale": 1.7},
    "ends": {"eos_token_id": list(range(0, 90, 4))},
}


@pytest.mark.quick_cases("greedy-rwkv6", "beams-raven-full", "ends-gecko", "guidance-rwkv6")
@pytest.mark.parametrize(
    ("way", "case"),
    [
        pytest.param(way, case, id=f"{way}-{case.name}")
        for way, case in [
            *((way, FINCH) for way in OPTIONS),
            ("beams", RAVEN_FULL),
            ("ends", GECKO),
            ("sample", VISUAL[1]),
        ]
    ],
)
def test_generate(case, way, calls, monkeypatch):
    # As on a GPU, which is not asked whether a row has ended.
    monkeypatch.setattr("subquad.decoding.generation._EndedRows.may_pad", lambda rows: rows.padding is not None)
    model = case.model(num_hidden_layers=case.layer_kinds)
    prompts = padded([case.text(1, 9 - 3 * (n == 0), seed=n) for n in range(2)], "left")
    options = {**prompts, **GREEDY, **OPTIONS[way], "max_new_tokens": 12}
    for times in (1, 2):
        torch.manual_seed(0)
        expected = model.generate(**options, disable_compile=True)
        torch.manual_seed(0)
        assert model.generate(**options).equal(expected)
        texts = 2 if way == "guidance" else 1  # guided by those without the prompts
        assert calls.captures == texts and calls.replays >= 2 * times * texts


@pytest.mark.quick_cases("rwkv6", "gecko")
@each(EAGLE, FINCH, GOOSE, RAVEN_PURE, GECKO)
def test_continuous_batching(case, calls):
    """Requests that join and leave write to the states of a graph; each number of rows has one graph."""
    model = case.model(num_hidden_layers=case.layer_kinds)
    batch = Batch(model, most=6, piece=16, memory=0.5)
    requests = []
    for number in range(24):
        own = Options(model, GenerationConfig(**{**GREEDY, "eos_token_id": -1, "max_new_tokens": 5 + number % 9}), {})
        requests.append(Request(str(number), random_ids(1 + 7 * number % 20, seed=number).tolist(), own))
    batch.waiting.extend(requests)
    steps = 0
    with torch.no_grad():
        while batch.has_work:
            for _ in batch.step():
                pass
            steps += 1
        for request in requests:
            assert request.error is None and len(request.generated_tokens) == request.limit
            logits = model(torch.tensor([request.text])).logits[0, len(request.prompt_ids) - 1 : -1]
            assert logits.argmax(-1).tolist() == request.generated_tokens
    assert calls.replays > steps / 2 and calls.captures <= 4


@pytest.mark.quick_cases("raven-pure")
@each(RAVEN_PURE, GECKO, GOOSE)
@torch.no_grad()
def test_an_assistant(case, calls):
    """Its tokens are replayed, whether they are accepted or not."""
    torch.manual_seed(0)
    options = {"inputs": random_ids(1, 6), **GREEDY, "max_new_tokens": 16}
    model, assistant = (case.model(num_hidden_layers=case.layer_kinds) for _ in range(2))
    expected = model.generate(**options, disable_compile=True)
    fixed = {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant"}
    assistant.generation_config.update(**fixed, assistant_confidence_threshold=0.0)
    for changed in (0.0, 0.1):
        for parameter in assistant.parameters():
            parameter.add_(changed * torch.randn_like(parameter))
        calls.replays = 0
        assert model.generate(**options, assistant_model=assistant).equal(expected)
        assert calls.replays >= 8
    assert calls.captures == 2


@each(CASES["gecko-chunk-64"], RAVEN_FULL)
def test_states_that_grow(case, calls):
    """The model itself makes room for more tokens, for which there is another graph."""
    model = case.model(num_hidden_layers=2 if case is RAVEN_FULL else 1)
    cache, other = start(model, 2, 60)
    compare(model, cache, other, 10)
    assert (calls.captures, calls.replays) == (2, 3 + 4)
    cache, other = start(model, 2, 60)
    compare(model, cache, other, 10)
    assert calls.captures == 2


def test_what_is_done_with_a_cache(calls, tmp_path):
    model = tiny_model("rwkv6")
    cache, other = start(model)
    read = compare(model, cache, other)
    copies = [cache.clone(), *cache.split()]
    cache.save(tmp_path / "cache")
    copies.append(type(cache).load(tmp_path / "cache", model.config, device=DEVICE))
    kept, expected = [each_cache.clone() for each_cache in copies], cache.clone()
    for change in (
        lambda x: x.reorder_cache(torch.tensor([1, 0])),
        lambda x: x.reset_rows(torch.tensor([True, False])),
        lambda x: x.batch_repeat_interleave(2),
        lambda x: x.batch_select_indices(torch.tensor([0, 3])),
        lambda x: x.detach(),
        lambda x: x.activate_past_recording(),
        lambda x: x.crop(-2),
    ):
        for each_cache in (cache, other):
            change(each_cache)
        compare(model, cache, other, 3, read=read if cache.batch_size == 2 else None)
        assert all(layer.fresh_rows is None for layer in cache.all_layers)
    for found, before in zip(copies, kept, strict=True):
        assert_same_states(found, before)
    compare(model, expected, expected.clone())
    cache.reset()
    other.reset()
    with torch.no_grad():
        model.decoding_step(cache, 2)(random_ids(2, 1)), model(random_ids(2, 1), cache=other)
    assert_same_states(cache, other)


@pytest.mark.quick_cases("rwkv7", "gecko")
@each(*CAPTURED)
def test_tokens_are_taken_back(case, calls):
    """As by an assistant: each draft begins with a call of the model itself."""
    model = case.model(num_hidden_layers=case.layer_kinds)
    cache, other = start(model)
    cache.activate_past_recording()
    other.activate_past_recording()
    for turn, (drafted, removed) in enumerate(((6, 4), (5, 0), (5, 6), (4, 5), (4, 2))):
        compare(model, cache, other, drafted, masks=turn == 3, seed=10 * turn)
        cache.crop(-removed)
        other.crop(-removed)
        assert_same_states(cache, other)
        assert cache.records_past and cache.get_seq_length() == other.get_seq_length()
        with torch.no_grad():
            ids = random_ids(2, 2, seed=turn)
            model(ids, cache=cache), model(ids, cache=other)
    # The first token begins the record. After a draft that was kept, the record holds the states of the first graph,
    # so there is a second one. The third one has a mask.
    assert (calls.captures, calls.replays) == (3, 4 + 5 + 4 + 4 + 4)


def test_records_of_the_past(calls, monkeypatch):
    """They are read from the tape when somebody needs them, and when it is full."""
    monkeypatch.setattr(tape, "CAPACITY", 4)
    monkeypatch.setattr(tape, "MAX_RECORDED", 5)
    model = tiny_model("rwkv6")
    cache, other = start(model)
    with torch.no_grad():
        for each_cache in (cache, other):
            each_cache.activate_past_recording()
            model(random_ids(2, 3), cache=each_cache)
    read = compare(model, cache, other, 15)
    assert (calls.captures, calls.replays) == (1, 14)
    layer = cache.layers[0]
    assert 5 <= layer.recorded_tokens <= 10 + 4
    copies = [cache.clone(), copy.deepcopy(cache), *cache.split()]
    compare(model, cache, other, 3, read=read)
    for number, each_cache in enumerate(copies):
        each_cache.crop(-5)
        twin = other.split()[number - 2] if number > 1 else other.clone()
        twin.crop(-8)
        assert_same_states(each_cache, twin)
    cache.reorder_cache(torch.tensor([1, 0]))
    other.reorder_cache(torch.tensor([1, 0]))
    compare(model, cache, other, 3, read=read)
    with torch.no_grad():
        model(random_ids(2, 1), cache=cache), model(random_ids(2, 1), cache=other)
    compare(model, cache, other, 3, read=read)
    cache.crop(-5)
    other.crop(-5)
    assert_same_states(cache, other)
    assert calls.captures == 1


def test_caches_that_take_turns(calls):
    """Each has a graph as long as it lives; the graph of one that does not is used again."""
    model = tiny_model("raven")
    pairs = [start(model, seed=seed) for seed in range(3)]
    for turn in range(3):
        for cache, other in pairs:
            compare(model, cache, other, 2, seed=turn)
    assert calls.captures == 3
    held = [pairs.pop() for _ in range(2)]
    del cache, other, held
    pairs += [start(model, seed=7)]
    for cache, other in pairs:
        compare(model, cache, other, 2)
    assert calls.captures == 3


def test_states_that_somebody_needs(calls):
    """Of a frozen copy, and of a graph of autograd."""
    model = tiny_model("rwkv6")
    cache, other = start(model)
    read = compare(model, cache, other)
    frozen, before = cache.frozen().layers, cache.clone().layers
    compare(model, cache, other, read=read)
    for layer, expected in zip(frozen, before, strict=True):
        assert all(x.equal(expected.states[name]) for name, x in layer.states.items())

    loss = sum(model(random_ids(2, 2), cache=each_cache).logits.square().mean() for each_cache in (cache, other))
    compare(model, cache, other, read=read)
    loss.backward()
    assert calls.captures == 3


def test_graphs_that_were_used_longest_ago_are_dropped(calls, monkeypatch):
    monkeypatch.setattr(cuda_graph, "MOST_GRAPHS", 2)
    model = tiny_model("rwkv6")
    pairs = [start(model, rows) for rows in (1, 2, 3)]
    steps = [compare(model, *pair) for pair in pairs]
    assert [each.key.shapes[0][1][0] for each in cuda_graph._kept] == [2, 3]
    for pair, read in zip(pairs, steps, strict=True):  # whoever has one goes on
        compare(model, *pair, read=read)
    assert calls.captures == 3
    dropped = weakref.ref(model)
    del model, pairs, pair, steps, read
    gc.collect()
    assert dropped() is None and not cuda_graph._kept


def scale(model):
    for parameter in model.parameters():
        parameter.mul_(1.1)


def replace(model):
    model.get_output_embeddings().weight = torch.nn.Parameter(model.get_output_embeddings().weight * 2)


def swap(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1


CHANGES = {"in place": (scale, 1), "a parameter": (replace, 2), "memory": (swap, 2)}


@torch.no_grad()
@pytest.mark.parametrize("name", ["rwkv7", "gecko"])
@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change(name, change, calls):
    change, captures = CHANGES[change]
    model = tiny_model(name)
    cache, other = start(model)
    read = compare(model, cache, other)
    change(model)
    compare(model, cache, other, read=read)
    assert calls.captures == captures


def test_what_a_new_step_notices(calls):
    """A number of a norm, and another dtype."""
    model = tiny_model("rwkv6")
    compare(model, *start(model))
    model.base_model.blocks[0].ln1.eps = 0.5
    compare(model, *start(model))
    model.double()
    compare(model, *start(model))
    assert calls.captures == 3


@torch.no_grad()
def test_adapters(calls):
    model = tiny_model("rwkv6")
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)).eval()
    cache, other = start(model)
    read = compare(model, cache, other)
    with adapted.disable_adapter():
        compare(model, cache, other, read=read)
    assert calls.captures == 2
    compare(model, cache, other, read=read)
    assert calls.captures == 2  # that of the adapter was kept
    for change in (
        lambda: adapted.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)),
        lambda: adapted.set_adapter("other"),
        lambda: [x.scaling.update(other=3.0) for x in model.modules() if hasattr(x, "scaling")],
        adapted.merge_adapter,
        adapted.unmerge_adapter,
    ):
        change()
        model.eval()
        replays = calls.replays
        compare(model, cache, other, read=read)
        assert calls.replays > replays


def test_hooks_are_called(calls, said):
    model, called = tiny_model("rwkv6"), []
    cache, other = start(model)
    read = compare(model, cache, other)
    handle = model.base_model.blocks[0].register_forward_hook(lambda *args: called.append(1))
    compare(model, cache, other, read=read)
    assert len(called) == 8
    assert model.decoding_step(cache).kind == "eager"
    assert all("Something else is called" in text for text in said) and len(said) == 2
    handle.remove()
    compare(model, cache, other)
    assert calls.replays == 6


def test_what_observes_operations(calls):
    model = tiny_model("rwkv6")
    cache, other = start(model)
    read, replays = compare(model, cache, other), calls.replays
    for context in (torch.autocast(DEVICE, torch.bfloat16), FlopCounterMode(display=False)):
        with context, torch.no_grad():
            torch.testing.assert_close(read(random_ids(2, 1)), model(random_ids(2, 1), cache=other).logits[:, -1])
    model.train()
    with torch.no_grad():
        read(random_ids(2, 1))
    assert calls.replays == replays


@torch.no_grad()
def test_what_cannot_be_captured(said):
    model = tiny_model("rwkv6")
    cache, avey = model.new_cache(), tiny_model("avey")
    assert model.decoding_step(model.new_cache(static=True), 1).kind == "eager"
    assert avey.decoding_step(avey.new_cache(), 1).kind == "eager"
    model.base_model.blocks[1].train()
    assert model.decoding_step(cache, 1).kind == "eager"
    model.eval().base_model.blocks[1].register_buffer("far", torch.zeros(1, device="meta"))
    assert model.decoding_step(cache, 1).kind == "eager"
    deep = tiny_model("rwkv7_deep_embed")
    deep.rwkv7.blocks[0].ffn.s_emb.to("meta")
    assert deep.decoding_step(deep.new_cache(), 1).kind == "eager"
    reasons = (
        "StaticRecurrentCache",
        "splits",
        "training mode",
        "blocks.1.far` is a Tensor on meta",
        "rows of the tables are copied from another device",
    )
    assert len(said) == 5
    for text, reason in zip(said, reasons, strict=True):
        assert reason in text


def fail(*args, **kwargs):
    raise torch.OutOfMemoryError("no memory")


@contextlib.contextmanager
def end_badly(*args, **kwargs):
    yield
    fail()


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU does not fail when it is asked to")
@pytest.mark.parametrize("way", ["begin", "end", "replay", "wait"])
def test_failures(way, calls, said, monkeypatch):
    """Nothing is read twice, nothing is lost, and it is not tried again."""
    model = tiny_model("rwkv6")
    cache, other = start(model)
    with monkeypatch.context() as patch:
        if way == "wait":
            run = type(model.base_model.blocks[0]).forward

            def wait(self, x, *args, **kwargs):
                return run(self, x + 0 * x.sum().item(), *args, **kwargs)

            patch.setattr(type(model.base_model.blocks[0]), "forward", wait)
        elif way == "replay":
            compare(model, cache, other)
            patch.setattr(Graph, "replay", fail)
        else:
            patch.setattr(torch.cuda, "graph", fail if way == "begin" else end_badly)
        read = compare(model, cache, other, 4)
        said[:] = [text for text in said if "model's own kernels" not in text]  # a patched block is not fused
        assert len(said) == 1 and ("not permitted" if way == "wait" else "OutOfMemoryError: no memory") in said[0]
        replays, captures = calls.replays, calls.captures
        compare(model, cache, other, 4, read=read)
        compare(model, *start(model))
    assert (calls.replays, calls.captures, len(said)) == (replays, captures, 1)
    assert not cuda_graph._kept


def test_tokens_that_do_not_fit():
    model = tiny_model("rwkv6")
    cache, other = start(model)
    read = compare(model, cache, other)
    for ids, mask in (
        (random_ids(3, 1), None),
        (random_ids(2, 2), None),
        (random_ids(2, 1), torch.ones(3, 1, device=DEVICE)),
    ):
        with pytest.raises(ValueError, match="must be"):
            read(ids, mask)
    compare(model, cache, other, read=read)


def test_threads():
    """Every thread has its texts, and they share the model and its graphs."""
    model, found = tiny_model("raven"), {}
    texts = [random_ids(2, 5, seed=seed) for seed in range(4)]
    expected = [model.generate(ids, **GREEDY, max_new_tokens=12, disable_compile=True) for ids in texts]

    def run(n):
        found[n] = model.generate(texts[n], **GREEDY, max_new_tokens=12)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[n].equal(expected[n]) for n in range(4))


def test_inference_mode(calls):
    model = tiny_model("raven-full")
    with torch.inference_mode():
        cache, other = start(model)
        read = compare(model, cache, other)
        ids = random_ids(2, 1)
        read(ids), model(ids, cache=other)
    compare(model, cache, other, read=read)
    assert calls.captures == 1

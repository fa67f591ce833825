"""Recurrences whose states are in a pool, against the reference with the same states."""

import pytest
import torch
from kernel_cases import DEVICE, EACH, relative_error
from kernel_cases.chunk_attention import make_inputs as make_chunk_attention
from kernel_cases.delta_wkv import make as make_delta_wkv
from kernel_cases.slot_memory import make as make_slot_memory
from kernel_cases.wkv import make as make_wkv
from kernel_cases.working_memory import make as make_working_memory

from subquad_kernels import (
    chunk_attention_step,
    delta_wkv,
    slot_memory,
    state_pool,
    wkv,
    working_memory,
)


def make_static(**sizes):
    return make_wkv(static=True, **sizes)


CASES = {
    "Eagle": (wkv, make_static),
    "Finch": (wkv, make_wkv),
    "Goose": (delta_wkv, make_delta_wkv),
    "Raven": (slot_memory, make_slot_memory),
}
LENGTHS = {"one token": {"length": 1}, "tokens": {"length": 20}, "documents": {"documents": (3, 0, 18)}}


def numbers(rows):
    """Of up to three states, with others between them in memory."""
    return torch.tensor([5, 0, 2, 0, 1, 0]).to(DEVICE)[: 2 * rows : 2]


def make_pool(states, stride):
    """A pool of seven states, of which numbers 5, 2 and 1 are `states`; and their numbers."""
    chosen = numbers(len(states))
    memory = torch.randn(7, states[0].numel() + stride, device=DEVICE)
    pool = memory[:, : states[0].numel()].view(7, *states.shape[1:])
    pool[chosen] = states
    return pool, chosen


def assert_same(found, after, wanted, state, pool, before, chosen):
    assert after is pool
    assert relative_error(found, wanted) < 1e-5 and relative_error(pool[chosen], state) < 1e-5
    others = [n for n in range(len(pool)) if n not in chosen.tolist()]
    assert torch.equal(pool[others], before[others])


@EACH
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("sizes", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(("operator", "make"), CASES.values(), ids=CASES)
def test_pool(operator, make, sizes, large, backend, monkeypatch):
    if large:
        monkeypatch.setattr(state_pool, "LARGE", 1)
    inputs = make(**sizes)
    double = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    wanted, state = operator(**double, backend="reference")
    pool, chosen = make_pool(inputs.pop("initial_state"), stride=5)
    before = pool.clone()
    found, after = operator(**inputs, initial_state=pool, indices=chosen, backend=backend)
    assert_same(found, after, wanted, state, pool, before, chosen)


@EACH
@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize(
    ("operator", "make"), [(wkv, make_wkv), (delta_wkv, make_delta_wkv), (slot_memory, make_slot_memory)]
)
def test_checks_before_any_work(operator, make, length, backend):
    inputs = make(length=length)
    pool, chosen = make_pool(inputs.pop("initial_state"), stride=5)
    before = pool.clone()
    for change, message in (
        ({"indices": chosen[:1]}, r"`indices` must be int64 of shape \(2,\), got torch.int64 \(1,\)"),
        ({"indices": chosen.int()}, r"`indices` must be int64 of shape \(2,\), got torch.int32 \(2,\)"),
        ({"indices": chosen.to("meta")}, "`indices` is on meta"),
        ({"initial_state": None}, "`indices` needs `initial_state`"),
        ({"initial_state": pool[:, :1]}, "`initial_state` must have shape"),
        ({"initial_state": pool.double()}, "`indices` needs a float32 `initial_state`"),
        ({"initial_state": pool.mT.contiguous().mT}, "`indices` needs a float32 `initial_state`"),
        ({"v": inputs["v"].requires_grad_()}, "`indices` overwrites states"),
    ):
        with pytest.raises(ValueError, match=message):
            operator(**{**inputs, "initial_state": pool, "indices": chosen, **change}, backend=backend)
        inputs["v"] = inputs["v"].detach()
    assert torch.equal(pool, before)


@pytest.mark.skipif(DEVICE == "cuda", reason="the values are not read on a GPU")
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("wrong", [-1, 7])
def test_numbers_of_no_state(wrong, large, monkeypatch):
    """Plain torch finds them before anything has changed."""
    monkeypatch.setattr(state_pool, "LARGE", 1 if large else 1 << 30)
    calls = [(operator, make(length=1), "initial_state", None) for operator, make in CASES.values()]
    calls.append((working_memory, make_working_memory(rows=ABSORBED["no chunk"], keys=9), "memory", "normalizer"))
    for operator, inputs, *names in calls:
        states = [inputs[name] for name in names if name]
        pools = [make_pool(x, stride=5)[0] for x in states]
        before, chosen = [pool.clone() for pool in pools], numbers(len(states[0]))
        chosen[-1] = wrong
        inputs |= dict(zip(names, pools, strict=False))
        if operator is working_memory:
            inputs |= {name: in_pool(inputs[name].contiguous(), numbers(3), 0) for name in ("k", "v")}
        with pytest.raises(IndexError):
            operator(**inputs, indices=chosen, backend="eager")
        assert all(map(torch.equal, pools, before))
    rings = make_chunk_attention(7, 1, 8, dtype=torch.float32)
    with pytest.raises(IndexError):
        chunk_attention_step(
            rings.pop("q")[:1],
            **rings,
            mask=torch.ones(1, 9, dtype=torch.bool),
            indices=torch.tensor([wrong]),
            backend="eager",
        )


def test_compiled_token():
    """A graph of the step writes to the pool that it is given."""
    inputs = make_wkv(length=1)
    pool, chosen = make_pool(inputs.pop("initial_state"), stride=5)
    expected, other = wkv(**inputs, initial_state=(copy := pool.clone()), indices=chosen)[0], pool
    step = torch.compile(lambda **x: wkv(**x)[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(**inputs, initial_state=other, indices=chosen), expected)
    torch.testing.assert_close(pool, copy)


def in_pool(x, chosen, stride):
    """A pool of seven such tensors, of which the numbers `chosen` are x (rows, ...); NaN where nothing may be read."""
    memory = torch.full((7, x[0].numel() + stride), torch.nan, dtype=x.dtype, device=DEVICE)
    pool = memory[:, : x[0].numel()].view(7, *x.shape[1:])
    pool[chosen] = x
    return pool


@EACH
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stride", [0, 5])
def test_rings(stride, dtype, large, backend, monkeypatch):
    """The step of chunk attention finds keys and values in rings that are longer than what is seen."""
    if large:
        monkeypatch.setattr(state_pool, "LARGE", 1)
    chosen = numbers(3)
    inputs = make_chunk_attention(3, 1, 39, dtype=dtype)
    mask = torch.arange(40, device=DEVICE) < torch.tensor([[1], [40], [17]], device=DEVICE)
    mask[1, :20] = False
    rings = {name: in_pool(inputs[name], chosen, stride) for name in ("k", "v")}
    for seen in (mask, mask[1:2]):
        wanted = chunk_attention_step(**{name: x.double() for name, x in inputs.items()}, mask=seen)
        found = chunk_attention_step(inputs["q"], **rings, mask=seen, indices=chosen, backend=backend)
        assert found.dtype == dtype and relative_error(found, wanted) < (1e-5 if dtype == torch.float32 else 1.5e-2)
    # Views of the first rows of the rings.
    rings = {name: x[:, :, :17] for name, x in rings.items()}
    seen = mask[::2, :17]
    wanted = chunk_attention_step(
        *(x[::2].double() for x in (inputs["q"], *(inputs[name][:, :, :17] for name in ("k", "v")))), mask=seen
    )
    found = chunk_attention_step(inputs["q"][::2], **rings, mask=seen, indices=chosen[::2], backend=backend)
    assert relative_error(found, wanted) < (1e-5 if dtype == torch.float32 else 1.5e-2)


def test_checks_of_rings():
    inputs = make_chunk_attention(2, 1, 8, dtype=torch.float32)
    chosen, mask = torch.tensor([1, 0], device=DEVICE), torch.ones(1, 9, dtype=torch.bool, device=DEVICE)
    for change, message in (
        ({"indices": chosen[:1]}, r"`indices` must be int64 of shape \(2,\), got torch.int64 \(1,\)"),
        ({"indices": chosen.int()}, r"`indices` must be int64 of shape \(2,\), got torch.int32 \(2,\)"),
        ({"indices": chosen.to("meta")}, "`indices` is on meta"),
        ({"v": inputs["v"][:1]}, "`v` must have shape"),
        ({"v": inputs["v"].clone().requires_grad_()}, "`indices` has no backward pass"),
    ):
        with pytest.raises(ValueError, match=message):
            chunk_attention_step(**{**inputs, "mask": mask, "indices": chosen, **change})


# Of three rows and a chunk of four tokens: which leaves, where a document begins in it, and what is read.
ABSORBED = {
    "no chunk": ([[-1], [-1], [-1]], [[0], [0], [0]], [[0], [-1], [0]]),
    "chunks": ([[2], [-1], [5]], [[-1], [0], [2]], [[1], [0], [1]]),
    "before": ([[2], [0], [5]], [[-1], [0], [-1]], [[0], [-1], [1]]),
}


@EACH
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("rows", ABSORBED.values(), ids=ABSORBED)
@pytest.mark.parametrize("stride", [0, 5])
def test_working_memory(stride, rows, large, backend, monkeypatch):
    if large:
        monkeypatch.setattr(state_pool, "LARGE", 1)
    inputs = make_working_memory(rows=rows, keys=9)
    wanted, *states = working_memory(
        **{
            name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for name, x in inputs.items()
        },
        backend="reference",
    )
    chosen = numbers(3)
    for name in ("k", "v"):
        inputs[name] = in_pool(inputs[name].contiguous(), chosen, stride)
    pools = [make_pool(inputs[name], stride)[0] for name in ("memory", "normalizer")]
    before = [pool.clone() for pool in pools]
    inputs |= dict(zip(("memory", "normalizer"), pools, strict=True))
    found, *after = working_memory(**inputs, indices=chosen, backend=backend)
    others, kept = [0, 3, 4, 6], [n for n, row in zip(chosen.tolist(), rows[0], strict=True) if row == [-1]]
    assert relative_error(found, wanted) < 1e-5
    for pool, same, state, old in zip(pools, after, states, before, strict=True):
        assert same is pool and relative_error(pool[chosen], state) < 1e-5
        assert torch.equal(pool[others], old[others]) and torch.equal(pool[kept], old[kept])


def test_checks_of_the_working_memory():
    inputs = make_working_memory(rows=ABSORBED["chunks"], keys=9)
    chosen = torch.tensor([2, 0, 1], device=DEVICE)
    two = make_working_memory(rows=([[-1, -1]] * 3, [[0, 0]] * 3, [[0]] * 3), keys=9)
    for change, message in (
        ({"indices": chosen[:1]}, r"`indices` must be int64 of shape \(3,\), got torch.int64 \(1,\)"),
        ({"memory": None, "normalizer": None}, "`indices` needs `memory`"),
        ({"memory": inputs["memory"].double()}, "`indices` needs a float32 `memory`"),
        ({"normalizer": inputs["normalizer"].mT.contiguous().mT}, "`indices` needs a float32 `normalizer`"),
        ({"normalizer": inputs["normalizer"][:2]}, "`normalizer` must have shape"),
        ({"k": inputs["k"][:2]}, "`k` must have shape"),
        ({"q": inputs["q"].clone().requires_grad_()}, "`indices` overwrites states"),
        ({name: two[name] for name in ("leaving", "begins")}, "`indices` needs one token and one chunk, got 1 and 2"),
    ):
        with pytest.raises(ValueError, match=message):
            working_memory(**{**inputs, "indices": chosen, **change})

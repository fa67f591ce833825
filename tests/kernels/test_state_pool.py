"""Recurrences whose states are in a pool, against the reference with the same states."""

import pytest
import torch
from kernel_cases import DEVICE, EACH, relative_error
from kernel_cases.delta_wkv import make as make_delta_wkv
from kernel_cases.slot_memory import make as make_slot_memory
from kernel_cases.wkv import make as make_wkv

from subquad_kernels import delta_wkv, gated_delta_wkv, gated_wkv, slot_memory, state_pool, wkv


def make_static(**sizes):
    return make_wkv(static=True, **sizes)


def gate_inputs(bonus=False):
    more = {"gate": torch.randn(2, 1, 24), "weight": torch.rand(24), "bias": torch.randn(24)}
    if bonus:
        more["bonus"] = torch.randn(2, 8)
    return {**{name: x.to(DEVICE) for name, x in more.items()}, "eps": 1e-3}


CASES = {
    "Eagle": (wkv, make_static),
    "Finch": (wkv, make_wkv),
    "Goose": (delta_wkv, make_delta_wkv),
    "Raven": (slot_memory, make_slot_memory),
}
LENGTHS = {"one token": {"length": 1}, "tokens": {"length": 20}, "documents": {"documents": (3, 0, 18)}}


def make_pool(states, stride):
    """A pool of seven states, of which numbers 5, 2 and 1 are `states`; and their numbers."""
    chosen = torch.tensor([5, 2, 1])[: len(states)].to(DEVICE)
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
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    ("operator", "make", "bonus"), [(gated_wkv, make_wkv, False), (gated_delta_wkv, make_delta_wkv, True)]
)
def test_gated_token(operator, make, bonus, large, backend, monkeypatch):
    if large:
        monkeypatch.setattr(state_pool, "LARGE", 1)
    inputs = {**make(length=1), **gate_inputs(bonus)}
    double = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    wanted, state = operator(**double, backend="reference")
    pool, chosen = make_pool(inputs.pop("initial_state"), stride=0)
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
        ({"initial_state": None}, "`indices` needs an `initial_state`"),
        ({"initial_state": pool[:, :1]}, "`initial_state` must have shape"),
        ({"initial_state": pool.double()}, "`indices` needs a float32 `initial_state`"),
        ({"initial_state": pool.mT.contiguous().mT}, "`indices` needs a float32 `initial_state`"),
        ({"v": inputs["v"].requires_grad_()}, "`indices` overwrites states"),
    ):
        with pytest.raises(ValueError, match=message):
            operator(**{**inputs, "initial_state": pool, "indices": chosen, **change}, backend=backend)
        inputs["v"] = inputs["v"].detach()
    assert torch.equal(pool, before)


def test_compiled_token():
    """A graph of the step writes to the pool that it is given."""
    inputs = make_wkv(length=1)
    pool, chosen = make_pool(inputs.pop("initial_state"), stride=5)
    expected, other = wkv(**inputs, initial_state=(copy := pool.clone()), indices=chosen)[0], pool
    step = torch.compile(lambda **x: wkv(**x)[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(**inputs, initial_state=other, indices=chosen), expected)
    torch.testing.assert_close(pool, copy)

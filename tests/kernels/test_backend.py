"""What the operators share: the choice of the backend, their registration, and the launch of kernels."""

import contextlib

import pytest
import torch
from kernel_cases import DEVICE
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from subquad_kernels.backend import without_autocast
from subquad_kernels.registration import custom_op
from subquad_kernels.token_shift.custom_ops import _token_shift


@pytest.mark.fast
def test_autocast_is_turned_off_in_a_graph(monkeypatch):
    """Some versions of torch cannot trace the question whether a device has autocast."""
    monkeypatch.setattr(torch.amp, "is_autocast_available", torch.compiler.disable(torch.amp.is_autocast_available))

    @torch.compile(fullgraph=True, backend="eager")
    def product(x):
        with without_autocast(x):
            return x @ x

    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert product(torch.ones(2, 2, device=DEVICE)).dtype == torch.float32
    assert product(torch.ones(2, 2, device="meta")).device.type == "meta"


def add_one(x: torch.Tensor, n: int) -> torch.Tensor:
    """Adds one in place, which only the schema of the operator says."""
    x += 1
    return x * n


_add_one = custom_op("test_add_one", eager=add_one, fake=lambda x, n: torch.empty_like(x), mutates_args=("x",))


class Subclass(torch.Tensor):
    pass


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def is_dispatched(function):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return any("subquad_kernels::" in event.key for event in profile.key_averages())


WATCHED = {
    "nothing": (contextlib.nullcontext, lambda x: x, False),
    "no_grad": (torch.no_grad, lambda x: x.requires_grad_(), False),
    "inference_mode": (torch.inference_mode, lambda x: x, False),
    "autocast": (lambda: torch.autocast(DEVICE, dtype=torch.bfloat16), lambda x: x, False),
    "parameter": (torch.no_grad, torch.nn.Parameter, False),
    "gradient": (contextlib.nullcontext, lambda x: (x * 1).requires_grad_() * 1, True),
    "subclass": (contextlib.nullcontext, lambda x: x.as_subclass(Subclass), True),
    "function mode": (Functions, lambda x: x, True),
    "dispatch mode": (Dispatches, lambda x: x, True),
    "forward mode": (torch.autograd.forward_ad.dual_level, lambda x: x, True),
}


@pytest.mark.fast
@pytest.mark.parametrize("case", WATCHED)
def test_the_dispatcher_is_passed_by_where_nobody_sees_it(case):
    context, change, dispatched = WATCHED[case]
    with context():
        x = change(torch.ones(2, 3, device=DEVICE))
        expected = x.detach().clone() + 1
        version = None if x.is_inference() else x._version
        assert is_dispatched(lambda: _add_one(x, 2)) is dispatched
        assert torch.equal(x.detach(), expected)
        assert x.is_inference() or x._version > version


@pytest.mark.fast
def test_the_dispatcher_sees_transforms_and_traces():
    def call(x):
        return _token_shift(x, None, mu, None, None, "auto")

    x, mu = torch.randn(3, 2, 5, 4, device=DEVICE), torch.randn(2, 4, device=DEVICE)
    torch.testing.assert_close(torch.vmap(call)(x), torch.stack([call(one) for one in x]))
    negated = torch._neg_view(x[0])  # kernels would not see the minus
    assert is_dispatched(lambda: torch.testing.assert_close(call(negated), -call(x[0])))
    name = "subquad_kernels.token_shift"
    assert name in str(make_fx(call)(x[0]).graph)
    assert name in str(torch.export.export(Call(call), (x[0],), strict=False).graph)
    assert name.replace(".", "::") in str(torch.jit.trace(call, x[0], check_trace=False).graph)


class Call(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function

"""What the operators share: the choice of the backend, their registration, and the launch of kernels."""

import contextlib
import re
import warnings

import pytest
import torch
from kernel_cases import DEVICE, TRITON
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from subquad_kernels import backend, wkv
from subquad_kernels.backend import without_autocast
from subquad_kernels.custom_ops import custom_op
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


class Kernel:
    """A kernel that compiles for some sizes only."""

    def __init__(self):
        self.tried = []

        def kernel(x, length, first, SIZE: "constexpr"): ...  # noqa: F821

        self.fn = kernel

    def run(self, x, length, first, SIZE, *, grid, warmup, num_warps, num_stages, enable_fp_fusion):
        assert not warmup and num_stages == 1 and enable_fp_fusion
        self.tried.append((x.dtype, length, SIZE, num_warps))
        if SIZE > 64:
            raise RuntimeError("out of registers")


@TRITON
@pytest.mark.fast
def test_what_did_not_compile_is_not_tried_again(monkeypatch):
    """But for other dtypes, constants and options, and other kernels."""
    monkeypatch.setattr(backend, "_failed", {})
    monkeypatch.setattr(backend, "_warned", set())
    monkeypatch.setattr(backend, "_works", lambda device: True)
    kernel, x = Kernel(), torch.zeros(64, device=DEVICE)

    def call(size, *, x=x, length=100, num_warps=4, kernel=kernel):
        def triton():
            backend.launch(kernel, (1,), x, length, 0, size, num_warps=num_warps)
            return "triton"

        return backend.dispatch("operator", "auto", x, triton, lambda: "eager")

    with pytest.warns(RuntimeWarning, match="`operator` runs in plain torch: kernel failed on .*: out of registers"):
        assert call(128) == "eager"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call(128) == call(128, length=200) == "eager"  # which are compiled alike
        assert call(64) == call(64, length=200) == "triton"
        assert kernel.tried == [(torch.float32, 100, size, 4) for size in (128, 64)] + [(torch.float32, 200, 64, 4)]
        for more in ({"x": x.half()}, {"num_warps": 8}, {"length": 96}, {"x": x[1:]}, {"kernel": Kernel()}):
            tried = more.get("kernel", kernel).tried
            before = len(tried)
            assert call(128, **more) == call(128, **more) == "eager"
            assert len(tried) == before + 1


@TRITON
@pytest.mark.fast
@pytest.mark.parametrize("grid", [(2**31,), (1, 2**16), (1, 1, 2**16)])
def test_a_grid_that_is_too_large_is_refused(grid):
    kernel, x = Kernel(), torch.zeros(1, device=DEVICE)
    with pytest.raises(backend.KernelError, match=f"kernel would need a grid of {re.escape(str(grid))} programs"):
        backend.launch(kernel, grid, x, 1, 0, 16)
    backend.launch(kernel, tuple(n - 1 for n in grid if n > 1), x, 1, 0, 16)
    assert len(kernel.tried) == 1


@pytest.mark.fast
def test_kernels_that_cannot_be_imported_are_tried_once(monkeypatch):
    monkeypatch.setattr(backend, "_not_imported", set())
    monkeypatch.setattr(backend, "_warned", set())
    monkeypatch.setattr(backend, "_works", lambda device: True)
    tried = []

    def triton():
        tried.append(1)
        raise ImportError("no library")

    def call():
        return backend.dispatch("operator", "auto", torch.zeros(1), triton, lambda: "eager")

    with pytest.warns(RuntimeWarning, match="`operator` runs in plain torch: no library"):
        assert call() == "eager"
    assert call() == "eager" and len(tried) == 1


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


@pytest.mark.fast
def test_forward_mode_is_an_error():
    """Where torch would return tangents of zeros."""
    k, decay = torch.randn(1, 5, 2, 4), torch.full((2, 4), -0.5)
    bonus = torch.ones(2, 4)
    with pytest.raises(NotImplementedError, match="`wkv` has no forward-mode derivative"):
        torch.func.jvp(lambda k: wkv(k, k, k, decay, bonus)[0], (k,), (k,))
    with forward_ad.dual_level():
        torch.testing.assert_close(wkv(k, k, k, decay, bonus), wkv(k.clone(), k, k, decay, bonus))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            wkv(forward_ad.make_dual(k, k), k, k, decay, bonus)


class Call(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function

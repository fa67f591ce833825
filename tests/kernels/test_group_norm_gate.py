"""The gated norm of the heads against its own formula in float64."""

import pytest
import torch
from kernel_cases import DEVICE, TRITON, assert_same_results, relative_error, triton, without_compiler

import subquad_kernels.backend
from subquad_kernels import group_norm_gate
from subquad_kernels.group_norm_gate import _group_norm_gate


LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 200)
EPS = 1e-5 * 8**2
BACKENDS = ("eager", triton)


def make(batch=2, length=17, heads=3, size=8, dtype=torch.float32, weight_dtype=None, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE)

    # A mean, and scales that differ from row to row, as the outputs of wkv have them.
    x = (3.0 + randn(batch, length, heads, size)) * randn(batch, length, heads, 1).exp()
    width = heads * size
    return {
        "x": x,
        "gate": randn(batch, length, width).to(dtype),
        "weight": randn(width).to(weight_dtype or dtype),
        "bias": randn(width).to(weight_dtype or dtype),
    }


def differentiable(inputs, dtype=None):
    return {name: x.detach().to(dtype).clone().requires_grad_() for name, x in inputs.items()}


def assert_close_to_reference(inputs, tolerance, call):
    inputs, expected_inputs = differentiable(inputs), differentiable(inputs, torch.float64)
    out = call(**inputs, eps=EPS)
    expected_out = group_norm_gate(**expected_inputs, eps=EPS, backend="reference")
    assert out.dtype == inputs["gate"].dtype
    assert out.shape == inputs["gate"].shape
    assert_same_results((out,), inputs, (expected_out,), expected_inputs, tolerance)


def with_backend(backend):
    return lambda **inputs: group_norm_gate(**inputs, backend=backend)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_and_gradients(backend, length):
    assert_close_to_reference(make(length=length), 1e-5, with_backend(backend))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes(backend, weight_dtype, dtype, tolerance):
    inputs = make(length=33, dtype=dtype, weight_dtype=weight_dtype)
    assert_close_to_reference(inputs, tolerance, with_backend(backend))
    inputs["x"] = inputs["x"].to(dtype)
    assert_close_to_reference(inputs, tolerance, with_backend(backend))


@pytest.mark.parametrize(
    ("heads", "size"), [(1, 2), (5, 3), (12, 64), (1, 100), (2, 128), (3, 200), (3, 256), (2, 600)]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_head_sizes(backend, heads, size):
    assert_close_to_reference(make(length=3, heads=heads, size=size), 1e-5, with_backend(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_head_of_one_value(backend):
    inputs = differentiable(make(size=1))
    out = group_norm_gate(**inputs, eps=EPS, backend=backend)
    torch.testing.assert_close(out, inputs["bias"] * torch.nn.functional.silu(inputs["gate"]))
    grad_x, grad_bias = torch.autograd.grad(out.sum(), (inputs["x"], inputs["bias"]))
    assert not grad_x.any()
    torch.testing.assert_close(grad_bias, torch.nn.functional.silu(inputs["gate"]).sum((0, 1)))


@TRITON
@pytest.mark.parametrize("length", [15, 16, 17, 50])
def test_long_strips(length, monkeypatch):
    from subquad_kernels.group_norm_gate import triton_kernels

    monkeypatch.setattr(triton_kernels, "multiprocessors", lambda x: 0)
    assert_close_to_reference(make(length=length), 1e-5, with_backend("triton"))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3, 4), (0,)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_leading_dimensions(backend, shape):
    inputs = make()
    inputs["x"] = torch.randn(*shape, 3, 8, device=DEVICE)
    inputs["gate"] = torch.randn(*shape, 24, device=DEVICE)
    assert_close_to_reference(inputs, 1e-5, with_backend(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_large_mean_does_not_cancel(backend):
    inputs = make(length=4, size=64)
    noise = torch.randn(inputs["x"].shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    inputs["x"] = (1000.0 + noise).half().float()
    out = group_norm_gate(**inputs, eps=EPS, backend=backend)
    expected = group_norm_gate(**{name: x.double() for name, x in inputs.items()}, eps=EPS, backend="reference")
    assert relative_error(out, expected) < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides(backend):
    inputs = make()
    expected = group_norm_gate(**inputs, eps=EPS, backend="reference")
    strided = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in inputs.items()}
    strided, inputs = differentiable(strided), differentiable(inputs)
    out = group_norm_gate(**strided, eps=EPS, backend=backend)
    torch.testing.assert_close(out, expected)
    # The gradient of a sum is one number, expanded.
    grads = torch.autograd.grad(out.sum(), list(strided.values()))
    expected = group_norm_gate(**inputs, eps=EPS, backend="reference")
    torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), list(inputs.values())))


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(backend):
    inputs = make()
    expected = group_norm_gate(**inputs, eps=EPS, backend=backend)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = group_norm_gate(**inputs, eps=EPS, backend=backend)
    assert out.dtype == torch.float32
    assert torch.equal(out, expected)


@TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    inputs = differentiable(make(length=5, dtype=dtype))
    torch.library.opcheck(_group_norm_gate, (*inputs.values(), EPS, "triton"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile(backend):
    torch.compiler.reset()
    compiled = torch.compile(with_backend(backend), fullgraph=True, backend="aot_eager")
    for length in (1, 17, 40):
        assert_close_to_reference(make(length=length), 1e-5, compiled)


@TRITON
def test_eager_takes_over(monkeypatch):
    from subquad_kernels.group_norm_gate import triton_kernels

    without_compiler(monkeypatch, triton_kernels)
    inputs = make()
    with pytest.raises(subquad_kernels.backend.KernelError, match="no compiler"):
        _group_norm_gate(*inputs.values(), EPS, "triton")
    with pytest.warns(RuntimeWarning, match="no compiler"):
        _group_norm_gate(*inputs.values(), EPS, "auto")
    assert_close_to_reference(inputs, 1e-5, lambda eps, **inputs: _group_norm_gate(*inputs.values(), eps, "auto"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(8)}, r"`x` must be \(..., heads >= 1, size >= 1\), got \(8,\)"),
        ({"x": torch.zeros(2, 17, 3, 0)}, r"`x` must be \(..., heads >= 1, size >= 1\), got \(2, 17, 3, 0\)"),
        ({"x": torch.zeros(2, 17, 3, 8, dtype=torch.int64)}, "`x` must be floating point, got torch.int64"),
        ({"gate": torch.zeros(2, 17, 3, 8)}, r"`gate` must have shape \(2, 17, 24\), got \(2, 17, 3, 8\)"),
        ({"weight": torch.zeros(3, 8)}, r"`weight` must have shape \(24,\), got \(3, 8\)"),
        ({"bias": torch.zeros(23)}, r"`bias` must have shape \(24,\), got \(23,\)"),
        ({"bias": torch.zeros(24, dtype=torch.int64)}, "`bias` must be floating point, got torch.int64"),
        ({"weight": torch.zeros(24, device="meta")}, "`weight` is on meta, `x` on "),
        ({"backend": "cuda"}, "backend='cuda': `group_norm_gate` has eager, reference, triton"),
    ],
)
def test_wrong_arguments(change, message):
    change = {
        k: x.to(DEVICE) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x for k, x in change.items()
    }
    with pytest.raises(ValueError, match=message):
        group_norm_gate(**{**make(), "eps": EPS, **change})

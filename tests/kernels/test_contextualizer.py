"""The contextualizer against its own formula in float64."""

import pytest
import torch
from kernel_cases import DEVICE, TRITON, assert_same_results, relative_error, triton, without_compiler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import subquad_kernels.backend
from subquad_kernels import contextualizer
from subquad_kernels.contextualizer import _contextualizer


# On a device with many processors the Triton kernels cut the work into small blocks and short strips.
EACH = pytest.mark.parametrize(
    "backend", ["eager", *(pytest.param(x, marks=TRITON) for x in ("triton", "triton, one processor"))], indirect=True
)
BACKENDS = ("eager", triton)
# Windows, rows of z, rows of a window, rows of the prefix, queries, width.
SIZES = (
    (2, 1, 1, None, None, 1),
    (9, 2, 2, None, 1, 17),
    (1, 17, 17, 3, None, 17),
    (3, 2, 17, 15, None, 1),
    (2, 64, 64, None, None, 64),
    (2, 65, 65, None, 64, 100),
    (1, 1, 65, 70, 1, 17),
    (2, 66, 130, 64, None, 64),
    (3, 70, 130, 130, 3, 17),
    (2, 130, 130, None, 130, 64),
    (3, 66, 300, 240, None, 17),
    (1, 300, 300, None, 70, 64),
)


@pytest.fixture
def backend(request, monkeypatch):
    if request.param == "triton, one processor":
        from subquad_kernels.contextualizer import triton_kernels

        monkeypatch.setattr(triton_kernels, "multiprocessors", lambda x: 1)
    return request.param.split(",")[0]


def make(windows=2, rows=5, context=7, prefix=4, queries=None, width=17, dtype=torch.float32, gated=True, seed=0):
    """Arguments without `queries`; z and gate are columns of a wider tensor, v is a part of a larger one."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE)

    wide = randn(windows, rows, 2 * width + 3).to(dtype)
    inputs = {
        "z": wide[..., 2 : 2 + width],
        "v": randn(context + 2, context + 5)[1 : context + 1, 3 : context + 3] / context**0.5,
    }
    if gated:
        inputs["gate"] = wide[:, rows - (queries or rows) :, -width:]
    if prefix is not None:
        inputs["prefix"] = randn(prefix, width).to(dtype)
    return inputs


def differentiable(inputs, dtype=None):
    """Leaves, with the strides of the inputs where these are on offer."""
    return {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in inputs.items()}


def assert_close_to_reference(inputs, tolerance, call, queries=None):
    inputs, expected_inputs = differentiable(inputs), differentiable(inputs, torch.float64)
    out = call(**inputs, queries=queries)
    expected = contextualizer(**expected_inputs, queries=queries, backend="reference")
    if "prefix" in inputs:
        expected = expected + 0.0 * expected_inputs["prefix"].sum()  # it may be of no use
    assert out.dtype == inputs["z"].dtype
    assert out.shape == (inputs["z"].shape[0], queries or inputs["z"].shape[1], inputs["z"].shape[2])
    assert_same_results((out,), inputs, (expected,), expected_inputs, tolerance)


def with_backend(backend):
    return lambda **inputs: contextualizer(**inputs, backend=backend)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@EACH
def test_forward_and_gradients(backend, sizes):
    windows, rows, context, prefix, queries, width = sizes
    inputs = make(windows, rows, context, prefix, queries, width, gated=windows != 2)
    # Where a row has one value, the gradient of its direction is the difference of equal numbers.
    assert_close_to_reference(inputs, 1e-5 if width > 1 else 1e-4, with_backend(backend), queries)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("sizes", [(2, 17, 24, 7, 5, 17), (1, 130, 130, None, None, 128), (3, 71, 140, 69, 66, 64)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes(backend, sizes, dtype, tolerance):
    windows, rows, context, prefix, queries, width = sizes
    inputs = make(windows, rows, context, prefix, queries, width, dtype)
    assert_close_to_reference(inputs, tolerance, with_backend(backend), queries)
    assert_close_to_reference({**inputs, "v": inputs["v"].to(dtype)}, tolerance, with_backend(backend), queries)


@TRITON
def test_rows_that_begin_at_multiples_of_16_bytes():
    inputs = make(2, 30, 70, 64, None, 64, torch.bfloat16)
    aligned = {name: x.contiguous() for name, x in inputs.items()}
    expected = contextualizer(**inputs, backend="triton")
    assert torch.equal(contextualizer(**aligned, backend="triton"), expected)
    assert_close_to_reference(aligned, 8e-3, with_backend("triton"))


@pytest.mark.parametrize("queries", [None, 66])
def test_a_few_windows_at_a_time(queries, monkeypatch):
    from subquad_kernels.contextualizer import eager

    monkeypatch.setattr(eager, "VALUES", 2 * 70 * 64)
    assert_close_to_reference(make(5, 66, 70, 4, queries), 1e-5, with_backend("eager"), queries)


@TRITON
@pytest.mark.parametrize("processors", [1, 1000])
def test_long_windows(processors, monkeypatch):
    from subquad_kernels.contextualizer import triton_kernels

    monkeypatch.setattr(triton_kernels, "multiprocessors", lambda x: processors)
    inputs = make(1, 40, 600, 560, width=16, dtype=torch.bfloat16)
    assert_close_to_reference(inputs, 8e-3, with_backend("triton"))
    with pytest.raises(subquad_kernels.backend.KernelError, match="windows of 1025 rows do not fit"):
        contextualizer(**make(1, 4, 1025, 1021), backend="triton")


@pytest.mark.parametrize("backend", BACKENDS)
def test_float64_and_prefix_of_another_dtype(backend):
    inputs = make()
    inputs["prefix"] = inputs["prefix"].double()
    assert_close_to_reference(inputs, 1e-5, with_backend(backend))
    if backend == "eager":
        assert_close_to_reference({name: x.double() for name, x in inputs.items()}, 1e-12, with_backend(backend))


def test_gradcheck():
    inputs = differentiable(make(2, 3, 4, 2, 2, 3), torch.float64)
    torch.autograd.gradcheck(lambda *inputs: contextualizer(*inputs, 2), tuple(inputs.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_zeros(backend, dtype):
    inputs = make(2, 20, 24, 4, width=64, dtype=dtype)
    inputs["z"][:, 3:7] = 0.0
    inputs["prefix"][1] = 0.0
    inputs = differentiable(inputs)
    out = contextualizer(**inputs, backend=backend)
    assert not out[:, 3:7].any()
    grads = torch.autograd.grad(out.float().sum(), list(inputs.values()))
    assert all(torch.isfinite(grad).all() for grad in grads if grad.dtype == torch.float32)
    # Next to zero a direction changes ten thousand times as fast.
    real = torch.ones(20, dtype=torch.bool)
    real[3:7] = False
    expected_inputs = differentiable(inputs, torch.float64)
    expected = contextualizer(**expected_inputs, backend="reference")
    expected_grads = torch.autograd.grad(expected.sum(), list(expected_inputs.values()))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-3
    assert relative_error(grads[0][:, real], expected_grads[0][:, real]) < tolerance
    assert relative_error(grads[1], expected_grads[1]) < tolerance
    zeros = {name: torch.zeros_like(x) for name, x in inputs.items()}
    assert not contextualizer(**zeros, backend=backend).any()


@pytest.mark.parametrize("scale", [1e-4, 1e3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scales(backend, scale):
    inputs = make(2, 66, 70, 4, width=64)
    inputs["z"] = inputs["z"] * scale
    assert_close_to_reference(inputs, 1e-5, with_backend(backend))
    inputs["prefix"] = inputs["prefix"] * scale
    assert_close_to_reference(inputs, 1e-5, with_backend(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_float16_does_not_overflow(backend):
    """The products of rows are beyond what it holds; the results are not."""
    inputs = make(1, 10, 12, 2, width=64, dtype=torch.float16)
    inputs["z"], inputs["prefix"] = inputs["z"] * 300, inputs["prefix"] * 300
    assert_close_to_reference(inputs, 1e-3, with_backend(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides(backend):
    inputs = make()
    strided = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in inputs.items()}
    assert_close_to_reference(strided, 1e-5, with_backend(backend))
    inputs["z"] = inputs["z"][:1].expand(3, -1, -1)
    inputs["gate"] = inputs["gate"][:1].expand(3, -1, -1)
    assert_close_to_reference(inputs, 1e-5, with_backend(backend))
    # The gradient of a sum is one number, expanded.
    leaves = differentiable(inputs)
    grads = torch.autograd.grad(contextualizer(**leaves, backend=backend).sum(), list(leaves.values()))
    expected = torch.autograd.grad(contextualizer(**leaves, backend="reference").sum(), list(leaves.values()))
    torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_above_the_diagonal_or_behind_does_not_count(backend):
    inputs = make(2, 66, 70, 9)
    expected = contextualizer(**inputs, backend=backend)
    changed = {name: x.clone() for name, x in inputs.items()}
    changed["v"] += torch.full_like(changed["v"], 7.0).triu(1)
    changed["prefix"][4:] = torch.nan
    assert torch.equal(contextualizer(**changed, backend=backend), expected)
    changed["z"][:, 40:] += 1.0
    found = contextualizer(**changed, backend=backend)
    assert torch.equal(found[:, :40], expected[:, :40])
    assert not torch.equal(found[:, 40:], expected[:, 40:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_windows(backend):
    inputs = differentiable(make(windows=0))
    out = contextualizer(**inputs, queries=5, backend=backend)
    assert out.shape == (0, 5, 17)
    for grad in torch.autograd.grad(out.sum(), list(inputs.values())):
        assert not grad.any()


class _Sizes(TorchDispatchMode):
    """The bytes of the largest tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        sizes = [x.nbytes for x in tree_leaves(made) if isinstance(x, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return made


def test_eager_never_holds_all_weights(monkeypatch):
    from subquad_kernels.contextualizer import eager

    monkeypatch.setattr(eager, "VALUES", 2**16)
    inputs = make(20, 200, 256, 56, width=8)
    tensors = inputs["z"], inputs["v"], inputs["gate"], inputs["prefix"], 200
    weights = 20 * 256 * 256 * 4
    with _Sizes() as sizes:
        grad = eager.contextualizer_eager(*tensors)
        eager.contextualizer_eager_backward(grad, *tensors)
    assert 0 < sizes.largest <= weights // 16


@TRITON
def test_kernels_hold_no_weights():
    from subquad_kernels.contextualizer import triton_kernels

    inputs = make(12, 128, 128, None, width=8)
    tensors = inputs["z"], inputs["v"], inputs["gate"], None, 128
    with _Sizes() as sizes:
        grad = triton_kernels.contextualizer_triton(*tensors)
        triton_kernels.contextualizer_triton_backward(grad, *tensors)
    assert 0 < sizes.largest <= 12 * 128 * 128 * 4 // 4  # those of eight windows are added up at once


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backward_pass_keeps_the_arguments_alone(backend):
    inputs, kept = differentiable(make()), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        contextualizer(**inputs, backend=backend)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in inputs.values()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(backend, dtype):
    inputs = make(dtype=dtype)
    expected = contextualizer(**inputs, backend=backend)
    with torch.autocast(DEVICE, dtype=torch.float16):
        out = contextualizer(**inputs, backend=backend)
    assert out.dtype == dtype
    assert torch.equal(out, expected)


@pytest.mark.parametrize("backend", ["eager", triton])
def test_meta(backend):
    inputs = differentiable({name: x.to("meta") for name, x in make(queries=3).items()})
    out = contextualizer(**inputs, queries=3, backend=backend)
    assert out.shape == (2, 3, 17)
    grads = torch.autograd.grad(out.sum(), list(inputs.values()))
    assert [grad.shape for grad in grads] == [x.shape for x in inputs.values()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("names", [("gate", "prefix"), ()])
def test_opcheck(backend, names):
    inputs = make(2, 5, 7 if "prefix" in names else 5, 4, 3)
    inputs = differentiable({name: inputs[name] for name in ("z", "v", *names)})
    arguments = (inputs["z"], inputs["v"], inputs.get("gate"), inputs.get("prefix"), 3, backend)
    torch.library.opcheck(_contextualizer, arguments)
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    torch.library.opcheck(
        torch.ops.subquad_kernels.contextualizer_backward.default, (torch.ones(2, 3, 17, device=DEVICE), *detached)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile(backend):
    torch.compiler.reset()
    compiled = torch.compile(with_backend(backend), fullgraph=True, backend="aot_eager")
    assert_close_to_reference(make(queries=3), 1e-5, compiled, 3)
    assert_close_to_reference(make(windows=3), 1e-5, compiled)
    assert_close_to_reference(make(context=5, prefix=None, gated=False), 1e-5, compiled)


@TRITON
def test_eager_takes_over(monkeypatch):
    from subquad_kernels.contextualizer import triton_kernels

    without_compiler(monkeypatch, triton_kernels)
    inputs = make()
    with pytest.raises(subquad_kernels.backend.KernelError, match="no compiler"):
        _contextualizer(*inputs.values(), 5, "triton")
    with pytest.warns(RuntimeWarning, match="no compiler"):
        _contextualizer(*inputs.values(), 5, "auto")
    assert_close_to_reference(inputs, 1e-5, lambda queries, **inputs: _contextualizer(*inputs.values(), 5, "auto"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"z": torch.zeros(5, 17)}, r"`z` must be \(windows, rows >= 1, width >= 1\), got \(5, 17\)"),
        ({"z": torch.zeros(2, 0, 17)}, r"`z` must be \(windows, rows >= 1, width >= 1\), got \(2, 0, 17\)"),
        ({"z": torch.zeros(2, 5, 17, dtype=torch.int64)}, "`z` must be floating point, got torch.int64"),
        ({"v": torch.zeros(4, 4)}, r"`v` must be \(context, context\) with context >= 5, got \(4, 4\)"),
        ({"v": torch.zeros(7, 8)}, r"`v` must be \(context, context\) with context >= 5, got \(7, 8\)"),
        ({"v": torch.zeros(7, 7, dtype=torch.bool)}, "`v` must be floating point, got torch.bool"),
        ({"v": torch.zeros(7, 7, device="meta")}, "`v` is on meta, `z` on "),
        ({"gate": torch.zeros(2, 4, 17)}, r"`gate` must have shape \(2, 5, 17\), got \(2, 4, 17\)"),
        ({"queries": 3}, r"`gate` must have shape \(2, 3, 17\), got \(2, 5, 17\)"),
        ({"queries": 0}, "`queries` must be from 1 to 5, the rows of `z`, got 0"),
        ({"queries": 6}, "`queries` must be from 1 to 5, the rows of `z`, got 6"),
        ({"prefix": None}, "`prefix` must hold the first 2 of 7 rows, of which `z` has 5; got None"),
        ({"prefix": torch.zeros(1, 17)}, r"`prefix` must be \(rows >= 2, 17\), got \(1, 17\)"),
        ({"prefix": torch.zeros(2, 16)}, r"`prefix` must be \(rows >= 2, 17\), got \(2, 16\)"),
        ({"backend": "cuda"}, "backend='cuda': `contextualizer` has eager, reference, triton"),
    ],
)
def test_wrong_arguments(change, message):
    change = {
        k: x.to(DEVICE) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x for k, x in change.items()
    }
    with pytest.raises(ValueError, match=message):
        contextualizer(**{**make(), **change})

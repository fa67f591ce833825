"""The static layer of Avey-B against its own formula in float64."""

import pytest
import torch
from kernel_cases import DEVICE, TRITON, assert_same_results, relative_error, triton, without_compiler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import subquad_kernels.backend
from subquad_kernels import static_mixing
from subquad_kernels.static_mixing import _static_mixing, _static_mixing_


BACKENDS = ("eager", triton)
DTYPES = ((torch.float32, 1e-5), (torch.bfloat16, 8e-3), (torch.float16, 1e-3))
# Windows, rows, width, columns of features: with a head that is empty, narrower than x, and wider.
SIZES = (
    (1, 1, 1, 2),
    (2, 1, 17, 40),
    (3, 2, 1, 3),
    (3, 40, 24, 80),
    (3, 130, 24, 60),
    (2, 130, 65, 130),
)


def make(windows=3, context=5, width=24, columns=80, dtype=torch.float32, v_dtype=torch.float32, seed=0):
    """Features in the middle of wider rows, and v as a part of a larger one."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(windows, context, columns + 5, generator=generator).to(DEVICE, dtype)
    v = torch.randn(context + 2, context + 5, generator=generator).to(DEVICE, v_dtype) / context**0.5
    return {"features": wide[..., 2 : 2 + columns], "v": v[1 : context + 1, 3 : context + 3]}


def differentiable(inputs, dtype=None):
    """Leaves, with the strides of the inputs where these are on offer."""
    return {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in inputs.items()}


def assert_close_to_reference(inputs, tolerance, call, width=24):
    inputs, expected_inputs = differentiable(inputs), differentiable(inputs, torch.float64)
    out = call(**inputs, width=width)
    expected = static_mixing(**expected_inputs, width=width, backend="reference")
    assert out.dtype == inputs["features"].dtype
    assert out.shape == (*inputs["features"].shape[:2], inputs["features"].shape[2] - width)
    assert_same_results((out,), inputs, (expected,), expected_inputs, tolerance)


def with_backend(backend):
    return lambda **inputs: static_mixing(**inputs, backend=backend)


def test_reference():
    inputs = make(windows=2, columns=50, dtype=torch.float64, v_dtype=torch.float64)
    x, gate, head = inputs["features"].split((24, 24, 2), dim=-1)
    expected = torch.cat((gate * torch.einsum("ij,wjc->wic", inputs["v"], x), head), dim=-1)
    torch.testing.assert_close(static_mixing(**inputs, width=24, backend="reference"), expected)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_and_gradients(backend, sizes):
    assert_close_to_reference(make(*sizes), 1e-5, with_backend(backend), sizes[2])


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES[1:])
@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes(backend, dtype, tolerance):
    for v_dtype in (torch.float32, dtype):
        inputs = make(context=40, dtype=dtype, v_dtype=v_dtype)
        assert_close_to_reference(inputs, tolerance, with_backend(backend))


@TRITON
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_whole_tiles(dtype, tolerance):
    """Read without masks, whether or not rows begin at multiples of 16 bytes."""
    inputs = make(2, 128, 128, 384, dtype=dtype)
    for given in (inputs, {name: x.contiguous() for name, x in inputs.items()}):
        assert_close_to_reference(given, tolerance, with_backend("triton"), 128)


@pytest.mark.parametrize("backend", BACKENDS)
def test_float64(backend):
    inputs = make()
    inputs["v"] = inputs["v"].double()
    assert_close_to_reference(inputs, 1e-5, with_backend(backend))
    if backend == "eager":
        assert_close_to_reference({name: x.double() for name, x in inputs.items()}, 1e-12, with_backend(backend))


def test_gradcheck():
    inputs = differentiable(make(2, 3, 2, 5), torch.float64)
    torch.autograd.gradcheck(lambda *inputs: static_mixing(*inputs, 2), tuple(inputs.values()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_float16_does_not_overflow(backend):
    """The sums are beyond what it holds; the results, and the gradients, are not."""
    inputs = make(context=40, dtype=torch.float16)
    inputs["features"][..., :24] *= 1000
    inputs["features"][..., 24:48] *= 1e-3
    inputs["v"] = inputs["v"] * 100
    x = inputs["features"][..., :24].float()
    assert (inputs["v"] @ x).abs().amax() > 2 * torch.finfo(torch.float16).max
    leaves, expected_leaves = differentiable(inputs), differentiable(inputs, torch.float64)
    out = static_mixing(**leaves, width=24, backend=backend)
    expected = static_mixing(**expected_leaves, width=24, backend="reference")
    assert relative_error(out, expected) < 1e-3
    weights = torch.full_like(out, 0.1)
    grads = torch.autograd.grad(out, list(leaves.values()), weights)
    expected = torch.autograd.grad(expected, list(expected_leaves.values()), weights.double())
    for grad, expected_grad in zip(grads, expected, strict=True):
        assert relative_error(grad, expected_grad) < 1e-3


def test_a_few_windows_at_a_time(monkeypatch):
    from subquad_kernels.static_mixing import eager

    monkeypatch.setattr(eager, "CACHED", 2 * 5 * 24)
    monkeypatch.setattr(eager, "VALUES", 2 * 5 * 24)
    assert_close_to_reference(make(windows=7), 1e-5, with_backend("eager"))


@TRITON
@pytest.mark.parametrize("processors", [1, 1000])
def test_strips_of_windows(processors, monkeypatch):
    """Strips that begin and end within a window, as long as few processors ask for, and short ones."""
    from subquad_kernels.static_mixing import triton_kernels

    monkeypatch.setattr(triton_kernels, "multiprocessors", lambda x: processors)
    assert_close_to_reference(make(windows=7, width=70, columns=140), 1e-5, with_backend("triton"), 70)


class _Made(TorchDispatchMode):
    """Notes the sizes of the tensors that are made, views of others aside."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        known = [x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        made_tensors = [x for x in tree_leaves(made) if isinstance(x, torch.Tensor)]
        self.sizes += [x.numel() for x in made_tensors if x.untyped_storage().data_ptr() not in known]
        return made


@TRITON
def test_nothing_large_is_made_but_the_gradient(monkeypatch):
    from subquad_kernels.static_mixing import eager, triton_kernels

    monkeypatch.setattr(eager, "CACHED", 2 * 5 * 24)
    monkeypatch.setattr(eager, "VALUES", 2 * 5 * 24)
    features, v = make(windows=24).values()
    grad, few = torch.ones(24, 5, 56, device=DEVICE), 8 * 5 * 24
    for forward, backward in (
        (eager.static_mixing_eager, eager.static_mixing_eager_backward),
        (triton_kernels.static_mixing_triton, triton_kernels.static_mixing_triton_backward),
    ):
        with _Made() as made:
            forward(features, v, 24, features[..., 24:48])
            backward(grad, features, v, 24)
        assert [size for size in made.sizes if size > few] == [features.numel()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backward_pass_keeps_the_arguments_alone(backend):
    inputs, kept = differentiable(make()), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        static_mixing(**inputs, width=24, backend=backend)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in inputs.values()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides(backend):
    inputs = make()
    strided = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in inputs.items()}
    assert_close_to_reference(strided, 1e-5, with_backend(backend))
    swapped = {"features": inputs["features"].transpose(0, 1).contiguous().transpose(0, 1), "v": inputs["v"].mT}
    assert_close_to_reference(swapped, 1e-5, with_backend(backend))
    inputs["features"] = inputs["features"][:1].expand(3, -1, -1)
    assert_close_to_reference(inputs, 1e-5, with_backend(backend))
    # The gradient of a sum is one number, expanded.
    leaves = differentiable(inputs)
    grads = torch.autograd.grad(static_mixing(**leaves, width=24, backend=backend).sum(), list(leaves.values()))
    expected = static_mixing(**leaves, width=24, backend="reference").sum()
    torch.testing.assert_close(grads, torch.autograd.grad(expected, list(leaves.values())))


@TRITON
def test_rows_that_are_too_far_apart():
    from subquad_kernels.static_mixing import triton_kernels

    features = torch.empty_strided((1, 3, 2), (2, 2**30, 1), device="meta")
    with pytest.raises(subquad_kernels.backend.KernelError, match="too far apart for 32-bit offsets"):
        triton_kernels.static_mixing_triton(features, torch.empty(3, 3, device="meta"), 1, features[..., 1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_inplace(backend, dtype):
    inputs = make(context=40, dtype=dtype, v_dtype=dtype)
    features = inputs["features"]
    before = features._base.clone()
    expected = static_mixing(**inputs, width=24, backend=backend)
    out = static_mixing(**inputs, width=24, inplace=True, backend=backend)
    assert torch.equal(out, expected)
    assert (out.data_ptr(), out.stride()) == (features[..., 24:].data_ptr(), features.stride())
    changed = features._base != before
    assert changed[..., 26:50].any()
    assert not changed[..., :26].any()
    assert not changed[..., 50:].any()


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_inplace_refuses_gradients(backend):
    for name in ("features", "v"):
        inputs = make()
        inputs[name] = inputs[name].detach().requires_grad_()
        with pytest.raises(ValueError, match="`inplace=True` overwrites what the backward pass would need"):
            static_mixing(**inputs, width=24, inplace=True, backend=backend)
        with torch.no_grad():
            expected = static_mixing(**inputs, width=24, backend=backend)
            assert torch.equal(static_mixing(**inputs, width=24, inplace=True, backend=backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_windows(backend):
    inputs = differentiable(make(windows=0))
    out = static_mixing(**inputs, width=24, backend=backend)
    assert out.shape == (0, 5, 56)
    for grad in torch.autograd.grad(out.sum(), list(inputs.values())):
        assert not grad.any()
    with torch.no_grad():
        assert static_mixing(**inputs, width=24, inplace=True, backend=backend).shape == (0, 5, 56)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(backend, dtype):
    inputs = differentiable(make(dtype=dtype))
    expected = static_mixing(**inputs, width=24, backend=backend)
    expected_grads = torch.autograd.grad(expected.sum(), list(inputs.values()))
    with torch.autocast(DEVICE, dtype=torch.float16):
        out = static_mixing(**inputs, width=24, backend=backend)
        grads = torch.autograd.grad(out.sum(), list(inputs.values()))
    assert out.dtype == dtype
    for x, expected_x in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert torch.equal(x, expected_x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_meta(backend):
    inputs = differentiable({name: x.to("meta") for name, x in make().items()})
    out = static_mixing(**inputs, width=24, backend=backend)
    assert out.shape == (3, 5, 56)
    grads = torch.autograd.grad(out.sum(), list(inputs.values()))
    assert [grad.shape for grad in grads] == [x.shape for x in inputs.values()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend):
    inputs = make(windows=2)
    torch.library.opcheck(_static_mixing, (*differentiable(inputs).values(), 24, backend))
    grad = torch.ones(2, 5, 56, device=DEVICE)
    torch.library.opcheck(
        torch.ops.subquad_kernels.static_mixing_backward.default, (grad, *inputs.values(), 24, backend)
    )
    torch.library.opcheck(_static_mixing_, (*inputs.values(), 24, backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile(backend):
    torch.compiler.reset()
    compiled = torch.compile(with_backend(backend), fullgraph=True, backend="aot_eager")
    assert_close_to_reference(make(), 1e-5, compiled)
    assert_close_to_reference(make(windows=2, context=40), 1e-5, compiled)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile_inplace(backend):
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def of_features(features, v):
        return static_mixing(features, v, 24, inplace=True, backend=backend)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def of_what_is_made(features, v):
        return static_mixing(features * 2.0, v, 24, inplace=True, backend=backend) + 1.0

    inputs = make()
    doubled = {"features": inputs["features"] * 2.0, "v": inputs["v"]}
    assert torch.equal(of_what_is_made(**inputs), static_mixing(**doubled, width=24, backend=backend) + 1.0)
    expected = static_mixing(**inputs, width=24, backend=backend)
    assert torch.equal(of_features(**inputs), expected)
    assert torch.equal(inputs["features"][..., 24:], expected)


@TRITON
def test_eager_takes_over(monkeypatch):
    from subquad_kernels.static_mixing import triton_kernels

    without_compiler(monkeypatch, triton_kernels)
    inputs = make()
    with pytest.raises(subquad_kernels.backend.KernelError, match="no compiler"):
        _static_mixing(*inputs.values(), 24, "triton")
    with pytest.warns(RuntimeWarning, match="no compiler"):
        _static_mixing(*inputs.values(), 24, "auto")
    assert_close_to_reference(inputs, 1e-5, lambda features, v, width: _static_mixing(features, v, width, "auto"))
    expected = static_mixing(**inputs, width=24, backend="eager")
    _static_mixing_(*inputs.values(), 24, "auto")
    assert torch.equal(inputs["features"][..., 24:], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": torch.zeros(5, 80)}, r"`features` must be \(windows, rows >= 1, features >= 2\), got \(5, 80\)"),
        ({"features": torch.zeros(2, 0, 80)}, r"`features` must be .*, got \(2, 0, 80\)"),
        ({"features": torch.zeros(2, 5, 1)}, r"`features` must be .*, got \(2, 5, 1\)"),
        ({"features": torch.zeros(2, 5, 80, dtype=torch.int64)}, "`features` must be floating point, got torch.int64"),
        ({"v": torch.zeros(4, 4)}, r"`v` must have shape \(5, 5\), got \(4, 4\)"),
        ({"v": torch.zeros(5, 6)}, r"`v` must have shape \(5, 5\), got \(5, 6\)"),
        ({"v": torch.zeros(5, 5, dtype=torch.bool)}, "`v` must be floating point, got torch.bool"),
        ({"v": torch.zeros(5, 5, device="meta")}, "`v` is on meta, `features` on "),
        ({"width": 0}, "`width` must be an integer from 1 to 40, half the columns of `features`, got 0"),
        ({"width": 41}, "`width` must be an integer from 1 to 40, half the columns of `features`, got 41"),
        ({"width": 24.0}, "`width` must be an integer from 1 to 40, half the columns of `features`, got 24.0"),
        ({"backend": "cuda"}, "backend='cuda': `static_mixing` has eager, reference, triton"),
        (
            {"features": torch.zeros(2, 80, 5).mT, "inplace": True},
            r"`inplace=True` needs .* got strides \(400, 1, 5\)",
        ),
        (
            {"features": torch.zeros(5, 80).expand(2, 5, 80), "inplace": True},
            r"`inplace=True` needs .* got strides \(0, 80, 1\)",
        ),
    ],
)
def test_wrong_arguments(change, message):
    change = {
        k: x.to(DEVICE) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x for k, x in change.items()
    }
    with pytest.raises(ValueError, match=message):
        static_mixing(**{**make(), "width": 24, **change})

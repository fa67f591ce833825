"""The token shift against its own formula in float64."""

import itertools

import pytest
import torch
from kernel_cases import DEVICE, TRITON, assert_same_results, relative_error, triton, without_compiler

import subquad_kernels.backend
from subquad_kernels import token_shift
from subquad_kernels.token_shift import _token_shift


LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 130)
BACKENDS = ("eager", triton)
# n, and which of the optional arguments are given.
VARIANTS = {
    "finch": (5, {"state", "offset"}),
    "finch packed": (5, {"state", "offset", "starts"}),
    "finch without state": (3, {"offset"}),
    "before the LoRA": (1, {"state"}),
    "channel mixing packed": (2, {"state", "starts"}),
    "nothing": (1, set()),
}
CASES = [("finch packed", n) for n in LENGTHS] + [
    (name, n) for name in VARIANTS for n in (1, 2, 33) if name != "finch packed"
]


def make(batch=2, length=17, width=37, n=5, given=("state", "offset"), dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    return {
        "x": randn(batch, length, width),
        "state": randn(batch, width) if "state" in given else None,
        "mu": randn(n, width),
        "offset": randn(n, batch, length, width) if "offset" in given else None,
        "starts": (torch.rand(batch, length, generator=generator) < 0.2).to(DEVICE) if "starts" in given else None,
    }


def differentiable(inputs, dtype=None):
    """The same inputs as leaves, and those that have gradients."""
    leaves = {name: x.detach().to(dtype) for name, x in inputs.items() if x is not None and x.is_floating_point()}
    leaves = {name: x.clone().requires_grad_() for name, x in leaves.items()}
    return {**inputs, **leaves}, leaves


def assert_close_to_reference(inputs, tolerance, call):
    inputs, leaves = differentiable(inputs)
    expected_inputs, expected_leaves = differentiable(inputs, torch.float64)
    y = call(**inputs)
    expected_y = token_shift(**expected_inputs, backend="reference")
    assert y.dtype == inputs["x"].dtype
    assert_same_results((y,), leaves, (expected_y,), expected_leaves, tolerance)


def with_backend(backend):
    return lambda **inputs: token_shift(**inputs, backend=backend)


@pytest.mark.parametrize(("variant", "length"), CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_and_gradients(backend, variant, length):
    n, given = VARIANTS[variant]
    assert_close_to_reference(make(length=length, n=n, given=given), 1e-5, with_backend(backend))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
@pytest.mark.parametrize("length", [1, 65])
@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes(backend, length, dtype, tolerance):
    inputs = make(length=length, given={"state", "offset", "starts"}, dtype=dtype)
    assert_close_to_reference(inputs, tolerance, with_backend(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_dtypes(backend):
    inputs = make()
    inputs |= {name: inputs[name].bfloat16() for name in ("state", "offset")}
    assert_close_to_reference(inputs, 8e-3, with_backend(backend))
    # y itself is as exact as in float32.
    expected = token_shift(**{name: x if x is None else x.double() for name, x in inputs.items()}, backend="reference")
    assert relative_error(token_shift(**inputs, backend=backend), expected) < 1e-5


@pytest.mark.parametrize("width", [1, 3, 64, 512, 600])
@pytest.mark.parametrize("backend", BACKENDS)
def test_widths(backend, width):
    inputs = make(length=9, width=width, given={"state", "offset", "starts"})
    assert_close_to_reference(inputs, 1e-5, with_backend(backend))


@TRITON
@pytest.mark.parametrize("length", [31, 32, 33, 200])
def test_long_strips(length, monkeypatch):
    from subquad_kernels.token_shift import triton_kernels

    monkeypatch.setattr(triton_kernels, "multiprocessors", lambda x: 0)
    inputs = make(length=length, given={"state", "offset", "starts"})
    assert_close_to_reference(inputs, 1e-5, with_backend("triton"))


@pytest.mark.parametrize("pieces", [(1,) * 9, (3, 1, 30, 1, 30)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_carried_state(backend, pieces):
    inputs = make(length=sum(pieces))
    whole = token_shift(**inputs, backend=backend)
    state, start, outs = inputs["state"], 0, []
    for piece in pieces:
        x, offset = inputs["x"][:, start : start + piece], inputs["offset"][:, :, start : start + piece]
        outs.append(token_shift(x, state, inputs["mu"], offset, backend=backend))
        state, start = x[:, -1], start + piece
    torch.testing.assert_close(torch.cat(outs, 2), whole)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_documents(backend, rows):
    lengths = (3, 1, 30, 16)
    bounds = [0, *itertools.accumulate(lengths)]
    inputs = make(length=sum(lengths))
    starts = torch.zeros(rows, sum(lengths), dtype=torch.bool, device=DEVICE)
    starts[:, bounds[1:-1]] = True
    inputs["starts"] = starts
    y = token_shift(**inputs, backend=backend)
    for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
        state = inputs["state"] if n == 0 else None
        one = token_shift(inputs["x"][:, start:stop], state, inputs["mu"], inputs["offset"][:, :, start:stop])
        torch.testing.assert_close(y[:, :, start:stop], one)
    assert_close_to_reference(inputs, 1e-5, with_backend(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides(backend):
    inputs = make(length=16)
    expected = token_shift(**inputs, backend="reference")
    strided = {name: x if x is None else x.mT.contiguous().mT for name, x in inputs.items()}
    strided, leaves = differentiable(strided)
    y = token_shift(**strided, backend=backend)
    torch.testing.assert_close(y, expected)
    # The gradient of a sum is one number, expanded.
    grads = torch.autograd.grad(y.sum(), list(leaves.values()))
    inputs, leaves = differentiable(inputs)
    expected = torch.autograd.grad(token_shift(**inputs, backend="reference").sum(), list(leaves.values()))
    torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_not_changed(backend, grad):
    inputs = make(given={"state", "offset", "starts"})
    copies = {name: x.clone() for name, x in inputs.items()}
    with torch.set_grad_enabled(grad):
        token_shift(**inputs, backend=backend)
    for name, x in inputs.items():
        assert torch.equal(x, copies[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast(backend, dtype):
    inputs = make()
    expected = token_shift(**inputs, backend=backend)
    with torch.autocast(DEVICE, dtype=dtype):
        y = token_shift(**inputs, backend=backend)
    assert y.dtype == torch.float32
    assert torch.equal(y, expected)


@TRITON
@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck(variant):
    n, given = VARIANTS[variant]
    inputs, _ = differentiable(make(length=7, n=n, given=given))
    torch.library.opcheck(_token_shift, (*inputs.values(), "triton"))


@pytest.mark.parametrize("variant", ["finch packed", "before the LoRA"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compile(backend, variant):
    n, given = VARIANTS[variant]
    torch.compiler.reset()
    compiled = torch.compile(with_backend(backend), fullgraph=True, backend="aot_eager")
    for length in (1, 17, 40):
        assert_close_to_reference(make(length=length, n=n, given=given), 1e-5, compiled)
    with torch.no_grad():
        inputs = make(length=17, n=n, given=given)
        torch.testing.assert_close(compiled(**inputs), token_shift(**inputs, backend="reference"))


@TRITON
def test_eager_takes_over(monkeypatch):
    from subquad_kernels.token_shift import triton_kernels

    without_compiler(monkeypatch, triton_kernels)
    inputs = make(given={"state", "offset", "starts"})
    with pytest.raises(subquad_kernels.backend.KernelError, match="no compiler"):
        _token_shift(*inputs.values(), "triton")
    with pytest.warns(RuntimeWarning, match="no compiler"):
        _token_shift(*inputs.values(), "auto")
    for _, given in VARIANTS.values():
        assert_close_to_reference(make(given=given), 1e-5, lambda **inputs: _token_shift(*inputs.values(), "auto"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 17)}, r"`x` must be \(batch, length >= 1, width\), got \(2, 17\)"),
        ({"x": torch.zeros(2, 0, 37)}, r"`x` must be \(batch, length >= 1, width\), got \(2, 0, 37\)"),
        ({"x": torch.zeros(2, 17, 37, dtype=torch.int64)}, "`x` must be floating point, got torch.int64"),
        ({"state": torch.zeros(1, 37)}, r"`state` must have shape \(2, 37\), got \(1, 37\)"),
        ({"state": torch.zeros(2, 37, dtype=torch.int64)}, "`state` must be floating point"),
        ({"mu": torch.zeros(37)}, r"`mu` must be \(n >= 1, 37\), got \(37,\)"),
        ({"mu": torch.zeros(5, 36)}, r"`mu` must be \(n >= 1, 37\), got \(5, 36\)"),
        ({"offset": torch.zeros(2, 17, 37)}, r"`offset` must have shape \(5, 2, 17, 37\), got \(2, 17, 37\)"),
        ({"starts": torch.zeros(2, 17)}, r"`starts` must be bool of shape \(2, 17\) or \(1, 17\), got torch.float32"),
        ({"starts": torch.zeros(2, 16, dtype=torch.bool)}, r"`starts` must be bool .* \(2, 16\)"),
        ({"mu": torch.zeros(5, 37, device="meta")}, "`mu` is on meta, `x` on "),
        ({"backend": "cuda"}, "backend='cuda': `token_shift` has eager, reference, triton"),
    ],
)
def test_wrong_arguments(change, message):
    change = {
        k: x.to(DEVICE) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x for k, x in change.items()
    }
    with pytest.raises(ValueError, match=message):
        token_shift(**{**make(), **change})

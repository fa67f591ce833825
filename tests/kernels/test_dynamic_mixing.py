"""What is special about the dynamic layer of Avey-B."""

import pytest
import torch
from kernel_cases import (
    DEVICE,
    EACH,
    TRITON,
    Made,
    assert_like_reference,
    differentiable,
    expect,
    relative_error,
    weighted_gradients,
)
from kernel_cases.dynamic_mixing import OPERATOR, make
from torch.nn.functional import normalize

from subquad_kernels import dynamic_mixing


NORMALIZATIONS = pytest.mark.parametrize("normalization", ["l1", "sum"])


def both(arguments, backend):
    """Result and gradient of a backend, and those of the reference."""
    expected = expect(OPERATOR, arguments)
    inputs, leaves = differentiable(OPERATOR, arguments)
    out = dynamic_mixing(**inputs, backend=backend)
    grad = weighted_gradients([out], leaves, expected.weights)["features"]
    return out.detach(), grad, expected.results[0], expected.grads["features"]


def row_errors(x, expected):
    return (x.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)


@NORMALIZATIONS
def test_reference(normalization):
    """Against the matrices of the paper, or of the published model."""
    arguments = make(dtype=torch.float64, normalization=normalization)
    x, gate, head = arguments["features"].split((17, 17, 6), dim=-1)
    y = normalize(x, dim=-1)
    scores = y @ y.mT
    weights = normalize(scores, p=1, dim=-1) if normalization == "l1" else scores / scores.sum(-1, keepdim=True)
    expected = torch.cat((gate * (weights @ x), head), dim=-1)
    torch.testing.assert_close(dynamic_mixing(**arguments, backend="reference"), expected)


@NORMALIZATIONS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@EACH
def test_rows_of_zeros(backend, dtype, normalization):
    if backend == "triton" and dtype == torch.float64:
        return
    arguments = make(2, 20, 80, 24, dtype, normalization)
    dead = torch.zeros(20, dtype=torch.bool)
    dead[3:6] = True
    arguments["features"][:, dead, :24] = 0.0
    out, grad, expected, expected_grad = both(arguments, backend)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    assert not out[:, dead, :24].any()
    assert relative_error(out, expected) < tolerance
    assert torch.isfinite(grad).all()
    assert relative_error(grad[:, ~dead], expected_grad[:, ~dead]) < tolerance
    assert expected_grad[:, dead, :24].abs().max() > 1e10  # a direction next to zero changes as fast as 1 / eps
    if dtype in (torch.float64, torch.float32):
        assert relative_error(grad[:, dead], expected_grad[:, dead]) < tolerance
    if dtype == torch.float16:
        assert grad[:, dead].abs().max() == torch.finfo(dtype).max

    arguments["features"] = torch.zeros_like(arguments["features"])
    out, grad, *_ = both(arguments, backend)
    assert not out.any()
    assert not grad[..., :48].any()


@NORMALIZATIONS
@EACH
def test_large_and_small_rows(backend, normalization):
    arguments = make(2, 20, 80, 24, normalization=normalization)
    arguments["features"][:, 2:5, :24] *= 1e4
    arguments["features"][:, 9:12, :24] *= 1e-8
    out, grad, expected, expected_grad = both(arguments, backend)
    assert row_errors(out[..., :24], expected[..., :24]).max() < 1e-5
    assert row_errors(grad[..., :24], expected_grad[..., :24]).max() < 1e-3
    assert row_errors(grad[..., 24:48], expected_grad[..., 24:48]).max() < 1e-5


@NORMALIZATIONS
@EACH
def test_float16_does_not_overflow(backend, normalization):
    """The products of rows are beyond what it holds, as is the gradient of a row of the smallest number."""
    arguments = {**make(1, 20, 160, 64, torch.float16), "normalization": normalization}
    features = arguments["features"]
    features[..., :64] = features[..., :64].abs() * 9e3
    assert_like_reference(OPERATOR, arguments, backend, tolerance=4e-3)
    features[:, 3, :64] = 6e-8
    out, grad, *_ = both(arguments, backend)
    assert torch.isfinite(out).all()
    assert torch.isfinite(grad).all()
    assert grad.abs().max() == torch.finfo(torch.float16).max


@EACH
def test_in_place_of_windows_in_another_order_of_axes(backend):
    arguments = make(3, 6)
    expected = dynamic_mixing(**arguments, backend=backend)
    written = arguments["features"].transpose(0, 1).contiguous().transpose(0, 1)
    out = dynamic_mixing(**{**arguments, "features": written}, inplace=True, backend=backend)
    assert out.data_ptr() == written[..., 17:].data_ptr()
    torch.testing.assert_close(out, expected)
    assert torch.equal(written[..., :17], arguments["features"][..., :17])


def test_eager_never_holds_all_weights(monkeypatch):
    from subquad_kernels.dynamic_mixing import eager

    monkeypatch.setattr(eager, "VALUES", 2**16)
    features, *options = make(20, 256, 8, 4).values()
    arguments = features, *options
    with Made() as made:
        eager.dynamic_mixing_eager(features[..., 4:], *arguments)
        eager.dynamic_mixing_eager_backward(features[..., 4:], *arguments)
    assert 0 < max(made.bytes) <= 20 * 256 * 256 * 4 // 16


@TRITON
def test_kernels_hold_the_weights_of_a_few_windows(monkeypatch):
    from subquad_kernels.dynamic_mixing import triton_kernels

    features, *options = make(5, 128, 20, 8).values()
    out, wide = torch.empty_like(features[..., :8]), features[..., 8:]
    triton_kernels.dynamic_mixing_triton(out, features, *options)
    grads = triton_kernels.dynamic_mixing_triton_backward(wide, features, *options)[0]
    monkeypatch.setattr(triton_kernels, "BYTES", 2 * 128 * 128 * 4)
    part = torch.empty_like(out)
    with Made() as made:
        triton_kernels.dynamic_mixing_triton(part, features, *options)
        assert torch.equal(triton_kernels.dynamic_mixing_triton_backward(wide, features, *options)[0], grads)
    assert torch.equal(part, out)
    assert max(made.bytes) == 2 * 128 * 128 * 4


def weights_of(x, options, backend):
    """The weights of each row, which a result of independent rows of x tells."""
    features = torch.cat((x, torch.ones_like(x)), dim=-1)
    out = dynamic_mixing(features, x.shape[2], **options, backend=backend)
    return (out.double() @ torch.linalg.pinv(x.double()))[0]


@EACH
def test_weights_are_shares_that_grow_with_similarity(backend):
    """Section 4.2 and appendix A, for features that are not negative."""
    dtype = torch.float64 if backend == "eager" else torch.float32
    x = torch.rand(1, 6, 30, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype) ** 4
    x[..., :6] = torch.eye(6)  # what a row alone has: otherwise the result would not show the weights
    y = normalize(x.double(), dim=-1)[0]
    scores = y @ y.mT
    for normalization in ("sum", "l1"):
        weights = weights_of(x, {"normalization": normalization}, backend)
        torch.testing.assert_close(weights, scores / scores.sum(1, keepdim=True), rtol=1e-4, atol=1e-5)
        assert (weights >= 0).all()
        assert weights.sum(1).max() <= 1.0 + 1e-5
        # A more similar row weighs more.
        gaps = scores[:, :, None] - scores[:, None, :]
        clear = gaps > 1e-3
        assert clear.sum() > 50
        assert ((weights[:, :, None] - weights[:, None, :])[clear] > 0).all()
        # Row 2 gets more of what row 0 alone has: for row 0 it weighs more, and the others less.
        closer = x.clone()
        closer[0, 2, 0] += 0.5
        change = (weights_of(closer, {"normalization": normalization}, backend) - weights)[0]
        assert change[2] > 1e-3
        assert (change[[0, 1, 3, 4, 5]] < 0).all()
    # With eps the sum of shares is less than one.
    shares = weights_of(x, {"normalization": "sum", "eps": 1.0}, backend)
    assert shares.sum(1).max() < 0.9

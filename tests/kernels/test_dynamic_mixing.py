"""The dynamic layer of Avey-B against its own formula in float64."""

import pytest
import torch
from kernel_cases import DEVICE, relative_error, triton, without_compiler
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import subquad_kernels.backend
from subquad_kernels import dynamic_mixing
from subquad_kernels.dynamic_mixing import _dynamic_mixing, _dynamic_mixing_


BACKENDS = ("eager", triton)
EACH = pytest.mark.parametrize("backend", BACKENDS)
NORMALIZATIONS = pytest.mark.parametrize("normalization", ["l1", "sum"])
# Windows, rows, features, width.
SIZES = ((2, 1, 2, 1), (3, 2, 35, 17), (3, 40, 80, 24), (1, 65, 40, 17), (1, 130, 128, 64))


def make(windows=2, rows=7, features=40, width=17, dtype=torch.float32, normalization="l1", seed=0):
    """Features and keyword arguments. Where the cosines are summed, x is positive, as after ReLU²."""
    x = torch.randn(windows, rows, features, generator=torch.Generator().manual_seed(seed))
    if normalization == "sum":
        x[..., :width].square_()
    return x.to(DEVICE, dtype), {"width": width, "normalization": normalization}


def gradient(features, options, weights=None):
    """The result and, for weights that the seed fixes, the gradient of the features."""
    features = features.detach().requires_grad_()
    out = dynamic_mixing(features, **options)
    if weights is None:
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return out.detach(), torch.autograd.grad(out, features, weights.to(out))[0]


def expected_gradient(features, options, weights=None):
    return gradient(features.double(), {**options, "backend": "reference"}, weights)


def assert_close_to_reference(features, options, tolerance, backend):
    (windows, rows, size), width = features.shape, options["width"]
    out, grad = gradient(features, {**options, "backend": backend})
    expected, expected_grad = expected_gradient(features, options)
    assert out.dtype == grad.dtype == features.dtype
    assert out.shape == (windows, rows, size - width)
    # One part alone: next to the others an error in it might be small.
    assert relative_error(out[..., :width], expected[..., :width]) < tolerance
    assert torch.equal(out[..., width:], features[..., 2 * width :])
    assert relative_error(grad[..., :width], expected_grad[..., :width]) < tolerance, "x"
    assert relative_error(grad[..., width : 2 * width], expected_grad[..., width : 2 * width]) < tolerance, "gate"
    assert relative_error(grad[..., 2 * width :], expected_grad[..., 2 * width :]) < tolerance, "head"


def row_errors(x, expected):
    return (x.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)


@NORMALIZATIONS
def test_reference(normalization):
    """Against the matrices of the paper, or of the published model."""
    features, options = make(dtype=torch.float64, normalization=normalization)
    x, gate, head = features.split((17, 17, 6), dim=-1)
    y = normalize(x, dim=-1)
    scores = y @ y.mT
    weights = normalize(scores, p=1, dim=-1) if normalization == "l1" else scores / scores.sum(-1, keepdim=True)
    expected = torch.cat((gate * (weights @ x), head), dim=-1)
    torch.testing.assert_close(dynamic_mixing(features, **options, backend="reference"), expected)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@NORMALIZATIONS
@EACH
def test_forward_and_gradients(backend, normalization, sizes):
    features, options = make(*sizes, normalization=normalization)
    assert_close_to_reference(features, options, 1e-5, backend)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@NORMALIZATIONS
def test_float64(normalization, sizes):
    features, options = make(*sizes, dtype=torch.float64)
    out, grad = gradient(features, {**options, "normalization": normalization})
    expected, expected_grad = expected_gradient(features, {**options, "normalization": normalization})
    assert relative_error(out, expected) < 1e-10  # sums of cosines of both signs may be close to zero
    assert relative_error(grad, expected_grad) < 1e-10


@NORMALIZATIONS
@pytest.mark.parametrize("eps", [1e-12, 1.0])
def test_gradcheck(eps, normalization):
    """The larger eps is above the norms and sums of some rows, below those of others."""
    features, options = make(2, 4, 9, 3, torch.float64, normalization)
    features[:, 1] *= 9.0
    function = lambda x: dynamic_mixing(x, **options, eps=eps)  # noqa: E731
    torch.autograd.gradcheck(function, features.requires_grad_())


@NORMALIZATIONS
@EACH
def test_large_eps(backend, normalization):
    """Above the norms and the sums of some rows, and below those of others."""
    features, options = make(normalization=normalization)
    features[:, ::2, :17] *= 0.1
    assert_close_to_reference(features, {**options, "eps": 1.3}, 1e-5, backend)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
@pytest.mark.parametrize(("sizes", "normalization"), [((2, 40, 40, 17), "sum"), ((1, 130, 200, 64), "l1")])
@EACH
def test_dtypes(backend, sizes, normalization, dtype, tolerance):
    features, options = make(*sizes, dtype, normalization)
    if backend == "eager" and normalization == "l1":
        tolerance = 1e-2  # a cosine may be rounded across zero
    assert_close_to_reference(features, options, tolerance, backend)


@NORMALIZATIONS
def test_a_few_windows_and_rows_at_a_time(normalization, monkeypatch):
    from subquad_kernels.dynamic_mixing import eager

    monkeypatch.setattr(eager, "ROWS", 16)
    monkeypatch.setattr(eager, "VALUES", 2 * 40 * 24)
    features, options = make(5, 40, 80, 24, normalization=normalization)
    assert_close_to_reference(features, options, 1e-5, "eager")


@pytest.mark.parametrize("backend", [triton])
def test_windows_of_which_a_program_keeps_a_part(backend):
    features, options = make(1, 300, 32, 16, torch.bfloat16)
    assert_close_to_reference(features, options, 8e-3, backend)
    expected = dynamic_mixing(features, **options, backend="eager")
    torch.testing.assert_close(
        dynamic_mixing(features, **options, inplace=True, backend=backend), expected, rtol=2e-2, atol=1e-3
    )


@NORMALIZATIONS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@EACH
def test_rows_of_zeros(backend, dtype, normalization):
    if backend == "triton" and dtype == torch.float64:
        with pytest.raises(ValueError, match="`dynamic_mixing` computes in float32, got float64"):
            dynamic_mixing(*make(dtype=dtype)[:1], 17, backend=backend)
        return
    features, options = make(2, 20, 80, 24, dtype, normalization)
    dead = torch.zeros(20, dtype=torch.bool)
    dead[3:6] = True
    features[:, dead, :24] = 0.0
    out, grad = gradient(features, {**options, "backend": backend})
    expected, expected_grad = expected_gradient(features, options)
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

    out, grad = gradient(torch.zeros_like(features), {**options, "backend": backend})
    assert not out.any()
    assert not grad[..., :48].any()


@NORMALIZATIONS
@EACH
def test_rows_that_share_no_feature(backend, normalization):
    """A cosine of exactly zero has no sign."""
    features, options = make(2, 20, 80, 24, normalization=normalization)
    features[:, :10, :12] = 0.0
    features[:, 10:, 12:24] = 0.0
    assert_close_to_reference(features, options, 1e-5, backend)


@NORMALIZATIONS
@EACH
def test_large_and_small_rows(backend, normalization):
    features, options = make(2, 20, 80, 24, normalization=normalization)
    features[:, 2:5, :24] *= 1e4
    features[:, 9:12, :24] *= 1e-8
    out, grad = gradient(features, {**options, "backend": backend})
    expected, expected_grad = expected_gradient(features, options)
    assert row_errors(out[..., :24], expected[..., :24]).max() < 1e-5
    assert row_errors(grad[..., :24], expected_grad[..., :24]).max() < 1e-3
    assert row_errors(grad[..., 24:48], expected_grad[..., 24:48]).max() < 1e-5


@NORMALIZATIONS
@EACH
def test_float16_does_not_overflow(backend, normalization):
    """The products of rows are beyond what it holds, as is the gradient of a row of the smallest number."""
    features, options = make(1, 20, 160, 64, torch.float16)
    features[..., :64] = features[..., :64].abs() * 9e3
    assert_close_to_reference(features, {**options, "normalization": normalization}, 4e-3, backend)
    features[:, 3, :64] = 6e-8
    out, grad = gradient(features, {**options, "normalization": normalization, "backend": backend})
    assert torch.isfinite(out).all()
    assert torch.isfinite(grad).all()
    assert grad.abs().max() == torch.finfo(torch.float16).max


@EACH
def test_strides(backend):
    features, options = make(3, 6, 40, 17)
    expected = gradient(features, {**options, "backend": backend})
    wide = torch.zeros(3, 6, 64, device=DEVICE)
    wide[..., 3:43] = features
    for strided in (
        wide[..., 3:43],
        features.transpose(0, 1).contiguous().transpose(0, 1),
        features.transpose(0, 2).contiguous().transpose(0, 2),
    ):
        assert strided.stride() != features.stride()
        torch.testing.assert_close(gradient(strided, {**options, "backend": backend}), expected)
    assert_close_to_reference(features[:1].expand(3, -1, -1), options, 1e-5, backend)
    # The gradient of a sum is one number, expanded.
    ones = torch.ones((), device=DEVICE).expand(3, 6, 23)
    expected = expected_gradient(features, options, ones)
    assert relative_error(gradient(features, {**options, "backend": backend}, ones)[1], expected[1]) < 1e-5


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_in_place(backend):
    features, options = make(3, 6, 40, 17)
    expected = dynamic_mixing(features, **options, backend=backend)
    wide = torch.zeros(5, 6, 64, device=DEVICE)
    wide[1:4, :, 3:43] = features
    for written in (features.clone(), wide[1:4, :, 3:43], features.transpose(0, 1).contiguous().transpose(0, 1)):
        out = dynamic_mixing(written, **options, inplace=True, backend=backend)
        assert out.data_ptr() == written[..., 17:].data_ptr()
        assert out.stride() == written.stride()
        torch.testing.assert_close(out, expected)
        assert torch.equal(written[..., :17], features[..., :17])
    wide[1:4, :, 3:43] = 0.0
    assert not wide.any()
    # What would have to be recorded is refused, before any work.
    leaf = features.clone().requires_grad_()
    with pytest.raises(ValueError, match="autograd has to record what `features` requires"):
        dynamic_mixing(leaf, **options, inplace=True, backend=backend)
    assert torch.equal(leaf, features)
    with torch.no_grad():
        out = dynamic_mixing(leaf, **options, inplace=True, backend=backend)
    torch.testing.assert_close(out, expected)


@EACH
def test_in_place_is_seen_by_autograd(backend):
    """What an earlier operation has saved may not be overwritten unnoticed."""
    features, options = make()
    factor = torch.ones((), device=DEVICE, requires_grad=True)
    product = features * factor
    dynamic_mixing(features, **options, inplace=True, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("backend", [triton])
def test_rows_that_do_not_begin_at_multiples_of_16_bytes(monkeypatch, backend):
    from subquad_kernels.dynamic_mixing import triton_kernels

    even = []
    monkeypatch.setattr(triton_kernels, "launch", lambda *args, **constants: even.append(constants.get("EVEN")))
    wide, options = make(2, 7, 208, 64, torch.bfloat16)
    for features, expected in (
        (wide[..., :200], True),
        (wide[..., 4:204], False),
        (wide[..., :204].contiguous(), False),
    ):
        gradient(features, {**options, "backend": backend})
        assert set(even) == {None, expected}  # the kernel for the norms does not ask
        even.clear()


@EACH
def test_no_windows(backend):
    features, options = make(windows=0)
    out, grad = gradient(features, {**options, "backend": backend})
    assert out.shape == (0, 7, 23)
    assert grad.shape == features.shape
    assert dynamic_mixing(features, **options, inplace=True, backend=backend).shape == (0, 7, 23)


class _Sizes(TorchDispatchMode):
    """The bytes of the largest tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        sizes = [x.nbytes for x in tree_leaves(made) if isinstance(x, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return made


def test_eager_never_holds_all_weights(monkeypatch):
    from subquad_kernels.dynamic_mixing import eager

    monkeypatch.setattr(eager, "VALUES", 2**16)
    features, options = make(20, 256, 8, 4)
    arguments = (features, *options.values(), 1e-12)
    with _Sizes() as sizes:
        eager.dynamic_mixing_eager(features[..., 4:], *arguments)
        eager.dynamic_mixing_eager_backward(features[..., 4:], *arguments)
    assert 0 < sizes.largest <= 20 * 256 * 256 * 4 // 16


@pytest.mark.parametrize("backend", [triton])
def test_kernels_hold_no_weights(backend):
    from subquad_kernels.dynamic_mixing import triton_kernels

    features, options = make(2, 128, 20, 8)
    arguments = (features, *options.values(), 1e-12)
    with _Sizes() as sizes:
        triton_kernels.dynamic_mixing_triton(features[..., 8:16], *arguments)
        triton_kernels.dynamic_mixing_triton_backward(features[..., 8:], *arguments)
    assert 0 < sizes.largest <= features.nbytes


@EACH
def test_the_backward_pass_keeps_the_features_alone(backend):
    features, options = make()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        dynamic_mixing(features.requires_grad_(), **options, backend=backend)
    assert [x.data_ptr() for x in kept] == [features.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EACH
def test_autocast(backend, dtype):
    features, options = make(dtype=dtype)
    expected = gradient(features, {**options, "backend": backend})
    with torch.autocast(DEVICE, dtype=torch.float16):
        found = gradient(features, {**options, "backend": backend})
        in_place = dynamic_mixing(features, **options, inplace=True, backend=backend)
    assert found[0].dtype == dtype
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert torch.equal(in_place, expected[0])


@EACH
def test_meta(backend):
    features, options = make()
    out, grad = gradient(features.to("meta"), {**options, "backend": backend}, torch.ones(2, 7, 23, device="meta"))
    assert out.shape == (2, 7, 23)
    assert grad.shape == features.shape


@NORMALIZATIONS
@EACH
def test_opcheck(backend, normalization):
    features, options = make(normalization=normalization)
    arguments = (*options.values(), 1e-12, backend)
    torch.library.opcheck(_dynamic_mixing, (features.clone().requires_grad_(), *arguments))
    torch.library.opcheck(_dynamic_mixing_, (features, *arguments))
    torch.library.opcheck(
        torch.ops.subquad_kernels.dynamic_mixing_backward.default,
        (torch.ones(2, 7, 23, device=DEVICE), features, *arguments),
    )


@EACH
def test_compile(backend):
    torch.compiler.reset()
    options = {"fullgraph": True, "backend": "aot_eager"}
    compiled = torch.compile(lambda x, **kwargs: dynamic_mixing(x * 2.0, **kwargs).sin(), **options)
    in_place = torch.compile(lambda x, **kwargs: dynamic_mixing(x, **kwargs, inplace=True) + 1.0, **options)
    for windows in (2, 3):
        features, arguments = make(windows)
        expected = dynamic_mixing((2.0 * features).requires_grad_(), **arguments, backend=backend).sin()
        x = features.clone().requires_grad_()
        out = compiled(x, **arguments, backend=backend)
        torch.testing.assert_close(out, expected)
        plain = features.clone().requires_grad_()
        (expected_grad,) = torch.autograd.grad(
            dynamic_mixing(plain * 2.0, **arguments, backend=backend).sin().sum(), plain
        )
        torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], expected_grad)

        expected = dynamic_mixing(features, **arguments, backend=backend)
        torch.testing.assert_close(in_place(features, **arguments, backend=backend), expected + 1.0)
        assert torch.equal(features[..., 17:], expected)


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
    x[..., :6] = torch.eye(6)  # what a row alone has: else the weights could not be told from the result
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


@pytest.mark.parametrize("backend", [triton])
def test_eager_takes_over(monkeypatch, backend):
    from subquad_kernels.dynamic_mixing import triton_kernels

    without_compiler(monkeypatch, triton_kernels)
    features, options = make()
    arguments = (features, *options.values(), 1e-12)
    with pytest.raises(subquad_kernels.backend.KernelError, match="no compiler"):
        _dynamic_mixing(*arguments, backend)
    expected = dynamic_mixing(features, **options, backend="eager")
    with pytest.warns(RuntimeWarning, match="no compiler"):
        assert torch.equal(_dynamic_mixing(*arguments, "auto"), expected)
    _dynamic_mixing_(*arguments, "auto")
    assert torch.equal(features[..., 17:], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": torch.zeros(7, 40)}, r"`features` must be \(windows, rows >= 1, features\), got \(7, 40\)"),
        ({"features": torch.zeros(2, 0, 40)}, r"`features` must be .*, got \(2, 0, 40\)"),
        ({"features": torch.zeros(2, 7, 40, dtype=torch.int64)}, "`features` must be floating point, got torch.int64"),
        ({"width": 21}, "`width` must be from 1 to 20, half of the features, got 21"),
        ({"width": 0}, "`width` must be from 1 to 20, half of the features, got 0"),
        ({"width": 17.0}, "`width` must be from 1 to 20, half of the features, got 17.0"),
        ({"normalization": "softmax"}, r"`normalization` must be one of \('l1', 'sum'\), got 'softmax'"),
        ({"eps": 0.0}, "`eps` must be at least 1e-20, got 0.0"),
        ({"eps": -1.0}, "`eps` must be at least 1e-20, got -1.0"),
        ({"eps": float("nan")}, "`eps` must be at least 1e-20, got nan"),
        ({"backend": "cuda"}, "backend='cuda': `dynamic_mixing` has eager, reference, triton"),
        (
            {"features": torch.zeros(40, 7, 2).transpose(0, 2), "inplace": True},
            r"`inplace=True`: the values of a row must lie side by side, .*; got strides \(1, 2, 14\)",
        ),
        (
            {"features": torch.zeros(1, 7, 40).expand(2, -1, -1), "inplace": True},
            r"`inplace=True`: .* each row in its own place; got strides \(0, 40, 1\)",
        ),
        ({"features": torch.zeros(2, 7, 40, requires_grad=True), "inplace": True}, "`inplace=True`: autograd has to"),
    ],
)
def test_wrong_arguments(change, message):
    features, options = make()
    with pytest.raises(ValueError, match=message):
        dynamic_mixing(**{"features": features, **options, **change})

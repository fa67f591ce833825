"""The product with 4-bit weights: how they are rounded and laid out, and rows that do not depend on each other."""

import sys

import pytest
import torch
from test_native import library, needs_library  # noqa: F401, the first is a fixture

from subquad_kernels import int4_linear, int8_linear, quantize_groups, quantize_rows
from subquad_kernels.int4_linear import unpack_groups


module = sys.modules["subquad_kernels.int4_linear"]
SHAPES = [(1, 16, 32), (5, 48, 96), (3, 16, 2080), (21, 80, 64), (70, 208, 160)]


def exact(x, weight, scale):
    """The product in float64, of the rounded x."""
    integers, row_scale = quantize_rows(x)
    return integers.double() @ unpack_groups(weight, scale).double().T * row_scale.double()[:, None]


def tolerance(x, weight, scale):
    """Of sums in float32."""
    return 2e-7 * (x.abs().double() @ unpack_groups(weight, scale).abs().double().T).max().item()


@needs_library
@pytest.mark.parametrize("shape", SHAPES)
def test_the_library_equals_float64(library, shape):  # noqa: F811
    """For every instruction set, and with the largest integers, where 16 bits are nearly full."""
    torch.manual_seed(0)
    rows, outputs, inputs = shape
    for largest in (False, True):
        x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
        if largest:
            x[0], weight[:3], weight[3:6] = 2, -8, 7
            x[-1] *= torch.where(torch.arange(inputs) % 2 == 0, 1, -1)
        packed, scale = quantize_groups(weight)
        out = library.int4_linear(x, packed, scale)
        torch.testing.assert_close(out.double(), exact(x, packed, scale), rtol=0, atol=tolerance(x, packed, scale))


@needs_library
def test_rows_do_not_depend_on_each_other(library):  # noqa: F811
    """Any number of rows gives the same bits, on one thread and on two; other rows may be infinite or NaN."""
    torch.manual_seed(0)
    packed, scale = quantize_groups(torch.randn(1040, 256))  # more numbers than one thread is given
    x = torch.randn(21, 256) * torch.logspace(-6, 6, 21)[:, None]
    x[3, 5], x[4, 0], x[6] = torch.inf, torch.nan, 0
    threads, alone = torch.get_num_threads(), [library.int4_linear(row, packed, scale) for row in x]
    for count in (1, 2):
        torch.set_num_threads(count)
        try:
            for rows in range(1, 22):
                out = library.int4_linear(x[:rows], packed, scale)
                torch.testing.assert_close(out, torch.stack(alone[:rows]), rtol=0, atol=0, equal_nan=True)
        finally:
            torch.set_num_threads(threads)
    assert not alone[3].isfinite().any() and not alone[4].isfinite().any() and not alone[6].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_library", [True, False])
def test_the_function(dtype, with_library, monkeypatch):
    """With a bias and in any shape, by the library and by torch, which takes the weight in parts."""
    if not with_library:
        monkeypatch.setattr(module, "library", lambda: None)
        monkeypatch.setattr(module, "_PIECE", 16 * 256)
    torch.manual_seed(0)
    packed, scale = quantize_groups(torch.randn(144, 256))
    x, bias = torch.randn(2, 7, 256).to(dtype), torch.randn(144).to(dtype)
    out = int4_linear(x, packed, scale, bias)
    assert out.shape == (2, 7, 144) and out.dtype == dtype
    expected = exact(x.flatten(0, 1).float(), packed, scale).view(2, 7, 144) + bias
    error = 1e-4 if dtype == torch.float32 else 0.02 * expected.abs().max().item()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=error)
    assert int4_linear(x[:, :0], packed, scale).shape == (2, 0, 144)
    assert not int4_linear(torch.zeros(1, 256), packed, scale).any()
    with pytest.raises(ValueError, match=r"`x` must have 256 channels, as the weight has, got \(3, 64\)"):
        int4_linear(torch.zeros(3, 64), packed, scale)


@pytest.mark.parametrize("with_library", [True, False])
@pytest.mark.parametrize(("product", "quantize"), [(int8_linear, quantize_rows), (int4_linear, quantize_groups)])
def test_what_is_stored_otherwise_is_refused(product, quantize, with_library, monkeypatch):
    """Before it is read: C code takes the memory as it is. So do those that torch's functions would broadcast."""
    if not with_library:
        for name in ("int8_linear", "int4_linear"):
            monkeypatch.setattr(sys.modules[f"subquad_kernels.{name}"], "library", lambda: None)
    weight, scale = quantize(torch.randn(256, 128))
    x, bias = torch.randn(2, 128), torch.randn(256)
    wrong = {
        "weight": [
            weight.float(), weight.to(torch.int16), weight.view(torch.int8 if product is int4_linear else torch.uint8),
            weight.flatten(), weight[..., :-1].contiguous(), weight[..., :1].contiguous(), weight.mT, weight[None],
            weight[:0], weight[:8], weight.to("meta"),
        ],
        "scale": [
            scale.to(torch.int8), scale.half(), scale.double(), scale.flatten()[:1], scale[:8], scale.flatten()[None],
            torch.cat((scale, scale)), torch.stack((scale, scale), -1)[..., 0], scale.to("meta"),
        ],
        "x": [x.int(), x[..., :64], x[..., :1], x.to(torch.complex64), x.to("meta"), x[0, 0]],
        "bias": [bias[:1], bias[:128], bias.int(), bias[None], bias.to("meta")],
    }  # fmt: skip
    given = {"x": x, "weight": weight, "scale": scale, "bias": bias}
    for name, tensors in wrong.items():
        for tensor in tensors:
            with torch.no_grad(), pytest.raises(ValueError, match=r"^`(x|weight|scale|bias)` (must|is)"):
                product(**given | {name: tensor})
    expected = product(**given)
    with torch.no_grad():  # views of which torch changes the sign when it reads them
        torch.testing.assert_close(product(-x, weight, scale), product(torch._neg_view(x), weight, scale))
        torch.testing.assert_close(product(x, weight, -scale), product(x, weight, torch._neg_view(scale)))
        torch.testing.assert_close(product(x, weight, scale, bias), expected)


def test_layout():
    """A number of each place, by the order that `integers.c` documents."""
    weight = torch.randint(-8, 8, (32, 96)).float()
    weight[:, ::32] = -8  # so that the scale of every group is 1
    packed, scale = quantize_groups(weight)
    assert packed.shape == (2, 3, 256) and packed.dtype == torch.uint8
    assert scale.shape == (2, 3, 16) and scale.dtype == torch.bfloat16
    assert torch.equal(unpack_groups(packed, scale), weight)
    for output, position in ((0, 0), (5, 18), (17, 63), (31, 95)):
        place, group = position % 32, position // 32
        byte = packed[output // 16, group].view(4, 16, 4)[place % 16 // 4, output % 16, place % 4].item()
        assert (byte >> 4 if place >= 16 else byte & 15) - 8 == weight[output, position]


def test_rounding():
    """No scale of a group that could be found by trying many would be better by much; zeros and tiny groups work."""
    torch.manual_seed(0)
    weight = torch.randn(32, 64) * torch.logspace(-30, 30, 32)[:, None]
    weight[3], weight[4, :32] = 0, 1e-42
    packed, scale = quantize_groups(weight)
    rounded = unpack_groups(packed, scale)
    assert not rounded[3].any() and rounded.isfinite().all()
    groups, found = weight.view(32, 2, 32), rounded.view(32, 2, 32)
    errors = (found - groups).double().norm(dim=-1) / groups.double().norm(dim=-1).clamp_min(1e-40)
    largest = groups.abs().amax(-1, keepdim=True)
    best = torch.full_like(errors, torch.inf)
    for factor in torch.linspace(0.5, 1.2, 200):
        for sign in (-1, 1):
            step = sign * factor * largest / 8
            tried = (groups / step).round().clamp(-8, 7).nan_to_num(0) * step
            best = best.minimum((tried - groups).double().norm(dim=-1) / groups.double().norm(dim=-1).clamp_min(1e-40))
    errors[4, 0] = best[4, 0] = errors[3] = best[3] = 0  # smaller than what a scale of bfloat16 can hold, and zeros
    assert (errors <= 1.25 * best + 1e-6).all() and errors.mean() < 1.05 * best.mean()


def test_numbers_that_are_not_finite_have_no_scale():
    weight = torch.randn(16, 64)
    weight[2, 40], weight[5, 1] = torch.inf, torch.nan
    _, scale = quantize_groups(weight)
    assert scale.isnan().nonzero().tolist() == [[0, 0, 5], [0, 1, 2]]


@pytest.mark.parametrize("shape", [(15, 32), (16, 31), (0, 32), (32,), (2, 16, 32)])
def test_shapes_that_do_not_fit(shape):
    with pytest.raises(ValueError, match=r"`weight` must be \(outputs, inputs\), multiples of 16 and 32, got"):
        quantize_groups(torch.zeros(shape))

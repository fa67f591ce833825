"""The product of a linear layer whose weights are 8-bit integers, on a CPU."""

import functools

import torch

from .c.native import WORTHWHILE, Library, in_memory, library
from .checks import check_stored, check_tensors
from .tracing import is_observed


# The largest integer. -128 is left out, so that every number can be negated.
LARGEST = 127
# Numbers that are quantised at a time, which bounds the extra memory.
_PIECE = 1 << 22
# Rows of a weight in one call of `_by_columns`: oneDNN is several times slower for more.
_ROWS = 2048
# Inputs up to which the sum of products of two numbers of 8 bits, 128 * 127 each, fits in 32 bits.
MOST_INPUTS = 2**17
# The shape and the dtype of a tensor.
Stored = tuple[tuple[int, ...], torch.dtype]


def quantize_rows(x: torch.Tensor, largest: int = LARGEST) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Rounds every row to integers: `x` is about `integers * scale[:, None]`.

    Args:
        x: (rows, width), floating point.
        largest: the largest absolute value of an integer, at most 127.

    Returns:
        int8 (rows, width); and the scale of each row in float32 (rows), which is the row's largest absolute value
        divided by `largest`. It is NaN or infinite if the row has such a number.
    """
    integers = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    size = max(1, _PIECE // max(x.shape[1], 1))
    for start in range(0, x.shape[0], size):
        piece = slice(start, start + size)
        integers[piece], scale[piece] = _quantize(x[piece], largest)
    return integers, scale


def _quantize(x: torch.Tensor, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.float()
    if x.shape[1] == 0:
        return x.to(torch.int8), x.new_zeros(x.shape[0])
    # Ten times as fast as `torch.linalg.vector_norm` and `torch.aminmax`.
    scale = torch.maximum(x.amax(1), x.amin(1).neg()) / largest
    # The smallest normal number keeps zeros apart from 0 / 0. NaN and infinity are kept in the scale.
    integers = (x * scale.clamp_min(torch.finfo(torch.float32).tiny).reciprocal()[:, None]).round_()
    return integers.nan_to_num_(0, 0, 0).to(torch.int8), scale


def int8_layout(outputs: int, inputs: int) -> tuple[Stored, Stored]:
    """Shape and dtype of the integers, then of the scales, of an 8-bit weight (outputs, inputs)."""
    return ((outputs, inputs), torch.int8), ((outputs,), torch.float32)


def check_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    size: tuple[int, int],
    layout: tuple[Stored, Stored],
) -> None:
    """
    Checks the arguments of a product with an integer weight of `size` (outputs, inputs).

    Raises:
        ValueError: with the argument's name, and the actual and the expected properties.
    """
    outputs, inputs = size
    check_stored("weight", weight, *layout[0], x.device)
    check_stored("scale", scale, *layout[1], x.device)
    if x.dim() == 0 or x.shape[-1] != inputs:
        raise ValueError(f"`x` must have {inputs} channels, as the weight has, got {tuple(x.shape)}.")
    if not x.is_floating_point():
        raise ValueError(f"`x` must be floating point, got {x.dtype}.")
    if bias is not None:
        check_tensors({"bias": (bias, (outputs,))}, "x", x)


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """
    `x @ (weight * scale[:, None]).T + bias`, with x rounded to 8 bits and a scale for every row of x, see
    [`quantize_rows`]. The products and sums of the integers are exact, so the result of a row does not depend on the
    other rows. (A sum of more than 131,072 products uses 64 bits; `torch._int_mm` would overflow.)

    On x86 CPUs without VNNI, torch adds products in 16 bits. There the integers of x have 7 bits, so that no sum
    overflows.

    Args:
        x: (..., in), floating point, on a CPU.
        weight: int8 (out, in), contiguous, none of them -128.
        scale: float32 (out), contiguous.
        bias: floating point (out), or None.

    Returns:
        (..., out), in the dtype of x. It has no gradient.

    Raises:
        ValueError: if a dtype, a shape or a device does not fit.
    """
    size = (weight.shape[0], weight.shape[1]) if weight.dim() == 2 else (scale.numel(), x.shape[-1])
    check_product(x, weight, scale, bias, size, int8_layout(*size))
    rows = x.detach()
    rows = rows if x.dim() == 2 else rows.reshape(-1, size[1])
    exact = adds_exactly()
    largest = LARGEST if exact else LARGEST // 2
    found = _library_for(rows, weight, scale)
    few = found is not None and rows.shape[0] <= found.int8_rows
    if few and (out := found.int8_linear(rows.float(), weight, scale, largest)) is not None:
        return _finished(out, bias, x)
    integers, row_scale = found.round_rows(rows.float(), largest) if found else _quantize(rows, largest)
    sums = _sums(integers, weight, exact)
    if found and sums.dtype == torch.int32 and sums.is_contiguous():
        return _finished(found.scale_sums(sums, row_scale, scale), bias, x)
    out = sums.float()  # torch is slow if the dtypes of factors differ
    out *= scale
    out *= row_scale[:, None]
    return _finished(out, bias, x)


def _sums(integers: torch.Tensor, weight: torch.Tensor, exact: bool) -> torch.Tensor:
    """The product of integers (rows, in) and a weight (out, in): int32 (rows, out), or int64 if it has many inputs."""
    if not (integers.shape[0] and weight.numel()):
        return integers.new_zeros(integers.shape[0], weight.shape[0], dtype=torch.int32)
    if weight.shape[1] > MOST_INPUTS:
        parts = zip(integers.split(MOST_INPUTS, 1), weight.split(MOST_INPUTS, 1), strict=True)
        return sum(_sums(x.contiguous(), part.contiguous(), exact).long() for x, part in parts)
    if weight.shape[1] == 1:  # `_int_mm` misreads such a weight
        return integers.int() * weight.int().T
    return torch._int_mm(integers, weight.T) if exact else _by_columns(integers, weight)


def _finished(out: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """The rows of a product, plus the bias, in the dtype and the dimensions of x."""
    out = out if bias is None else out + bias
    out = out if out.dtype == x.dtype else out.to(x.dtype)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out.shape[-1])


def _library_for(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> Library | None:
    """The C library of `native.py`, which computes the same numbers; None if it cannot read these tensors."""
    if (
        torch.compiler.is_compiling()
        or not rows.numel()
        or weight.numel() < WORTHWHILE
        or weight.shape[1] > MOST_INPUTS
        or not (in_memory(rows) and in_memory(weight) and in_memory(scale))
        or is_observed()
    ):
        return None
    return library()


def adds_exactly() -> bool:
    """Whether torch's product of two matrices of 8-bit integers is exact, as on CPUs with VNNI and on ARM."""
    return _try_sums()


# `torch.compile` calls it instead of tracing it. (`torch.compiler.assume_constant_result` would import Dynamo.)
adds_exactly._dynamo_marked_constant = True


@functools.cache
def _try_sums() -> bool:
    x = torch.full((8, 64), LARGEST, dtype=torch.int8)
    return all(bool((torch._int_mm(x, (sign * x).T) == sign * 64 * LARGEST**2).all()) for sign in (1, -1))


def _by_columns(integers: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """
    The product on CPUs that add in 16 bits. oneDNN makes the left matrix unsigned by adding 128. The sum of two
    products then fits in 16 bits if the right matrix has 7-bit numbers.
    """
    columns = integers.T
    return torch.cat([torch._int_mm(part, columns).T for part in weight.split(_ROWS)], dim=1)

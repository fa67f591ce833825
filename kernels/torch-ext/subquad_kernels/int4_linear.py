"""The product of a linear layer whose weights are 4-bit integers in groups, on a CPU."""

import torch
import torch.nn.functional as F

from .c.native import GROUP, STRIP, WORTHWHILE, in_memory, library
from .int8_linear import Stored, _finished, _quantize, check_product
from .tracing import is_observed


# Numbers that are rounded, or converted to floats, at a time.
_PIECE = 1 << 22
# Scales to try for a group, besides the one that maps its largest number to -8: smaller ones clip it.
_TRIED = (1.0, 0.92, 0.82)


def fits_groups(outputs: int, inputs: int) -> bool:
    """Whether a weight (outputs, inputs) may have 4 bits: outputs and inputs must be multiples of 16 and 32."""
    return outputs > 0 and inputs > 0 and outputs % STRIP == 0 and inputs % GROUP == 0


def int4_layout(outputs: int, inputs: int) -> tuple[Stored, Stored]:
    """Shape and dtype of the integers, then of the scales, of a 4-bit weight (outputs, inputs)."""
    blocks = outputs // STRIP, inputs // GROUP
    return ((*blocks, STRIP * GROUP // 2), torch.uint8), ((*blocks, STRIP), torch.bfloat16)


def quantize_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Rounds each group of 32 inputs of an output to integers from -8 to 7 with a common scale. Several scales are tried,
    and the one with the smallest squared error is chosen.

    Args:
        weight: (outputs, inputs), floating point. outputs must be a multiple of 16, inputs of 32.

    Returns:
        uint8 (outputs / 16, inputs / 32, 256), two integers in a byte, see [`unpack_groups`]; and the scales in
        bfloat16, (outputs / 16, inputs / 32, 16). A scale is NaN if the group has numbers that are not finite.

    Raises:
        ValueError: if the shape does not fit.
    """
    if weight.dim() != 2 or not fits_groups(*weight.shape):
        raise ValueError(
            f"`weight` must be (outputs, inputs), multiples of {STRIP} and {GROUP}, got {tuple(weight.shape)}."
        )
    outputs, inputs = weight.shape
    shape = outputs // STRIP, inputs // GROUP
    packed = torch.empty(*shape, GROUP * STRIP // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(*shape, STRIP, dtype=torch.bfloat16, device=weight.device)
    strips = max(1, _PIECE // (STRIP * inputs))
    for start in range(0, shape[0], strips):
        part = weight[start * STRIP : (start + strips) * STRIP].float()
        integers, scale = _round_groups(part.view(-1, shape[1], GROUP))
        # (strips, STRIP, groups, halves, 4, 4) to (strips, groups, halves, 4, STRIP, 4)
        numbers = (integers + 8).to(torch.uint8).view(-1, STRIP, shape[1], 2, 4, 4).permute(0, 2, 3, 4, 1, 5)
        packed[start : start + strips] = (numbers[:, :, 0] | numbers[:, :, 1] << 4).flatten(2)
        scales[start : start + strips] = scale.view(-1, STRIP, shape[1]).transpose(1, 2)
    return packed, scales


def _round_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The integers of groups x (outputs, groups, GROUP) in float32, and the scales in bfloat16 (outputs, groups)."""
    low, high = x.amin(-1), x.amax(-1)
    # With its sign, so that the number with the largest absolute value becomes -8.
    largest = torch.where(-low >= high, low, high) / -8
    best, integers, scale = torch.full_like(largest, -1), torch.zeros_like(x), torch.zeros_like(largest)
    for factor in _TRIED:
        tried = (x * (largest * factor).reciprocal().unsqueeze(-1)).round_().clamp_(-8, 7).nan_to_num_(0)
        # The scale that is best for these integers, by least squares, and the part of the squares that it explains.
        product, squares = (x * tried).sum(-1), tried.square().sum(-1).clamp_min_(1)
        found = product.square() / squares
        better = found > best
        best = torch.where(better, found, best)
        integers = torch.where(better.unsqueeze(-1), tried, integers)
        scale = torch.where(better, product / squares, scale)
    return integers, scale.bfloat16().masked_fill(~torch.isfinite(x).all(-1), torch.nan)


def unpack_groups(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """
    The float32 weight (outputs, inputs) from packed integers and scales.

    In each strip of 16 outputs and group of 32 inputs, byte (b, o, i) of (4, 16, 4) holds two integers of output o,
    plus 8 each: input 4 b + i of the group in the low half, and input 16 + 4 b + i in the high half.
    """
    strips, groups, _ = weight.shape
    bytes_ = weight.view(strips, groups, 4, STRIP, 4)
    # (strips, groups, halves, 4, STRIP, 4) to (strips, STRIP, groups, halves, 4, 4)
    integers = torch.stack((bytes_ & 15, bytes_ >> 4), dim=2).permute(0, 4, 1, 2, 3, 5).float() - 8
    scale = scale.float().transpose(1, 2).unsqueeze(-1)
    return (integers.reshape(strips, STRIP, groups, GROUP) * scale).view(strips * STRIP, groups * GROUP)


def int4_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """
    `x @ unpack_groups(weight, scale).T + bias`, with x rounded to 8 bits and a scale for every row of x, see
    [`quantize_rows`]. Sums within a group are exact, sums over groups are float32. In the library of `native.py` the
    result of a row does not depend on the other rows.

    Args:
        x: (..., in), floating point, on a CPU.
        weight: uint8 (out / 16, in / 32, 256), contiguous, two integers in a byte, see [`quantize_groups`].
        scale: bfloat16 (out / 16, in / 32, 16), contiguous.
        bias: floating point (out), or None.

    Returns:
        (..., out), in the dtype of x. It has no gradient.

    Raises:
        ValueError: if a dtype, a shape or a device does not fit.
    """
    blocks = weight.shape[:2] if weight.dim() == 3 else (scale.numel() // STRIP, x.shape[-1] // GROUP)
    size = blocks[0] * STRIP, blocks[1] * GROUP
    check_product(x, weight, scale, bias, size, int4_layout(*size))
    rows = x.detach()
    rows = rows if x.dim() == 2 else rows.reshape(-1, size[1])
    if (
        rows.numel()
        and not torch.compiler.is_compiling()
        and 2 * weight.numel() >= WORTHWHILE
        and in_memory(rows)
        and in_memory(weight)
        and in_memory(scale)
        and not is_observed()
        and (found := library())
        and (out := found.int4_linear(rows.float(), weight, scale)) is not None
    ):
        return _finished(out, bias, x)
    integers, row_scale = _quantize(rows, 127)
    integers = integers.float()
    size = max(1, _PIECE // (STRIP * x.shape[-1]))
    parts = zip(weight.split(size), scale.split(size), strict=True)
    out = torch.cat([F.linear(integers, unpack_groups(*part)) for part in parts], dim=-1)
    return _finished(out * row_scale[:, None], bias, x)

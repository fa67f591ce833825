"""
The dynamic layer in plain torch, for any device.

It processes a few windows at a time, and a block of their rows at a time with all rows. So the cosines are a tile of
bounded size. The backward pass recomputes them.
"""

import math
from collections.abc import Iterator

import torch

from ..linear import matmul


ROWS = 256  # rows of a tile
VALUES = 1 << 24  # values of the windows that are computed at a time


def _pieces(
    x: torch.Tensor, normalization: str, eps: float
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yields a few windows: their slice, rows (n, C, H), the rows divided by their norms, and 1 / norm in float32."""
    windows, context, width = x.shape
    added, limit = (0.0, 1 / eps) if normalization == "l1" else (eps, math.inf)
    size = max(VALUES // (context * max(width, min(context, ROWS))), 1)
    for start in range(0, windows, size):
        part = slice(start, min(start + size, windows))
        wide = x[part].to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().sum(-1, keepdim=True) + added).clamp_max(limit)
        yield part, x[part], (wide * scale).to(x.dtype), scale


def _blocks(context: int) -> Iterator[slice]:
    for start in range(0, context, ROWS):
        yield slice(start, min(start + ROWS, context))


def _cosines(
    y: torch.Tensor, rows: slice, normalization: str, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosines of a block of rows with all rows, and their divisors."""
    cosines = matmul(y[:, rows], y.mT).to(dtype)
    if normalization == "l1":
        return cosines, cosines.abs().sum(-1, keepdim=True).clamp_min(eps)
    return cosines, cosines.sum(-1, keepdim=True) + eps


def _finite(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in a dtype, clamped to its range: next to a row of zeros gradients are as large as 1 / eps."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def dynamic_mixing_eager(
    out: torch.Tensor, features: torch.Tensor, width: int, normalization: str, eps: float
) -> None:
    """
    Writes gate * (weights @ rows) to `out` (W, C, width), which may be the gate: see
    [`subquad_kernels.dynamic_mixing`].
    """
    for part, x, y, scale in _pieces(features[..., :width], normalization, eps):
        for rows in _blocks(features.shape[1]):
            cosines, sums = _cosines(y, rows, normalization, eps, scale.dtype)
            out[part, rows] = matmul((cosines / sums).to(x.dtype), x) * features[part, rows, width : 2 * width]


def dynamic_mixing_eager_backward(
    grad: torch.Tensor, features: torch.Tensor, width: int, normalization: str, eps: float
) -> list[torch.Tensor]:
    """The gradient of the features: products in their dtype, sums in float32."""
    grads = features.new_empty(features.shape)
    grads[..., 2 * width :] = grad[..., width:]
    for part, x, y, scale in _pieces(features[..., :width], normalization, eps):
        grad_x, grad_y = x.new_zeros(2, *x.shape, dtype=scale.dtype)
        for rows in _blocks(features.shape[1]):
            cosines, sums = _cosines(y, rows, normalization, eps, scale.dtype)
            weights = cosines / sums
            narrow = weights.to(x.dtype)
            grad_out = grad[part, rows, :width]
            grads[part, rows, width : 2 * width] = grad_out * (narrow @ x)
            grad_mixed = (grad_out * features[part, rows, width : 2 * width]).to(x.dtype)
            grad_x += narrow.mT @ grad_mixed
            # Gradients of the weights, then of the cosines, times the scales of the keys: without these float16 would
            # overflow.
            slopes = (grad_mixed @ y.mT).to(scale.dtype)
            dots = (weights * (slopes / scale.mT)).sum(-1, keepdim=True)
            if normalization == "l1":
                dots = torch.where(sums > eps, dots, 0.0) * cosines.sign()
            slopes = _finite((slopes - dots * scale.mT) / sums, x.dtype)
            grad_y[:, rows] += _finite(slopes @ x, x.dtype)
            grad_y += _finite(slopes.mT @ y[:, rows], x.dtype) / scale
        projections = (y * grad_y).sum(-1, keepdim=True)
        if normalization == "l1":
            projections = torch.where(scale < 1 / eps, projections, 0.0)
        grads[part, :, :width] = _finite(grad_x + scale * (grad_y - y * projections), x.dtype)
    return [grads]

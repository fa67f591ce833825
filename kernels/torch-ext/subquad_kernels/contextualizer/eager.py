"""
The contextualizer in plain torch, for any device.

It processes a few windows at a time, and within them blocks of rows with the rows that each block reads. So the scores
are a tile of bounded size. The backward pass recomputes them.
"""

from collections.abc import Iterator

import torch

from ..linear import matmul
from .reference import EPS


ROWS = 64  # queries of a tile
VALUES = 1 << 24  # values of the windows that are computed at a time


def _pieces(
    z: torch.Tensor, context: int, prefix: torch.Tensor | None
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yields a few windows: their slice, all rows (n, C, H), the rows divided by their norms, 1 / norm in float32."""
    windows, rows, width = z.shape
    dtype = torch.promote_types(z.dtype, torch.float32)
    size = max(VALUES // (context * max(width, ROWS)), 1)
    for start in range(0, windows, size):
        part = slice(start, min(start + size, windows))
        x = z[part]
        if context > rows:
            x = torch.cat((prefix[: context - rows].to(x.dtype).expand(x.shape[0], -1, -1), x), dim=1)
        wide = x.to(dtype)
        scale = torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)
        yield part, x, (wide * scale).to(x.dtype), scale


def _blocks(context: int, queries: int) -> Iterator[tuple[int, int, slice]]:
    """Yields blocks of queries: the first row in the window, the row after the last one, and the slice of `out`."""
    first = context - queries
    for start in range(first, context, ROWS):
        stop = min(start + ROWS, context)
        yield start, stop, slice(start - first, stop - first)


def contextualizer_eager(
    z: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None,
    prefix: torch.Tensor | None,
    queries: int,
) -> torch.Tensor:
    """Computes [`subquad_kernels.contextualizer`] with products in the dtype of z."""
    context = v.shape[0]
    v = v.to(torch.promote_types(z.dtype, torch.float32)).tril()
    out = z.new_empty(z.shape[0], queries, z.shape[2])
    for part, x, y, _ in _pieces(z, context, prefix):
        for start, stop, place in _blocks(context, queries):
            weights = matmul(y[:, start:stop], y[:, :stop].mT) * v[start:stop, :stop]
            mixed = matmul(weights.to(z.dtype), x[:, :stop])
            out[part, place] = mixed if gate is None else mixed * gate[part, place]
    return out


def contextualizer_eager_backward(
    grad: torch.Tensor,
    z: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None,
    prefix: torch.Tensor | None,
    queries: int,
) -> list[torch.Tensor]:
    """Gradients of z, v, gate and prefix, if given: products in the dtype of z, sums in float32."""
    context, shared = v.shape[0], v.shape[0] - z.shape[1]
    dtype = torch.promote_types(z.dtype, torch.float32)
    lower = v.to(dtype).tril()
    grad_z, grad_v = z.new_empty(z.shape), torch.zeros_like(lower)
    grad_gate = None if gate is None else gate.new_empty(gate.shape)
    grad_prefix = None if prefix is None else prefix.new_zeros(prefix.shape, dtype=dtype)
    for part, x, y, scale in _pieces(z, context, prefix):
        grad_x, grad_y = x.new_zeros(2, *x.shape, dtype=dtype)
        for start, stop, place in _blocks(context, queries):
            rows, keys, tile = slice(start, stop), slice(stop), lower[start:stop, :stop]
            scores = y[:, rows] @ y[:, keys].mT
            weights = (scores * tile).to(z.dtype)
            mixed = weights @ x[:, keys]
            grad_mixed = grad[part, place]
            if gate is not None:
                grad_gate[part, place] = grad_mixed * mixed
                grad_mixed = grad_mixed * gate[part, place]
            grad_mixed = grad_mixed.to(z.dtype)
            grad_x[:, keys] += weights.mT @ grad_mixed
            # The gradient of the weights, times the scales of the keys: without these float16 would overflow.
            grad_weights = grad_mixed @ y[:, keys].mT
            grad_v[start:stop, :stop] += (grad_weights * (scores / scale[:, keys].mT)).sum(0)
            grad_scores = (grad_weights * tile).to(z.dtype)
            grad_y[:, rows] += grad_scores @ x[:, keys]
            grad_y[:, keys] += (grad_scores.mT @ y[:, rows]) / scale[:, keys]
        grad_x += scale * (grad_y - y * (y * grad_y).sum(-1, keepdim=True))
        grad_z[part] = grad_x[:, shared:]
        if shared:
            grad_prefix[:shared] += grad_x[:, :shared].sum(0)
    return [x for x in (grad_z, grad_v.tril(), grad_gate, grad_prefix) if x is not None]

"""
The static layer in plain torch, for any device.

It takes a few windows at a time, so that the intermediate tensors are of bounded size.
"""

from collections.abc import Iterator

import torch

from ..instructions import multiplies


VALUES = 1 << 24  # values of the windows that are computed at a time
CACHED = 1 << 20  # the same on a CPU: 1.8 times as fast, because they fit in its cache


def _dtype(features: torch.Tensor) -> torch.dtype:
    """
    The dtype of the products: in float16 a sum might overflow, although the result does not, and CPUs without
    instructions for bfloat16 are slow.
    """
    slow = features.device.type == "cpu" and features.dtype == torch.bfloat16 and not multiplies(features.dtype)
    return torch.float32 if slow or features.dtype == torch.float16 else features.dtype


def _pieces(features: torch.Tensor, width: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yields a few windows: their slice, their contextual columns and their gate."""
    windows, context, _ = features.shape
    values = CACHED if features.device.type == "cpu" else VALUES
    size = max(values // (context * max(context, width)), 1)
    for start in range(0, windows, size):
        part = slice(start, min(start + size, windows))
        yield part, features[part, :, :width].to(_dtype(features)), features[part, :, width : 2 * width]


def _mix(v: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """v x of each window. (`matmul` would copy x.)"""
    return torch.bmm(v.expand(x.shape[0], -1, -1), x)


def static_mixing_eager(features: torch.Tensor, v: torch.Tensor, width: int, out: torch.Tensor) -> None:
    """
    Writes gate * (v x) to `out` (W, C, width), which may be the gate: see
    [`subquad_kernels.static_mixing`].
    """
    v = v.to(features.dtype).to(_dtype(features))
    for part, x, gate in _pieces(features, width):
        torch.mul(_mix(v, x), gate, out=out[part])


def static_mixing_eager_backward(
    grad: torch.Tensor, features: torch.Tensor, v: torch.Tensor, width: int
) -> list[torch.Tensor]:
    """Gradients of features and v."""
    dtype = _dtype(features)
    weights = v.to(features.dtype).to(dtype)
    grad_features = features.new_empty(features.shape)
    grad_v = v.new_zeros(v.shape, dtype=torch.promote_types(dtype, torch.float32))
    for part, x, gate in _pieces(features, width):
        grad_gated = grad[part, :, :width].to(dtype)
        torch.mul(_mix(weights, x), grad_gated, out=grad_features[part, :, width : 2 * width])
        grad_mixed = grad_gated * gate
        grad_features[part, :, :width] = _mix(weights.mT, grad_mixed)
        grad_v += torch.bmm(grad_mixed, x.mT).sum(0, dtype=grad_v.dtype)
    grad_features[..., 2 * width :] = grad[..., width:]
    return [grad_features, grad_v]

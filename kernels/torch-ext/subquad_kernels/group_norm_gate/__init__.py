"""The norm of each head and the gate after it, of Eagle (RWKV-5), Finch (RWKV-6) and Goose (RWKV-7)."""

import torch

from ..backend import choose_backend
from ..checks import check_tensors
from ..shortcuts import shortcut
from .custom_ops import _group_norm_gate
from .eager import group_norm_gate_eager
from .reference import group_norm_gate_reference


BACKENDS = ("eager", "triton")


def group_norm_gate(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    added: torch.Tensor | None = None,
    *,
    activation: str | None = "silu",
    backend: str = "auto",
) -> torch.Tensor:
    """
    LayerNorm of each head, followed by a gate: equations 7 and 20 of arXiv:2404.05892. RWKV-7 (arXiv:2503.14456) adds
    a term before the gate, which has no activation:

        out = (LayerNorm(x) * weight + bias + added) * activation(gate),
        LayerNorm(x) = (x - mean) / sqrt(variance + eps)

    The mean and the population variance are over the V values of a head. The norm is computed in float32 for any
    dtypes, also under autocast.

    Args:
        x: (..., H, V).
        gate: (..., H * V).
        weight: (H * V).
        bias: (H * V).
        eps: added to the variance.
        added: (..., H, V); None means zero.
        activation: `"silu"`, or None for none.
        backend: `"auto"`, `"triton"` (also computes the gate in float32) or `"eager"` (the gate in its own dtype).

    Returns:
        out in the shape and dtype of gate.

    Raises:
        ValueError: if a shape, a dtype or a device does not fit, or the activation has another name, before any work.
    """
    _check(x, gate, weight, bias, added)
    if activation not in ("silu", None):
        raise ValueError(f"`activation` must be 'silu' or None, got {activation!r}.")
    backend = choose_backend("group_norm_gate", backend, BACKENDS, x)
    arguments = x, gate, weight, bias, added, eps, activation is not None
    # package only
    if backend == "reference":
        return group_norm_gate_reference(*arguments).to(gate.dtype)
    if backend == "eager":
        # package only
        if (done := shortcut("group_norm_gate", *arguments)) is not None:
            return done
        return group_norm_gate_eager(*arguments)
    return _group_norm_gate(*arguments, backend)


def _check(x, gate, weight, bias, added):
    if x.dim() < 2 or x.shape[-1] == 0 or x.shape[-2] == 0:
        raise ValueError(f"`x` must be (..., heads >= 1, size >= 1), got {tuple(x.shape)}.")
    width = x.shape[-2] * x.shape[-1]
    expected = {
        "x": (x, x.shape),
        "gate": (gate, (*x.shape[:-2], width)),
        "weight": (weight, (width,)),
        "bias": (bias, (width,)),
        "added": (added, x.shape),
    }
    check_tensors(expected, "x", x)

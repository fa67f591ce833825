"""The gated norm of the heads in plain torch."""

import torch
import torch.nn.functional as F


def group_norm_gate_eager(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    added: torch.Tensor | None,
    eps: float,
    silu: bool,
) -> torch.Tensor:
    """
    Computes [`subquad_kernels.group_norm_gate`] with the norm in float32 (float64 if x is) and the gate in its own
    dtype.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    # torch's group_norm is half as fast as this on a CPU.
    normed = F.layer_norm(x.to(dtype), x.shape[-1:], eps=eps).reshape(gate.shape)
    normed = torch.addcmul(bias.to(dtype), normed, weight.to(dtype))
    if added is not None:
        normed = normed + added.reshape(gate.shape)
    return normed.to(gate.dtype) * (F.silu(gate) if silu else gate)


def group_norm_gate_eager_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    added: torch.Tensor | None,
    eps: float,
    silu: bool,
) -> list[torch.Tensor]:
    """Gradients of x, gate, weight, bias and `added`, if given, computed in float32 (float64 if x is)."""
    heads, size = x.shape[-2:]
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = x.reshape(-1, heads, size).to(dtype)
    g, grad = (tensor.reshape(rows.shape).to(dtype) for tensor in (gate, grad))
    w, b = (tensor.to(dtype).view(heads, size) for tensor in (weight, bias))

    centred = rows - rows.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    normed = centred * rstd
    scaled = normed * w + b
    if added is not None:
        scaled = scaled + added.reshape(rows.shape)
    grad_gate, grad_scaled = grad * scaled, grad * g
    if silu:
        sigmoid = torch.sigmoid(g)
        grad_gate, grad_scaled = grad_gate * sigmoid * (1 + g * (1 - sigmoid)), grad_scaled * sigmoid
    grad_normed = grad_scaled * w
    projected = normed * (grad_normed * normed).mean(-1, keepdim=True)
    grad_x = rstd * (grad_normed - grad_normed.mean(-1, keepdim=True) - projected)
    grad_weight, grad_bias = (grad_scaled * normed).sum(0).flatten(), grad_scaled.sum(0).flatten()
    grads = [grad_x.view(x.shape), grad_gate.view(gate.shape), grad_weight, grad_bias]
    return grads if added is None else [*grads, grad_scaled.view(x.shape)]

"""The norm of each head and the gate after it, of Eagle (RWKV-5) and Finch (RWKV-6)."""

import torch

from ..backend import choose_backend, custom_op, dispatch
from .eager import group_norm_gate_eager, group_norm_gate_eager_backward
from .reference import group_norm_gate_reference


BACKENDS = ("eager", "reference", "triton")


@custom_op("group_norm_gate", mutates_args=())
def _group_norm_gate(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, backend: str
) -> torch.Tensor:
    def triton():
        from .triton_kernels import group_norm_gate_triton

        return group_norm_gate_triton(x, gate, weight, bias, eps)

    def eager():
        return group_norm_gate_eager(x, gate, weight, bias, eps).contiguous()

    return dispatch("group_norm_gate", backend, x, triton, eager)


@_group_norm_gate.register_fake
def _(x, gate, weight, bias, eps, backend):
    return gate.new_empty(gate.shape)


@custom_op("group_norm_gate_backward", mutates_args=())
def _group_norm_gate_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    backend: str,
) -> list[torch.Tensor]:
    def triton():
        from .triton_kernels import group_norm_gate_triton_backward

        return group_norm_gate_triton_backward(grad, x, gate, weight, bias, eps)

    def eager():
        return group_norm_gate_eager_backward(grad, x, gate, weight, bias, eps)

    return dispatch("group_norm_gate", backend, x, triton, eager)


@_group_norm_gate_backward.register_fake
def _(grad, x, gate, weight, bias, eps, backend):
    return [tensor.new_empty(tensor.shape) for tensor in (x, gate, weight, bias)]


def _setup_context(ctx, inputs, output):
    *tensors, ctx.eps, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    return (*_group_norm_gate_backward(grad, *ctx.saved_tensors, ctx.eps, ctx.backend), None, None)


_group_norm_gate.register_autograd(_backward, setup_context=_setup_context)


def group_norm_gate(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """
    LayerNorm of each head, with a gate after it (equations 7 and 20 of arXiv:2404.05892):

        out = (LayerNorm(x) * weight + bias) * silu(gate),    LayerNorm(x) = (x - mean) / sqrt(variance + eps)

    with mean and population variance over the V values of a head. The norm is computed in float32 whatever the dtypes,
    under autocast too.

    Args:
        x: (..., H, V).
        gate: (..., H * V).
        weight: (H * V).
        bias: (H * V).
        eps: added to the variance.
        backend: `"auto"`, `"triton"` (the gate too in float32), `"eager"` (the gate in its dtype) or `"reference"`
            (everything in the dtype of the inputs).

    Returns:
        out in the shape and dtype of gate.

    Raises:
        ValueError: where a shape, a dtype or a device does not fit, before any work.
    """
    check(x, gate, weight, bias)
    backend = choose_backend("group_norm_gate", backend, BACKENDS, x)
    if backend == "reference":
        return group_norm_gate_reference(x, gate, weight, bias, eps).to(gate.dtype)
    if backend == "eager":
        return group_norm_gate_eager(x, gate, weight, bias, eps)
    return _group_norm_gate(x, gate, weight, bias, eps, backend)


def check(x, gate, weight, bias):
    """
    Raises:
        ValueError: where an argument of [`group_norm_gate`] does not fit x.
    """
    if x.dim() < 2 or x.shape[-1] == 0 or x.shape[-2] == 0:
        raise ValueError(f"`x` must be (..., heads >= 1, size >= 1), got {tuple(x.shape)}.")
    width = x.shape[-2] * x.shape[-1]
    for name, tensor, shape in (
        ("gate", gate, (*x.shape[:-2], width)),
        ("weight", weight, (width,)),
        ("bias", bias, (width,)),
        ("x", x, x.shape),
    ):
        if tensor.shape != shape:
            raise ValueError(f"`{name}` must have shape {tuple(shape)}, got {tuple(tensor.shape)}.")
        if not tensor.is_floating_point():
            raise ValueError(f"`{name}` must be floating point, got {tensor.dtype}.")
        if tensor.device != x.device:
            raise ValueError(f"`{name}` is on {tensor.device}, `x` on {x.device}.")

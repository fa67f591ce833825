"""The gated norm of the heads as a custom operator, with its backward pass."""

from ..registration import custom_op, register_backward
from .eager import group_norm_gate_eager, group_norm_gate_eager_backward


def _triton(*inputs):
    from .triton_kernels import group_norm_gate_triton

    return group_norm_gate_triton(*inputs)


def _triton_backward(*inputs):
    from .triton_kernels import group_norm_gate_triton_backward

    return group_norm_gate_triton_backward(*inputs)


_group_norm_gate = custom_op(
    "group_norm_gate",
    eager=group_norm_gate_eager,
    triton=_triton,
    fake=lambda x, gate, weight, bias, eps: gate.new_empty(gate.shape),
)
_group_norm_gate_backward = register_backward(
    "group_norm_gate", _group_norm_gate, eager=group_norm_gate_eager_backward, triton=_triton_backward, gradients=4
)

"""The gated norm of the heads as a custom operator."""

from ..custom_ops import custom_op
from .eager import group_norm_gate_eager, group_norm_gate_eager_backward


def _triton():
    from .triton_kernels import group_norm_gate_triton, group_norm_gate_triton_backward

    return group_norm_gate_triton, group_norm_gate_triton_backward


_group_norm_gate = custom_op(
    "group_norm_gate",
    eager=group_norm_gate_eager,
    eager_backward=group_norm_gate_eager_backward,
    triton=_triton,
    fake=lambda x, gate, weight, bias, added, eps, silu: gate.new_empty(gate.shape),
    gradients=5,
)

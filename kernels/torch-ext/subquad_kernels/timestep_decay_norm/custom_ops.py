"""The norm as custom operators: for a sequence, and for a single token."""

from ..backend import widest
from ..custom_ops import custom_op
from .eager import (
    timestep_decay_norm_eager,
    timestep_decay_norm_eager_backward,
    timestep_decay_norm_step_inplace,
)
from .strips import shape_of_entering, strip_size


def _triton():
    from .triton_kernels import timestep_decay_norm_triton, timestep_decay_norm_triton_backward

    def forward(x, weight, bias, initial_state, starts, real, groups, *numbers):
        tensors = x, weight, bias, initial_state, starts, real
        return timestep_decay_norm_triton(*tensors, groups, *numbers, strip_size(x.shape[-1], groups))

    def backward(grad, grad_state, entering, x, weight, bias, initial_state, starts, real, groups, *numbers):
        tensors = grad, grad_state, x, weight, bias, initial_state, entering, starts, real
        return timestep_decay_norm_triton_backward(*tensors, groups, *numbers, strip_size(x.shape[-1], groups))

    return forward, backward


def _triton_step():
    from .triton_kernels import timestep_decay_norm_triton_step

    return (timestep_decay_norm_triton_step,)


def _fake(x, weight, bias, initial_state, starts, real, groups, beta1, beta2, eps):
    dtype = widest(x, weight, bias, initial_state)
    state = x.new_empty(x.shape[0], 3, groups, dtype=dtype)
    return x.new_empty(x.shape), state, x.new_empty(shape_of_entering(x, groups), dtype=dtype)


_timestep_decay_norm = custom_op(
    "timestep_decay_norm",
    eager=timestep_decay_norm_eager,
    eager_backward=timestep_decay_norm_eager_backward,
    triton=_triton,
    fake=_fake,
    gradients=4,
    outputs=3,
    saved=1,
)
_timestep_decay_norm_step = custom_op(
    "timestep_decay_norm_step",
    eager=timestep_decay_norm_step_inplace,
    triton=_triton_step,
    fake=lambda x, *others: x.new_empty(x.shape),
    mutates_args=("new_state",),
)

"""The moving average as custom operators: a sequence, with its backward pass, and a step of one token."""

from ..backend import widest
from ..registration import custom_op, register_backward
from .eager import cema_chunked, cema_chunked_backward, cema_step_inplace


def _triton(*inputs):
    from .triton_kernels import cema_triton

    return cema_triton(*inputs)


def _triton_backward(*inputs):
    from .triton_kernels import cema_triton_backward

    return cema_triton_backward(*inputs)


def _triton_step(*inputs):
    from .triton_kernels import cema_triton_step

    return cema_triton_step(*inputs)


def _fake(x, alpha, delta, theta, gamma, initial_state, starts, real):
    dtype = widest(x, alpha, delta, theta, gamma, initial_state)
    return x.new_empty(x.shape), x.new_empty(x.shape[0], *gamma.shape, dtype=dtype)


def _fake_step(x, alpha, delta, theta, gamma, state, new_state, starts, real):
    return x.new_empty(x.shape)


_cema = custom_op("cema", eager=cema_chunked, triton=_triton, fake=_fake)
_cema_backward = register_backward(
    "cema", _cema, eager=cema_chunked_backward, triton=_triton_backward, outputs=2, gradients=6
)
_cema_step = custom_op(
    "cema_step", eager=cema_step_inplace, triton=_triton_step, fake=_fake_step, mutates_args=("new_state",)
)

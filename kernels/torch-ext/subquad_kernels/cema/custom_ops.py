"""The moving average as custom operators: for a sequence, and for a single token."""

from ..backend import widest
from ..custom_ops import custom_op
from .eager import cema_chunked, cema_chunked_backward, cema_step_inplace


def _triton():
    from .triton_kernels import cema_triton, cema_triton_backward

    return cema_triton, cema_triton_backward


def _triton_step():
    from .triton_kernels import cema_triton_step

    return (cema_triton_step,)


def _fake(x, alpha, delta, theta, gamma, initial_state, starts, real):
    dtype = widest(x, alpha, delta, theta, gamma, initial_state)
    return x.new_empty(x.shape), x.new_empty(x.shape[0], *gamma.shape, dtype=dtype)


_cema = custom_op(
    "cema",
    eager=cema_chunked,
    eager_backward=cema_chunked_backward,
    triton=_triton,
    fake=_fake,
    gradients=6,
    outputs=2,
)
_cema_step = custom_op(
    "cema_step",
    eager=cema_step_inplace,
    triton=_triton_step,
    fake=lambda x, *others: x.new_empty(x.shape),
    mutates_args=("new_state",),
)

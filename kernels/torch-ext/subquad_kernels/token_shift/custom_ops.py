"""The token shift as a custom operator, with its backward pass."""

from ..registration import custom_op, register_backward
from .eager import token_shift_eager, token_shift_eager_backward


def _triton(*inputs):
    from .triton_kernels import token_shift_triton

    return token_shift_triton(*inputs)


def _triton_backward(*inputs):
    from .triton_kernels import token_shift_triton_backward

    return token_shift_triton_backward(*inputs)


_token_shift = custom_op(
    "token_shift",
    eager=token_shift_eager,
    triton=_triton,
    fake=lambda x, state, mu, offset, starts: x.new_empty(mu.shape[0], *x.shape),
)
_token_shift_backward = register_backward(
    "token_shift", _token_shift, eager=token_shift_eager_backward, triton=_triton_backward, gradients=4
)

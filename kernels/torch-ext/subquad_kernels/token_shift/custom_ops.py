"""The token shift as a custom operator."""

from ..custom_ops import custom_op
from .eager import token_shift_eager, token_shift_eager_backward


def _triton():
    from .triton_kernels import token_shift_triton, token_shift_triton_backward

    return token_shift_triton, token_shift_triton_backward


_token_shift = custom_op(
    "token_shift",
    eager=token_shift_eager,
    eager_backward=token_shift_eager_backward,
    triton=_triton,
    fake=lambda x, state, mu, offset, starts: x.new_empty(mu.shape[0], *x.shape),
    gradients=4,
)

"""The contextualizer as a custom operator, with its backward pass."""

from ..registration import custom_op, register_backward
from .eager import contextualizer_eager, contextualizer_eager_backward


def _triton(*inputs):
    from .triton_kernels import contextualizer_triton

    return contextualizer_triton(*inputs)


def _triton_backward(*inputs):
    from .triton_kernels import contextualizer_triton_backward

    return contextualizer_triton_backward(*inputs)


_contextualizer = custom_op(
    "contextualizer",
    eager=contextualizer_eager,
    triton=_triton,
    fake=lambda z, v, gate, prefix, queries: z.new_empty(z.shape[0], queries, z.shape[2]),
)
_contextualizer_backward = register_backward(
    "contextualizer", _contextualizer, eager=contextualizer_eager_backward, triton=_triton_backward, gradients=4
)

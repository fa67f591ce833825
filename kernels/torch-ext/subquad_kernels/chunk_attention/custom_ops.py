"""Chunk attention as custom operators: for a sequence, and for a single token."""

from ..custom_ops import custom_op
from .eager import chunk_attention_eager, chunk_attention_eager_backward, chunk_attention_masked


def _triton_step():
    from .triton_kernels import chunk_attention_triton_step

    return (chunk_attention_triton_step,)


_chunk_attention = custom_op(
    "chunk_attention",
    eager=chunk_attention_eager,
    eager_backward=chunk_attention_eager_backward,
    fake=lambda q, k, v, first, chunk_size, aligned: v.new_empty(*q.shape[:3], v.shape[3]),
    gradients=3,
)
_chunk_attention_step = custom_op(
    "chunk_attention_step",
    eager=chunk_attention_masked,
    triton=_triton_step,
    fake=lambda q, k, v, mask, indices: v.new_empty(*q.shape[:3], v.shape[3]),
)

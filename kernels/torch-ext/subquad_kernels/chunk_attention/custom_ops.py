"""Chunk attention as a custom operator, with its backward pass."""

from ..registration import custom_op, register_backward
from .eager import chunk_attention_eager, chunk_attention_eager_backward


_chunk_attention = custom_op(
    "chunk_attention",
    eager=chunk_attention_eager,
    fake=lambda q, k, v, first, chunk_size, aligned: v.new_empty(*q.shape[:3], v.shape[3]),
)
_chunk_attention_backward = register_backward(
    "chunk_attention", _chunk_attention, eager=chunk_attention_eager_backward, gradients=3
)

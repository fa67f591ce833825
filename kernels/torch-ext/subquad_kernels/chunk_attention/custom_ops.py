"""Chunk attention as a custom operator."""

from ..registration import custom_op
from .eager import chunk_attention_eager, chunk_attention_eager_backward


_chunk_attention = custom_op(
    "chunk_attention",
    eager=chunk_attention_eager,
    eager_backward=chunk_attention_eager_backward,
    fake=lambda q, k, v, first, chunk_size, aligned: v.new_empty(*q.shape[:3], v.shape[3]),
    gradients=3,
)

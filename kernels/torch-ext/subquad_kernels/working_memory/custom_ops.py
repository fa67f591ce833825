"""The working memory as custom operators: for a sequence, and for a single token."""

from ..backend import widest
from ..custom_ops import custom_op
from .eager import working_memory_chunked, working_memory_chunked_backward, working_memory_step


def _triton():
    from .triton_kernels import working_memory_triton, working_memory_triton_backward

    return working_memory_triton, working_memory_triton_backward


def _triton_step():
    from .triton_kernels import working_memory_triton_step

    return (working_memory_triton_step,)


def _fake(q, k, v, memory, normalizer, leaving, begins, reads, chunk_size):
    dtype, shape = widest(q, k, v, memory, normalizer), (*q.shape[:2], q.shape[-1])
    states = v.new_empty(*shape, v.shape[-1], dtype=dtype), v.new_empty(shape, dtype=dtype)
    return v.new_empty(*q.shape[:-1], v.shape[-1]), *states


_working_memory = custom_op(
    "working_memory",
    eager=working_memory_chunked,
    eager_backward=working_memory_chunked_backward,
    triton=_triton,
    fake=_fake,
    gradients=5,
    outputs=3,
)
_working_memory_step = custom_op(
    "working_memory_step",
    eager=working_memory_step,
    triton=_triton_step,
    fake=lambda q, k, v, *others: v.new_empty(*q.shape[:-1], v.shape[-1]),
    mutates_args=("memory", "normalizer"),
)

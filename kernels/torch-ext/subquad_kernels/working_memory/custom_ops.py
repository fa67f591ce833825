"""The working memory as custom operators: a sequence, with its backward pass, and a step of one token."""

from ..backend import widest
from ..registration import custom_op, register_backward
from .eager import assert_chunks, working_memory_chunked, working_memory_chunked_backward, working_memory_step


def _triton(q, k, v, memory, normalizer, leaving, begins, reads, chunk_size):
    from .triton_kernels import working_memory_triton

    assert_chunks(leaving, begins, reads, k.shape[2], chunk_size)
    return working_memory_triton(q, k, v, memory, normalizer, leaving, begins, reads, chunk_size)


def _triton_backward(*inputs):
    from .triton_kernels import working_memory_triton_backward

    return working_memory_triton_backward(*inputs)


def _triton_step(*inputs):
    from .triton_kernels import working_memory_triton_step

    return working_memory_triton_step(*inputs)


def _fake(q, k, v, memory, normalizer, leaving, begins, reads, chunk_size):
    dtype, shape = widest(q, k, v, memory, normalizer), (*q.shape[:2], q.shape[-1])
    states = v.new_empty(*shape, v.shape[-1], dtype=dtype), v.new_empty(shape, dtype=dtype)
    return v.new_empty(*q.shape[:-1], v.shape[-1]), *states


def _fake_step(q, k, v, memory, normalizer, leaving, begins, reads, chunk_size):
    return v.new_empty(*q.shape[:-1], v.shape[-1])


_working_memory = custom_op("working_memory", eager=working_memory_chunked, triton=_triton, fake=_fake)
_working_memory_backward = register_backward(
    "working_memory",
    _working_memory,
    eager=working_memory_chunked_backward,
    triton=_triton_backward,
    outputs=3,
    gradients=5,
)
_working_memory_step = custom_op(
    "working_memory_step",
    eager=working_memory_step,
    triton=_triton_step,
    fake=_fake_step,
    mutates_args=("memory", "normalizer"),
)

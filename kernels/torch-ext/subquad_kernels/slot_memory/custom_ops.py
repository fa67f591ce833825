"""The slot memory as custom operators: for a sequence, for a single token, and for the state alone."""

from ..backend import widest
from ..custom_ops import custom_op
from ..documents import count_documents
from .eager import slot_memory_chunked, slot_memory_chunked_backward, slot_memory_step_inplace, slot_state_chunked


def _triton():
    from .triton_kernels import slot_memory_triton, slot_memory_triton_backward

    return slot_memory_triton, slot_memory_triton_backward


def _triton_step():
    from .triton_kernels import slot_memory_triton_step

    return (slot_memory_triton_step,)


def _triton_state():
    from .triton_kernels import slot_memory_triton_state

    return (lambda state, k, v, log_f: slot_memory_triton_state(k, v, log_f, state, None),)


def _fake(q, k, v, log_f, initial_state, cu_seqlens):
    dtype = widest(q, k, v, log_f, initial_state)
    shape = count_documents(cu_seqlens, k.shape[0]), k.shape[2], log_f.shape[-1], k.shape[-1] + v.shape[-1]
    return v.new_empty(v.shape), v.new_empty(shape, dtype=dtype), log_f.new_empty(log_f.shape, dtype=dtype)


def _fake_state(state, k, v, log_f):
    shape = k.shape[0], k.shape[2], log_f.shape[-1], k.shape[-1] + v.shape[-1]
    return v.new_empty(shape, dtype=widest(k, v, log_f, state))


_slot_memory = custom_op(
    "slot_memory",
    eager=slot_memory_chunked,
    eager_backward=slot_memory_chunked_backward,
    triton=_triton,
    fake=_fake,
    gradients=5,
    outputs=3,
    saved=1,
)
_slot_memory_step = custom_op(
    "slot_memory_step",
    eager=slot_memory_step_inplace,
    triton=_triton_step,
    fake=lambda q, k, v, *others: v.new_empty(v.shape),
    mutates_args=("new_state",),
)
_slot_memory_state = custom_op("slot_memory_state", eager=slot_state_chunked, triton=_triton_state, fake=_fake_state)

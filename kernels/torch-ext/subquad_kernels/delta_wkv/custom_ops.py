"""The recurrence of Goose as custom operators: for a sequence, and for a single token."""

from ..backend import widest
from ..custom_ops import custom_op
from ..documents import count_documents
from .eager import delta_wkv_chunked, delta_wkv_chunked_backward, delta_wkv_step_inplace


def _triton():
    from .triton_kernels import delta_wkv_triton, delta_wkv_triton_backward

    return delta_wkv_triton, delta_wkv_triton_backward


def _triton_step():
    from .triton_kernels import delta_wkv_triton_step

    return (delta_wkv_triton_step,)


def _fake(r, k, v, log_w, kappa, a, initial_state, cu_seqlens, out_dtype):
    shape = count_documents(cu_seqlens, k.shape[0]), v.shape[2], v.shape[3], k.shape[3]
    state = v.new_empty(shape, dtype=widest(r, k, v, log_w, kappa, a, initial_state))
    return v.new_empty(v.shape, dtype=out_dtype), state


def _fake_step(r, k, v, log_w, kappa, a, state, new_state, indices, out_dtype):
    return v.new_empty(v.shape, dtype=out_dtype)


_delta_wkv = custom_op(
    "delta_wkv",
    eager=delta_wkv_chunked,
    eager_backward=delta_wkv_chunked_backward,
    triton=_triton,
    fake=_fake,
    gradients=7,
    outputs=2,
    hints=1,
)
_delta_wkv_step = custom_op(
    "delta_wkv_step",
    eager=delta_wkv_step_inplace,
    triton=_triton_step,
    fake=_fake_step,
    mutates_args=("new_state",),
)

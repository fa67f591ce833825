"""WKV as custom operators: for a sequence, and for a single token."""

from ..backend import widest
from ..custom_ops import custom_op
from ..documents import count_documents
from .eager import wkv_chunked, wkv_chunked_backward, wkv_step_inplace


def _triton():
    from .triton_kernels import wkv_triton, wkv_triton_backward

    return wkv_triton, wkv_triton_backward


def _triton_step():
    from .triton_kernels import wkv_triton_step

    return (wkv_triton_step,)


def _fake(r, k, v, log_w, u, initial_state, cu_seqlens, masks, out_dtype):
    shape = count_documents(cu_seqlens, k.shape[0]), *k.shape[2:], v.shape[-1]
    state = v.new_empty(shape, dtype=widest(r, k, v, log_w, u, initial_state))
    return v.new_empty(v.shape, dtype=out_dtype), state


def _fake_step(r, k, v, log_w, u, state, new_state, indices, out_dtype):
    return v.new_empty(v.shape, dtype=out_dtype)


_wkv = custom_op(
    "wkv",
    eager=wkv_chunked,
    eager_backward=wkv_chunked_backward,
    triton=_triton,
    fake=_fake,
    gradients=6,
    outputs=2,
)
_wkv_step = custom_op(
    "wkv_step",
    eager=wkv_step_inplace,
    triton=_triton_step,
    fake=_fake_step,
    mutates_args=("new_state",),
)

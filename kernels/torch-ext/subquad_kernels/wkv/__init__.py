"""WKV: the linear attention of Eagle (RWKV-5) and Finch (RWKV-6)."""

import torch

from ..backend import cast, choose_backend, in_wide_dtype, of_widest, step_states, widest, without_autocast
from ..checks import check_inplace, check_sequences, check_tensors, needs_gradient
from ..documents import count_documents
from ..shortcuts import shortcut
from ..state_pool import check_indices, count_states, in_copies
from .custom_ops import _wkv, _wkv_step
from .eager import only_token, wkv_step, wkv_step_in_pool
from .masks import masks_for
from .reference import wkv_reference


BACKENDS = ("eager", "triton")


def wkv(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    u: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    inplace: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Weighted key-value recurrence with one matrix-valued state per head, equations 8 and 9 (Eagle), 21 and 22 (Finch)
    of arXiv:2404.05892:

        out_t = r_t (S_{t-1} + diag(u) k_tᵀ v_t),    S_t = diag(w_t) S_{t-1} + k_tᵀ v_t,    w_t = exp(log_w_t)

    The state is float32 for any dtype of r, k and v, also under autocast (float64 if an input is float64). Plain torch
    computes in the dtype of the state. The Triton kernels multiply bfloat16 inputs in bfloat16, float16 inputs in tf32
    and float32 inputs in float32, and accumulate in float32.

    Args:
        r: receptance, (B, T, H, K), T at least 1. It is not scaled.
        k: key, (B, T, H, K).
        v: value, (B, T, H, V).
        log_w: logarithm of the decay, at most 0: (B, T, H, K) for one decay per token (Finch), (H, K) for a static
            decay (Eagle).
        u: bonus of the current token, (H, K).
        initial_state: state before the first token, (B, H, K, V), or (N, H, K, V) with `cu_seqlens`; None means zeros.
        cu_seqlens: int32 or int64 (N + 1), the boundaries 0, ..., T of N documents packed into one row (B = 1); each
            document starts from its own initial state.
        indices: int64 (B), or (N) with `cu_seqlens`. Then `initial_state` is a pool (states, H, K, V): row or document
            n starts from its state indices[n], and the state after the last token is written there. The pool must be
            float32 and contiguous except for the first stride, and is returned. Nothing may need a gradient.
        inplace: write the state after the last token into `initial_state` and return that tensor. It must be float32
            and contiguous, and nothing may need a gradient.
        out_dtype: dtype of out; None means the dtype of v.
        backend: `"auto"`, `"triton"` or `"eager"` (plain torch, parallel over time).

    Returns:
        out (B, T, H, V), and the state after the last token of each row or document, in float32 (float64).

    Raises:
        ValueError: if a shape or a dtype does not fit, before any work. (On a GPU, wrong values of `cu_seqlens` fail
            an assertion on the device, which avoids a synchronization.)
    """
    _check(r, k, v, log_w, u, initial_state, cu_seqlens, indices, inplace)
    floats = r, k, v, log_w, u, initial_state
    backend = choose_backend("wkv", backend, BACKENDS, of_widest(*floats))
    return _run(*floats, cu_seqlens, indices, inplace=inplace, out_dtype=out_dtype or v.dtype, backend=backend)


def wkv_state(
    state: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, log_w: torch.Tensor, *, backend: str = "auto"
) -> torch.Tensor:
    """
    Only the final state of [`wkv`], after the tokens k, v, log_w (B, T, H, .), starting from `state` (B, H, K, V);
    None means zeros.
    """
    return wkv(k, k, v, log_w, k.new_zeros(k.shape[2:]), state, backend=backend)[1]


def _run(r, k, v, log_w, u, initial_state, cu_seqlens, indices, *, inplace, out_dtype, backend):
    floats = r, k, v, log_w, u, initial_state
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(k.device)
    one_token = k.shape[1] == 1 and cu_seqlens is None
    has_kernels = backend in ("auto", "triton")
    if one_token and has_kernels and not needs_gradient(*floats):
        in_place = inplace or indices is not None
        states = step_states(initial_state, in_place, v, (k.shape[0], *k.shape[2:], v.shape[-1]))
        return _wkv_step(r, k, v, log_w, u, *states, indices, out_dtype, backend), states[1]
    # package only
    if one_token and backend == "eager":
        done = shortcut("recurrence", r, k, v, log_w, None, None, u, initial_state, indices, inplace)
        if done is not None:
            return done[0].to(out_dtype), done[1]
    if indices is not None and one_token and backend == "eager":
        with without_autocast(k):
            out = wkv_step_in_pool(*only_token(r, k, v, log_w), u, initial_state, indices)
        return out.unsqueeze(1).to(out_dtype), initial_state
    if indices is not None:
        tokens, options = floats[:-1], {"inplace": False, "out_dtype": out_dtype, "backend": backend}
        return in_copies(lambda x: _run(*tokens, x, cu_seqlens, None, **options), initial_state, indices)
    # package only
    if backend == "reference":
        out, state = in_wide_dtype(wkv_reference, floats, cu_seqlens)
        return out.to(out_dtype), initial_state.copy_(state) if inplace else state
    if has_kernels or not one_token:
        masks = masks_for(r, k, v) if has_kernels else None
        out, state = _wkv(*floats, cu_seqlens, masks, out_dtype, backend)
    else:
        r, k, v, log_w, u, before = cast(widest(*floats), *floats)
        with without_autocast(k):
            overwritten = before if inplace and before is initial_state else None
            before = v.new_zeros(k.shape[0], *k.shape[2:], v.shape[-1]) if before is None else before
            out, state = wkv_step(*only_token(r, k, v, log_w), u, before, overwritten)
            out = out.unsqueeze(1)
        out = out.to(out_dtype)
    return out, initial_state.copy_(state) if inplace and state is not initial_state else state


def _check(r, k, v, log_w, u, initial_state, cu_seqlens, indices, inplace):
    check_sequences(k=k, v=v)
    batch, length, heads, key_size = k.shape
    documents = count_documents(cu_seqlens, batch)
    states = documents if indices is None else count_states(initial_state)
    expected = {
        "r": (r, (batch, length, heads, key_size)),
        "v": (v, (batch, length, heads, v.shape[-1])),
        "log_w": (log_w, (heads, key_size) if log_w.dim() == 2 else (batch, length, heads, key_size)),
        "u": (u, (heads, key_size)),
        "initial_state": (initial_state, (states, heads, key_size, v.shape[-1])),
    }
    check_tensors(expected, "k", k)
    if indices is not None:
        check_indices(indices, documents, initial_state, r, k, v, log_w, u)
    elif inplace:
        check_inplace(initial_state, r, k, v, log_w, u)

"""The recurrence of Goose (RWKV-7): a generalised delta rule."""

import torch
import torch.nn.functional as F

from ..backend import cast, choose_backend, in_wide_dtype, of_widest, step_states, widest, without_autocast
from ..checks import check_inplace, check_sequences, check_tensors, needs_gradient
from ..documents import count_documents
from ..shortcuts import shortcut
from ..state_pool import check_indices, count_states, in_copies
from .custom_ops import _delta_wkv, _delta_wkv_step
from .eager import delta_wkv_step, delta_wkv_step_in_pool
from .reference import delta_wkv_reference


BACKENDS = ("eager", "triton")


def delta_wkv(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    kappa: torch.Tensor,
    a: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    inplace: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Weighted key-value recurrence with one matrix-valued state per head, which can replace stored values
    (arXiv:2503.14456):

        S_t = S_{t-1} (diag(w_t) - kappa_t (a_t kappa_t)ᵀ) + v_t k_tᵀ,    out_t = S_t r_t,    w_t = exp(log_w_t)

    The state is float32 for any dtype of the inputs, also under autocast (float64 if an input is float64). Plain torch
    computes in the dtype of the state. The Triton kernels multiply bfloat16 inputs in bfloat16, float16 inputs in tf32
    and float32 inputs in float32, and accumulate in float32.

    A token with log_w, kappa and k of 0 leaves the state unchanged.

    Args:
        r: receptance, (B, T, H, K), T at least 1. It is not scaled.
        k: key to write, (B, T, H, K).
        v: value, (B, T, H, V).
        log_w: logarithm of the decay, (B, T, H, K), at most 0 and at least -5. In RWKV-7 it is at least -exp(-1/2).
        kappa: key to remove, (B, T, H, K), of length 1 or 0.
        a: in-context learning rate, the fraction to remove, (B, T, H, K), from 0 to 1.
        initial_state: state before the first token, (B, H, V, K), or (N, H, V, K) with `cu_seqlens`; None means zeros.
        cu_seqlens: int32 or int64 (N + 1), the boundaries 0, ..., T of N documents packed into one row (B = 1); each
            document starts from its own initial state.
        indices: int64 (B), or (N) with `cu_seqlens`. Then `initial_state` is a pool (states, H, V, K): row or document
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
    floats = r, k, v, log_w, kappa, a, initial_state
    _check(*floats, cu_seqlens, indices, inplace)
    backend = choose_backend("delta_wkv", backend, BACKENDS, of_widest(*floats))
    return _run(*floats, cu_seqlens, indices, inplace=inplace, out_dtype=out_dtype or v.dtype, backend=backend)


def delta_keys(
    k: torch.Tensor, a: torch.Tensor, k_k: torch.Tensor, k_a: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The two keys of [`delta_wkv`], to remove and to write, equations 5 to 7 of arXiv:2503.14456:

        kappa = (k * k_k) / |k * k_k|,    k~ = k * (1 + (a - 1) * k_a)

    The norm is over a head's channels, in float32 (float64 if k is).

    Args:
        k: (B, T, H, K).
        a: in-context learning rate, (B, T, H, K).
        k_k, k_a: (H, K).

    Returns:
        kappa and k~, both (B, T, H, K) in the dtype of k.

    Raises:
        ValueError: if a shape, a dtype or a device does not fit, before any work.
    """
    check_sequences(k=k)
    check_tensors({"k": (k, k.shape), "a": (a, k.shape), "k_k": (k_k, k.shape[2:]), "k_a": (k_a, k.shape[2:])}, "k", k)
    # package only
    if k.shape[1] == 1 and (done := shortcut("delta_keys", k, a, k_k, k_a)) is not None:
        return done
    kappa = k * k_k
    kappa = F.normalize(kappa.to(torch.promote_types(k.dtype, torch.float32)), dim=-1, eps=1e-12).to(k.dtype)
    return kappa, k * torch.addcmul(1 - k_a, a, k_a)


def delta_wkv_state(
    state: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    kappa: torch.Tensor,
    a: torch.Tensor,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """
    Only the final state of [`delta_wkv`], after the tokens k, v, log_w, kappa, a (B, T, H, .), starting from `state`
    (B, H, V, K); None means zeros.
    """
    return delta_wkv(k, k, v, log_w, kappa, a, state, backend=backend)[1]


def _run(r, k, v, log_w, kappa, a, initial_state, cu_seqlens, indices, *, inplace, out_dtype, backend):
    floats = r, k, v, log_w, kappa, a, initial_state
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(k.device)
    one_token = k.shape[1] == 1 and cu_seqlens is None
    has_kernels = backend in ("auto", "triton")
    if one_token and has_kernels and not needs_gradient(*floats):
        in_place = inplace or indices is not None
        states = step_states(initial_state, in_place, v, (k.shape[0], *v.shape[2:], k.shape[-1]))
        return _delta_wkv_step(*floats[:-1], *states, indices, out_dtype, backend), states[1]
    # package only
    if one_token and backend == "eager":
        done = shortcut("recurrence", *floats[:-1], None, initial_state, indices, inplace)
        if done is not None:
            return done[0].to(out_dtype), done[1]
    if indices is not None and one_token and backend == "eager":
        with without_autocast(k):
            out = delta_wkv_step_in_pool(*(x[:, 0] for x in floats[:-1]), initial_state, indices)
        return out.unsqueeze(1).to(out_dtype), initial_state
    if indices is not None:
        tokens, options = floats[:-1], {"inplace": False, "out_dtype": out_dtype, "backend": backend}
        return in_copies(lambda x: _run(*tokens, x, cu_seqlens, None, **options), initial_state, indices)
    # package only
    if backend == "reference":
        out, state = in_wide_dtype(delta_wkv_reference, floats, cu_seqlens)
        return out.to(out_dtype), initial_state.copy_(state) if inplace else state
    if has_kernels or not one_token:
        out, state = _delta_wkv(*floats, cu_seqlens, out_dtype, backend)
    else:
        *tokens, before = cast(widest(*floats), *floats)
        with without_autocast(k):
            overwritten = before if inplace and before is initial_state else None
            if before is None:
                before = tokens[0].new_zeros(k.shape[0], *v.shape[2:], k.shape[-1])
            out, state = delta_wkv_step(*(x[:, 0] for x in tokens), before, overwritten)
            out = out.unsqueeze(1)
        out = out.to(out_dtype)
    return out, initial_state.copy_(state) if inplace and state is not initial_state else state


def _check(r, k, v, log_w, kappa, a, initial_state, cu_seqlens, indices, inplace):
    check_sequences(k=k, v=v)
    batch, length, heads, key_size = k.shape
    documents = count_documents(cu_seqlens, batch)
    states = documents if indices is None else count_states(initial_state)
    expected = {
        "r": (r, k.shape),
        "v": (v, (batch, length, heads, v.shape[-1])),
        "log_w": (log_w, k.shape),
        "kappa": (kappa, k.shape),
        "a": (a, k.shape),
        "initial_state": (initial_state, (states, heads, v.shape[-1], key_size)),
    }
    check_tensors(expected, "k", k)
    if indices is not None:
        check_indices(indices, documents, initial_state, r, k, v, log_w, kappa, a)
    elif inplace:
        check_inplace(initial_state, r, k, v, log_w, kappa, a)

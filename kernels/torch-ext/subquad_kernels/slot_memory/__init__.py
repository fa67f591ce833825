"""Slot memory: the recurrence of Raven, in which a token writes to a few rows of a state and reads all of them."""

import torch

from ..backend import choose_backend, in_wide_dtype, of_widest, step_states
from ..checks import check_inplace, check_sequences, check_tensors, needs_gradient
from ..documents import count_documents
from ..shortcuts import shortcut
from ..state_pool import check_indices, count_states, in_copies
from .custom_ops import _slot_memory, _slot_memory_state, _slot_memory_step
from .reference import slot_memory_reference


BACKENDS = ("eager", "triton")


def slot_memory(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_f: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    inplace: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Recurrence of Raven (equations 6 and 18, appendix A.5). A head has M slots, each with a key and a value: the rows
    of one state S = [S_k, S_v]. A token decays the slots that it writes to and adds its key and value in the same
    proportion:

        S_t = f_t ⊙ S_{t-1} + (1 - f_t) [k_t, v_t]ᵀ,    f_t = exp(log_f_t)
        out_t = S_v,tᵀ softmax(S_k,t q_t)

    A slot whose log_f is 0 keeps its exact value. A token also reads its own write. Logits are not scaled, and
    slots that were never written to (zeros) take part.

    The state is float32 for any dtype of q, k and v, also under autocast (float64 if an input is float64). Plain torch
    computes in the dtype of the state. The Triton kernels multiply bfloat16 inputs in bfloat16, float16 inputs in tf32
    and float32 inputs in float32, and accumulate in float32.

    Args:
        q: query, (B, T, H, K), T at least 1.
        k: key, (B, T, H, K).
        v: value, (B, T, H, V).
        log_f: logarithm of the decay of each slot, at most 0, (B, T, H, M): 0 if the token does not write to the slot,
            -inf if it replaces the content.
        initial_state: state before the first token, (B, H, M, K + V), or (N, H, M, K + V) with `cu_seqlens`; None
            means zeros.
        cu_seqlens: int32 or int64 (N + 1), the boundaries 0, ..., T of N documents packed into one row (B = 1); each
            document starts from its own initial state.
        indices: int64 (B), or (N) with `cu_seqlens`. Then `initial_state` is a pool (states, H, M, K + V): row or
            document n starts from its state indices[n], and the state after the last token is written there. The pool
            must be float32 and contiguous except for the first stride, and is returned. Nothing may need a gradient.
        inplace: write the state after the last token into `initial_state` and return that tensor. It must be float32
            and contiguous, and nothing may need a gradient.
        backend: `"auto"`, `"triton"` or `"eager"` (plain torch, parallel over time).

    Returns:
        out (B, T, H, V) in the dtype of v, and the state after the last token of each row or document, in float32
        (float64).

    Raises:
        ValueError: if a shape or a dtype does not fit, before any work. (On a GPU, wrong values of `cu_seqlens` fail
            an assertion on the device, which avoids a synchronization.)
    """
    _check(q, k, v, log_f, initial_state, cu_seqlens, indices, inplace)
    floats = q, k, v, log_f, initial_state
    x = of_widest(*floats)
    backend = choose_backend("slot_memory", backend, BACKENDS, x)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(k.device)
    one_token = k.shape[1] == 1 and cu_seqlens is None and x.dtype != torch.float64 and not needs_gradient(*floats)
    if one_token and backend != "reference":
        return _step(*floats, indices, inplace, backend)
    if indices is not None:  # many tokens change nearly all slots
        options = {"cu_seqlens": cu_seqlens, "backend": backend}
        return in_copies(lambda states: slot_memory(q, k, v, log_f, states, **options), initial_state, indices)
    # package only
    if backend == "reference":
        out, state = in_wide_dtype(slot_memory_reference, floats, cu_seqlens)
        return out.to(v.dtype), initial_state.copy_(state) if inplace else state
    out, state, _ = _slot_memory(*floats, cu_seqlens, backend)
    return out, initial_state.copy_(state) if inplace else state


def slot_memory_state(
    state: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, log_f: torch.Tensor, *, backend: str = "auto"
) -> torch.Tensor:
    """
    Only the final state of [`slot_memory`], after the tokens k, v, log_f (B, T, H, .), starting from `state` (B, H, M,
    K + V); None means zeros.
    """
    _check(k, k, v, log_f, state, None)
    chosen = choose_backend("slot_memory", backend, BACKENDS, of_widest(k, v, log_f, state))
    if chosen == "reference" or needs_gradient(k, v, log_f, state):
        return slot_memory(k, k, v, log_f, state, backend=backend)[1]
    return _slot_memory_state(state, k, v, log_f, chosen)


def _step(q, k, v, log_f, initial_state, indices, inplace, backend):
    token = q, k, v, log_f
    states = initial_state, indices, inplace
    # package only
    if backend == "eager" and (done := shortcut("slot_memory", *token, *states)) is not None:
        return done
    shape = k.shape[0], k.shape[2], log_f.shape[-1], k.shape[-1] + v.shape[-1]
    states = step_states(initial_state, inplace or indices is not None, v, shape)
    return _slot_memory_step(*token, *states, indices, backend), states[1]


def _check(q, k, v, log_f, initial_state, cu_seqlens, indices=None, inplace=False):
    check_sequences(k=k, v=v, log_f=log_f)
    batch, length, heads, key_size = k.shape
    slots, value_size = log_f.shape[-1], v.shape[-1]
    documents = count_documents(cu_seqlens, batch)
    states = documents if indices is None else count_states(initial_state)
    expected = {
        "q": (q, (batch, length, heads, key_size)),
        "v": (v, (batch, length, heads, value_size)),
        "log_f": (log_f, (batch, length, heads, slots)),
        "initial_state": (initial_state, (states, heads, slots, key_size + value_size)),
    }
    check_tensors(expected, "k", k)
    if indices is not None:
        check_indices(indices, documents, initial_state, q, k, v, log_f)
    elif inplace:
        check_inplace(initial_state, q, k, v, log_f)

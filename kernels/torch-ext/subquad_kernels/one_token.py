"""One token of the recurrences, by the C library of `native.py`."""

import torch

from .native import library_for_heads, readable


def step_by_library(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    kappa: torch.Tensor | None,
    a: torch.Tensor | None,
    gate: torch.Tensor,
    bonus: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    initial_state: torch.Tensor | None,
    indices: torch.Tensor | None,
    inplace: bool,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """
    `gated_delta_wkv`, or without `kappa` `gated_wkv`, of T = 1 and arguments that were checked.

    Returns:
        out and the state, or None if the library is not available or cannot read these tensors.
    """
    pool = initial_state if indices is None else initial_state[:1]  # states may be any number of elements apart
    found = library_for_heads((v, r, k, kappa, a, gate, bonus, weight, bias))
    if (
        found is None
        or not found.fits_head(k.shape[-1])
        or not readable(torch.float32, log_w, pool)
        or not readable(torch.int64, indices)
    ):
        return None
    new_state = initial_state
    if not inplace and indices is None:
        shape = k.shape[-1:] + v.shape[-1:] if kappa is None else v.shape[-1:] + k.shape[-1:]
        new_state = v.new_empty((*k.shape[:1], *k.shape[2:3], *shape), dtype=torch.float32)
    token = r, k, v, log_w, kappa, a, gate, bonus, weight, bias, eps
    out = found.step(*token, initial_state, new_state, indices)
    return None if out is None else (out, new_state)


def slot_step_by_library(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_f: torch.Tensor,
    initial_state: torch.Tensor | None,
    indices: torch.Tensor | None,
    inplace: bool,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """As [`step_by_library`], `slot_memory` of T = 1. It changes a copy of the states if it may not change them."""
    pool = initial_state if indices is None else initial_state[:1]
    found = library_for_heads((v, q, k))
    if (
        found is None
        or not found.fits_head(k.shape[-1])
        or not found.fits_slots(log_f.shape[-1])
        or not readable(torch.float32, log_f, pool)
        or not readable(torch.int64, indices)
    ):
        return None
    state = initial_state
    if initial_state is None:
        state = v.new_zeros((*k.shape[:1], *log_f.shape[2:], k.shape[-1] + v.shape[-1]), dtype=torch.float32)
    elif not inplace and indices is None:
        state = initial_state.clone()
    out = found.slot_step(q, k, v, log_f, state, indices)
    return None if out is None else (out, state)

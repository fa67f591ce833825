"""One token of the operators, by the C library of `native.py`."""

import torch

from ..shortcuts import adds
from ..tracing import is_observed
from .native import library_for, library_for_heads, readable


# Size of a result from which on torch's threads are faster.
_MOST_VALUES = 2**17


@adds("recurrence")
def recurrence(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    kappa: torch.Tensor | None,
    a: torch.Tensor | None,
    bonus: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    indices: torch.Tensor | None,
    inplace: bool,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """
    `delta_wkv`, or without `kappa` `wkv`, for T = 1 and checked arguments.

    Returns:
        out in float32 and the state, or None if the library is not available or cannot read these tensors.
    """
    pool = initial_state if indices is None else initial_state[:1]  # states may have any stride
    found = library_for_heads((v, r, k, kappa, a))
    if (
        found is None
        or not found.fits_head(k.shape[-1])
        or not readable(torch.float32, log_w, pool)
        or not (bonus is None or (bonus.dtype in found.dtypes and readable(bonus.dtype, bonus)))
        or not readable(torch.int64, indices)
    ):
        return None
    new_state = initial_state
    if not inplace and indices is None:
        shape = k.shape[-1:] + v.shape[-1:] if kappa is None else v.shape[-1:] + k.shape[-1:]
        new_state = v.new_empty((*k.shape[:1], *k.shape[2:3], *shape), dtype=torch.float32)
    out = found.step(r, k, v, log_w, kappa, a, bonus, initial_state, new_state, indices)
    return None if out is None else (out, new_state)


@adds("group_norm_gate")
def group_norm_gate(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    added: torch.Tensor | None,
    eps: float,
    silu: bool,
) -> torch.Tensor | None:
    """`group_norm_gate` of few rows in float32."""
    if is_observed() or x.dtype != torch.float32 or x.numel() > _MOST_VALUES:
        return None
    found = library_for_heads((x, added))
    if (
        found is None
        or not {gate.dtype, weight.dtype} <= found.dtypes.keys()
        or not readable(gate.dtype, gate)
        or not readable(weight.dtype, weight, bias)
    ):
        return None
    return found.group_norm_gate(x, gate, weight, bias, added, eps, silu)


@adds("slot_memory")
def slot_memory(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_f: torch.Tensor,
    initial_state: torch.Tensor | None,
    indices: torch.Tensor | None,
    inplace: bool,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`slot_memory` for T = 1, as [`recurrence`]. It changes a copy of the states unless it may change them."""
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


@adds("token_shift")
def token_shift(
    x: torch.Tensor, state: torch.Tensor | None, mu: torch.Tensor, offset: torch.Tensor | None
) -> torch.Tensor | None:
    """`token_shift` for T = 1, without documents."""
    # Sizes are compared last, because comparisons would become part of a traced graph.
    if is_observed() or mu.dtype not in (x.dtype, torch.float32) or x.numel() * mu.shape[0] > _MOST_VALUES:
        return None
    if not readable(mu.dtype, mu):
        return None
    found = library_for(x.shape[-1], x.dtype, x, state, offset)
    return found.token_shift(x, state, mu, offset) if found else None


@adds("delta_keys")
def delta_keys(
    k: torch.Tensor, a: torch.Tensor, scale: torch.Tensor, mix: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`delta_keys` for T = 1."""
    found = library_for_heads((k, a, scale, mix))
    return found.delta_keys(k, a, scale, mix) if found else None


# In the order of `products.c`.
_FUNCTIONS = (None, "tanh", "sigmoid", "exp")
# Up to this number of rows the library is faster than torch: it reads the weights again for every row.
_FEW_ROWS = 4


@adds("low_rank")
def low_rank(
    x: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    base: torch.Tensor | None,
    inner: str | None,
    outer: str | None,
    scale: float,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """`low_rank` for few rows, in `dtype`."""
    if (
        is_observed()  # first, because comparisons of sizes would become part of a traced graph
        or not 0 < x.numel() <= _FEW_ROWS * x.shape[-1]
        or down.shape != (x.shape[-1], up.shape[:-1].numel())
        or (base is not None and base.numel() != up.shape[-1])
    ):
        return None
    found = library_for(x.shape[-1], x.dtype, x, down, up, base)
    functions = _FUNCTIONS.index(inner), _FUNCTIONS.index(outer)
    return found.low_rank(x, down, up, base, *functions, scale, dtype) if found else None

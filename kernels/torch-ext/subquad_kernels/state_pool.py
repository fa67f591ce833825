"""Pools of states, one for each row of a batch, as in engines that serve many texts."""

from collections.abc import Callable

import torch

from .checks import needs_gradient
from .tracing import can_read_without_sync


# On a CPU, size of a state in bytes from which on operations on single states are faster than copies of all.
LARGE = 256 * 1024


def count_states(pool: torch.Tensor | None, name: str = "initial_state") -> int:
    """The number of states in a pool, (states, ...), the argument `name`."""
    if pool is None or pool.dim() == 0:
        raise ValueError(f"`indices` needs `{name}`, to write the states to.")
    return pool.shape[0]


def check_indices(
    indices: torch.Tensor, rows: int, pool: torch.Tensor, *others: torch.Tensor, name: str = "initial_state"
) -> None:
    """
    Checks the indices of the rows' states in a pool, the argument `name`, and that these may be overwritten. The
    values are not read, which would synchronize with a GPU.
    """
    check_numbers(indices, rows, pool, name)
    if pool.dtype != torch.float32 or not pool[:1].is_contiguous():
        raise ValueError(f"`indices` needs a float32 `{name}` whose states are contiguous, to write to.")
    if needs_gradient(pool, *others):
        raise ValueError("`indices` overwrites states that the backward pass needs: call it under no_grad.")


def check_numbers(indices: torch.Tensor, rows: int, pool: torch.Tensor, name: str) -> None:
    """Checks the indices of the rows' states to read from a pool, the argument `name`."""
    if indices.dtype != torch.int64 or indices.shape != (rows,):
        raise ValueError(f"`indices` must be int64 of shape ({rows},), got {indices.dtype} {tuple(indices.shape)}.")
    if indices.device != pool.device:
        raise ValueError(f"`indices` is on {indices.device}, `{name}` on {pool.device}.")


def in_copies(run: Callable, pool: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Runs an operator that cannot read a pool: `run(states) -> out, states` gets copies, which are written back. Returns
    out and the pool.
    """
    out, states = run(pool.index_select(0, indices))
    pool.index_copy_(0, indices, states)
    return out, pool


def prefers_single_states(pool: torch.Tensor) -> bool:
    """Whether plain torch should read one state of a pool at a time."""
    return can_read_without_sync(pool) and pool[:1].nbytes >= LARGE


def numbers_in(pool: torch.Tensor, indices: torch.Tensor) -> list[int]:
    """
    The indices of states in a pool, on a CPU.

    Raises:
        IndexError: if there is no such state.
    """
    numbers = indices.tolist()
    if wrong := [n for n in numbers if not 0 <= n < len(pool)]:
        raise IndexError(f"`indices` must be from 0 to {len(pool) - 1}, got {wrong[0]}.")
    return numbers


def step_in_pool(
    step: Callable[..., torch.Tensor], pool: torch.Tensor, indices: torch.Tensor, *tokens: torch.Tensor
) -> torch.Tensor:
    """
    Runs one token of a recurrence in plain torch.

    Args:
        step: `step(states, *tokens) -> out`, which changes the states in place.
        pool: (states, ...).
        indices: indices of the rows' states, int64 (batch).
        tokens: (batch, ...).

    Returns:
        out, (batch, ...).
    """
    if prefers_single_states(pool):
        rows = zip(numbers_in(pool, indices), *(x.split(1) for x in tokens), strict=True)
        return torch.cat([step(pool[n : n + 1], *token) for n, *token in rows])
    states = pool.index_select(0, indices)
    out = step(states, *tokens)
    pool.index_copy_(0, indices, states)
    return out

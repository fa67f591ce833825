"""Checks that the recurrent operators share: each raises a ValueError that names the argument, before any work."""

import torch


def count_documents(cu_seqlens: torch.Tensor | None, batch: int) -> int:
    """The number of sequences: rows, or the documents that `cu_seqlens` tells apart (its values are not looked at)."""
    if cu_seqlens is None:
        return batch
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or len(cu_seqlens) < 2:
        raise ValueError(
            f"`cu_seqlens` must be int32 or int64 of shape (documents + 1,), got {cu_seqlens.dtype} "
            f"{tuple(cu_seqlens.shape)}."
        )
    if batch != 1:
        raise ValueError(f"`cu_seqlens` describes one packed row, got a batch of {batch}.")
    return cu_seqlens.shape[0] - 1


def check_sequences(**tensors: torch.Tensor) -> None:
    """The tensors that the sizes of the others follow from."""
    for name, x in tensors.items():
        if x.dim() != 4 or x.shape[1] == 0:
            raise ValueError(f"`{name}` must be (batch, length >= 1, heads, size), got {tuple(x.shape)}.")


def check_tensors(
    expected: dict[str, tuple[torch.Tensor | None, tuple[int, ...]]], first: str, beside: torch.Tensor
) -> None:
    """Each that is given has its shape, is floating point, and lies where the argument called `first` does."""
    for name, (x, shape) in expected.items():
        if x is None:
            continue
        if tuple(x.shape) != tuple(shape):
            raise ValueError(f"`{name}` must have shape {tuple(shape)}, got {tuple(x.shape)}.")
        if not x.is_floating_point():
            raise ValueError(f"`{name}` must be floating point, got {x.dtype}.")
        if x.device != beside.device:
            raise ValueError(f"`{name}` is on {x.device}, `{first}` on {beside.device}.")


def check_inplace(initial_state: torch.Tensor | None, *others: torch.Tensor) -> None:
    """The state may be overwritten."""
    if initial_state is None or initial_state.dtype != torch.float32 or not initial_state.is_contiguous():
        raise ValueError("`inplace` needs a float32, contiguous `initial_state` to write the state to.")
    if needs_gradient(initial_state, *others):
        raise ValueError("`inplace` overwrites a state that the backward pass needs: call it under no_grad.")


def needs_gradient(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)

"""Documents that are packed into one row, separated by `cu_seqlens`."""

import itertools

import torch


def count_documents(cu_seqlens: torch.Tensor | None, batch: int) -> int:
    """
    The number of sequences: documents if there are `cu_seqlens`, otherwise rows. Values are not read.

    Raises:
        ValueError: if the shape or the dtype of `cu_seqlens` is wrong.
    """
    if cu_seqlens is None:
        return batch
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"`cu_seqlens` must be int32 or int64 of shape (documents + 1,), got {cu_seqlens.dtype} "
            f"{tuple(cu_seqlens.shape)}."
        )
    if batch != 1:
        raise ValueError(f"`cu_seqlens` describes one packed row, got a batch of {batch}.")
    return cu_seqlens.shape[0] - 1


def document_bounds(cu_seqlens: torch.Tensor | None, length: int) -> list[int]:
    """
    The boundaries of the documents as numbers.

    Raises:
        ValueError: if they do not rise from 0 to `length`.
    """
    bounds = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != length or sorted(bounds) != bounds:
        raise ValueError(f"`cu_seqlens` must rise from 0 to {length}, got {bounds}.")
    return bounds


def sequences(cu_seqlens: torch.Tensor | None, batch: int, length: int) -> list[tuple[int, int, int]]:
    """The row, the first token and the token after the last one of every document, or of every row."""
    if cu_seqlens is None:
        return [(row, 0, length) for row in range(batch)]
    return [(0, *bounds) for bounds in itertools.pairwise(document_bounds(cu_seqlens, length))]

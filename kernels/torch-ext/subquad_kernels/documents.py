"""Documents that are packed into one row, separated by `cu_seqlens`."""

import itertools
from collections.abc import Iterable, Iterator

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


def sequences(cu_seqlens: torch.Tensor | None, *tensors: torch.Tensor) -> Iterator[Iterable]:
    """The tokens of every document, or of all rows at once: of each token what every tensor has."""
    for start, stop in itertools.pairwise(document_bounds(cu_seqlens, tensors[0].shape[1])):
        # Gradients of a view of each token would be as large as all tokens.
        yield zip(*(x[:, start:stop].unbind(1) for x in tensors), strict=True)

"""Strips of tokens, into which the Triton kernels cut rows."""

import torch


# Largest number of tokens, and of values, of a strip: a program holds it in registers.
LONGEST, LARGEST = 64, 4096


def strip_size(width: int, groups: int) -> int:
    """Tokens of a strip, a power of 2."""
    return max(min(LONGEST, LARGEST >> (width // groups - 1).bit_length()), 1)


def shape_of_entering(x: torch.Tensor, groups: int) -> tuple[int, int, int, int]:
    """
    The shape of the statistics that enter all strips except the first. There is room for two more strips, because a
    size that may be 0 or 1 would specialise an exported program to the lengths of its example.
    """
    size = strip_size(x.shape[-1], groups)
    return x.shape[0], (x.shape[1] + size - 1) // size + 1, 3, groups

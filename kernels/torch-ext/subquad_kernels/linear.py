"""The product of a linear layer."""

import torch
import torch.nn.functional as F

from .shortcuts import shortcut


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """
    `torch.nn.functional.linear`: x (..., in), weight (out, in), bias (out) to (..., out).

    The installed package computes it on a CPU, without gradients, by the fastest library of the machine.
    """
    # package only
    if (out := shortcut("linear", x, weight, bias)) is not None:
        return out
    return F.linear(x, weight, bias)


def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """
    `x @ y`, x (..., n, k), y (..., k, m) to (..., n, m).

    For weights of layers, [`linear`] needs less memory.
    """
    # package only
    if (out := shortcut("matmul", x, y)) is not None:
        return out
    return x @ y

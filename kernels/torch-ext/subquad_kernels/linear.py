"""The product of a linear layer."""

import torch
import torch.nn.functional as F

from .shortcuts import shortcut


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """
    `torch.nn.functional.linear`: x (..., in), weight (out, in), bias (out) to (..., out).

    On a CPU and without gradients the product is computed as fast as this machine can:

    - up to eight rows by our own C library, which is limited only by memory bandwidth. The C compiler of the machine
      makes it when the first worthwhile product is requested. `SUBQUAD_NATIVE=0` turns it off;
    - in float32 with AVX-512, more rows by oneDNN instead of torch's default, MKL. That is up to 2.2 times as fast
      on an AMD EPYC, where MKL seems not to use AVX-512;
    - in bfloat16 and float16, many rows by oneDNN if the CPU has fast instructions for the dtype. If not, up to 128
      rows by the C library with AVX-512; for more, the weight is converted to float32 in tiles that fit in the cache.
      Without a C compiler, few rows by torch's own dot products.

    Otherwise, and for weights that are not plain tensors (for example quantised ones), this is torch's own function.
    """
    out = shortcut("linear", x, weight, bias)
    return F.linear(x, weight, bias) if out is None else out


def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """
    `x @ y`, x (..., n, k), y (..., k, m) to (..., n, m).

    On a CPU and without gradients, few rows are multiplied by the same library as in [`linear`]. Without instructions
    for a 16-bit dtype, larger products are computed in float32: torch would take about five times as long. For weights
    of layers, [`linear`] needs less memory.
    """
    out = shortcut("matmul", x, y)
    return x @ y if out is None else out

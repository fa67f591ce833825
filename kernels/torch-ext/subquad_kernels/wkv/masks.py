"""
The constant matrices that the Triton kernels multiply log decays by.

They come to the kernels in memory: what a kernel can compute from nothing, the compiler computes before the loop and
keeps in registers, and there are too many.
"""

import functools

import torch


def operand_dtype(k: torch.Tensor, v: torch.Tensor) -> torch.dtype:
    """The dtype of r, k and v as the kernels see them."""
    return torch.promote_types(k.dtype, v.dtype)


@functools.cache
def _masks(chunk: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    row, column = torch.arange(chunk, device=device)[:, None], torch.arange(chunk, device=device)[None, :]
    to_border = []
    for level in range(1, chunk.bit_length() - 1):
        near = (row ^ column) < (1 << level)
        to_border.append(near & torch.where((row >> level) % 2 == 1, column < row, column > row))
    return torch.stack([column < row, column > row, *to_border, *(x.T for x in to_border)]).to(dtype)


def masks_for(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """
    Matrices of zeros and ones, (masks, C, C) for chunks of C tokens: the tokens (columns) before a token (row); those
    after it; for every level but the first those between a token and the border of its block, before it in a right
    block and after it in a left one; then the transposes of the latter.

    Longer chunks ask for more products a token and for more registers, shorter ones pass the state more often.
    """
    dtype = torch.bfloat16 if operand_dtype(k, v) == torch.bfloat16 else torch.float32
    chunk = 32 if dtype == torch.bfloat16 and k.shape[-1] <= 64 else 16
    # A graph makes its own: a tensor that outlived it would lie in the memory of the graph.
    make = _masks.__wrapped__ if torch.compiler.is_compiling() else _masks
    return make(chunk, dtype, k.device)

"""
The constant matrices that the Triton kernels multiply log decays by.

They come to the kernels in memory: what a kernel can compute from nothing, the compiler computes before the loop and
keeps in registers, and there are too many.
"""

import functools

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode


def operand_dtype(r: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.dtype:
    """The dtype that holds r, k and v."""
    return torch.promote_types(r.dtype, torch.promote_types(k.dtype, v.dtype))


def _make(chunk: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    row, column = torch.arange(chunk, device=device)[:, None], torch.arange(chunk, device=device)[None, :]
    to_border = []
    for level in range(1, chunk.bit_length() - 1):
        near = (row ^ column) < (1 << level)
        to_border.append(near & torch.where((row >> level) % 2 == 1, column < row, column > row))
    return torch.stack([column < row, column > row, *to_border, *(x.T for x in to_border)]).to(dtype)


@functools.cache
def _kept(chunk: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # training may use them after inference did
        return _make(chunk, dtype, device)


def _can_keep(x: torch.Tensor) -> bool:
    """Not what a graph makes, which lies in the graph's memory, nor what a mode makes in place of a tensor."""
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return False
    return x.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def masks_for(r: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """
    Matrices of zeros and ones, (masks, C, C) for chunks of C tokens: the tokens (columns) before a token (row); those
    after it; for every level but the first those between a token and the border of its block, before it in a right
    block and after it in a left one; then the transposes of the latter.

    Longer chunks ask for more products a token and for more registers, shorter ones pass the state more often.
    """
    dtype = torch.bfloat16 if operand_dtype(r, k, v) == torch.bfloat16 else torch.float32
    chunk = 32 if dtype == torch.bfloat16 and k.shape[-1] <= 64 else 16
    return (_kept if _can_keep(k) else _make)(chunk, dtype, k.device)

"""
Constant matrices by which the Triton kernel of the gradients multiplies log decays.

It reads them from memory. If it made them itself, the compiler would make them before the loop and keep them in
registers, where they do not fit.
"""

import functools

import torch

from ..backend import common_dtype
from ..tracing import can_keep


def _make(chunk: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    row, column = torch.arange(chunk, device=device)[:, None], torch.arange(chunk, device=device)[None, :]
    to_boundary = []
    for level in range(1, chunk.bit_length() - 1):
        near = (row ^ column) < (1 << level)
        to_boundary.append(near & torch.where((row >> level) % 2 == 1, column < row, column > row))
    return torch.stack([column < row, column > row, *to_boundary, *(x.T for x in to_boundary)]).to(dtype)


@functools.cache
def _kept(chunk: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # Inference may make them first and training use them later. Copying them synchronizes with the device once,
    # because another stream may use them, too.
    with torch.inference_mode(False):
        return _make(chunk, dtype, torch.device("cpu")).to(device)


def masks_for(r: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """
    Matrices of zeros and ones, (masks, C, C) for chunks of C tokens. They select, for each token (row), the tokens
    (columns) before it; the tokens after it; and for each level but the first the tokens between it and the boundary
    of its pair of blocks, which are before it in a right block and after it in a left one. Then follow the transposes
    of the latter.

    Longer chunks need more products per token and more registers, shorter ones pass the state more often.
    """
    dtype = torch.bfloat16 if common_dtype(r, k, v) == torch.bfloat16 else torch.float32
    chunk = 32 if dtype == torch.bfloat16 and k.shape[-1] <= 64 else 16
    return (_kept if can_keep(k) else _make)(chunk, dtype, k.device)

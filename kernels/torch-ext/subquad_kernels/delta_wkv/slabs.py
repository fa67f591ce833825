"""
Long inputs are computed in slabs, some tokens of all rows at a time, so that temporary tensors do not grow with the
length. The states that enter the slabs are kept for the backward pass.
"""

import torch


# Tokens of a slab, summed over rows and heads. A head of 64 channels takes 2 KB of temporary tensors for a token in
# bfloat16.
TOKENS = 2**18
# The fewest tokens of a row in a slab; half as many for each document in it, whose state takes the time of some 20
# tokens to enter and leave the slab.
LEAST = 256


def slabs(k: torch.Tensor, cu_seqlens: torch.Tensor | None) -> list[slice]:
    """The tokens of each slab of k (batch, length, heads, size), at least one."""
    batch, length, heads = k.shape[:3]
    documents = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    size = max(TOKENS // max(batch * heads, 1) // 16 * 16, LEAST, documents * LEAST // 2)
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]

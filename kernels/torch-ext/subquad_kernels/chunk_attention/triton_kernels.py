"""
The attention of a single token of Gecko as Triton kernels, which read keys and values once, in any layout.

One kernel computes the scores of all keys. Another one gives each program some columns of the values, and sums these
with the weights, which it computes from the scores. A thread sums some of the tokens; threads add their sums only at
the end.
"""

import functools

import torch
import triton
import triton.language as tl

from ..backend import cdiv, contiguous, launch, next_power_of_2, strided
from ..segments import exp, program


@triton.jit(do_not_specialize=["KEYS", "TILES"])
def _scores_kernel(
    q,
    QB,
    QH,
    k,
    KB,
    KH,
    KT,
    indices,
    mask,
    MASK_STRIDE,
    scores,
    KEYS,
    H,
    TILES,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """The scores of the keys (B, H, KEYS), -inf for keys that the token does not see."""
    tile, head, row = program(H, TILES)
    row, head = row.to(tl.int64), head.to(tl.int64)
    token, ks = tile.to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, BK)
    there = token < KEYS
    query = tl.load(q + row * QB + head * QH + ks, mask=ks < K, other=0.0).to(tl.float32)
    number = row
    if indices is not None:
        number = tl.load(indices + row)
    place = k + number * KB + head * KH + token[:, None] * KT + ks[None, :]
    key = tl.load(place, mask=there[:, None] & (ks < K)[None, :], other=0.0).to(tl.float32)
    seen = tl.load(mask + row * MASK_STRIDE + token, mask=there, other=0)
    score = tl.where(seen != 0, tl.sum(key * query[None, :], 1), -float("inf"))
    tl.store(scores + (row * H + head) * KEYS + token, score, mask=there)


@triton.jit(do_not_specialize=["KEYS"])
def _values_kernel(
    scores,
    v,
    VB,
    VH,
    VT,
    indices,
    out,
    KEYS,
    H,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The mean of some columns of the values, weighted by the softmax of the scores."""
    tile, head, row = program(H, (V + BV - 1) // BV)
    row, head = row.to(tl.int64), head.to(tl.int64)
    scores += (row * H + head) * KEYS
    many, ts, vs = tl.arange(0, 2048), tl.arange(0, BT), tile * BV + tl.arange(0, BV)
    top = tl.full((2048,), -float("inf"), tl.float32)
    for start in range(0, KEYS, 2048):
        top = tl.maximum(top, tl.load(scores + start + many, mask=many < KEYS - start, other=-float("inf")))
    highest = tl.max(top, 0)
    number = row
    if indices is not None:
        number = tl.load(indices + row)
    values = v + number * VB + head * VH + ts[:, None].to(tl.int64) * VT + vs[None, :]
    total, sums = tl.zeros((BT,), tl.float32), tl.zeros((BT, BV), tl.float32)
    for start in tl.range(0, KEYS, BT, num_stages=STAGES):
        there = ts < KEYS - start
        weight = exp(tl.load(scores + start + ts, mask=there, other=-float("inf")) - highest)
        value = tl.load(values + tl.cast(start, tl.int64) * VT, mask=there[:, None] & (vs < V)[None, :], other=0.0)
        total += weight
        sums += weight[:, None] * value.to(tl.float32)
    mean = tl.sum(sums, 0) / tl.sum(total, 0)
    tl.store(out + (row * H + head) * V + vs, mean.to(out.dtype.element_ty), mask=vs < V)


@functools.lru_cache
def _divide(batch, heads, keys, key_size, value_size, bytes_of_value):
    """The grids and the constants of the two kernels."""
    block = next_power_of_2(key_size)
    tokens = max(16384 // block, 1)
    tiles, columns = cdiv(keys, tokens), min(next_power_of_2(value_size), 64)
    scores = (batch * heads * tiles,), {"TILES": tiles, "K": key_size, "BT": tokens, "BK": block, "num_warps": 8}
    # A program loads 16 KiB at a time, while it waits for the next ones.
    values = {
        "BT": 16384 // (columns * bytes_of_value),
        "BV": columns,
        "STAGES": 4 if torch.version.hip is None else 1,
    }
    return *scores, (batch * heads * cdiv(value_size, columns),), {"V": value_size, **values}


def chunk_attention_triton_step(q, k, v, mask, indices):
    """Computes [`subquad_kernels.chunk_attention_step`]."""
    batch, (_, heads, keys, key_size), value_size = q.shape[0], k.shape, v.shape[-1]
    grid, constants, values_grid, values_constants = _divide(
        batch, heads, keys, key_size, value_size, v.element_size()
    )
    mask, indices = contiguous(mask, indices)
    scores = v.new_empty(batch, heads, keys, dtype=torch.float32)
    tensors = *strided(q)[:3], *strided(k), indices, mask, 0 if len(mask) == 1 else keys, scores
    launch(_scores_kernel, grid, *tensors, keys, heads, **constants)
    out = v.new_empty(batch, heads, 1, value_size)
    launch(_values_kernel, values_grid, scores, *strided(v), indices, out, keys, heads, **values_constants)
    return out

"""
The slot memory of a single token as Triton kernels, limited by memory bandwidth.

The first kernel computes the logits, from the keys after the token. The second one writes the token, and reads the
values as it passes through them. So only the last kernel changes the state, when no other can fail any more.
"""

import triton
import triton.language as tl

from ..segments import exp, expm1


@triton.jit
def _place(head, indices, H, stride, SIZE: tl.constexpr):
    """The start of the state of a head of some row. H is the number of heads of a row."""
    row = head // H
    if indices is not None:
        row = tl.load(indices + row)
    return row * stride + head % H * SIZE


@triton.jit
def _after(state, x, log, cells, mask):
    """A tile of the state (slots, features) after a token that writes x (features)."""
    old = tl.load(state + cells, mask=mask, other=0.0)
    return old + expm1(log)[:, None] * (old - x[None, :])


@triton.jit
def _step_logits_kernel(
    q,
    k,
    log_f,
    state,
    indices,
    H,
    stride,
    logits,
    K: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """The logits of a tile of slots of one head."""
    TILES: tl.constexpr = (M + BM - 1) // BM
    n = tl.program_id(0).to(tl.int64)
    head, ms, ks = n // TILES, (n % TILES).to(tl.int32) * BM + tl.arange(0, BM), tl.arange(0, BK)
    query = tl.load(q + head * K + ks, mask=ks < K, other=0.0).to(tl.float32)
    key = tl.load(k + head * K + ks, mask=ks < K, other=0.0).to(tl.float32)
    log = tl.load(log_f + head * M + ms, mask=ms < M, other=0.0).to(tl.float32)
    cells = _place(head, indices, H, stride, M * (K + V)) + ms[:, None] * (K + V) + ks[None, :]
    keys = _after(state, key, log, cells, (ms < M)[:, None] & (ks < K)[None, :])
    tl.store(logits + head * M + ms, tl.sum(keys * query[None, :], 1), mask=ms < M)


@triton.jit
def _step_kernel(
    k,
    v,
    log_f,
    logits,
    state,
    new_state,
    indices,
    H,
    stride,
    out,
    K: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    BM: tl.constexpr,
    BF: tl.constexpr,
    INPLACE: tl.constexpr,
):
    """
    Some columns of one head's state after the token, and the readout of values with the softmax of the logits. In
    place, slots that the token does not write to are not stored.
    """
    KEY_TILES: tl.constexpr = (K + BF - 1) // BF
    TILES: tl.constexpr = KEY_TILES + (V + BF - 1) // BF
    n = tl.program_id(0).to(tl.int64)
    head, tile = n // TILES, (n % TILES).to(tl.int32)
    ks, vs = tile * BF + tl.arange(0, BF), (tile - KEY_TILES) * BF + tl.arange(0, BF)
    in_keys, in_values = ks < K, (vs >= 0) & (vs < V)
    x = tl.load(k + head * K + ks, mask=in_keys, other=0.0).to(tl.float32)
    x += tl.load(v + head * V + vs, mask=in_values, other=0.0).to(tl.float32)
    columns = tl.where(tile < KEY_TILES, tile * BF, K + (tile - KEY_TILES) * BF) + tl.arange(0, BF)
    first = _place(head, indices, H, stride, M * (K + V))
    top = tl.full((1,), -float("inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    read = tl.zeros((BF,), tl.float32)
    for start in range(0, M, BM):
        ms = start + tl.arange(0, BM)
        log = tl.load(log_f + head * M + ms, mask=ms < M, other=0.0).to(tl.float32)
        written = ms < M
        if INPLACE:
            written &= log != 0
        cells = first + ms[:, None] * (K + V) + columns[None, :]
        stored = written[:, None] & (in_keys | in_values)[None, :]
        after = _after(state, x, log, cells, stored | ((ms < M)[:, None] & in_values[None, :]))
        tl.store(new_state + cells, after, mask=stored)
        z = tl.load(logits + head * M + ms, mask=ms < M, other=-float("inf"))
        higher = tl.maximum(top, tl.max(z, 0))
        s, factor = exp(z - higher), exp(top - higher)
        top, total = higher, total * factor + tl.sum(s, 0)
        read = read * factor + tl.sum(s[:, None] * after, 0)
    tl.store(out + head * V + vs, (read / total).to(out.dtype.element_ty), mask=in_values)

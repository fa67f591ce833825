"""
The kernels for chunks of the slot memory in which a slot decays too far for the factors exp(F_t) and exp(-F_s) of a
pair of tokens. They split the factors in blocks of `NEAR` tokens only, and cover the other pairs by halving, see
chunks.py: for blocks of b tokens both factors lead to the boundary between the blocks of a pair, so that no exponent
is positive. A program whose chunk is not marked in `far_chunks` ends at once.
"""

import triton
import triton.language as tl

from ..segments import dot, exp, expm1
from .chunk_kernels import GEOMETRY, causal, load, load_decay, load_log, place, store


# Number of tokens whose decays may be split in any case; exp(4 * 17) is far below the largest number.
NEAR: tl.constexpr = tl.constexpr(4)


@triton.jit
def _boundary(ts, block):
    """For blocks of `block` tokens the last token of the left block of each token's pair."""
    return (ts & -(2 * block)) + block - 1


@triton.jit
def _across(ts, block):
    """The pairs of a token of a right block (row) and one of the block to its left (column)."""
    right = (ts & block) != 0
    return (_boundary(ts, block)[:, None] == _boundary(ts, block)[None, :]) & right[:, None] & ~right[None, :]


@triton.jit(do_not_specialize=GEOMETRY)
def _far_slots_kernel(
    a,
    b,
    x,
    log_f,
    decay,
    out,
    far_chunks,
    boundaries,
    T,
    SEGMENT,
    SEGMENTS,
    CHUNKS,
    H,
    ADD,
    TILES: tl.constexpr,
    SIZE: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    BM: tl.constexpr,
    BF: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """
    For chunks that decay too far: what a reads from each slot of the b that the tokens of the chunk wrote; with
    REVERSE the gradient of these writes, from what a read of b through x. With ADD = 1 it is added to `out`.
    """
    _, head, first, rows, index = place(boundaries, T, SEGMENT, SEGMENTS, CHUNKS, H, TILES, C, PACKED)
    if rows <= 0:
        return
    if tl.load(far_chunks + index) == 0:
        return
    ts = tl.arange(0, C)
    scores = tl.zeros((C, C), tl.float32)
    for start in range(0, SIZE, BF):
        fs = start + tl.arange(0, BF)
        a_block = load(a, first, head, ts, fs, rows, H, SIZE)
        b_block = load(b, first, head, ts, fs, rows, H, SIZE)
        scores += dot(a_block, tl.trans(b_block), DOT, PRECISION)

    for start in range(0, M, BM):
        ms = start + tl.arange(0, BM)
        if REVERSE:
            weights = load(x, first, head, ts, ms, rows, H, M).to(tl.float32)
        else:
            weights = -expm1(load_log(log_f, first, head, ts, ms, rows, H, M))
        f = load_decay(decay, first, head, ts, ms, rows, H, M)
        f -= load_decay(decay, first, head, (ts & -NEAR) - 1, ms, rows, H, M)
        near = tl.where(causal(ts, NEAR), scores, 0.0)
        if REVERSE:
            near, f = tl.trans(near), -f
        found = exp(f) * dot(near, weights * exp(-f), DOT, PRECISION)
        block = NEAR
        while block < C:
            f = load_decay(decay, first, head, ts, ms, rows, H, M)
            f -= load_decay(decay, first, head, _boundary(ts, block), ms, rows, H, M)
            factor = exp(-tl.abs(f))
            across = tl.where(_across(ts, block), scores, 0.0)
            if REVERSE:
                across = tl.trans(across)
            found += factor * dot(across, weights * factor, DOT, PRECISION)
            block *= 2
        found += load(out, first, head, ts, ms, rows * ADD, H, M)
        store(out, found, first, head, ts, ms, rows, H, M)


@triton.jit(do_not_specialize=GEOMETRY)
def _far_pairs_kernel(
    x,
    log_f,
    decay,
    out,
    far_chunks,
    boundaries,
    T,
    SEGMENT,
    SEGMENTS,
    CHUNKS,
    H,
    TILES: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    BM: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
):
    """For chunks that decay too far: the weight of the write of one token (column) in the read with x of another."""
    _, head, first, rows, index = place(boundaries, T, SEGMENT, SEGMENTS, CHUNKS, H, TILES, C, PACKED)
    if rows <= 0:
        return
    if tl.load(far_chunks + index) == 0:
        return
    ts = tl.arange(0, C)
    pairs = tl.zeros((C, C), tl.float32)
    for start in range(0, M, BM):
        ms = start + tl.arange(0, BM)
        read = load(x, first, head, ts, ms, rows, H, M).to(tl.float32)
        p = -expm1(load_log(log_f, first, head, ts, ms, rows, H, M))
        f = load_decay(decay, first, head, ts, ms, rows, H, M)
        f -= load_decay(decay, first, head, (ts & -NEAR) - 1, ms, rows, H, M)
        pairs += tl.where(causal(ts, NEAR), dot(read * exp(f), tl.trans(p * exp(-f)), DOT, PRECISION), 0.0)
        block = NEAR
        while block < C:
            f = load_decay(decay, first, head, ts, ms, rows, H, M)
            f -= load_decay(decay, first, head, _boundary(ts, block), ms, rows, H, M)
            either = tl.where(((ts & block) != 0)[:, None], read, p) * exp(-tl.abs(f))
            pairs += tl.where(_across(ts, block), dot(either, tl.trans(either), DOT, PRECISION), 0.0)
            block *= 2
    tl.store(out + index * (C * C) + ts[:, None] * C + ts[None, :], pairs.to(out.dtype.element_ty))

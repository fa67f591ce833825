"""
Readouts within chunks of the slot memory in which a slot decays too far for the factors exp(F_t) and exp(-F_s) of a
pair. The factors are split only in blocks of `NEAR` tokens, and the other pairs are covered by halving, see chunks.py:
for blocks of b tokens both factors lead to the boundary between the blocks of a pair, so that no exponent is positive.
"""

import triton
import triton.language as tl

from ..segments import dot, exp, expm1
from .chunk_kernels import GEOMETRY, causal, load, load_decay, load_log, place, store


# Number of tokens whose decays may be split in any case; exp(4 * 17) is far below the largest number.
NEAR: tl.constexpr = tl.constexpr(4)
# Number of slots, or of features, that are computed together.
BLOCK: tl.constexpr = tl.constexpr(16)


@triton.jit
def _boundary(ts, block):
    """For blocks of `block` tokens the last token of the left block of each token's pair."""
    return (ts & -(2 * block)) + block - 1


@triton.jit
def _across(rs, ts, block):
    """The pairs of a token of a right block (row) and one of the block to its left (column)."""
    pair = _boundary(rs, block)[:, None] == _boundary(ts, block)[None, :]
    return pair & ((rs & block) != 0)[:, None] & ((ts & block) == 0)[None, :]


@triton.jit
def _near_decay(decay, first, head, ts, ms, rows, H, M: tl.constexpr):
    """F since the start of the token's block of `NEAR` tokens."""
    f = load_decay(decay, first, head, ts, ms, rows, H, M)
    return f - load_decay(decay, first, head, (ts & -NEAR) - 1, ms, rows, H, M)


@triton.jit
def _factor(decay, first, head, ts, ms, block, rows, H, M: tl.constexpr):
    """The decay between a token and the boundary of its pair of blocks."""
    f = load_decay(decay, first, head, ts, ms, rows, H, M)
    return exp(-tl.abs(f - load_decay(decay, first, head, _boundary(ts, block), ms, rows, H, M)))


@triton.jit
def _scores(a, b, first, head, rs, ts, rows, H, SIZE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """The products of the rows of a and of b."""
    scores = tl.zeros((rs.shape[0], ts.shape[0]), tl.float32)
    for start in range(0, SIZE, BLOCK):
        fs = start + tl.arange(0, BLOCK)
        a_block = load(a, first, head, rs, fs, rows, H, SIZE)
        b_block = load(b, first, head, ts, fs, rows, H, SIZE)
        scores += dot(a_block, tl.trans(b_block), DOT, PRECISION)
    return scores


@triton.jit
def add_far_reads(
    a, b, log_f, decay, out, first, head, rs, ts, rows, H,
    SIZE: tl.constexpr, M: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the readouts of the tokens rs with a from each slot of b, written by the tokens ts of the chunk."""
    scores = _scores(a, b, first, head, rs, ts, rows, H, SIZE, DOT, PRECISION)
    for start in range(0, M, BLOCK):
        ms = start + tl.arange(0, BLOCK)
        p = -expm1(load_log(log_f, first, head, ts, ms, rows, H, M))
        near = tl.where(causal(rs, ts, NEAR), scores, 0.0)
        writes = p * exp(-_near_decay(decay, first, head, ts, ms, rows, H, M))
        found = exp(_near_decay(decay, first, head, rs, ms, rows, H, M)) * dot(near, writes, DOT, PRECISION)
        block = NEAR
        while block < ts.shape[0]:
            writes = p * _factor(decay, first, head, ts, ms, block, rows, H, M)
            across = tl.where(_across(rs, ts, block), scores, 0.0)
            factor = _factor(decay, first, head, rs, ms, block, rows, H, M)
            found += factor * dot(across, writes, DOT, PRECISION)
            block *= 2
        found += load(out, first, head, rs, ms, rows, H, M)
        store(out, found, first, head, rs, ms, rows, H, M)


@triton.jit
def far_pairs(
    x, log_f, decay, first, head, rs, ts, rows, H,
    M: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The weights of the writes of the tokens ts (columns) in the readouts of the tokens rs (rows) with x."""
    pairs = tl.zeros((rs.shape[0], ts.shape[0]), tl.float32)
    for start in range(0, M, BLOCK):
        ms = start + tl.arange(0, BLOCK)
        read = load(x, first, head, rs, ms, rows, H, M).to(tl.float32)
        p = -expm1(load_log(log_f, first, head, ts, ms, rows, H, M))
        reads = read * exp(_near_decay(decay, first, head, rs, ms, rows, H, M))
        writes = p * exp(-_near_decay(decay, first, head, ts, ms, rows, H, M))
        pairs += tl.where(causal(rs, ts, NEAR), dot(reads, tl.trans(writes), DOT, PRECISION), 0.0)
        block = NEAR
        while block < ts.shape[0]:
            reads = read * _factor(decay, first, head, rs, ms, block, rows, H, M)
            writes = p * _factor(decay, first, head, ts, ms, block, rows, H, M)
            pairs += tl.where(_across(rs, ts, block), dot(reads, tl.trans(writes), DOT, PRECISION), 0.0)
            block *= 2
    return pairs


@triton.jit
def _write_grads(
    a, b, x, decay, out, first, head, ts, rows, H,
    SIZE: tl.constexpr, M: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """The gradient of the writes of b in a chunk, from the readouts of a through x, or this added to `out`."""
    scores = _scores(a, b, first, head, ts, ts, rows, H, SIZE, DOT, PRECISION)
    for start in range(0, M, BLOCK):
        ms = start + tl.arange(0, BLOCK)
        read = load(x, first, head, ts, ms, rows, H, M).to(tl.float32)
        f = _near_decay(decay, first, head, ts, ms, rows, H, M)
        near = tl.trans(tl.where(causal(ts, ts, NEAR), scores, 0.0))
        found = exp(-f) * dot(near, read * exp(f), DOT, PRECISION)
        block = NEAR
        while block < ts.shape[0]:
            factor = _factor(decay, first, head, ts, ms, block, rows, H, M)
            across = tl.trans(tl.where(_across(ts, ts, block), scores, 0.0))
            found += factor * dot(across, read * factor, DOT, PRECISION)
            block *= 2
        if ADD:
            found += load(out, first, head, ts, ms, rows, H, M)
        store(out, found, first, head, ts, ms, rows, H, M)


@triton.jit(do_not_specialize=GEOMETRY)
def _far_writes_kernel(
    q,
    k,
    grad_out,
    v,
    x_keys,
    x_values,
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
    K: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
):
    """For chunks that decay too far: the gradient of the writes, from the readouts of the chunk's tokens."""
    _, head, first, rows, index = place(boundaries, T, SEGMENT, SEGMENTS, CHUNKS, H, TILES, C, PACKED)
    if rows <= 0:
        return
    if tl.load(far_chunks + index) == 0:
        return
    ts = tl.arange(0, C)
    _write_grads(q, k, x_keys, decay, out, first, head, ts, rows, H, K, M, DOT, PRECISION, False)
    tl.debug_barrier()  # other threads may read what a thread has stored
    _write_grads(grad_out, v, x_values, decay, out, first, head, ts, rows, H, V, M, DOT, PRECISION, True)

"""
The slot memory as Triton kernels.

Both passes are parallel over chunks. Only `_walk_kernel` goes from chunk to chunk, with a tile of the memory on chip,
and stores the memory that enters each. (If a sequence gives too few programs, it is cut into segments that are
computed in parallel, see segments.py.) A program of the other kernels computes one chunk of a head. `_slots_kernel`
and `_decay_kernel` have a result for each slot: sums of decayed writes, weighted by products of queries and keys.
`_features_kernel` has a result for each feature: sums over tokens, weighted by products of reads and decayed writes.

With F the running sum of log decays from the start of a chunk, the write of token s has decayed by exp(F_t - F_s) when
token t reads it. If no slot decays by more than exp(LIMIT) in a chunk, the factors exp(F_t) and exp(-F_s) neither
overflow nor lose digits, and all pairs of tokens of the chunk are one product. The other chunks, which trained models
rarely have, are left to `_far_slots_kernel` and `_far_pairs_kernel`. They split the factors in blocks of `NEAR` tokens
only, and cover the other pairs by halving, see chunks.py: for blocks of b tokens both factors lead to the boundary
between the blocks of a pair, so that no exponent is positive.
"""

import torch
import triton
import triton.language as tl

from ..backend import contiguous, launch, multiprocessors
from ..segments import Segments, decayed, dot, exp, expm1, operands, program, tokens


# Nothing is left of a slot that decays by more in one step: exp(-17) is 4e-8.
LOWEST: tl.constexpr = tl.constexpr(-17.0)
# Number of tokens whose decays may be split in any case; exp(4 * 17) is far below the largest number.
NEAR: tl.constexpr = tl.constexpr(4)
LIMIT: tl.constexpr = tl.constexpr(-64.0)
# These differ from call to call, and as constants would gain nothing.
GEOMETRY = ["T", "SEGMENT", "SEGMENTS", "CHUNKS", "H", "ADD"]


@triton.jit
def _chunk(boundaries, T, SEGMENT, SEGMENTS, CHUNKS, H, TILES, C: tl.constexpr, PACKED: tl.constexpr):
    """The tile and head of this program, the first token and number of tokens of its chunk, the index of the chunk."""
    tile, head, n = program(H, TILES)
    segment, chunk = n // CHUNKS, n % CHUNKS
    begin, stop = tokens(boundaries, segment, T, SEGMENT, SEGMENTS, PACKED)
    first = begin + chunk * C
    rows = tl.minimum(stop - first, C).to(tl.int32)
    return tile, head, first, rows, (begin // C + segment + chunk) * H + head


@triton.jit
def _cells(x, first, head, ts, columns, H, SIZE):
    return x + (first * H + head) * SIZE + ts[:, None] * (H * SIZE) + columns[None, :]


@triton.jit
def _load(x, first, head, ts, columns, rows, H, SIZE):
    """The tokens of a chunk, zeros after the last one."""
    mask = (ts < rows)[:, None] & (columns < SIZE)[None, :]
    return tl.load(_cells(x, first, head, ts, columns, H, SIZE), mask=mask, other=0.0)


@triton.jit
def _store(x, value, first, head, ts, columns, rows, H, SIZE: tl.constexpr):
    mask = (ts < rows)[:, None] & (columns < SIZE)[None, :]
    tl.store(_cells(x, first, head, ts, columns, H, SIZE), value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _load_log(log_f, first, head, ts, ms, rows, H, M: tl.constexpr):
    log = _load(log_f, first, head, ts, ms, rows, H, M).to(tl.float32)
    return tl.where(log < LOWEST, LOWEST, log)


@triton.jit
def _load_decay(decay, first, head, ts, ms, rows, H, M: tl.constexpr):
    """F of the tokens ts: 0 before the chunk, and that of the last token after it."""
    ts = tl.minimum(ts, rows - 1)
    return tl.load(_cells(decay, first, head, ts, ms, H, M), mask=(ts >= 0)[:, None] & (ms < M)[None, :], other=0.0)


@triton.jit
def _load_total(decay, first, head, ms, rows, H, M: tl.constexpr):
    """The summed log decay of a chunk."""
    return tl.load(decay + ((first + rows - 1) * H + head) * M + ms, mask=ms < M, other=0.0)


@triton.jit
def _far(decay, first, head, rows, H, M: tl.constexpr):
    """Whether a slot decays too far in a chunk for its factors to be split."""
    ms = tl.arange(0, triton.next_power_of_2(M))
    return tl.min(_load_total(decay, first, head, ms, rows, H, M)) < LIMIT


@triton.jit
def _causal(ts, N: tl.constexpr):
    """The pairs of a token (row) and one of the same block (column) whose write it reads, itself or an earlier one."""
    return (ts[:, None] >= ts[None, :]) & ((ts & -N)[:, None] == (ts & -N)[None, :])


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
def _decay_sum_kernel(
    log_f,
    decay,
    writes,
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
    PACKED: tl.constexpr,
):
    """F of each token, and the part of its write that is left at the end of its chunk, p exp(F_end - F)."""
    tile, head, first, rows, _ = _chunk(boundaries, T, SEGMENT, SEGMENTS, CHUNKS, H, TILES, C, PACKED)
    if rows <= 0:
        return
    ts, ms = tl.arange(0, C), tile * BM + tl.arange(0, BM)
    log = _load_log(log_f, first, head, ts, ms, rows, H, M)
    f = tl.cumsum(log, 0)
    total = tl.sum(tl.where((ts == C - 1)[:, None], f, 0.0), 0)
    _store(decay, f, first, head, ts, ms, rows, H, M)
    _store(writes, -expm1(log) * exp(total[None, :] - f), first, head, ts, ms, rows, H, M)


@triton.jit(do_not_specialize=GEOMETRY)
def _walk_kernel(
    x_keys,
    keys,
    x_values,
    values,
    decay,
    initial,
    final,
    totals,
    chunk_states,
    boundaries,
    T,
    SEGMENT,
    SEGMENTS,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    BM: tl.constexpr,
    BF: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
    REVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """
    The memory of a segment, from `initial`, which enters it. The memories that enter its chunks, the one that leaves
    it and its summed log decay go to `chunk_states`, `final` and `totals`. Each chunk decays the memory and adds
    x_keysᵀ keys to the columns of the keys and x_valuesᵀ values to those of the values. With REVERSE it goes from the
    last chunk to the first, as the gradient of the memory does.
    """
    KEY_TILES: tl.constexpr = (K + BF - 1) // BF
    TILES: tl.constexpr = KEY_TILES + (V + BF - 1) // BF
    tile, head, segment = program(H, TILES * tl.cdiv(M, BM))
    begin, stop = tokens(boundaries, segment, T, SEGMENT, SEGMENTS, PACKED)
    ts, ms = tl.arange(0, C), tile // TILES * BM + tl.arange(0, BM)
    tile = tile % TILES
    of_keys = tile < KEY_TILES
    x, a = tl.where(of_keys, x_keys, x_values), tl.where(of_keys, keys, values)
    SIZE = K if K == V else tl.where(of_keys, K, V)
    fs = tl.where(of_keys, tile, tile - KEY_TILES) * BF + tl.arange(0, BF)
    cells = ms[:, None] * (K + V) + tl.where(of_keys, 0, K) + fs[None, :]
    in_state = (ms < M)[:, None] & (fs < SIZE)[None, :]
    here = (segment.to(tl.int64) * H + head) * (M * (K + V))
    state = tl.zeros((BM, BF), tl.float32)
    if initial is not None:
        state = tl.load(initial + here + cells, mask=in_state, other=0.0)
    summed = tl.zeros((BM,), tl.float32)
    chunks = tl.cdiv(stop - begin, C).to(tl.int32)
    for n in tl.range(0, chunks, num_stages=STAGES):
        chunk = n
        if REVERSE:
            chunk = chunks - 1 - n
        if chunk_states is not None:
            offset = ((begin // C + segment + chunk) * H + head) * (M * (K + V))
            tl.store(chunk_states + offset + cells, state.to(chunk_states.dtype.element_ty), mask=in_state)
        first = begin + chunk * C
        rows = tl.minimum(stop - first, C).to(tl.int32)
        x_chunk = _load(x, first, head, ts, ms, rows, H, M)
        a_chunk = _load(a, first, head, ts, fs, rows, H, SIZE)
        total = _load_total(decay, first, head, ms, rows, H, M)
        state = decayed(state, total) + dot(tl.trans(x_chunk), a_chunk, DOT, PRECISION)
        summed += total
    if final is not None:
        tl.store(final + here + cells, state, mask=in_state)
    if totals is not None:
        tl.store(totals + (segment.to(tl.int64) * H + head) * M + ms, summed, mask=ms < M)


@triton.jit(do_not_specialize=GEOMETRY)
def _far_slots_kernel(
    a,
    b,
    x,
    log_f,
    decay,
    out,
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
    _, head, first, rows, _ = _chunk(boundaries, T, SEGMENT, SEGMENTS, CHUNKS, H, TILES, C, PACKED)
    if rows <= 0:
        return
    if not _far(decay, first, head, rows, H, M):
        return
    ts = tl.arange(0, C)
    scores = tl.zeros((C, C), tl.float32)
    for start in range(0, SIZE, BF):
        fs = start + tl.arange(0, BF)
        a_block = _load(a, first, head, ts, fs, rows, H, SIZE)
        b_block = _load(b, first, head, ts, fs, rows, H, SIZE)
        scores += dot(a_block, tl.trans(b_block), DOT, PRECISION)

    for start in range(0, M, BM):
        ms = start + tl.arange(0, BM)
        if REVERSE:
            weights = _load(x, first, head, ts, ms, rows, H, M).to(tl.float32)
        else:
            weights = -expm1(_load_log(log_f, first, head, ts, ms, rows, H, M))
        f = _load_decay(decay, first, head, ts, ms, rows, H, M)
        f -= _load_decay(decay, first, head, (ts & -NEAR) - 1, ms, rows, H, M)
        near = tl.where(_causal(ts, NEAR), scores, 0.0)
        if REVERSE:
            near, f = tl.trans(near), -f
        found = exp(f) * dot(near, weights * exp(-f), DOT, PRECISION)
        block = NEAR
        while block < C:
            f = _load_decay(decay, first, head, ts, ms, rows, H, M)
            f -= _load_decay(decay, first, head, _boundary(ts, block), ms, rows, H, M)
            factor = exp(-tl.abs(f))
            across = tl.where(_across(ts, block), scores, 0.0)
            if REVERSE:
                across = tl.trans(across)
            found += factor * dot(across, weights * factor, DOT, PRECISION)
            block *= 2
        found += _load(out, first, head, ts, ms, rows * ADD, H, M)
        _store(out, found, first, head, ts, ms, rows, H, M)


@triton.jit(do_not_specialize=GEOMETRY)
def _far_pairs_kernel(
    x,
    log_f,
    decay,
    out,
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
    _, head, first, rows, index = _chunk(boundaries, T, SEGMENT, SEGMENTS, CHUNKS, H, TILES, C, PACKED)
    if rows <= 0:
        return
    if not _far(decay, first, head, rows, H, M):
        return
    ts = tl.arange(0, C)
    pairs = tl.zeros((C, C), tl.float32)
    for start in range(0, M, BM):
        ms = start + tl.arange(0, BM)
        read = _load(x, first, head, ts, ms, rows, H, M).to(tl.float32)
        p = -expm1(_load_log(log_f, first, head, ts, ms, rows, H, M))
        f = _load_decay(decay, first, head, ts, ms, rows, H, M)
        f -= _load_decay(decay, first, head, (ts & -NEAR) - 1, ms, rows, H, M)
        pairs += tl.where(_causal(ts, NEAR), dot(read * exp(f), tl.trans(p * exp(-f)), DOT, PRECISION), 0.0)
        block = NEAR
        while block < C:
            f = _load_decay(decay, first, head, ts, ms, rows, H, M)
            f -= _load_decay(decay, first, head, _boundary(ts, block), ms, rows, H, M)
            either = tl.where(((ts & block) != 0)[:, None], read, p) * exp(-tl.abs(f))
            pairs += tl.where(_across(ts, block), dot(either, tl.trans(either), DOT, PRECISION), 0.0)
            block *= 2
    tl.store(out + index * (C * C) + ts[:, None] * C + ts[None, :], pairs.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=GEOMETRY)
def _slots_kernel(
    a,
    b,
    decay,
    writes,
    states,
    out,
    boundaries,
    T,
    SEGMENT,
    SEGMENTS,
    CHUNKS,
    H,
    OFFSET,
    TILES: tl.constexpr,
    SIZE: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    BM: tl.constexpr,
    BF: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """
    What a (C, SIZE) reads from each slot of the memory that b was written to, from column OFFSET on. If a chunk decays
    too far, the writes of its own tokens are left to `_far_slots_kernel`.
    """
    tile, head, first, rows, index = _chunk(boundaries, T, SEGMENT, SEGMENTS, CHUNKS, H, TILES, C, PACKED)
    if rows <= 0:
        return
    ts, ms = tl.arange(0, C), tile * BM + tl.arange(0, BM)
    states += index * (M * WIDTH) + OFFSET
    scores = tl.zeros((C, C), tl.float32)
    found = tl.zeros((C, BM), tl.float32)
    for start in tl.range(0, SIZE, BF, num_stages=STAGES):
        fs = start + tl.arange(0, BF)
        a_block = _load(a, first, head, ts, fs, rows, H, SIZE)
        b_block = _load(b, first, head, ts, fs, rows, H, SIZE)
        cells = ms[:, None] * WIDTH + fs[None, :]
        state = tl.load(states + cells, mask=(ms < M)[:, None] & (fs < SIZE)[None, :], other=0.0)
        scores += dot(a_block, tl.trans(b_block), DOT, PRECISION)
        found += dot(a_block, tl.trans(state), DOT, PRECISION)

    far = _far(decay, first, head, rows, H, M)
    total = tl.where(far, 0.0, _load_total(decay, first, head, ms, rows, H, M))
    scores = tl.where(far, 0.0, tl.where(_causal(ts, C), scores, 0.0))
    found *= exp(total)[None, :]
    found += dot(scores, _load(writes, first, head, ts, ms, rows, H, M), DOT, PRECISION)
    found *= exp(_load_decay(decay, first, head, ts, ms, rows, H, M) - total[None, :])
    _store(out, found, first, head, ts, ms, rows, H, M)


@triton.jit(do_not_specialize=GEOMETRY)
def _softmax_kernel(
    logits,
    grads,
    decay,
    x,
    reads,
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
    PACKED: tl.constexpr,
):
    """
    The softmax x of the logits, and x exp(F), its weights for the memory that enters a chunk. With `grads`, the
    gradient of that softmax, x is the gradient of the logits instead, and `grads` becomes the sum of x times its
    gradient over both. x is stored only for chunks that decay too far.
    """
    tile, head, first, rows, _ = _chunk(boundaries, T, SEGMENT, SEGMENTS, CHUNKS, H, TILES, C, PACKED)
    ROWS: tl.constexpr = C // TILES
    if rows <= tile * ROWS:
        return
    ts, ms = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BM)
    z = _load(logits, first, head, ts, ms, rows, H, M)
    s = exp(z - tl.max(tl.where((ms < M)[None, :], z, -float("inf")), 1)[:, None])
    s = tl.where((ms < M)[None, :], s, 0.0)
    s /= tl.sum(s, 1)[:, None]
    if grads is not None:
        grad = _load(grads, first, head, ts, ms, rows, H, M)
        grad_z = s * (grad - tl.sum(s * grad, 1)[:, None])
        _store(grads, s * grad + grad_z * z, first, head, ts, ms, rows, H, M)
        s = grad_z
    _store(reads, s * exp(_load(decay, first, head, ts, ms, rows, H, M)), first, head, ts, ms, rows, H, M)
    if _far(decay, first, head, rows, H, M):
        _store(x, s, first, head, ts, ms, rows, H, M)


@triton.jit(do_not_specialize=GEOMETRY)
def _features_kernel(
    a,
    decay,
    reads,
    writes,
    far_pairs,
    states,
    out,
    boundaries,
    T,
    SEGMENT,
    SEGMENTS,
    CHUNKS,
    H,
    OFFSET,
    TILES: tl.constexpr,
    SIZE: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    BM: tl.constexpr,
    BF: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
    REVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """
    What `reads`, x exp(F), read from the memory that a (C, SIZE) was written to, from column OFFSET on. With REVERSE
    what `writes` read from the gradient of the memory, to which a contributed through x. If a chunk decays too far,
    `far_pairs` has the weights of its tokens' writes in each other's reads.
    """
    tile, head, first, rows, index = _chunk(boundaries, T, SEGMENT, SEGMENTS, CHUNKS, H, TILES, C, PACKED)
    if rows <= 0:
        return
    ts, fs = tl.arange(0, C), tile * BF + tl.arange(0, BF)
    states += index * (M * WIDTH) + OFFSET
    pairs = tl.zeros((C, C), tl.float32)
    found = tl.zeros((C, BF), tl.float32)
    for start in tl.range(0, M, BM, num_stages=STAGES):
        ms = start + tl.arange(0, BM)
        total = _load_total(decay, first, head, ms, rows, H, M)
        x_block = _load(reads, first, head, ts, ms, rows, H, M)
        p_block = _load(writes, first, head, ts, ms, rows, H, M)
        cells = ms[:, None] * WIDTH + fs[None, :]
        state = tl.load(states + cells, mask=(ms < M)[:, None] & (fs < SIZE)[None, :], other=0.0)
        found += dot(p_block if REVERSE else x_block, state, DOT, PRECISION)
        x_block = x_block.to(tl.float32) * exp(-tl.maximum(total, LIMIT))[None, :]
        pairs += dot(x_block, tl.trans(p_block), DOT, PRECISION)

    far = _far(decay, first, head, rows, H, M)
    pairs = tl.where(far, 0.0, tl.where(_causal(ts, C), pairs, 0.0))
    cells, left = index * (C * C) + ts[:, None] * C + ts[None, :], tl.where(far, rows, 0)
    pairs += tl.load(far_pairs + cells, mask=(ts < left)[:, None], other=0.0).to(tl.float32)
    if REVERSE:
        pairs = tl.trans(pairs)
    found += dot(pairs, _load(a, first, head, ts, fs, rows, H, SIZE), DOT, PRECISION)
    _store(out, found, first, head, ts, fs, rows, H, SIZE)


@triton.jit
def _given(
    given,
    kept,
    a,
    b,
    states,
    grads,
    ms,
    first,
    head,
    rows,
    H,
    SIZE: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    C: tl.constexpr,
    BF: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """
    Adds what b reads from the gradient of the memory that leaves a chunk to `given`, and the product of that gradient
    with the memory that enters the chunk to `kept`. Returns the products of b (rows) and a (columns).
    """
    ts = tl.arange(0, C)
    scores = tl.zeros((C, C), tl.float32)
    for start in tl.range(0, SIZE, BF, num_stages=STAGES):
        fs = start + tl.arange(0, BF)
        a_block = _load(a, first, head, ts, fs, rows, H, SIZE)
        b_block = _load(b, first, head, ts, fs, rows, H, SIZE)
        in_state = (ms < M)[:, None] & (fs < SIZE)[None, :]
        cells = ms[:, None] * WIDTH + fs[None, :]
        state = tl.load(states + cells, mask=in_state, other=0.0)
        grad = tl.load(grads + cells, mask=in_state, other=0.0)
        scores += dot(b_block, tl.trans(a_block), DOT, PRECISION)
        given += dot(b_block, tl.trans(grad), DOT, PRECISION)
        kept += tl.sum(state.to(tl.float32) * grad.to(tl.float32), 1)
    return given, kept, scores


@triton.jit(do_not_specialize=GEOMETRY)
def _decay_kernel(
    q,
    k,
    grad_out,
    v,
    log_f,
    decay,
    writes,
    reads_keys,
    reads_values,
    sums,
    states,
    grads,
    out,
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
    BM: tl.constexpr,
    BF: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """
    The gradient of log_f. That of p is what k and v read from the gradient of the memory. `sums` has the products of
    each token's reads with their gradients, over both memories, `out` the gradient of p within a chunk that decays too
    far. A decay affects what is read from its token on of what was written before it: everything that is read from
    there on, less the writes from there on, and everything that passes from this chunk to later ones.
    """
    tile, head, first, rows, index = _chunk(boundaries, T, SEGMENT, SEGMENTS, CHUNKS, H, TILES, C, PACKED)
    if rows <= 0:
        return
    ts, ms = tl.arange(0, C), tile * BM + tl.arange(0, BM)
    states += index * (M * (K + V))
    grads += index * (M * (K + V))
    given = tl.zeros((C, BM), tl.float32)
    kept = tl.zeros((BM,), tl.float32)
    # fmt: off
    given, kept, key_scores = _given(
        given, kept, q, k, states, grads, ms, first, head, rows, H, K, M, K + V, C, BF, DOT, PRECISION, STAGES
    )
    given, kept, value_scores = _given(
        given, kept, grad_out, v, states + K, grads + K, ms, first, head, rows, H, V, M, K + V, C, BF, DOT, PRECISION,
        STAGES,
    )
    # fmt: on
    total = _load_total(decay, first, head, ms, rows, H, M)
    kept = kept * exp(total)
    kept += tl.sum(_load(writes, first, head, ts, ms, rows, H, M).to(tl.float32) * given, 0)

    far = _far(decay, first, head, rows, H, M)
    future = ts[:, None] <= ts[None, :]
    key_scores = tl.where(far, 0.0, tl.where(future, key_scores, 0.0))
    value_scores = tl.where(far, 0.0, tl.where(future, value_scores, 0.0))
    given *= exp(tl.where(far, 0.0, total))[None, :]
    given += dot(key_scores, _load(reads_keys, first, head, ts, ms, rows, H, M), DOT, PRECISION)
    given += dot(value_scores, _load(reads_values, first, head, ts, ms, rows, H, M), DOT, PRECISION)
    given *= exp(tl.where(far, total, 0.0)[None, :] - _load_decay(decay, first, head, ts, ms, rows, H, M))
    given += _load(out, first, head, ts, ms, tl.where(far, rows, 0), H, M)

    log = _load(log_f, first, head, ts, ms, rows, H, M).to(tl.float32)
    erased = log < LOWEST
    change = expm1(tl.where(erased, LOWEST, log))
    grad = _load(sums, first, head, ts, ms, rows, H, M) + change * given
    grad = tl.cumsum(grad, 0, reverse=True) + kept[None, :] - (change + 1) * given
    _store(out, tl.where(erased, 0.0, grad), first, head, ts, ms, rows, H, M)


@triton.jit
def _step_kernel(
    q,
    k,
    v,
    log_f,
    state,
    new_state,
    parts,
    tops,
    K: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    INPLACE: tl.constexpr,
):
    """One token and a tile of slots of one head. In place, slots that the token does not write to are not stored."""
    head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ms, ks, vs = tile * BM + tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, BV)
    log = tl.load(log_f + head * M + ms, mask=ms < M, other=0.0).to(tl.float32)
    written = ms < M
    in_keys, in_values = written[:, None] & (ks < K)[None, :], written[:, None] & (vs < V)[None, :]
    slots = head * (M * (K + V)) + ms[:, None] * (K + V)
    key_cells, value_cells = slots + ks[None, :], slots + K + vs[None, :]

    query = tl.load(q + head * K + ks, mask=ks < K, other=0.0).to(tl.float32)
    key = tl.load(k + head * K + ks, mask=ks < K, other=0.0).to(tl.float32)
    value = tl.load(v + head * V + vs, mask=vs < V, other=0.0).to(tl.float32)
    keys = tl.load(state + key_cells, mask=in_keys, other=0.0)
    values = tl.load(state + value_cells, mask=in_values, other=0.0)
    change = expm1(log)[:, None]
    keys += change * (keys - key[None, :])
    values += change * (values - value[None, :])
    z = tl.where(ms < M, tl.sum(keys * query[None, :], 1), -float("inf"))
    top = tl.max(z)
    s = exp(z - top)
    index = head * tl.num_programs(1) + tile
    part = index * (V + 1)
    tl.store(parts + part + vs, tl.sum(s[:, None] * values, 0), mask=vs < V)
    tl.store(parts + part + V, tl.sum(s))
    tl.store(tops + index, top)
    if INPLACE:
        written &= log != 0
    tl.store(new_state + key_cells, keys, mask=written[:, None] & (ks < K)[None, :])
    tl.store(new_state + value_cells, values, mask=written[:, None] & (vs < V)[None, :])


@triton.jit
def _join_kernel(parts, tops, out, TILES: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr):
    """Combines the outputs of the tiles of slots to the output of a step."""
    head = tl.program_id(0).to(tl.int64)
    tiles, vs = tl.arange(0, BT), tl.program_id(1) * BV + tl.arange(0, BV)
    top = tl.load(tops + head * TILES + tiles, mask=tiles < TILES, other=-float("inf"))
    factor = exp(top - tl.max(top))
    rows = (head * TILES + tiles) * (V + 1)
    total = tl.sum(factor * tl.load(parts + rows + V, mask=tiles < TILES, other=0.0))
    part = tl.load(parts + rows[:, None] + vs[None, :], mask=(tiles < TILES)[:, None] & (vs < V)[None, :], other=0.0)
    y = tl.sum(factor[:, None] * part, 0) / total
    tl.store(out + head * V + vs, y.to(out.dtype.element_ty), mask=vs < V)


# The shortest segment that is worth the passes that compute the state that enters it. Documents are always cut into
# segments of at most this length, so that short ones do not wait for long ones.
MIN_SEGMENT = 512


def _block(size: int, most: int) -> int:
    """The block size for a dimension: a power of two, and at least as much as a product needs."""
    return min(max(16, triton.next_power_of_2(size)), most)


class _Plan(Segments):
    """How the work is divided into programs."""

    def __init__(self, k, v, log_f, cu_seqlens):
        batch, length, self.heads, self.key_size = k.shape
        self.value_size, self.slots = v.shape[-1], log_f.shape[-1]
        self.like = log_f
        self.chunk = 64
        # float32 needs twice the memory, and three products instead of one.
        narrow, self.hip = k.dtype == torch.bfloat16, torch.version.hip is not None
        self.dtype = torch.bfloat16 if narrow else torch.float32
        self.constants = {"M": self.slots, "C": self.chunk, "PACKED": cu_seqlens is not None}
        self.products = operands(k.dtype)
        self.walk_slots = _block(self.slots, 64)
        self.walk_features = _block(max(self.key_size, self.value_size), 128 if narrow else 32)
        self.slot_blocks = {"BM": _block(self.slots, 128 if narrow else 64), "BF": 64 if narrow else 32}
        self.feature_blocks = {"BM": _block(self.slots, 64 if narrow else 32), "BF": 128 if narrow else 64}

        columns = sum(triton.cdiv(size, self.walk_features) for size in (self.key_size, self.value_size))
        self.walk_tiles = triton.cdiv(self.slots, self.walk_slots) * columns
        programs = batch * self.heads * self.walk_tiles
        wanted = 2 * multiprocessors(k)  # the number of programs that run at a time
        super().__init__(
            batch,
            length,
            chunk=self.chunk,
            programs=programs,
            wanted=wanted,
            shortest=MIN_SEGMENT,
            cu_seqlens=cu_seqlens,
            longest=MIN_SEGMENT,
        )
        self.per_segment = triton.cdiv(self.segment, self.chunk)
        self.geometry = (self.boundaries, length, self.segment, self.per_sequence)

    def pipeline(self, columns: int) -> dict:
        """How many warps compute a product with this number of columns, and how many tiles they load ahead."""
        narrow = self.dtype == torch.bfloat16
        # Eight warps of a Hopper GPU share the columns of 64 rows. Triton reads a row-major bfloat16 operand wrongly
        # if its half has fewer than 64 columns, one row of shared memory.
        few = self.hip or (narrow and columns < 128)
        return {"STAGES": 2 if narrow and not self.hip else 1, "num_warps": 4 if few else 8}

    def empty(self, *shape, dtype=torch.float32):
        return self.like.new_empty(shape, dtype=dtype)

    def state(self, n, dtype=torch.float32):
        return self.empty(n, self.heads, self.slots, self.key_size + self.value_size, dtype=dtype)

    def by_slot(self, dtype=torch.float32):
        return self.empty(*self.like.shape, dtype=dtype)

    def launch(self, kernel, *arguments, tiles, last=None, **constants):
        """Runs one program for each tile of each head of each chunk."""
        grid = (self.segments * self.per_segment * self.heads * tiles,)
        geometry = *self.geometry, self.per_segment, self.heads, *(() if last is None else (last,))
        constants = {"TILES": tiles, **self.constants, **constants}
        launch(kernel, grid, *arguments, *geometry, **constants)

    def decays(self, log_f):
        """F of each token, and the part of its write that is left at the end of its chunk."""
        decay, writes = self.by_slot(), self.by_slot(self.dtype)
        block = _block(self.slots, 64)
        self.launch(
            _decay_sum_kernel, log_f, decay, writes, tiles=triton.cdiv(self.slots, block), BM=block, num_warps=8
        )
        return decay, writes

    def _walk(self, inputs, initial, final, totals, chunk_states, reverse):
        launch(
            _walk_kernel,
            (self.segments * self.heads * self.walk_tiles,),
            *(*inputs, initial, final, totals, chunk_states, *self.geometry, self.heads),
            K=self.key_size,
            V=self.value_size,
            BM=self.walk_slots,
            BF=self.walk_features,
            REVERSE=reverse,
            **self.constants,
            **self.products,
            **self.pipeline(self.walk_features),
        )

    def walk(self, inputs, initial, *, store=True, reverse=False):
        """The memories that enter the chunks, if they are stored, and those that leave the sequences."""
        chunk_states = self.state(self.chunks, self.dtype) if store else None
        final = self.state(self.sequences)
        if self.whole:
            self._walk(inputs, initial, final, None, chunk_states, reverse)
            return chunk_states, final
        states, totals = self.state(self.segments), self.empty(self.segments, self.heads, self.slots)
        self._walk(inputs, None, states, totals, None, reverse)
        launch(*self.passing(states, totals, initial, final, reverse))
        if store:
            self._walk(inputs, states, None, None, chunk_states, reverse)
        return chunk_states, final

    def _far_slots(self, a, b, x, log_f, decay, out, add):
        constants = {"BM": _block(self.slots, 32), "BF": 32, "SIZE": a.shape[-1], "REVERSE": x is not None}
        arguments = a, b, x, log_f, decay, out
        self.launch(_far_slots_kernel, *arguments, tiles=1, last=add, **constants, **self.products)

    def find(self, a, b, log_f, decay, writes, states, offset):
        """What a reads from each slot of b: the logits, or the gradient of their softmax."""
        out = self.by_slot()
        self.launch(
            _slots_kernel,
            *(a, b, decay, writes, states, out),
            tiles=triton.cdiv(self.slots, self.slot_blocks["BM"]),
            last=offset,
            SIZE=a.shape[-1],
            WIDTH=self.key_size + self.value_size,
            **self.slot_blocks,
            **self.products,
            **self.pipeline(self.slot_blocks["BM"]),
        )
        self._far_slots(a, b, None, log_f, decay, out, add=1)
        return out

    def softmax(self, logits, grads, decay):
        """The softmax x of the logits, or the gradient of the logits, and x exp(F)."""
        x, reads = self.by_slot(self.dtype), self.by_slot(self.dtype)
        tiles, block = self.chunk // 16, _block(self.slots, 512)
        self.launch(_softmax_kernel, logits, grads, decay, x, reads, tiles=tiles, BM=block)
        return x, reads

    def far_pairs(self, x, log_f, decay):
        """The weights of the tokens' writes in each other's reads with x, for chunks that decay too far."""
        pairs = self.empty(self.chunks, self.heads, self.chunk, self.chunk, dtype=self.dtype)
        block = _block(self.slots, 32)
        self.launch(_far_pairs_kernel, x, log_f, decay, pairs, tiles=1, BM=block, **self.products)
        return pairs

    def features(self, a, decay, reads, writes, far_pairs, states, out, offset, reverse=False):
        """What x reads of a; in reverse the gradient of the writes."""
        self.launch(
            _features_kernel,
            *(a, decay, reads, writes, far_pairs, states, out),
            tiles=triton.cdiv(a.shape[-1], self.feature_blocks["BF"]),
            last=offset,
            SIZE=a.shape[-1],
            WIDTH=self.key_size + self.value_size,
            REVERSE=reverse,
            **self.feature_blocks,
            **self.products,
            **self.pipeline(self.feature_blocks["BF"]),
        )

    def decay_grads(self, q, k, grad_out, v, x_keys, x_values, log_f, decay, *arguments):
        """The gradient of log_f."""
        out = self.by_slot()
        self._far_slots(q, k, x_keys, log_f, decay, out, add=0)
        self._far_slots(grad_out, v, x_values, log_f, decay, out, add=1)
        self.launch(
            _decay_kernel,
            *(q, k, grad_out, v, log_f, decay, *arguments, out),
            tiles=triton.cdiv(self.slots, self.slot_blocks["BM"]),
            K=self.key_size,
            V=self.value_size,
            **self.slot_blocks,
            **self.products,
            **self.pipeline(self.slot_blocks["BM"]),
        )
        return out


def _prepare(*tensors):
    """Contiguous tensors of one dtype."""
    dtype = tensors[0].dtype
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    return contiguous(*(x.to(dtype) for x in tensors))


def slot_memory_triton(q, k, v, log_f, initial_state, cu_seqlens):
    """
    Computes [`subquad_kernels.slot_memory`]. Also returns the logits (B, T, H, M) in float32, which the backward pass
    needs.
    """
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    q, k, v = _prepare(q, k, v)
    log_f, initial_state = _decays_and_state(log_f, initial_state)
    plan = _Plan(k, v, log_f, cu_seqlens)
    decay, writes = plan.decays(log_f)
    states, final = plan.walk((writes, k, writes, v, decay), initial_state)
    logits = plan.find(q, k, log_f, decay, writes, states, 0)
    x, reads = plan.softmax(logits, None, decay)
    far_pairs = plan.far_pairs(x, log_f, decay)
    plan.features(v, decay, reads, writes, far_pairs, states, out, k.shape[-1])
    return out, final, logits


def _decays_and_state(log_f, state):
    return log_f.contiguous(), None if state is None else state.float().contiguous()


def slot_memory_triton_backward(grad_out, grad_state, logits, q, k, v, log_f, initial_state, cu_seqlens):
    """
    Gradients of q, k, v, log_f and, if it is given, initial_state, the last two in float32. The memories that enter
    the chunks are computed again; they and their gradients are kept in the dtype of the products during the pass.
    """
    dtypes = [x.dtype for x in (q, k, v)]
    grad_out, q, k, v = _prepare(grad_out.to(v.dtype), q, k, v)
    log_f, initial_state = _decays_and_state(log_f, initial_state)
    logits, grad_state = logits.contiguous(), grad_state.float().contiguous()
    plan = _Plan(k, v, log_f, cu_seqlens)
    decay, writes = plan.decays(log_f)
    states, _ = plan.walk((writes, k, writes, v, decay), initial_state)
    key_size = k.shape[-1]

    x_values, reads_values = plan.softmax(logits, None, decay)
    sums = plan.find(grad_out, v, log_f, decay, writes, states, key_size)
    x_keys, reads_keys = plan.softmax(logits, sums, decay)
    grads, grad_initial = plan.walk((reads_keys, q, reads_values, grad_out, decay), grad_state, reverse=True)

    dq, dk, dv = (torch.empty_like(x, dtype=dtype) for x, dtype in zip((q, k, v), dtypes, strict=True))
    far_pairs = plan.far_pairs(x_values, log_f, decay)
    plan.features(grad_out, decay, reads_values, writes, far_pairs, grads, dv, key_size, reverse=True)
    far_pairs = plan.far_pairs(x_keys, log_f, decay)
    plan.features(k, decay, reads_keys, writes, far_pairs, states, dq, 0)
    plan.features(q, decay, reads_keys, writes, far_pairs, grads, dk, 0, reverse=True)
    arguments = x_keys, x_values, log_f, decay, writes, reads_keys, reads_values, sums, states, grads
    dlog_f = plan.decay_grads(q, k, grad_out, v, *arguments)
    found = [dq, dk, dv, dlog_f]
    return found if initial_state is None else [*found, grad_initial]


def slot_memory_triton_state(k, v, log_f, initial_state, cu_seqlens):
    """The state of [`slot_memory_triton`] alone."""
    k, v = _prepare(k, v)
    log_f, initial_state = _decays_and_state(log_f, initial_state)
    plan = _Plan(k, v, log_f, cu_seqlens)
    decay, writes = plan.decays(log_f)
    return plan.walk((writes, k, writes, v, decay), initial_state, store=False)[1]


def slot_memory_triton_step(q, k, v, log_f, state, new_state):
    """
    One token: q, k (B, H, K), v (B, H, V), log_f (B, H, M), state (B, H, M, K + V) in float32. If the state is None,
    `new_state` holds it, and only the slots that the token writes to are stored. Writes the state after the token to
    `new_state`. Returns out (B, H, V) in the dtype of v.
    """
    q, k, v, log_f = contiguous(q, k, v, log_f)
    batch, heads, key_size = k.shape
    value_size, slots, block = v.shape[-1], log_f.shape[-1], 16
    tiles = triton.cdiv(slots, block)
    out = torch.empty_like(v)
    parts = k.new_empty(batch * heads, tiles, value_size + 1, dtype=torch.float32)
    tops = k.new_empty(batch * heads, tiles, dtype=torch.float32)
    sizes = {"BK": triton.next_power_of_2(key_size), "BV": triton.next_power_of_2(value_size)}
    launch(
        _step_kernel,
        (batch * heads, tiles),
        *(q, k, v, log_f, new_state if state is None else state, new_state, parts, tops),
        K=key_size,
        V=value_size,
        M=slots,
        BM=block,
        **sizes,
        INPLACE=state is None,
    )
    columns = min(sizes["BV"], 128)
    launch(
        _join_kernel,
        (batch * heads, triton.cdiv(value_size, columns)),
        *(parts, tops, out),
        TILES=tiles,
        V=value_size,
        BT=triton.next_power_of_2(tiles),
        BV=columns,
    )
    return out

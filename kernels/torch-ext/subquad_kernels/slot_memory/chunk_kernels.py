"""
The kernels of the slot memory that compute chunks of tokens, and their common functions.

Both passes are parallel over chunks. Only `_walk_kernel` goes from chunk to chunk, with a tile of the memory on chip,
and stores the memory that enters each. (If a sequence gives too few programs, it is cut into segments that are
computed in parallel, see segments.py.) A program of the other kernels computes one chunk of a head. `_slots_kernel`
and `_decay_kernel` have a result for each slot: sums of decayed writes, weighted by products of queries and keys.
`_features_kernel` has a result for each feature: sums over tokens, weighted by products of reads and decayed writes.

With F the running sum of log decays from the start of a chunk, the write of token s has decayed by exp(F_t - F_s) when
token t reads it. If no slot decays by more than exp(LIMIT) in a chunk, the factors exp(F_t) and exp(-F_s) neither
overflow nor lose digits, and all pairs of tokens of the chunk are one product. The other chunks, rare in trained
models, are marked in `far_chunks` and left to far_kernels.py.
"""

import triton
import triton.language as tl

from ..segments import decayed, dot, exp, expm1, program, tokens


# A larger decay in one step empties a slot: exp(-17) is 4e-8.
LOWEST: tl.constexpr = tl.constexpr(-17.0)
LIMIT: tl.constexpr = tl.constexpr(-64.0)
# These change from call to call, and gain nothing as constants.
GEOMETRY = ["T", "SEGMENT", "SEGMENTS", "CHUNKS", "H", "ADD"]


@triton.jit
def place(boundaries, T, SEGMENT, SEGMENTS, CHUNKS, H, TILES, C: tl.constexpr, PACKED: tl.constexpr):
    """The tile and head of this program, the first token and number of tokens of its chunk, the index of the chunk."""
    tile, head, n = program(H, TILES)
    segment, chunk = n // CHUNKS, n % CHUNKS
    begin, stop = tokens(boundaries, segment, T, SEGMENT, SEGMENTS, PACKED)
    first = begin + chunk * C
    rows = tl.minimum(stop - first, C).to(tl.int32)
    return tile, head, first, rows, (begin // C + segment + chunk) * H + head


@triton.jit
def cells_of(x, first, head, ts, columns, H, SIZE):
    return x + (first * H + head) * SIZE + ts[:, None] * (H * SIZE) + columns[None, :]


@triton.jit
def load(x, first, head, ts, columns, rows, H, SIZE):
    """The tokens of a chunk, zeros after the last one."""
    mask = (ts < rows)[:, None] & (columns < SIZE)[None, :]
    return tl.load(cells_of(x, first, head, ts, columns, H, SIZE), mask=mask, other=0.0)


@triton.jit
def store(x, value, first, head, ts, columns, rows, H, SIZE: tl.constexpr):
    mask = (ts < rows)[:, None] & (columns < SIZE)[None, :]
    tl.store(cells_of(x, first, head, ts, columns, H, SIZE), value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def load_log(log_f, first, head, ts, ms, rows, H, M: tl.constexpr):
    log = load(log_f, first, head, ts, ms, rows, H, M).to(tl.float32)
    return tl.where(log < LOWEST, LOWEST, log)


@triton.jit
def load_decay(decay, first, head, ts, ms, rows, H, M: tl.constexpr):
    """F of the tokens ts: 0 before the chunk, and the last token's F after it."""
    ts = tl.minimum(ts, rows - 1)
    return tl.load(cells_of(decay, first, head, ts, ms, H, M), mask=(ts >= 0)[:, None] & (ms < M)[None, :], other=0.0)


@triton.jit
def load_total(decay, first, head, ms, rows, H, M: tl.constexpr):
    """The summed log decay of a chunk."""
    return tl.load(decay + ((first + rows - 1) * H + head) * M + ms, mask=ms < M, other=0.0)


@triton.jit
def causal(rs, ts, N: tl.constexpr):
    """The pairs of a token (row) and the same or an earlier token of its block (column), whose write it reads."""
    return (rs[:, None] >= ts[None, :]) & ((rs & -N)[:, None] == (ts & -N)[None, :])


@triton.jit(do_not_specialize=GEOMETRY)
def _decay_sum_kernel(
    log_f,
    decay,
    writes,
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
    PACKED: tl.constexpr,
):
    """
    F of each token, and the remaining part of its write at the end of its chunk, p exp(F_end - F). Marks chunks that
    decay too far in `far_chunks`, initially zeros.
    """
    tile, head, first, rows, index = place(boundaries, T, SEGMENT, SEGMENTS, CHUNKS, H, TILES, C, PACKED)
    if rows <= 0:
        return
    ts, ms = tl.arange(0, C), tile * BM + tl.arange(0, BM)
    log = load_log(log_f, first, head, ts, ms, rows, H, M)
    f = tl.cumsum(log, 0)
    total = tl.sum(tl.where((ts == C - 1)[:, None], f, 0.0), 0)
    store(decay, f, first, head, ts, ms, rows, H, M)
    store(writes, -expm1(log) * exp(total[None, :] - f), first, head, ts, ms, rows, H, M)
    if tl.min(total) < LIMIT:
        tl.atomic_max(far_chunks + index, 1)


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
    x_keysᵀ keys to the key columns and x_valuesᵀ values to the value columns. With REVERSE it goes from the
    last chunk to the first, like the gradient of the memory.
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
        x_chunk = load(x, first, head, ts, ms, rows, H, M)
        a_chunk = load(a, first, head, ts, fs, rows, H, SIZE)
        total = load_total(decay, first, head, ms, rows, H, M)
        state = decayed(state, total) + dot(tl.trans(x_chunk), a_chunk, DOT, PRECISION)
        summed += total
    if final is not None:
        tl.store(final + here + cells, state, mask=in_state)
    if totals is not None:  # noqa: SIM102
        if tile == 0:  # all tiles have the same sums
            tl.store(totals + (segment.to(tl.int64) * H + head) * M + ms, summed, mask=ms < M)


@triton.jit(do_not_specialize=GEOMETRY)
def _slots_kernel(
    a,
    b,
    decay,
    writes,
    states,
    out,
    far_chunks,
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
    The readout of a (C, SIZE) from each slot of the memory of b, from column OFFSET on. If a chunk decays too far, the
    writes of its own tokens are left to `_softmax_kernel`.
    """
    tile, head, first, rows, index = place(boundaries, T, SEGMENT, SEGMENTS, CHUNKS, H, TILES, C, PACKED)
    if rows <= 0:
        return
    far = tl.load(far_chunks + index) != 0
    ts, ms = tl.arange(0, C), tile * BM + tl.arange(0, BM)
    states += index * (M * WIDTH) + OFFSET
    scores = tl.zeros((C, C), tl.float32)
    found = tl.zeros((C, BM), tl.float32)
    for start in tl.range(0, SIZE, BF, num_stages=STAGES):
        fs = start + tl.arange(0, BF)
        a_block = load(a, first, head, ts, fs, rows, H, SIZE)
        b_block = load(b, first, head, ts, fs, rows, H, SIZE)
        cells = ms[:, None] * WIDTH + fs[None, :]
        state = tl.load(states + cells, mask=(ms < M)[:, None] & (fs < SIZE)[None, :], other=0.0)
        scores += dot(a_block, tl.trans(b_block), DOT, PRECISION)
        found += dot(a_block, tl.trans(state), DOT, PRECISION)

    total = tl.where(far, 0.0, load_total(decay, first, head, ms, rows, H, M))
    scores = tl.where(far, 0.0, tl.where(causal(ts, ts, C), scores, 0.0))
    found *= exp(total)[None, :]
    found += dot(scores, load(writes, first, head, ts, ms, rows, H, M), DOT, PRECISION)
    found *= exp(load_decay(decay, first, head, ts, ms, rows, H, M) - total[None, :])
    store(out, found, first, head, ts, ms, rows, H, M)


@triton.jit(do_not_specialize=GEOMETRY)
def _features_kernel(
    a,
    decay,
    reads,
    writes,
    far_pairs,
    states,
    out,
    far_chunks,
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
    The readout of `reads`, x exp(F), from the memory of a (C, SIZE), from column OFFSET on. With REVERSE, the readout
    of `writes` from the gradient of the memory, to which a contributed through x. If a chunk decays too far,
    `far_pairs` has the weights of its tokens' writes in each other's reads.
    """
    tile, head, first, rows, index = place(boundaries, T, SEGMENT, SEGMENTS, CHUNKS, H, TILES, C, PACKED)
    if rows <= 0:
        return
    far = tl.load(far_chunks + index) != 0
    ts, fs = tl.arange(0, C), tile * BF + tl.arange(0, BF)
    states += index * (M * WIDTH) + OFFSET
    pairs = tl.zeros((C, C), tl.float32)
    found = tl.zeros((C, BF), tl.float32)
    for start in tl.range(0, M, BM, num_stages=STAGES):
        ms = start + tl.arange(0, BM)
        total = load_total(decay, first, head, ms, rows, H, M)
        x_block = load(reads, first, head, ts, ms, rows, H, M)
        p_block = load(writes, first, head, ts, ms, rows, H, M)
        cells = ms[:, None] * WIDTH + fs[None, :]
        state = tl.load(states + cells, mask=(ms < M)[:, None] & (fs < SIZE)[None, :], other=0.0)
        found += dot(p_block if REVERSE else x_block, state, DOT, PRECISION)
        x_block = x_block.to(tl.float32) * exp(-tl.maximum(total, LIMIT))[None, :]
        pairs += dot(x_block, tl.trans(p_block), DOT, PRECISION)

    pairs = tl.where(far, 0.0, tl.where(causal(ts, ts, C), pairs, 0.0))
    cells, left = index * (C * C) + ts[:, None] * C + ts[None, :], tl.where(far, rows, 0)
    pairs += tl.load(far_pairs + cells, mask=(ts < left)[:, None], other=0.0).to(tl.float32)
    if REVERSE:
        pairs = tl.trans(pairs)
    found += dot(pairs, load(a, first, head, ts, fs, rows, H, SIZE), DOT, PRECISION)
    store(out, found, first, head, ts, fs, rows, H, SIZE)


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
    far,
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
    Adds the readout of b from the gradient of the memory that leaves a chunk to `given`, and the product of that
    gradient with the memory that enters the chunk to `kept`. Returns the products of b (rows) and the a (columns) that
    read it, zeros if the chunk decays too far.
    """
    ts = tl.arange(0, C)
    scores = tl.zeros((C, C), tl.float32)
    for start in tl.range(0, SIZE, BF, num_stages=STAGES):
        fs = start + tl.arange(0, BF)
        a_block = load(a, first, head, ts, fs, rows, H, SIZE)
        b_block = load(b, first, head, ts, fs, rows, H, SIZE)
        in_state = (ms < M)[:, None] & (fs < SIZE)[None, :]
        cells = ms[:, None] * WIDTH + fs[None, :]
        state = tl.load(states + cells, mask=in_state, other=0.0)
        grad = tl.load(grads + cells, mask=in_state, other=0.0)
        scores += dot(b_block, tl.trans(a_block), DOT, PRECISION)
        given += dot(b_block, tl.trans(grad), DOT, PRECISION)
        kept += tl.sum(state.to(tl.float32) * grad.to(tl.float32), 1)
    scores = tl.where(far, 0.0, tl.where(ts[:, None] <= ts[None, :], scores, 0.0))
    return given, kept, scores.to(DOT)


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
    BM: tl.constexpr,
    BF: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """
    The gradient of log_f. The gradient of p is the readout of k and v from the gradient of the memory. `sums` has the
    products of each token's reads with their gradients, over both memories, `out` the gradient of p within a chunk
    that decays too far. A decay affects later reads of earlier writes: its gradient sums everything read from its
    token on, minus the writes from there on, plus everything that passes from this chunk to later ones.
    """
    tile, head, first, rows, index = place(boundaries, T, SEGMENT, SEGMENTS, CHUNKS, H, TILES, C, PACKED)
    if rows <= 0:
        return
    far = tl.load(far_chunks + index) != 0
    ts, ms = tl.arange(0, C), tile * BM + tl.arange(0, BM)
    states += index * (M * (K + V))
    grads += index * (M * (K + V))
    given = tl.zeros((C, BM), tl.float32)
    kept = tl.zeros((BM,), tl.float32)
    # fmt: off
    given, kept, key_scores = _given(
        given, kept, q, k, states, grads, ms, first, head, rows, far, H, K, M, K + V, C, BF, DOT, PRECISION, STAGES
    )
    given, kept, value_scores = _given(
        given, kept, grad_out, v, states + K, grads + K, ms, first, head, rows, far, H, V, M, K + V, C, BF, DOT,
        PRECISION, STAGES,
    )
    # fmt: on
    total = load_total(decay, first, head, ms, rows, H, M)
    kept = kept * exp(total)
    kept += tl.sum(load(writes, first, head, ts, ms, rows, H, M).to(tl.float32) * given, 0)

    given *= exp(tl.where(far, 0.0, total))[None, :]
    given += dot(key_scores, load(reads_keys, first, head, ts, ms, rows, H, M), DOT, PRECISION)
    given += dot(value_scores, load(reads_values, first, head, ts, ms, rows, H, M), DOT, PRECISION)
    given *= exp(tl.where(far, total, 0.0)[None, :] - load_decay(decay, first, head, ts, ms, rows, H, M))
    given += load(out, first, head, ts, ms, tl.where(far, rows, 0), H, M)

    log = load(log_f, first, head, ts, ms, rows, H, M).to(tl.float32)
    erased = log < LOWEST
    change = expm1(tl.where(erased, LOWEST, log))
    grad = load(sums, first, head, ts, ms, rows, H, M) + change * given
    grad = tl.cumsum(grad, 0, reverse=True) + kept[None, :] - (change + 1) * given
    store(out, tl.where(erased, 0.0, grad), first, head, ts, ms, rows, H, M)

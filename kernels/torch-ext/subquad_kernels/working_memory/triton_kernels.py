"""
The working memory as Triton kernels.

A chunk changes the memory linearly, M' = M + r ⊙ (U - G M - M). U = Pᵀ V and G = Pᵀ F, with P and F the softmax of
the keys of the chunk over its tokens and over the features, are computed for all chunks in parallel. Only
`_absorb_kernel` goes from chunk to chunk, with all rows of some columns of the memory on chip, and stores each version
of it. `_absorb_gradient_kernel` goes back with the gradient of the memory.

All products over tokens are of two kinds, each over ranges of tokens that belong to one matrix: `_product_kernel` sums
over the tokens of a range, AᵀX, and `_rows_kernel` multiplies each token by the matrix of its range, A M. A range is
the tokens of a chunk that are not ignored, or those that read one version of the memory. Nothing else is read.

The operands of products, including the versions of the memory, are kept in the dtype of the products.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..backend import (
    block_size,
    cdiv,
    common_dtype,
    launch,
    multiprocessors,
    next_power_of_2,
    shared_memory,
    strided,
    without_autocast,
)
from ..once import once
from ..segments import dot, exp, operands, program
from .eager import assert_chunks


# These differ from call to call, and as constants would gain nothing.
GEOMETRY = ["N", "LENGTH", "BLOCKS"]
STEP = ["C", "LENGTH", "SEGMENT", "SEGMENTS"]
# Below all keys. Its exponential is 0, and so is that of its difference from any key.
LOWEST: tl.constexpr = tl.constexpr(-1e38)


@triton.jit
def _indices(H, N, TILES):
    """The tile, row and head of this program, and the index of its range among all rows, and among all heads."""
    tile, head, index = program(H, TILES)
    row = (index // N).to(tl.int64)
    return tile, row, head.to(tl.int64), index, (row * H + head) * N + index % N


@triton.jit
def _range(starts, more, index, C, LENGTH, READS: tl.constexpr):
    """
    The first token of a range, and the token after its last one. With READS `starts` and `more` are the output of
    `_readers_kernel`, otherwise `leaving` and `begins`. The range of a chunk that is not absorbed is empty.
    """
    start, second = tl.load(starts + index), tl.load(more + index)
    if READS:
        return start, second
    return start + tl.maximum(second, 0), tl.where(start < 0, start, tl.minimum(start + C, LENGTH))


@triton.jit
def _load(x, ts, columns, rows, STRIDE, SIZE):
    """The tokens ts, counted from x, zeros from token `rows` on."""
    mask = (ts < rows)[:, None] & (columns < SIZE)[None, :]
    return tl.load(x + ts[:, None] * STRIDE + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _store(x, value, ts, columns, rows, SIZE):
    mask = (ts < rows)[:, None] & (columns < SIZE)[None, :]
    tl.store(x + ts[:, None] * SIZE + columns[None, :], value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _absorbed(normalizer, log_sum, forgotten):
    """The normalizer after a chunk, and the fraction of the memory that the chunk replaces."""
    before = tl.where(forgotten, -float("inf"), normalizer)
    top = tl.maximum(before, log_sum)
    after = top + tl.log(exp(before - top) + exp(log_sum - top))
    return after, exp(log_sum - after)


@triton.jit(do_not_specialize=["T", "VERSIONS", "BLOCKS"])
def _readers_kernel(reads, firsts, stops, T, VERSIONS, BLOCKS, BT: tl.constexpr):
    """The range of adjacent tokens that read each version of the memory."""
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    ts = tl.program_id(0) % BLOCKS * BT + tl.arange(0, BT)
    reads += row * T
    version = tl.load(reads + ts, mask=ts < T, other=-1)
    before = tl.load(reads + ts - 1, mask=(ts > 0) & (ts < T), other=-1)
    after = tl.load(reads + ts + 1, mask=ts + 1 < T, other=-1)
    reader = (version >= 0) & (version < VERSIONS)
    tl.store(firsts + row * VERSIONS + version, ts.to(tl.int64), mask=reader & (before != version))
    tl.store(stops + row * VERSIONS + version, ts.to(tl.int64) + 1, mask=reader & (after != version))


@triton.jit(do_not_specialize=GEOMETRY)
def _log_sum_kernel(
    k,
    KB,
    KH,
    KT,
    leaving,
    begins,
    log_sums,
    N,
    C,
    LENGTH,
    H,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """The log of the sum of exp(k) over a chunk."""
    tile, row, head, index, cell = _indices(H, N, tl.cdiv(K, BK))
    first, stop = _range(leaving, begins, index, C, LENGTH, False)
    rows = (stop - first).to(tl.int32)
    if rows <= 0:
        return
    ts, ks = tl.arange(0, BT), tile * BK + tl.arange(0, BK)
    k += row * KB + head * KH + first * KT
    top = tl.full((BT, BK), LOWEST, tl.float32)
    total = tl.zeros((BT, BK), tl.float32)
    for start in range(0, rows, BT):  # each thread sums its own tokens
        x = _load(k + tl.cast(start, tl.int64) * KT, ts, ks, rows - start, KT, K).to(tl.float32)
        x = tl.where((ts < rows - start)[:, None], x, LOWEST)
        before, top = top, tl.maximum(top, x)
        total = total * exp(before - top) + exp(x - top)
    highest = tl.max(top, 0)
    log_sum = highest + tl.log(tl.sum(total * exp(top - highest[None, :]), 0))
    tl.store(log_sums + cell * K + ks, log_sum, mask=ks < K)


@triton.jit
def _load_logits(x, ts, ks, rows, STRIDE, K):
    return tl.where((ks < K)[None, :], _load(x, ts, ks, rows, STRIDE, K).to(tl.float32), -float("inf"))


@triton.jit
def _softmax_scale(x):
    """The maximum over the features, and the sum of the exponentials of the differences from it."""
    top = tl.max(x, 1)
    return top, tl.sum(exp(x - top[:, None]), 1)


@triton.jit
def _softmax(x):
    """The softmax over the features."""
    top, divisor = _softmax_scale(x)
    return exp(x - top[:, None]) / divisor[:, None]


@triton.jit(do_not_specialize=GEOMETRY)
def _weights_kernel(
    x,
    XB,
    XH,
    XT,
    log_sums,
    over_tokens,
    over_features,
    starts,
    more,
    N,
    C,
    LENGTH,
    BLOCKS,
    H,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    READS: tl.constexpr,
):
    """The softmax of x over the features and, with `log_sums`, over the tokens of a chunk."""
    block, row, head, index, cell = _indices(H, N, BLOCKS)
    first, stop = _range(starts, more, index, C, LENGTH, READS)
    first += block * BT
    rows = (stop - first).to(tl.int32)
    if rows <= 0:
        return
    ts, ks = tl.arange(0, BT), tl.arange(0, BK)
    z = _load_logits(x + row * XB + head * XH + first * XT, ts, ks, rows, XT, K)
    here = ((row * H + head) * LENGTH + first) * K
    _store(over_features + here, _softmax(z), ts, ks, rows, K)
    if log_sums is not None:
        log_sum = tl.load(log_sums + cell * K + ks, mask=ks < K, other=0.0)
        _store(over_tokens + here, exp(z - log_sum[None, :]), ts, ks, rows, K)


@triton.jit(do_not_specialize=GEOMETRY)
def _weights_gradient_kernel(
    over_features,
    grad_features,
    over_tokens,
    grad_tokens,
    shifts,
    out,
    starts,
    more,
    N,
    C,
    LENGTH,
    BLOCKS,
    H,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    READS: tl.constexpr,
):
    """The gradient of the input of `_weights_kernel`; `shifts`: the part of the normalizer and the sum over tokens."""
    block, row, head, index, cell = _indices(H, N, BLOCKS)
    first, stop = _range(starts, more, index, C, LENGTH, READS)
    first += block * BT
    rows = (stop - first).to(tl.int32)
    if rows <= 0:
        return
    ts, ks = tl.arange(0, BT), tl.arange(0, BK)
    here = ((row * H + head) * LENGTH + first) * K
    y = _load(over_features + here, ts, ks, rows, K, K).to(tl.float32)
    grad = _load(grad_features + here, ts, ks, rows, K, K)
    dx = y * (grad - tl.sum(y * grad, 1)[:, None])
    if shifts is not None:
        shift = tl.load(shifts + cell * K + ks, mask=ks < K, other=0.0)
        grad = _load(grad_tokens + here, ts, ks, rows, K, K) + shift[None, :]
        dx += _load(over_tokens + here, ts, ks, rows, K, K).to(tl.float32) * grad
    _store(out + here, dx, ts, ks, rows, K)


@triton.jit(do_not_specialize=GEOMETRY)
def _product_kernel(
    a,
    x,
    XB,
    XH,
    XT,
    out,
    starts,
    more,
    N,
    C,
    LENGTH,
    H,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BW: tl.constexpr,
    READS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """aᵀ x for each range: a (B, H, LENGTH, K), out (B, H, N, K, WIDTH)."""
    COLUMNS: tl.constexpr = (WIDTH + BW - 1) // BW
    tile, row, head, index, cell = _indices(H, N, tl.cdiv(K, BK) * COLUMNS)
    first, stop = _range(starts, more, index, C, LENGTH, READS)
    rows = (stop - first).to(tl.int32)
    ts, ks, ws = tl.arange(0, BT), tile // COLUMNS * BK + tl.arange(0, BK), tile % COLUMNS * BW + tl.arange(0, BW)
    a += ((row * H + head) * LENGTH + first) * K
    x += row * XB + head * XH + first * XT
    total = tl.zeros((BK, BW), tl.float32)
    for start in tl.range(0, rows, BT, num_stages=STAGES):
        before = tl.cast(start, tl.int64)
        a_block = _load(a + before * K, ts, ks, rows - start, K, K)
        x_block = _load(x + before * XT, ts, ws, rows - start, XT, WIDTH)
        total += dot(tl.trans(a_block), x_block, DOT, PRECISION)
    _store(out + cell * (K * WIDTH), total, ks, ws, K, WIDTH)


@triton.jit(do_not_specialize=GEOMETRY)
def _rows_kernel(
    a,
    AB,
    AH,
    AT,
    matrices,
    out,
    starts,
    more,
    N,
    C,
    LENGTH,
    BLOCKS,
    H,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    BW: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ADD: tl.constexpr,
    READS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """
    Tokens a (SIZE) of a range times its matrix (SIZE, WIDTH; stored as (WIDTH, SIZE) if TRANSPOSED), written to `out`
    (B, H, LENGTH, WIDTH), or with ADD added to it.
    """
    COLUMNS: tl.constexpr = (WIDTH + BW - 1) // BW
    tile, row, head, index, cell = _indices(H, N, BLOCKS * COLUMNS)
    first, stop = _range(starts, more, index, C, LENGTH, READS)
    first += tile // COLUMNS * BT
    rows = (stop - first).to(tl.int32)
    if rows <= 0:
        return
    ts, ws = tl.arange(0, BT), tile % COLUMNS * BW + tl.arange(0, BW)
    a += row * AB + head * AH + first * AT
    matrices += cell * (SIZE * WIDTH)
    total = tl.zeros((BT, BW), tl.float32)
    for start in tl.range(0, SIZE, BS, num_stages=STAGES):
        ss = start + tl.arange(0, BS)
        a_block = _load(a, ts, ss, rows, AT, SIZE)
        if TRANSPOSED:
            matrix = tl.trans(_load(matrices, ws, ss, WIDTH, SIZE, SIZE))
        else:
            matrix = _load(matrices, ss, ws, SIZE, WIDTH, WIDTH)
        total += dot(a_block, matrix, DOT, PRECISION)
    out += ((row * H + head) * LENGTH + first) * WIDTH
    if ADD:
        total += _load(out, ts, ws, rows, WIDTH, WIDTH)
    _store(out, total, ts, ws, rows, WIDTH)


@triton.jit
def _mixed(
    gram,
    x,
    ks,
    vs,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """gram x (gramᵀ x if TRANSPOSED) for columns of x that this program has just stored."""
    tl.debug_barrier()
    total = tl.zeros((BK, BV), tl.float32)
    for start in range(0, K, BS):
        ss = start + tl.arange(0, BS)
        if TRANSPOSED:
            block = tl.trans(_load(gram, ss, ks, K, K, K))
        else:
            block = _load(gram, ks, ss, K, K, K)
        total += dot(block, _load(x, ss, vs, K, V, V), DOT, PRECISION)
    return total


@triton.jit(do_not_specialize=GEOMETRY)
def _absorb_kernel(
    memory,
    normalizer,
    log_sums,
    gram,
    added,
    versions,
    ratios,
    final_memory,
    final_normalizer,
    leaving,
    begins,
    N,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BS: tl.constexpr,
    CHANGES: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """
    All versions of some columns of the memory, and the fraction of it that each chunk replaces. With CHANGES, U in
    `added` is overwritten by the change, U - G M - M.
    """
    tile, head, row = program(H, tl.cdiv(V, BV))
    ks, vs = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    cell = row.to(tl.int64) * H + head
    once = tl.where(tile == 0, K, 0)  # all programs find the same, one stores it
    m, z = tl.zeros((BK, BV), tl.float32), tl.zeros((BK,), tl.float32)
    if memory is not None:
        m = _load(memory + cell * (K * V), ks, vs, K, V, V)
        z = tl.load(normalizer + cell * K + ks, mask=ks < K, other=0.0)
    leaving += row.to(tl.int64) * N
    begins += row.to(tl.int64) * N
    log_sums += cell * N * K
    ratios += cell * N * K
    gram += cell * N * (K * K)
    added += cell * N * (K * V)
    versions += cell * (N + 1) * (K * V)
    for n in range(N):
        _store(versions, m, ks, vs, K, V)
        if tl.load(leaving + n) >= 0:
            forgotten = tl.load(begins + n) >= 0
            z, ratio = _absorbed(z, tl.load(log_sums + ks, mask=ks < K, other=0.0), forgotten)
            change = _load(added, ks, vs, K, V, V)
            if forgotten:
                m = tl.zeros((BK, BV), tl.float32)
            else:
                change -= m + _mixed(gram, versions, ks, vs, K, V, BK, BV, BS, False, DOT, PRECISION)
            if CHANGES:
                _store(added, change, ks, vs, K, V)
            m += ratio[:, None] * change
            tl.store(ratios + ks, ratio, mask=ks < once)
        log_sums += K
        ratios += K
        gram += K * K
        added += K * V
        versions += K * V
    _store(versions, m, ks, vs, K, V)
    _store(final_memory + cell * (K * V), m, ks, vs, K, V)
    tl.store(final_normalizer + cell * K + ks, z, mask=ks < once)


@triton.jit(do_not_specialize=GEOMETRY)
def _absorb_gradient_kernel(
    grad_memory,
    grad_versions,
    gram,
    changes,
    versions,
    ratios,
    grad_added,
    of_changes,
    of_versions,
    grad_initial,
    leaving,
    begins,
    N,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """
    The gradient of some columns of the memory, from the last version to the first. Each version adds `grad_versions`,
    that of what was read from it. Stores the gradient of U, and its products with the change of the memory and with
    the memory before it, summed over these columns: (B, H, N, tiles, K).
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    tile, head, row = program(H, TILES)
    ks, vs = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    cell = row.to(tl.int64) * H + head
    leaving += row.to(tl.int64) * N
    begins += row.to(tl.int64) * N
    grad_versions += cell * (N + 1) * (K * V)
    versions += cell * (N + 1) * (K * V)
    g = _load(grad_memory + cell * (K * V), ks, vs, K, V, V)
    g += _load(grad_versions + tl.cast(N, tl.int64) * (K * V), ks, vs, K, V, V)
    for i in range(N):
        n = tl.cast(N - 1 - i, tl.int64)
        if tl.load(leaving + n) >= 0:
            ratio = tl.load(ratios + (cell * N + n) * K + ks, mask=ks < K, other=0.0)
            x = ratio[:, None] * g
            here = (cell * N + n) * (K * V)
            _store(grad_added + here, x, ks, vs, K, V)
            sums = ((cell * N + n) * TILES + tile) * K + ks
            tl.store(of_changes + sums, tl.sum(x * _load(changes + here, ks, vs, K, V, V), 1), mask=ks < K)
            of_version = tl.zeros((BK,), tl.float32)
            if tl.load(begins + n) >= 0:
                g = tl.zeros((BK, BV), tl.float32)
            else:
                of_version = tl.sum(x * _load(versions + n * (K * V), ks, vs, K, V, V), 1)
                g -= x + _mixed(
                    gram + (cell * N + n) * (K * K), grad_added + here, ks, vs, K, V, BK, BV, BS, True, DOT, PRECISION
                )
            tl.store(of_versions + sums, of_version, mask=ks < K)
        g += _load(grad_versions + n * (K * V), ks, vs, K, V, V)
    if grad_initial is not None:
        _store(grad_initial + cell * (K * V), g, ks, vs, K, V)


@triton.jit(do_not_specialize=GEOMETRY)
def _normalizer_gradient_kernel(
    grad_normalizer,
    ratios,
    of_changes,
    of_versions,
    shifts,
    grad_initial,
    leaving,
    begins,
    N,
    H,
    K: tl.constexpr,
    TILES: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """
    The gradient of the normalizer, from the last chunk to the first, and `shifts`: what it adds to the gradient of the
    softmax of a chunk over tokens, minus the sum over the tokens of that softmax times its gradient.
    """
    tile, head, row = program(H, tl.cdiv(K, BK))
    ts, ks = tl.arange(0, BT), tile * BK + tl.arange(0, BK)
    cell = row.to(tl.int64) * H + head
    leaving += row.to(tl.int64) * N
    begins += row.to(tl.int64) * N
    g = tl.load(grad_normalizer + cell * K + ks, mask=ks < K, other=0.0)
    for i in range(N):
        n = tl.cast(N - 1 - i, tl.int64)
        if tl.load(leaving + n) >= 0:
            here = (cell * N + n) * K
            ratio = tl.load(ratios + here + ks, mask=ks < K, other=0.0)
            g -= tl.sum(_load(of_changes + here * TILES, ts, ks, TILES, K, K), 0)
            of_version = tl.sum(_load(of_versions + here * TILES, ts, ks, TILES, K, K), 0)
            tl.store(shifts + here + ks, ratio * g - of_version, mask=ks < K)
            g = tl.where(tl.load(begins + n) >= 0, 0.0, (1 - ratio) * g)
    if grad_initial is not None:
        tl.store(grad_initial + cell * K + ks, g, mask=ks < K)


@triton.jit
def _read_weights(q, ks, K):
    """The softmax of a query over the features."""
    x = tl.load(q + ks, mask=ks < K, other=-float("inf")).to(tl.float32)
    weights = exp(x - tl.max(x, 0))
    return weights / tl.sum(weights, 0)


@triton.jit(do_not_specialize=STEP)
def _prepare_step_kernel(
    q,
    QB,
    QH,
    k,
    KB,
    KH,
    KT,
    memory,
    normalizer,
    log_sums,
    grams,
    before,
    leaving,
    begins,
    reads,
    out,
    C,
    LENGTH,
    SEGMENT,
    SEGMENTS,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BF: tl.constexpr,
    BT: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """
    One token. Reads some columns of the memory, except in rows that read it after a chunk. Of a segment of a chunk
    that leaves, computes for BF features what `_absorb_step_kernel` needs: G, and the log of the sum of exp(k).
    """
    COLUMNS: tl.constexpr = (V + BV - 1) // BV
    FEATURES: tl.constexpr = (K + BF - 1) // BF
    tile, head, row = program(H, COLUMNS + FEATURES * SEGMENTS)
    row, head = row.to(tl.int64), head.to(tl.int64)
    cell = row * H + head
    ks = tl.arange(0, BK)
    absorbs = tl.load(leaving + row) >= 0
    if tile < COLUMNS:
        read = tl.load(reads + row)
        if not (absorbs & (read > 0)):
            vs = tile * BV + tl.arange(0, BV)
            weights = _read_weights(q + row * QB + head * QH, ks, K)
            y = tl.sum(weights[:, None] * _load(memory + cell * (K * V), ks, vs, tl.where(read >= 0, K, 0), V, V), 0)
            y = tl.where(read >= 0, y, 0.0)
            tl.store(out + cell * V + vs, y.to(out.dtype.element_ty), mask=vs < V)
    elif absorbs:
        segment = (tile - COLUMNS) // FEATURES
        first, stop = _range(leaving, begins, row, C, LENGTH, False)
        first += segment * SEGMENT
        rows = tl.minimum((stop - first).to(tl.int32), SEGMENT)
        ts, fs = tl.arange(0, BT), (tile - COLUMNS) % FEATURES * BF + tl.arange(0, BF)
        k += row * KB + head * KH + first * KT
        top, total = tl.full((BF,), LOWEST, tl.float32), tl.zeros((BF,), tl.float32)
        gram = tl.zeros((BF, BK), tl.float32)
        for start in range(0, rows, BT):
            here = k + tl.cast(start, tl.int64) * KT
            x = tl.trans(_load(here, ts, fs, rows - start, KT, K).to(tl.float32))
            x = tl.where((ts < rows - start)[None, :], x, LOWEST)
            highest = tl.maximum(top, tl.max(x, 1))
            over_tokens, kept = exp(x - highest[:, None]), exp(top - highest)
            over_features = _softmax(_load_logits(here, ts, ks, rows - start, KT, K))
            top, total = highest, total * kept + tl.sum(over_tokens, 1)
            gram = gram * kept[:, None] + dot(over_tokens, over_features, DOT, PRECISION)
        if rows > 0:
            here = cell * SEGMENTS + segment
            _store(grams + here * (K * K), gram / total[:, None], fs, ks, K, K)
            tl.store(log_sums + here * K + fs, top + tl.log(total), mask=fs < K)
        if segment == 0:
            z = tl.load(normalizer + cell * K + fs, mask=fs < K, other=0.0)
            tl.store(before + cell * K + fs, z, mask=fs < K)


@triton.jit(do_not_specialize=[*STEP, "B"])
def _absorb_step_kernel(
    q,
    QB,
    QH,
    k,
    KB,
    KH,
    KT,
    v,
    VB,
    VH,
    VT,
    memory,
    normalizer,
    log_sums,
    grams,
    before,
    leaving,
    begins,
    reads,
    out,
    B,
    C,
    LENGTH,
    SEGMENT,
    SEGMENTS,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BT: tl.constexpr,
    BS: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """
    One token, in the rows in which a chunk leaves: some columns of the memory absorb it, and are read after it.
    """
    TILES: tl.constexpr = (V + BV - 1) // BV
    latest = tl.full((128,), -1, tl.int64)
    for start in range(0, B, 128):
        batch = start + tl.arange(0, 128)
        latest = tl.maximum(latest, tl.load(leaving + batch, mask=batch < B, other=-1))
    if tl.max(latest, 0) < 0:
        return
    ts, ks, ss = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BS)
    for item in range(tl.program_id(0), B * H * TILES, tl.num_programs(0)):
        tile, head, row = item % TILES, (item // TILES % H).to(tl.int64), (item // TILES // H).to(tl.int64)
        first, stop = _range(leaving, begins, row, C, LENGTH, False)
        rows = (stop - first).to(tl.int32)
        if rows > 0:
            cell = row * H + head
            vs = tile * BV + tl.arange(0, BV)
            forgotten = tl.load(begins + row) >= 0
            segments = tl.cdiv(rows, SEGMENT)
            of_segments = log_sums + cell * SEGMENTS * K
            log_sum = tl.load(of_segments + ks, mask=ks < K, other=0.0)
            for n in range(1, segments):
                log_sum, _ = _absorbed(log_sum, tl.load(of_segments + n * K + ks, mask=ks < K, other=0.0), False)
            z = tl.load(before + cell * K + ks, mask=ks < K, other=0.0)
            after, _ = _absorbed(z, log_sum, forgotten)

            here, kept = memory + cell * (K * V), tl.where(forgotten, 0, K)
            m = exp(z - after)[:, None] * _load(here, ks, vs, kept, V, V)
            for n in range(0, tl.where(forgotten, 0, segments)):
                share = exp(tl.load(of_segments + n * K + ks, mask=ks < K, other=0.0) - after)
                gram = grams + (cell * SEGMENTS + n) * (K * K)
                for start in range(0, K, BS):
                    part = -share[:, None] * _load(gram, ks, start + ss, K, K, K).to(tl.float32)
                    m += dot(part, _load(here, start + ss, vs, K, V, V), DOT, PRECISION)
            keys = k + row * KB + head * KH + first * KT + ks[:, None]
            values = v + row * VB + head * VH + first * VT
            for start in tl.range(0, rows, BT, num_stages=STAGES):
                there, ahead = (ts < rows - start)[None, :], tl.cast(start, tl.int64)
                x = tl.load(keys + ahead * KT + ts[None, :] * KT, mask=there & (ks < K)[:, None], other=0.0)
                over_tokens = tl.where(there, exp(x.to(tl.float32) - after[:, None]), 0.0)
                m += dot(over_tokens, _load(values + ahead * VT, ts, vs, rows - start, VT, V), DOT, PRECISION)
            tl.debug_barrier()  # all threads have read what others overwrite
            _store(here, m, ks, vs, K, V)
            if tl.load(reads + row) > 0:
                y = tl.sum(_read_weights(q + row * QB + head * QH, ks, K)[:, None] * m, 0)
                tl.store(out + cell * V + vs, y.to(out.dtype.element_ty), mask=vs < V)
            tl.store(normalizer + cell * K + ks, after, mask=ks < tl.where(tile == 0, K, 0))


def _warps(rows: int, narrow: bool) -> int:
    """
    The number of warps that compute a product. Four take 64 of its rows, and eight would share the columns of these.
    Where that leaves each less than a row of shared memory, Triton reads a bfloat16 operand wrongly on Hopper.
    """
    return 4 if narrow and rows < 128 else 8


class _Ranges(NamedTuple):
    """Ranges of tokens: see `_range`."""

    starts: torch.Tensor  # (B, N)
    more: torch.Tensor
    length: int  # of a row
    reads: bool

    def arguments(self, chunk_size):
        return self.starts, self.more, self.starts.shape[1], chunk_size, self.length


class _Plan:
    """How the work is divided into programs."""

    def __init__(self, q, k, v, leaving, begins, reads, chunk_size):
        self.batch, self.heads, length, self.key_size = q.shape
        self.value_size, self.chunk_size, self.chunks = v.shape[-1], chunk_size, leaving.shape[1]
        self.like = v
        dtype = common_dtype(q, k, v)
        self.products, narrow = operands(dtype), dtype == torch.bfloat16
        hip = torch.version.hip is not None
        # float32 needs twice the memory, and three products instead of one.
        self.dtype = torch.bfloat16 if narrow else torch.float32
        self.tile = 128 if narrow else 64
        self.depth = 64 if narrow else 32
        self.stages = {"STAGES": 3 if narrow and not hip else 1}
        self.of_keys = {"K": self.key_size, "BK": block_size(self.key_size)}
        self.of_columns = {
            **self.of_keys,
            "V": self.value_size,
            "BV": block_size(self.value_size, 32 if narrow else 16),
            "BS": 32 if self.key_size <= 512 else 16,
            **self.products,
            "num_warps": _warps(block_size(self.key_size), narrow),
        }
        self.column_tiles = cdiv(self.value_size, self.of_columns["BV"])

        self.leaving, self.begins = leaving.contiguous(), begins.contiguous()
        self.absorbed = _Ranges(self.leaving, self.begins, k.shape[2], False)
        versions, reads = self.chunks + 1, reads.contiguous()
        boundaries = reads.new_zeros(2, self.batch, versions)
        blocks = cdiv(length, 128)
        launch(_readers_kernel, (self.batch * blocks,), reads, *boundaries, length, versions, blocks, BT=128)
        self.reading = _Ranges(*boundaries, length, True)

    def pipeline(self, rows):
        """How a product with this number of rows is computed."""
        warps = 4 if torch.version.hip is not None else _warps(rows, self.dtype == torch.bfloat16)
        return {**self.stages, "num_warps": warps}

    def empty(self, *shape, dtype=torch.float32):
        return self.like.new_empty(self.batch, self.heads, *shape, dtype=dtype)

    def _launch(self, kernel, tiles, tensors, ranges, *, block=None, **constants):
        """Runs a program for each tile of each range and, with `block`, for each block of its tokens."""
        numbers = ranges.arguments(self.chunk_size)
        if block is not None:
            blocks = cdiv(min(self.chunk_size, ranges.length), block)
            numbers, tiles, constants = (*numbers, blocks), tiles * blocks, {"BT": block, **constants}
        grid = (ranges.starts.numel() * self.heads * tiles,)
        launch(kernel, grid, *tensors, *numbers, self.heads, READS=ranges.reads, **constants)

    def softmax(self, x, ranges, log_sums=None):
        """The softmax over the features and, with `log_sums`, over the tokens of each chunk."""
        over_features = self.empty(ranges.length, self.key_size, dtype=self.dtype)
        over_tokens = None if log_sums is None else torch.empty_like(over_features)
        tensors = *strided(x), log_sums, over_tokens, over_features
        self._launch(_weights_kernel, 1, tensors, ranges, block=16, **self.of_keys)
        return over_features, over_tokens

    def softmax_gradient(self, out, ranges, y, grad_y, over_tokens=None, grad_tokens=None, shifts=None):
        tensors = y, grad_y, over_tokens, grad_tokens, shifts, out
        self._launch(_weights_gradient_kernel, 1, tensors, ranges, block=16, **self.of_keys)

    def product(self, a, x, ranges, dtype=torch.float32):
        """aᵀ x for each range."""
        width = x.shape[-1]
        out = self.empty(ranges.starts.shape[1], self.key_size, width, dtype=dtype)
        blocks = {"BT": self.depth, "BK": block_size(self.key_size, self.tile), "BW": block_size(width, self.tile)}
        tiles = cdiv(self.key_size, blocks["BK"]) * cdiv(width, blocks["BW"])
        sizes = {"K": self.key_size, "WIDTH": width, **blocks, **self.pipeline(blocks["BK"])}
        self._launch(_product_kernel, tiles, (a, *strided(x), out), ranges, **sizes, **self.products)
        return out

    def rows(self, a, matrices, out, ranges, *, transposed=False, add=False):
        """Each token of a times the matrix of its range, written to `out` or added to it."""
        size, width = a.shape[-1], out.shape[-1]
        block = block_size(min(self.chunk_size, ranges.length), self.tile)
        blocks = {"BS": block_size(size, self.depth), "BW": block_size(width, self.tile)}
        self._launch(
            _rows_kernel,
            cdiv(width, blocks["BW"]),
            (*strided(a), matrices, out),
            ranges,
            block=block,
            SIZE=size,
            WIDTH=width,
            TRANSPOSED=transposed,
            ADD=add,
            **blocks,
            **self.products,
            **self.pipeline(block),
        )
        return out

    def _walk(self, kernel, tensors, **constants):
        """Runs a kernel that goes from chunk to chunk with some columns of the memory."""
        grid = (self.batch * self.heads * self.column_tiles,)
        tensors = *tensors, self.leaving, self.begins
        launch(kernel, grid, *tensors, self.chunks, self.heads, **self.of_columns, **constants)

    def absorb(self, k, v, memory, normalizer, changes=False):
        """
        The states after the last chunk. Keeps both softmaxes of the keys, G, U (or with `changes` the change of the
        memory by each chunk), the versions of the memory, and the fraction of it that each chunk replaces.
        """
        log_sums = self.empty(self.chunks, self.key_size)
        launch(
            _log_sum_kernel,
            (self.batch * self.heads * self.chunks * cdiv(self.key_size, 32),),
            *(*strided(k), self.leaving, self.begins, log_sums),
            *(self.chunks, self.chunk_size, k.shape[2], self.heads),
            K=self.key_size,
            BT=64,
            BK=32,
            num_warps=8,
        )
        self.over_features, self.over_tokens = self.softmax(k, self.absorbed, log_sums)
        self.gram = self.product(self.over_tokens, self.over_features, self.absorbed, self.dtype)
        self.added = self.product(self.over_tokens, v, self.absorbed)
        self.versions = self.empty(self.chunks + 1, self.key_size, self.value_size, dtype=self.dtype)
        self.ratios = torch.empty_like(log_sums)
        final = self.empty(self.key_size, self.value_size), self.empty(self.key_size)
        tensors = memory, normalizer, log_sums, self.gram, self.added, self.versions, self.ratios, *final
        self._walk(_absorb_kernel, tensors, CHANGES=changes)
        return final

    def absorb_backward(self, grad_memory, grad_normalizer, grad_versions, grad_initial):
        """
        The gradient of U, and what the normalizer adds to that of the keys, after [`absorb`] with `changes`. Those of
        the states are written to `grad_initial`, if they are not None.
        """
        grad_added = self.empty(self.chunks, self.key_size, self.value_size, dtype=self.dtype)
        of_changes, of_versions = (self.empty(self.chunks, self.column_tiles, self.key_size) for _ in range(2))
        tensors = grad_memory, grad_versions, self.gram, self.added, self.versions, self.ratios
        self._walk(_absorb_gradient_kernel, (*tensors, grad_added, of_changes, of_versions, grad_initial[0]))
        shifts = torch.empty_like(self.ratios)
        tensors = grad_normalizer, self.ratios, of_changes, of_versions, shifts, grad_initial[1]
        launch(
            _normalizer_gradient_kernel,
            (self.batch * self.heads * cdiv(self.key_size, 32),),
            *(*tensors, self.leaving, self.begins, self.chunks, self.heads),
            K=self.key_size,
            TILES=self.column_tiles,
            BT=next_power_of_2(self.column_tiles),
            BK=32,
        )
        return grad_added, shifts


def _states(*states):
    return [None if x is None else x.float().contiguous() for x in states]


def working_memory_triton(q, k, v, memory, normalizer, leaving, begins, reads, chunk_size):
    """Computes [`subquad_kernels.working_memory`]."""
    once(assert_chunks, (leaving, begins, reads), k.shape[2], chunk_size)
    plan = _Plan(q, k, v, leaving, begins, reads, chunk_size)
    final = plan.absorb(k, v, *_states(memory, normalizer))
    weights, _ = plan.softmax(q, plan.reading)
    out = v.new_zeros(*q.shape[:-1], v.shape[-1])  # for tokens that do not read
    return plan.rows(weights, plan.versions, out, plan.reading), *final


def working_memory_triton_backward(
    grad_out, grad_memory, grad_normalizer, q, k, v, memory, normalizer, leaving, begins, reads, chunk_size
):
    """
    Gradients of q, k, v, memory and normalizer, those that are given. The forward pass is computed again.
    """
    plan = _Plan(q, k, v, leaving, begins, reads, chunk_size)
    states, grads = _states(memory, normalizer), _states(grad_memory, grad_normalizer)
    plan.absorb(k, v, *states, changes=True)
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))

    weights, _ = plan.softmax(q, plan.reading)
    grad_weights = torch.empty_like(weights, dtype=torch.float32)
    plan.rows(grad_out, plan.versions, grad_weights, plan.reading, transposed=True)
    plan.softmax_gradient(dq, plan.reading, weights, grad_weights)
    grad_versions = plan.product(weights, grad_out, plan.reading)

    grad_states = [None if x is None else torch.empty_like(x) for x in states]
    du, shifts = plan.absorb_backward(*grads, grad_versions, grad_states)
    with without_autocast(v):
        dg = (du @ plan.versions[:, :, :-1].mT).neg_()
    dg.masked_fill_((begins >= 0)[:, None, :, None, None], 0.0)
    p, f = plan.over_tokens, plan.over_features
    dp, df = (torch.empty_like(f, dtype=torch.float32) for _ in range(2))
    plan.rows(p, du, dv, plan.absorbed)
    plan.rows(p, dg, df, plan.absorbed)
    plan.rows(v, du, dp, plan.absorbed, transposed=True)
    plan.rows(f, dg, dp, plan.absorbed, transposed=True, add=True)
    plan.softmax_gradient(dk, plan.absorbed, f, df, p, dp, shifts)
    return [dq, dk, dv, *(x for x in grad_states if x is not None)]


def _power(most: int) -> int:
    """The largest power of two up to `most`, at least 16."""
    return max(1 << (most.bit_length() - 1), 16)


@functools.lru_cache
def _divide_step(batch, heads, key_size, value_size, chunk_size, dtype, programs, shared):
    """
    How a step is divided, for a device that runs that many programs with that much shared memory each: the number of
    segments of a chunk and their length, and the grid and the constants of the two kernels.
    """
    narrow, block = dtype == torch.bfloat16, block_size(key_size)
    sizes = {"K": key_size, "V": value_size, "BK": block, **operands(dtype)}
    most = _power(8192 // block)
    features, tokens = min(most, block), min(most, 32)
    tiles = cdiv(key_size, features)
    segments = min(cdiv(programs, batch * heads * tiles), cdiv(chunk_size, 256))
    segment = cdiv(cdiv(chunk_size, segments), 32) * 32
    prepare = {"BV": 32, "BF": features, "BT": tokens, "num_warps": _warps(features, narrow), **sizes}
    # Of the memory a program holds this many values, in registers and once in shared memory.
    most = _power(min(shared * 3 // 4, (128 if narrow else 32) * 1024) // 4)
    columns = block_size(value_size, _power(most // block))
    absorb = {"BV": columns, "BT": tokens, "BS": 32, **sizes}
    absorb["num_warps"] = 16 if block * columns > 16384 else _warps(block, narrow)
    absorb["STAGES"] = 3 if narrow and torch.version.hip is None else 1
    return (
        (segment, segments),
        (batch * heads * (cdiv(value_size, 32) + tiles * segments),),
        prepare,
        (min(batch * heads * cdiv(value_size, columns), programs),),
        absorb,
    )


def working_memory_triton_step(q, k, v, memory, normalizer, leaving, begins, reads, chunk_size):
    """
    One token and at most one chunk per row, q (B, H, 1, K), leaving, begins and reads (B, 1). Changes the states, in
    float32, in place and returns out (B, H, 1, V). The device decides which rows absorb a chunk. The last kernel
    changes both states, so that nothing has changed if one fails.
    """
    (batch, heads, _, key_size), value_size = q.shape, v.shape[-1]
    dtype, device = common_dtype(q, k, v), (multiprocessors(v), shared_memory(v))
    segments, grid, constants, absorb_grid, absorb_constants = _divide_step(
        batch, heads, key_size, value_size, chunk_size, dtype, *device
    )
    out = v.new_empty(batch, heads, 1, value_size)
    log_sums = normalizer.new_empty(batch, heads, segments[1], key_size)
    grams = v.new_empty(*log_sums.shape, key_size, dtype=dtype if dtype == torch.bfloat16 else torch.float32)
    tensors = memory, normalizer, log_sums, grams, torch.empty_like(normalizer)
    tensors = *tensors, leaving.contiguous(), begins.contiguous(), reads.contiguous(), out
    numbers = chunk_size, k.shape[2], *segments, heads
    q, k, v = strided(q)[:3], strided(k), strided(v)
    launch(_prepare_step_kernel, grid, *q, *k, *tensors, *numbers, **constants)
    launch(_absorb_step_kernel, absorb_grid, *q, *k, *v, *tensors, batch, *numbers, **absorb_constants)
    return out

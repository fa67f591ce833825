"""
The working memory of a single token as Triton kernels: at most one chunk leaves in each row.

The first kernel computes in parallel what depends only on a part of the chunk. The second one changes the states, when
no other can fail any more.
"""

import triton
import triton.language as tl

from ..segments import dot, exp, program
from .chunk_kernels import LOWEST, _absorbed, _load, _load_logits, _range, _softmax, _store


STEP = ["C", "LENGTH", "SEGMENT", "SEGMENTS"]


@triton.jit
def _number(indices, row):
    """The number of a row's states, and of its keys and values."""
    if indices is not None:
        row = tl.load(indices + row)
    return row


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
    normalizers,
    grams,
    leaving,
    begins,
    reads,
    indices,
    MB,
    ZB,
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
    One token. Reads some columns of the memory, except in rows that read it after a chunk. For a segment of a chunk
    that leaves, computes the inputs of `_absorb_step_kernel` for BF features: G, and the log of the sum of exp(k).
    After the sums of all segments, `normalizers` (B, H, SEGMENTS + 1, K) holds the normalizer before the step.
    """
    COLUMNS: tl.constexpr = (V + BV - 1) // BV
    FEATURES: tl.constexpr = (K + BF - 1) // BF
    tile, head, row = program(H, COLUMNS + FEATURES * SEGMENTS)
    row, head = row.to(tl.int64), head.to(tl.int64)
    cell, number = row * H + head, _number(indices, row)
    memory += number * MB + head * (K * V)
    ks = tl.arange(0, BK)
    absorbs = tl.load(leaving + row) >= 0
    if tile < COLUMNS:
        read = tl.load(reads + row)
        if not (absorbs & (read > 0)):
            vs = tile * BV + tl.arange(0, BV)
            weights = _read_weights(q + row * QB + head * QH, ks, K)
            y = tl.sum(weights[:, None] * _load(memory, ks, vs, tl.where(read >= 0, K, 0), V, V), 0)
            y = tl.where(read >= 0, y, 0.0)
            tl.store(out + cell * V + vs, y.to(out.dtype.element_ty), mask=vs < V)
    elif absorbs:
        segment = (tile - COLUMNS) // FEATURES
        first, stop = _range(leaving, begins, row, C, LENGTH, False)
        first += segment * SEGMENT
        rows = tl.minimum((stop - first).to(tl.int32), SEGMENT)
        ts, fs = tl.arange(0, BT), (tile - COLUMNS) % FEATURES * BF + tl.arange(0, BF)
        k += number * KB + head * KH + first * KT
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
            _store(grams + (cell * SEGMENTS + segment) * (K * K), gram / total[:, None], fs, ks, K, K)
            log_sums = normalizers + (cell * (SEGMENTS + 1) + segment) * K
            tl.store(log_sums + fs, top + tl.log(total), mask=fs < K)
        if segment == 0:
            z = tl.load(normalizer + number * ZB + head * K + fs, mask=fs < K, other=0.0)
            tl.store(normalizers + (cell * (SEGMENTS + 1) + SEGMENTS) * K + fs, z, mask=fs < K)


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
    normalizers,
    grams,
    leaving,
    begins,
    reads,
    indices,
    MB,
    ZB,
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
            cell, number = row * H + head, _number(indices, row)
            vs = tile * BV + tl.arange(0, BV)
            forgotten = tl.load(begins + row) >= 0
            segments = tl.cdiv(rows, SEGMENT)
            of_segments = normalizers + cell * (SEGMENTS + 1) * K
            log_sum = tl.load(of_segments + ks, mask=ks < K, other=0.0)
            for n in range(1, segments):
                log_sum, _ = _absorbed(log_sum, tl.load(of_segments + n * K + ks, mask=ks < K, other=0.0), False)
            z = tl.load(of_segments + SEGMENTS * K + ks, mask=ks < K, other=0.0)
            after, _ = _absorbed(z, log_sum, forgotten)

            here, kept = memory + number * MB + head * (K * V), tl.where(forgotten, 0, K)
            m = exp(z - after)[:, None] * _load(here, ks, vs, kept, V, V)
            for n in range(0, tl.where(forgotten, 0, segments)):
                share = exp(tl.load(of_segments + n * K + ks, mask=ks < K, other=0.0) - after)
                gram = grams + (cell * SEGMENTS + n) * (K * K)
                for start in range(0, K, BS):
                    part = -share[:, None] * _load(gram, ks, start + ss, K, K, K).to(tl.float32)
                    m += dot(part, _load(here, start + ss, vs, K, V, V), DOT, PRECISION)
            keys = k + number * KB + head * KH + first * KT + ks[:, None]
            values = v + number * VB + head * VH + first * VT
            for start in tl.range(0, rows, BT, num_stages=STAGES):
                there, ahead = (ts < rows - start)[None, :], tl.cast(start, tl.int64)
                x = tl.load(keys + ahead * KT + ts[None, :] * KT, mask=there & (ks < K)[:, None], other=0.0)
                over_tokens = tl.where(there, exp(x.to(tl.float32) - after[:, None]), 0.0)
                m += dot(over_tokens, _load(values + ahead * VT, ts, vs, rows - start, VT, V), DOT, PRECISION)
            tl.debug_barrier()  # all threads have read before others overwrite
            _store(here, m, ks, vs, K, V)
            if tl.load(reads + row) > 0:
                y = tl.sum(_read_weights(q + row * QB + head * QH, ks, K)[:, None] * m, 0)
                tl.store(out + cell * V + vs, y.to(out.dtype.element_ty), mask=vs < V)
            tl.store(normalizer + number * ZB + head * K + ks, after, mask=ks < tl.where(tile == 0, K, 0))

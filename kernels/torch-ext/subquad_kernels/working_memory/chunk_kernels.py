"""
The kernels of the working memory that compute all chunks, and all tokens, in parallel.

All products over tokens are of two kinds, each over ranges of tokens that belong to one matrix: `_product_kernel` sums
over the tokens of a range, AᵀX, and `_rows_kernel` multiplies each token by the matrix of its range, A M. A range
consists of the tokens of a chunk that are not ignored, or that read one version of the memory. Nothing else is read.
"""

import triton
import triton.language as tl

from ..segments import dot, exp, program


# These change from call to call, and gain nothing as constants.
GEOMETRY = ["N", "LENGTH", "BLOCKS"]
# Below all keys. exp of it, and of its difference from any key, is 0.
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

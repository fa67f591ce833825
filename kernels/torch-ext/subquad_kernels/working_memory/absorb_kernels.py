"""The kernels of the working memory that go from chunk to chunk, with all rows of some columns of it on chip."""

import triton
import triton.language as tl

from ..segments import dot, program
from .chunk_kernels import GEOMETRY, _absorbed, _load, _store


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
    once = tl.where(tile == 0, K, 0)  # all programs compute the same, one stores it
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
    the gradient of its readouts. Stores the gradient of U, and its products with the change of the memory and with the
    memory before it, summed over these columns: (B, H, N, tiles, K).
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
    The gradient of the normalizer, from the last chunk to the first, and `shifts`: its contribution to the gradient of
    a chunk's softmax over tokens, minus the sum over the tokens of that softmax times its gradient.
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

"""
The kernel of the slot memory that turns logits into slot weights, or gradients of weights into gradients of logits.

Its programs compute few tokens of a chunk. So they also complete logits and weights of chunks that decay too far for
kernels that treat a pair of tokens as a product of two factors.
"""

import triton
import triton.language as tl

from ..segments import exp
from .chunk_kernels import GEOMETRY, load, place, store
from .far_kernels import add_far_reads, far_pairs


@triton.jit(do_not_specialize=GEOMETRY)
def _softmax_kernel(
    a,
    b,
    logits,
    grads,
    log_f,
    decay,
    x,
    reads,
    pairs,
    far_chunks,
    boundaries,
    T,
    SEGMENT,
    SEGMENTS,
    CHUNKS,
    H,
    TILES: tl.constexpr,
    SIZE: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    BM: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
):
    """
    The softmax x of the logits, and x exp(F), its weights for the memory that enters a chunk. With `grads`, the
    gradient of that softmax, x is the gradient of the logits instead, and `grads` becomes the sum of x times its
    gradient over both.

    In a chunk that decays too far, the readout of a from the b of its tokens is first added to `grads`, or without
    them to the logits, unless a is None. x is stored only for such chunks, and `pairs` then has the weight of the
    write of one token (column) in the read with x of another (row).
    """
    tile, head, first, rows, index = place(boundaries, T, SEGMENT, SEGMENTS, CHUNKS, H, TILES, C, PACKED)
    ROWS: tl.constexpr = C // TILES
    if rows <= tile * ROWS:
        return
    far = tl.load(far_chunks + index) != 0
    ts, rs = tl.arange(0, C), tile * ROWS + tl.arange(0, ROWS)
    if a is not None:  # noqa: SIM102, Triton evaluates this, a program the next condition
        if far:
            incomplete = logits if grads is None else grads
            add_far_reads(a, b, log_f, decay, incomplete, first, head, rs, ts, rows, H, SIZE, M, DOT, PRECISION)
            tl.debug_barrier()  # other threads read these stores
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    read = tl.zeros((ROWS,), tl.float32)
    for start in range(0, M, BM):
        ms = start + tl.arange(0, BM)
        z = load(logits, first, head, rs, ms, rows, H, M)
        z = tl.where((ms < M)[None, :], z, -float("inf"))
        higher = tl.maximum(top, tl.max(z, 1))
        s, factor = exp(z - higher[:, None]), exp(top - higher)
        top, total = higher, total * factor + tl.sum(s, 1)
        if grads is not None:
            read = read * factor + tl.sum(s * load(grads, first, head, rs, ms, rows, H, M), 1)

    if grads is not None:
        tl.debug_barrier()
    for start in range(0, M, BM):
        ms = start + tl.arange(0, BM)
        z = load(logits, first, head, rs, ms, rows, H, M)
        s = exp(z - top[:, None]) / total[:, None]
        if grads is not None:
            grad = load(grads, first, head, rs, ms, rows, H, M)
            grad_z = s * (grad - (read / total)[:, None])
            store(grads, s * grad + grad_z * z, first, head, rs, ms, rows, H, M)
            s = grad_z
        store(reads, s * exp(load(decay, first, head, rs, ms, rows, H, M)), first, head, rs, ms, rows, H, M)
        if far:
            store(x, s, first, head, rs, ms, rows, H, M)
    if far:
        tl.debug_barrier()
        found = far_pairs(x, log_f, decay, first, head, rs, ts, rows, H, M, DOT, PRECISION)
        cells = index * (C * C) + rs[:, None] * C + ts[None, :]
        tl.store(pairs + cells, found.to(pairs.dtype.element_ty))

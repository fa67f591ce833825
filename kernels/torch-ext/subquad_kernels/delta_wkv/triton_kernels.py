"""
The recurrence of Goose as Triton kernels.

`_chunk_kernel` computes everything that does not depend on the state, for all chunks of 16 tokens at once: the factors
of the products with the state, and the solved equations of the reads of a chunk. `_state_kernel` then passes the state
on chip from chunk to chunk of one head, with little more than products. If there are enough heads, it walks through a
whole sequence. Otherwise a sequence is cut into segments. Two walks without outputs find each segment's contribution
to a state and, from the identity, the matrix that multiplies a state; `_pass_kernel` then finds the states that enter
the segments.

Every token takes two half steps, see eager.py. The rows of a chunk are its first half steps, and then its second ones;
in memory the two rows of a token are adjacent.

The backward pass walks once from the first token to the last, for the states, and once from the last to the first,
which is the transpose: reads and writes change roles. `_gradient_kernel` computes the other gradients.

Long sequences are computed slab by slab (slabs.py). Tensors that pass between the kernels hold the tokens of one slab,
and the backward pass of a slab begins with the states that enter it.

Decays are taken relative to the middle of a chunk's decay, so that exponents are at most half of its logarithm.
"""

import torch
import triton
import triton.language as tl

from ..backend import block_size, cdiv, common_dtype, contiguous, launch, multiprocessors, next_power_of_2
from ..documents import count_documents
from ..segments import OF_LENGTH, Segments, dot, exp, expm1, operands, program, sum_where, tokens
from .slabs import slabs


# `APART` are the tokens by which a row of the caller's tensors is longer than a row of a slab.
OF_SLAB = (*OF_LENGTH, "APART")


@triton.jit
def _skipped(segment, APART, SEGMENTS, PACKED: tl.constexpr):
    """The tokens of earlier rows, before a segment, that are in the caller's tensors but not in the slab."""
    skipped = tl.cast(0, tl.int64)
    if not PACKED:
        skipped = (segment // SEGMENTS).to(tl.int64) * APART
    return skipped


@triton.jit
def _decays(log_w, cells, there, C: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """
    log_w of the tokens of a chunk, its sum up to each token minus half the chunk's sum, and half the chunk's sum.
    """
    ts = tl.arange(0, C)
    w = tl.load(log_w + cells, mask=there, other=0.0).to(tl.float32)
    centred = sum_where(tl.where(ts[None, :] <= ts[:, None], 0.5, -0.5), w, DOT, PRECISION)
    return w, centred, 0.5 * tl.sum(w, 0)


@triton.jit
def _level(rows, columns, block: tl.constexpr):
    """The pairs of a row in the right block and a column in the left block of two neighbouring blocks."""
    return ((rows & (-2 * block)) == (columns & (-2 * block))) & ((rows & block) != 0) & ((columns & block) == 0)


@triton.jit(do_not_specialize=OF_SLAB)
def _chunk_kernel(
    r,
    k,
    log_w,
    kappa,
    a,
    reads,
    writes,
    solved,
    factors,
    boundaries,
    T,
    APART,
    SEGMENT,
    SEGMENTS,
    H,
    SLOTS,
    K: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BK: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
):
    """
    State-independent tensors for every chunk whose number in its segment is `slot` modulo `SLOTS`. Per half step: the
    factors of a read of the entering state (`reads`), the contribution of a write to the leaving state (`writes`), and
    the weights of the known value of each half step in a read (`solved`): for a second half step its value, for a
    first one a change of its readout. Also exp(summed log decay) - 1 of the chunk.
    """
    slot, head, segment = program(H, SLOTS)
    begin, stop = tokens(boundaries, segment, T, SEGMENT, SEGMENTS, PACKED)
    skipped = _skipped(segment, APART, SEGMENTS, PACKED)
    ts = tl.arange(0, C)
    rows, columns = ts[:, None], ts[None, :]
    for chunk in tl.range(slot, tl.cdiv(stop - begin, C).to(tl.int32), SLOTS):
        first = begin + chunk * C
        there = rows < stop - first
        of_steps = (first * H + head) * (2 * K) + rows * (H * 2 * K)

        # Weights of others' first and second writes in the first and second reads of a token.
        removed = tl.zeros((C, C), tl.float32)
        removed_values = tl.zeros((C, C), tl.float32)
        read = tl.zeros((C, C), tl.float32)
        read_values = tl.zeros((C, C), tl.float32)
        for start in tl.static_range(0, K, BK):
            ks = start + tl.arange(0, BK)
            in_keys = there & (ks < K)[None, :]
            cells = ((skipped + first) * H + head) * K + rows * (H * K) + ks[None, :]
            w, centred, half = _decays(log_w, cells, in_keys, C, DOT, PRECISION)
            of_chunk = ((begin // C + segment + chunk) * H + head) * K
            tl.store(factors + of_chunk + ks, expm1(2 * half), mask=ks < K)

            half, to_end = exp(half)[None, :], exp(-centred)
            removal = tl.load(kappa + cells, mask=in_keys, other=0.0).to(tl.float32)
            z_removal = tl.load(a + cells, mask=in_keys, other=0.0).to(tl.float32) * removal * to_end
            z = tl.load(k + cells, mask=in_keys, other=0.0).to(tl.float32) * to_end
            of_write = writes + of_steps + ks[None, :]
            tl.store(of_write, (z_removal * half).to(writes.dtype.element_ty), mask=in_keys)
            tl.store(of_write + K, (z * half).to(writes.dtype.element_ty), mask=in_keys)
            z_removal, z = tl.trans(z_removal.to(DOT)), tl.trans(z.to(DOT))
            x_removal = (-removal * exp(centred - w)).to(reads.dtype.element_ty)
            x = tl.load(r + cells, mask=in_keys, other=0.0).to(tl.float32) * exp(centred)
            x = x.to(reads.dtype.element_ty)
            of_read = reads + of_steps + ks[None, :]
            if BK < K:
                tl.store(of_read, (x_removal * half).to(reads.dtype.element_ty), mask=in_keys)
                tl.store(of_read + K, (x * half).to(reads.dtype.element_ty), mask=in_keys)
            removed += dot(x_removal, z_removal, DOT, PRECISION)
            removed_values += dot(x_removal, z, DOT, PRECISION)
            read += dot(x, z_removal, DOT, PRECISION)
            read_values += dot(x, z, DOT, PRECISION)
        removed = tl.where(columns < rows, removed, 0.0)
        removed_values = tl.where(columns < rows, removed_values, 0.0)
        read = tl.where(columns <= rows, read, 0.0)
        read_values = tl.where(columns <= rows, read_values, 0.0)

        # The inverse of I - removed, from the inverses of its diagonal blocks.
        inverse = tl.where(rows == columns, 1.0, 0.0) + tl.where(_level(rows, columns, 1), removed, 0.0)
        for level in tl.static_range(1, LEVELS):
            part = tl.where(_level(rows, columns, 1 << level), removed, 0.0)
            inverse += dot(inverse, dot(part, inverse, DOT, PRECISION), DOT, PRECISION)
        removed_values = dot(inverse, removed_values, DOT, PRECISION)
        read_values += dot(read, removed_values, DOT, PRECISION)
        pairs = solved + (first * H + head) * (4 * C) + rows * (H * 4 * C) + columns
        tl.store(pairs, inverse.to(solved.dtype.element_ty), mask=there)
        tl.store(pairs + C, removed_values.to(solved.dtype.element_ty), mask=there)
        tl.store(pairs + 2 * C, dot(read, inverse, DOT, PRECISION).to(solved.dtype.element_ty), mask=there)
        tl.store(pairs + 3 * C, read_values.to(solved.dtype.element_ty), mask=there)

        if BK >= K:
            x_removal = dot(inverse, x_removal, DOT, PRECISION)
            x = x.to(tl.float32) + dot(read, x_removal, DOT, PRECISION)
            tl.store(of_read, (x_removal * half).to(reads.dtype.element_ty), mask=in_keys)
            tl.store(of_read + K, (x * half).to(reads.dtype.element_ty), mask=in_keys)
        else:
            tl.debug_barrier()  # other threads wrote the values read here
            for start in tl.static_range(0, K, BK):
                ks = start + tl.arange(0, BK)
                in_keys = there & (ks < K)[None, :]
                of_read = reads + of_steps + ks[None, :]
                x_removal = tl.load(of_read, mask=in_keys, other=0.0)
                x = tl.load(of_read + K, mask=in_keys, other=0.0).to(tl.float32)
                x_removal = dot(inverse, x_removal, DOT, PRECISION)
                x += dot(read, x_removal, DOT, PRECISION)
                tl.store(of_read, x_removal.to(reads.dtype.element_ty), mask=in_keys)
                tl.store(of_read + K, x.to(reads.dtype.element_ty), mask=in_keys)


@triton.jit(do_not_specialize=OF_SLAB)
def _state_kernel(
    q,
    x,
    values,
    solved,
    factors,
    states,
    out,
    between,
    final,
    kept,
    boundaries,
    T,
    APART,
    SEGMENT,
    SEGMENTS,
    H,
    TILES,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """
    Passes the state through the chunks of a segment: q and x are the reads and writes of `_chunk_kernel`. `states`
    enter the segments, `final` leave them, and `kept` (chunks, H, V, K) enter the chunks. `out` are the readouts of
    second half steps, `between` the readouts that first ones write again. None is not written; `states` of None are
    zero, and `values` of None the identity. With REVERSE it goes from the last token to the first, with writes as q,
    reads as x, and the gradients of out, v and `between` as values, out and `between`.

    No warp needs another warp's part of the state.
    """
    tile, head, segment = program(H, TILES)
    begin, stop = tokens(boundaries, segment, T, SEGMENT, SEGMENTS, PACKED)
    skipped = _skipped(segment, APART, SEGMENTS, PACKED)
    hs, ks, vs = tl.arange(0, 2 * C), tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    ts, second = hs % C, hs >= C
    in_state = (vs < V)[:, None] & (ks < K)[None, :]
    cells = (segment.to(tl.int64) * H + head) * (K * V) + vs[:, None] * K + ks[None, :]

    state = tl.zeros((BV, BK), tl.float32)
    if states is not None:
        state = tl.load(states + cells, mask=in_state, other=0.0)
    if values is None:
        state = tl.where(vs[:, None] == ks[None, :], 1.0, 0.0)
    chunks = tl.cdiv(stop - begin, C).to(tl.int32)
    for n in tl.range(chunks, num_stages=STAGES):
        chunk = n
        if REVERSE:
            chunk = chunks - 1 - n
        first = begin + chunk * C
        there = ts < stop - first
        in_keys = there[:, None] & (ks < K)[None, :]
        keys = (first * H + head) * (2 * K) + (ts * (H * 2 * K) + hs // C * K)[:, None] + ks[None, :]
        of_chunk = ((begin // C + segment + chunk) * H + head) * K + ks
        factor = tl.load(factors + of_chunk, mask=ks < K, other=0.0)
        q_chunk = tl.load(q + keys, mask=in_keys, other=0.0)
        x_chunk = tl.load(x + keys, mask=in_keys, other=0.0)
        if kept is not None:
            of_kept = ((begin // C + segment + chunk) * H + head) * (K * V)
            there_kept = kept + of_kept + vs[:, None] * K + ks[None, :]
            tl.store(there_kept, state.to(kept.dtype.element_ty), mask=in_state)

        o = dot(state, tl.trans(q_chunk), DOT, PRECISION)
        if values is None:
            known = tl.where(second[None, :], 0.0, o)
        else:
            in_values = there[:, None] & (vs < V)[None, :]
            of_values = ((skipped + first) * H + head) * V + (ts * (H * V))[:, None] + vs[None, :]
            given = tl.load(values + of_values, mask=in_values & second[:, None], other=0.0)
            y_chunk = tl.trans(given.to(tl.float32))
            pairs = (first * H + head) * (4 * C) + (ts * (H * 4 * C) + hs // C * (2 * C))[:, None] + hs[None, :]
            weights = tl.load(solved + pairs, mask=there[:, None], other=0.0)
            if REVERSE:
                known = tl.where(second[None, :], y_chunk, o)
                inside = dot(known, weights, DOT, PRECISION)
                o = tl.where(second[None, :], o + inside, inside)
            else:
                o += dot(y_chunk, tl.trans(weights), DOT, PRECISION)
                known = tl.where(second[None, :], y_chunk, o)
            if out is not None:
                result = tl.trans(o).to(out.dtype.element_ty)
                tl.store(out + of_values, result, mask=in_values & second[:, None])
            if between is not None:
                result = tl.trans(o).to(between.dtype.element_ty)
                of_between = (first * H + head) * V + (ts * (H * V))[:, None] + vs[None, :]
                tl.store(between + of_between, result, mask=in_values & (second == 0)[:, None])
        state += state * factor[None, :]
        state += dot(known, x_chunk, DOT, PRECISION)
    if final is not None:
        tl.store(final + cells, state, mask=in_state)


@triton.jit(do_not_specialize=["SEGMENTS"])
def _pass_kernel(
    states,
    passing,
    initial,
    final,
    firsts,
    SEGMENTS,
    H,
    TILES,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BS: tl.constexpr,
    PRECISION: tl.constexpr,
    REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """
    Replaces each segment's contribution by the state that enters it, and writes the state after the last one. A
    segment multiplies a state by `passing` (segments, H, K, K), of which BS rows are on chip at a time. If these are
    not all, the columns of the state that they multiply come from memory.
    """
    tile, head, sequence = program(H, TILES)
    ks, vs = tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    cells, in_state = vs[:, None] * K + ks[None, :], (vs < V)[:, None] & (ks < K)[None, :]
    ss = tl.arange(0, BS)
    square, in_square = ss[:, None] * K + ks[None, :], (ss < K)[:, None] & (ks < K)[None, :]
    here = (sequence.to(tl.int64) * H + head) * (K * V)
    state = tl.zeros((BV, BK), tl.float32)
    if initial is not None:
        state = tl.load(initial + here + cells, mask=in_state, other=0.0)
    if PACKED:
        first, last = tl.load(firsts + sequence), tl.load(firsts + sequence + 1)
    else:
        first = sequence.to(tl.int64) * SEGMENTS
        last = first + SEGMENTS
    for n in range((last - first).to(tl.int32)):
        segment = first + n
        if REVERSE:
            segment = last - 1 - n
        there = states + (segment * H + head) * (K * V)
        factors = passing + (segment * H + head) * (K * K) + square
        added = tl.load(there + cells, mask=in_state, other=0.0)
        if BS >= K:
            factor = tl.load(factors, mask=in_square, other=0.0)
            tl.store(there + cells, state, mask=in_state)
            state = added + tl.dot(state, factor, input_precision=PRECISION)
        else:
            tl.store(there + cells, state, mask=in_state)
            tl.debug_barrier()  # other threads wrote the values read here
            state = added
            for start in range(0, K, BS):
                here_too = (vs < V)[:, None] & (start + ss < K)[None, :]
                columns = tl.load(there + vs[:, None] * K + start + ss[None, :], mask=here_too, other=0.0)
                in_square = (start + ss < K)[:, None] & (ks < K)[None, :]
                factor = tl.load(factors + start * K, mask=in_square, other=0.0)
                state += tl.dot(columns, factor, input_precision=PRECISION)
    tl.store(final + here + cells, state, mask=in_state)


@triton.jit(do_not_specialize=OF_SLAB)
def _gradient_kernel(
    grad_out,
    grad_between,
    between,
    r,
    k,
    v,
    log_w,
    kappa,
    a,
    chunk_states,
    chunk_grads,
    dr,
    dk,
    dw,
    dkappa,
    da,
    boundaries,
    T,
    APART,
    SEGMENT,
    SEGMENTS,
    H,
    SLOTS,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    TILES: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
):
    """
    The gradients of r, k, log_w, kappa and a for one tile of the key channels and every chunk whose number in its
    segment is `slot` modulo `SLOTS` / TILES, from the states that enter the chunks, the gradients of the states that
    leave them, the readouts of first half steps, and their gradient.
    """
    place, head, segment = program(H, SLOTS)
    begin, stop = tokens(boundaries, segment, T, SEGMENT, SEGMENTS, PACKED)
    skipped = _skipped(segment, APART, SEGMENTS, PACKED)
    ts, ks, vs = tl.arange(0, C), place % TILES * BK + tl.arange(0, BK), tl.arange(0, BV)
    rows, columns = ts[:, None], ts[None, :]
    for chunk in tl.range(place // TILES, tl.cdiv(stop - begin, C).to(tl.int32), SLOTS // TILES):
        first = begin + chunk * C
        there = rows < stop - first
        of_states = ((begin // C + segment + chunk) * H + head) * (K * V)

        # Sums over the value channels: the gradients of the scores of first and second reads and writes, and the
        # contributions of the state to reads and writes.
        scores_ff = tl.zeros((C, C), tl.float32)
        scores_fs = tl.zeros((C, C), tl.float32)
        scores_sf = tl.zeros((C, C), tl.float32)
        scores_ss = tl.zeros((C, C), tl.float32)
        grad_removal = tl.zeros((C, BK), tl.float32)
        grad_r = tl.zeros((C, BK), tl.float32)
        far_removal = tl.zeros((C, BK), tl.float32)
        far_k = tl.zeros((C, BK), tl.float32)
        grad_total = tl.zeros((BK,), tl.float32)
        for start in tl.static_range(0, V, BV):
            in_values = there & (start + vs < V)[None, :]
            of_between = (first * H + head) * V + rows * (H * V) + start + vs[None, :]
            values = ((skipped + first) * H + head) * V + rows * (H * V) + start + vs[None, :]
            cells = of_states + (start + vs)[:, None] * K + ks[None, :]
            in_state = (start + vs < V)[:, None] & (ks < K)[None, :]
            state = tl.load(chunk_states + cells, mask=in_state, other=0.0)
            grad_state = tl.load(chunk_grads + cells, mask=in_state, other=0.0)
            grad_total += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32), 0)
            g_first = tl.load(grad_between + of_between, mask=in_values, other=0.0)
            g_second = tl.load(grad_out + values, mask=in_values, other=0.0)
            grad_removal += dot(g_first, state, DOT, PRECISION)
            grad_r += dot(g_second, state, DOT, PRECISION)
            x_first = tl.load(between + of_between, mask=in_values, other=0.0)
            x_second = tl.load(v + values, mask=in_values, other=0.0)
            far_removal += dot(x_first, grad_state, DOT, PRECISION)
            far_k += dot(x_second, grad_state, DOT, PRECISION)
            x_first, x_second = tl.trans(x_first), tl.trans(x_second)
            scores_ff += dot(g_first, x_first, DOT, PRECISION)
            scores_fs += dot(g_first, x_second, DOT, PRECISION)
            scores_sf += dot(g_second, x_first, DOT, PRECISION)
            scores_ss += dot(g_second, x_second, DOT, PRECISION)

        # A second read also gets its own token's write.
        now_first = tl.sum(tl.where(rows == columns, scores_sf, 0.0), 1)[:, None]
        now_second = tl.sum(tl.where(rows == columns, scores_ss, 0.0), 1)[:, None]
        scores_ff = tl.where(columns < rows, scores_ff, 0.0)
        scores_fs = tl.where(columns < rows, scores_fs, 0.0)
        scores_sf = tl.where(columns < rows, scores_sf, 0.0)
        scores_ss = tl.where(columns < rows, scores_ss, 0.0)

        keys = ((skipped + first) * H + head) * K + rows * (H * K) + ks[None, :]
        in_keys = there & (ks < K)[None, :]
        w, centred, half = _decays(log_w, keys, in_keys, C, DOT, PRECISION)
        to_start, to_end, half = exp(centred - w), exp(-centred), exp(half)[None, :]
        removal = tl.load(kappa + keys, mask=in_keys, other=0.0).to(tl.float32)
        rate = tl.load(a + keys, mask=in_keys, other=0.0).to(tl.float32)
        key = tl.load(k + keys, mask=in_keys, other=0.0).to(tl.float32)
        z_first, z_second = (rate * removal * to_end).to(DOT), (key * to_end).to(DOT)
        grad_removal = grad_removal * half + dot(scores_ff, z_first, DOT, PRECISION)
        grad_removal = (grad_removal + dot(scores_fs, z_second, DOT, PRECISION)) * to_start
        grad_r = grad_r * half + dot(scores_sf, z_first, DOT, PRECISION)
        to_read = exp(centred)
        grad_r = (grad_r + dot(scores_ss, z_second, DOT, PRECISION)) * to_read

        # The gradient of a decay sums every read from its token on (`inside`), minus the writes from there on, plus
        # earlier writes that leave the chunk (`passing`). First reads come before the decay of their token.
        receptance = tl.load(r + keys, mask=in_keys, other=0.0).to(tl.float32)
        grad_w = removal * grad_removal
        inside = receptance * grad_r - grad_w
        grad_r += now_first * (rate * removal) + now_second * key
        tl.store(dr + keys, grad_r.to(dr.dtype.element_ty), mask=in_keys)

        x_first, x_second = (-removal * to_start).to(DOT), (receptance * to_read).to(DOT)
        near = dot(tl.trans(scores_fs), x_first, DOT, PRECISION)
        near = (near + dot(tl.trans(scores_ss), x_second, DOT, PRECISION)) * to_end
        far_k *= to_end * half
        inside -= key * near
        passing = key * far_k
        far_k += near + now_second * receptance
        tl.store(dk + keys, far_k.to(dk.dtype.element_ty), mask=in_keys)

        near = dot(tl.trans(scores_ff), x_first, DOT, PRECISION)
        near = (near + dot(tl.trans(scores_sf), x_second, DOT, PRECISION)) * to_end
        far_removal *= to_end * half
        inside -= rate * removal * near
        passing += rate * removal * far_removal
        far_removal += near + now_first * receptance
        tl.store(dkappa + keys, (rate * far_removal - grad_removal).to(dkappa.dtype.element_ty), mask=in_keys)
        tl.store(da + keys, (removal * far_removal).to(da.dtype.element_ty), mask=in_keys)

        grad_w += half * half * grad_total[None, :]
        grad_w += sum_where(tl.where(columns >= rows, 1.0, 0.0), inside, DOT, PRECISION)
        grad_w += sum_where(tl.where(columns < rows, 1.0, 0.0), passing, DOT, PRECISION)
        tl.store(dw + keys, grad_w.to(dw.dtype.element_ty), mask=in_keys)


@triton.jit
def _decode_kernel(
    r,
    k,
    v,
    log_w,
    kappa,
    a,
    state,
    new_state,
    indices,
    out,
    H,
    stride,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One token of one head."""
    program = tl.program_id(0).to(tl.int64)
    ks, vs = tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = ks < K, vs < V
    receptance = tl.load(r + program * K + ks, mask=in_k, other=0.0).to(tl.float32)[None, :]
    key = tl.load(k + program * K + ks, mask=in_k, other=0.0).to(tl.float32)[None, :]
    value = tl.load(v + program * V + vs, mask=in_v, other=0.0).to(tl.float32)[:, None]
    w = tl.load(log_w + program * K + ks, mask=in_k, other=0.0).to(tl.float32)[None, :]
    removal = tl.load(kappa + program * K + ks, mask=in_k, other=0.0).to(tl.float32)[None, :]
    rate = tl.load(a + program * K + ks, mask=in_k, other=0.0).to(tl.float32)[None, :]

    index = program // H
    if indices is not None:
        index = tl.load(indices + index)
    cells, in_state = vs[:, None] * K + ks[None, :], in_v[:, None] & in_k[None, :]
    first = index * stride + program % H * (K * V)
    s = tl.load(state + first + cells, mask=in_state, other=0.0)
    removed = tl.sum(s * removal, 1)[:, None]
    s = s * exp(w) + value * key - removed * (rate * removal)
    tl.store(new_state + first + cells, s, mask=in_state)
    y = tl.sum(s * receptance, 1)
    tl.store(out + program * V + vs, y.to(out.dtype.element_ty), mask=in_v)


# Tokens of a chunk of 2 * CHUNK half steps.
CHUNK = 16
# The shortest segment for which computing its entering state pays off.
MIN_SEGMENT = 512
# The largest head for which sequences are cut.
MAX_CUT = 256


class _Plan(Segments):
    """The division of a slab's work into programs, and their common inputs."""

    def __init__(self, slab, r, k, v, log_w, kappa, a, cu_seqlens):
        batch, total, heads, key_size = k.shape
        value_size, length = v.shape[-1], slab.stop - slab.start
        # Products use the dtype of their operands in memory.
        self.dtype = torch.bfloat16 if common_dtype(r, k, v) == torch.bfloat16 else torch.float32
        block_k = block_size(key_size)
        row = block_k * self.dtype.itemsize  # bytes
        block_v = block_size(value_size, min(64, max(16, 16384 // row)))
        # Chunks that are read ahead would not fit in the shared memory of every GPU if heads are wide.
        self.walking = {"BK": block_k, "STAGES": 3 if row <= 256 else 1, "num_warps": 4}
        # 16 warps then share a multiprocessor, and hide what each of them waits for. A few values are spilled.
        half = self.dtype == torch.bfloat16
        self.sharing = {"maxnreg": 128} if half and block_k <= 64 and torch.version.hip is None else {}
        self.tiles = cdiv(value_size, block_v)
        self.heads, self.key_size, self.value_size = heads, key_size, value_size
        super().__init__(
            batch,
            length,
            chunk=CHUNK,
            programs=batch * heads * self.tiles,
            wanted=4 * multiprocessors(k),
            shortest=MIN_SEGMENT if key_size <= MAX_CUT else length,
            cu_seqlens=cu_seqlens,
            start=slab.start,
            total=total,
        )
        self.multiprocessors = multiprocessors(k)
        self.geometry = (self.boundaries, length, total - length, self.segment, self.per_sequence, heads)
        products = operands(common_dtype(r, k, v))
        self.constants = {"K": key_size, "C": CHUNK, **products, "PACKED": cu_seqlens is not None}
        self.block_v = block_v

        self.tokens = batch, length, heads
        self.reads, self.writes = k.new_empty(2, *self.tokens, 2, key_size, dtype=self.dtype).unbind()
        self.solved = k.new_empty(*self.tokens, 2, 2 * CHUNK, dtype=self.dtype)
        self.factors = k.new_empty(self.chunks, heads, key_size, dtype=torch.float32)
        self.launch(
            _chunk_kernel,
            *(x[:, slab] for x in (r, k, log_w, kappa, a)),
            *(self.reads, self.writes, self.solved, self.factors),
            programs=self.slots(64),
            LEVELS=CHUNK.bit_length() - 1,
            BK=min(block_k, 64),
            num_warps=2 if half else 4,
            **self.sharing,
        )

    def slots(self, waves):
        """Programs for each head of a segment, where chunks are independent."""
        return min(cdiv(waves * self.multiprocessors, self.segments * self.heads), cdiv(self.segment, CHUNK))

    def launch(self, kernel, *arguments, programs, **constants):
        grid = (self.segments * self.heads * programs,)
        launch(kernel, grid, *arguments, *self.geometry, programs, **self.constants, **constants)

    def walk(self, values, states, *, reverse, out=None, between=None, final=None, kept=None):
        q, x = (self.writes, self.reads) if reverse else (self.reads, self.writes)
        size = self.key_size if values is None else self.value_size
        block = min(block_size(size), self.block_v)
        self.launch(
            _state_kernel,
            *(q, x, values, self.solved, self.factors, states, out, between, final, kept),
            programs=cdiv(size, block),
            V=size,
            BV=block,
            REVERSE=reverse,
            **self.walking,
            **self.sharing,
        )

    def entering(self, values, initial, final, reverse):
        """
        The states that enter the segments; in reverse, their gradients. If sequences are cut, those that leave them
        are written to `final`, which may be `initial`.
        """
        if self.whole:
            return initial
        states = values.new_empty(self.segments, *final.shape[1:], dtype=torch.float32)
        passing = values.new_empty(self.segments, self.heads, self.key_size, self.key_size, dtype=torch.float32)
        self.walk(values, None, reverse=reverse, final=states)
        self.walk(None, None, reverse=reverse, final=passing)
        block, block_k = min(block_size(self.value_size), 32), block_size(self.key_size)
        tiles = cdiv(self.value_size, block)
        launch(
            _pass_kernel,
            (self.sequences * self.heads * tiles,),
            *(states, passing, initial, final, self.firsts, self.per_sequence, self.heads, tiles),
            K=self.key_size,
            V=self.value_size,
            BK=block_k,
            BV=block,
            BS=block_k if block_k <= 64 else 32,
            num_warps=4 if block_k <= 64 else 8,
            PRECISION="ieee" if torch.version.hip is not None else "tf32x3",
            REVERSE=reverse,
            PACKED=self.boundaries is not None,
        )
        return states

    def outputs(self, values, initial, final, reverse, **written):
        """
        Writes the outputs, and the states that leave the sequences to `final`, which may be `initial`; in reverse,
        their gradients.
        """
        states = self.entering(values, initial, final, reverse)
        self.walk(values, states, reverse=reverse, final=final if self.whole else None, **written)


def delta_wkv_triton(r, k, v, log_w, kappa, a, initial_state, cu_seqlens, out_dtype):
    """Computes [`subquad_kernels.delta_wkv`]. Also returns the states that enter all slabs but the first."""
    r, k, v, log_w, kappa, a = contiguous(r, k, v, log_w, kappa, a)
    entering = None if initial_state is None else initial_state.float().contiguous()
    out, of_tokens = torch.empty_like(v, dtype=out_dtype), slabs(k, cu_seqlens)
    shape = count_documents(cu_seqlens, k.shape[0]), k.shape[2], v.shape[-1], k.shape[-1]
    passed = v.new_empty(len(of_tokens) - 1, *shape, dtype=torch.float32)
    final = v.new_empty(shape, dtype=torch.float32)
    for slab, leaving in zip(of_tokens, (*passed, final), strict=True):
        plan = _Plan(slab, r, k, v, log_w, kappa, a, cu_seqlens)
        plan.outputs(v[:, slab], entering, leaving, False, out=out[:, slab])
        entering, plan = leaving, None  # its memory is for the next one
    return out, final, passed


def delta_wkv_triton_backward(
    grad_out, grad_state, passed, r, k, v, log_w, kappa, a, initial_state, cu_seqlens, out_dtype
):
    """
    Gradients of r, k, v, log_w, kappa, a and, if it is given, initial_state. The states that enter the chunks are
    recomputed from those that enter the slabs, `passed`; if these are None, they are recomputed, too.
    """
    of_tokens = slabs(k, cu_seqlens)
    if passed is None:
        inputs = r, k, v, log_w, kappa, a, initial_state, cu_seqlens, out_dtype
        passed = delta_wkv_triton(*inputs)[2] if len(of_tokens) > 1 else ()
    grad_out, *inputs = contiguous(grad_out, r, k, v, log_w, kappa, a)
    grad_state = grad_state.float().contiguous()
    initial = None if initial_state is None else initial_state.float().contiguous()
    grads, grad_initial = [torch.empty_like(x) for x in inputs], torch.empty_like(grad_state)
    for slab, entering in reversed([*zip(of_tokens, (initial, *passed), strict=True)]):
        _slab_backward(slab, grad_out, grad_state, entering, inputs, cu_seqlens, grads, grad_initial)
        grad_state = grad_initial
    return grads if initial_state is None else [*grads, grad_initial]


def _slab_backward(slab, grad_out, grad_state, entering, inputs, cu_seqlens, grads, grad_initial):
    """
    Writes the gradients of a slab's tokens, and of the states that enter it. The states that enter the chunks are kept
    in the dtype of the products.
    """
    plan = _Plan(slab, *inputs, cu_seqlens)
    grad_out, r, k, v, log_w, kappa, a = (x[:, slab] for x in (grad_out, *inputs))
    dr, dk, dv, dw, dkappa, da = (x[:, slab] for x in grads)
    kept = k.new_empty(2, plan.chunks, *grad_state.shape[1:], dtype=plan.dtype)
    between, grad_between = v.new_empty(2, *plan.tokens, plan.value_size, dtype=plan.dtype).unbind()
    states = plan.entering(v, entering, torch.empty_like(grad_state), False)
    plan.walk(v, states, reverse=False, between=between, kept=kept[0])
    plan.outputs(grad_out, grad_state, grad_initial, True, out=dv, between=grad_between, kept=kept[1])
    # Single precision has operands twice as large.
    most = 64 if plan.dtype == torch.bfloat16 else 32
    block = min(plan.walking["BK"], most)
    tiles = cdiv(plan.key_size, block)
    plan.launch(
        _gradient_kernel,
        *(grad_out, grad_between, between, r, k, v, log_w, kappa, a, *kept, dr, dk, dw, dkappa, da),
        programs=tiles * plan.slots(16),
        V=plan.value_size,
        TILES=tiles,
        BK=block,
        BV=min(block_size(plan.value_size), most),
        num_warps=4,
        **plan.sharing,
    )


def delta_wkv_triton_step(r, k, v, log_w, kappa, a, state, new_state, indices, out_dtype):
    """
    One token: r, k, log_w, kappa, a (B, 1, H, K), v (B, 1, H, V), state (B, H, V, K) in float32; if it is None,
    `new_state` holds it, at `indices` (B) if there are any. Writes the state after the token to `new_state`. Returns
    out (B, 1, H, V).
    """
    r, k, v, log_w, kappa, a, indices = contiguous(r, k, v, log_w, kappa, a, indices)
    batch, _, heads, key_size = k.shape
    out = torch.empty_like(v, dtype=out_dtype)
    state = new_state if state is None else state
    block_k, block_v = next_power_of_2(key_size), next_power_of_2(v.shape[-1])
    launch(
        _decode_kernel,
        (batch * heads,),
        *(r, k, v, log_w, kappa, a, state, new_state, indices, out, heads, new_state.stride(0)),
        K=key_size,
        V=v.shape[-1],
        BK=block_k,
        BV=block_v,
        num_warps=min(max(block_k * block_v // 2048, 4), 16),
    )
    return out

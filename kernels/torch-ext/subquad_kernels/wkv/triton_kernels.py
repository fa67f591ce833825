"""
WKV as Triton kernels.

`_chunk_kernel` computes everything that does not depend on the state, for all chunks of 16 tokens at once: the scores
of the token pairs of a chunk, and the factors of the products with the state. `_state_kernel` then passes the state on
chip from chunk to chunk of one head, with little more than products, and reads the next chunks ahead of time. If there
are enough heads, it walks through a whole sequence. Otherwise a sequence is cut into segments. A walk without outputs
finds each segment's contribution to a state and its decay, and `_pass_kernel` (segments.py) the states that enter the
segments.

The backward pass walks once from the first token to the last, for the states, and once from the last to the first,
which is the transpose: r and k change roles, and so do out and v. `_gradient_kernel` computes the other gradients.

Inside a chunk the token pairs are covered by halving, see chunks.py. At the level of blocks of b tokens, X is r for
the tokens of right blocks and k for left blocks, decayed to the boundary between the two blocks of a pair. So
X Xᵀ contains the scores of all pairs of the level. A product with a matrix of zeros and ones sums log decays from the
boundary. So no exponent is positive or a difference, and the backward pass, the transpose of that product, has no
cancellation either.
"""

import torch
import triton
import triton.language as tl

from ..backend import (
    block_size,
    cdiv,
    common_dtype,
    contiguous,
    launch,
    multiprocessors,
    next_power_of_2,
    shared_memory,
)
from ..segments import OF_LENGTH, Segments, dot, exp, expm1, operands, passing, program, sum_where, tokens


@triton.jit
def _to_boundary(rows, columns, block: tl.constexpr):
    """For each token (row) the tokens (columns) between it and the boundary of its pair of blocks."""
    near = ((rows ^ columns) & -block) == 0
    return tl.where(near & tl.where((rows & block) != 0, columns < rows, columns > rows), 1.0, 0.0)


# Index of each mask of masks.py.
PAST: tl.constexpr = tl.constexpr(0)
FUTURE: tl.constexpr = tl.constexpr(1)
TO_BOUNDARY: tl.constexpr = tl.constexpr(2)


@triton.jit
def _mask(masks, index, rows, columns, C: tl.constexpr):
    return tl.load(masks + index * (C * C) + rows * C + columns)


@triton.jit
def _reads(ts, block: tl.constexpr, REVERSE: tl.constexpr):
    """The tokens of right blocks, which read at a level, or in reverse of left blocks, which are read."""
    return ((ts & block) == 0) == REVERSE


@triton.jit
def _pairs(ts, block: tl.constexpr, REVERSE: tl.constexpr):
    """The pairs of a reading token (row) and a read one (column) of a level, in bits, which the compiler can fold."""
    same = (ts & -(2 * block))[:, None] == (ts & -(2 * block))[None, :]
    return same & _reads(ts, block, REVERSE)[:, None] & _reads(ts, block, not REVERSE)[None, :]


@triton.jit
def _load_decay(log_w, first, head, offsets, mask, ks, H, K: tl.constexpr, STATIC: tl.constexpr):
    pointers = log_w + (first * H + head) * K + offsets
    if STATIC:
        pointers = log_w + head * K + ks + offsets * 0
    w = tl.load(pointers, mask=mask, other=0.0)
    # exp of both is zero, but -inf times the zeros of a mask would be NaN.
    finite = w.to(tl.float32)
    return tl.where(finite < -1e4, -1e4, finite).to(w.dtype)


@triton.jit(do_not_specialize=OF_LENGTH)
def _chunk_kernel(
    r,
    k,
    log_w,
    u,
    reads,
    writes,
    scores,
    totals,
    factors,
    boundaries,
    T,
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
    STATIC: tl.constexpr,
    PACKED: tl.constexpr,
):
    """
    State-independent tensors for every chunk whose number in its segment is `slot` modulo `SLOTS`: r decayed from the
    beginning of the chunk, k decayed to its end, the scores of its pairs, including u, its summed log decay and the
    exp of it minus 1.
    """
    slot, head, segment = program(H, SLOTS)
    begin, stop = tokens(boundaries, segment, T, SEGMENT, SEGMENTS, PACKED)
    ts = tl.arange(0, C)
    rows, columns = ts[:, None], ts[None, :]
    for chunk in tl.range(slot, tl.cdiv(stop - begin, C).to(tl.int32), SLOTS, num_stages=2):
        first = begin + chunk * C
        there = (ts < stop - first)[:, None]
        of_pairs, of_u = tl.zeros((C, C), tl.float32), tl.zeros((C,), tl.float32)
        for start in tl.static_range(0, K, BK):
            ks = start + tl.arange(0, BK)
            here, keys = (first * H + head) * K, rows * (H * K) + ks[None, :]
            in_keys = there & (ks < K)[None, :]
            r_chunk = tl.load(r + here + keys, mask=in_keys, other=0.0).to(tl.float32)
            k_chunk = tl.load(k + here + keys, mask=in_keys, other=0.0).to(tl.float32)
            w = _load_decay(log_w, first, head, keys, in_keys, ks, H, K, STATIC)
            bonus = tl.load(u + head * K + ks, mask=ks < K, other=0.0).to(tl.float32)
            of_u += tl.sum(r_chunk * bonus[None, :] * k_chunk, 1)
            for level in tl.static_range(LEVELS):
                x = tl.where(_reads(ts, 1 << level, False)[:, None], r_chunk, k_chunk)
                if level > 0:
                    x *= exp(sum_where(_to_boundary(rows, columns, 1 << level), w, DOT, PRECISION))
                products = dot(x, tl.trans(x), DOT, PRECISION)
                of_pairs += tl.where(_pairs(ts, 1 << level, False), products, 0.0)
            past = exp(sum_where(tl.where(columns < rows, 1.0, 0.0), w, DOT, PRECISION))
            future = exp(sum_where(tl.where(columns > rows, 1.0, 0.0), w, DOT, PRECISION))
            tl.store(reads + here + keys, (r_chunk * past).to(reads.dtype.element_ty), mask=in_keys)
            tl.store(writes + here + keys, (k_chunk * future).to(writes.dtype.element_ty), mask=in_keys)
            total = tl.sum(w.to(tl.float32), 0)
            of_chunk = ((begin // C + segment + chunk) * H + head) * K + ks
            tl.store(totals + of_chunk, total, mask=ks < K)
            tl.store(factors + of_chunk, expm1(total), mask=ks < K)
        pairs = (first * H + head) * C + rows * (H * C) + columns
        of_pairs = tl.where(rows == columns, of_u[:, None], of_pairs)
        tl.store(scores + pairs, of_pairs.to(scores.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=OF_LENGTH)
def _state_kernel(
    q,
    x,
    y,
    scores,
    totals,
    factors,
    states,
    summed,
    out,
    final,
    kept,
    boundaries,
    T,
    SEGMENT,
    SEGMENTS,
    H,
    TILES,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    KEEP: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    REVERSE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """
    Passes the state through the chunks of a segment: x and y are k and v, q is r, all decayed as `_chunk_kernel` wrote
    them. `states` enter the segments, `final` leave them, with `summed` log decays, and `kept` (chunks, H, V, K) enter
    every KEEP-th chunk. None means zero, or not written. With REVERSE it goes from the last token to the
    first, with r as x, k as q, the gradient of out as y, the transposed scores, and the gradient of v as out.

    The state is transposed, so that no warp needs another warp's part of it.
    """
    tile, head, segment = program(H, TILES)
    begin, stop = tokens(boundaries, segment, T, SEGMENT, SEGMENTS, PACKED)
    ts, ks, vs = tl.arange(0, C), tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    in_state = (vs < V)[:, None] & (ks < K)[None, :]
    cells = (segment.to(tl.int64) * H + head) * (K * V) + vs[:, None] + ks[None, :] * V

    state = tl.zeros((BV, BK), tl.float32)
    if states is not None:
        state = tl.load(states + cells, mask=in_state, other=0.0)
    total = tl.zeros((BK,), tl.float32)
    chunks = tl.cdiv(stop - begin, C).to(tl.int32)
    for n in tl.range(chunks, num_stages=3):
        chunk = n
        if REVERSE:
            chunk = chunks - 1 - n
        first = begin + chunk * C
        there = (ts < stop - first)[:, None]
        in_keys, in_values = there & (ks < K)[None, :], there & (vs < V)[None, :]
        keys = (first * H + head) * K + ts[:, None] * (H * K) + ks[None, :]
        values = (first * H + head) * V + ts[:, None] * (H * V) + vs[None, :]
        of_chunk = ((begin // C + segment + chunk) * H + head) * K + ks
        factor = tl.load(factors + of_chunk, mask=ks < K, other=0.0)
        x_chunk = tl.load(x + keys, mask=in_keys, other=0.0)
        y_chunk = tl.trans(tl.load(y + values, mask=in_values, other=0.0).to(DOT))
        if kept is not None:
            keeps = chunk % KEEP == 0
            if REVERSE:
                keeps = (chunk % KEEP == KEEP - 1) | (n == 0)
            of_kept = ((begin // (KEEP * C) + segment + chunk // KEEP) * H + head) * (K * V)
            there_kept = kept + of_kept + vs[:, None] * K + ks[None, :]
            tl.store(there_kept, state.to(kept.dtype.element_ty), mask=tl.where(keeps, in_state, False))
        if out is not None:
            q_chunk = tl.load(q + keys, mask=in_keys, other=0.0)
            pairs = (first * H + head) * C + ts[:, None] * (H * C) + ts[None, :]
            weights = tl.load(scores + pairs, mask=there, other=0.0)
            if not REVERSE:
                weights = tl.trans(weights)
            o = dot(state, tl.trans(q_chunk), DOT, PRECISION) + dot(y_chunk, weights, DOT, PRECISION)
            tl.store(out + values, tl.trans(o).to(out.dtype.element_ty), mask=in_values)
        if summed is not None:
            total += tl.load(totals + of_chunk, mask=ks < K, other=0.0)
        state += state * factor[None, :]
        state += dot(y_chunk, x_chunk, DOT, PRECISION)
    if final is not None:
        tl.store(final + cells, state, mask=in_state)
    if summed is not None:
        tl.store(summed + (segment.to(tl.int64) * H + head) * K + ks, total, mask=ks < K)


@triton.jit(do_not_specialize=OF_LENGTH)
def _gradient_kernel(
    g,
    r,
    k,
    v,
    log_w,
    u,
    chunk_states,
    chunk_grads,
    dr,
    dk,
    dw,
    du,
    masks,
    boundaries,
    T,
    SEGMENT,
    SEGMENTS,
    H,
    TILES,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    STATIC: tl.constexpr,
    PACKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """
    The gradients of r, k, log_w and u for one tile of the key channels of a segment, from the states that enter the
    chunks and the gradients of the states that leave them.
    """
    tile, head, segment = program(H, TILES)
    begin, stop = tokens(boundaries, segment, T, SEGMENT, SEGMENTS, PACKED)
    ts, ks, vs = tl.arange(0, C), tile * BK + tl.arange(0, BK), tl.arange(0, BV)
    keys, values = ts[:, None] * (H * K) + ks[None, :], ts[:, None] * (H * V) + vs[None, :]
    rows, columns = ts[:, None], ts[None, :]
    bonus = tl.load(u + head * K + ks, mask=ks < K, other=0.0).to(tl.float32)[None, :]
    # Sums over tokens are done at the end, or as a product with ones: in the loop they would need shuffles.
    grad_bonus = tl.zeros((C, BK), tl.float32)
    grad_static = tl.zeros((C, BK), tl.float32)
    for chunk in tl.range(tl.cdiv(stop - begin, C).to(tl.int32), num_stages=STAGES):
        first = begin + chunk * C
        there = (ts < stop - first)[:, None]
        in_keys = there & (ks < K)[None, :]
        offset = ((begin // C + segment + chunk) * H + head) * (K * V)

        # Sums over the value channels: the gradient of the scores, and the contributions of the state to r and k.
        grad_scores = tl.zeros((C, C), tl.float32)
        grad_r = tl.zeros((C, BK), tl.float32)
        grad_k = tl.zeros((C, BK), tl.float32)
        grad_total = tl.zeros((C, BK), tl.float32)
        for start in tl.static_range(0, V, BV):
            in_values, in_v = there & (start + vs < V)[None, :], (ks < K)[None, :] & (start + vs < V)[:, None]
            v_chunk = tl.load(v + (first * H + head) * V + start + values, mask=in_values, other=0.0)
            g_chunk = tl.load(g + (first * H + head) * V + start + values, mask=in_values, other=0.0)
            cells = offset + (start + vs)[:, None] * K + ks[None, :]
            state = tl.load(chunk_states + cells, mask=in_v, other=0.0)
            grad_state = tl.load(chunk_grads + cells, mask=in_v, other=0.0)
            grad_scores += dot(g_chunk, tl.trans(v_chunk), DOT, PRECISION)
            grad_r += dot(g_chunk, state, DOT, PRECISION)
            grad_k += dot(v_chunk, grad_state, DOT, PRECISION)
            both = state.to(tl.float32) * grad_state.to(tl.float32)
            grad_total += dot(tl.full((C, BV), 1.0, tl.float32), both, DOT, PRECISION)

        r_chunk = tl.load(r + (first * H + head) * K + keys, mask=in_keys, other=0.0).to(tl.float32)
        k_chunk = tl.load(k + (first * H + head) * K + keys, mask=in_keys, other=0.0).to(tl.float32)
        w = _load_decay(log_w, first, head, keys, in_keys, ks, H, K, STATIC)
        past, future = _mask(masks, PAST, rows, columns, C), _mask(masks, FUTURE, rows, columns, C)
        grad_r *= exp(sum_where(past, w, DOT, PRECISION))
        grad_k *= exp(sum_where(future, w, DOT, PRECISION))
        grad_w = grad_total * exp(sum_where(tl.full((C, C), 1.0, tl.float32), w, DOT, PRECISION))
        grad_w += dot(future, r_chunk * grad_r, DOT, PRECISION) + dot(past, k_chunk * grad_k, DOT, PRECISION)

        grad_now = tl.where(rows == columns, grad_scores, 0.0)
        now_k = dot(grad_now, k_chunk, DOT, PRECISION)
        grad_bonus += r_chunk * now_k
        grad_r += bonus * now_k
        grad_k += bonus * dot(grad_now, r_chunk, DOT, PRECISION)
        # The gradient of the scores is mirrored, because it goes from r to k and from k to r.
        grad_scores = tl.where(rows > columns, grad_scores, tl.trans(grad_scores))
        for level in tl.static_range(LEVELS):
            right = _reads(ts, 1 << level, False)[:, None]
            x = tl.where(right, r_chunk, k_chunk)
            if level > 0:
                mask = _mask(masks, TO_BOUNDARY + level - 1, rows, columns, C)
                factor = exp(sum_where(mask, w, DOT, PRECISION))
                x *= factor
            pairs = _pairs(ts, 1 << level, False) | _pairs(ts, 1 << level, True)
            grad_x = dot(tl.where(pairs, grad_scores, 0.0), x, DOT, PRECISION)
            if level > 0:
                mask = _mask(masks, TO_BOUNDARY + LEVELS - 1 + level - 1, rows, columns, C)
                grad_w += dot(mask, x * grad_x, DOT, PRECISION)
                grad_x *= factor
            grad_r += tl.where(right, grad_x, 0.0)
            grad_k += tl.where(right, 0.0, grad_x)

        tl.store(dr + (first * H + head) * K + keys, grad_r.to(dr.dtype.element_ty), mask=in_keys)
        tl.store(dk + (first * H + head) * K + keys, grad_k.to(dk.dtype.element_ty), mask=in_keys)
        if STATIC:
            grad_static += tl.where(there, grad_w, 0.0)
        else:
            tl.store(dw + (first * H + head) * K + keys, grad_w.to(dw.dtype.element_ty), mask=in_keys)
    offset = (segment.to(tl.int64) * H + head) * K + ks
    tl.store(du + offset, tl.sum(grad_bonus, 0), mask=ks < K)
    if STATIC:
        tl.store(dw + offset, tl.sum(grad_static, 0), mask=ks < K)


@triton.jit
def _decode_kernel(
    r,
    k,
    v,
    log_w,
    u,
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
    STATIC: tl.constexpr,
):
    """One token of one head."""
    program = tl.program_id(0).to(tl.int64)
    head = program % H
    ks, vs = tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = ks < K, vs < V
    cells, in_state = ks[:, None] * V + vs[None, :], in_k[:, None] & in_v[None, :]
    index = program // H
    if indices is not None:
        index = tl.load(indices + index)
    first = index * stride + head * (K * V)
    receptance = tl.load(r + program * K + ks, mask=in_k, other=0.0).to(tl.float32)
    key = tl.load(k + program * K + ks, mask=in_k, other=0.0).to(tl.float32)
    value = tl.load(v + program * V + vs, mask=in_v, other=0.0).to(tl.float32)
    bonus = tl.load(u + head * K + ks, mask=in_k, other=0.0).to(tl.float32)
    w = tl.load(log_w + (head if STATIC else program) * K + ks, mask=in_k, other=0.0).to(tl.float32)

    s = tl.load(state + first + cells, mask=in_state, other=0.0)
    y = tl.sum(receptance[:, None] * s, 0) + tl.sum(receptance * bonus * key, 0) * value
    s = exp(w)[:, None] * s + key[:, None] * value[None, :]
    tl.store(new_state + first + cells, s, mask=in_state)
    tl.store(out + program * V + vs, y.to(out.dtype.element_ty), mask=in_v)


# Tokens of a chunk. Longer chunks need a further level of pairs, shorter ones pass the state more often.
CHUNK = 16
# The shortest segment for which computing its entering state pays off.
MIN_SEGMENT = 512


class _Plan(Segments):
    """The division of work into programs, and their common inputs."""

    def __init__(self, r, k, v, log_w, u, cu_seqlens, masks):
        batch, length, heads, key_size = k.shape
        value_size = v.shape[-1]
        gradient_chunk = masks.shape[-1]
        block_k, block_v = (block_size(x) for x in (key_size, value_size))
        block_v = min(block_v, 64)
        self.tiles = cdiv(value_size, block_v)
        self.heads, self.key_size = heads, key_size
        self.state_shape = (heads, key_size, value_size)
        super().__init__(
            batch,
            length,
            chunk=gradient_chunk,
            programs=batch * heads * self.tiles,
            wanted=4 * multiprocessors(k),
            shortest=MIN_SEGMENT,
            cu_seqlens=cu_seqlens,
        )
        self.geometry = (self.boundaries, length, self.segment, self.per_sequence, heads)
        self.constants = {"K": key_size, **operands(common_dtype(r, k, v)), "PACKED": cu_seqlens is not None}
        self.walking = {
            "V": value_size,
            "C": CHUNK,
            "KEEP": gradient_chunk // CHUNK,
            "BK": block_k,
            "BV": block_v,
            "num_warps": 4 if block_k * block_v <= 8192 else 8,
        }

        # A warp by itself needs no barriers, and holds a chunk of 32 channels in its registers if they are bfloat16.
        self.reads, self.writes = k.new_empty(2, *k.shape, dtype=masks.dtype).unbind()
        self.scores = k.new_empty(batch, length, heads, CHUNK, dtype=masks.dtype)
        chunks = batch * length // CHUNK + self.segments + 1
        self.totals, self.factors = k.new_empty(2, chunks, heads, key_size, dtype=torch.float32).unbind()
        slots = cdiv(64 * multiprocessors(k), self.segments * heads)
        self.launch(
            _chunk_kernel,
            *(r, k, log_w, u, self.reads, self.writes, self.scores, self.totals, self.factors),
            programs=min(slots, cdiv(self.segment, CHUNK)),
            C=CHUNK,
            LEVELS=CHUNK.bit_length() - 1,
            BK=min(block_k, 32),
            STATIC=log_w.dim() == 2,
            num_warps=1 if masks.dtype == torch.bfloat16 else 4,
        )

    def launch(self, kernel, *arguments, programs, **constants):
        grid = (self.segments * self.heads * programs,)
        launch(kernel, grid, *arguments, *self.geometry, programs, **self.constants, **constants)

    def walk(self, y, states, *, reverse, out=None, final=None, summed=None, kept=None):
        q, x = (self.writes, self.reads) if reverse else (self.reads, self.writes)
        written = summed, out, final, kept
        self.launch(
            _state_kernel,
            *(q, x, y, self.scores, self.totals, self.factors, states, *written),
            programs=self.tiles,
            REVERSE=reverse,
            **self.walking,
        )

    def entering(self, y, initial, reverse):
        """The states that enter the segments and that leave the sequences; in reverse, their gradients."""
        if self.whole:
            return initial, None
        states = y.new_empty(self.segments, *self.state_shape, dtype=torch.float32)
        totals = y.new_empty(self.segments, self.heads, self.key_size, dtype=torch.float32)
        final = y.new_empty(self.sequences, *self.state_shape, dtype=torch.float32)
        self.walk(y, None, reverse=reverse, final=states, summed=totals)
        launch(*passing(self, states, totals, initial, final, reverse))
        return states, final

    def outputs(self, y, initial, out, reverse, kept=None):
        """Writes the outputs. Returns the states that leave the sequences; in reverse, the gradients of `initial`."""
        states, final = self.entering(y, initial, reverse)
        leaving = None
        if final is None:
            leaving = final = y.new_empty(self.sequences, *self.state_shape, dtype=torch.float32)
        self.walk(y, states, reverse=reverse, out=out, final=leaving, kept=kept)
        return final


def wkv_triton(r, k, v, log_w, u, initial_state, cu_seqlens, masks, out_dtype):
    """Computes [`subquad_kernels.wkv`]."""
    r, k, v, log_w, u = contiguous(r, k, v, log_w, u)
    if initial_state is not None:
        initial_state = initial_state.float().contiguous()
    out = torch.empty_like(v, dtype=out_dtype)
    plan = _Plan(r, k, v, log_w, u, cu_seqlens, masks)
    return out, plan.outputs(v, initial_state, out, reverse=False)


def wkv_triton_backward(grad_out, grad_state, r, k, v, log_w, u, initial_state, cu_seqlens, masks, out_dtype):
    """
    Gradients of r, k, v, log_w, u and, if it is given, initial_state. The states that enter the chunks are recomputed,
    and kept in the dtype of the products during the pass.
    """
    grad_out, r, k, v, log_w, u = contiguous(grad_out, r, k, v, log_w, u)
    grad_state = grad_state.float().contiguous()
    if initial_state is not None:
        initial_state = initial_state.float().contiguous()
    plan = _Plan(r, k, v, log_w, u, cu_seqlens, masks)
    kept = k.new_empty(2, plan.chunks, *plan.state_shape, dtype=masks.dtype)
    plan.walk(v, plan.entering(v, initial_state, reverse=False)[0], reverse=False, kept=kept[0])
    dv = torch.empty_like(v)
    grad_initial = plan.outputs(grad_out, grad_state, dv, reverse=True, kept=kept[1])

    dr, dk = torch.empty_like(r), torch.empty_like(k)
    du = u.new_empty(plan.segments, *u.shape, dtype=torch.float32)
    dw = torch.empty_like(du if log_w.dim() == 2 else log_w)
    key_block = min(plan.walking["BK"], 64)
    plan.launch(
        _gradient_kernel,
        *(grad_out, r, k, v, log_w, u, *kept, dr, dk, dw, du, masks),
        programs=cdiv(plan.key_size, key_block),
        V=v.shape[-1],
        C=masks.shape[-1],
        LEVELS=masks.shape[-1].bit_length() - 1,
        BK=key_block,
        BV=plan.walking["BV"],
        STATIC=log_w.dim() == 2,
        # Two programs, as many as the registers of a multiprocessor hold, can read a chunk ahead.
        STAGES=2 if shared_memory(k) >= 2 * 72 * 1024 else 1,
    )
    grads = [dr, dk, dv, dw.sum(0) if log_w.dim() == 2 else dw, du.sum(0)]
    return grads if initial_state is None else [*grads, grad_initial]


def wkv_triton_step(r, k, v, log_w, u, state, new_state, indices, out_dtype):
    """
    One token: r, k (B, 1, H, K), v (B, 1, H, V), log_w (B, 1, H, K) or (H, K), u (H, K), state (B, H, K, V) in
    float32; if it is None, `new_state` holds it, at `indices` (B) if there are any. Writes the state after the token
    to `new_state`. Returns out (B, 1, H, V).
    """
    r, k, v, log_w, u, indices = contiguous(r, k, v, log_w, u, indices)
    batch, _, heads, key_size = k.shape
    out = torch.empty_like(v, dtype=out_dtype)
    state = new_state if state is None else state
    launch(
        _decode_kernel,
        (batch * heads,),
        *(r, k, v, log_w, u, state, new_state, indices, out, heads, new_state.stride(0)),
        K=key_size,
        V=v.shape[-1],
        BK=next_power_of_2(key_size),
        BV=next_power_of_2(v.shape[-1]),
        STATIC=log_w.dim() == 2,
    )
    return out

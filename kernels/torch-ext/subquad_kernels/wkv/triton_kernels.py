"""
WKV as Triton kernels.

A program computes one head of one segment of a sequence, chunk by chunk, with the state on chip. If there are enough
heads, a segment is a whole sequence. Otherwise a sequence is cut into several segments, and two light kernels compute
the state that enters each: `_segment_kernel` what a segment adds to a state and how it decays one, `_pass_kernel`
(segments.py) the states, from segment to segment.

Inside a chunk the token pairs are covered by halving, see chunks.py. At the level of blocks of b tokens, X is r for
the tokens of right blocks and k for those of left blocks, decayed to the boundary between the two blocks of a pair. So
X Xᵀ contains the scores of all pairs of the level. Pairs within 16 tokens are products of 16 tokens, a batch of them
per chunk; the others are products of whole chunks. A product with a matrix of zeros and ones sums log decays from the
boundary. So no exponent is positive or a difference, and the backward pass, the transpose of that product, has no
cancellation either.
"""

import torch
import triton
import triton.language as tl

from ..backend import contiguous, launch, multiprocessors
from ..segments import Segments, decayed, dot, exp, operands, program, tokens
from .masks import operand_dtype


@triton.jit
def _transpose(x):
    return tl.permute(x, (0, 2, 1)) if len(x.shape) == 3 else tl.trans(x)


@triton.jit
def _sum_where(mask, x, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """mask @ x. The mask is exact in any dtype; an x that is not is split into two parts."""
    if DOT == tl.bfloat16 and x.dtype != tl.bfloat16:
        x = x.to(tl.float32)
        head = x.to(tl.bfloat16).to(tl.float32)
        return dot(mask, head, DOT, PRECISION) + dot(mask, x - head, DOT, PRECISION)
    if DOT == tl.float32 and x.dtype == tl.float32 and PRECISION != "ieee":
        head = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)  # the bits that tf32 keeps
        return dot(mask, head, DOT, "tf32") + dot(mask, x - head, DOT, "tf32")
    return dot(mask, x, DOT, PRECISION)


# Index of each mask of masks.py.
PAST: tl.constexpr = tl.constexpr(0)
FUTURE: tl.constexpr = tl.constexpr(1)
TO_BOUNDARY: tl.constexpr = tl.constexpr(2)


@triton.jit
def _mask(masks, index, rows, columns, C: tl.constexpr):
    return tl.load(masks + index * (C * C) + rows * C + columns)


@triton.jit
def _reads(ts, block: tl.constexpr, REVERSE: tl.constexpr):
    """The tokens that read at a level: those of right blocks, in reverse those of left ones. The others are read."""
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


@triton.jit
def _segment_kernel(
    x,
    y,
    log_w,
    states,
    totals,
    chunk_states,
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
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    REVERSE: tl.constexpr,
    STATIC: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
    STORE: tl.constexpr,
):
    """
    With STORE, writes the state that enters each chunk, from the one in `states` that enters the segment. Otherwise
    writes to `states` what the segment adds to a state, and to `totals` its summed log decay. With REVERSE it goes
    from the last token to the first, as the gradient of the state does, and x is r instead of k.
    """
    tile, head, segment = program(H, TILES)
    begin, stop = tokens(boundaries, segment, T, SEGMENT, SEGMENTS, PACKED)
    ts, ks, vs = tl.arange(0, C), tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    keys, values = ts[:, None] * (H * K) + ks[None, :], ts[:, None] * (H * V) + vs[None, :]
    cells, in_state = ks[:, None] * V + vs[None, :], (ks < K)[:, None] & (vs < V)[None, :]
    here = (segment.to(tl.int64) * H + head) * (K * V)

    state = tl.zeros((BK, BV), tl.float32)
    if HAS_STATE:
        state = tl.load(states + here + cells, mask=in_state, other=0.0)
    total = tl.zeros((BK,), tl.float32)
    chunks = tl.cdiv(stop - begin, C).to(tl.int32)
    for n in range(chunks):
        chunk = n
        if REVERSE:
            chunk = chunks - 1 - n
        if STORE:
            offset = ((begin // C + segment + chunk) * H + head) * (K * V)
            tl.store(chunk_states + offset + cells, state.to(chunk_states.dtype.element_ty), mask=in_state)
        first = begin + chunk * C
        there = (ts < stop - first)[:, None]
        x_chunk = tl.load(x + (first * H + head) * K + keys, mask=there & (ks < K)[None, :], other=0.0)
        y_chunk = tl.load(y + (first * H + head) * V + values, mask=there & (vs < V)[None, :], other=0.0)
        w = _load_decay(log_w, first, head, keys, there & (ks < K)[None, :], ks, H, K, STATIC)
        mask = _mask(masks, PAST if REVERSE else FUTURE, ts[:, None], ts[None, :], C)
        decay = _sum_where(mask, w, DOT, PRECISION)
        chunk_total = tl.sum(w.to(tl.float32), 0)
        total += chunk_total
        x_chunk = x_chunk.to(tl.float32) * exp(decay)
        state = decayed(state, chunk_total) + dot(tl.trans(x_chunk), y_chunk, DOT, PRECISION)
    if not STORE:
        tl.store(states + here + cells, state, mask=in_state)
        tl.store(totals + (segment.to(tl.int64) * H + head) * K + ks, total, mask=ks < K)


@triton.jit
def _output_kernel(
    r,
    k,
    v,
    log_w,
    u,
    states,
    out,
    final,
    chunk_states,
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
    REVERSE: tl.constexpr,
    STATIC: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
    STORE: tl.constexpr,
):
    """
    The outputs of a segment, from the state that enters it; with STORE also the state that leaves it. With REVERSE the
    gradient of v. That is the same recurrence from the last token to the first, with k as r, r as k, the gradient of
    out as v and the gradient of the state as state; the states that enter the chunks go to `chunk_states`.
    """
    tile, head, segment = program(H, TILES)
    begin, stop = tokens(boundaries, segment, T, SEGMENT, SEGMENTS, PACKED)
    t16, ts, ks, vs = tl.arange(0, 16), tl.arange(0, C), tl.arange(0, BK), tile * BV + tl.arange(0, BV)
    near = (tl.arange(0, C // 16) * 16)[:, None, None] + t16[None, :, None]
    keys = near * (H * K) + ks[None, None, :]
    values = near * (H * V) + vs[None, None, :]
    cells, in_state = ks[:, None] * V + vs[None, :], (ks < K)[:, None] & (vs < V)[None, :]
    here = (segment.to(tl.int64) * H + head) * (K * V)
    near_columns = (tl.arange(0, C // 16) * 16)[:, None, None] + t16[None, None, :]
    bonus = tl.load(u + head * K + ks, mask=ks < K, other=0.0).to(tl.float32)

    state = tl.zeros((BK, BV), tl.float32)
    if HAS_STATE:
        state = tl.load(states + here + cells, mask=in_state, other=0.0)
    chunks = tl.cdiv(stop - begin, C).to(tl.int32)
    for n in range(chunks):
        chunk = n
        if REVERSE:
            chunk = chunks - 1 - n
            offset = ((begin // C + segment + chunk) * H + head) * (K * V)
            tl.store(chunk_states + offset + cells, state.to(chunk_states.dtype.element_ty), mask=in_state)
        first = begin + chunk * C
        there = near < stop - first
        in_keys, in_values = there & (ks < K)[None, None, :], there & (vs < V)[None, None, :]
        r_near = tl.load(r + (first * H + head) * K + keys, mask=in_keys, other=0.0).to(tl.float32)
        k_near = tl.load(k + (first * H + head) * K + keys, mask=in_keys, other=0.0).to(tl.float32)
        v_near = tl.load(v + (first * H + head) * V + values, mask=in_values, other=0.0)
        w_near = _load_decay(log_w, first, head, keys, in_keys, ks, H, K, STATIC)

        now = (t16[:, None] == t16[None, :])[None]
        scores = tl.where(now, dot(r_near * bonus[None, None, :], _transpose(k_near), DOT, PRECISION), 0.0)
        for level in tl.static_range(4):
            x = tl.where(_reads(t16, 1 << level, REVERSE)[None, :, None], r_near, k_near)
            if level > 0:
                mask = _mask(masks, TO_BOUNDARY + level - 1, near, near_columns, C)
                x *= exp(_sum_where(mask, w_near, DOT, PRECISION))
            pairs = _pairs(t16, 1 << level, REVERSE)[None]
            scores = tl.where(pairs, dot(x, _transpose(x), DOT, PRECISION), scores)
        y = tl.reshape(dot(scores, v_near, DOT, PRECISION), (C, BV))

        r_chunk, k_chunk = tl.reshape(r_near, (C, BK)), tl.reshape(k_near, (C, BK))
        v_chunk, w = tl.reshape(v_near, (C, BV)), tl.reshape(w_near, (C, BK))
        if LEVELS > 4:
            scores = tl.zeros((C, C), tl.float32)
            for level in tl.static_range(4, LEVELS):
                x = tl.where(_reads(ts, 1 << level, REVERSE)[:, None], r_chunk, k_chunk)
                mask = _mask(masks, TO_BOUNDARY + level - 1, ts[:, None], ts[None, :], C)
                x *= exp(_sum_where(mask, w, DOT, PRECISION))
                scores = tl.where(_pairs(ts, 1 << level, REVERSE), dot(x, _transpose(x), DOT, PRECISION), scores)
            y += dot(scores, v_chunk, DOT, PRECISION)
        mask = _mask(masks, FUTURE if REVERSE else PAST, ts[:, None], ts[None, :], C)
        r_chunk *= exp(_sum_where(mask, w, DOT, PRECISION))
        y += dot(r_chunk, state, DOT, PRECISION)
        y = tl.reshape(y, (C // 16, 16, BV)).to(out.dtype.element_ty)
        tl.store(out + (first * H + head) * V + values, y, mask=in_values)

        mask = _mask(masks, PAST if REVERSE else FUTURE, ts[:, None], ts[None, :], C)
        k_chunk *= exp(_sum_where(mask, w, DOT, PRECISION))
        state = decayed(state, tl.sum(w.to(tl.float32), 0)) + dot(_transpose(k_chunk), v_chunk, DOT, PRECISION)
    if STORE:
        tl.store(final + here + cells, state, mask=in_state)


@triton.jit
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
):
    """
    The gradients of r, k, log_w and u for one tile of the key channels of a segment, from the states that enter the
    chunks and the gradients of those that leave them.
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
    for chunk in range(tl.cdiv(stop - begin, C).to(tl.int32)):
        first = begin + chunk * C
        there = (ts < stop - first)[:, None]
        in_keys = there & (ks < K)[None, :]
        offset = ((begin // C + segment + chunk) * H + head) * (K * V)

        # Sums over the value channels: the gradient of the scores, and what r and k get from the state.
        grad_scores = tl.zeros((C, C), tl.float32)
        grad_r = tl.zeros((C, BK), tl.float32)
        grad_k = tl.zeros((C, BK), tl.float32)
        grad_total = tl.zeros((C, BK), tl.float32)
        for start in tl.static_range(0, V, BV):
            in_values, in_v = there & (start + vs < V)[None, :], (ks < K)[None, :] & (start + vs < V)[:, None]
            v_chunk = tl.load(v + (first * H + head) * V + start + values, mask=in_values, other=0.0)
            g_chunk = tl.load(g + (first * H + head) * V + start + values, mask=in_values, other=0.0)
            cells = offset + ks[None, :] * V + start + vs[:, None]
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
        grad_r *= exp(_sum_where(past, w, DOT, PRECISION))
        grad_k *= exp(_sum_where(future, w, DOT, PRECISION))
        grad_w = grad_total * exp(_sum_where(tl.full((C, C), 1.0, tl.float32), w, DOT, PRECISION))
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
                factor = exp(_sum_where(mask, w, DOT, PRECISION))
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
    gate,
    weight,
    bias,
    out,
    eps,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STATIC: tl.constexpr,
    GATED: tl.constexpr,
):
    """One token of one head; with GATED followed by the LayerNorm of the head and the gate."""
    program = tl.program_id(0).to(tl.int64)
    head = program % H
    ks, vs = tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = ks < K, vs < V
    cells, in_state = ks[:, None] * V + vs[None, :], in_k[:, None] & in_v[None, :]
    receptance = tl.load(r + program * K + ks, mask=in_k, other=0.0).to(tl.float32)
    key = tl.load(k + program * K + ks, mask=in_k, other=0.0).to(tl.float32)
    value = tl.load(v + program * V + vs, mask=in_v, other=0.0).to(tl.float32)
    bonus = tl.load(u + head * K + ks, mask=in_k, other=0.0).to(tl.float32)
    w = tl.load(log_w + (head if STATIC else program) * K + ks, mask=in_k, other=0.0).to(tl.float32)

    s = tl.load(state + program * (K * V) + cells, mask=in_state, other=0.0)
    y = tl.sum(receptance[:, None] * s, 0) + tl.sum(receptance * bonus * key, 0) * value
    s = exp(w)[:, None] * s + key[:, None] * value[None, :]
    tl.store(new_state + program * (K * V) + cells, s, mask=in_state)
    if GATED:
        y -= tl.sum(y, 0) / V
        y = tl.where(in_v, y, 0.0)
        y *= tl.rsqrt(tl.sum(y * y, 0) / V + eps)
        y = y * tl.load(weight + head * V + vs, mask=in_v, other=0.0).to(tl.float32)
        y += tl.load(bias + head * V + vs, mask=in_v, other=0.0).to(tl.float32)
        z = tl.load(gate + program * V + vs, mask=in_v, other=0.0).to(tl.float32)
        y *= z * tl.sigmoid(z)
    tl.store(out + program * V + vs, y.to(out.dtype.element_ty), mask=in_v)


# The shortest segment that is worth the passes that compute the state that enters it.
MIN_SEGMENT = 512


class _Plan(Segments):
    """How the work is divided into programs."""

    def __init__(self, r, k, v, log_w, cu_seqlens, masks):
        batch, length, heads, key_size = k.shape
        value_size = v.shape[-1]
        self.chunk = masks.shape[-1]
        block_k, block_v = (max(16, triton.next_power_of_2(x)) for x in (key_size, value_size))
        block_v = min(block_v, 64)
        self.tiles, self.key_block = triton.cdiv(value_size, block_v), min(block_k, 64)
        self.heads, self.key_size, self.value_size = heads, key_size, value_size
        self.state_shape = (heads, key_size, value_size)
        self.constants = {
            "K": key_size,
            "V": value_size,
            "C": self.chunk,
            "BK": block_k,
            "BV": block_v,
            **operands(operand_dtype(r, k, v)),
            "STATIC": log_w.dim() == 2,
            "PACKED": cu_seqlens is not None,
            "num_warps": 4 if block_k * block_v <= 4096 else 8,
        }

        # Two programs fit on a multiprocessor.
        programs, wanted = batch * heads * self.tiles, 4 * multiprocessors(k)
        super().__init__(
            batch,
            length,
            chunk=self.chunk,
            programs=programs,
            wanted=wanted,
            shortest=MIN_SEGMENT,
            cu_seqlens=cu_seqlens,
        )
        self.geometry = (masks, self.boundaries, length, self.segment, self.per_sequence, heads)

    def launch(self, kernel, *arguments, tiles, **constants):
        grid = (self.segments * self.heads * tiles,)
        launch(kernel, grid, *arguments, *self.geometry, tiles, **{**self.constants, **constants})

    def entering(self, x, y, log_w, initial, reverse):
        """The states that enter the segments, and those that leave the sequences; in reverse, their gradients."""
        if self.whole:
            return initial, None
        states = x.new_empty(self.segments, *self.state_shape, dtype=torch.float32)
        totals = x.new_empty(self.segments, self.heads, self.key_size, dtype=torch.float32)
        final = x.new_empty(self.sequences, *self.state_shape, dtype=torch.float32)
        flags = {"REVERSE": reverse, "HAS_STATE": False, "STORE": False}
        self.launch(_segment_kernel, x, y, log_w, states, totals, None, tiles=self.tiles, **flags)
        launch(*self.passing(states, totals, initial, final, reverse))
        return states, final

    def output(self, r, k, v, log_w, u, states, out, final, chunk_states):
        self.launch(
            _output_kernel,
            *(r, k, v, log_w, u, states, out, final, chunk_states),
            tiles=self.tiles,
            LEVELS=self.chunk.bit_length() - 1,
            REVERSE=chunk_states is not None,
            HAS_STATE=states is not None,
            STORE=self.whole,
        )


def wkv_triton(r, k, v, log_w, u, initial_state, cu_seqlens, masks, out_dtype):
    """Computes [`subquad_kernels.wkv`]."""
    r, k, v, log_w, u = contiguous(r, k, v, log_w, u)
    if initial_state is not None:
        initial_state = initial_state.float().contiguous()
    plan = _Plan(r, k, v, log_w, cu_seqlens, masks)
    states, final = plan.entering(k, v, log_w, initial_state, reverse=False)
    if final is None:
        final = k.new_empty(plan.sequences, *plan.state_shape, dtype=torch.float32)
    out = torch.empty_like(v, dtype=out_dtype)
    plan.output(r, k, v, log_w, u, states, out, final, None)
    return out, final


def wkv_triton_backward(grad_out, grad_state, r, k, v, log_w, u, initial_state, cu_seqlens, masks, out_dtype):
    """
    Gradients of r, k, v, log_w, u and, if it is given, initial_state. The states that enter the chunks are computed
    again, and kept in the dtype of the products during the pass.
    """
    grad_out, r, k, v, log_w, u = contiguous(grad_out, r, k, v, log_w, u)
    grad_state = grad_state.float().contiguous()
    if initial_state is not None:
        initial_state = initial_state.float().contiguous()
    plan = _Plan(r, k, v, log_w, cu_seqlens, masks)
    chunk_states = k.new_empty(2, plan.chunks, *plan.state_shape, dtype=masks.dtype)

    states, _ = plan.entering(k, v, log_w, initial_state, reverse=False)
    flags = {"REVERSE": False, "HAS_STATE": states is not None, "STORE": True}
    plan.launch(_segment_kernel, k, v, log_w, states, None, chunk_states[0], tiles=plan.tiles, **flags)

    grad_states, grad_initial = plan.entering(r, grad_out, log_w, grad_state, reverse=True)
    if grad_initial is None:
        grad_initial = torch.empty_like(grad_state)
    dv = torch.empty_like(v)
    plan.output(k, r, grad_out, log_w, u, grad_states, dv, grad_initial, chunk_states[1])

    dr, dk = torch.empty_like(r), torch.empty_like(k)
    du = u.new_empty(plan.segments, *u.shape, dtype=torch.float32)
    dw = torch.empty_like(du if log_w.dim() == 2 else log_w)
    plan.launch(
        _gradient_kernel,
        *(grad_out, r, k, v, log_w, u, *chunk_states, dr, dk, dw, du),
        tiles=triton.cdiv(plan.key_size, plan.key_block),
        LEVELS=plan.chunk.bit_length() - 1,
        BK=plan.key_block,
        num_warps=4,
    )
    grads = [dr, dk, dv, dw.sum(0) if log_w.dim() == 2 else dw, du.sum(0)]
    return grads if initial_state is None else [*grads, grad_initial]


def wkv_triton_step(r, k, v, log_w, u, state, new_state, gate, weight, bias, eps, out_dtype):
    """
    One token: r, k (B, H, K), v (B, H, V), log_w (B, H, K) or (H, K), u (H, K), state (B, H, K, V) in float32; if it
    is None, `new_state` holds it. Writes the state after the token to `new_state`. Returns out (B, H, V), after the
    norm and the gate if there are `gate` (B, 1, H * V), `weight` and `bias` (H * V).
    """
    r, k, v, log_w, u, gate, weight, bias = contiguous(r, k, v, log_w, u, gate, weight, bias)
    batch, heads, key_size = k.shape
    out = torch.empty_like(v, dtype=out_dtype)
    state = new_state if state is None else state
    launch(
        _decode_kernel,
        (batch * heads,),
        *(r, k, v, log_w, u, state, new_state, gate, weight, bias, out, eps, heads),
        K=key_size,
        V=v.shape[-1],
        BK=triton.next_power_of_2(key_size),
        BV=triton.next_power_of_2(v.shape[-1]),
        STATIC=log_w.dim() == 2,
        GATED=gate is not None,
    )
    return out

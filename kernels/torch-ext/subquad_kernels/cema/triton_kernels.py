"""
The complex moving average as Triton kernels.

A thread computes a channel token by token over a segment, with all its states in registers: a column of a tile
(states, channels). So nothing passes between threads, x is read and out is written once, and the states are enough
independent sums to keep a multiprocessor busy. While a thread computes AHEAD tokens, it loads the next ones. If
there are few channels, a row is cut into segments, and two light passes compute the state that enters each.

The gradient of the state is the same recurrence from the last token to the first, with gamma in place of a. It gives
the gradients of x and of the factor a of x. The gradients of gamma and q come from a forward pass that computes dh/dq
along with h. Only the states that enter the segments are written to memory.

q is rounded to float32. The effect on a state is corrected at the start of each chunk of CHUNK steps, so that a
long memory does not drift.
"""

import torch
import triton
import triton.language as tl

from ..backend import cdiv, contiguous, launch, multiprocessors, next_power_of_2
from ..segments import Segments, tokens


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _cos_sin(turns):
    """Cosine and sine of a float64 angle in whole turns; the series is used up to an eighth of a turn."""
    turns -= tl.floor(turns + 0.5)
    quarter = tl.floor(4 * turns + 0.5)
    x = (turns - quarter / 4) * 6.283185307179586
    y = x * x
    cos, sin = 1 - y * (1 / 182), 1 - y * (1 / 210)
    for i in tl.static_range(6):
        cos = 1 - y * cos * (1 / ((12 - 2 * i) * (11 - 2 * i)))
        sin = 1 - y * sin * (1 / ((13 - 2 * i) * (12 - 2 * i)))
    sin *= x
    swap = (quarter == 1) | (quarter == -1)
    first, second = tl.where(swap, sin, cos), tl.where(swap, cos, sin)
    return tl.where((quarter == 0) | (quarter == -1), first, -first), tl.where(
        (quarter == 0) | (quarter == 1), second, -second
    )


@triton.jit
def _rates(alpha, delta, theta, cells, n, mask, N: tl.constexpr):
    """a, d, sigmoid(theta) and n / N, in float64."""
    a = _sigmoid(tl.load(alpha + cells, mask=mask, other=0.0).to(tl.float32).to(tl.float64))
    d = _sigmoid(tl.load(delta + cells, mask=mask, other=0.0).to(tl.float32).to(tl.float64))
    share = _sigmoid(tl.load(theta + cells // N, mask=mask, other=0.0).to(tl.float32).to(tl.float64))
    return a, d, share, (n + 1).to(tl.float64) / N


# Rows of the output of `_coefficients_kernel`, (7, N, D); DRIFT undoes the rounding of q over a chunk.
Q: tl.constexpr = tl.constexpr(0)
A: tl.constexpr = tl.constexpr(2)
GAMMA: tl.constexpr = tl.constexpr(3)
DRIFT: tl.constexpr = tl.constexpr(5)


@triton.jit
def _coefficients_kernel(
    alpha, delta, theta, gamma, coefficients, D, N: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = here < N * D
    n, channels = here // D, here % D
    cells = channels * N + n
    a, d, share, part = _rates(alpha, delta, theta, cells, n, mask, N)
    modulus = 1 - a * d
    cos, sin = _cos_sin(part * share)
    re, im = (modulus * cos).to(tl.float32), (modulus * sin).to(tl.float32)
    lost_re, lost_im = modulus * cos - re, modulus * sin - im
    scale = CHUNK / tl.maximum(modulus * modulus, 1e-30)
    tl.store(coefficients + Q * N * D + here, re, mask=mask)
    tl.store(coefficients + (Q + 1) * N * D + here, im, mask=mask)
    tl.store(coefficients + A * N * D + here, a.to(tl.float32), mask=mask)
    gamma_re = tl.load(gamma + 2 * cells, mask=mask, other=0.0).to(tl.float32)
    gamma_im = tl.load(gamma + 2 * cells + 1, mask=mask, other=0.0).to(tl.float32)
    tl.store(coefficients + GAMMA * N * D + here, gamma_re, mask=mask)
    tl.store(coefficients + (GAMMA + 1) * N * D + here, gamma_im, mask=mask)
    drift_re = (lost_re * re + lost_im * im) * scale
    drift_im = (lost_im * re - lost_re * im) * scale
    tl.store(coefficients + DRIFT * N * D + here, drift_re.to(tl.float32), mask=mask)
    tl.store(coefficients + (DRIFT + 1) * N * D + here, drift_im.to(tl.float32), mask=mask)


@triton.jit
def _coefficients(coefficients, row, N, D, n, channels, mask):
    """One row of the coefficients of some states of the channels."""
    return tl.load(coefficients + (row * N + n) * D + channels[None, :], mask=mask, other=0.0)


@triton.jit
def _undrifted(drift_re, drift_im, share, re, im):
    """The states times 1 + drift * share, where `share` is the fraction of real tokens in the chunk."""
    new_re = re + share * (drift_re * re - drift_im * im)
    return new_re, im + share * (drift_re * im + drift_im * re)


@triton.jit
def _chunk_flags(starts, real, first, first_start, length, CHUNK: tl.constexpr):
    """The number of real tokens of a chunk, and 1 if a document begins in it, otherwise 0."""
    ts = tl.arange(0, CHUNK)
    count, begins = length, 0
    if real is not None:
        count = tl.sum(tl.load(real + first + ts, mask=ts < length, other=0).to(tl.int32), 0)
    if starts is not None:
        begins = tl.max(tl.load(starts + first_start + ts, mask=ts < length, other=0).to(tl.int32), 0)
    return count, begins


@triton.jit
def _token_flags(starts, real, t, start, count, begins, length):
    """Whether a document begins at a token, and whether it is real. Reads memory only if needed in the chunk."""
    is_start, is_real = False, True
    if starts is not None:
        is_start = tl.load(starts + start, mask=begins > 0, other=0)
    if real is not None:
        is_real = tl.load(real + t, mask=count < length, other=1)
    return is_start, is_real


@triton.jit
def _load_block(x, s, begin, stop, D, channels, mask, AHEAD: tl.constexpr, REVERSE: tl.constexpr):
    """The tokens from step s of a segment on, in the order in which they are computed."""
    loaded = ()
    for i in tl.static_range(AHEAD):
        t = stop - 1 - (s + i) if REVERSE else begin + s + i
        there = tl.where(s + i < stop - begin, mask, False)
        loaded += (tl.load(x + t * D + channels, mask=there, other=0.0),)
    return loaded


@triton.jit
def _step(
    x,
    y,
    h_re,
    h_im,
    sums,
    q_re,
    q_im,
    a,
    gamma_re,
    gamma_im,
    is_start,
    is_real,
    REVERSE: tl.constexpr,
    SUMS: tl.constexpr,
):
    """One token: the states after it, the sums, and the output."""
    result = tl.zeros_like(x)
    if is_start and not REVERSE:
        h_re, h_im = tl.zeros_like(h_re), tl.zeros_like(h_im)
    if is_real:
        if REVERSE:
            re, im = h_re + gamma_re * x[None, :], h_im + gamma_im * x[None, :]
            result = tl.sum(a * re, 0)
            if SUMS:
                sums += re * y[None, :]
            h_re, h_im = q_re * re - q_im * im, q_re * im + q_im * re
        else:
            h_re, h_im = q_re * h_re - q_im * h_im + a * x[None, :], q_re * h_im + q_im * h_re
            result = tl.sum(gamma_re * h_re, 0) - tl.sum(gamma_im * h_im, 0)
    if is_start and REVERSE:
        h_re, h_im = tl.zeros_like(h_re), tl.zeros_like(h_im)
    return h_re, h_im, sums, result


# The first ones differ from text to text. If the width were known to be a multiple of 16, loads of the coefficients
# would give a thread some states of several channels; it needs all states of one, to sum them without other threads.
@triton.jit(do_not_specialize=["T", "SEGMENT", "SEGMENTS", "D"])
def _average_kernel(
    x,
    y,
    coefficients,
    states,
    out,
    final,
    steps,
    grad_a,
    starts,
    real,
    starts_stride,
    T,
    SEGMENT,
    SEGMENTS,
    D,
    TILES,
    N: tl.constexpr,
    STATES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """
    From the states that enter a segment (None means zeros), computes each of these that is not None: `out`; `final`,
    the states that leave the segment; and `steps`, the number of decays of a state, or -1 if it is cleared. With
    REVERSE x is the gradient of out, out the gradient of x, y is x, the states are gradients of states, and the
    gradient of the factor a is written to `grad_a` (segments, N, D).
    """
    tile, segment = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    begin, stop = tokens(None, segment, T, SEGMENT, SEGMENTS, False)
    row = (segment // SEGMENTS).to(tl.int64)
    shift = row * (starts_stride - T)  # from a token to its index in `starts`
    channels = tile * BLOCK + tl.arange(0, BLOCK)
    mask = channels < D
    n = tl.arange(0, STATES)[:, None]
    there = mask[None, :] & (n < N)
    q_re = _coefficients(coefficients, Q, N, D, n, channels, there)
    q_im = _coefficients(coefficients, Q + 1, N, D, n, channels, there)
    a = _coefficients(coefficients, A, N, D, n, channels, there)
    gamma_re = _coefficients(coefficients, GAMMA, N, D, n, channels, there)
    gamma_im = _coefficients(coefficients, GAMMA + 1, N, D, n, channels, there)
    here = ((segment.to(tl.int64) * D + channels)[None, :] * N + n) * 2
    h_re, h_im = tl.zeros((STATES, BLOCK), tl.float32), tl.zeros((STATES, BLOCK), tl.float32)
    sums = tl.zeros((STATES, BLOCK), tl.float32)
    SIGN: tl.constexpr = -1.0 if REVERSE else 1.0
    if states is not None:
        h_re = tl.load(states + here, mask=there, other=0.0)
        h_im = SIGN * tl.load(states + here + 1, mask=there, other=0.0)
    SUMS: tl.constexpr = grad_a is not None

    ahead = _load_block(x, 0, begin, stop, D, channels, mask, AHEAD, REVERSE)
    ahead_y = ahead
    if SUMS:
        ahead_y = _load_block(y, 0, begin, stop, D, channels, mask, AHEAD, REVERSE)
    decays, cleared = 0, 0
    total = (stop - begin).to(tl.int32)
    for before in range(0, total, CHUNK):
        length = tl.minimum(total - before, CHUNK)
        first = stop - before - length if REVERSE else begin + before
        count, begins = _chunk_flags(starts, real, first, first + shift, length, CHUNK)
        decays += count
        cleared = tl.maximum(cleared, begins)
        drift_re = _coefficients(coefficients, DRIFT, N, D, n, channels, there)
        drift_im = _coefficients(coefficients, DRIFT + 1, N, D, n, channels, there)
        h_re, h_im = _undrifted(drift_re, drift_im, count.to(tl.float32) / CHUNK, h_re, h_im)
        even = before + length // AHEAD * AHEAD
        for s in range(before, even, AHEAD):
            now, now_y = ahead, ahead_y
            ahead = _load_block(x, s + AHEAD, begin, stop, D, channels, mask, AHEAD, REVERSE)
            if SUMS:
                ahead_y = _load_block(y, s + AHEAD, begin, stop, D, channels, mask, AHEAD, REVERSE)
            for i in tl.static_range(AHEAD):
                t = stop - 1 - (s + i) if REVERSE else begin + s + i
                is_start, is_real = _token_flags(starts, real, t, t + shift, count, begins, length)
                h_re, h_im, sums, result = _step(
                    now[i].to(tl.float32),
                    now_y[i].to(tl.float32),
                    *(h_re, h_im, sums, q_re, q_im, a, gamma_re, gamma_im, is_start, is_real, REVERSE, SUMS),
                )
                if out is not None:
                    tl.store(out + t * D + channels, result.to(out.dtype.element_ty), mask=mask)
        for s in range(even, before + length):
            t = stop - 1 - s if REVERSE else begin + s
            now_x = tl.load(x + t * D + channels, mask=mask, other=0.0).to(tl.float32)
            now_y = now_x
            if SUMS:
                now_y = tl.load(y + t * D + channels, mask=mask, other=0.0).to(tl.float32)
            is_start, is_real = _token_flags(starts, real, t, t + shift, count, begins, length)
            h_re, h_im, sums, result = _step(
                *(now_x, now_y, h_re, h_im, sums, q_re, q_im, a, gamma_re, gamma_im, is_start, is_real),
                *(REVERSE, SUMS),
            )
            if out is not None:
                tl.store(out + t * D + channels, result.to(out.dtype.element_ty), mask=mask)

    if final is not None:
        tl.store(final + here, h_re, mask=there)
        tl.store(final + here + 1, SIGN * h_im, mask=there)
    if SUMS:
        tl.store(grad_a + (segment.to(tl.int64) * N + n) * D + channels[None, :], sums, mask=there)
    if steps is not None:
        tl.store(steps + segment, tl.where(cleared > 0, -1, decays))


@triton.jit
def _carry_kernel(
    states,
    steps,
    alpha,
    delta,
    theta,
    initial,
    final,
    SEGMENTS,
    D,
    TILES,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Replaces each segment's contribution by the state that enters it, and writes the state after the last one."""
    tile, row = tl.program_id(0) % TILES, (tl.program_id(0) // TILES).to(tl.int64)
    cells = tile * BLOCK + tl.arange(0, BLOCK)
    mask = cells < N * D
    a, d, share, part = _rates(alpha, delta, theta, cells, cells % N, mask, N)
    log_modulus = tl.log(tl.maximum(1 - a * d, 1e-30))
    turns = part * share
    here = (row * N * D + cells) * 2
    re, im = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    if initial is not None:
        re, im = tl.load(initial + here, mask=mask, other=0.0), tl.load(initial + here + 1, mask=mask, other=0.0)
    for i in range(SEGMENTS):
        segment = row * SEGMENTS + (SEGMENTS - 1 - i if REVERSE else i)
        times = tl.load(steps + segment)
        power = tl.where(times < 0, 0.0, tl.exp(times * log_modulus))
        cos, sin = _cos_sin(times * turns)
        q_re, q_im = (power * cos).to(tl.float32), (power * sin).to(tl.float32) * (-1 if REVERSE else 1)
        place = states + (segment * N * D + cells) * 2
        added_re, added_im = tl.load(place, mask=mask, other=0.0), tl.load(place + 1, mask=mask, other=0.0)
        tl.store(place, re, mask=mask)
        tl.store(place + 1, im, mask=mask)
        re, im = q_re * re - q_im * im + added_re, q_re * im + q_im * re + added_im
    tl.store(final + here, re, mask=mask)
    tl.store(final + here + 1, im, mask=mask)


@triton.jit
def _gradient_step(
    x, g, h_re, h_im, p_re, p_im, sum_h_re, sum_h_im, sum_p_re, sum_p_im, q_re, q_im, a, is_start, is_real
):
    """One token: h, p = dh/dq, and the sums of each times the gradient of out."""
    if is_start:
        h_re, h_im = tl.zeros_like(h_re), tl.zeros_like(h_im)
        p_re, p_im = tl.zeros_like(p_re), tl.zeros_like(p_im)
    if is_real:
        p_re, p_im = q_re * p_re - q_im * p_im + h_re, q_re * p_im + q_im * p_re + h_im
        h_re, h_im = q_re * h_re - q_im * h_im + a * x[None, :], q_re * h_im + q_im * h_re
        sum_p_re += g[None, :] * p_re
        sum_p_im += g[None, :] * p_im
        sum_h_re += g[None, :] * h_re
        sum_h_im += g[None, :] * h_im
    return h_re, h_im, p_re, p_im, sum_h_re, sum_h_im, sum_p_re, sum_p_im


@triton.jit(do_not_specialize=["T", "SEGMENT", "SEGMENTS", "D"])
def _rate_gradient_kernel(
    g,
    x,
    coefficients,
    states,
    grad_states,
    grads,
    PLANE,
    starts,
    real,
    starts_stride,
    T,
    SEGMENT,
    SEGMENTS,
    D,
    TILES,
    N: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """
    A segment's part of the conjugated gradients of gamma and q, for PART of the N states: `grads` (4, segments, N,
    D). `states` enter the segment (None means zeros), `grad_states` are the gradients of the states that leave it.
    """
    PARTS: tl.constexpr = (N + PART - 1) // PART
    tile, part = tl.program_id(0) % TILES, tl.program_id(0) // TILES % PARTS
    segment = tl.program_id(0) // TILES // PARTS
    begin, stop = tokens(None, segment, T, SEGMENT, SEGMENTS, False)
    row = (segment // SEGMENTS).to(tl.int64)
    shift = row * (starts_stride - T)
    channels = tile * BLOCK + tl.arange(0, BLOCK)
    mask = channels < D
    n = part * PART + tl.arange(0, PART)[:, None]
    there = mask[None, :] & (n < N)
    q_re = _coefficients(coefficients, Q, N, D, n, channels, there)
    q_im = _coefficients(coefficients, Q + 1, N, D, n, channels, there)
    a = _coefficients(coefficients, A, N, D, n, channels, there)
    here = ((segment.to(tl.int64) * D + channels)[None, :] * N + n) * 2
    h_re, h_im = tl.zeros((PART, BLOCK), tl.float32), tl.zeros((PART, BLOCK), tl.float32)
    if states is not None:
        h_re = tl.load(states + here, mask=there, other=0.0)
        h_im = tl.load(states + here + 1, mask=there, other=0.0)
    p_re, p_im = tl.zeros((PART, BLOCK), tl.float32), tl.zeros((PART, BLOCK), tl.float32)  # dh/dq
    sum_h_re, sum_h_im = tl.zeros((PART, BLOCK), tl.float32), tl.zeros((PART, BLOCK), tl.float32)
    sum_p_re, sum_p_im = tl.zeros((PART, BLOCK), tl.float32), tl.zeros((PART, BLOCK), tl.float32)

    ahead_x = _load_block(x, 0, begin, stop, D, channels, mask, AHEAD, False)
    ahead_g = _load_block(g, 0, begin, stop, D, channels, mask, AHEAD, False)
    total = (stop - begin).to(tl.int32)
    for before in range(0, total, CHUNK):
        length = tl.minimum(total - before, CHUNK)
        first = begin + before
        count, begins = _chunk_flags(starts, real, first, first + shift, length, CHUNK)
        drift_re = _coefficients(coefficients, DRIFT, N, D, n, channels, there)
        drift_im = _coefficients(coefficients, DRIFT + 1, N, D, n, channels, there)
        h_re, h_im = _undrifted(drift_re, drift_im, count.to(tl.float32) / CHUNK, h_re, h_im)
        p_re, p_im = _undrifted(drift_re, drift_im, count.to(tl.float32) / CHUNK, p_re, p_im)
        even = before + length // AHEAD * AHEAD
        for s in range(before, even, AHEAD):
            now_x, now_g = ahead_x, ahead_g
            ahead_x = _load_block(x, s + AHEAD, begin, stop, D, channels, mask, AHEAD, False)
            ahead_g = _load_block(g, s + AHEAD, begin, stop, D, channels, mask, AHEAD, False)
            for i in tl.static_range(AHEAD):
                t = begin + s + i
                is_start, is_real = _token_flags(starts, real, t, t + shift, count, begins, length)
                h_re, h_im, p_re, p_im, sum_h_re, sum_h_im, sum_p_re, sum_p_im = _gradient_step(
                    now_x[i].to(tl.float32),
                    now_g[i].to(tl.float32),
                    *(h_re, h_im, p_re, p_im, sum_h_re, sum_h_im, sum_p_re, sum_p_im),
                    *(q_re, q_im, a, is_start, is_real),
                )
        for s in range(even, before + length):
            t = begin + s
            one_x = tl.load(x + t * D + channels, mask=mask, other=0.0).to(tl.float32)
            one_g = tl.load(g + t * D + channels, mask=mask, other=0.0).to(tl.float32)
            is_start, is_real = _token_flags(starts, real, t, t + shift, count, begins, length)
            h_re, h_im, p_re, p_im, sum_h_re, sum_h_im, sum_p_re, sum_p_im = _gradient_step(
                *(one_x, one_g, h_re, h_im, p_re, p_im, sum_h_re, sum_h_im, sum_p_re, sum_p_im),
                *(q_re, q_im, a, is_start, is_real),
            )

    gamma_re = _coefficients(coefficients, GAMMA, N, D, n, channels, there)
    gamma_im = _coefficients(coefficients, GAMMA + 1, N, D, n, channels, there)
    grad_re = tl.load(grad_states + here, mask=there, other=0.0)
    grad_im = -tl.load(grad_states + here + 1, mask=there, other=0.0)
    of_q_re = gamma_re * sum_p_re - gamma_im * sum_p_im + grad_re * p_re - grad_im * p_im
    of_q_im = gamma_re * sum_p_im + gamma_im * sum_p_re + grad_re * p_im + grad_im * p_re
    plane = tl.cast(PLANE, tl.int64)
    place = grads + (segment.to(tl.int64) * N + n) * D + channels[None, :]
    tl.store(place, sum_h_re, mask=there)
    tl.store(place + plane, sum_h_im, mask=there)
    tl.store(place + 2 * plane, of_q_re, mask=there)
    tl.store(place + 3 * plane, of_q_im, mask=there)


@triton.jit
def _parameter_kernel(
    sums,
    alpha,
    delta,
    theta,
    grad_alpha,
    grad_delta,
    grad_theta,
    grad_gamma,
    SEGMENTS,
    D,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradients of the parameters, from the gradients of a, gamma and q summed over the segments of `sums`."""
    channels = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    mask = (channels < D) & (n < N)
    cells = channels * N + n
    place, stride = sums + n * D + channels, tl.cast(N * D, tl.int64)
    plane = SEGMENTS * stride
    grads = ()
    for i in tl.static_range(5):
        total = tl.zeros((BLOCK, BLOCK_N), tl.float32)
        for segment in range(SEGMENTS):
            total += tl.load(place + i * plane + segment * stride, mask=mask, other=0.0)
        grads += (total,)
    a, d, share, part = _rates(alpha, delta, theta, cells, n, mask, N)
    modulus = 1 - a * d
    cos, sin = _cos_sin(part * share)
    of_modulus = grads[3] * cos - grads[4] * sin
    of_turns = -6.283185307179586 * modulus * (grads[3] * sin + grads[4] * cos)
    of_alpha = (grads[0] - d * of_modulus) * a * (1 - a)
    of_delta = -of_modulus * a * d * (1 - d)
    of_theta = tl.sum(of_turns * part * share * (1 - share), 1)
    tl.store(grad_alpha + cells, of_alpha.to(tl.float32).to(grad_alpha.dtype.element_ty), mask=mask)
    tl.store(grad_delta + cells, of_delta.to(tl.float32).to(grad_delta.dtype.element_ty), mask=mask)
    tl.store(grad_gamma + 2 * cells, grads[1].to(grad_gamma.dtype.element_ty), mask=mask)
    tl.store(grad_gamma + 2 * cells + 1, (-grads[2]).to(grad_gamma.dtype.element_ty), mask=mask)
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(grad_theta + channels, of_theta.to(tl.float32).to(grad_theta.dtype.element_ty), mask=channels < D)


@triton.jit
def _average_step_kernel(
    x,
    alpha,
    delta,
    theta,
    gamma,
    state,
    new_state,
    out,
    starts,
    real,
    starts_stride,
    B,
    D,
    TILES,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One token of a block of channels, in up to ROWS rows. q is not rounded, its product is float64."""
    tile, first = tl.program_id(0) % TILES, tl.program_id(0) // TILES * ROWS
    one = tile * BLOCK + tl.arange(0, BLOCK)
    channels, n = one[:, None], tl.arange(0, BLOCK_N)[None, :]
    mask = (channels < D) & (n < N)
    cells = channels * N + n
    a, d, share, part = _rates(alpha, delta, theta, cells, n, mask, N)
    cos, sin = _cos_sin(part * share)
    q_re, q_im = (1 - a * d) * cos, (1 - a * d) * sin
    gamma_re = tl.load(gamma + 2 * cells, mask=mask, other=0.0).to(tl.float32)
    gamma_im = tl.load(gamma + 2 * cells + 1, mask=mask, other=0.0).to(tl.float32)
    for number in range(first, tl.minimum(first + ROWS, B)):
        row = tl.cast(number, tl.int64)
        here = (row * D * N + cells) * 2
        before_re = tl.load(state + here, mask=mask, other=0.0)
        before_im = tl.load(state + here + 1, mask=mask, other=0.0)
        if starts is not None:
            is_start = tl.load(starts + row * starts_stride)
            before_re, before_im = tl.where(is_start, 0.0, before_re), tl.where(is_start, 0.0, before_im)
        now = tl.load(x + row * D + channels, mask=channels < D, other=0.0).to(tl.float32)
        re = (q_re * before_re - q_im * before_im + a * now).to(tl.float32)
        im = (q_re * before_im + q_im * before_re).to(tl.float32)
        result = tl.sum(gamma_re * re - gamma_im * im, 1)
        if real is not None:
            is_real = tl.load(real + row)
            re, im = tl.where(is_real, re, before_re), tl.where(is_real, im, before_im)
            result = tl.where(is_real, result, 0.0)
        tl.store(new_state + here, re, mask=mask)
        tl.store(new_state + here + 1, im, mask=mask)
        tl.store(out + row * D + one, result.to(out.dtype.element_ty), mask=one < D)


# The shortest segment for which computing its entering state pays off.
MIN_SEGMENT = 512


class _Plan(Segments):
    """The division of work into programs, and the coefficients of each channel."""

    def __init__(self, x, alpha, delta, theta, gamma, starts, real):
        batch, length, self.width = x.shape
        self.size = alpha.shape[1]
        # A thread computes a channel; three programs of 64 threads per multiprocessor hide the latency of a token.
        self.walking = {"BLOCK": 64, "CHUNK": 64, "num_warps": 2 if torch.version.hip is None else 1}
        self.tiles = cdiv(self.width, 64)
        programs, wanted = batch * self.tiles, 3 * multiprocessors(x)
        super().__init__(batch, length, chunk=64, programs=programs, wanted=wanted, shortest=MIN_SEGMENT)
        stride = 0 if starts is None or starts.shape[0] == 1 else length
        flags = starts, real, stride
        self.geometry = (*flags, length, self.segment, self.per_sequence, self.width, self.tiles)
        self.parameters = alpha, delta, theta
        self.coefficients = x.new_empty(7, self.size, self.width, dtype=torch.float32)
        launch(
            _coefficients_kernel,
            (cdiv(self.size * self.width, 128),),
            *(*self.parameters, gamma, self.coefficients, self.width),
            N=self.size,
            CHUNK=64,
            BLOCK=128,
        )

    def states(self, x, number):
        return x.new_empty(number, self.width, self.size, 2, dtype=torch.float32)

    def walk(self, x, y, states, out, final, steps, grad_a, reverse):
        launch(
            _average_kernel,
            (self.segments * self.tiles,),
            *(x, y, self.coefficients, states, out, final, steps, grad_a, *self.geometry),
            N=self.size,
            STATES=next_power_of_2(self.size),
            REVERSE=reverse,
            # Four tokens may take less time than a load; eight leave no registers for the sums of the gradient.
            AHEAD=8 if grad_a is None else 4,
            **self.walking,
        )

    def entering(self, x, initial, reverse):
        """The states that enter the segments and that leave the rows; in reverse, their gradients."""
        if self.whole:
            return initial, None
        states, final = self.states(x, self.segments), self.states(x, self.sequences)
        steps = x.new_empty(self.segments, dtype=torch.int32)
        self.walk(x, None, None, None, states, steps, None, reverse)
        tiles = cdiv(self.size * self.width, 128)
        launch(
            _carry_kernel,
            (self.sequences * tiles,),
            *(states, steps, *self.parameters, initial, final, self.per_sequence, self.width, tiles),
            N=self.size,
            BLOCK=128,
            REVERSE=reverse,
        )
        return states, final


def cema_triton(x, alpha, delta, theta, gamma, initial_state, starts, real):
    """Computes [`subquad_kernels.cema`]."""
    x, alpha, delta, theta, gamma, starts, real = contiguous(x, alpha, delta, theta, gamma, starts, real)
    if initial_state is not None:
        initial_state = initial_state.float().contiguous()
    plan = _Plan(x, alpha, delta, theta, gamma, starts, real)
    states, final = plan.entering(x, initial_state, reverse=False)
    out, leaving = torch.empty_like(x), plan.states(x, plan.sequences) if final is None else None
    plan.walk(x, None, states, out, leaving, None, None, reverse=False)
    return out, leaving if final is None else final


def cema_triton_backward(grad_out, grad_state, x, alpha, delta, theta, gamma, initial_state, starts, real):
    """Gradients of x, alpha, delta, theta, gamma and, if it is given, initial_state."""
    grad_out, x, alpha, delta, theta, gamma = contiguous(grad_out, x, alpha, delta, theta, gamma)
    starts, real = contiguous(starts, real)
    grad_state = grad_state.float().contiguous()
    if initial_state is not None:
        initial_state = initial_state.float().contiguous()
    plan = _Plan(x, alpha, delta, theta, gamma, starts, real)
    states, _ = plan.entering(x, initial_state, reverse=False)
    grad_states, grad_initial = plan.entering(grad_out, grad_state, reverse=True)
    leaving = plan.states(x, plan.sequences) if plan.whole else None

    sums = x.new_empty(5, plan.segments, plan.size, plan.width, dtype=torch.float32)
    grad_x = torch.empty_like(x)
    plan.walk(grad_out, x, grad_states, grad_x, leaving, None, sums[0], reverse=True)
    part = min(next_power_of_2(plan.size), 8)
    launch(
        _rate_gradient_kernel,
        (plan.segments * cdiv(plan.size, part) * plan.tiles,),
        *(grad_out, x, plan.coefficients, states, grad_states, sums[1:], sums[0].numel(), *plan.geometry),
        N=plan.size,
        PART=part,
        AHEAD=4,
        **plan.walking,
    )
    grads = [torch.empty_like(parameter) for parameter in (alpha, delta, theta, gamma)]
    launch(
        _parameter_kernel,
        (cdiv(plan.width, 16),),
        *(sums, alpha, delta, theta, *grads, plan.segments, plan.width),
        N=plan.size,
        BLOCK_N=next_power_of_2(plan.size),
        BLOCK=16,
    )
    grads = [grad_x, *grads]
    return grads if initial_state is None else [*grads, leaving if plan.whole else grad_initial]


def cema_triton_step(x, alpha, delta, theta, gamma, state, new_state, starts, real):
    """
    One token: x (B, 1, D), starts (B or 1, 1) and real (B, 1), state (B, D, N, 2) in float32; if it is None,
    `new_state` holds it. Writes the state after the token to `new_state`. Returns out (B, 1, D).
    """
    x, alpha, delta, theta, gamma, starts, real = contiguous(x, alpha, delta, theta, gamma, starts, real)
    batch, _, width = x.shape
    out = torch.empty_like(x)
    tiles, rows = cdiv(width, 16), 8
    launch(
        _average_step_kernel,
        (tiles * cdiv(batch, rows),),
        *(x, alpha, delta, theta, gamma, new_state if state is None else state, new_state, out, starts, real),
        *(0 if starts is None or len(starts) == 1 else 1, batch, width, tiles),
        N=alpha.shape[1],
        BLOCK_N=next_power_of_2(alpha.shape[1]),
        BLOCK=16,
        ROWS=rows,
    )
    return out

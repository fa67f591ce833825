"""
One token of a block of Eagle, Finch or Goose (also RWKV-7a) as Triton kernels, for a few rows.

A token of a model waits for the memory that holds its weights, and for kernels to begin. So whatever needs no sum over
all channels of the kernel before it is computed where it is read: a norm in every program that reads what it
normalises, the second halves of low ranks in the program of a head. Weights of large matrices are read once, whatever
the number of rows; sums have an order of their own, so that equal calls give equal results.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..backend import block_size, cdiv, launch, next_power_of_2
from ..segments import exp, expm1, operands


# Constants, by whether there is one row. They were the fastest of some dozens for 1 and for 32 rows, and matrices of
# 2048 x 2048 and 2048 x 7168, on an H200.
#
# Of the products of large matrices: outputs and inputs of a tile, how many tiles are read ahead, and warps; of several
# products, and of one, whose inputs are divided among programs. A multiprocessor must wait for some 30 KB at a time,
# of all of its programs.
GROUPED_TILES = {
    True: {"BN": 16, "BK": 256, "STAGES": 1, "num_warps": 4},
    False: {"BN": 32, "BK": 256, "STAGES": 3, "num_warps": 4},
}
ADDING_TILES = {
    True: {"BN": 4, "BK": 1024, "STAGES": 1, "PARTS": 1, "num_warps": 4},
    False: {"BN": 32, "BK": 128, "STAGES": 4, "PARTS": 4, "num_warps": 4},
}
# Columns of a first map of a low rank that a program computes: 32 bytes of each row, as the memory has them together.
COLUMNS = 16
# Inputs of these maps that a program of the token shift reads at a time, and warps.
SHIFT = {True: {"BK": 512, "num_warps": 8}, False: {"BK": 512, "num_warps": 4}}
# Channels that a program mixes; with the second maps of low ranks, and without.
MIXED_CHANNELS = {True: (16, 128), False: (32, 128)}
# Columns of second maps that a program computes of several rows, inputs at a time, and warps.
SECOND_MAPS = {"BC": 32, "BR": 64, "num_warps": 4}
# Hidden units that a program of DeepEmbed multiplies, and warps.
FACTORS = {"BC": 128, "num_warps": 4}
# Warps of a program that has the state of a head, with one row and with more.
HEAD_WARPS = {True: 4, False: 2}


@triton.jit
def _load(pointers, mask):
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _tanh(x):
    y = expm1(-2.0 * tl.abs(x))
    return tl.where(x < 0, y, -y) / (2.0 + y)


@triton.jit
def _activate(x, FUNCTION: tl.constexpr):
    if FUNCTION == "tanh":
        x = _tanh(x)
    elif FUNCTION == "sigmoid":
        x = tl.sigmoid(x)
    return x


@triton.jit
def _statistics(x, eps, D: tl.constexpr, BD: tl.constexpr):
    """Mean and 1 / deviation of a row."""
    channel = tl.arange(0, BD)
    values = _load(x + channel, channel < D)
    mean = tl.sum(values, 0) / D
    centred = tl.where(channel < D, values - mean, 0.0)
    return mean, tl.rsqrt(tl.sum(centred * centred, 0) / D + eps)


@triton.jit
def _kept(mask, row, size: tl.constexpr):
    """How many values of a state a row replaces: all, or none if it reads nothing."""
    if mask is None:
        return size
    else:
        return tl.where(tl.load(mask + row) != 0, size, 0)


@triton.jit
def _store_mix(
    n: tl.constexpr, m, place: tl.constexpr, x, delta, channels, mask, low, up, out,
    D: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr, OF_TOKEN: tl.constexpr,
):  # fmt: skip
    """Mix n, of weights m; its low rank is number `place` of the five."""
    if OF_TOKEN:
        m = 1.0 - m
    if RANK:
        m += _times_up(low + place * RANK, up + place * RANK * D, channels, mask, RANK, D, BR)
    tl.store(out + n * tl.num_programs(1) * D + channels, (x + delta * m).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _mixing_kernel(
    x, weight, bias, before, mask, mu0, mu1, mu2, mu3, mu4, mu5, low, up, out, eps,
    D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, MIXES: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr,
    OF_TOKEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    The norm of a row, some of its channels, and their interpolations with the token before, out (MIXES, rows, D). The
    normalised token becomes the one before of the next call, unless the row reads nothing.
    """
    _begin(OVERLAP)
    row = tl.program_id(1)
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = channels < D
    weight, bias = _load(weight + channels, inside), _load(bias + channels, inside)
    m0, m1, m2 = _load(mu0 + channels, inside), _load(mu1 + channels, inside), _load(mu2 + channels, inside)
    m3, m4, m5 = _load(mu3 + channels, inside), _load(mu4 + channels, inside), _load(mu5 + channels, inside)
    x += row * D
    before += row * D
    out += row * D
    _wait(OVERLAP)
    mean, rstd = _statistics(x, eps, D, BD)
    token = (_load(x + channels, inside) - mean) * rstd * weight + bias
    delta = _load(before + channels, inside) - token
    tl.debug_barrier()  # all have read what is written over
    kept = _kept(mask, row, D)
    tl.store(before + channels, token.to(before.dtype.element_ty), mask=channels < kept)
    if RANK:
        low += row * (5 * RANK)
    # The low-rank projections are in this order: decay, key, value, receptance, gate.
    _store_mix(0, m0, 3, token, delta, channels, inside, low, up, out, D, RANK, BR, OF_TOKEN)
    if MIXES > 1:
        _store_mix(1, m1, 1, token, delta, channels, inside, low, up, out, D, RANK, BR, OF_TOKEN)
    if MIXES > 2:
        _store_mix(2, m2, 2, token, delta, channels, inside, low, up, out, D, RANK, BR, OF_TOKEN)
    if MIXES > 3:
        _store_mix(3, m3, 4, token, delta, channels, inside, low, up, out, D, RANK, BR, OF_TOKEN)
    if MIXES > 4:
        _store_mix(4, m4, 0, token, delta, channels, inside, low, up, out, D, RANK, BR, OF_TOKEN)
    if MIXES > 5:
        _store_mix(5, m5, 0, token, delta, channels, inside, low, up, out, D, RANK, BR, OF_TOKEN)


@triton.jit
def _shift_kernel(
    x, weight, bias, before, mu, down, low, eps,
    D: tl.constexpr, BD: tl.constexpr, RANKS: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The first maps of Finch's token shift: some columns of tanh(mix · down), low (rows, RANKS)."""
    _begin(OVERLAP)
    _wait(OVERLAP)
    row = tl.program_id(1)
    columns = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = columns < RANKS
    x += row * D
    before += row * D
    mean, rstd = _statistics(x, eps, D, BD)
    sums = tl.zeros((BK, BC), tl.float32)
    for start in range(0, D, BK):
        ks = start + tl.arange(0, BK)
        token = (_load(x + ks, ks < D) - mean) * rstd * _load(weight + ks, ks < D) + _load(bias + ks, ks < D)
        mixed = token + (_load(before + ks, ks < D) - token) * _load(mu + ks, ks < D)
        tile = _load(down + ks[:, None] * RANKS + columns[None, :], (ks < D)[:, None] & inside[None, :])
        sums += mixed[:, None] * tile
    tl.store(low + row * RANKS + columns, _tanh(tl.sum(sums, 0)), mask=inside)


@triton.jit
def _begin(OVERLAP: tl.constexpr):
    """Lets the programs of the next kernel begin, up to where they wait."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _wait(OVERLAP: tl.constexpr):
    """Until the kernels before have ended. Only parameters and states may be read before, and nothing written."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _tile(pointers, inside, ks, step, K: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        mask = (ks < K)[None, :]
    else:
        mask = inside[:, None] & (ks < K)[None, :]
    return tl.load(pointers + ks[None, :] * step, mask=mask, other=0.0)


@triton.jit
def _products(
    x, weight, outputs, inside, rows, apart, step, K: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr, norm=None, eps=0.0, part=0, PARTS: tl.constexpr = 1,
):  # fmt: skip
    """
    x (rows, K) times some outputs of a weight, (ROWS, BN) in float32. Outputs of the weight are `apart`, and inputs
    `step`. With EVEN all outputs are inside. With a norm, its weights, x is normalised by its root mean square, which
    is found on the way. With several rows, the inputs may be those of one of PARTS alone.
    """
    pointers = weight + outputs.to(tl.int64)[:, None] * apart
    row, columns = tl.arange(0, ROWS), tl.arange(0, BK)
    if ROWS == 1:
        sums, squares = tl.zeros((BN, BK), tl.float32), tl.zeros((BK,), tl.float32)
        tile = _tile(pointers, inside, columns, step, K, EVEN)
        _wait(OVERLAP)
        for start in range(0, K, BK):
            following = tile
            if K > BK:  # is read while this one is multiplied
                following = _tile(pointers, inside, start + BK + columns, step, K, EVEN)
            ks = start + columns
            values = _load(x + ks, ks < K)
            if norm is not None:
                squares += values * values
                values *= _load(norm + ks, ks < K)
            sums += tile.to(tl.float32) * values[None, :]
            tile = following
        sums = tl.sum(sums, 1)[None, :]
        if norm is not None:
            sums *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    else:
        sums, squares = tl.zeros((ROWS, BN), tl.float32), tl.zeros((ROWS, BK), tl.float32)
        _wait(OVERLAP)
        size: tl.constexpr = (K + PARTS * BK - 1) // (PARTS * BK) * BK
        for start in tl.range(0, size, BK, num_stages=STAGES):
            ks = part * size + start + columns
            tile = _tile(pointers, inside, ks, step, K, EVEN)
            mask = (row < rows)[:, None] & (ks < K)[None, :]
            values = tl.load(x + row[:, None] * K + ks[None, :], mask=mask, other=0.0)
            if norm is not None:
                values = values.to(tl.float32)
                squares += values * values
                values *= _load(norm + ks, ks < K)[None, :]
            sums = tl.dot(values.to(DOT), tl.trans(tile.to(DOT)), sums, input_precision=PRECISION)
        if norm is not None:
            sums *= tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
    return sums


@triton.jit
def _first_map(
    program, programs, x, down, rank, function: tl.constexpr, low, rows, K: tl.constexpr, BC: tl.constexpr,
    BL: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Programs 0 to `programs` compute low (rows, rank) = function(x (rows, K) · down (K, rank))."""
    if (program >= 0) & (program < programs):
        row, columns = tl.arange(0, ROWS), program * BC + tl.arange(0, BC)
        inside = columns < rank
        y = _products(x, down, columns, inside, rows, 1, rank, K, ROWS, BC, BL, False, STAGES, DOT, PRECISION, OVERLAP)
        cells = row[:, None] * rank + columns[None, :]
        tl.store(low + cells, _activate(y, function), mask=(row < rows)[:, None] & inside[None, :])


@triton.jit
def _grouped_kernel(
    x, w0, w1, w2, w3, out, others, d0, d1, d2, d3, low, rows,
    N0: tl.constexpr, N1: tl.constexpr, K: tl.constexpr, BLOCKS0: tl.constexpr, BLOCKS1: tl.constexpr,
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr,
    B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr, B3: tl.constexpr,
    I0: tl.constexpr, I1: tl.constexpr, I2: tl.constexpr, I3: tl.constexpr,
    F0: tl.constexpr, F1: tl.constexpr, F2: tl.constexpr, F3: tl.constexpr,
    FEED: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr,
    ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    Products of several weights, each with its own input x[n] (rows, K). Weight 0 has N0 outputs, which become out, and
    the next ones N1, which become others[n - 1]. With FEED the first ones are relu², and the others sigmoids.

    The programs before them compute the first maps of low ranks, one after another in `low`: of rank R, with x[I] and
    the function F, in B programs.
    """
    _begin(OVERLAP)
    program = tl.program_id(0) - (B0 + B1 + B2 + B3)
    if program >= 0:
        part = program * 0
        block = program
        outputs_of_part = part + N0
        weight = w0
        if program >= BLOCKS0:
            part = 1 + (program - BLOCKS0) // BLOCKS1
            block = (program - BLOCKS0) % BLOCKS1
            outputs_of_part = part * 0 + N1
            weight = w1
        if part == 2:
            weight = w2
        if part == 3:
            weight = w3
        row, outputs = tl.arange(0, ROWS), block * BN + tl.arange(0, BN)
        inside = outputs < outputs_of_part
        of_part = x + part * rows * K
        y = _products(
            of_part, weight, outputs, inside, rows, K, 1, K, ROWS, BN, BK, EVEN, STAGES, DOT, PRECISION, OVERLAP
        )  # fmt: skip
        mask = (row < rows)[:, None] & inside[None, :]
        if part == 0:
            if FEED:
                y = tl.where(y < 0, 0.0, y)  # NaN stays
                y *= y
            tl.store(out + row[:, None] * N0 + outputs[None, :], y.to(out.dtype.element_ty), mask=mask)
        else:
            if FEED:
                y = tl.sigmoid(y)
            others += (part - 1) * rows * N1
            tl.store(others + row[:, None] * N1 + outputs[None, :], y, mask=mask)
    size = rows * K
    at = tl.program_id(0)
    if B0:
        _first_map(at, B0, x + I0 * size, d0, R0, F0, low, rows, K, BC, BL, ROWS, STAGES, DOT, PRECISION, OVERLAP)
    at -= B0
    low += rows * R0
    if B1:
        _first_map(at, B1, x + I1 * size, d1, R1, F1, low, rows, K, BC, BL, ROWS, STAGES, DOT, PRECISION, OVERLAP)
    at -= B1
    low += rows * R1
    if B2:
        _first_map(at, B2, x + I2 * size, d2, R2, F2, low, rows, K, BC, BL, ROWS, STAGES, DOT, PRECISION, OVERLAP)
    at -= B2
    low += rows * R2
    if B3:
        _first_map(at, B3, x + I3 * size, d3, R3, F3, low, rows, K, BC, BL, ROWS, STAGES, DOT, PRECISION, OVERLAP)


@triton.jit
def _adding_kernel(
    x, weight, gate, stream, sums, arrived, rows,
    N: tl.constexpr, SHARED: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    Adds x (rows, K) times a weight (N, K), and times a gate if there is one, to the residual stream (rows, N). The
    gate is (rows, N), or (N) if it is SHARED by the rows.

    The inputs are divided among PARTS programs. They leave their sums (PARTS, rows, N), and the one that `arrived`
    last, whichever it is, adds them in order.
    """
    _begin(OVERLAP)
    row, part = tl.arange(0, ROWS), tl.program_id(1)
    outputs = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = outputs < N
    y = _products(
        x, weight, outputs, inside, rows, K, 1, K, ROWS, BN, BK, EVEN, STAGES, DOT, PRECISION, OVERLAP,
        part=part, PARTS=PARTS,
    )  # fmt: skip
    cells = row[:, None] * N + outputs[None, :]
    mask = (row < rows)[:, None] & inside[None, :]
    last = True
    if PARTS > 1:
        tl.store(sums + part * rows * N + cells, y, mask=mask)
        tl.debug_barrier()  # all have stored
        arrived += tl.program_id(0)
        last = tl.atomic_add(arrived, 1, sem="acq_rel") == PARTS - 1
    if last:
        if PARTS > 1:
            tl.store(arrived, 0)  # for the next call
            y = tl.zeros((ROWS, BN), tl.float32)
            for n in range(PARTS):
                y += tl.load(sums + n * rows * N + cells, mask=mask, other=0.0, cache_modifier=".cg")
        if gate is not None:
            if SHARED:
                y *= _load(gate + outputs, inside)[None, :]
            else:
                y *= _load(gate + cells, mask)
        tl.store(stream + cells, (_load(stream + cells, mask) + y).to(stream.dtype.element_ty), mask=mask)


@triton.jit
def _times_up(low, up, columns, inside, R: tl.constexpr, N: tl.constexpr, BR: tl.constexpr):
    """low (R) times columns of the second map up (R, N)."""
    sums = tl.zeros((BR, columns.shape[0]), tl.float32)
    for start in range(0, R, BR):
        ranks = start + tl.arange(0, BR)
        tile = _load(up + ranks[:, None] * N + columns[None, :], (ranks < R)[:, None] & inside[None, :])
        sums += _load(low + ranks, ranks < R)[:, None] * tile
    return tl.sum(sums, 0)


@triton.jit
def _head_norm(y, weight, bias, inside, eps, S: tl.constexpr):
    centred = tl.where(inside, y - tl.sum(y, 0) / S, 0.0)
    return centred * tl.rsqrt(tl.sum(centred * centred, 0) / S + eps) * weight + bias


@triton.jit
def _wkv_kernel(
    products, low, base, up, bonus, weight, bias, state, mask, out, eps, rows,
    H: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    The recurrence of a head of Eagle or Finch, its norm and its gate; products (4, rows, H * S) are receptance, key,
    value and gate. The state changes in place, unless the row reads nothing. Without a RANK the decay is `base` alone.
    """
    _begin(OVERLAP)
    head, row = tl.program_id(0), tl.program_id(1)
    ks = tl.arange(0, BS)
    inside = ks < S
    channels = head * S + ks
    products += row * (H * S) + channels
    state += (row * H + head).to(tl.int64) * (S * S)
    w, u = _load(base + channels, inside), _load(bonus + channels, inside)
    weight, bias = _load(weight + channels, inside), _load(bias + channels, inside)
    cells, in_state = ks[:, None] * S + ks[None, :], inside[:, None] & inside[None, :]
    s = tl.load(state + cells, mask=in_state, other=0.0)
    _wait(OVERLAP)
    apart = rows * (H * S)
    r, k = _load(products, inside), _load(products + apart, inside)
    v, gate = _load(products + 2 * apart, inside), _load(products + 3 * apart, inside)
    if RANK:
        w += _times_up(low + row * RANK, up, channels, inside, RANK, H * S, BR)
    y = tl.sum(r[:, None] * s, 0) + tl.sum(r * u * k, 0) * v
    s = exp(-exp(w))[:, None] * s + k[:, None] * v[None, :]
    tl.store(state + cells, s, mask=in_state & (ks < _kept(mask, row, S))[:, None])
    y = _head_norm(y, weight, bias, inside, eps, S) * gate * tl.sigmoid(gate)
    tl.store(out + row * (H * S) + channels, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _second_map(
    low, base, up, out, rows, columns, N: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BC: tl.constexpr,
    BR: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of out (rows, N) = low (rows, R) · up (R, N), plus base (N) if there is one."""
    row, inside = tl.arange(0, ROWS), columns < N
    y = _products(low, up, columns, inside, rows, 1, N, R, ROWS, BC, BR, False, 1, DOT, PRECISION, False)
    if base is not None:
        y += _load(base + columns, inside)[None, :]
    tl.store(out + row[:, None] * N + columns[None, :], y, mask=(row < rows)[:, None] & inside[None, :])


@triton.jit
def _second_maps_kernel(
    low, decay, rate, mix, decay_up, rate_up, mix_up, gate_up, out, rows,
    N: tl.constexpr, RW: tl.constexpr, RA: tl.constexpr, RM: tl.constexpr, RG: tl.constexpr,
    ROWS: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The second maps of Goose's low ranks, out (4, rows, N), of all rows: each of them would read the maps again."""
    columns, number, apart = tl.program_id(0) * BC + tl.arange(0, BC), tl.program_id(1), rows * N
    if number == 0:
        _second_map(low, decay, decay_up, out, rows, columns, N, RW, ROWS, BC, BR, DOT, PRECISION)
    low += rows * RW
    if number == 1:
        _second_map(low, rate, rate_up, out + apart, rows, columns, N, RA, ROWS, BC, BR, DOT, PRECISION)
    low += rows * RA
    if RM:
        if number == 2:
            _second_map(low, mix, mix_up, out + 2 * apart, rows, columns, N, RM, ROWS, BC, BR, DOT, PRECISION)
        low += rows * RM
    if number == 3:
        _second_map(low, None, gate_up, out + 3 * apart, rows, columns, N, RG, ROWS, BC, BR, DOT, PRECISION)


@triton.jit
def _delta_kernel(
    products, low, maps, decay, rate, mix, decay_up, rate_up, mix_up, gate_up, k_k, k_a, bonus, weight, bias, v_first,
    state, mask, out, eps, rows,
    H: tl.constexpr, S: tl.constexpr, BS: tl.constexpr,
    RW: tl.constexpr, RA: tl.constexpr, RM: tl.constexpr, RG: tl.constexpr, BR: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    The same of Goose; products (3, rows, H * S) are receptance, key and value, and `low` holds the first maps of
    decay, rate, mix and gate, or `maps` the second ones. Without RM this is the first block, and its values become
    `v_first`.
    """
    _begin(OVERLAP)
    head, row = tl.program_id(0), tl.program_id(1)
    ks = tl.arange(0, BS)
    inside = ks < S
    channels = head * S + ks
    here = row * (H * S) + channels
    state += (row * H + head).to(tl.int64) * (S * S)
    removing, replaced, u = (
        _load(k_k + channels, inside),
        _load(k_a + channels, inside),
        _load(bonus + channels, inside),
    )
    weight, bias = _load(weight + channels, inside), _load(bias + channels, inside)
    cells, in_state = ks[:, None] * S + ks[None, :], inside[:, None] & inside[None, :]
    s = tl.load(state + cells, mask=in_state, other=0.0)
    apart = rows * (H * S)
    if maps is None:
        w, a, m = _load(decay + channels, inside), _load(rate + channels, inside), 0.0
        if RM:
            m = _load(mix + channels, inside)
        _wait(OVERLAP)
        w += _times_up(low + row * RW, decay_up, channels, inside, RW, H * S, BR)
        low += rows * RW
        a += _times_up(low + row * RA, rate_up, channels, inside, RA, H * S, BR)
        low += rows * RA
        if RM:
            m += _times_up(low + row * RM, mix_up, channels, inside, RM, H * S, BR)
            low += rows * RM
        gate = _times_up(low + row * RG, gate_up, channels, inside, RG, H * S, BR)
    else:
        w, a, m = _load(maps + here, inside), _load(maps + apart + here, inside), 0.0
        if RM:
            m = _load(maps + 2 * apart + here, inside)
        gate = _load(maps + 3 * apart + here, inside)
    r, k = _load(products + here, inside), _load(products + apart + here, inside)
    v = _load(products + 2 * apart + here, inside)
    if RM:
        v += (_load(v_first + here, inside) - v) * tl.sigmoid(m)
    else:
        tl.store(v_first + here, v, mask=inside)
    a = tl.sigmoid(a)

    kappa = k * removing
    kappa /= tl.maximum(tl.sqrt(tl.sum(kappa * kappa, 0)), 1e-12)
    k *= 1.0 + (a - 1.0) * replaced
    removed = tl.sum(s * kappa[None, :], 1)
    forgotten = exp(-0.6065306597126334 * tl.sigmoid(w))  # exp(-1/2)
    s = s * forgotten[None, :] + v[:, None] * k[None, :] - removed[:, None] * (a * kappa)[None, :]
    tl.store(state + cells, s, mask=in_state & (ks < _kept(mask, row, S))[:, None])
    y = _head_norm(tl.sum(s * r[None, :], 1), weight, bias, inside, eps, S)
    y += tl.sum(r * k * u, 0) * v
    tl.store(out + here, (y * gate).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _factor_kernel(
    low, core, base, up, units,
    N: tl.constexpr, R: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """DeepEmbed: some units (rows, N) times base (N) + low (rows, R) · core (rows, R, R) · up (R, N)."""
    _begin(OVERLAP)
    row, ranks = tl.program_id(1), tl.arange(0, BR)
    columns = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = columns < N
    tile = _load(up + ranks[:, None] * N + columns[None, :], (ranks < R)[:, None] & inside[None, :])
    factor = _load(base + columns, inside)
    _wait(OVERLAP)
    cells, in_core = ranks[:, None] * R + ranks[None, :], (ranks < R)[:, None] & (ranks < R)[None, :]
    matrix = _load(core + row * (R * R) + cells, in_core)
    inner = tl.sum(_load(low + row * R + ranks, ranks < R)[:, None] * matrix, 0)
    factor += tl.sum(inner[:, None] * tile, 0)
    units += row * N
    tl.store(units + columns, (_load(units + columns, inside) * factor).to(units.dtype.element_ty), mask=inside)


@functools.cache
def _overlaps(device: torch.device) -> bool:
    """Whether a kernel may begin while the one before it still runs, and wait for it."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


class Token:
    """
    Room for what is computed of one token of each row between the kernels of a block, used by one block after another.

    Args:
        block: the one with the most channels of products whose number differs.
        x: the residual stream, (rows, width).
        mask: bool (rows), False for a row that reads nothing; or None.
        positions: tensors about the token's position, for blocks that need it.
    """

    def __init__(self, block, x: torch.Tensor, mask: torch.Tensor | None, positions: dict):
        self.x, self.mask, self.positions, self.rows = x, mask, positions, x.shape[0]
        # Products of matrices read bfloat16; a vector is so short that it can be float32.
        self.dtype = torch.bfloat16 if self.rows > 1 and block.dtype == torch.bfloat16 else torch.float32
        self.heads = self.room(self.rows, block.inner, dtype=self.dtype)
        self.middle = self.room(self.rows, block.middle, dtype=self.dtype)
        if self.rows > 1:
            self.parts = self.room(ADDING_TILES[False]["PARTS"], self.rows, block.width)
            self.arrived = self.room(block.width, dtype=torch.int32).zero_()
        # With several rows, programs that wait take the room of those that work.
        overlap = self.rows == 1 and _overlaps(x.device)
        self.overlap = {"OVERLAP": True, "launch_pdl": True} if overlap else {"OVERLAP": False}

    def room(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.x.device)

    def tiles(self, table: dict[bool, dict], sizes: tuple[int, ...], inputs: int, dtype: torch.dtype) -> dict:
        """The constants of products with so many outputs each."""
        tiles, of_dtype = table[self.rows == 1], operands(dtype)
        block = min(tiles["BK"], block_size(inputs))
        if self.rows > 1 and dtype != torch.bfloat16:
            block = min(block, 64)  # products of float32 take more registers
        even = all(size % tiles["BN"] == 0 for size in sizes)
        rows = 1 if self.rows == 1 else block_size(self.rows)
        return {**tiles, "BK": block, "K": inputs, "ROWS": rows, "EVEN": even, **of_dtype, **self.overlap}

    def add(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        gate: torch.Tensor | None = None,
        stream: torch.Tensor | None = None,
    ) -> None:
        """Adds a product, times a gate (rows, width) or (width), to the residual stream, or to another tensor."""
        size, inputs = weight.shape
        constants = self.tiles(ADDING_TILES, (size,), inputs, weight.dtype)
        parts = constants["PARTS"] = min(constants["PARTS"], cdiv(inputs, constants["BK"]))
        grid, stream = (cdiv(size, constants["BN"]), parts), self.x if stream is None else stream
        shared, room = gate is not None and gate.dim() == 1, (self.parts, self.arrived) if parts > 1 else (None, None)
        launch(_adding_kernel, grid, x, weight, gate, stream, *room, self.rows, N=size, SHARED=shared, **constants)


class ShiftedToken(Token):
    """The same for blocks with token shifts."""

    def __init__(self, block, x: torch.Tensor, mask: torch.Tensor | None, positions: dict):
        super().__init__(block, x, mask, positions)
        rows, width, inner = self.rows, block.width, block.inner
        self.mixed = self.room(6, rows, width, dtype=self.dtype)
        self.products, self.v_first = self.room(4, rows, inner), self.room(rows, inner)
        self.gate = self.room(rows, width)
        self.low = self.room(rows * max(block.ranks, 1))
        self.maps = self.room(4, rows, inner) if rows > 1 and block.kind != "wkv" else None
        self.cores = iter(positions["cores"]) if block.rank else None

    def mix(self, p: dict, norm: str, before: torch.Tensor, names: tuple[str, ...], block, shifts: bool) -> None:
        """Normalises the stream, and interpolates it with the token before; with low ranks if the block shifts."""
        mu = [p[f"mu_{name}"] for name in names]
        down, up = (p["shift.down"], p["shift.up"]) if shifts else (None, None)
        rows, sizes = self.rows, {"D": block.width, "BD": next_power_of_2(block.width)}
        inputs = self.x, p[norm], p[f"{norm}_bias"], before
        if shifts:
            ranks = down.shape[-1]
            launch(
                _shift_kernel,
                (cdiv(ranks, COLUMNS), rows),
                *(*inputs, p["mu_x"], down, self.low, block.eps),
                **sizes,
                RANKS=ranks,
                BC=COLUMNS,
                **SHIFT[rows == 1],
                **self.overlap,
            )
        channels = MIXED_CHANNELS[rows == 1][not shifts]
        launch(
            _mixing_kernel,
            (cdiv(block.width, channels), rows),
            *(*inputs, self.mask, *mu, *mu[:1] * (6 - len(mu)), self.low, up, self.mixed, block.eps),
            **sizes,
            BC=channels,
            num_warps=1,
            MIXES=len(mu),
            RANK=down.shape[-1] // 5 if shifts else 0,
            BR=min(32, block_size(down.shape[-1] // 5)) if shifts else 16,
            OF_TOKEN=block.of_token,
            **self.overlap,
        )

    def group(
        self,
        weights: list[torch.Tensor],
        out: torch.Tensor,
        others: torch.Tensor,
        maps: Sequence[tuple[torch.Tensor, int, str | None]] = (),
        feed: bool = False,
    ) -> None:
        """Products of weights with one mix each; maps are (first map of a low rank, number of its mix, function)."""
        sizes, inputs = [w.shape[0] for w in weights], weights[0].shape[1]
        constants = self.tiles(GROUPED_TILES, tuple(sizes), inputs, weights[0].dtype)
        blocks = [cdiv(size, constants["BN"]) for size in sizes]
        downs = [down for down, _, _ in maps]
        for n in range(4):
            down, source, function = maps[n] if n < len(maps) else (None, 0, None)
            rank = 0 if down is None else down.shape[1]
            constants |= {f"R{n}": rank, f"B{n}": cdiv(rank, COLUMNS), f"I{n}": source, f"F{n}": function}
        launch(
            _grouped_kernel,
            (sum(blocks) + sum(constants[f"B{n}"] for n in range(4)),),
            *(self.mixed, *weights, *weights[:1] * (4 - len(weights)), out, others),
            *(*downs, *[None] * (4 - len(downs)), self.low, self.rows),
            N0=sizes[0],
            N1=sizes[-1],
            BLOCKS0=blocks[0],
            BLOCKS1=blocks[-1],
            FEED=feed,
            BC=COLUMNS,
            BL=min(constants["BK"], 256),
            **constants,
        )

    def scale_units(self, p: dict, block) -> None:
        """Multiplies the hidden units by the factors of DeepEmbed, whose first map is in `low`."""
        grid = cdiv(block.middle, FACTORS["BC"]), self.rows
        sizes = {"N": block.middle, "R": block.rank, "BR": next_power_of_2(block.rank), **FACTORS, **self.overlap}
        factor = p["factor.base"], p["factor.up"]
        launch(_factor_kernel, grid, self.low, next(self.cores), *factor, self.middle, **sizes)


def _run_heads(kernel, token: ShiftedToken, block, arguments: tuple, state: torch.Tensor, **constants) -> None:
    p, size = block.parameters, block.inner // block.heads
    norm = p["ln_x"], p["ln_x_bias"]
    last = state, token.mask, token.heads, block.eps_x, token.rows
    first = () if kernel is _wkv_kernel else (token.v_first,)
    launch(
        kernel,
        (block.heads, token.rows),
        *(token.products, token.low, *arguments, p["bonus"], *norm, *first, *last),
        H=block.heads,
        S=size,
        BS=next_power_of_2(size),
        num_warps=HEAD_WARPS[token.rows == 1],
        **token.overlap,
        **constants,
    )


def run_wkv_block(
    block, token: ShiftedToken, before: torch.Tensor, before_ffn: torch.Tensor, state: torch.Tensor
) -> None:
    """A block of Eagle or Finch."""
    p = block.parameters
    shifts, decays = "shift.up" in p, "decay.up" in p
    token.mix(p, "ln1", before, ("r", "k", "v", "g", *["w"] * decays), block, shifts)
    weights = [p[f"{name}.weight"] for name in ("receptance", "key", "value", "gate")]
    maps = [(p["decay.down"], 4, "tanh")] if decays else []
    token.group(weights, token.products[0], token.products[1:], maps)
    rank = p["decay.up"].shape[0] if decays else 0
    arguments = p["decay.base"], p["decay.up"] if decays else None
    _run_heads(_wkv_kernel, token, block, arguments, state, RANK=rank, BR=min(64, block_size(max(rank, 1))))
    token.add(token.heads, p["output.weight"])
    token.mix(p, "ln2", before_ffn, ("ffn_key", "ffn_receptance"), block, False)
    token.group([p["ffn_key.weight"], p["ffn_receptance.weight"]], token.middle, token.gate, feed=True)
    token.add(token.middle, p["ffn_value.weight"], token.gate)


def run_delta_block(
    block, token: ShiftedToken, before: torch.Tensor, before_ffn: torch.Tensor, state: torch.Tensor
) -> None:
    """A block of Goose, or of Goose with DeepEmbed."""
    p = block.parameters
    token.mix(p, "ln1", before, ("r", "k", "v", "w", "a", "g"), block, False)
    weights = [p[f"{name}.weight"] for name in ("receptance", "key", "value")]
    maps = {"decay": (3, "tanh"), "rate": (4, None), "mix": (2, None), "gate": (5, "sigmoid")}
    maps = {name: (p[f"{name}.down"], *how) for name, how in maps.items() if f"{name}.down" in p}
    token.group(weights, token.products[0], token.products[1:], [*maps.values()])
    bases = [p.get(f"{name}.base") for name in ("decay", "rate", "mix")]
    ups = [p.get(f"{name}.up") for name in ("decay", "rate", "mix", "gate")]
    ranks = {f"R{letter}": 0 if up is None else up.shape[0] for letter, up in zip("WAMG", ups, strict=True)}
    if token.maps is not None:
        sizes = {**SECOND_MAPS, **ranks, "N": block.inner, "ROWS": block_size(token.rows), **operands(block.dtype)}
        grid = cdiv(block.inner, SECOND_MAPS["BC"]), 4
        launch(_second_maps_kernel, grid, token.low, *bases, *ups, token.maps, token.rows, **sizes)
    arguments = token.maps, *bases, *ups, p["k_k"], p["k_a"]
    _run_heads(_delta_kernel, token, block, arguments, state, **ranks, BR=64)
    token.add(token.heads, p["output.weight"])
    factor = [(p["factor.down"], 1, None)] if block.rank else []  # of the token itself: its mix has weights of 0
    token.mix(p, "ln2", before_ffn, ("ffn_key", *["nothing"] * len(factor)), block, False)
    token.group([p["ffn_key.weight"]], token.middle, token.gate, factor, feed=True)
    if factor:
        token.scale_units(p, block)
    token.add(token.middle, p["ffn_value.weight"])

"""
One token of a block of Raven as Triton kernels, for a few rows.

As in the blocks of RWKV, a norm is computed by every program that reads what it normalises. Products are rounded as
the model rounds them, so that the router chooses the same slots.
"""

import itertools

import torch
import triton
import triton.language as tl

from ..backend import cdiv, launch, next_power_of_2
from ..segments import exp
from ..slot_memory.triton_kernels import slot_memory_triton_step
from ..slot_routing.triton_kernels import BITS, _route
from .triton_kernels import GROUPED_TILES, Token, _begin, _kept, _load, _products, _wait


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _softplus(x):
    y = exp(-tl.abs(x))
    rounded = 1.0 + y  # log1p(y) without the error of this sum
    return tl.maximum(x, 0.0) + tl.where(rounded == 1.0, y, tl.log(rounded) * (y / (rounded - 1.0)))


@triton.jit
def _rms_norm(x, weight, inside, eps, S: tl.constexpr):
    """x, which is zero outside, with weights of its norm."""
    return x * tl.rsqrt(tl.sum(x * x, 0) / S + eps) * _load(weight, inside)


@triton.jit
def _normed_kernel(
    x, norm, w0, w1, w2, w3, w4, w5, out, eps, rows,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, N4: tl.constexpr, N5: tl.constexpr,
    B1: tl.constexpr, B2: tl.constexpr, B3: tl.constexpr, B4: tl.constexpr, B5: tl.constexpr,
    GATED: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    Products of x (rows, K), normalised if there is a norm, with several weights: (rows, N) each, one after another in
    `out`. Program B is the first one of a weight. With GATED there are two weights, and `out` is SiLU(first product) *
    second.
    """
    _begin(OVERLAP)
    program = tl.program_id(0)
    block, size, weight = program, program * 0 + N0, w0
    if program >= B1:
        block, size, weight = program - B1, program * 0 + N1, w1
        out += rows * N0
    if program >= B2:
        block, size, weight = program - B2, program * 0 + N2, w2
        out += rows * N1
    if program >= B3:
        block, size, weight = program - B3, program * 0 + N3, w3
        out += rows * N2
    if program >= B4:
        block, size, weight = program - B4, program * 0 + N4, w4
        out += rows * N3
    if program >= B5:
        block, size, weight = program - B5, program * 0 + N5, w5
        out += rows * N4
    row, outputs = tl.arange(0, ROWS), block * BN + tl.arange(0, BN)
    inside = outputs < size
    y = _products(
        x, weight, outputs, inside, rows, K, 1, K, ROWS, BN, BK, EVEN, STAGES, DOT, PRECISION, OVERLAP, norm, eps
    )  # fmt: skip
    if GATED:
        gated = _products(
            x, w1, outputs, inside, rows, K, 1, K, ROWS, BN, BK, EVEN, STAGES, DOT, PRECISION, OVERLAP, norm, eps
        )  # fmt: skip
        y = _silu(y) * gated
    mask = (row < rows)[:, None] & inside[None, :]
    tl.store(out + row[:, None] * size + outputs[None, :], y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _feature_map(x, RELU: tl.constexpr):
    if RELU:
        return tl.where(x < 0, 0.0, x)  # NaN stays
    else:
        return _silu(x)


@triton.jit
def _slots_kernel(
    products, q_norm, k_norm, bias, A_log, dt_bias, mask, q, k, v, log_f, eps, rows, topk, scale, normalizer,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, GATE: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, RELU: tl.constexpr, SOFTMAX: tl.constexpr,
    ALL: tl.constexpr, BITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    Query, key, value and log_f of one of H heads, whose key, value and slots belong to one of HK heads of `products`:
    these are query, key, value, GATE channels of the output's gate, router and decay, each (rows, heads * size).
    """
    _begin(OVERLAP)
    head, row = tl.program_id(0), tl.program_id(1)
    there = row * H + head
    of_key = head // (H // HK)
    here = row * HK + of_key
    ks, vs, ms = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BM)
    _wait(OVERLAP)
    query = _feature_map(_load(products + there * K + ks, ks < K), RELU)
    tl.store(q + there * K + ks, _rms_norm(query, q_norm + ks, ks < K, eps, K), mask=ks < K)
    products += rows * (H * K)
    key = _feature_map(_load(products + here * K + ks, ks < K), RELU)
    tl.store(k + there * K + ks, _rms_norm(key, k_norm + ks, ks < K, eps, K), mask=ks < K)
    products += rows * (HK * K)
    tl.store(v + there * V + vs, _silu(_load(products + here * V + vs, vs < V)), mask=vs < V)
    products += rows * (HK * V + GATE)

    slots, in_slots = here * M + ms[None, :], (ms < M)[None, :]
    of_keys = here + tl.arange(0, 1)
    r = _route(products, bias, of_keys, slots, in_slots, HK, M, topk, scale, SOFTMAX, ALL, BITS)[1]
    products += rows * (HK * M)
    if A_log is None:
        r *= -_softplus(-_load(products + slots, in_slots)) / normalizer
    else:
        step = tl.load(products + here).to(tl.float32) + tl.load(dt_bias + of_key).to(tl.float32)
        r *= -exp(tl.load(A_log + of_key).to(tl.float32)) * _softplus(step)
    reads = _kept(mask, row, M)  # a row that reads nothing writes to no slot
    tl.store(log_f + there * M + ms[None, :], tl.where((ms < reads)[None, :], r, 0.0), mask=in_slots)


@triton.jit
def _gated_norm_kernel(
    x, gate, weight, out, eps,
    N: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The norm of S of the N channels of SiLU(x), times SiLU(gate) if there is one."""
    _begin(OVERLAP)
    channel = tl.arange(0, BS)
    inside = channel < S
    cells = tl.program_id(1) * N + tl.program_id(0) * S + channel
    _wait(OVERLAP)
    y = _rms_norm(_silu(_load(x + cells, inside)), weight + channel, inside, eps, S)
    if gate is not None:
        y *= _silu(_load(gate + cells, inside))
    tl.store(out + cells, y.to(out.dtype.element_ty), mask=inside)


class SlotToken(Token):
    """The same for blocks with slot memories."""

    def __init__(self, block, x: torch.Tensor, mask: torch.Tensor | None, positions: dict):
        super().__init__(block, x, mask, positions)
        self.products = self.room(self.rows * block.ranks, dtype=block.dtype)
        shape, value_size = (self.rows, 1, block.heads), block.inner // block.heads
        self.q, self.k = (self.room(*shape, block.key_size) for _ in range(2))
        self.v, self.log_f = self.room(*shape, value_size), self.room(*shape, block.slots)


def first_programs(sizes: list[int], constants: dict) -> list[int]:
    """The first program of each of several products with so many outputs, and the number of all programs."""
    return list(itertools.accumulate((cdiv(size, constants["BN"]) for size in sizes), initial=0))


def multiply(
    token: Token, x: torch.Tensor, norm: torch.Tensor | None, eps: float, weights: list, out: torch.Tensor,
    gated: bool = False,
) -> None:  # fmt: skip
    """Products of x, which is normalised if there is a norm."""
    sizes, inputs = [w.shape[0] for w in weights], weights[0].shape[1]
    constants = token.tiles(GROUPED_TILES, tuple(sizes), inputs, weights[0].dtype)
    firsts = first_programs(sizes[:1] if gated else sizes, constants)
    missing = 6 - len(sizes)
    constants |= {f"N{n}": size for n, size in enumerate(sizes + missing * [0])}
    constants |= {f"B{n}": firsts[min(n, len(firsts) - 1)] for n in range(1, 6)}
    arguments = x, norm, *weights, *weights[:1] * missing, out, eps, token.rows
    launch(_normed_kernel, (firsts[-1],), *arguments, GATED=gated, **constants)


def run_slot_block(block, token: SlotToken, state: torch.Tensor) -> None:
    """A block of Raven with a slot memory."""
    p, rows = block.parameters, token.rows
    weights = [p[f"{name}.weight"] for name in block.products]
    multiply(token, token.x, p["ln1"], block.eps, weights, token.products)
    key_size, value_size, gated = block.key_size, block.inner // block.heads, "gate.weight" in p
    bias, slots = p.get("r_bias"), block.slots
    launch(
        _slots_kernel,
        (block.heads, rows),
        *(token.products, p["q_norm"], p["k_norm"], bias, p.get("A_log"), p.get("dt_bias"), token.mask),
        *(token.q, token.k, token.v, token.log_f, block.eps, rows, block.topk, block.scale, block.normalizer),
        **{"H": block.heads, "HK": block.kv_heads, "K": key_size, "V": value_size, "M": slots},
        **{f"B{name}": next_power_of_2(x) for name, x in (("K", key_size), ("V", value_size), ("M", slots))},
        GATE=block.inner if gated else 0,
        RELU=block.relu,
        SOFTMAX=block.score == "softmax",
        ALL=block.topk == slots,
        BITS=BITS.get(block.dtype, 32) if bias is None else 32,
        num_warps=min(max(next_power_of_2(slots) // 512, 1), 16),
        **token.overlap,
    )
    read = slot_memory_triton_step(token.q, token.k, token.v, token.log_f, None, state, None)
    size = value_size if gated else block.inner
    before_gate = rows * sum(p[f"{name}.weight"].shape[0] for name in ("query", "key", "value"))
    launch(
        _gated_norm_kernel,
        (block.inner // size, rows),
        *(read, token.products[before_gate:] if gated else None, p["o_norm" if gated else "g_norm"]),
        *(token.heads, block.eps),
        N=block.inner,
        S=size,
        BS=next_power_of_2(size),
        **token.overlap,
    )
    token.add(token.heads, p["output.weight"])
    feed = [p["ffn_gate.weight"], p["ffn_up.weight"]]
    multiply(token, token.x, p["ln2"], block.eps, feed, token.middle, gated=True)
    token.add(token.middle, p["ffn_value.weight"])

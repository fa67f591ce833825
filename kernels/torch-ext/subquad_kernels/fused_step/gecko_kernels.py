"""
One token of a block of Gecko as Triton kernels, for a few rows: the operators' own kernels of single tokens, and what
is between them.
"""

import torch
import triton
import triton.language as tl

from ..backend import cdiv, launch, next_power_of_2
from ..cema.triton_kernels import cema_triton_step
from ..chunk_attention.triton_kernels import chunk_attention_triton_step
from ..timestep_decay_norm.triton_kernels import timestep_decay_norm_triton_step
from ..working_memory.triton_kernels import working_memory_triton_step
from .slot_kernels import _silu, first_programs, multiply
from .triton_kernels import GROUPED_TILES, Token, _begin, _kept, _load, _products, _wait


@triton.jit
def _group_norm_kernel(
    x, more, weight, bias, copy, out, eps,
    D: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, CENTERED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    The norm of groups of S of the D channels of x + more; CENTERED subtracts the mean. Weights are stored minus one.
    `copy`, if any, becomes what is normalised.
    """
    _begin(OVERLAP)
    channel = tl.arange(0, BS)
    inside = channel < S
    channel += tl.program_id(0) * S
    cells = tl.program_id(1) * D + channel
    _wait(OVERLAP)
    y = _load(x + cells, inside)
    if more is not None:
        y += _load(more + cells, inside)
    if copy is not None:
        tl.store(copy + cells, y.to(copy.dtype.element_ty), mask=inside)
    if CENTERED:
        y = tl.where(inside, y - tl.sum(y, 0) / S, 0.0)
    y *= tl.rsqrt(tl.sum(y * y, 0) / S + eps)
    if weight is not None:
        y += y * _load(weight + channel, inside)
    if bias is not None:
        y += _load(bias + channel, inside)
    tl.store(out + cells, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _projections_kernel(
    t, m, w0, w1, w2, w3, b0, b1, b2, b3, stream, out, sums, rows,
    V: tl.constexpr, Z: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr, B3: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    Products with several weights and their biases. SiLU of one of t and one of m, (rows, V) each, and one of m, (rows,
    Z), stand one after another in `out`; `sums` (rows, K) becomes the residual stream and the last one of m. Program B
    is the first one of a weight.
    """
    _begin(OVERLAP)
    program = tl.program_id(0)
    block, size, x, weight, bias = program, program * 0 + V, t, w0, b0
    if program >= B1:
        block, x, weight, bias = program - B1, m, w1, b1
        out += rows * V
    if program >= B2:
        block, size, weight, bias = program - B2, program * 0 + Z, w2, b2
        out += rows * V
    if program >= B3:
        block, size, weight, bias = program - B3, program * 0 + K, w3, b3
    row, outputs = tl.arange(0, ROWS), block * BN + tl.arange(0, BN)
    inside = outputs < size
    constant = _load(bias + outputs, inside)[None, :]
    y = constant + _products(
        x, weight, outputs, inside, rows, K, 1, K, ROWS, BN, BK, EVEN, STAGES, DOT, PRECISION, OVERLAP
    )  # fmt: skip
    cells, mask = row[:, None] * size + outputs[None, :], (row < rows)[:, None] & inside[None, :]
    if program >= B3:
        tl.store(sums + cells, _load(stream + cells, mask) + y, mask=mask)
    else:
        if program < B2:
            y = _silu(y)
        tl.store(out + cells, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _share_kernel(
    z, gamma, beta, cos, sin, out, eps, scale, rows,
    H: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, ROTATED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """
    From z (rows, H * S), a head of q, k, and the memory's q and k, out (4, rows, H * S). The first ROTATED heads of q
    and k have rotary embeddings, by pairs of neighbours.
    """
    _begin(OVERLAP)
    head, row = tl.program_id(0), tl.program_id(1)
    one = tl.arange(0, BS)
    inside, channel = one < S, head * S + one
    z += row * (H * S)
    out += row * (H * S)
    _wait(OVERLAP)
    x = _load(z + channel, inside)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / S + eps)
    for n in tl.static_range(4):
        w = n * (H * S) + channel
        y = x * rstd * ((_load(gamma + w, inside) + 1.0) * scale) + _load(beta + w, inside)
        if (n < 2) & (ROTATED > 0):
            w ^= 1  # the neighbour
            other = _load(z + (channel ^ 1), inside) * rstd * ((_load(gamma + w, inside) + 1.0) * scale)
            other += _load(beta + w, inside)
            turns, pair = one < tl.where(head < ROTATED, S, 0), row * (S // 2) + one // 2
            sine = tl.load(sin + pair, mask=turns, other=0.0)
            y = y * tl.load(cos + pair, mask=turns, other=1.0) + tl.where(one % 2 == 0, -sine, sine) * other
        tl.store(out + n * rows * (H * S) + channel, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _keep_kernel(
    v, k, k_m, position, mask, values, keys, memory_keys, ring,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, S: tl.constexpr, BS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Writes a head's rows to the rings, after the memory has absorbed what is there."""
    _begin(OVERLAP)
    head, row = tl.program_id(0), tl.program_id(1)
    vs, ks, here = tl.arange(0, BV), tl.arange(0, BS), row * H + head
    _wait(OVERLAP)
    place = here.to(tl.int64) * ring + tl.load(position + row) % ring
    reads, writes = here * S + ks, place * S + ks
    tl.store(values + place * V + vs, tl.load(v + here * V + vs, mask=vs < V), mask=vs < _kept(mask, row, V))
    tl.store(keys + writes, tl.load(k + reads, mask=ks < S), mask=ks < _kept(mask, row, S))
    tl.store(memory_keys + writes, tl.load(k_m + reads, mask=ks < S), mask=ks < _kept(mask, row, S))


@triton.jit
def _gate_kernel(attended, gate, remembered, out, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """out = attended * gate + remembered."""
    _begin(OVERLAP)
    cells = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = cells < size
    _wait(OVERLAP)
    y = _load(attended + cells, mask) * _load(gate + cells, mask) + _load(remembered + cells, mask)
    tl.store(out + cells, y.to(out.dtype.element_ty), mask=mask)


class ChunkToken(Token):
    """
    The same for blocks with a working memory.

    Args:
        positions: of the token. `position`, int64 (rows, 1); `starts`, bool (rows, 1), True if it begins a document,
            or None; `cos` and `sin` of rotary embeddings, float32, half a head's channels for each row, or None;
            `mask`, bool (rows, ring), of [`subquad_kernels.chunk_attention_step`]; and `leaving`, `begins`, `reads`
            and `chunk_size` of [`subquad_kernels.working_memory`].
    """

    def __init__(self, block, x: torch.Tensor, mask: torch.Tensor | None, positions: dict):
        super().__init__(block, x, mask, positions)
        rows = self.rows
        self.products = self.room(rows * (2 * block.inner + block.ranks), dtype=block.dtype)
        self.shared = self.room(4, rows, block.heads, 1, block.ranks // block.heads, dtype=block.dtype)
        self.m, self.sums = self.room(rows, block.width, dtype=block.dtype), self.room(rows, block.width)
        self.normed = self.room(rows, block.width, dtype=self.dtype)

    def normalize(self, block, x, more, weight, bias, copy, out, centered: bool) -> None:
        size = block.width // block.norm_groups
        launch(
            _group_norm_kernel,
            (block.norm_groups, self.rows),
            *(x, more, weight, bias, copy, out, block.eps),
            D=block.width,
            S=size,
            BS=next_power_of_2(size),
            CENTERED=centered,
            **self.overlap,
        )

    def project(self, p: dict, t: torch.Tensor) -> None:
        names = ("value", "gate", "shared", "stream")
        weights, biases = ([p[f"{name}.{part}"] for name in names] for part in ("weight", "bias"))
        sizes, inputs = [w.shape[0] for w in weights], weights[0].shape[1]
        constants = self.tiles(GROUPED_TILES, tuple(sizes), inputs, t.dtype)
        firsts = first_programs(sizes, constants)
        launch(
            _projections_kernel,
            (firsts[-1],),
            *(t, self.m, *weights, *biases, self.x, self.products, self.sums, self.rows),
            V=sizes[0],
            Z=sizes[2],
            **{f"B{n}": firsts[n] for n in (1, 2, 3)},
            **constants,
        )


def run_chunk_block(
    block, token: ChunkToken, timenorm: torch.Tensor, average: torch.Tensor, *rings_and_memory
) -> None:
    """A block of Gecko."""
    keys, values, memory_keys, memory, normalizer = rings_and_memory
    p, rows, at = block.parameters, token.rows, token.positions
    x, flags, norm = token.x.view(rows, 1, block.width), (at["starts"], token.mask), block.norm
    t = timestep_decay_norm_triton_step(x, p["ln1"], p["ln1_bias"], None, timenorm, *flags, **norm)
    rates = (p[f"cema.{name}"] for name in ("alpha", "delta", "theta", "gamma"))
    averaged = cema_triton_step(t, *rates, None, average, *flags)
    token.normalize(block, averaged, t, p.get("ln_m"), None, None, token.m, False)
    token.project(p, t)
    v, gate, z = token.products.split([rows * size for size in (block.inner, block.inner, block.ranks)])
    heads, key_size, value_size = block.state_shape
    sizes = {"H": heads, "S": key_size, "BS": next_power_of_2(key_size), **token.overlap}
    shared = z, p["gamma"], p["beta"], at["cos"], at["sin"], token.shared, block.eps, key_size**-0.5, rows
    launch(_share_kernel, (heads, rows), *shared, ROTATED=block.rotated, **sizes)
    q, k, q_m, k_m = token.shared.unbind()
    chunks = (at[name] for name in ("leaving", "begins", "reads", "chunk_size"))
    remembered = working_memory_triton_step(q_m, memory_keys, values, memory, normalizer, *chunks, None)
    rings = at["position"], token.mask, values, keys, memory_keys, keys.shape[2]
    launch(_keep_kernel, (heads, rows), v, k, k_m, *rings, V=value_size, BV=next_power_of_2(value_size), **sizes)
    attended = chunk_attention_triton_step(q, keys, values, at["mask"], None)
    outputs = attended, gate, remembered, token.heads, rows * block.inner
    launch(_gate_kernel, (cdiv(rows * block.inner, 512),), *outputs, BLOCK=512, **token.overlap)
    token.add(token.heads, p["output.weight"], stream=token.sums)
    stream = None if block.two_hop else token.x
    token.normalize(block, token.sums, None, p.get("ln2"), p.get("ln2_bias"), stream, token.normed, True)
    multiply(token, token.normed, None, 0.0, [p["ffn_gate.weight"], p["ffn_up.weight"]], token.middle, gated=True)
    token.add(token.middle, p["ffn_value.weight"], p.get("alpha"))

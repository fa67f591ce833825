"""
The contextualizer for the last row of each window as Triton kernels, used for a single token.

A single row does not benefit from tiles of products. The first kernel reads each row of a window for its norm and its
product with the last row, the second one again for the sum. The rows before z stay where they are.
"""

import triton
import triton.language as tl

from ..backend import cdiv, dense_rows, launch
from .reference import EPS


NUMBERS = ["C", "shared"]


@triton.jit
def _pointers(z, prefix, rows, C, shared, z_row, prefix_row):
    """Pointers to rows of a window, the first ones in `prefix`; rows after the last one repeat it."""
    pointers = z + tl.minimum(tl.maximum(rows - shared, 0), C - shared - 1).to(tl.int64) * z_row
    if prefix is not None:
        before = prefix + tl.minimum(rows, tl.maximum(shared - 1, 0)).to(tl.int64) * prefix_row
        pointers = tl.where(rows < shared, before, pointers)
    return pointers


@triton.jit(do_not_specialize=NUMBERS)
def _last_weights_kernel(
    z, prefix, v, weights, C, shared, H, z_window, z_row, prefix_row, v_row, v_column, EPS,
    ROWS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The weights of some rows of a window for its last row."""
    tiles = tl.cdiv(C, ROWS)
    window = (tl.program_id(0) // tiles).to(tl.int64)
    rows = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    z += window * z_window
    pointers = _pointers(z, prefix, rows, C, shared, z_row, prefix_row)
    last = z + (C - shared - 1).to(tl.int64) * z_row
    products, squares = tl.zeros((ROWS, BK), tl.float32), tl.zeros((ROWS, BK), tl.float32)
    own = tl.zeros((BK,), tl.float32)
    for start in range(0, H, BK):
        ks = start + tl.arange(0, BK)
        x = tl.load(pointers[:, None] + ks[None, :], mask=(ks < H)[None, :], other=0.0).to(tl.float32)
        y = tl.load(last + ks, mask=ks < H, other=0.0).to(tl.float32)
        products += x * y[None, :]
        squares += x * x
        own += y * y
    scales = tl.rsqrt(tl.sum(squares, 1) + EPS) * tl.rsqrt(tl.sum(own, 0) + EPS)
    here = v + (C - 1).to(tl.int64) * v_row + rows.to(tl.int64) * v_column
    scaled = tl.sum(products, 1) * scales * tl.load(here, mask=rows < C, other=0.0).to(tl.float32)
    tl.store(weights + window * C + rows, scaled.to(weights.dtype.element_ty), mask=rows < C)


@triton.jit(do_not_specialize=NUMBERS)
def _last_mix_kernel(
    z, prefix, weights, gate, out, C, shared, H, z_window, z_row, prefix_row, gate_window,
    ROWS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Some columns of gate * (weights @ rows)."""
    tiles = tl.cdiv(H, BN)
    window = (tl.program_id(0) // tiles).to(tl.int64)
    columns = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    z += window * z_window
    weights += window * C
    sums = tl.zeros((ROWS, BN), tl.float32)
    for start in range(0, C, ROWS):
        rows = start + tl.arange(0, ROWS)
        factors = tl.load(weights + rows, mask=rows < C, other=0.0).to(tl.float32)
        pointers = _pointers(z, prefix, rows, C, shared, z_row, prefix_row)[:, None] + columns[None, :]
        x = tl.load(pointers, mask=(rows < C)[:, None] & (columns < H)[None, :], other=0.0)
        sums += factors[:, None] * x.to(tl.float32)
    total = tl.sum(sums, 0)
    if gate is not None:
        total *= tl.load(gate + window * gate_window + columns, mask=columns < H, other=0.0).to(tl.float32)
    tl.store(out + window * H + columns, total.to(out.dtype.element_ty), mask=columns < H)


def contextualizer_last_row(z, v, gate, prefix):
    """Computes [`subquad_kernels.contextualizer`] for one query: (W, 1, H). Copies no arguments."""
    windows, rows, width = z.shape
    context, strides = v.shape[0], v.stride()
    z, gate, shared = dense_rows(z), dense_rows(gate), context - rows
    prefix = dense_rows(prefix.to(z.dtype)) if shared else None
    weights, out = z.new_empty(windows, context), z.new_empty(windows, 1, width)
    numbers = *(context, shared, width, *z.stride()[:2]), prefix.stride()[0] if shared else 0
    grid, mix_grid = (windows * cdiv(context, 8),), (windows * cdiv(width, 32),)
    launch(_last_weights_kernel, grid, z, prefix, v, weights, *numbers, *strides, EPS, ROWS=8, BK=512)
    gate_window = 0 if gate is None else gate.stride()[0]
    launch(_last_mix_kernel, mix_grid, z, prefix, weights, gate, out, *numbers, gate_window, ROWS=128, BN=32)
    return out

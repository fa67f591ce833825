"""
The contextualizer as Triton kernels.

Each kernel computes tiles of a product of matrices, and post-processes a tile before writing it. The weights,
tril(v) * cos, of a few windows at a time are written to memory, in the dtype of z, and read again. That is cheaper
than recomputing them for each use. Tiles above the diagonal are neither computed nor read.

With n for 1 / norm, A for the weights, g for the gradient times the gate, E for the gradients of the products of rows,

    E_ij = (g_i · x_j) v_ij n_i n_j,    t_j = sum_i A_ij (g_i · x_j) + sum_k A_jk (g_j · x_k),

the gradient of row j, which is a query and is read by later queries, is

    sum_i A_ij g_i  +  sum_i E_ij x_i  +  sum_k E_jk x_k  -  n_j² t_j x_j

A window has `lead` places before its first row, so that the first query begins a tile. A matrix in memory has one row
for each query and one column for each place. Entries without a weight are zero.
"""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ..backend import cdiv, dense_rows, launch, multiprocessors
from ..tiles import add_rows, cells_of, load_tile, norm_kernel, product_constants, row_products, rows_at
from .reference import EPS
from .step_kernels import contextualizer_last_row


BYTES = 1 << 25  # of the weights in memory at a time; twice as much in the backward pass, which needs more anyway


@triton.jit
def _weights_kernel(
    x, v, scales, weights, C, H, first, lead, queries, places, x_window, x_row,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of the weights of a window."""
    across, down = places // KEYS, queries // ROWS
    row, place = tl.program_id(0) // across % down * ROWS, tl.program_id(0) % across * KEYS
    if place - lead >= first + row + ROWS:
        return
    window = (tl.program_id(0) // (across * down)).to(tl.int64)
    x += window * x_window
    here, there = first + row + tl.arange(0, ROWS), place - lead + tl.arange(0, KEYS)
    products = row_products(
        rows_at(x, x_row, here, C - 1), rows_at(x, x_row, there, C - 1),
        H, ROWS, KEYS, BK, EVEN, STAGES, PRECISION,
    )  # fmt: skip
    scales += window * C
    products *= tl.load(scales + tl.minimum(here, C - 1))[:, None]
    products *= tl.load(scales + tl.minimum(tl.maximum(there, 0), C - 1))[None, :]
    cells = cells_of(row + tl.arange(0, ROWS), place + tl.arange(0, KEYS), places)
    products *= tl.load(v + cells).to(tl.float32)
    tl.store(weights + window * queries * places + cells, products.to(weights.dtype.element_ty))


@triton.jit
def _mix_kernel(
    x, weights, gate, out, C, Q, H, lead, queries, places, x_window, x_row, gate_window, gate_row,
    ROWS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of gate * (weights @ rows)."""
    across, down = tl.cdiv(H, BN), queries // ROWS
    row, column = tl.program_id(0) // across % down * ROWS, tl.program_id(0) % across * BN
    window = (tl.program_id(0) // (across * down)).to(tl.int64)
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, BN)
    weights += window * queries * places + rows[:, None] * places
    end = tl.minimum(C - Q + row + ROWS, C) + lead
    sums = add_rows(
        tl.zeros((ROWS, BN), tl.float32),
        *(weights, 1, x + window * x_window, x_row, 0, end, lead, C - 1, columns, H, BK, EVEN, STAGES, PRECISION),
    )
    mask = (rows < Q)[:, None] & (columns < H)[None, :]
    if gate is not None:
        pointers = gate + window * gate_window + rows.to(tl.int64)[:, None] * gate_row + columns[None, :]
        sums *= tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    pointers = out + (window * Q + rows)[:, None] * H + columns[None, :]
    tl.store(pointers, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _two_products(
    x_pointers, g_pointers, y_pointers, H, A: tl.constexpr, B: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x · y and g · y of A rows x with gradients g and B rows y."""
    sums, grads = tl.zeros((A, B), tl.float32), tl.zeros((A, B), tl.float32)
    for start in tl.range(0, H, BK, num_stages=STAGES):
        ks = start + tl.arange(0, BK)
        x = load_tile(x_pointers[:, None] + ks[None, :], (ks < H)[None, :], EVEN)
        y = load_tile(y_pointers[None, :] + ks[:, None], (ks < H)[:, None], EVEN)
        sums = tl.dot(x, y, sums, input_precision=PRECISION)
        g = load_tile(g_pointers[:, None] + ks[None, :], (ks < H)[None, :], EVEN)
        grads = tl.dot(g, y, grads, input_precision=PRECISION)
    return sums, grads


@triton.jit
def _weight_gradient_kernel(
    x, v, g, scales, weights, grads, grad_v, row_sums, column_sums,
    windows, strip, C, H, first, lead, queries, places, x_window, x_row, g_window, g_row,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """
    A tile of A and E for each window of a strip, its part of t, and the sum over the strip for the gradient of v.
    """
    across, down = places // KEYS, queries // ROWS
    row, place = tl.program_id(0) // across % down * ROWS, tl.program_id(0) % across * KEYS
    if place - lead >= first + row + ROWS:
        return
    rows, columns = row + tl.arange(0, ROWS), place + tl.arange(0, KEYS)
    here, there = first + rows, columns - lead
    number = (tl.program_id(0) // (across * down)).to(tl.int64)
    total = tl.zeros((ROWS, KEYS), tl.float32)
    for window in range(number * strip, tl.minimum((number + 1) * strip, windows)):
        products, slopes = _two_products(
            rows_at(x + window * x_window, x_row, here, C - 1),
            rows_at(g + window * g_window, g_row, rows, C - first - 1),
            rows_at(x + window * x_window, x_row, there, C - 1),
            *(H, ROWS, KEYS, BK, EVEN, STAGES, PRECISION),
        )
        row_scales = tl.load(scales + window * C + tl.minimum(here, C - 1))[:, None]
        column_scales = tl.load(scales + window * C + tl.minimum(tl.maximum(there, 0), C - 1))[None, :]
        products *= row_scales
        products *= column_scales
        total += products * slopes
        cells = cells_of(rows, columns, places)
        factors = tl.load(v + cells).to(tl.float32)
        products *= factors
        tl.store(weights + window * queries * places + cells, products.to(weights.dtype.element_ty))
        products *= slopes
        tl.store(row_sums + (window * across + place // KEYS) * queries + rows, tl.sum(products, 1))
        tl.store(column_sums + (window * down + row // ROWS) * places + columns, tl.sum(products, 0))
        slopes *= factors
        slopes *= row_scales
        # Infinity times a row of zeros would be NaN.
        slopes = tl.clamp(slopes * column_scales, -LARGEST, LARGEST)
        tl.store(grads + window * queries * places + cells, slopes.to(grads.dtype.element_ty))
    tl.store(grad_v + number * queries * places + cells_of(rows, columns, places), total)


@triton.jit
def _row_gradient_kernel(
    x, g, scales, weights, grads, row_sums, column_sums, grad_x,
    C, H, first, lead, queries, places, x_window, x_row, g_window, g_row,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of the gradient of the rows of a window."""
    across, down = tl.cdiv(H, BN), places // ROWS
    place, column = tl.program_id(0) // across % down * ROWS, tl.program_id(0) % across * BN
    window = (tl.program_id(0) // (across * down)).to(tl.int64)
    rows, columns = place - lead + tl.arange(0, ROWS), column + tl.arange(0, BN)
    x, g, scales = x + window * x_window, g + window * g_window, scales + window * C
    weights, grads = weights + window * queries * places, grads + window * queries * places
    # The first query among these rows (or 0), and the end of the places that they read (0 if none is a query).
    row = tl.maximum(place - lead - first, 0)
    end = tl.where(place - lead >= first, tl.minimum(place + ROWS, lead + C), 0)

    t = tl.zeros((ROWS,), tl.float32)
    for n in range(0, tl.cdiv(end, KEYS)):
        t += tl.load(row_sums + (window * (places // KEYS) + n) * queries + row + tl.arange(0, ROWS))
    for n in range(row // ROWS, queries // ROWS):
        t += tl.load(column_sums + (window * (queries // ROWS) + n) * places + place + tl.arange(0, ROWS))

    sums = tl.zeros((ROWS, BN), tl.float32)
    cells = place + tl.arange(0, ROWS)[:, None]
    sums = add_rows(
        sums, weights + cells, places, g, g_row, row, C - first, 0, C - first - 1, columns, H,
        BK, EVEN, STAGES, PRECISION,
    )  # fmt: skip
    sums = add_rows(
        sums, grads + cells, places, x, x_row, row, C - first, -first, C - 1, columns, H, BK, EVEN, STAGES, PRECISION
    )
    cells = (row + tl.arange(0, ROWS))[:, None] * places
    sums = add_rows(sums, grads + cells, 1, x, x_row, 0, end, lead, C - 1, columns, H, BK, EVEN, STAGES, PRECISION)

    mask = ((rows >= 0) & (rows < C))[:, None] & (columns < H)[None, :]
    own = tl.load(rows_at(x, x_row, rows, C - 1)[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scales + tl.minimum(tl.maximum(rows, 0), C - 1))
    sums -= (t * scale * scale)[:, None] * own
    pointers = grad_x + (window * C + rows)[:, None] * H + columns[None, :]
    tl.store(pointers, sums.to(grad_x.dtype.element_ty), mask=mask)


def _of(part, x):
    """Some windows of x; x itself if they are all."""
    return x if part.stop - part.start == x.shape[0] else x[part]


class _Plan:
    """The division of work, and the arguments shared by all kernels."""

    def __init__(self, z, v, prefix, queries):
        self.z = dense_rows(z)
        self.windows, self.rows, self.width = z.shape
        self.context, self.queries = v.shape[0], queries
        self.shared, self.first = self.context - self.rows, self.context - queries
        self.prefix = prefix[: self.shared].to(z.dtype) if self.shared else None
        self.constants, self.columns = product_constants(z, queries)
        tile = self.constants["ROWS"]
        self.lead = -self.first % tile
        self.matrix = tile * cdiv(queries, tile), tile * cdiv(self.lead + self.context, tile)
        self.v = v[self.first :].tril(self.first)
        if self.matrix != self.v.shape:
            after = self.matrix[1] - self.lead - self.context
            self.v = F.pad(self.v, (self.lead, after, 0, self.matrix[0] - queries))

    def pieces(self, matrices):
        """Yields a few windows: their slice, all their rows, 1 / norm of these, and memory for each one's matrices."""
        count = cdiv(self.windows * self.matrix[0] * self.matrix[1] * self.z.element_size(), BYTES * matrices)
        size = cdiv(self.windows, count) if count else 0
        memory = [self.z.new_empty(size, *self.matrix) for _ in range(matrices)]
        for start in range(0, self.windows, size or 1):
            part = slice(start, min(start + size, self.windows))
            x = _of(part, self.z)
            if self.shared:
                x = torch.cat((self.prefix.expand(x.shape[0], -1, -1), x), dim=1)
            scales = x.new_empty(x.shape[:2], dtype=torch.float32)
            numbers = (scales.numel(), *x.shape[1:], *x.stride()[:2], EPS, math.inf)
            launch(norm_kernel, (cdiv(scales.numel(), 16),), x, scales, *numbers, ROWS=16, BK=256)
            yield part, x, scales, [_of(slice(0, x.shape[0]), matrix) for matrix in memory]

    def launch(self, kernel, programs, *arguments, **constants):
        launch(kernel, (programs,), *arguments, **{**self.constants, **constants})

    def tiles(self, keys):
        """The number of tiles of a matrix that are `keys` places wide."""
        return self.matrix[0] // self.constants["ROWS"] * (self.matrix[1] // keys)

    def mix(self, x, weights, gate, out):
        tiles = self.matrix[0] // self.constants["ROWS"] * cdiv(self.width, self.columns)
        strides = (*x.stride()[:2], *((0, 0) if gate is None else gate.stride()[:2]))
        numbers = (self.context, self.queries, self.width, self.lead, *self.matrix, *strides)
        self.launch(_mix_kernel, x.shape[0] * tiles, x, weights, gate, out, *numbers, BN=self.columns)


def contextualizer_triton(z, v, gate, prefix, queries):
    """Computes [`subquad_kernels.contextualizer`]."""
    if queries == 1:
        return contextualizer_last_row(z, v, gate, prefix)
    gate, out = dense_rows(gate), z.new_empty(z.shape[0], queries, z.shape[2])
    plan = _Plan(z, v, prefix, queries)
    keys = plan.constants["ROWS"]
    for part, x, scales, (weights,) in plan.pieces(1):
        plan.launch(
            _weights_kernel,
            x.shape[0] * plan.tiles(keys),
            *(x, plan.v, scales, weights, plan.context, plan.width, plan.first, plan.lead, *plan.matrix),
            *x.stride()[:2],
            KEYS=keys,
        )
        plan.mix(x, weights, None if gate is None else _of(part, gate), _of(part, out))
    return out


def contextualizer_triton_backward(grad, z, v, gate, prefix, queries):
    """Gradients of z, v, gate and prefix, if given."""
    grad, g = dense_rows(grad), dense_rows(grad)
    plan = _Plan(z, v, prefix, queries)
    grad_z, total = z.new_empty(z.shape), None
    grad_prefix = None if prefix is None else prefix.new_zeros(prefix.shape, dtype=torch.float32)
    if gate is not None:
        g = torch.mul(grad, gate, out=z.new_empty(gate.shape))  # later overwritten by the gradient of the gate
    keys = 64 if z.element_size() == 2 else 32  # two products and a sum fill the registers
    tiles = plan.tiles(keys)
    for part, x, scales, (weights, grads) in plan.pieces(2):
        count, part_g = x.shape[0], g[part]
        # Strips for several programs per multiprocessor, but not so short that a strip writes more than the weights.
        strip = max(count * tiles // (4 * multiprocessors(z)), 2)
        sums = scales.new_empty(cdiv(count, strip), *plan.matrix)
        row_sums = scales.new_empty(count, plan.matrix[1] // keys, plan.matrix[0])
        column_sums = scales.new_empty(count, plan.matrix[0] // plan.constants["ROWS"], plan.matrix[1])
        shape = (plan.context, plan.width, plan.first, plan.lead, *plan.matrix, *x.stride()[:2])
        plan.launch(
            _weight_gradient_kernel,
            sums.shape[0] * tiles,
            *(x, plan.v, part_g, scales, weights, grads, sums, row_sums, column_sums, count, strip),
            *(*shape, *part_g.stride()[:2]),
            KEYS=keys,
            LARGEST=torch.finfo(z.dtype).max,
            STAGES=min(plan.constants["STAGES"], 2),
        )
        total = sums.sum(0) if total is None else total.add_(sums.sum(0))
        grad_x = x.new_empty(x.shape) if plan.shared else grad_z[part]
        plan.launch(
            _row_gradient_kernel,
            count * (plan.matrix[1] // plan.constants["ROWS"]) * cdiv(plan.width, plan.columns),
            *(x, part_g, scales, weights, grads, row_sums, column_sums, grad_x, *shape, *part_g.stride()[:2]),
            KEYS=keys,
            BN=plan.columns,
        )
        if plan.shared:
            grad_z[part] = grad_x[:, plan.shared :]
            grad_prefix[: plan.shared] += grad_x[:, : plan.shared].sum(0, dtype=torch.float32)
        if gate is not None:
            plan.mix(x, weights, grad[part], part_g)
    # Entries above the diagonal may be uninitialised.
    grad_v = total[:queries, plan.lead : plan.lead + plan.context].tril(plan.first)
    if plan.first:
        grad_v = F.pad(grad_v, (0, 0, plan.first, 0))
    return [x for x in (grad_z, grad_v, None if gate is None else g, grad_prefix) if x is not None]

"""
The dynamic layer as Triton kernels.

Each kernel computes tiles of a product of matrices, and post-processes a tile before writing it. The cosines of a few
windows at a time are written to memory, in the dtype of the features, and read again. That is cheaper than recomputing
them for each use.

With n for 1 / norm, S for the cosines, r for the divisor of a row of cosines, g for the gradient times the gate,

    D_ij = (g_i · x_j - s_ij t_i) / r_i,    t_i = sum_j S_ij (g_i · x_j) / r_i

is the gradient of S_ij, as a cosine of row i (s is its sign in "l1", but zero if r is eps, and one in "sum"), and the
gradient of row i is

    sum_k S_ki g_k / r_k  +  n_i (sum_j D_ij n_j x_j + sum_k D_ki n_k x_k)  -  n_i² p_i x_i,

    p_i = sum_j D_ij S_ij + sum_k D_ki S_ki

The last term is zero in "l1" if the norm is less than eps. Matrices and sums in memory have zeros after the last row.
"""

import math

import torch
import triton
import triton.language as tl

from ..backend import cdiv, dense_rows, launch
from ..tiles import add_rows, cells_of, norm_kernel, product_constants, row_products, rows_at


BYTES = 1 << 25  # of the cosines in memory at a time


@triton.jit
def _cosine_kernel(
    x, scales, cosines, row_sums, C, H, size, x_window, x_row,
    L1: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of the cosines of a window, and its contribution to r."""
    across = size // KEYS
    tiles = size // ROWS * across
    row, key = tl.program_id(0) % tiles // across * ROWS, tl.program_id(0) % across * KEYS
    rows, keys = row + tl.arange(0, ROWS), key + tl.arange(0, KEYS)
    window = (tl.program_id(0) // tiles).to(tl.int64)
    x, scales = x + window * x_window, scales + window * C
    products = row_products(
        rows_at(x, x_row, rows, C - 1), rows_at(x, x_row, keys, C - 1), H, ROWS, KEYS, BK, EVEN, STAGES, PRECISION
    )
    products *= tl.load(scales + rows, mask=rows < C, other=0.0)[:, None]
    products *= tl.load(scales + keys, mask=keys < C, other=0.0)[None, :]
    sums = tl.sum(tl.abs(products) if L1 else products, 1)
    tl.store(row_sums + (window * across + key // KEYS) * size + rows, sums)
    tl.store(cosines + window * size * size + cells_of(rows, keys, size), products.to(cosines.dtype.element_ty))


@triton.jit
def _sum_parts(parts, number, window, rows, size):
    """The sums of some rows of a window, from `number` parts."""
    sums = tl.load(parts + window * number * size + rows)
    for n in range(1, number):
        sums += tl.load(parts + (window * number + n) * size + rows)
    return sums


@triton.jit
def _mix_kernel(
    x, cosines, row_sums, gate, out, g, dots, C, H, size, parts,
    x_window, x_row, gate_window, gate_row, out_window, out_row, g_window, g_row, eps,
    L1: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of gate * (weights @ rows), may overwrite the gate. With g, also its contribution to t."""
    across = tl.cdiv(H, BN)
    tiles = size // ROWS * across
    row, column = tl.program_id(0) % tiles // across * ROWS, tl.program_id(0) % across * BN
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, BN)
    window = (tl.program_id(0) // tiles).to(tl.int64)
    weights = cosines + window * size * size + rows[:, None] * size
    sums = add_rows(
        tl.zeros((ROWS, BN), tl.float32),
        *(weights, 1, x + window * x_window, x_row, 0, C, 0, C - 1, columns, H, BK, EVEN, STAGES, PRECISION),
    )
    r = _sum_parts(row_sums, parts, window, rows, size)
    sums *= (1.0 / (tl.maximum(r, eps) if L1 else r + eps))[:, None]
    mask = (rows < C)[:, None] & (columns < H)[None, :]
    if g is not None:
        values = tl.load(g + window * g_window + cells_of(rows, columns, g_row), mask=mask, other=0.0).to(tl.float32)
        tl.store(dots + (window * across + column // BN) * size + rows, tl.sum(sums * values, 1))
    sums *= tl.load(gate + window * gate_window + cells_of(rows, columns, gate_row), mask=mask, other=0.0)
    tl.store(out + window * out_window + cells_of(rows, columns, out_row), sums.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _slope_kernel(
    x, g, scales, cosines, row_sums, dots, forth, back, row_dots, column_dots,
    C, H, size, parts, dot_parts, x_window, x_row, g_window, g_row, eps,
    L1: tl.constexpr, LARGEST: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """
    A tile of D, in `forth` times n of its column and in `back` times n of its row, and its contributions to the sums
    of D S in rows and columns. Divides the cosines by r.
    """
    across = size // KEYS
    tiles = size // ROWS * across
    row, key = tl.program_id(0) % tiles // across * ROWS, tl.program_id(0) % across * KEYS
    rows, keys = row + tl.arange(0, ROWS), key + tl.arange(0, KEYS)
    window = (tl.program_id(0) // tiles).to(tl.int64)
    slopes = row_products(
        rows_at(g + window * g_window, g_row, rows, C - 1), rows_at(x + window * x_window, x_row, keys, C - 1),
        H, ROWS, KEYS, BK, EVEN, STAGES, PRECISION,
    )  # fmt: skip
    r = _sum_parts(row_sums, parts, window, rows, size)
    t = _sum_parts(dots, dot_parts, window, rows, size)
    if L1:
        t = tl.where(r > eps, t, 0.0)
    inverse = tl.where(rows < C, 1.0 / (tl.maximum(r, eps) if L1 else r + eps), 0.0)

    cells = window * size * size + cells_of(rows, keys, size)
    cosine = tl.load(cosines + cells).to(tl.float32)
    if L1:
        slopes -= tl.where(cosine > 0.0, t[:, None], tl.where(cosine < 0.0, -t[:, None], 0.0))
    else:
        slopes -= t[:, None]
    slopes *= inverse[:, None]
    tl.store(row_dots + (window * across + key // KEYS) * size + rows, tl.sum(slopes * cosine, 1))
    tl.store(column_dots + (window * (size // ROWS) + row // ROWS) * size + keys, tl.sum(slopes * cosine, 0))
    tl.store(cosines + cells, (cosine * inverse[:, None]).to(cosines.dtype.element_ty))
    # Infinity times a row of zeros would be NaN.
    scale = tl.load(scales + window * C + keys, mask=keys < C, other=0.0)
    tl.store(forth + cells, tl.clamp(slopes * scale[None, :], -LARGEST, LARGEST).to(forth.dtype.element_ty))
    scale = tl.load(scales + window * C + rows, mask=rows < C, other=0.0)
    tl.store(back + cells, tl.clamp(slopes * scale[:, None], -LARGEST, LARGEST).to(back.dtype.element_ty))


@triton.jit
def _row_gradient_kernel(
    x, g, scales, weights, forth, back, row_dots, column_dots, grad_x,
    C, H, size, x_window, x_row, g_window, g_row, out_window, out_row, limit,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of the gradient of the rows of a window."""
    across = tl.cdiv(H, BN)
    tiles = size // ROWS * across
    row, column = tl.program_id(0) % tiles // across * ROWS, tl.program_id(0) % across * BN
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, BN)
    window = (tl.program_id(0) // tiles).to(tl.int64)
    x, g, matrix = x + window * x_window, g + window * g_window, window * size * size
    sums = tl.zeros((ROWS, BN), tl.float32)
    cells = matrix + rows[:, None] * size
    sums = add_rows(sums, forth + cells, 1, x, x_row, 0, C, 0, C - 1, columns, H, BK, EVEN, STAGES, PRECISION)
    cells = matrix + rows[:, None]
    sums = add_rows(sums, back + cells, size, x, x_row, 0, C, 0, C - 1, columns, H, BK, EVEN, STAGES, PRECISION)
    scale = tl.load(scales + window * C + rows, mask=rows < C, other=0.0)
    sums *= scale[:, None]
    sums = add_rows(sums, weights + cells, size, g, g_row, 0, C, 0, C - 1, columns, H, BK, EVEN, STAGES, PRECISION)

    dots = _sum_parts(row_dots, size // KEYS, window, rows, size)
    dots += _sum_parts(column_dots, size // ROWS, window, rows, size)
    mask = (rows < C)[:, None] & (columns < H)[None, :]
    own = tl.load(rows_at(x, x_row, rows, C - 1)[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    # One n after the other: their product may be infinite.
    sums -= (tl.where(scale < limit, dots, 0.0) * scale)[:, None] * own * scale[:, None]
    sums = tl.clamp(sums, -LARGEST, LARGEST).to(grad_x.dtype.element_ty)
    tl.store(grad_x + window * out_window + cells_of(rows, columns, out_row), sums, mask=mask)


class _Plan:
    """The division of work, and the arguments shared by all kernels."""

    def __init__(self, features, width, normalization, eps):
        self.x, self.eps, self.l1 = features[..., :width], eps, normalization == "l1"
        self.windows, self.context, self.width = self.x.shape
        self.constants, self.columns = product_constants(self.x, self.context)
        self.tile = self.constants["ROWS"]
        self.size = self.tile * cdiv(self.context, self.tile)
        self.added, self.limit = (0.0, 1 / eps) if self.l1 else (eps, math.inf)

    def pieces(self):
        """Yields a few windows: their slice, rows, 1 / norm of these, cosines, and sums of the cosines of a row."""
        count = cdiv(self.windows * self.size * self.size * self.x.element_size(), BYTES)
        size = cdiv(self.windows, count) if count else 0
        memory = self.x.new_empty(size, self.size, self.size)
        for start in range(0, self.windows, size or 1):
            part = slice(start, min(start + size, self.windows))
            x = self.x[part]
            scales = x.new_empty(x.shape[:2], dtype=torch.float32)
            numbers = (scales.numel(), *x.shape[1:], *x.stride()[:2], self.added, self.limit)
            launch(norm_kernel, (cdiv(scales.numel(), 16),), x, scales, *numbers, ROWS=16, BK=256)
            cosines = memory[: x.shape[0]]
            row_sums = self.sums(x, self.size // self.tile)
            tiles = (self.size // self.tile) ** 2
            numbers = (self.context, self.width, self.size, *x.stride()[:2])
            self.launch(
                *(_cosine_kernel, x.shape[0] * tiles, x, scales, cosines, row_sums, *numbers),
                L1=self.l1,
                KEYS=self.tile,
            )
            yield part, x, scales, cosines, row_sums

    def sums(self, x, parts):
        """Memory for sums of each row, in parts."""
        return x.new_empty(x.shape[0], parts, self.size, dtype=torch.float32)

    def launch(self, kernel, programs, *arguments, **constants):
        launch(kernel, (programs,), *arguments, **{**self.constants, **constants})

    def programs(self, x):
        """One for each tile of the rows of x."""
        return x.shape[0] * (self.size // self.tile) * cdiv(self.width, self.columns)

    def mix(self, x, cosines, row_sums, gate, out, g=None):
        """Writes gate * (weights @ rows) to `out`, and returns the products of the rows of g and of the mixed rows."""
        dots, strides = None, (0, 0)
        if g is not None:
            dots, strides = self.sums(x, cdiv(self.width, self.columns)), g.stride()[:2]
        self.launch(
            *(_mix_kernel, self.programs(x), x, cosines, row_sums, gate, out, g, dots, *self.x.shape[1:], self.size),
            *(row_sums.shape[1], *x.stride()[:2], *gate.stride()[:2], *out.stride()[:2], *strides, self.eps),
            L1=self.l1,
            BN=self.columns,
        )
        return dots


def dynamic_mixing_triton(out, features, width, normalization, eps):
    """
    Writes gate * (weights @ rows) to `out` (W, C, width), which may be the gate: see
    [`subquad_kernels.dynamic_mixing`].
    """
    features = dense_rows(features)
    gate, plan = features[..., width : 2 * width], _Plan(features, width, normalization, eps)
    for part, x, _, cosines, row_sums in plan.pieces():
        plan.mix(x, cosines, row_sums, gate[part], out[part])


def dynamic_mixing_triton_backward(grad, features, width, normalization, eps):
    """The gradient of the features."""
    features, grad = dense_rows(features), dense_rows(grad)
    grads = features.new_empty(features.shape)
    grads[..., 2 * width :] = grad[..., width:]
    plan = _Plan(features, width, normalization, eps)
    keys = 64 if features.element_size() == 2 else 32
    largest = min(torch.finfo(features.dtype).max, 1e30)  # so that sums of products are finite in float32
    for part, x, scales, cosines, row_sums in plan.pieces():
        grad_x, grad_gate = grads[part, :, :width], grads[part, :, width : 2 * width]
        g = (grad[part, :, :width] * features[part, :, width : 2 * width]).to(features.dtype)
        dots = plan.mix(x, cosines, row_sums, grad[part, :, :width], grad_gate, g)
        forth, back = torch.empty_like(cosines), torch.empty_like(cosines)
        row_dots, column_dots = plan.sums(x, plan.size // keys), plan.sums(x, plan.size // plan.tile)
        strides = (*x.stride()[:2], *g.stride()[:2])
        plan.launch(
            *(_slope_kernel, x.shape[0] * (plan.size // plan.tile) * (plan.size // keys)),
            *(x, g, scales, cosines, row_sums, dots, forth, back, row_dots, column_dots),
            *(plan.context, width, plan.size, row_sums.shape[1], dots.shape[1], *strides, eps),
            L1=plan.l1,
            LARGEST=largest,
            KEYS=keys,
        )
        plan.launch(
            *(_row_gradient_kernel, plan.programs(x), x, g, scales, cosines, forth, back, row_dots, column_dots),
            *(grad_x, plan.context, width, plan.size, *strides, *grad_x.stride()[:2], plan.limit),
            LARGEST=largest,
            KEYS=keys,
            BN=plan.columns,
        )
    return [grads]

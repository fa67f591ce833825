"""
The dynamic layer as Triton kernels.

A program computes a block of rows of a window. First it computes the cosines of its rows with all rows, KEYS at a
time, and keeps them on chip, in the dtype of the features. Then it multiplies them by all rows, a few columns at a
time. Neither weights nor their gradients are ever in memory. A program keeps the cosines with GROUPS * KEYS rows. It
takes longer windows in parts of that many rows, and sums their results in `partial`, in memory.

In the second step cosines of opposite sign are used and the products are subtracted. If the products were added,
Triton would chain them into one sum, with a layout in which half of the warps repeat the work of the others.

With n for 1 / norm, S for the cosines, r for what a row of cosines is divided by, g for the gradient times the gate,

    E_ij = (g_i · x_j - s_ij t_i) / r_i + (g_j · x_i - s_ij t_j) / r_j,    t_i = sum_j S_ij (g_i · x_j) / r_i

is the gradient of S_ij = S_ji (s is its sign in "l1", but zero if r is eps, and one in "sum"), and that of row i is

    sum_j S_ij g_j / r_j  +  n_i (sum_j E_ij n_j x_j - n_i (sum_j E_ij S_ij) x_i)

The last term is zero in "l1" if the norm is less than eps.
"""

import math

import torch
import triton
import triton.language as tl

from ..backend import launch
from ..tiles import aligned, load_tile, readable, row_products


KEYS = 128


@triton.jit
def _pointers(x, rows, row, C, EVEN: tl.constexpr):
    """Pointers to rows of a window; rows after the last one are the last one."""
    pointers = x + tl.minimum(rows, C - 1).to(tl.int64) * row
    if EVEN:
        pointers = tl.multiple_of(pointers, 16)
    return pointers


@triton.jit
def _norm_kernel(x, scales, C, H, size, x_window, x_row, added, limit, ROWS: tl.constexpr, BK: tl.constexpr):
    """Writes 1 / norm of the C rows of a window, then zeros up to `size`."""
    blocks = tl.cdiv(size, ROWS)
    rows = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    window = (tl.program_id(0) // blocks).to(tl.int64)
    pointers = _pointers(x + window * x_window, rows, x_row, C, False)
    squares = tl.zeros((ROWS, BK), tl.float32)
    for start in range(0, H, BK):
        columns = start + tl.arange(0, BK)
        values = tl.load(pointers[:, None] + columns[None, :], mask=(columns < H)[None, :], other=0.0).to(tl.float32)
        squares += values * values
    scale = tl.minimum(tl.rsqrt(tl.sum(squares, 1) + added), limit)
    tl.store(scales + window * size + rows, tl.where(rows < C, scale, 0.0), mask=rows < size)


@triton.jit
def _three_products(
    x_pointers, g_pointers, key_pointers, key_grads, H, A: tl.constexpr, B: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x · y, g · y and x · h of A rows x with gradients g and B rows y with gradients h."""
    sums, forth, back = tl.zeros((A, B), tl.float32), tl.zeros((A, B), tl.float32), tl.zeros((A, B), tl.float32)
    for start in tl.range(0, H, BK, num_stages=STAGES):
        ks = start + tl.arange(0, BK)
        x = load_tile(x_pointers[:, None] + ks[None, :], (ks < H)[None, :], EVEN)
        y = load_tile(key_pointers[None, :] + ks[:, None], (ks < H)[:, None], EVEN)
        sums = tl.dot(x, y, sums, input_precision=PRECISION)
        g = load_tile(g_pointers[:, None] + ks[None, :], (ks < H)[None, :], EVEN)
        forth = tl.dot(g, y, forth, input_precision=PRECISION)
        h = load_tile(key_grads[None, :] + ks[:, None], (ks < H)[:, None], EVEN)
        back = tl.dot(x, h, back, input_precision=PRECISION)
    return sums, forth, back


@triton.jit
def _mix_kernel(
    x, scales, gate, out, g, inverses, dots, partial,
    C, H, size, x_window, x_row, gate_window, gate_row, out_window, out_row, g_window, g_row, eps,
    L1: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """gate * (weights @ rows) for a block of rows, may overwrite the gate. With g, also 1 / r and t / r."""
    blocks = tl.cdiv(C, ROWS)
    rows = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    window = (tl.program_id(0) // blocks).to(tl.int64)
    x += window * x_window
    scales += window * size
    row_pointers = _pointers(x, rows, x_row, C, EVEN)
    gate_pointers = _pointers(gate + window * gate_window, rows, gate_row, C, EVEN)
    out_pointers = _pointers(out + window * out_window, rows, out_row, C, EVEN)
    row_scales = tl.load(scales + tl.minimum(rows, C - 1))
    inside = (rows < C)[:, None]
    r, t = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for start in range(0, 1 if partial is None else C, GROUPS * KEYS):
        parts = ()
        for n in tl.static_range(GROUPS):
            keys = start + n * KEYS + tl.arange(0, KEYS)
            key_pointers = _pointers(x, keys, x_row, C, EVEN)
            cosines = row_products(row_pointers, key_pointers, H, ROWS, KEYS, BK, EVEN, STAGES, PRECISION)
            cosines *= row_scales[:, None] * tl.load(scales + keys)[None, :]
            r += tl.sum(tl.abs(cosines) if L1 else cosines, 1)
            parts += ((-cosines).to(x.dtype.element_ty),)
        inverse = 1.0 / (tl.maximum(r, eps) if L1 else r + eps)

        finished = inside
        if partial is not None:
            finished = (rows < tl.where(start + GROUPS * KEYS < C, 0, C))[:, None]
        products = tl.zeros((ROWS, BN), tl.float32)
        for column in tl.range(0, H, BN, num_stages=STAGES):
            columns = column + tl.arange(0, BN)
            even = (columns < H)[None, :]
            sums = tl.zeros((ROWS, BN), tl.float32)
            for n in tl.static_range(GROUPS):
                key_pointers = _pointers(x, start + n * KEYS + tl.arange(0, KEYS), x_row, C, EVEN)
                values = load_tile(key_pointers[:, None] + columns[None, :], even, EVEN)
                sums -= tl.dot(parts[n], values, input_precision=PRECISION)
            if partial is not None:
                pointers = partial + (window * C + rows)[:, None] * H + columns[None, :]
                sums += tl.load(pointers, mask=inside & even, other=0.0)
                tl.store(pointers, sums, mask=inside & even)
            sums *= inverse[:, None]
            if g is not None:
                g_pointers = _pointers(g + window * g_window, rows, g_row, C, EVEN)
                products += sums * load_tile(g_pointers[:, None] + columns[None, :], even, EVEN).to(tl.float32)
            sums *= load_tile(gate_pointers[:, None] + columns[None, :], even, EVEN).to(tl.float32)
            tl.store(out_pointers[:, None] + columns[None, :], sums.to(out.dtype.element_ty), mask=finished & even)
        t = tl.sum(products, 1)
        if partial is not None:
            tl.debug_barrier()  # a value may be read by another thread than the one that wrote it
    if g is not None:
        inverse = 1.0 / (tl.maximum(r, eps) if L1 else r + eps)
        if L1:
            t = tl.where(r > eps, t, 0.0)
        tl.store(inverses + window * size + rows, inverse, mask=rows < C)
        tl.store(dots + window * size + rows, t * inverse, mask=rows < C)


@triton.jit
def _row_gradient_kernel(
    x, g, scales, inverses, dots, grad_x, partial,
    C, H, size, x_window, x_row, g_window, g_row, out_window, out_row, limit,
    L1: tl.constexpr, LARGEST: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    BK: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of rows."""
    blocks = tl.cdiv(C, ROWS)
    rows = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    window = (tl.program_id(0) // blocks).to(tl.int64)
    x, g = x + window * x_window, g + window * g_window
    scales, inverses, dots = scales + window * size, inverses + window * size, dots + window * size
    row_pointers, row_grads = _pointers(x, rows, x_row, C, EVEN), _pointers(g, rows, g_row, C, EVEN)
    out_pointers = _pointers(grad_x + window * out_window, rows, out_row, C, EVEN)
    here = tl.minimum(rows, C - 1)
    row_scales, row_inverses, row_dots = tl.load(scales + here), tl.load(inverses + here), tl.load(dots + here)
    inside = (rows < C)[:, None]
    projection = tl.zeros((ROWS,), tl.float32)
    for start in range(0, 1 if partial is None else C, GROUPS * KEYS):
        grads, weights = (), ()
        for n in tl.static_range(GROUPS):
            keys = start + n * KEYS + tl.arange(0, KEYS)
            key_pointers, key_grads = _pointers(x, keys, x_row, C, EVEN), _pointers(g, keys, g_row, C, EVEN)
            cosines, forth, back = _three_products(
                row_pointers, row_grads, key_pointers, key_grads, H, ROWS, KEYS, BK, EVEN, STAGES, PRECISION
            )
            key_scales, key_inverses = tl.load(scales + keys)[None, :], tl.load(inverses + keys)[None, :]
            cosines *= row_scales[:, None] * key_scales
            both = row_dots[:, None] + tl.load(dots + keys)[None, :]
            if L1:
                both = tl.where(cosines > 0.0, both, tl.where(cosines < 0.0, -both, 0.0))
            slopes = both - forth * row_inverses[:, None] - back * key_inverses
            projection += tl.sum(slopes * cosines, 1) * tl.where(row_scales < limit, row_scales, 0.0)
            # Infinity times a row of zeros would be NaN.
            grads += (tl.clamp(slopes * key_scales, -LARGEST, LARGEST).to(x.dtype.element_ty),)
            weights += ((-cosines * key_inverses).to(x.dtype.element_ty),)

        finished = inside
        if partial is not None:
            finished = (rows < tl.where(start + GROUPS * KEYS < C, 0, C))[:, None]
        for column in tl.range(0, H, BN, num_stages=STAGES):
            columns = column + tl.arange(0, BN)
            even = (columns < H)[None, :]
            sums = tl.zeros((ROWS, BN), tl.float32)
            for n in tl.static_range(GROUPS):
                key_pointers = _pointers(x, start + n * KEYS + tl.arange(0, KEYS), x_row, C, EVEN)
                values = load_tile(key_pointers[:, None] + columns[None, :], even, EVEN)
                sums -= tl.dot(grads[n], values, input_precision=PRECISION)
            sums *= row_scales[:, None]
            for n in tl.static_range(GROUPS):
                key_pointers = _pointers(g, start + n * KEYS + tl.arange(0, KEYS), g_row, C, EVEN)
                values = load_tile(key_pointers[:, None] + columns[None, :], even, EVEN)
                sums -= tl.dot(weights[n], values, input_precision=PRECISION)
            if partial is not None:
                pointers = partial + (window * C + rows)[:, None] * H + columns[None, :]
                sums += tl.load(pointers, mask=inside & even, other=0.0)
                tl.store(pointers, sums, mask=inside & even)
            own = load_tile(row_pointers[:, None] + columns[None, :], even, EVEN).to(tl.float32)
            sums += (row_scales * projection)[:, None] * own
            sums = tl.clamp(sums, -LARGEST, LARGEST).to(grad_x.dtype.element_ty)
            tl.store(out_pointers[:, None] + columns[None, :], sums, mask=finished & even)
        if partial is not None:
            tl.debug_barrier()


class _Plan:
    """How the work is divided, and the arguments that all kernels share."""

    def __init__(self, features, width, normalization, eps, *others):
        self.x, self.eps = features[..., :width], eps
        self.windows, self.context, self.width = self.x.shape
        narrow, hip = features.element_size() == 2, torch.version.hip is not None
        # Products of float32 need many more registers.
        self.block = 64 if narrow else 16
        groups = min(triton.cdiv(self.context, KEYS), 2)
        self.size = triton.cdiv(self.context, groups * KEYS) * groups * KEYS
        self.constants = {
            "L1": normalization == "l1",
            "GROUPS": groups,
            "ROWS": self.block,
            "KEYS": KEYS,
            "BK": 64 if narrow else 32,
            "EVEN": width % 64 == 0 and all(aligned(x) for x in (self.x, *others)),
            "STAGES": 1 if hip else 2,
            "PRECISION": "ieee" if narrow or hip else "tf32x3",
            "num_warps": 4 if hip else 8,
        }
        # 1 / norm, and for the backward pass 1 / r and t / r: zeros after the last row.
        self.scales, self.inverses, self.dots = features.new_zeros(3, self.windows, self.size, dtype=torch.float32)
        self.shape = (self.context, self.width, self.size, *self.x.stride()[:2])
        added, self.limit = (0.0, 1 / eps) if normalization == "l1" else (eps, math.inf)
        grid = (self.windows * triton.cdiv(self.size, 16),)
        launch(_norm_kernel, grid, self.x, self.scales, *self.shape, added, self.limit, ROWS=16, BK=256)

    def partial(self):
        """Zeros to add to, if a program cannot keep the cosines of its rows with all rows of a window."""
        if self.context > self.constants["GROUPS"] * KEYS:
            return self.x.new_zeros(self.x.shape, dtype=torch.float32)
        return None

    def launch(self, kernel, *arguments, **constants):
        grid = (self.windows * triton.cdiv(self.context, self.block),)
        launch(kernel, grid, *arguments, **{**self.constants, **constants})

    def mix(self, gate, out, g=None):
        strides = (*gate.stride()[:2], *out.stride()[:2], *((0, 0) if g is None else g.stride()[:2]))
        numbers = (None, None) if g is None else (self.inverses, self.dots)
        self.launch(
            _mix_kernel,
            *(self.x, self.scales, gate, out, g, *numbers, self.partial(), *self.shape, *strides, self.eps),
            BN=self.constants["BK"] if g is None and self.constants["EVEN"] else 32,
        )


def dynamic_mixing_triton(out, features, width, normalization, eps):
    """
    Writes gate * (weights @ rows) to `out` (W, C, width), which may be the gate: see
    [`subquad_kernels.dynamic_mixing`].
    """
    features = readable(features)
    gate = features[..., width : 2 * width]
    _Plan(features, width, normalization, eps, gate, out).mix(gate, out)


def dynamic_mixing_triton_backward(grad, features, width, normalization, eps):
    """The gradient of the features."""
    features, grad = readable(features), readable(grad)
    grads = features.new_empty(features.shape)
    grads[..., 2 * width :] = grad[..., width:]
    grad_x, gate, grad_out = grads[..., :width], features[..., width : 2 * width], grad[..., :width]
    g = (grad_out * gate).to(features.dtype)
    plan = _Plan(features, width, normalization, eps, grad_out, grads, g)
    plan.mix(grad_out, grads[..., width : 2 * width], g)
    plan.launch(
        _row_gradient_kernel,
        *(plan.x, g, plan.scales, plan.inverses, plan.dots, grad_x, plan.partial()),
        *(*plan.shape, *g.stride()[:2], *grad_x.stride()[:2], plan.limit),
        # At most 1e30, so that sums of products are finite in float32.
        LARGEST=min(torch.finfo(features.dtype).max, 1e30),
        BK=32,
        BN=32,
    )
    return [grads]

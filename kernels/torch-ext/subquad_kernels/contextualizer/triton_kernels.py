"""
The contextualizer as Triton kernels.

A program computes a block of rows of a window. First it computes the weights, tril(v) * cos, of its rows and all rows
that they read, and keeps them in registers, in the dtype of z. Then it multiplies them by the rows that they weight, a
few columns at a time. Neither weights nor their gradients are ever in memory. Nothing above the diagonal is computed:
one launch covers the blocks that read the same number of rows, in groups of KEYS.

With n for 1 / norm, A for the weights, g for the gradient times the gate, E for the gradients of the products of rows,

    E_ij = (g_i · x_j) v_ij n_i n_j,    t_j = sum_i A_ij (g_i · x_j) + sum_k A_jk (g_j · x_k),

the gradient of row j, which is a query and is read by later queries, is

    sum_i A_ij g_i  +  sum_i E_ij x_i  +  sum_k E_jk x_k  -  n_j² t_j x_j
"""

import itertools

import torch
import triton
import triton.language as tl

from ..backend import KernelError, launch, multiprocessors
from ..tiles import aligned, load_tile, readable, row_products
from .reference import EPS


@triton.jit
def _pointers(x, x_row, prefix, prefix_row, shared, rows, EVEN: tl.constexpr):
    """Pointers to rows of a window, the first `shared` of them in the prefix, if there is one; x points to row 0."""
    pointers = x + rows * x_row
    if prefix is not None:
        pointers = tl.where(rows < shared, prefix + rows * prefix_row, pointers)
    if EVEN:
        pointers = tl.multiple_of(pointers, 16)  # the choice above hides it, and values would be read one by one
    return pointers


@triton.jit
def _norm_kernel(
    x,
    scales,
    R,
    H,
    begin,
    end,
    size,
    copies,
    x_window,
    x_row,
    eps,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
):
    """Writes 1 / norm of the R rows of a window to columns `begin` to `end` of `copies` rows of `scales`."""
    blocks = tl.cdiv(end - begin, ROWS)
    rows = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    window = (tl.program_id(0) // blocks).to(tl.int64)
    x += window * x_window
    squares = tl.zeros((ROWS, BK), tl.float32)
    for start in range(0, H, BK):
        columns = start + tl.arange(0, BK)
        mask = (rows < R)[:, None] & (columns < H)[None, :]
        values = tl.load(x + rows[:, None] * x_row + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        squares += values * values
    scale = tl.rsqrt(tl.sum(squares, 1) + eps)
    rows += begin
    for n in range(copies):
        tl.store(scales + (window + n) * size + rows, scale, mask=rows < end)


@triton.jit
def _two_products(
    x_pointers, y_pointers, g_pointers, H, A: tl.constexpr, B: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """x · y of A rows with B rows, and products with the gradients of the A rows if QUERIES, else of the B rows."""
    sums, grads = tl.zeros((A, B), tl.float32), tl.zeros((A, B), tl.float32)
    for start in tl.range(0, H, BK, num_stages=STAGES):
        ks = start + tl.arange(0, BK)
        x = load_tile(x_pointers[:, None] + ks[None, :], (ks < H)[None, :], EVEN)
        y = load_tile(y_pointers[None, :] + ks[:, None], (ks < H)[:, None], EVEN)
        sums = tl.dot(x, y, sums, input_precision=PRECISION)
        if QUERIES:
            g = load_tile(g_pointers[:, None] + ks[None, :], (ks < H)[None, :], EVEN)
            grads = tl.dot(g, y, grads, input_precision=PRECISION)
        else:
            g = load_tile(g_pointers[None, :] + ks[:, None], (ks < H)[:, None], EVEN)
            grads = tl.dot(x, g, grads, input_precision=PRECISION)
    return sums, grads


@triton.jit
def _factors(v, v_row, queries, keys, first, C):
    """v if `queries` are queries that may read the keys, else 0. One of the two is a column, the other a row."""
    mask = (queries >= first) & (queries < C) & (keys <= queries)
    return tl.load(v + queries * v_row + keys, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _mix_kernel(
    z, prefix, v, scales, gate, out,
    R, H, C, first, size, z_window, z_row, prefix_row, v_row, gate_window, gate_row, begin, part_size,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """
    gate * (weights @ rows) for a block of queries, which reads GROUPS groups of rows from group program_id(2) on, each
    with an `out` of its own.
    """
    shared = C - R
    start = (begin + tl.program_id(0)) * ROWS
    group = tl.program_id(2) * KEYS
    if group >= start + ROWS:
        return
    rows = start + tl.arange(0, ROWS)
    window = tl.program_id(1).to(tl.int64)
    z += window * z_window - shared * z_row
    scales += window * size
    queries = tl.minimum(tl.maximum(rows, first), C - 1)
    query_pointers = _pointers(z, z_row, None, 0, 0, queries, EVEN)
    query_scales = tl.load(scales + queries)
    parts = ()
    for n in tl.static_range(GROUPS):
        keys = group + n * KEYS + tl.arange(0, KEYS)
        key_pointers = _pointers(z, z_row, prefix, prefix_row, shared, tl.minimum(keys, C - 1), EVEN)
        cosines = row_products(query_pointers, key_pointers, H, ROWS, KEYS, BK, EVEN, STAGES, PRECISION)
        cosines *= query_scales[:, None] * tl.load(scales + keys)[None, :]
        weights = cosines * _factors(v, v_row, rows[:, None], keys[None, :], first, C)
        parts += (weights.to(z.dtype.element_ty),)

    rows -= first
    inside = (rows >= 0) & (rows < C - first)
    out += tl.program_id(2).to(tl.int64) * part_size + window * (C - first) * H
    for column in tl.range(0, H, BN, num_stages=STAGES):
        columns = column + tl.arange(0, BN)
        sums = tl.zeros((ROWS, BN), tl.float32)
        for n in tl.static_range(GROUPS):
            keys = tl.minimum(group + n * KEYS + tl.arange(0, KEYS), C - 1)
            pointers = _pointers(z, z_row, prefix, prefix_row, shared, keys, EVEN)
            x = load_tile(pointers[:, None] + columns[None, :], (columns < H)[None, :], EVEN)
            sums = tl.dot(parts[n], x, sums, input_precision=PRECISION)
        mask = inside[:, None] & (columns < H)[None, :]
        if gate is not None:
            pointers = gate + window * gate_window + rows[:, None] * gate_row + columns[None, :]
            sums *= tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + rows[:, None] * H + columns[None, :], sums.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum_kernel(
    parts, gate, out, queries, H, first, part_size, gate_window, gate_row,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """gate * the sum of the parts of a row, one for each group of KEYS rows that it reads."""
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(2) * BN + tl.arange(0, BN)
    window = tl.program_id(1).to(tl.int64)
    mask = (rows < queries)[:, None] & (columns < H)[None, :]
    sums = tl.zeros((ROWS, BN), tl.float32)
    cells = (window * queries + rows)[:, None] * H + columns[None, :]
    for n in range(0, (first + tl.program_id(0) * ROWS + ROWS - 1) // KEYS + 1):
        sums += tl.load(parts + cells, mask=mask & (first + rows >= n * KEYS)[:, None], other=0.0)
        parts += part_size
    if gate is not None:
        pointers = gate + window * gate_window + rows[:, None] * gate_row + columns[None, :]
        sums *= tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + cells, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _row_gradient_kernel(
    z, prefix, v, v_mirrored, grad, scales, grad_x,
    windows, strip, R, H, C, first, size, z_window, z_row, prefix_row, v_row, grad_window, grad_row, begin, after,
    READS: tl.constexpr, READERS: tl.constexpr, PREFIX: tl.constexpr, LARGEST: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """
    The gradient of a block of rows, which as queries read READS groups of rows and are read by READERS groups of rows,
    from `after` on. With PREFIX that of the prefix, summed over a strip of windows into `grad_x` of the strip;
    otherwise that of z, with strips of one window.
    """
    shared = C - R
    rows = (begin + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    number = tl.program_id(1).to(tl.int64)
    inside = (rows < shared) if PREFIX else (rows >= shared) & (rows < C)
    for window in range(number * strip, tl.minimum((number + 1) * strip, windows)):
        x, g = z + window * z_window - shared * z_row, grad + window * grad_window - first * grad_row
        own_scales = scales + window * size
        here = tl.minimum(rows, C - 1)
        row_pointers = _pointers(x, z_row, prefix, prefix_row, shared, here, EVEN)
        row_scales = tl.load(own_scales + rows)
        projection = tl.zeros((ROWS,), tl.float32)
        reads = ()
        for n in tl.static_range(READS):
            keys = n * KEYS + tl.arange(0, KEYS)
            key_pointers = _pointers(x, z_row, prefix, prefix_row, shared, tl.minimum(keys, C - 1), EVEN)
            grad_pointers = _pointers(g, grad_row, None, 0, 0, tl.maximum(here, first), EVEN)
            cosines, grads = _two_products(
                row_pointers, key_pointers, grad_pointers, H, ROWS, KEYS, BK, EVEN, STAGES, PRECISION, True
            )
            both = row_scales[:, None] * tl.load(own_scales + keys)[None, :]
            grads *= _factors(v, v_row, rows[:, None], keys[None, :], first, C) * both
            projection += tl.sum(grads * cosines, 1)
            # Infinity times a row of zeros would be NaN.
            reads += (tl.clamp(grads, -LARGEST, LARGEST).to(z.dtype.element_ty),)
        readers, weights = (), ()
        for n in tl.static_range(READERS):
            queries = after + n * KEYS + tl.arange(0, KEYS)
            there = tl.minimum(tl.maximum(queries, first), C - 1)
            query_pointers = _pointers(x, z_row, None, 0, 0, there, EVEN)
            grad_pointers = _pointers(g, grad_row, None, 0, 0, there, EVEN)
            cosines, grads = _two_products(
                row_pointers, query_pointers, grad_pointers, H, ROWS, KEYS, BK, EVEN, STAGES, PRECISION, False
            )
            reader = ((queries >= first) & (queries < C))[None, :] & (rows[:, None] <= queries[None, :])
            factors = tl.load(v_mirrored + rows[:, None] * C + queries[None, :], mask=reader, other=0.0).to(tl.float32)
            factors *= row_scales[:, None] * tl.load(own_scales + queries)[None, :]
            grads *= factors
            projection += tl.sum(grads * cosines, 1)
            readers += (tl.clamp(grads, -LARGEST, LARGEST).to(z.dtype.element_ty),)
            weights += ((cosines * factors).to(z.dtype.element_ty),)
        projection *= row_scales * row_scales

        for column in range(0, H, BN):
            columns = column + tl.arange(0, BN)
            even = (columns < H)[None, :]
            sums = tl.zeros((ROWS, BN), tl.float32)
            for n in tl.static_range(READS):
                keys = tl.minimum(n * KEYS + tl.arange(0, KEYS), C - 1)
                pointers = _pointers(x, z_row, prefix, prefix_row, shared, keys, EVEN)
                sums = tl.dot(
                    reads[n],
                    load_tile(pointers[:, None] + columns[None, :], even, EVEN),
                    sums,
                    input_precision=PRECISION,
                )
            for n in tl.static_range(READERS):
                there = tl.minimum(tl.maximum(after + n * KEYS + tl.arange(0, KEYS), first), C - 1)
                pointers = _pointers(x, z_row, None, 0, 0, there, EVEN)
                sums = tl.dot(
                    readers[n],
                    load_tile(pointers[:, None] + columns[None, :], even, EVEN),
                    sums,
                    input_precision=PRECISION,
                )
                pointers = _pointers(g, grad_row, None, 0, 0, there, EVEN)
                sums = tl.dot(
                    weights[n],
                    load_tile(pointers[:, None] + columns[None, :], even, EVEN),
                    sums,
                    input_precision=PRECISION,
                )
            mask = inside[:, None] & even
            own = tl.load(row_pointers[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
            sums -= projection[:, None] * own
            if PREFIX:
                pointers = grad_x + (number * shared + rows)[:, None] * H + columns[None, :]
                sums += tl.load(pointers, mask=mask, other=0.0)
            else:
                pointers = grad_x + (window * R - shared + rows)[:, None] * H + columns[None, :]
            tl.store(pointers, sums.to(grad_x.dtype.element_ty), mask=mask)


@triton.jit
def _weight_gradient_kernel(
    z, prefix, grad, scales, grad_v,
    windows, strip, R, H, C, first, size, z_window, z_row, prefix_row, grad_window, grad_row, begin,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of v for a block of queries and a group of rows, summed over a strip of windows."""
    groups, shared = size // KEYS, C - R
    start = (begin + tl.program_id(0) // groups) * ROWS
    rows, keys = start + tl.arange(0, ROWS), tl.program_id(0) % groups * KEYS + tl.arange(0, KEYS)
    if tl.program_id(0) % groups * KEYS >= start + ROWS:
        return
    queries = tl.minimum(tl.maximum(rows, first), C - 1)
    number = tl.program_id(1).to(tl.int64)
    sums = tl.zeros((ROWS, KEYS), tl.float32)
    for window in range(number * strip, tl.minimum((number + 1) * strip, windows)):
        x, g = z + window * z_window - shared * z_row, grad + window * grad_window - first * grad_row
        cosines, grads = _two_products(
            _pointers(x, z_row, None, 0, 0, queries, EVEN),
            _pointers(x, z_row, prefix, prefix_row, shared, tl.minimum(keys, C - 1), EVEN),
            _pointers(g, grad_row, None, 0, 0, queries, EVEN),
            *(H, ROWS, KEYS, BK, EVEN, STAGES, PRECISION, True),
        )
        both = tl.load(scales + window * size + queries)[:, None] * tl.load(scales + window * size + keys)[None, :]
        sums += cosines * grads * both
    grad_v += number * (C - first) * C
    mask = ((rows >= first) & (rows < C))[:, None] & (keys < C)[None, :]
    tl.store(grad_v + (rows - first)[:, None] * C + keys[None, :], sums, mask=mask)


class _Plan:
    """How the work is divided, and the arguments that all kernels share."""

    def __init__(self, z, v, prefix, queries, *others, may_split=False):
        self.windows, self.rows, self.width = z.shape
        self.context, self.queries = v.shape[0], queries
        self.shared, self.first = self.context - self.rows, self.context - queries
        self.z, self.v, self.prefix = readable(z), readable(v), None
        if self.shared:
            self.prefix = readable(prefix[: self.shared].to(z.dtype))

        narrow, hip = z.element_size() == 2, torch.version.hip is not None
        if self.context > 1024:
            raise KernelError(f"the weights of windows of {self.context} rows do not fit in the registers")
        # Products of float32 need many more registers.
        self.block = (64 if self.context <= 512 else 32) if narrow else 16
        self.keys = 128
        # A few windows do not fill the device. Then a program computes the weights of a single group of rows only, and
        # writes what this group adds to the result.
        programs = self.windows * triton.cdiv(queries, self.block)
        self.split = may_split and self.context > 64 and 2 * programs <= multiprocessors(z)
        if self.split:
            self.block, self.keys = min(self.block, 32), 64
        self.groups = triton.cdiv(self.context, self.keys)
        self.size = self.groups * self.keys
        self.even = self.width % 64 == 0 and all(aligned(x) for x in (self.z, self.prefix, *others))
        self.constants = {
            "ROWS": self.block,
            "KEYS": self.keys,
            "BK": 64 if narrow else 32,
            "EVEN": self.even,
            "STAGES": 1 if hip else 2,
            "PRECISION": "ieee" if narrow or hip else "tf32x3",
            "num_warps": 4 if self.split or hip else 8,
        }
        self.shape = (self.rows, self.width, self.context, self.first, self.size)
        self.strides = (*self.z.stride()[:2], self.prefix.stride(0) if self.shared else 0)
        self.scales = self.z.new_empty(self.windows, self.size, dtype=torch.float32)
        self._write_scales(self.z, self.shared, self.size, 1)
        if self.shared:
            self._write_scales(self.prefix[None], 0, self.shared, self.windows)

    def _write_scales(self, x, begin, end, copies):
        grid = (x.shape[0] * triton.cdiv(end - begin, 16),)
        numbers = (x.shape[1], self.width, begin, end, self.size, copies, *x.stride()[:2], EPS)
        launch(_norm_kernel, grid, x, self.scales, *numbers, ROWS=16, BK=256)

    def launch(self, kernel, grid, *arguments, **constants):
        launch(kernel, grid, *arguments, **{**self.constants, **constants})

    def blocks(self, start, stop, kind):
        """Yields the kind, first block and length of the runs of equal blocks of the rows from `start` to `stop`."""
        blocks = range(start // self.block, triton.cdiv(stop, self.block))
        for key, run in itertools.groupby(blocks, kind):
            run = list(run)
            yield key, run[0], len(run)

    def reads(self, block):
        """The number of groups of rows that the last row of a block reads."""
        return min((block * self.block + self.block - 1) // self.keys + 1, self.groups)

    def mix(self, gate, out):
        gate_strides = (0, 0) if gate is None else gate.stride()[:2]
        parts, tensors = out, (self.z, self.prefix, self.v, self.scales, gate)
        kind, groups = self.reads, 1
        if self.split:
            parts = out.new_empty(self.groups, *out.shape, dtype=torch.float32)
            tensors, kind, groups = (*tensors[:4], None), lambda block: 1, self.groups
        for reads, begin, count in self.blocks(self.first, self.context, kind):
            self.launch(
                _mix_kernel,
                (count, self.windows, groups),
                *(*tensors, parts, *self.shape, *self.strides, self.v.stride(0), *gate_strides, begin, out.numel()),
                GROUPS=reads,
                BN=self.constants["BK"],
            )
        if self.split:
            grid = (triton.cdiv(self.queries, 16), self.windows, triton.cdiv(self.width, 128))
            numbers = (self.queries, self.width, self.first, out.numel(), *gate_strides)
            launch(_sum_kernel, grid, parts, gate, out, *numbers, ROWS=16, KEYS=self.keys, BN=128)

    def strips(self, tiles, least):
        """The windows of a strip, such that each multiprocessor has a few programs, and the number of strips."""
        strip = max(self.windows * tiles // (4 * multiprocessors(self.z)), least)
        return strip, triton.cdiv(self.windows, strip)


def contextualizer_triton(z, v, gate, prefix, queries):
    """Computes [`subquad_kernels.contextualizer`]."""
    out = z.new_empty(z.shape[0], queries, z.shape[2])
    _Plan(z, v, prefix, queries, may_split=True).mix(readable(gate), out)
    return out


def contextualizer_triton_backward(grad, z, v, gate, prefix, queries):
    """Gradients of z, v, gate and prefix, those that are given."""
    grad = readable(grad)
    grads = [z.new_empty(z.shape)]
    grad_gate, grad_mixed = None, grad
    if gate is not None:
        grad_gate, grad_mixed = gate.new_empty(gate.shape), (grad * gate).to(z.dtype)
    plan = _Plan(z, v, prefix, queries, grad_mixed)
    if gate is not None:
        plan.mix(grad, grad_gate)
    tensors = (plan.z, plan.prefix, plan.v, v.mT.contiguous(), grad_mixed, plan.scales)
    strides = (*plan.strides, plan.v.stride(0), *grad_mixed.stride()[:2])
    limits = {"LARGEST": torch.finfo(z.dtype).max, "BN": 32}

    def kind(block):
        after = max(plan.first, block * plan.block) // plan.keys
        return plan.reads(block) if (block + 1) * plan.block > plan.first else 0, after

    for (reads, after), begin, count in plan.blocks(plan.shared, plan.context, kind):
        plan.launch(
            _row_gradient_kernel,
            (count, plan.windows),
            *(*tensors, grads[0], plan.windows, 1, *plan.shape, *strides, begin, after * plan.keys),
            READS=reads,
            READERS=plan.groups - after,
            PREFIX=False,
            **limits,
        )

    # The gradients of v and of the prefix are sums over all windows: first over strips, then over all strips.
    tiles = (triton.cdiv(plan.context, plan.block) - plan.first // plan.block) * plan.groups
    strip, strips = plan.strips(tiles, 8)  # otherwise the sums of a strip would be as large as the weights
    grad_v = z.new_zeros(strips, queries, plan.context, dtype=torch.float32)
    plan.launch(
        _weight_gradient_kernel,
        (tiles, strips),
        *(plan.z, plan.prefix, grad_mixed, plan.scales, grad_v, plan.windows, strip, *plan.shape),
        *(*plan.strides, *grad_mixed.stride()[:2], plan.first // plan.block),
    )
    grads.append(v.new_zeros(v.shape))
    grads[1][plan.first :] = grad_v.sum(0).tril(plan.first)
    if gate is not None:
        grads.append(grad_gate)
    if prefix is not None:
        grads.append(prefix.new_zeros(prefix.shape))
        if plan.shared:
            blocks, after = triton.cdiv(plan.shared, plan.block), plan.first // plan.keys
            strip, strips = plan.strips(blocks, 1)
            grad_prefix = z.new_zeros(strips, plan.shared, plan.width, dtype=torch.float32)
            plan.launch(
                _row_gradient_kernel,
                (blocks, strips),
                *(*tensors, grad_prefix, plan.windows, strip, *plan.shape, *strides, 0, after * plan.keys),
                READS=0,
                READERS=plan.groups - after,
                PREFIX=True,
                **limits,
            )
            grads[-1][: plan.shared] = grad_prefix.sum(0)
    return grads

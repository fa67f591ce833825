"""Reading and multiplying tiles of matrices: shared by the Triton kernels of Avey and Avey-B."""

import torch
import triton
import triton.language as tl


@triton.jit
def load_tile(pointers, mask, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def rows_at(x, x_row, rows, last):
    """Pointers to rows of a window; rows outside the window repeat its first or last one."""
    return x + tl.minimum(tl.maximum(rows, 0), last).to(tl.int64) * x_row


@triton.jit
def cells_of(rows, columns, size):
    """Offsets of the values of rows of that size. With 64 bits the compiler keeps one address per row."""
    return rows.to(tl.int64)[:, None] * size + columns.to(tl.int64)[None, :]


@triton.jit
def row_products(
    x_pointers, y_pointers, H, A: tl.constexpr, B: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x · y for A rows of x and B rows of y."""
    sums = tl.zeros((A, B), tl.float32)
    for start in tl.range(0, H, BK, num_stages=STAGES):
        ks = start + tl.arange(0, BK)
        x = load_tile(x_pointers[:, None] + ks[None, :], (ks < H)[None, :], EVEN)
        y = load_tile(y_pointers[None, :] + ks[:, None], (ks < H)[:, None], EVEN)
        sums = tl.dot(x, y, sums, input_precision=PRECISION)
    return sums


@triton.jit
def add_rows(
    sums, weights, step, x, x_row, begin, end, lead, last, columns, H,
    BK: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the rows at the places from `begin` to `end`, times their weights, which are `step` values apart."""
    for start in tl.range(begin, end, BK, num_stages=STAGES):
        places = start + tl.arange(0, BK)
        factors = tl.load(weights + places[None, :] * step)
        pointers = rows_at(x, x_row, places - lead, last)[:, None] + columns[None, :]
        values = load_tile(pointers, (columns < H)[None, :], EVEN)
        sums = tl.dot(factors, values, sums, input_precision=PRECISION)
    return sums


@triton.jit
def norm_kernel(x, scales, rows, C, H, x_window, x_row, added, limit, ROWS: tl.constexpr, BK: tl.constexpr):
    """Writes 1 / sqrt(sum(x²) + added), at most `limit`, of all rows of all windows of C rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = tl.minimum(row, rows - 1)
    x += (here // C).to(tl.int64) * x_window + (here % C).to(tl.int64) * x_row
    squares = tl.zeros((ROWS, BK), tl.float32)
    for start in range(0, H, BK):
        columns = start + tl.arange(0, BK)
        values = tl.load(x[:, None] + columns[None, :], mask=(columns < H)[None, :], other=0.0).to(tl.float32)
        squares += values * values
    tl.store(scales + row, tl.minimum(tl.rsqrt(tl.sum(squares, 1) + added), limit), mask=row < rows)


def product_constants(x, rows):
    """
    The division of products with that many rows, where x (..., width) is an operand: constants for kernels, and the
    columns of a tile of the rows of x. They fit in 99 KB of shared memory, and in the 64 KB of AMD's GPUs. On sm_90 a
    group of four warps then multiplies whole rows of a tile, as Triton requires.
    """
    narrow, hip, even = x.element_size() == 2, torch.version.hip is not None, x.shape[-1] % 128 == 0
    tile = 128 if narrow and rows > 64 else 64
    constants = {
        "ROWS": tile,
        "BK": 64 if narrow and even else 32,
        "EVEN": even,
        "STAGES": 1 if hip else 3,
        "PRECISION": "ieee" if narrow or hip else "tf32x3",
        "num_warps": tile // 16 if narrow else 8,
    }
    return constants, 128 if narrow and even else 64


def aligned(x):
    """Whether each row of x begins at a multiple of 16 bytes."""
    if x is None:
        return True
    return x.data_ptr() % 16 == 0 and all(n * x.element_size() % 16 == 0 for n in x.stride()[:-1])

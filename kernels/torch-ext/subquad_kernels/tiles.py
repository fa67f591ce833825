"""Reading and multiplying tiles of matrices: shared by the Triton kernels of Avey and Avey-B."""

import triton
import triton.language as tl


@triton.jit
def load_tile(pointers, mask, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask, other=0.0)


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


def readable(x):
    """x, or a copy if the values of a row are not adjacent in memory."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def aligned(x):
    """Whether each row of x begins at a multiple of 16 bytes."""
    if x is None:
        return True
    return x.data_ptr() % 16 == 0 and all(n * x.element_size() % 16 == 0 for n in x.stride()[:-1])

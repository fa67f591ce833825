"""
The static layer as Triton kernels.

A program computes a tile of the result of one window, as a sum over all rows of the window. The programs of a window
run one after another, so its rows and v stay in the cache. One kernel computes all products of v: gate * (v x), and in
the backward pass the gradient of the gate, grad * (v x), and the gradient of x, vᵀ g with g = grad * gate.

g is stored when the gradient of the gate is computed, instead of being recomputed. The memory traffic is the same,
nine times x in total. But the gradients of x and v read g once for each of their tiles. Computing it there would read
two tensors each time and pass it through registers, while an operand of a product is copied from memory to shared
memory directly.

For the gradient of v, a program computes a tile over a strip of the sum over all columns of all windows.
"""

import torch
import triton
import triton.language as tl

from ..backend import KernelError, cdiv, dense_rows, launch, multiprocessors
from ..tiles import aligned, load_tile


@triton.jit
def _static_product_kernel(
    v, x, gate, factor, out, product,
    C, width, v_row, v_column, x_window, x_row, gate_window, gate_row, factor_window, factor_row,
    out_window, out_row, product_window, product_row,
    TILE: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of out = gate * (v x); gate may be None. If `factor` is given, also a tile of product = gate * factor."""
    row_tiles, column_tiles = tl.cdiv(C, TILE), tl.cdiv(width, TILE)
    program = tl.program_id(0)
    rows = program % row_tiles * TILE + tl.arange(0, TILE)
    columns = program // row_tiles % column_tiles * TILE + tl.arange(0, TILE)
    window = (program // (row_tiles * column_tiles)).to(tl.int64)
    mask = (rows < C)[:, None] & (columns < width)[None, :]
    if gate is not None:
        gate += window * gate_window + rows[:, None] * gate_row + columns[None, :]
    if factor is not None:  # now, before sums fill the registers
        factor += window * factor_window + rows[:, None] * factor_row + columns[None, :]
        product += window * product_window + rows[:, None] * product_row + columns[None, :]
        both = load_tile(gate, mask, EVEN).to(tl.float32) * load_tile(factor, mask, EVEN).to(tl.float32)
        tl.store(product, both.to(product.dtype.element_ty), mask=mask)

    x += window * x_window + columns[None, :]
    sums = tl.zeros((TILE, TILE), tl.float32)
    for start in tl.range(0, C, BK, num_stages=STAGES):
        ks = start + tl.arange(0, BK)
        pointers = v + rows[:, None] * v_row + ks[None, :] * v_column
        weights = load_tile(pointers, (rows < C)[:, None] & (ks < C)[None, :], EVEN)
        values = load_tile(x + ks[:, None] * x_row, (ks < C)[:, None] & (columns < width)[None, :], EVEN)
        sums = tl.dot(weights, values, sums, input_precision=PRECISION)
    if gate is not None:
        sums *= load_tile(gate, mask, EVEN).to(tl.float32)
    out += window * out_window + rows[:, None] * out_row + columns[None, :]
    tl.store(out, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _static_weight_kernel(
    g, x, grad_v, windows, strip, C, width, g_window, g_row, x_window, x_row,
    TILE: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of the sum of g xᵀ over a strip of steps, BK columns of a window each."""
    tiles, steps = tl.cdiv(C, TILE), tl.cdiv(width, BK)
    rows = tl.program_id(0) // tiles * TILE + tl.arange(0, TILE)
    keys = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    number = tl.program_id(1)
    sums = tl.zeros((TILE, TILE), tl.float32)
    for step in tl.range(number * strip, tl.minimum((number + 1) * strip, windows * steps), num_stages=STAGES):
        window = (step // steps).to(tl.int64)
        ks = step % steps * BK + tl.arange(0, BK)
        pointers = g + window * g_window + rows[:, None] * g_row + ks[None, :]
        grads = load_tile(pointers, (rows < C)[:, None] & (ks < width)[None, :], EVEN)
        pointers = x + window * x_window + keys[None, :] * x_row + ks[:, None]
        values = load_tile(pointers, (keys < C)[None, :] & (ks < width)[:, None], EVEN)
        sums = tl.dot(grads, values, sums, input_precision=PRECISION)
    pointers = grad_v + number.to(tl.int64) * C * C + rows[:, None] * C + keys[None, :]
    tl.store(pointers, sums, mask=(rows < C)[:, None] & (keys < C)[None, :])


def _constants(x, *others):
    """The division of work if `others` are read or written together with x."""
    _, context, width = x.shape
    tensors = [tensor for tensor in (x, *others) if tensor is not None]
    if any(context * tensor.stride(1) >= 2**31 for tensor in tensors):
        raise KernelError("the rows of a window are too far apart for 32-bit offsets")
    narrow, hip = x.element_size() == 2, torch.version.hip is not None
    # With float32 products, masks, or values that are read one by one, a larger tile does not fit in the registers.
    large = narrow and context % 128 == 0 and width % 128 == 0 and all(aligned(tensor) for tensor in tensors)
    tile = 128 if large else 64
    return {
        "TILE": tile,
        "BK": 64 if large else 32,
        "EVEN": context % tile == 0 and width % tile == 0,
        "STAGES": 1 if hip else 3,
        "PRECISION": "ieee" if narrow or hip else "tf32x3",
        # Two groups of warps, as on sm_90, would need a larger tile of half precision.
        "num_warps": 4 if hip or (narrow and not large) else 8,
    }


def _multiply(v, x, gate, out, factor=None, product=None):
    """Writes gate * (v x) to `out` and gate * factor to `product`; a gate of None is left out."""
    windows, context, width = x.shape
    tensors = x, gate, factor, out, product
    constants = _constants(*tensors)
    tiles = cdiv(context, constants["TILE"]) * cdiv(width, constants["TILE"])
    strides = [n for tensor in tensors for n in ((0, 0) if tensor is None else tensor.stride()[:2])]
    launch(
        _static_product_kernel,
        (windows * tiles,),
        *(v, *tensors, context, width, *v.stride(), *strides),
        **constants,
    )


def _readable_parts(features, v, width):
    """x, gate and v in a layout that the kernels can read."""
    tail = dense_rows(features[..., : 2 * width])
    return tail[..., :width], tail[..., width:], v.to(features.dtype).contiguous()


def static_mixing_triton(features, v, width, out):
    """Writes gate * (v x) to `out` (W, C, width), which may be the gate: see [`subquad_kernels.static_mixing`]."""
    x, gate, v = _readable_parts(features, v, width)
    _multiply(v, x, gate, out)


def static_mixing_triton_backward(grad, features, v, width):
    """Gradients of features and v."""
    x, gate, weights = _readable_parts(features, v, width)
    grad_gated = dense_rows(grad[..., :width])
    grad_features = features.new_empty(features.shape)
    grad_x, grad_gate, grad_head = grad_features.tensor_split((width, 2 * width), dim=-1)
    # g uses the memory of the head's gradient, if it fits.
    g = grad_head[..., :width] if grad_head.shape[2] >= width else features.new_empty(x.shape)
    _multiply(weights, x, grad_gated, grad_gate, gate, g)
    _multiply(weights.mT, g, None, grad_x)

    # Strips for two programs per multiprocessor, but not so short that a strip writes as much as it reads.
    windows, context, _ = x.shape
    constants = _constants(x, g)
    tiles, steps = cdiv(context, constants["TILE"]) ** 2, windows * cdiv(width, constants["BK"])
    strip = max(cdiv(steps * tiles, 2 * multiprocessors(x)), 8)
    grad_v = x.new_empty(cdiv(steps, strip), context, context, dtype=torch.float32)
    launch(
        _static_weight_kernel,
        (tiles, grad_v.shape[0]),
        *(g, x, grad_v, windows, strip, context, width, *g.stride()[:2], *x.stride()[:2]),
        **constants,
    )
    grad_head.copy_(grad[..., width:])
    return [grad_features, grad_v.sum(0)]

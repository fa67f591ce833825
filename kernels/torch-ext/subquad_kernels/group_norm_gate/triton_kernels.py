"""
The gated norm of the heads as Triton kernels.

A program computes a few heads of a strip of consecutive rows. So weight and bias are read once, and in the backward
pass their gradients are sums in registers. Mean and variance are recomputed instead of kept. The backward pass
computes more between its loads, so it reads rows ahead of time.
"""

import torch
import triton
import triton.language as tl

from ..backend import cdiv, contiguous, launch, multiprocessors, next_power_of_2
from ..segments import exp


# Arguments that depend on the number of rows. A kernel is not compiled again for special values of them.
OF_LENGTH = ("rows", "strip")


@triton.jit
def _strip(rows, heads, size, strip, HEADS: tl.constexpr, SIZE: tl.constexpr):
    """The first row, the row after the last one, the index of the strip, the columns of the heads and their mask."""
    program = tl.program_id(0)
    blocks = tl.cdiv(heads, HEADS)
    head = program % blocks * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, SIZE)
    columns = head[:, None] * size + channel[None, :]
    mask = (head < heads)[:, None] & (channel < size)[None, :]
    number = (program // blocks).to(tl.int64)
    start = number * strip
    return start, tl.minimum(start + strip, rows), number, columns, mask


@triton.jit
def _load(pointers, mask):
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _normalize(x, mask, share, eps):
    """`share` is 1 / size: a division takes ten instructions."""
    centred = tl.where(mask, x - (tl.sum(x, 1) * share)[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1) * share + eps)[:, None]
    return centred * rstd, rstd


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + exp(-x))


@triton.jit(do_not_specialize=OF_LENGTH)
def _forward_kernel(
    x,
    gate,
    weight,
    bias,
    added,
    out,
    rows,
    heads,
    size,
    eps,
    strip,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SILU: tl.constexpr,
):
    start, stop, _, columns, mask = _strip(rows, heads, size, strip, HEADS, SIZE)
    share = 1.0 / size
    w, b = _load(weight + columns, mask), _load(bias + columns, mask)
    for row in range(start, stop):
        here = row * heads * size
        values = _load(x + here + columns, mask)
        g = _load(gate + here + columns, mask)
        y = _normalize(values, mask, share, eps)[0] * w + b
        if added is not None:
            y += _load(added + here + columns, mask)
        y *= g * _sigmoid(g) if SILU else g
        tl.store(out + here + columns, y.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=OF_LENGTH)
def _backward_kernel(
    grad,
    x,
    gate,
    weight,
    bias,
    added,
    grad_x,
    grad_gate,
    grad_weight,
    grad_bias,
    grad_added,
    rows,
    heads,
    size,
    eps,
    strip,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SILU: tl.constexpr,
):
    """Writes the sums over each strip to `grad_weight` and `grad_bias` (strips, heads * size)."""
    start, stop, number, columns, mask = _strip(rows, heads, size, strip, HEADS, SIZE)
    share = 1.0 / size
    w, b = _load(weight + columns, mask), _load(bias + columns, mask)
    weight_sum, bias_sum = tl.zeros((HEADS, SIZE), tl.float32), tl.zeros((HEADS, SIZE), tl.float32)
    for row in tl.range(start, stop, num_stages=3):
        here = row * heads * size
        values = _load(x + here + columns, mask)
        g = _load(gate + here + columns, mask)
        grad_out = _load(grad + here + columns, mask)
        normed, rstd = _normalize(values, mask, share, eps)

        y = normed * w + b
        if added is not None:
            y += _load(added + here + columns, mask)
        grad_g, grad_scaled = grad_out * y, grad_out * g
        if SILU:
            sigmoid = _sigmoid(g)
            grad_g *= sigmoid * (1.0 + g * (1.0 - sigmoid))
            grad_scaled *= sigmoid
        tl.store(grad_gate + here + columns, grad_g.to(grad_gate.dtype.element_ty), mask=mask)
        if added is not None:
            tl.store(grad_added + here + columns, grad_scaled.to(grad_added.dtype.element_ty), mask=mask)
        weight_sum += grad_scaled * normed
        bias_sum += grad_scaled
        grad_normed = grad_scaled * w
        mean = (tl.sum(grad_normed, 1) * share)[:, None]
        projection = (tl.sum(grad_normed * normed, 1) * share)[:, None]
        grad_values = rstd * (grad_normed - mean - normed * projection)
        tl.store(grad_x + here + columns, grad_values.to(grad_x.dtype.element_ty), mask=mask)

    sums = number * heads * size
    tl.store(grad_weight + sums + columns, weight_sum, mask=mask)
    tl.store(grad_bias + sums + columns, bias_sum, mask=mask)


class _Plan:
    """
    The division of work.

    Args:
        values: number of values of a row per thread.
        programs: number of programs per multiprocessor; more if a strip would be longer than `longest`.
        longest: the maximum number of rows of a strip.
    """

    def __init__(self, x, eps, silu, values, programs, longest=None):
        self.heads, self.size = x.shape[-2:]
        self.rows, self.eps, self.silu = x.numel() // (self.heads * self.size), eps, silu
        self.block = next_power_of_2(self.size)
        self.block_heads = min(next_power_of_2(self.heads), max(128 * values // self.block, 1))
        self.num_warps = min(max(self.block_heads * self.block // (32 * values), 1), 8)
        blocks = cdiv(self.heads, self.block_heads)
        self.strip = cdiv(self.rows * blocks, max(programs * multiprocessors(x), 1))
        self.strip = min(self.strip, longest or self.strip)
        self.strips = cdiv(self.rows, self.strip)
        self.grid = (blocks * self.strips,)

    def launch(self, kernel, *arguments):
        launch(
            kernel,
            self.grid,
            *(*arguments, self.rows, self.heads, self.size, self.eps, self.strip),
            HEADS=self.block_heads,
            SIZE=self.block,
            SILU=self.silu,
            num_warps=self.num_warps,
        )


def group_norm_gate_triton(x, gate, weight, bias, added, eps, silu):
    """Computes [`subquad_kernels.group_norm_gate`]."""
    inputs = contiguous(x, gate, weight, bias, added)
    out = torch.empty_like(inputs[1])
    _Plan(x, eps, silu, values=4, programs=8, longest=8).launch(_forward_kernel, *inputs, out)
    return out


def group_norm_gate_triton_backward(grad, x, gate, weight, bias, added, eps, silu):
    """Gradients of x, gate, weight, bias and `added`, if given."""
    grad, x, gate, weight, bias, added = contiguous(grad, x, gate, weight, bias, added)
    # All programs run at the same time, so that no second wave is needed.
    plan = _Plan(x, eps, silu, values=8, programs=4)
    grad_x, grad_gate = torch.empty_like(x), torch.empty_like(gate)
    grad_added = None if added is None else torch.empty_like(added)
    grad_weight, grad_bias = x.new_empty(2, plan.strips, *weight.shape, dtype=torch.float32).unbind()
    sums = grad_x, grad_gate, grad_weight, grad_bias, grad_added
    plan.launch(_backward_kernel, grad, x, gate, weight, bias, added, *sums)
    grads = [grad_x, grad_gate, grad_weight.sum(0), grad_bias.sum(0)]
    return grads if added is None else [*grads, grad_added]

"""
The router of Raven as Triton kernels: each logit is read once, and log_f, or a gradient, written once.

A program is one warp, with whole rows in its registers, so that sums over the slots need no shared memory; more than
512 slots take more warps. The K-th largest value of a row is the largest number that at least K values reach; it is
found bit by bit. The backward pass repeats the choice instead of storing it.
"""

import torch
import triton
import triton.language as tl

from ..backend import cdiv, contiguous, launch, next_power_of_2


# Number of leading bits of a float32 that distinguish all values of that dtype.
BITS = {torch.bfloat16: 16, torch.float16: 19}


@triton.jit
def _rows(rows, slots, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The rows of the program, the offsets of their slots, and the masks of both."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.arange(0, BLOCK)
    return row, row[:, None] * slots + slot[None, :], (row < rows)[:, None] & (slot < slots)[None, :]


@triton.jit
def _largest(x, slots, topk, BITS: tl.constexpr):
    """True for the `topk` largest of the `slots` values of each row, the first ones if values are equal."""
    ROWS: tl.constexpr = x.shape[0]
    BLOCK: tl.constexpr = x.shape[1]
    # Unsigned integers in the order of the numbers; 0, which no number maps to, after the last slot.
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    # The exclusive or inverts them: the interpreter cannot invert an unsigned integer with every version of NumPy.
    bits = tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    keys = tl.where((tl.arange(0, BLOCK) < slots)[None, :], bits, 0) >> (32 - BITS)
    bit = tl.full((ROWS,), 1 << (BITS - 1), tl.uint32)
    last = tl.zeros((ROWS,), tl.uint32)
    for _ in range(BITS):
        higher = last | bit
        last = tl.where(tl.sum((keys >= higher[:, None]).to(tl.int32), 1) >= topk, higher, last)
        bit = bit >> 1
    above = keys > last[:, None]
    equal = (keys == last[:, None]).to(tl.int32)
    room = topk - tl.sum(above.to(tl.int32), 1)
    return above | ((equal > 0) & (tl.cumsum(equal, 1) <= room[:, None]))


@triton.jit
def _route(
    logits, bias, row, offsets, mask, heads, slots, topk, scale,
    SOFTMAX: tl.constexpr, ALL: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """m and r of [`subquad_kernels.slot_routing`]."""
    x = tl.load(logits + offsets, mask=mask, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        # Zeros if all slots are masked, otherwise the sum is at least 1.
        m = tl.exp(x - tl.maximum(tl.max(x, 1), -3.4e38)[:, None])
        m = m / tl.maximum(tl.sum(m, 1), 1.0)[:, None]
    else:
        m = 1.0 / (1.0 + tl.exp(-x))
    kept = m
    if not ALL:
        if bias is not None:
            slot = tl.arange(0, x.shape[1])
            x = m + tl.load(bias + (row % heads)[:, None] * slots + slot[None, :], mask=mask, other=0.0).to(tl.float32)
        kept = tl.where(_largest(x, slots, topk, BITS), m, 0.0)
    if SOFTMAX:
        r = kept / scale
    else:
        r = kept / (scale * (tl.sum(kept, 1) + 1e-9))[:, None]
    return m, r


@triton.jit
def _decay(log_decay, row, rows, offsets, mask, A_SLOT: tl.constexpr):
    if A_SLOT:
        return tl.load(log_decay + offsets, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.load(log_decay + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]


@triton.jit(do_not_specialize=["rows"])
def _routing_kernel(
    logits, log_decay, bias, out, rows, heads, slots, topk, scale,
    SOFTMAX: tl.constexpr, ALL: tl.constexpr, BITS: tl.constexpr, A_SLOT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, offsets, mask = _rows(rows, slots, ROWS, BLOCK)
    r = _route(logits, bias, row, offsets, mask, heads, slots, topk, scale, SOFTMAX, ALL, BITS)[1]
    tl.store(out + offsets, r * _decay(log_decay, row, rows, offsets, mask, A_SLOT), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _routing_gradient_kernel(
    logits, log_decay, bias, grad, grad_logits, grad_decay, rows, heads, slots, topk, scale,
    SOFTMAX: tl.constexpr, ALL: tl.constexpr, BITS: tl.constexpr, A_SLOT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, offsets, mask = _rows(rows, slots, ROWS, BLOCK)
    m, r = _route(logits, bias, row, offsets, mask, heads, slots, topk, scale, SOFTMAX, ALL, BITS)
    g = tl.load(grad + offsets, mask=mask, other=0.0).to(tl.float32)
    if A_SLOT:
        tl.store(grad_decay + offsets, (g * r).to(grad_decay.dtype.element_ty), mask=mask)
    else:
        tl.store(grad_decay + row, tl.sum(g * r, 1).to(grad_decay.dtype.element_ty), mask=row < rows)
    g *= _decay(log_decay, row, rows, offsets, mask, A_SLOT)
    total = tl.sum(g * r, 1)[:, None]
    if SOFTMAX:
        grad_x = g * r - m * total
    else:
        grad_x = r * (1.0 - m) * (g - scale * total)
    tl.store(grad_logits + offsets, grad_x.to(grad_logits.dtype.element_ty), mask=mask)


def _launch(kernel, logits, log_decay, topk, bias, score, scale, *others):
    heads, slots = logits.shape[2:]
    rows = logits.numel() // slots
    block = next_power_of_2(slots)
    block_rows = min(max(512 // block, 1), 8)
    launch(
        kernel,
        (cdiv(rows, block_rows),),
        *(logits, log_decay, bias, *others, rows, heads, slots, topk, scale),
        SOFTMAX=score == "softmax",
        ALL=topk == slots,
        BITS=BITS.get(logits.dtype, 32) if bias is None else 32,
        A_SLOT=log_decay.dim() == 4,
        ROWS=block_rows,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )


def slot_routing_triton(logits, log_decay, topk, bias, score, scale):
    """Computes [`subquad_kernels.slot_routing`]."""
    logits, log_decay, bias = contiguous(logits, log_decay, bias)
    out = logits.new_empty(logits.shape, dtype=torch.float32)
    _launch(_routing_kernel, logits, log_decay, topk, bias, score, scale, out)
    return out


def slot_routing_triton_backward(grad, logits, log_decay, topk, bias, score, scale):
    """Gradients of the logits and of log_decay."""
    grad, logits, log_decay, bias = contiguous(grad, logits, log_decay, bias)
    grads = [torch.empty_like(logits), torch.empty_like(log_decay)]
    _launch(_routing_gradient_kernel, logits, log_decay, topk, bias, score, scale, grad, *grads)
    return grads

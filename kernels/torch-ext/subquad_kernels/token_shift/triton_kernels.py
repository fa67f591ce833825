"""
The token shift as Triton kernels.

A program computes a block of columns of a strip of consecutive tokens, with the previous token in registers, so that
each x is read once. The backward pass goes from the last token to the first, because each token adds to the gradient
of the one before it, and sums the gradient of mu over the strip. It reads tokens ahead of time. A strip also
reads one token of its neighbour.
"""

import torch
import triton
import triton.language as tl

from ..backend import cdiv, contiguous, launch, multiprocessors, next_power_of_2


# Arguments that depend on the number of tokens. They do not specialize a kernel.
OF_LENGTH = ("tokens", "length", "starts_stride", "strip")


@triton.jit
def _strip(length, width, strip, COLUMNS: tl.constexpr):
    """The row, the first token of the strip, the token after its last one, its index, the columns and their mask."""
    program = tl.program_id(0)
    blocks, strips = tl.cdiv(width, COLUMNS), tl.cdiv(length, strip)
    columns = program % blocks * COLUMNS + tl.arange(0, COLUMNS)
    program = program // blocks
    start = program % strips * strip
    return (program // strips).to(tl.int64), start, tl.minimum(start + strip, length), program.to(tl.int64), columns


@triton.jit
def _load(pointers, mask):
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_each(pointer, stride, columns, mask, N: tl.constexpr):
    loaded = ()
    for i in tl.static_range(N):
        loaded += (_load(pointer + i * stride + columns, mask),)
    return loaded


@triton.jit
def _load_weights(mus, offset, here, plane, columns, mask, N: tl.constexpr):
    """mu + offset, loaded before the stores of a token: the compiler does not move loads ahead of stores."""
    weights = mus
    if offset is not None:
        weights = ()
        for i in tl.static_range(N):
            weights += (mus[i] + _load(offset + here + i * plane + columns, mask),)
    return weights


@triton.jit
def _load_previous(x, state, row, t, length, width, columns, mask):
    previous = _load(x + (row * length + t - 1) * width + columns, tl.where(t > 0, mask, False))
    if state is not None:
        previous += _load(state + row * width + columns, tl.where(t > 0, False, mask))
    return previous


@triton.jit(do_not_specialize=OF_LENGTH)
def _forward_kernel(
    x,
    state,
    mu,
    offset,
    starts,
    y,
    length,
    width,
    tokens,
    starts_stride,
    strip,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row, start, stop, _, columns = _strip(length, width, strip, COLUMNS)
    mask = columns < width
    plane = tl.cast(tokens, tl.int64) * width

    mus = _load_each(mu, width, columns, mask, N)
    previous = _load_previous(x, state, row, start, length, width, columns, mask)
    for t in range(start, stop):
        here = (row * length + t) * width
        current = _load(x + here + columns, mask)
        weights = _load_weights(mus, offset, here, plane, columns, mask, N)
        if starts is not None:
            previous = tl.where(tl.load(starts + row * starts_stride + t), 0.0, previous)
        delta = previous - current
        for i in tl.static_range(N):
            mixed = current + delta * weights[i]
            tl.store(y + here + i * plane + columns, mixed.to(y.dtype.element_ty), mask=mask)
        previous = current


@triton.jit
def _given(grad, mus, offset, starts, t, here, plane, columns, mask, N: tl.constexpr):
    """The contribution of token t to the gradient of the token before it."""
    grads = _load_each(grad + here, plane, columns, mask, N)
    weights = _load_weights(mus, offset, here, plane, columns, mask, N)
    given = grads[0] * weights[0]
    for i in tl.static_range(1, N):
        given += grads[i] * weights[i]
    if starts is not None:
        given = tl.where(tl.load(starts + t), 0.0, given)
    return given


@triton.jit(do_not_specialize=OF_LENGTH)
def _backward_kernel(
    grad,
    x,
    state,
    mu,
    offset,
    starts,
    grad_x,
    grad_state,
    grad_mu,
    grad_offset,
    length,
    width,
    tokens,
    starts_stride,
    strip,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Writes the sums over each strip to `grad_mu` (strips, N, width)."""
    row, start, stop, number, columns = _strip(length, width, strip, COLUMNS)
    mask = columns < width
    plane = tl.cast(tokens, tl.int64) * width
    if starts is not None:
        starts += row * starts_stride

    mus = _load_each(mu, width, columns, mask, N)
    sums = ()
    for _ in tl.static_range(N):
        sums += (tl.zeros((COLUMNS,), tl.float32),)

    given = tl.zeros((COLUMNS,), tl.float32)
    if stop < length:
        here = (row * length + stop) * width
        given = _given(grad, mus, offset, starts, stop, here, plane, columns, mask, N)
    current = _load(x + (row * length + stop - 1) * width + columns, mask)
    for step in tl.range(stop - start, num_stages=3):
        t = stop - 1 - step
        here = (row * length + t) * width
        grads = _load_each(grad + here, plane, columns, mask, N)
        weights = _load_weights(mus, offset, here, plane, columns, mask, N)
        previous = _load_previous(x, state, row, t, length, width, columns, mask)
        delta = previous - current
        if starts is not None:
            first = tl.load(starts + t)
            delta = tl.where(first, -current, delta)

        own = given
        given = tl.zeros((COLUMNS,), tl.float32)
        new_sums = ()
        for i in tl.static_range(N):
            own += grads[i] * (1.0 - weights[i])
            given += grads[i] * weights[i]
            grad_weight = grads[i] * delta
            new_sums += (sums[i] + grad_weight,)
            if offset is not None:
                pointers = grad_offset + here + i * plane + columns
                tl.store(pointers, grad_weight.to(grad_offset.dtype.element_ty), mask=mask)
        sums = new_sums
        if starts is not None:
            given = tl.where(first, 0.0, given)
        tl.store(grad_x + here + columns, own.to(grad_x.dtype.element_ty), mask=mask)
        current = previous

    if state is not None:
        given = given.to(grad_state.dtype.element_ty)
        tl.store(grad_state + row * width + columns, given, mask=tl.where(start > 0, False, mask))
    for i in tl.static_range(N):
        tl.store(grad_mu + (number * N + i) * width + columns, sums[i], mask=mask)


class _Plan:
    """The division of work: `share` columns per thread, strips short enough to keep all multiprocessors busy."""

    def __init__(self, x, n, starts, share, longest):
        batch, self.length, self.width = x.shape
        self.tokens, self.n = batch * self.length, n
        self.starts_stride = 0 if starts is None or starts.shape[0] == 1 else self.length
        self.columns = min(next_power_of_2(self.width), 512)
        self.num_warps = max(self.columns // (32 * share), 1)
        blocks = cdiv(self.width, self.columns)
        self.strip = longest
        while self.strip > 4 and batch * blocks * cdiv(self.length, self.strip) < 8 * multiprocessors(x):
            self.strip //= 2
        self.strips = batch * cdiv(self.length, self.strip)
        self.grid = (blocks * self.strips,)

    def launch(self, kernel, *arguments):
        launch(
            kernel,
            self.grid,
            *(*arguments, self.length, self.width, self.tokens, self.starts_stride, self.strip),
            N=self.n,
            COLUMNS=self.columns,
            num_warps=self.num_warps,
        )


def token_shift_triton(x, state, mu, offset, starts):
    """Computes [`subquad_kernels.token_shift`]."""
    x, state, mu, offset, starts = contiguous(x, state, mu, offset, starts)
    y = x.new_empty(mu.shape[0], *x.shape)
    plan = _Plan(x, mu.shape[0], starts, share=16 // x.element_size(), longest=8)
    plan.launch(_forward_kernel, x, state, mu, offset, starts, y)
    return y


def token_shift_triton_backward(grad, x, state, mu, offset, starts):
    """Gradients of x, state, mu and offset, if given."""
    x, state, mu, offset, starts = contiguous(x, state, mu, offset, starts)
    # The sums of each strip are written and read once, in float32. With 32 tokens they are little traffic.
    # Eight columns per thread would need 216 registers if n = 5.
    plan = _Plan(x, mu.shape[0], starts, share=4, longest=32)
    grad_x = torch.empty_like(x)
    grad_state = None if state is None else torch.empty_like(state)
    grad_mu = x.new_empty(plan.strips, *mu.shape, dtype=torch.float32)
    grad_offset = None if offset is None else torch.empty_like(offset)
    plan.launch(
        _backward_kernel,
        *(grad.contiguous(), x, state, mu, offset, starts),
        *(grad_x, grad_state, grad_mu, grad_offset),
    )
    grads = [grad_x, grad_state, grad_mu.sum(0), grad_offset]
    return [tensor for tensor in grads if tensor is not None]

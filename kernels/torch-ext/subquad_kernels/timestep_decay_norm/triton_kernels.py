"""
Timestep decay normalization as Triton kernels.

The rows are cut into strips of tokens. A program holds a strip of a few groups in registers, so that moments are sums
and a scan in registers, and only the results are written. One kernel reads x to compute what each strip adds to the
statistics, one passes them along the strips, one reads x again and writes out. The backward pass does the same with
the gradient of the statistics, from the last strip to the first. A single strip only needs the last kernel.

A decay is kept as beta^n - 1, because rounding beta would show in a mean over ten thousand tokens.
"""

import functools

import torch
import triton
import triton.language as tl

from ..backend import cdiv, contiguous, launch, multiprocessors, next_power_of_2
from ..segments import expm1
from .eager import log


# Largest number of strips that the statistics are passed along at a time.
PASSED = 512


@triton.jit
def _indices(groups, strips, TOKENS: tl.constexpr, GROUPS: tl.constexpr):
    """The row, the strip, the tokens and the groups of the program."""
    program = tl.program_id(0)
    blocks = tl.cdiv(groups, GROUPS)
    group = program % blocks * GROUPS + tl.arange(0, GROUPS)
    strip = program // blocks % strips
    row = (program // blocks // strips).to(tl.int64)
    return row, strip, strip * TOKENS + tl.arange(0, TOKENS), group


@triton.jit
def _columns(group, groups, size, SIZE: tl.constexpr):
    """The channels of the groups, (GROUPS, SIZE), and their mask."""
    channel = tl.arange(0, SIZE)
    return group[:, None] * size + channel[None, :], (group < groups)[:, None] & (channel < size)[None, :]


@triton.jit
def _cells(row, token, length, columns, there, width):
    """The offsets of the channels of the tokens, (TOKENS, GROUPS, SIZE), and their mask."""
    offsets = (row * length + token)[:, None, None] * width + columns[None, :, :]
    return offsets, (token < length)[:, None, None] & there[None, :, :]


@triton.jit
def _load(pointers, mask):
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _flags(starts, real, starts_stride, row, token, length, there):
    """For each token whether it continues the statistics before it, and whether it counts: 1.0 or 0.0."""
    keep = tl.full(token.shape, 1.0, tl.float32)
    if starts is not None:
        keep = tl.where(tl.load(starts + row * starts_stride + token, mask=there, other=0) != 0, 0.0, 1.0)
    counts = there
    if real is not None:
        counts = tl.load(real + row * length + token, mask=there, other=0) != 0
    return keep, counts.to(tl.float32)


@triton.jit
def _after(before, keep, change, added):
    """The statistics after some tokens, from the statistics before and the tokens' effects: keep, decay, add."""
    return tl.where(keep > 0, before + before * change, 0.0) + added


@triton.jit
def _join(keep_a, p_a, m_a, q_a, v_a, n_a, keep_b, p_b, m_b, q_b, v_b, n_b):
    """The combined effect of two consecutive spans of tokens: keep or drop, decay (by 1 + p, 1 + q), add, count."""
    m, v = _after(m_a, keep_b, p_b, m_b), _after(v_a, keep_b, q_b, v_b)
    return keep_a * keep_b, p_a + p_b + p_a * p_b, m, q_a + q_b + q_a * q_b, v, n_a * keep_b + n_b


@triton.jit
def _scan(keep, counts, m, v, gain1, gain2, REVERSE: tl.constexpr):
    """The combined effect of the tokens up to each one (in reverse: from it on), (TOKENS, GROUPS) each."""
    keep, counts = (keep[:, None] + tl.zeros_like(m), counts[:, None] + tl.zeros_like(m))
    return tl.associative_scan((keep, -gain1 * counts, m, -gain2 * counts, v, counts), 0, _join, reverse=REVERSE)


@triton.jit
def _token(x, number):
    """One token of (TOKENS, ...)."""
    token = tl.arange(0, x.shape[0])
    return tl.sum(tl.where((token == number)[:, None], x, 0.0), 0)


@triton.jit
def _load_state(edge, inner, row, strip, strips, group, groups, which: tl.constexpr, REVERSE: tl.constexpr):
    """
    Row `which` of the statistics that enter a strip: from `edge` (batch, 3, groups) for the first (in reverse the
    last) strip, from `inner` (batch, strips - 1, 3, groups) for the others.
    """
    outer = strip == (strips - 1 if REVERSE else 0)
    number = row * (strips - 1) + strip - (0 if REVERSE else 1)
    there = group < groups
    state = _load(inner + (number * 3 + which) * groups + group, tl.where(outer, False, there))
    if edge is not None:
        state += _load(edge + (row * 3 + which) * groups + group, tl.where(outer, there, False))
    return state


@triton.jit
def _store_state(state, row, group, groups, m, v, n):
    there = group < groups
    tl.store(state + (row * 3 + 0) * groups + group, m.to(state.dtype.element_ty), mask=there)
    tl.store(state + (row * 3 + 1) * groups + group, v.to(state.dtype.element_ty), mask=there)
    tl.store(state + (row * 3 + 2) * groups + group, n.to(state.dtype.element_ty), mask=there)


@triton.jit
def _store_added(added, row, strip, strips, group, groups, m, v, n, keep):
    """Stores the effect of a strip in `added` (batch, strips, 4, groups)."""
    there = group < groups
    here = added + (row * strips + strip) * 4 * groups + group
    tl.store(here, m, mask=there)
    tl.store(here + groups, v, mask=there)
    tl.store(here + 2 * groups, n, mask=there)
    tl.store(here + 3 * groups, keep, mask=there)


@triton.jit
def _moments(values, mask, keep, counts, size, gain1, gain2):
    """The mean of each token, (TOKENS, GROUPS), and the scan of the moments."""
    mean = tl.sum(values, 2) / size
    centred = tl.where(mask, values - mean[:, :, None], 0.0)
    variance = tl.sum(centred * centred, 2) / size
    counted = counts[:, None]
    return mean, _scan(keep, counts, gain1 * counted * mean, gain2 * counted * variance, gain1, gain2, False)


@triton.jit
def _correction(n, log_beta):
    """1 / (1 - beta^n); 0 before the first real token."""
    return tl.where(n > 0, -1.0 / expm1(tl.maximum(n, 1.0) * log_beta), 0.0)


@triton.jit
def _follow(
    values, mask, keep, counts, initial, entering, row, strip, strips, group, groups, size,
    log1, log2, gain1, gain2, eps,
):  # fmt: skip
    """The mean of each token; m, v, n after it; the corrections, m' and 1 / sqrt(v' + eps); the flags of the strip."""
    m = _load_state(initial, entering, row, strip, strips, group, groups, 0, False)[None, :]
    v = _load_state(initial, entering, row, strip, strips, group, groups, 1, False)[None, :]
    n = _load_state(initial, entering, row, strip, strips, group, groups, 2, False)[None, :]
    mean, scanned = _moments(values, mask, keep, counts, size, gain1, gain2)
    keeps, p, added_m, q, added_v, counted = scanned
    m, v, n = _after(m, keeps, p, added_m), _after(v, keeps, q, added_v), n * keeps + counted
    correction1, correction2 = _correction(n, log1), _correction(n, log2)
    rstd = tl.rsqrt(tl.where(n > 0, v * correction2, 1.0) + eps)
    return mean, m, v, n, correction1, correction2, m * correction1, rstd, keeps, counted


@triton.jit
def _added_kernel(
    x, starts, real, added, length, groups, size, strips, starts_stride, gain1, gain2,
    TOKENS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The effect of each strip on the statistics."""
    row, strip, token, group = _indices(groups, strips, TOKENS, GROUPS)
    columns, there = _columns(group, groups, size, SIZE)
    offsets, mask = _cells(row, token, length, columns, there, groups * size)
    keep, counts = _flags(starts, real, starts_stride, row, token, length, token < length)
    keeps, _, m, _, v, n = _moments(_load(x + offsets, mask), mask, keep, counts, size, gain1, gain2)[1]
    last = TOKENS - 1
    _store_added(
        added,
        row,
        strip,
        strips,
        group,
        groups,
        _token(m, last),
        _token(v, last),
        _token(n, last),
        _token(keeps, last),
    )


@triton.jit
def _pass_kernel(
    added, edge, inner, final, groups, strips, log1, log2,
    STRIPS: tl.constexpr, GROUPS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """
    From the effects of the strips, `added`, and the statistics that enter the first one (in reverse the last), `edge`,
    computes the statistics that enter the others, `inner`, and that leave the last one, `final`.
    """
    blocks = tl.cdiv(groups, GROUPS)
    group = tl.program_id(0) % blocks * GROUPS + tl.arange(0, GROUPS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    there = group < groups
    m, v = tl.zeros((GROUPS,), tl.float32), tl.zeros((GROUPS,), tl.float32)
    n = tl.zeros((GROUPS,), tl.float32)
    if edge is not None:
        m = _load(edge + row * 3 * groups + group, there)
        v = _load(edge + (row * 3 + 1) * groups + group, there)
        if not REVERSE:  # the number of tokens has no gradient
            n = _load(edge + (row * 3 + 2) * groups + group, there)
    for begin in range(0, strips, STRIPS):
        number = begin + tl.arange(0, STRIPS)
        strip = strips - 1 - number if REVERSE else number
        mask = (number < strips)[:, None] & there[None, :]
        here = added + (row * strips + strip)[:, None] * 4 * groups + group[None, :]
        m_added, v_added = _load(here, mask), _load(here + groups, mask)
        counts = _load(here + 2 * groups, mask)
        keep = tl.load(here + 3 * groups, mask=mask, other=1.0)
        scanned = tl.associative_scan(
            (keep, expm1(counts * log1), m_added, expm1(counts * log2), v_added, counts), 0, _join
        )
        keep, p, m_added, q, v_added, counts = scanned
        m_after, v_after = _after(m[None, :], keep, p, m_added), _after(v[None, :], keep, q, v_added)
        n_after = n[None, :] * keep + counts
        enters = strip - 1 if REVERSE else strip  # its index in `inner`
        here = inner + (row * (strips - 1) + enters)[:, None] * 3 * groups + group[None, :]
        inside = mask & (number < strips - 1)[:, None]
        tl.store(here, m_after, mask=inside)
        tl.store(here + groups, v_after, mask=inside)
        tl.store(here + 2 * groups, n_after, mask=inside)
        m, v, n = _token(m_after, STRIPS - 1), _token(v_after, STRIPS - 1), _token(n_after, STRIPS - 1)
    if final is not None:
        if REVERSE:
            n = tl.zeros_like(n)
        _store_state(final, row, group, groups, m, v, n)


@triton.jit
def _forward_kernel(
    x, weight, bias, initial, entering, starts, real, out, final, length, groups, size, strips, starts_stride,
    log1, log2, gain1, gain2, eps,
    TOKENS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row, strip, token, group = _indices(groups, strips, TOKENS, GROUPS)
    columns, there = _columns(group, groups, size, SIZE)
    offsets, mask = _cells(row, token, length, columns, there, groups * size)
    values = _load(x + offsets, mask)
    keep, counts = _flags(starts, real, starts_stride, row, token, length, token < length)
    followed = _follow(
        values, mask, keep, counts, initial, entering, row, strip, strips, group, groups, size,
        log1, log2, gain1, gain2, eps,
    )  # fmt: skip
    _, m, v, n, _, _, shift, rstd, _, _ = followed
    normed = (values - shift[:, :, None]) * rstd[:, :, None]
    if weight is not None:
        normed *= (_load(weight + columns, there) + 1.0)[None, :, :]
    if bias is not None:
        normed += _load(bias + columns, there)[None, :, :]
    tl.store(out + offsets, normed.to(out.dtype.element_ty), mask=mask)
    if final is not None:
        tl.debug_barrier()  # `final` may be `initial`: all warps must have read it
        last = TOKENS - 1
        _store_state(final, row, group, groups, _token(m, last), _token(v, last), _token(n, last))


@triton.jit
def _gradients(
    grad, x, weight, initial, entering, starts, real, grad_weight, grad_bias,
    row, strip, strips, token, group, groups, size, columns, there, offsets, mask, length, starts_stride,
    log1, log2, gain1, gain2, eps,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """
    For a strip: x and the gradient of normed x; the mean and 1 / sqrt(v' + eps) of each token; each token's flags
    `keep` and `counts`; the combined effect of the tokens up to each one; the reverse scan of the gradients of m and
    v. Writes the sums over the strip of the gradients of weight and bias.
    """
    values, given = _load(x + offsets, mask), _load(grad + offsets, mask)
    keep, counts = _flags(starts, real, starts_stride, row, token, length, token < length)
    followed = _follow(
        values, mask, keep, counts, initial, entering, row, strip, strips, group, groups, size,
        log1, log2, gain1, gain2, eps,
    )  # fmt: skip
    mean, _, _, _, correction1, correction2, shift, rstd, keeps, counted = followed
    normed = tl.where(mask, (values - shift[:, :, None]) * rstd[:, :, None], 0.0)
    # The sums come before the scan, while fewer values are in registers.
    sums = (row * strips + strip) * groups * size + columns
    if grad_weight is not None:
        tl.store(grad_weight + sums, tl.sum(given * normed, 0), mask=there)
    if grad_bias is not None:
        tl.store(grad_bias + sums, tl.sum(given, 0), mask=there)
    grad_normed = given
    if weight is not None:
        grad_normed *= (_load(weight + columns, there) + 1.0)[None, :, :]
    grad_m = -correction1 * rstd * tl.sum(grad_normed, 2)
    grad_v = -0.5 * correction2 * rstd * rstd * tl.sum(grad_normed * normed, 2)
    # The gradient reaches the token before by the fraction of its statistics that the token keeps.
    later = token + 1
    inside = (later < length) & (later < (strip + 1) * TOKENS)
    later_keep, later_counts = _flags(starts, real, starts_stride, row, later, length, inside)
    scanned = _scan(later_keep, later_counts, grad_m, grad_v, gain1, gain2, True)
    return values, grad_normed, mean, rstd, keep, counts, keeps, counted, scanned


@triton.jit
def _leaving(scanned, keep, counts, gain1, gain2):
    """The part of the gradient of a token's statistics that reaches the statistics before it."""
    m, v = scanned
    keep, counts = _token(keep[:, None], 0), _token(counts[:, None], 0)
    return _after(_token(m, 0), keep, -gain1 * counts, 0.0), _after(_token(v, 0), keep, -gain2 * counts, 0.0)


@triton.jit
def _added_gradient_kernel(
    grad, x, weight, initial, entering, starts, real, added, length, groups, size, strips, starts_stride,
    log1, log2, gain1, gain2, eps,
    TOKENS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The effect of each strip on the gradient of the statistics."""
    row, strip, token, group = _indices(groups, strips, TOKENS, GROUPS)
    columns, there = _columns(group, groups, size, SIZE)
    offsets, mask = _cells(row, token, length, columns, there, groups * size)
    gradients = _gradients(
        grad, x, weight, initial, entering, starts, real, None, None,
        row, strip, strips, token, group, groups, size, columns, there, offsets, mask, length, starts_stride,
        log1, log2, gain1, gain2, eps, TOKENS,
    )  # fmt: skip
    _, _, _, _, keep, counts, keeps, counted, scanned = gradients
    m, v = _leaving((scanned[2], scanned[4]), keep, counts, gain1, gain2)
    last = TOKENS - 1
    _store_added(added, row, strip, strips, group, groups, m, v, _token(counted, last), _token(keeps, last))


@triton.jit
def _backward_kernel(
    grad, x, weight, initial, entering, starts, real, grad_state, reaching, grad_x, grad_weight, grad_bias,
    grad_initial, length, groups, size, strips, starts_stride, log1, log2, gain1, gain2, eps,
    TOKENS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Writes the sums over each strip to `grad_weight` and `grad_bias` (batch * strips, width)."""
    row, strip, token, group = _indices(groups, strips, TOKENS, GROUPS)
    columns, there = _columns(group, groups, size, SIZE)
    offsets, mask = _cells(row, token, length, columns, there, groups * size)
    after_m = _load_state(grad_state, reaching, row, strip, strips, group, groups, 0, True)[None, :]
    after_v = _load_state(grad_state, reaching, row, strip, strips, group, groups, 1, True)[None, :]
    gradients = _gradients(
        grad, x, weight, initial, entering, starts, real, grad_weight, grad_bias,
        row, strip, strips, token, group, groups, size, columns, there, offsets, mask, length, starts_stride,
        log1, log2, gain1, gain2, eps, TOKENS,
    )  # fmt: skip
    values, grad_normed, mean, rstd, keep, counts, _, _, scanned = gradients
    keeps, p, m, q, v, _ = scanned
    m, v = _after(after_m, keeps, p, m), _after(after_v, keeps, q, v)
    grad_mean = gain1 * counts[:, None] * m / size
    grad_variance = 2.0 * gain2 * counts[:, None] * v / size
    values = (
        grad_normed * rstd[:, :, None]
        + grad_mean[:, :, None]
        + grad_variance[:, :, None] * (values - mean[:, :, None])
    )
    tl.store(grad_x + offsets, values.to(grad_x.dtype.element_ty), mask=mask)
    if grad_initial is not None:
        m, v = _leaving((m, v), keep, counts, gain1, gain2)
        _store_state(grad_initial, row, group, groups, m, v, tl.zeros_like(m))


@functools.lru_cache
def _divide(batch, length, strips, groups, size, strip, programs):
    """The grid and the constants of the kernels, for a device that runs that many programs."""
    tokens, block = min(strip, next_power_of_2(length)), next_power_of_2(size)
    # Limits for the values of a tile, and of a scan, which has six tensors.
    block_groups = min(next_power_of_2(groups), max(min(4096 // block, 512) // tokens, 1))
    while block_groups > 1 and batch * strips * cdiv(groups, block_groups) < programs:
        block_groups //= 2
    num_warps = min(max(tokens * block_groups * block // 1024, 1), 8)
    constants = {"TOKENS": tokens, "GROUPS": block_groups, "SIZE": block, "num_warps": num_warps}
    return (batch * strips * cdiv(groups, block_groups),), constants


class _Plan:
    """The division of work. `strip`: the number of tokens of a strip, as many as a program can hold."""

    def __init__(self, x, starts, real, groups, beta1, beta2, strip):
        self.batch, self.length, width = x.shape
        self.groups, self.size = groups, width // groups
        self.starts, self.real = starts, real
        self.starts_stride = 0 if starts is None or starts.shape[0] == 1 else self.length
        self.logs, self.gains = (log(beta1), log(beta2)), (1 - beta1, 1 - beta2)
        self.strips = cdiv(self.length, strip)
        numbers = self.batch, self.length, self.strips, groups, self.size, strip
        self.grid, self.constants = _divide(*numbers, multiprocessors(x))

    def launch(self, kernel, *arguments):
        launch(kernel, self.grid, *arguments, **self.constants)

    @property
    def sizes(self):
        return self.length, self.groups, self.size, self.strips, self.starts_stride

    def added(self, x):
        """An empty tensor for the effects of the strips on the statistics, or on their gradient."""
        return x.new_empty(self.batch, self.strips, 4, self.groups, dtype=torch.float32)

    def pass_on(self, added, edge, inner, final, reverse):
        # Two sizes serve all lengths, so that a new length compiles nothing. Few groups leave more programs.
        block = min(64 if self.strips <= 64 else 512, PASSED)
        block_groups = min(next_power_of_2(self.groups), max(256 // block, 2))
        launch(
            _pass_kernel,
            (self.batch * cdiv(self.groups, block_groups),),
            *(added, edge, inner, final, self.groups, self.strips, *self.logs),
            STRIPS=block,
            GROUPS=block_groups,
            REVERSE=reverse,
        )


def timestep_decay_norm_triton(x, weight, bias, initial_state, starts, real, groups, beta1, beta2, eps, strip):
    """
    Computes [`subquad_kernels.timestep_decay_norm`]. Also returns the states that enter all strips except the first,
    in a tensor (B, strips + 1, 3, groups) with room for two more.
    """
    x, weight, bias, initial_state, starts, real = contiguous(x, weight, bias, initial_state, starts, real)
    plan = _Plan(x, starts, real, groups, beta1, beta2, strip)
    out = torch.empty_like(x)
    final = x.new_empty(x.shape[0], 3, groups, dtype=torch.float32)
    entering = x.new_zeros(x.shape[0], plan.strips + 1, 3, groups, dtype=torch.float32)
    if plan.strips > 1:
        added = plan.added(x)
        plan.launch(_added_kernel, x, plan.starts, plan.real, added, *plan.sizes, *plan.gains)
        plan.pass_on(added, initial_state, entering, final, reverse=False)
    plan.launch(
        _forward_kernel,
        *(x, weight, bias, initial_state, entering, starts, real, out, final if plan.strips == 1 else None),
        *(*plan.sizes, *plan.logs, *plan.gains, eps),
    )
    return out, final, entering


def timestep_decay_norm_triton_step(x, weight, bias, state, new_state, starts, real, groups, beta1, beta2, eps):
    """
    One token: x (B, 1, D), state (B, 3, groups) in float32; if it is None, `new_state` holds it. Writes the state
    after the token to `new_state`. Returns out (B, 1, D).
    """
    x, weight, bias, starts, real = contiguous(x, weight, bias, starts, real)
    plan, out = _Plan(x, starts, real, groups, beta1, beta2, 1), torch.empty_like(x)
    # There is one strip. The kernel does not read states of other strips; `new_state` is a placeholder for them.
    states = new_state if state is None else state, new_state
    numbers = *plan.sizes, *plan.logs, *plan.gains, eps
    plan.launch(_forward_kernel, x, weight, bias, *states, starts, real, out, new_state, *numbers)
    return out


def timestep_decay_norm_triton_backward(
    grad, grad_state, x, weight, bias, initial_state, entering, starts, real, groups, beta1, beta2, eps, strip
):
    """Gradients of x, weight, bias and the state, if given."""
    grad, grad_state, x, weight = contiguous(grad, grad_state, x, weight)
    initial_state, entering, starts, real = contiguous(initial_state, entering, starts, real)
    plan = _Plan(x, starts, real, groups, beta1, beta2, strip)
    grad_x, reaching = torch.empty_like(x), torch.empty_like(entering)
    grad_initial = None if initial_state is None else torch.empty_like(initial_state)
    grad_weight, grad_bias = (
        None if w is None else x.new_empty(x.shape[0] * plan.strips, *w.shape, dtype=torch.float32)
        for w in (weight, bias)
    )
    inputs = grad, x, weight, initial_state, entering, starts, real
    numbers = *plan.sizes, *plan.logs, *plan.gains, eps
    if plan.strips > 1:
        added = plan.added(x)
        plan.launch(_added_gradient_kernel, *inputs, added, *numbers)
        plan.pass_on(added, grad_state, reaching, grad_initial, reverse=True)
    plan.launch(
        _backward_kernel,
        *(*inputs, grad_state, reaching, grad_x, grad_weight, grad_bias),
        *(grad_initial if plan.strips == 1 else None, *numbers),
    )
    sums = [None if g is None else g.sum(0) for g in (grad_weight, grad_bias)]
    return [g for g in (grad_x, *sums, grad_initial) if g is not None]

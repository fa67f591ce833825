"""
Timestep decay normalization in plain torch, parallel over time, for any device.

The moments of all tokens are sums over earlier tokens, each decayed by a power of beta. Within a chunk, this is a
product with a triangular matrix of powers; between chunks, the sums that leave the chunks are summed in the same way.
The state counts as the token before the first. No factor is above 1 or a product of rounded factors.
"""

import math

import torch
import torch.nn.functional as F

from ..backend import cast, widest
from .strips import shape_of_entering


CHUNK = 64
# Replaces the logarithm of 0, whose multiples would be NaN. Its exponential is also 0.
LOG_ZERO = -1e4


def log(beta: float) -> float:
    return math.log(beta) if beta > 0 else LOG_ZERO


def timestep_decay_norm_step(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    state: torch.Tensor | None,
    starts: torch.Tensor | None,
    real: torch.Tensor | None,
    groups: int,
    beta1: float,
    beta2: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: x (B, 1, D), state (B, 3, groups), all of one dtype."""
    if state is None:
        state = x.new_zeros(x.shape[0], 3, groups)
    if starts is not None:
        state = state.masked_fill(starts.unsqueeze(-1), 0.0)
    m, v, n = state.unbind(1)
    rows, mean, variance = _moments(x, groups)
    # m + p (mean - m), without beta: over ten thousand tokens its rounding error would add up.
    p1, p2, one = 1 - beta1, 1 - beta2, 1
    if real is not None:
        p1, p2, one = (p * real.to(x.dtype) for p in (p1, p2, one))
    m, v, n = torch.lerp(m, mean[:, 0], p1), torch.lerp(v, variance[:, 0], p2), n.detach() + one
    shift, rstd = _statistics(m, v, *_divisors(n, beta1, beta2, real), eps)
    return _affine((rows - shift[:, None, :, None]) * rstd[:, None, :, None], weight, bias), torch.stack((m, v, n), 1)


def timestep_decay_norm_step_inplace(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    state: torch.Tensor | None,
    new_state: torch.Tensor,
    starts: torch.Tensor | None,
    real: torch.Tensor | None,
    groups: int,
    beta1: float,
    beta2: float,
    eps: float,
) -> torch.Tensor:
    """
    One token in float32: see [`timestep_decay_norm_step`]. The state after it is written to `new_state`, which also
    holds the state before it if `state` is None.
    """
    tensors = cast(torch.float32, x, weight, bias, new_state if state is None else state)
    out, after = timestep_decay_norm_step(*tensors, starts, real, groups, beta1, beta2, eps)
    new_state.copy_(after)
    return out.to(x.dtype)


def _moments(x, groups):
    """x by groups, (B, T, groups, size), and the mean and variance of each."""
    rows = torch.unflatten(x, -1, (groups, -1))
    mean = rows.mean(-1)
    # On a CPU torch.var takes thirty times as long.
    variance = torch.linalg.vector_norm(rows - mean.unsqueeze(-1), dim=-1).square() / rows.shape[-1]
    return rows, mean, variance


def _divisors(n, beta1, beta2, real):
    """1 - beta^n for both betas, infinity for padding before the first real token; a flag for such padding, 1 or 0."""
    if real is None:
        return -torch.expm1(n * log(beta1)), -torch.expm1(n * log(beta2)), 0.0
    divisors = (-torch.expm1(n.clamp_min(1) * log(beta)) for beta in (beta1, beta2))
    blank = n == 0
    return *(divisor.masked_fill(blank, torch.inf) for divisor in divisors), blank.to(n.dtype)


def _statistics(m, v, divisor1, divisor2, blank, eps):
    """m' and 1 / sqrt(v' + eps); 0 and 1 / sqrt(1 + eps) before the first real token."""
    return m / divisor1, torch.rsqrt(v / divisor2 + (blank + eps))


def _affine(normed, weight, bias):
    out = normed.flatten(-2)
    if weight is None:
        return out if bias is None else out + bias
    return out * (weight + 1) if bias is None else torch.addcmul(bias, out, weight + 1)


class _Positions:
    """
    The state and the tokens after it: `count`, the number of tokens so far, and `document`, the index of the document,
    int64 (B or 1, T + 1). `document` is None if there is only one.
    """

    def __init__(self, length, starts, real, device):
        if real is None:
            self.count = torch.arange(length + 1, device=device).unsqueeze(0)
        else:
            self.count = F.pad(real.cumsum(1), (1, 0))
        self.document = None if starts is None else F.pad(starts.cumsum(1), (1, 0))
        self.starts = starts

    def tokens_of_document(self, before):
        """n of every token, (B or 1, T, 1); `before`: n of the state, (B, 1)."""
        count = self.count[:, 1:]
        if self.starts is None:
            return (count + before).unsqueeze(-1)
        count, starts = torch.broadcast_tensors(count, self.starts)
        others = torch.where(starts, self.count[:, :-1], 0).cummax(1).values
        return torch.where(self.document[:, 1:] == 0, count + before, count - others).unsqueeze(-1)

    def sums(self, values, beta):
        """For each token the decayed sum of the values of its document up to it, (B, T + 1, groups)."""
        return _decayed_sums(values, log(beta), self.count, self.document)

    def sums_backward(self, values, beta):
        """For each token the decayed sum of the values of its document from it on."""
        document = None if self.document is None else self.document.flip(1)
        return _decayed_sums(values.flip(1), log(beta), -self.count.flip(1), document).flip(1)


def _factors(later, earlier, log_beta, dtype):
    """beta^(difference of counts) if the documents are the same, else 0; `later`, `earlier`: (count, document)."""
    factors = ((later[0] - earlier[0]).clamp_min(0).to(dtype) * log_beta).exp()
    return factors if later[1] is None else factors * (later[1] == earlier[1])


def _decayed_sums(values, log_beta, count, document):
    length = values.shape[1]
    chunk = min(CHUNK, length)
    padding = -length % chunk
    values = torch.unflatten(F.pad(values, (0, 0, 0, padding)), 1, (-1, chunk))
    positions = [
        None if x is None else torch.unflatten(torch.cat((x, x[:, -1:].expand(-1, padding)), 1), 1, (-1, chunk))
        for x in (count, document)
    ]

    def select(*index):
        return [None if x is None else x[index] for x in positions]

    every = slice(None)
    rows, columns = select(..., every, None), select(..., None, every)
    sums = _factors(rows, columns, log_beta, values.dtype).tril() @ values
    if values.shape[1] > 1:
        ends = select(every, slice(-1), -1)
        entering = _decayed_sums(sums[:, :-1, -1], log_beta, *ends)
        ends = select(every, slice(-1), slice(-1, None))
        factors = _factors(select(every, slice(1, None)), ends, log_beta, values.dtype)
        sums[:, 1:].addcmul_(factors.unsqueeze(-1), entering.unsqueeze(2))
    return sums.flatten(1, 2)[:, :length]


def _follow(x, initial_state, starts, real, groups, beta1, beta2):
    """x by groups, the means of the tokens, their m, v (B, T + 1, groups) and n (B or 1, T, 1), and the positions."""
    rows, mean, variance = _moments(x, groups)
    positions = _Positions(x.shape[1], starts, real, x.device)
    if initial_state is None:
        initial_state = x.new_zeros(x.shape[0], 3, groups)
    moments = []
    for before, values, beta in ((initial_state[:, :1], mean, beta1), (initial_state[:, 1:2], variance, beta2)):
        added = values * (1 - beta)
        if real is not None:
            added.masked_fill_(~real.unsqueeze(-1), 0.0)
        moments.append(positions.sums(torch.cat((before, added), 1), beta))
    n = positions.tokens_of_document(initial_state[:, 2, :1]).to(x.dtype)
    return rows, mean, *moments, n, positions


def timestep_decay_norm_eager(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    starts: torch.Tensor | None,
    real: torch.Tensor | None,
    groups: int,
    beta1: float,
    beta2: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Computes [`subquad_kernels.timestep_decay_norm`] in the widest dtype of the inputs. The third result, zeros here,
    is for the backward pass of the Triton kernels.
    """
    out_dtype, tensors = x.dtype, (x, weight, bias, initial_state)
    x, weight, bias, initial_state = cast(widest(*tensors), *tensors)
    rows, _, m, v, n, _ = _follow(x, initial_state, starts, real, groups, beta1, beta2)
    shift, rstd = _statistics(m[:, 1:], v[:, 1:], *_divisors(n, beta1, beta2, real), eps)
    out = _affine((rows - shift.unsqueeze(-1)).mul_(rstd.unsqueeze(-1)), weight, bias)
    state = torch.stack((m[:, -1], v[:, -1], n[:, -1].expand_as(m[:, -1])), 1)
    return out.to(out_dtype), state, x.new_zeros(shape_of_entering(x, groups))


def timestep_decay_norm_eager_backward(
    grad: torch.Tensor,
    grad_state: torch.Tensor,
    entering: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    starts: torch.Tensor | None,
    real: torch.Tensor | None,
    groups: int,
    beta1: float,
    beta2: float,
    eps: float,
) -> list[torch.Tensor]:
    """Gradients of x, weight, bias and the state, if given. Only the Triton kernels need `entering`."""
    tensors = x, weight, bias, initial_state
    grad, grad_state, x, weight, bias, initial_state = cast(widest(*tensors), grad, grad_state, *tensors)
    rows, mean, m, v, n, positions = _follow(x, initial_state, starts, real, groups, beta1, beta2)
    divisor1, divisor2, blank = _divisors(n, beta1, beta2, real)
    shift, rstd = _statistics(m[:, 1:], v[:, 1:], divisor1, divisor2, blank, eps)
    normed = (rows - shift.unsqueeze(-1)).mul_(rstd.unsqueeze(-1))
    grad = grad.view_as(rows)
    grad_normed = grad if weight is None else grad * (weight + 1).view(rows.shape[2:])
    product = grad * normed
    grad_weight = None if weight is None else product.flatten(0, 1).sum(0).flatten()
    grad_bias = None if bias is None else grad.flatten(0, 1).sum(0).flatten()
    if weight is not None:
        product.mul_((weight + 1).view(rows.shape[2:]))

    size = rows.shape[-1]
    reaching = []
    for given, after, divisor, beta in (
        (-rstd * grad_normed.sum(-1), grad_state[:, 0], divisor1, beta1),
        (-0.5 * rstd.square() * product.sum(-1), grad_state[:, 1], divisor2, beta2),
    ):
        given = F.pad(given / divisor, (0, 0, 1, 0))
        given[:, -1] += after
        reaching.append(positions.sums_backward(given, beta))
    grad_mean, grad_variance = (
        a[:, 1:] * ((1 - beta) / size) for a, beta in zip(reaching, (beta1, beta2), strict=True)
    )
    if real is not None:
        grad_mean, grad_variance = (g.masked_fill(~real.unsqueeze(-1), 0.0) for g in (grad_mean, grad_variance))
    # The derivative of the variance is 2 (x - mean) / size, of the mean 1 / size.
    grad_variance = 2 * grad_variance
    grad_x = torch.addcmul((grad_mean - grad_variance * mean).unsqueeze(-1), rows, grad_variance.unsqueeze(-1))
    grad_x = grad_x.addcmul_(grad_normed, rstd.unsqueeze(-1)).flatten(-2)
    grads = [grad_x, grad_weight, grad_bias]
    if initial_state is not None:
        grads.append(torch.stack((*(a[:, 0] for a in reaching), torch.zeros_like(grad_state[:, 0])), 1))
    return [g for g in grads if g is not None]

"""
The complex moving average in plain torch, parallel over time, for any device.

The coefficients of the recurrence do not depend on the data. So the output of a chunk of C tokens is a product with
one Toeplitz matrix per channel, K[t - s] = Re sum_n gamma a q^(t - s), plus the contribution of the N states, and q^C
takes a state from chunk to chunk. Each document begins a new chunk, and padding is left out. So all chunks of a
document except the last are full, and one set of matrices serves them all. The last chunk of a row may be short; its
tokens are moved to the end of the chunk to compute the state that leaves the row.

The powers of q are computed in float64, if the device has it, and rounded once, so that a long memory does not drift.
"""

import math

import torch

from ..backend import cast, widest
from ..linear import matmul


CHUNK_SIZE = 32


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64


def _rates(alpha, delta, theta):
    """a, d, sigmoid(theta), and the unscaled angles."""
    a, d, share = (x.to(_wide(x)).sigmoid() for x in (alpha, delta, theta.unsqueeze(-1)))
    size = alpha.shape[1]
    return a, d, share, torch.arange(1, size + 1, device=alpha.device, dtype=a.dtype) * (2 * math.pi / size)


def cema_step(
    x: torch.Tensor,
    alpha: torch.Tensor,
    delta: torch.Tensor,
    theta: torch.Tensor,
    gamma: torch.Tensor,
    state: torch.Tensor | None,
    starts: torch.Tensor | None = None,
    real: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: x (B, 1, D), state (B, D, N, 2), starts (B or 1, 1), real (B, 1). The results have the dtype of x."""
    a, d, share, angle = _rates(alpha, delta, theta)
    modulus, angle = 1 - a * d, angle * share
    if state is None:
        state = x.new_zeros(x.shape[0], *gamma.shape)
    if starts is not None:
        state = state.masked_fill(starts.view(-1, 1, 1, 1), 0.0)
    if real is not None:
        x = x.masked_fill(~real.unsqueeze(-1), 0.0)
    (re, im), cos, sin = state.to(a.dtype).unbind(-1), modulus * angle.cos(), modulus * angle.sin()
    after = torch.stack((cos * re - sin * im + a * x.mT, cos * im + sin * re), dim=-1).to(x.dtype)
    out = (after * torch.stack((gamma[..., 0], -gamma[..., 1]), dim=-1)).sum((-2, -1)).unsqueeze(1)
    if real is not None:
        after = torch.where(real.view(-1, 1, 1, 1), after, state)
        out = out.masked_fill(~real.unsqueeze(-1), 0.0)
    return out, after


def cema_step_inplace(
    x: torch.Tensor,
    alpha: torch.Tensor,
    delta: torch.Tensor,
    theta: torch.Tensor,
    gamma: torch.Tensor,
    state: torch.Tensor | None,
    new_state: torch.Tensor,
    starts: torch.Tensor | None,
    real: torch.Tensor | None,
) -> torch.Tensor:
    """
    One token in float32: see [`cema_step`]. The state after it is written to `new_state`, which also holds the state
    before it if `state` is None.
    """
    before = new_state if state is None else state
    out, after = cema_step(*cast(torch.float32, x, alpha, delta, theta, gamma, before), starts, real)
    new_state.copy_(after)
    return out.to(x.dtype)


class _Chunks:
    """
    The layout of rows in chunks: (B, T, D) <-> (D, B, n, C). Gaps are filled with zeros.

    Attributes:
        fresh: bool (B, n), True for chunks whose entering state is cleared, or None.
        last: the last chunk of each row, (B).
        count: its number of tokens, (B).
        cleared: bool (B), True for rows that end with a document without tokens, or None.
    """

    def __init__(self, x: torch.Tensor, starts: torch.Tensor | None, real: torch.Tensor | None):
        self.batch, self.length, self.width = x.shape
        self.chunk = chunk = min(CHUNK_SIZE, 1 << (self.length - 1).bit_length())
        self.index = self.fresh = self.cleared = None
        rows = torch.arange(self.batch, device=x.device)
        if starts is None and real is None:
            self.chunks = -(-self.length // chunk)
            self.last = torch.full_like(rows, self.chunks - 1)
            self.count = torch.full_like(rows, self.length - (self.chunks - 1) * chunk)
            return
        if real is None:
            real = torch.ones(self.batch, self.length, dtype=torch.bool, device=x.device)
        number = real.cumsum(1)  # index of each token among the real tokens of its row, from 1
        document = torch.zeros_like(number)
        if starts is not None:
            document = starts.expand_as(real).cumsum(1)
            before = torch.where(starts, number - real.long(), 0).cummax(1).values
            number = number - before
        begins = real & ((number - 1) % chunk == 0)
        at = begins.cumsum(1) - 1
        if torch.compiler.is_compiling():  # the largest possible number
            self.chunks = -(-self.length // chunk) if starts is None else self.length
        else:
            self.chunks = max(int(at.max()) + 1, 1)
        self.last = at[:, -1].clamp(min=0)
        index = at * chunk + (number - 1) % chunk
        size = self.chunks * chunk
        # One extra position per row for the padding tokens.
        self.index = (torch.where(real, index, size) + rows[:, None] * (size + 1)).flatten()
        self.count = torch.where(real, index + 1 - self.last[:, None] * chunk, 0).amax(1).clamp(min=0)
        if starts is not None:
            first = begins & (number == 1) & (document > 0)
            fresh = torch.zeros(self.batch, self.chunks + 1, dtype=torch.bool, device=x.device)
            self.fresh = fresh.scatter(1, torch.where(first, at, self.chunks), True)[:, :-1]
            self.cleared = torch.where(real, document, 0).amax(1) < document[:, -1]

    def to_chunks(self, x: torch.Tensor) -> torch.Tensor:
        size = self.chunks * self.chunk
        if self.index is not None:
            filled = x.new_zeros(self.batch * (size + 1), self.width).index_copy_(0, self.index, x.flatten(0, 1))
            x = torch.unflatten(filled, 0, (self.batch, -1))[:, :-1]
        elif size > self.length:
            x = torch.nn.functional.pad(x, (0, 0, 0, size - self.length))
        x = x.flatten(0, 1).t().contiguous()
        return x.view(self.width, self.batch, self.chunks, self.chunk)

    def from_chunks(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(self.width, -1).t()
        if self.index is None:
            return torch.unflatten(x, 0, (self.batch, -1))[:, : self.length]
        x = torch.nn.functional.pad(torch.unflatten(x, 0, (self.batch, -1)), (0, 0, 0, 1)).flatten(0, 1)
        return x.index_select(0, self.index).view(self.batch, self.length, self.width)

    def of_last(self, x: torch.Tensor) -> torch.Tensor:
        """The last chunk of each row: (D, B, n, .) -> (D, B, .)."""
        return x.gather(2, self._last(x)).squeeze(2)

    def add_to_last(self, x: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        return x.scatter_add_(2, self._last(x), added.unsqueeze(2))

    def _last(self, x):
        return self.last.view(1, -1, 1, 1).expand(x.shape[0], -1, 1, x.shape[-1])

    def moved(self, x: torch.Tensor, back: bool = False) -> torch.Tensor:
        """(D, B, C) with the tokens of the last chunk of each row moved to the end of the chunk, or back."""
        gap = (self.chunk - self.count) * (-1 if back else 1)
        source = (torch.arange(self.chunk, device=x.device) - gap.unsqueeze(1)) % self.chunk
        return x.gather(2, source.expand_as(x))


class _Tables:
    """The matrices of each channel, from powers of q that are rounded once."""

    def __init__(self, alpha, delta, theta, gamma, chunk, dtype):
        self.chunk, self.size = chunk, alpha.shape[1]
        self.rates = _rates(alpha, delta, theta)
        a, d, share, angle = self.rates
        self.q = step = torch.polar(1 - a * d, angle * share)
        powers = torch.ones_like(step).unsqueeze(-1)
        while powers.shape[-1] < chunk:
            powers = torch.cat((powers, powers * step.unsqueeze(-1)), dim=-1)
            step = step * step
        gamma = torch.complex(*gamma.to(a.dtype).unbind(-1))
        kernel = ((gamma * a).unsqueeze(1) @ powers).squeeze(1).real.to(dtype)
        self.complex = torch.complex(kernel, kernel).dtype
        # q^0 ... q^C (D, N, C + 1). They and the other tensors have the dtype of the products.
        self.powers = torch.cat((powers, step.unsqueeze(-1)), dim=-1).to(self.complex)
        self.a, self.gamma = a.to(dtype), gamma.to(self.complex)

        # Maps tokens (D, C, .) to outputs and to the leaving state, and the entering state to outputs.
        toeplitz = torch.nn.functional.pad(kernel, (chunk - 1, 0)).unfold(1, chunk, 1).flip(1)
        self.to_state = self._pairs((self.powers[..., :-1] * self.a.unsqueeze(-1)).flip(-1)).transpose(1, 2)
        self.from_token = torch.cat((toeplitz, self.to_state), dim=2)
        self.from_state = self._pairs((self.powers[..., 1:] * self.gamma.unsqueeze(-1)).conj())

    @staticmethod
    def _pairs(x: torch.Tensor) -> torch.Tensor:
        """(D, N, C) complex -> (D, 2N, C) real."""
        return torch.view_as_real(x.resolve_conj()).transpose(2, 3).flatten(1, 2)

    def to_complex(self, x: torch.Tensor) -> torch.Tensor:
        """(..., 2N) real -> (..., N) complex."""
        return torch.view_as_complex(torch.unflatten(x, -1, (-1, 2)).contiguous())

    def to_powers(self, x: torch.Tensor) -> torch.Tensor:
        """(D, C, 2N) real -> (D, N, C) complex."""
        return self.to_complex(x).transpose(1, 2)

    def gradients(self, weights, to_state, from_state, decays):
        """
        Gradients of alpha, delta, theta and gamma from the gradients of the matrices and the conjugated gradients of
        the powers of q, `decays` (D, N, C + 1).
        """
        chunk = self.chunk
        # The lags are the diagonals of `weights`, and the columns of this skewed view.
        skewed = torch.nn.functional.pad(weights.flip(1), (0, chunk)).flatten(1)[:, :-chunk]
        kernel = skewed.view(-1, chunk, 2 * chunk - 1)[..., chunk - 1 :].sum(1).unsqueeze(1)
        a, gamma = self.a.unsqueeze(-1), self.gamma.unsqueeze(-1)
        of_input = gamma * kernel + self.to_powers(to_state).conj().flip(-1)
        of_output = self.to_powers(from_state.transpose(1, 2))
        grad_a = (self.powers[..., :-1] * of_input).sum(-1).real
        grad_gamma = (self.powers[..., :-1] * (a * kernel)).sum(-1) + (self.powers[..., 1:] * of_output).sum(-1)
        decays[..., :-1] += a * of_input
        decays[..., 1:] += gamma * of_output
        lags = torch.arange(1, chunk + 1, device=a.device)
        grad_q = (self.powers[..., :-1] * (lags * decays[..., 1:])).sum(-1)

        a, d, share, angle = self.rates
        grad_modulus = (grad_q * torch.polar(torch.ones_like(d), angle * share)).real
        grad_angle = -(grad_q * self.q).imag
        return [
            (grad_a - d * grad_modulus) * a * (1 - a),
            -grad_modulus * a * d * (1 - d),
            (grad_angle * angle).sum(1) * (share * (1 - share)).squeeze(1),
            torch.view_as_real(grad_gamma.conj().resolve_conj()),
        ]


def _enter(chunks, tables, added, initial_state):
    """The states that enter the chunks, (D, B, n, N), from the contribution of each chunk."""
    state = torch.zeros_like(added[:, :, 0])
    if initial_state is not None:
        state = torch.complex(*initial_state.unbind(-1)).transpose(0, 1)
    decay, entering = tables.powers[..., -1].unsqueeze(1), torch.empty_like(added)
    for n in range(chunks.chunks):
        if chunks.fresh is not None:
            state = state.masked_fill(chunks.fresh[:, n, None], 0.0)
        entering[:, :, n] = state
        if n + 1 < chunks.chunks:
            state = torch.addcmul(added[:, :, n], decay, state)
    return entering


def _decays_of_last(chunks, tables):
    """The factor by which the last chunk of each row decays a state, (D, B, N)."""
    return tables.powers[..., chunks.count].transpose(1, 2)


def cema_chunked(
    x: torch.Tensor,
    alpha: torch.Tensor,
    delta: torch.Tensor,
    theta: torch.Tensor,
    gamma: torch.Tensor,
    initial_state: torch.Tensor | None,
    starts: torch.Tensor | None,
    real: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes [`subquad_kernels.cema`] in the widest dtype of the inputs."""
    out_dtype, floats = x.dtype, (x, alpha, delta, theta, gamma, initial_state)
    x, alpha, delta, theta, gamma, initial_state = cast(widest(*floats), *floats)
    chunks = _Chunks(x, starts, real)
    tables = _Tables(alpha, delta, theta, gamma, chunks.chunk, x.dtype)
    x = chunks.to_chunks(x)
    out, added = matmul(x.flatten(1, 2), tables.from_token).split((chunks.chunk, 2 * tables.size), dim=2)
    entering = _enter(chunks, tables, tables.to_complex(added).view(*x.shape[:3], -1), initial_state)
    state = tables.to_complex(chunks.moved(chunks.of_last(x)) @ tables.to_state)
    state += _decays_of_last(chunks, tables) * chunks.of_last(entering)
    if chunks.cleared is not None:
        state = state.masked_fill(chunks.cleared.unsqueeze(1), 0.0)
    out = torch.baddbmm(out, torch.view_as_real(entering).view(*out.shape[:2], -1), tables.from_state)
    return chunks.from_chunks(out).to(out_dtype), torch.view_as_real(state.transpose(0, 1))


def cema_chunked_backward(
    grad_out: torch.Tensor,
    grad_state: torch.Tensor,
    x: torch.Tensor,
    alpha: torch.Tensor,
    delta: torch.Tensor,
    theta: torch.Tensor,
    gamma: torch.Tensor,
    initial_state: torch.Tensor | None,
    starts: torch.Tensor | None,
    real: torch.Tensor | None,
) -> list[torch.Tensor]:
    """
    Gradients of x, alpha, delta, theta, gamma and, if it is given, initial_state. The forward pass is recomputed, so
    that only its inputs are kept.
    """
    floats = x, alpha, delta, theta, gamma, initial_state
    dtype = widest(*floats)
    grad_out, grad_state, x, alpha, delta, theta, gamma, initial_state = cast(dtype, grad_out, grad_state, *floats)
    chunks = _Chunks(x, starts, real)
    tables = _Tables(alpha, delta, theta, gamma, chunks.chunk, x.dtype)
    x, g = chunks.to_chunks(x), chunks.to_chunks(grad_out).flatten(1, 2)
    added = tables.to_complex(x.flatten(1, 2) @ tables.to_state).view(*x.shape[:3], -1)
    entering = _enter(chunks, tables, added, initial_state)
    grad_state = torch.complex(*grad_state.unbind(-1)).transpose(0, 1)
    if chunks.cleared is not None:
        grad_state = grad_state.masked_fill(chunks.cleared.unsqueeze(1), 0.0)

    # Gradients of the states that enter the chunks; of the states that leave, from the last chunk to the first.
    read = tables.to_complex(g @ tables.from_state.mT).view(added.shape)
    chunks.add_to_last(read, _decays_of_last(chunks, tables).conj() * grad_state)
    grad, leaving = torch.zeros_like(read[:, :, 0]), torch.empty_like(read)
    decay = tables.powers[..., -1].unsqueeze(1).conj().resolve_conj()
    for n in reversed(range(chunks.chunks)):
        leaving[:, :, n] = grad
        grad = torch.addcmul(read[:, :, n], decay, grad)
        if chunks.fresh is not None:
            grad = grad.masked_fill(chunks.fresh[:, n, None], 0.0)

    both = torch.cat((g, torch.view_as_real(leaving).view(*g.shape[:2], -1)), dim=2)
    grad_x = (both @ tables.from_token.mT).view(x.shape)
    grad_weights, grad_to_state = (x.flatten(1, 2).mT @ both).split((chunks.chunk, 2 * tables.size), dim=2)
    grad_from_state = torch.view_as_real(entering).view(*g.shape[:2], -1).mT @ g

    pairs = torch.view_as_real(grad_state.resolve_conj()).flatten(2)
    chunks.add_to_last(grad_x, chunks.moved(pairs @ tables.to_state.mT, back=True))
    grad_to_state = grad_to_state + chunks.moved(chunks.of_last(x)).mT @ pairs

    decays = torch.zeros_like(tables.powers)
    decays[..., -1] = (entering * leaving.conj()).sum((1, 2))
    decays.index_add_(2, chunks.count, (chunks.of_last(entering) * grad_state.conj()).transpose(1, 2))
    grads = [chunks.from_chunks(grad_x), *tables.gradients(grad_weights, grad_to_state, grad_from_state, decays)]
    return grads if initial_state is None else [*grads, torch.view_as_real(grad.transpose(0, 1))]

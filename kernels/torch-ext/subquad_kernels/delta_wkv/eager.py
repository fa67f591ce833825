"""
The recurrence of Goose in plain torch, parallel over time, for any device.

Every token takes two half steps. In the first one -kappa reads the state, and what it reads is written back with the
key a * kappa; in the second one v is written with the key k, and r reads. So a chunk of C tokens has 2 C reads and 2 C
writes, in turns. `scores` (2 C, 2 C) is what each read gets of each write before it. Half of what is written has been
read in the chunk itself, so reading means solving a triangular system of equations.

Decays are taken from the middle of a chunk's decay, where they are exponentials of at most half of its logarithm: a
chunk of 32 tokens has factors of at most 1.7e4 with the strongest decay of RWKV-7.
"""

import torch
import torch.nn.functional as F

from ..backend import cast, widest
from ..chunks import ChunkLayout


# Tokens of a chunk. The triangular systems of longer ones take more time than is gained.
CHUNK = 32


def delta_wkv_step(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    kappa: torch.Tensor,
    a: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: r, k, log_w, kappa, a (B, H, K), v (B, H, V), state (B, H, V, K)."""
    removed = state @ kappa.unsqueeze(-1)
    state = state * log_w.exp().unsqueeze(-2) + v.unsqueeze(-1) * k.unsqueeze(-2)
    state = state - removed * (a * kappa).unsqueeze(-2)
    return (state @ r.unsqueeze(-1)).squeeze(-1), state


def gated_norm(
    out: torch.Tensor,
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    bonus: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """
    What follows the recurrence in [`subquad_kernels.gated_delta_wkv`], in the dtype of `out` (..., H, V) but for the
    gate (..., H * V).
    """
    r, k, v, bonus, weight, bias = cast(out.dtype, r, k, v, bonus, weight, bias)
    normed = F.layer_norm(out, out.shape[-1:], eps=eps).flatten(-2)
    normed = torch.addcmul(bias, normed, weight)
    normed = normed + ((r * bonus * k).sum(-1, keepdim=True) * v).flatten(-2)
    return normed.to(gate.dtype) * gate


def delta_wkv_step_inplace(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    kappa: torch.Tensor,
    a: torch.Tensor,
    state: torch.Tensor | None,
    new_state: torch.Tensor,
    gate: torch.Tensor | None,
    bonus: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """
    One token in float32, followed by [`gated_norm`] if there is a gate: see [`delta_wkv_step`]. The state after it is
    written to `new_state`, which also holds the state before it if `state` is None.
    """
    before = new_state if state is None else state
    out, after = delta_wkv_step(*cast(torch.float32, r, k, v, log_w, kappa, a, before))
    new_state.copy_(after)
    if gate is not None:
        out = gated_norm(out, r, k, v, gate.flatten(1), bonus, weight, bias, eps).view(v.shape)
    return out.to(out_dtype)


def _turns(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The half steps of tokens in turns: twice (..., C, D) -> (..., 2 C, D)."""
    return torch.stack((first, second), dim=-2).flatten(-3, -2)


def _parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the second half steps of tokens: (..., 2 C, D) -> twice (..., C, D)."""
    return x.unflatten(-2, (-1, 2)).unbind(-2)


class _Chunks:
    """What does not depend on the state, for all chunks at once; matrices are (B, H, chunks, ...)."""

    def __init__(self, layout, r, k, v, log_w, kappa, a):
        r, k, self.v, log_w, self.kappa, self.a = (layout.to_chunks(x) for x in (r, k, v, log_w, kappa, a))
        self.reads, self.writes = _turns(-self.kappa, r), _turns(self.a * self.kappa, k)
        after = log_w.cumsum(-2)
        before = F.pad(after[..., :-1, :], (0, 0, 1, 0))
        total = after[..., -1:, :]
        read_at, written_at = _turns(before, after), _turns(after, after)

        # From the middle of the decay of a chunk to where it is read or written, and from its start and to its end.
        self.read_near, self.write_near = (read_at - total / 2).exp(), (total / 2 - written_at).exp()
        self.read_far, self.write_far = read_at.exp(), (total - written_at).exp()
        self.decay = total.exp()

        n = torch.arange(2 * layout.chunk, device=v.device)
        # The second read of a token also gets what is written at the token, with no decay between them.
        self.seen = n < n[:, None] // 2 * 2
        self.now = (n[:, None] % 2 == 1) & (n // 2 == n[:, None] // 2)
        scores = (self.reads * self.read_near) @ (self.writes * self.write_near).mT
        self.scores = scores.where(self.seen | self.now, 0)
        # The equations of the reads. Only what first half steps write has been read in the chunk.
        self.system = -self.scores * (n % 2 == 0)
        own = self.scores[..., 1::2]
        solved = self.solve(torch.cat((self.reads * self.read_far, own), dim=-1))
        self.state_to_reads, self.values_to_reads = solved.split((r.shape[-1], layout.chunk), dim=-1)

        # The state that leaves a chunk is the one that enters it, times `passing`, and `added`.
        first, second = _parts(self.writes * self.write_far)
        removing, reading = _parts(self.state_to_reads)
        removed = _parts(self.values_to_reads)[0] @ self.v
        self.reading = reading
        self.passing = torch.diag_embed(self.decay.squeeze(-2)) + removing.mT @ first
        self.added = self.v.mT @ second + removed.mT @ first

    def solve(self, x, transposed=False):
        matrix = self.system.mT if transposed else self.system
        return torch.linalg.solve_triangular(matrix, x, upper=transposed, unitriangular=True)


def _enter(layout, passing, added, states, reverse=False):
    """The states that enter the chunks, (B, H, chunks, V, K), and those that leave the sequences, in time's order."""
    n, step = (passing.shape[2] - 1, -1) if reverse else (0, 1)
    entering, leaving = [None] * passing.shape[2], [None] * len(layout.chunks)
    for sequence in range(len(layout.chunks))[::step]:
        if states is None:
            state = torch.zeros_like(added[:, :, 0])
        else:
            state = layout.state_of(states, sequence)
        for _ in range(layout.chunks[sequence]):
            entering[n] = state
            state = added[:, :, n] + state @ passing[:, :, n]
            n += step
        leaving[sequence] = state
    return torch.stack(entering, dim=2), torch.cat(leaving)


def delta_wkv_chunked(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    kappa: torch.Tensor,
    a: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes [`subquad_kernels.delta_wkv`] in the widest dtype of the inputs."""
    floats = r, k, v, log_w, kappa, a, initial_state
    *inputs, initial_state = cast(widest(*floats), *floats)
    layout = ChunkLayout(k.shape[1], cu_seqlens, k.device, CHUNK)
    chunks = _Chunks(layout, *inputs)
    entering, state = _enter(layout, chunks.passing, chunks.added, initial_state)
    out = chunks.reading @ entering.mT + _parts(chunks.values_to_reads)[1] @ chunks.v
    return layout.from_chunks(out).to(out_dtype), state


def delta_wkv_chunked_backward(
    grad_out: torch.Tensor,
    grad_state: torch.Tensor,
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    kappa: torch.Tensor,
    a: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> list[torch.Tensor]:
    """
    Gradients of r, k, v, log_w, kappa, a and, if it is given, initial_state. The forward pass is computed again, so
    that only its inputs are kept until then.
    """
    floats = r, k, v, log_w, kappa, a, initial_state
    grad_out, grad_state, *inputs, initial_state = cast(widest(*floats), grad_out, grad_state, *floats)
    layout = ChunkLayout(k.shape[1], cu_seqlens, k.device, CHUNK)
    chunks = _Chunks(layout, *inputs)
    entering, _ = _enter(layout, chunks.passing, chunks.added, initial_state)
    removed = _parts(chunks.state_to_reads)[0] @ entering.mT + _parts(chunks.values_to_reads)[0] @ chunks.v
    written = _turns(removed, chunks.v)

    # The gradient of the state goes from the last chunk of each sequence to the first.
    g = layout.to_chunks(grad_out)
    leaving, grad_initial = _enter(layout, chunks.passing.mT, g.mT @ chunks.reading, grad_state, reverse=True)
    to_end = chunks.writes * chunks.write_far
    grad_read = chunks.solve(_turns(_parts(to_end)[0] @ leaving.mT, g), transposed=True)
    dv = _parts(to_end @ leaving.mT + chunks.scores.mT @ grad_read)[1]

    scores = grad_read @ written.mT
    now, scores = scores.where(chunks.now, 0), scores.where(chunks.seen, 0)
    dreads = (grad_read @ entering) * chunks.read_far
    dreads = dreads + scores @ (chunks.writes * chunks.write_near) * chunks.read_near
    dwrites_near = scores.mT @ (chunks.reads * chunks.read_near) * chunks.write_near
    dwrites_far = (written @ leaving) * chunks.write_far

    # A decay is that of every read from its token on, less those of the writes from there on, and of what is written
    # before it and leaves the chunk.
    of_reads, of_near = chunks.reads * dreads, chunks.writes * dwrites_near
    of_far = _parts(chunks.writes * dwrites_far)
    removals, others = _parts(of_reads)
    inside = removals + others - sum(_parts(of_near))
    dlog_w = inside.flip(-2).cumsum(-2).flip(-2) - removals
    before = (of_far[0] + of_far[1]).cumsum(-2)
    dlog_w = dlog_w + F.pad(before[..., :-1, :], (0, 0, 1, 0))
    dlog_w = dlog_w + chunks.decay * (entering * leaving).sum(-2, keepdim=True)

    dremovals, dr = _parts(dreads + now @ chunks.writes)
    dwritten, dk = _parts(dwrites_near + dwrites_far + now.mT @ chunks.reads)
    dkappa, da = chunks.a * dwritten - dremovals, chunks.kappa * dwritten
    grads = [layout.from_chunks(x) for x in (dr, dk, dv, dlog_w, dkappa, da)]
    return grads if initial_state is None else [*grads, grad_initial]

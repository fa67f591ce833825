"""
The recurrence of Goose in plain torch, parallel over time, for any device.

Every token takes two half steps. In the first one -kappa reads the state, and what it reads is written back with the
key a * kappa; in the second one v is written with the key k, and r reads. So a chunk of C tokens has 2 C reads and 2 C
writes, those of the first half steps before the others. Half of what is written has been read in the chunk itself, so
reading means solving a triangular system of equations.

Decays are taken from the middle of a chunk's decay, where they are exponentials of at most half of its logarithm: a
chunk of 32 tokens has factors of at most 1.7e4 with the strongest decay of RWKV-7. The states are taken there, too.
"""

import torch
import torch.nn.functional as F

from ..backend import cast, widest
from ..chunks import ChunkLayout
from ..state_pool import step_in_pool


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
    new_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    One token: r, k, log_w, kappa, a (B, H, K), v (B, H, V), state (B, H, V, K). The state after it is written to
    `new_state`, which may be `state` itself; None makes a new tensor.
    """
    # On a CPU a product of a row and a matrix takes half as long as that of a matrix and a column.
    removed = (kappa.unsqueeze(-2) @ state.mT).mT
    after = torch.mul(state, log_w.exp().unsqueeze(-2), out=new_state)
    after.addcmul_(v.unsqueeze(-1), k.unsqueeze(-2)).addcmul_(removed, (a * kappa).unsqueeze(-2), value=-1)
    return (r.unsqueeze(-2) @ after.mT).squeeze(-2), after


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


def delta_wkv_step_in_pool(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    kappa: torch.Tensor,
    a: torch.Tensor,
    pool: torch.Tensor,
    indices: torch.Tensor,
) -> torch.Tensor:
    """
    One token of rows with their states at `indices` (B) of a pool, which change; see [`delta_wkv_step`]. In float32.
    """

    def step(state, *token):
        return delta_wkv_step(*token, state, state)[0]

    return step_in_pool(step, pool, indices, *cast(torch.float32, r, k, v, log_w, kappa, a))


def delta_wkv_step_inplace(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    kappa: torch.Tensor,
    a: torch.Tensor,
    state: torch.Tensor | None,
    new_state: torch.Tensor,
    indices: torch.Tensor | None,
    gate: torch.Tensor | None,
    bonus: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """
    One token in float32, followed by [`gated_norm`] if there is a gate: see [`delta_wkv_step`]. The state after it is
    written to `new_state`, which also holds the state before it if `state` is None. With `indices` it is a pool.
    """
    if indices is None:
        before = new_state if state is None else state
        out, _ = delta_wkv_step(*cast(torch.float32, r, k, v, log_w, kappa, a, before), new_state)
    else:
        out = delta_wkv_step_in_pool(r, k, v, log_w, kappa, a, new_state, indices)
    if gate is not None:
        out = gated_norm(out, r, k, v, gate.flatten(1), bonus, weight, bias, eps).view(v.shape)
    return out.to(out_dtype)


class _Chunks:
    """
    What does not depend on the state, for all chunks at once: matrices (B, H, chunks, ...). Of 2 C rows the first C
    are those of first half steps.
    """

    def __init__(self, layout, r, k, v, log_w, kappa, a):
        r, k, self.v, log_w, self.kappa, self.a = (layout.to_chunks(x) for x in (r, k, v, log_w, kappa, a))
        at = log_w.cumsum(-2)
        total = at[..., -1:, :]
        self.half, self.lost = (total / 2).exp(), total.expm1()
        at = at - total / 2
        self.write_at, self.read_at, self.remove_at = (-at).exp(), at.exp(), (at - log_w).exp()
        self.reads = torch.cat((-self.kappa * self.remove_at, r * self.read_at), dim=-2)
        self.writes = torch.cat((self.a * self.kappa * self.write_at, k * self.write_at), dim=-2)

        # What each read gets of each write before it, and the second one also of the writes of its own token.
        n = torch.arange(2 * layout.chunk, device=v.device)
        token, second = n % layout.chunk, n >= layout.chunk
        self.before = token < token[:, None]
        self.now = second[:, None] & (token == token[:, None])
        self.scores = (self.reads @ self.writes.mT).where(self.before | self.now, 0)

        # What each read gets of the state that enters the chunk, and of the values.
        removed, of_values = self.scores.split(layout.chunk, dim=-1)
        first, second = torch.cat((self.reads, of_values), dim=-1).split(layout.chunk, dim=-2)
        self.removed, read = removed.split(layout.chunk, dim=-2)
        first = self.solve(first)
        keys = r.shape[-1]
        self.removing, self.removed_values = first.split((keys, layout.chunk), dim=-1)
        self.reading, self.read_values = (second + read @ first).split((keys, layout.chunk), dim=-1)

        # The state that leaves a chunk is the one that enters it, times `passing`, and `added`; both in the middle.
        first, second = self.writes.split(layout.chunk, dim=-2)
        self.passing = self.removing.mT @ first
        self.added = self.v.mT @ second + (self.removed_values @ self.v).mT @ first

    def solve(self, x, transposed=False):
        """(I - removed)⁻¹ x"""
        matrix = -self.removed.mT if transposed else -self.removed
        return torch.linalg.solve_triangular(matrix, x, upper=transposed, unitriangular=True)

    def enter(self, layout, passing, added, states, reverse=False):
        """
        The states that enter the chunks, (B, H, chunks, V, K), decayed to the middle, and those that leave the
        sequences, in the order of time.
        """
        n, step = (passing.shape[2] - 1, -1) if reverse else (0, 1)
        entering, leaving = [None] * passing.shape[2], [None] * len(layout.chunks)
        halves, lost, passing, added = (x.unbind(2) for x in (self.half, self.lost, passing, added))
        for sequence in range(len(layout.chunks))[::step]:
            if states is None:
                state = torch.zeros_like(added[0])
            else:
                state = layout.state_of(states, sequence)
            for _ in range(layout.chunks[sequence]):
                entering[n] = state * halves[n]
                change = added[n] + entering[n] @ passing[n]
                # A product with a decay near 1 would round off what is lost.
                state = torch.addcmul(state, state, lost[n]).addcmul_(change, halves[n])
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
    entering, state = chunks.enter(layout, chunks.passing, chunks.added, initial_state)
    out = chunks.reading @ entering.mT + chunks.read_values @ chunks.v
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
    entering, _ = chunks.enter(layout, chunks.passing, chunks.added, initial_state)
    written = torch.cat((chunks.removing @ entering.mT + chunks.removed_values @ chunks.v, chunks.v), dim=-2)

    # The gradient of the state goes from the last chunk of each sequence to the first.
    g = layout.to_chunks(grad_out)
    leaving, grad_initial = chunks.enter(layout, chunks.passing.mT, g.mT @ chunks.reading, grad_state, reverse=True)
    removed = chunks.scores.mT[..., : layout.chunk, layout.chunk :]
    grad_read = chunks.solve(chunks.writes[..., : layout.chunk, :] @ leaving.mT + removed @ g, transposed=True)
    grad_read = torch.cat((grad_read, g), dim=-2)
    dv = chunks.writes[..., layout.chunk :, :] @ leaving.mT + chunks.scores.mT[..., layout.chunk :, :] @ grad_read

    scores = grad_read @ written.mT
    now, scores = scores.where(chunks.now, 0), scores.where(chunks.before, 0)
    dreads = grad_read @ entering + scores @ chunks.writes
    dwrites_near, dwrites_far = scores.mT @ chunks.reads, written @ leaving

    # A decay is that of every read from its token on, less those of the writes from there on, and of what is written
    # before it and leaves the chunk. First half steps read before the decay of their token.
    removals, others = (chunks.reads * dreads).split(layout.chunk, dim=-2)
    of_near, of_far = (sum((chunks.writes * x).split(layout.chunk, dim=-2)) for x in (dwrites_near, dwrites_far))
    dlog_w = (removals + others - of_near).flip(-2).cumsum(-2).flip(-2) - removals
    dlog_w = dlog_w + F.pad(of_far.cumsum(-2)[..., :-1, :], (0, 0, 1, 0)) + (entering * leaving).sum(-2, keepdim=True)

    dremovals, dr = (dreads + now @ chunks.writes).split(layout.chunk, dim=-2)
    dwritten, dk = (dwrites_near + dwrites_far + now.mT @ chunks.reads).split(layout.chunk, dim=-2)
    dremovals, dr, dwritten, dk = (
        dremovals * chunks.remove_at,
        dr * chunks.read_at,
        dwritten * chunks.write_at,
        dk * chunks.write_at,
    )
    dkappa, da = chunks.a * dwritten - dremovals, chunks.kappa * dwritten
    grads = [layout.from_chunks(x) for x in (dr, dk, dv, dlog_w, dkappa, da)]
    return grads if initial_state is None else [*grads, grad_initial]

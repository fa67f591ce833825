"""
The recurrence of Goose in plain torch, parallel over time, for any device.

Every token takes two half steps. In the first one, -kappa reads the state, and the readout is written back with the
key a * kappa; in the second one, v is written with the key k, and r reads. So a chunk of C tokens has 2 C reads and 2
C writes, first half steps before second ones. Half of the written values are readouts from the chunk itself, so
reading means solving a triangular system of equations.

Decays are taken relative to the middle of a chunk's decay, so their exponents are at most half of its logarithm: a
chunk of 32 tokens has factors of at most 1.7e4 with the strongest decay of RWKV-7. The states are taken there, too.

The code reads with kappa, without the minus, and subtracts the readouts of the first half steps.
"""

import torch
import torch.nn.functional as F

from ..backend import cast, widest
from ..chunks import ChunkLayout
from ..documents import count_documents
from ..state_pool import step_in_pool
from .slabs import slabs


# Tokens of a chunk. Larger triangular systems would cost more time than they save.
CHUNK = 32
# Values per CPU thread in a tensor of chunks that are computed together: more would not fit in its cache.
VALUES = 2**17


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
    # On a CPU a product of a row and a matrix takes half as long as a matrix and a column.
    removed = (kappa.unsqueeze(-2) @ state.mT).mT
    after = torch.mul(state, log_w.exp().unsqueeze(-2), out=new_state)
    after.addcmul_(v.unsqueeze(-1), k.unsqueeze(-2)).addcmul_(removed, (a * kappa).unsqueeze(-2), value=-1)
    return (r.unsqueeze(-2) @ after.mT).squeeze(-2), after


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
    One token in float32 for rows with their states at `indices` (B) of a pool, which change; see [`delta_wkv_step`].
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
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """
    Sequences of one token in float32: see [`delta_wkv_step`]. The state after it is written to `new_state`, which also
    holds the state before it if `state` is None. With `indices` it is a pool.
    """
    token = (x[:, 0] for x in (r, k, v, log_w, kappa, a))
    if indices is None:
        before = new_state if state is None else state
        out, _ = delta_wkv_step(*cast(torch.float32, *token, before), new_state)
    else:
        out = delta_wkv_step_in_pool(*token, new_state, indices)
    return out.unsqueeze(1).to(out_dtype)


def _minus(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """x - y @ z"""
    return torch.baddbmm(x.flatten(0, 1), y.flatten(0, 1), z.flatten(0, 1), alpha=-1).view(x.shape)


class _Chunks:
    """
    State-independent tensors for all chunks at once: matrices (B * H, chunks, ...). `reads` and `writes` are the
    vectors of the first and of the second half steps; `scores[i][j]` are the weights of writes of half steps j in
    reads of half steps i.
    """

    def __init__(self, layout, r, k, v, log_w, kappa, a):
        self.layout, size = layout, layout.chunk
        r, k, v, log_w, self.kappa, self.a = (layout.chunks_of(x).flatten(0, 1) for x in (r, k, v, log_w, kappa, a))
        self.v, log_w = v.contiguous(), log_w.contiguous()
        # The decay from the middle of a chunk to its start, and to the end of each token.
        token, end = torch.arange(size, device=v.device), torch.arange(size + 1, device=v.device)
        decay = (torch.where(token < end[:, None], 0.5, -0.5).to(v.dtype) @ log_w).exp_()
        self.remove_at, self.read_at, self.half = decay[..., :-1, :], decay[..., 1:, :], decay[..., -1:, :]
        self.write_at, self.lost = self.read_at.reciprocal(), log_w.sum(-2, keepdim=True).expm1()
        # A product is laid out in memory as its first factor.
        self.reads = self.remove_at * self.kappa, self.read_at * r
        self.writes = self.write_at * self.a * self.kappa, self.write_at * k
        # A second half step also reads its own token's write.
        self.scores = [[(x @ y.mT).tril_(i - 1) for y in self.writes] for i, x in enumerate(self.reads)]
        identity = torch.eye(size, dtype=v.dtype, device=v.device)
        matrix = identity + self.scores[0][0]
        # torch would copy a matrix on the left.
        self.solve = torch.linalg.solve_triangular(matrix, identity, upper=False, left=False, unitriangular=True)

    def walk(self, values, states, reverse=False):
        """
        Passes the state through the chunks.

        Args:
            values: values written by the second half steps, (B * H, chunks, C, V).
            states: states before the sequences, (sequences, H, V, K).
            reverse: from the last token to the first, which is the transpose: reads and writes change roles, and
                values and states are gradients.

        Returns:
            the readouts of the first and the second half steps, (B * H, chunks, C, V) each, a list of the states that
            enter the chunks, decayed to the middle, (B * H, V, K), and the states that leave the sequences.
        """
        (first, second), (write_first, write_second), solve = self.reads, self.writes, self.solve
        (_, across), (back, same) = self.scores
        if reverse:
            (first, second), (write_first, write_second), solve = self.writes, self.reads, solve.mT
            across, back, same = back.mT, across.mT, same.mT
        # Readouts of each half step from the state that enters the chunk, and from the values.
        first, across = solve @ first, solve @ across
        second, same = _minus(second, back, first), _minus(same, back, across)
        removed, out = across @ values, same @ values

        parts = self.half, self.lost, first, second, write_first, write_second, values, removed, out
        each = list(zip(*(x.unbind(1) for x in parts), strict=True))
        entering, leaving = [None] * len(each), [None] * len(self.layout.chunks)
        n, step = (len(each) - 1, -1) if reverse else (0, 1)
        for sequence in range(len(leaving))[::step]:
            state = self.layout.state_of(states, sequence).flatten(0, 1)
            for _ in range(self.layout.chunks[sequence]):
                half, lost, first, second, write_first, write_second, value, removed_n, out_n = each[n]
                entering[n] = state * half
                removed_n.baddbmm_(first, entering[n].mT)
                out_n.baddbmm_(second, entering[n].mT)
                change = (value.mT @ write_second).baddbmm_(removed_n.mT, write_first, alpha=-1)
                # A product with a decay near 1 would round off the loss.
                state = torch.addcmul(state, state, lost).addcmul_(change, half)
                n += step
            leaving[sequence] = state
        return removed, out, entering, torch.cat(leaving).view(states.shape)


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Computes [`subquad_kernels.delta_wkv`] in the widest dtype of the inputs. The third result is the states that enter
    the slabs except for the first, (slabs - 1, sequences, H, V, K), a hint for the backward pass.
    """
    floats = r, k, v, log_w, kappa, a, initial_state
    *inputs, state = cast(widest(*floats), *floats)
    batch, length, heads, key_size = k.shape
    if state is None:
        state = inputs[2].new_zeros(count_documents(cu_seqlens, batch), heads, v.shape[-1], key_size)
    out, span, of_tokens = torch.empty_like(v, dtype=out_dtype), length, slabs(k, cu_seqlens)
    passed = state.new_empty(len(of_tokens) - 1, *state.shape)
    if cu_seqlens is None and k.device.type == "cpu":
        values_of_chunk = CHUNK * batch * heads * max(key_size, v.shape[-1])
        span = CHUNK * max(VALUES * torch.get_num_threads() // values_of_chunk, 1)
    for n, slab in enumerate(of_tokens):
        if n:
            passed[n - 1] = state
        for start in range(slab.start, slab.stop, span):
            tokens = slice(start, min(start + span, slab.stop))
            chunks = _Chunks(_layout(tokens, k, cu_seqlens), *(x[:, tokens] for x in inputs))
            _, read, _, state = chunks.walk(chunks.v, state)
            out[:, tokens] = chunks.layout.from_chunks(torch.unflatten(read, 0, (batch, heads)))
    return out, state, passed


def _layout(tokens: slice, k: torch.Tensor, cu_seqlens: torch.Tensor | None) -> ChunkLayout:
    """The chunks of some tokens of all rows. A document may have none of them."""
    if cu_seqlens is not None and tokens.stop - tokens.start < k.shape[1]:
        cu_seqlens = cu_seqlens.clamp(tokens.start, tokens.stop) - tokens.start
    return ChunkLayout(tokens.stop - tokens.start, cu_seqlens, k.device, CHUNK)


def delta_wkv_chunked_backward(
    grad_out: torch.Tensor,
    grad_state: torch.Tensor,
    passed: torch.Tensor | None,
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
    Gradients of r, k, v, log_w, kappa, a and, if it is given, initial_state. The forward pass of each slab is
    recomputed from the states that enter it.
    """
    floats = r, k, v, log_w, kappa, a, initial_state
    if passed is None:
        passed = delta_wkv_chunked(*floats, cu_seqlens, out_dtype)[2] if len(slabs(k, cu_seqlens)) > 1 else ()
    grad_out, grad_state, *inputs, initial = cast(widest(*floats), grad_out, grad_state, *floats)
    initial = torch.zeros_like(grad_state) if initial is None else initial
    found = []
    for slab, states in reversed([*zip(slabs(k, cu_seqlens), (initial, *passed), strict=True)]):
        layout = _layout(slab, k, cu_seqlens)
        parts = [x[:, slab] for x in (grad_out, *inputs)]
        *grads, grad_state = _slab_backward(layout, grad_state, states, *parts)
        found.append(grads)
    grads = [parts[0] if len(parts) == 1 else torch.cat(parts, 1) for parts in zip(*reversed(found), strict=True)]
    return grads if initial_state is None else [*grads, grad_state]


def _slab_backward(
    layout: ChunkLayout, grad_state: torch.Tensor, states: torch.Tensor, grad_out: torch.Tensor, *inputs: torch.Tensor
) -> list[torch.Tensor]:
    """The gradients of r, k, v, log_w, kappa, a of a slab, and of the states that enter it."""
    batch, _, heads, _ = inputs[0].shape
    chunks = _Chunks(layout, *inputs)
    removed, _, entering, _ = chunks.walk(chunks.v, states)
    # The gradient of the state goes from the last chunk of each sequence to the first.
    g = layout.chunks_of(grad_out).flatten(0, 1).contiguous()
    grad_removed, dv, leaving, grad_initial = chunks.walk(g, grad_state, reverse=True)
    entering, leaving = torch.stack(entering, 1), torch.stack(leaving, 1)

    reads, writes, written, grad_read = chunks.reads, chunks.writes, (-removed, chunks.v), (-grad_removed, g)
    scores = [[(x @ y.mT).tril_(-1) for y in written] for x in grad_read]
    now = [(g * x).sum(-1, keepdim=True) for x in written]  # second half steps and their own tokens' writes
    removals, others = (
        x @ entering + first @ writes[0] + second @ writes[1]
        for x, (first, second) in zip(grad_read, scores, strict=True)
    )
    near = [first.mT @ reads[0] + second.mT @ reads[1] for first, second in zip(*scores, strict=True)]
    far = [x @ leaving for x in written]

    # The gradient of a decay sums every read from its token on, minus the writes from there on, plus earlier writes
    # that leave the chunk. First half steps read before the decay of their token.
    of_removals, of_others = reads[0] * removals, reads[1] * others
    of_near, of_far = (writes[0] * x + writes[1] * y for x, y in (near, far))
    dlog_w = (of_removals + of_others - of_near).flip(-2).cumsum(-2).flip(-2) - of_removals
    dlog_w = dlog_w + F.pad(of_far.cumsum(-2)[..., :-1, :], (0, 0, 1, 0)) + (entering * leaving).sum(-2, keepdim=True)

    dr = (others + now[0] * writes[0] + now[1] * writes[1]) * chunks.read_at
    dwritten, dk = ((x + y + z * reads[1]) * chunks.write_at for x, y, z in zip(near, far, now, strict=True))
    dkappa, da = chunks.a * dwritten + removals * chunks.remove_at, chunks.kappa * dwritten
    grads = (dr, dk, dv, dlog_w, dkappa, da)
    return [*(layout.from_chunks(torch.unflatten(x, 0, (batch, heads))) for x in grads), grad_initial]

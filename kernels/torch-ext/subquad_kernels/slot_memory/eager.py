"""
The slot memory in plain torch, parallel over time, for any device.

It is two passes of gated linear attention with the same decays and writes. The first reads the keys of the slots with
q and finds the logits of the slots, the second reads the values of the slots with the softmax of the logits.

The token pairs of a chunk are covered by halving, see chunks.py. A token also reads its own write: its read is
decayed from the start of its block up to and including its own decay, its write from there to the end of its block.

Halving begins with blocks of several tokens if no slot decays by more than exp(LIMIT) in any of them. In such a block
the decay between two tokens is the product of a factor of each, and all pairs are one product. Models that forget
slowly have blocks as long as a chunk. Blocks have a single token if slots are replaced or decay very fast, and on a
GPU, where choosing their size would wait for the decays.
"""

from collections.abc import Iterator

import torch

from ..backend import cast, widest
from ..chunks import ChunkLayout, halves
from ..state_pool import step_in_pool
from ..tracing import can_read_without_sync


# Replaces -inf, which sums and products would turn into NaN. Its exponential is also 0.
LOG_ZERO = -1e4
LIMIT = -8.0  # larger sums of log decays lose more digits


def slot_memory_step_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_f: torch.Tensor,
    state: torch.Tensor | None,
    new_state: torch.Tensor,
    indices: torch.Tensor | None,
) -> torch.Tensor:
    """
    One token in float32: q, k (B, 1, H, K), v (B, 1, H, V), log_f (B, 1, H, M), state (B, H, M, K + V). The state
    after it is written to `new_state`, which also holds the state before it if `state` is None. With `indices` it is a
    pool.
    """
    token = cast(torch.float32, *(x[:, 0] for x in (q, k, v, log_f)))
    if indices is None:
        out = _step(new_state if state is None else state, new_state, *token)
    else:
        out = step_in_pool(lambda states, *rows: _step(states, states, *rows), new_state, indices, *token)
    return out.transpose(1, 2).to(v.dtype)


def _step(state, new_state, q, k, v, log_f):
    written = torch.cat((k, v), -1).unsqueeze(-2)
    # state + p (written - state): one pass over the state, in which a row keeps its exact value if p is 0.
    torch.lerp(state, written, -log_f.expm1().unsqueeze(-1), out=new_state)
    slot_keys, slot_values = new_state.split((k.shape[-1], v.shape[-1]), -1)
    z = q.unsqueeze(-2) @ slot_keys.mT
    return z.softmax(-1) @ slot_values


class _Decays:
    """
    The decays of the tokens and blocks of chunks, from log_f (..., C, M).

    Attributes:
        block: the number of tokens of the smallest blocks, a power of 2. All pairs of their tokens are one product.
        totals: the decays of whole blocks of `block`, 2 `block`, ... C tokens, (..., C / size, M) each.
        first: the decay of the first token of each block, (..., C / `block`, 1, M).
        rise: the decay from the first token of a block to each of its tokens, (..., C / `block`, `block`, M). Times
            `first` it is the decay from the start of the block up to and including the token.
        fall: 1 / `rise`. Times `rise` of a later token it is the decay between the two.
        last: `rise` of the last token. Times `fall` it is the decay from a token to the end of the block.
    """

    def __init__(self, log_f: torch.Tensor):
        sums = [log_f]
        while sums[-1].shape[-2] > 1:
            sums.append(torch.unflatten(sums[-1], -2, (-1, 2)).sum(-2))
        level = len(sums) - 1 if can_read_without_sync(log_f) else 0
        while level and not sums[level].amin() >= LIMIT:  # also stops at NaN
            level -= 1
        self.block = 1 << level
        self.totals = [total.exp() for total in sums[level:]]
        blocks = torch.unflatten(log_f, -2, (-1, self.block))
        self.first = blocks[..., :1, :].exp()
        rise = torch.zeros_like(blocks)
        torch.cumsum(blocks[..., 1:, :], -2, out=rise[..., 1:, :])
        self.rise = rise.exp_()
        self.fall = self.rise.reciprocal()
        self.last = self.rise[..., -1:, :]

    def pairs(self) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """(level, size, decay of left blocks, decay of right blocks) for each size of blocks below a chunk."""
        for level, total in enumerate(self.totals[:-1]):
            left, right = torch.unflatten(total, -2, (-1, 2)).unsqueeze(-2).unbind(-3)
            yield level, self.block << level, left, right

    def pairs_down(self) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """As [`pairs`], the largest blocks first."""
        return reversed(list(self.pairs()))

    def in_blocks(self, x: torch.Tensor) -> torch.Tensor:
        """The tokens of each of the smallest blocks: (..., C, D) -> (..., C / block, block, D)."""
        return torch.unflatten(x, -2, (-1, self.block))

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """The pairs of tokens of each of the smallest blocks: (..., C, C) -> (..., C / block, block, block)."""
        x = torch.unflatten(torch.unflatten(x, -1, (-1, self.block)), -3, (-1, self.block))
        return x.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _between(x, block):
    """The rows of right blocks in the columns of left ones: (..., C, C) -> (..., C / 2 / block, block, block)."""
    x = torch.unflatten(torch.unflatten(x, -1, (-1, 2, block)), -4, (-1, 2, block))
    return x[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


class _Writes:
    """
    p = 1 - exp(log_f), the weights with which tokens write to the slots.

    Attributes:
        falling: p times `fall`, in blocks.
        levels: p of left blocks, decayed to the end of the block, for each size.
        chunk: p, decayed to the end of the chunk.
    """

    def __init__(self, log_f: torch.Tensor, decays: _Decays):
        self.falling = decays.in_blocks(-log_f.expm1()) * decays.fall
        self.levels, self.chunk = [], (self.falling * decays.last).flatten(-3, -2)
        for _, block, _, right in decays.pairs():
            left = halves(self.chunk, block)[0]
            self.levels.append(left.clone())
            left.mul_(right)


class _Reads:
    """
    x, the weights with which tokens read.

    Attributes:
        rising: x times `rise`, in blocks.
        levels: x of right blocks, decayed from the start of the block, for each size.
        chunk: x, decayed from the start of the chunk.
    """

    def __init__(self, x: torch.Tensor, decays: _Decays):
        self.rising = decays.in_blocks(x) * decays.rise
        self.levels, self.chunk = [], (self.rising * decays.first).flatten(-3, -2)
        for _, block, left, _ in decays.pairs():
            right = halves(self.chunk, block)[1]
            self.levels.append(right.clone())
            right.mul_(left)


def _read(found, scores, writes, decays):
    """
    For each token and slot, the sum of the writes up to the token, weighted by `scores` (..., C, C). Overwrites
    `found`, the readout from the state that enters its chunk.
    """
    for level, block, left, _ in decays.pairs_down():
        halves(found, block)[1].mul_(left).add_(_between(scores, block) @ writes.levels[level])
    found = decays.in_blocks(found).mul_(decays.first)
    found += decays.own(scores).tril() @ writes.falling
    return found.mul_(decays.rise).flatten(-3, -2)


def _weights(reads, writes, decays):
    """Weight of the write of one token (column) in the read of another (row), over all slots: (..., C, C)."""
    own = (reads.rising @ writes.falling.mT).tril_()
    if len(decays.totals) == 1:  # a block is a whole chunk
        return own.squeeze(-3)
    weights = own.new_zeros(*reads.chunk.shape[:-1], reads.chunk.shape[-2])
    decays.own(weights).copy_(own)
    for level, block, _, _ in decays.pairs():
        _between(weights, block).copy_(reads.levels[level] @ writes.levels[level].mT)
    return weights


def _prepare(tensors, log_f, cu_seqlens):
    layout = ChunkLayout(log_f.shape[1], cu_seqlens, log_f.device)
    *tensors, log_f = (layout.to_chunks(x) for x in (*tensors, log_f.clamp_min(LOG_ZERO)))
    decays = _Decays(log_f)
    return layout, tensors, log_f, decays, _Writes(log_f, decays)


def _enter(layout, decay, p, written, initial_state, leaving) -> Iterator[torch.Tensor]:
    """Yields the state that enters each chunk. Appends the states that leave the sequences to `leaving`."""
    n = 0
    for sequence, chunks in enumerate(layout.chunks):
        if initial_state is None:
            state = p.new_zeros(*p.shape[:2], p.shape[-1], written.shape[-1])
        else:
            state = layout.state_of(initial_state, sequence)
        for _ in range(chunks):
            yield state
            state = torch.addcmul(p[:, :, n].mT @ written[:, :, n], decay[:, :, n], state)
            n += 1
        leaving.append(state)


def _split(state, k, v):
    return (None, None) if state is None else state.split((k.shape[-1], v.shape[-1]), -1)


def slot_state_chunked(
    state: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, log_f: torch.Tensor
) -> torch.Tensor:
    """The state after the tokens k, v, log_f."""
    k, v, log_f, state = cast(widest(k, v, log_f, state), k, v, log_f, state)
    layout, (written,), _, decays, writes = _prepare((torch.cat((k, v), -1),), log_f, None)
    leaving = []
    for _ in _enter(layout, decays.totals[-1].mT, writes.chunk, written, state, leaving):
        pass
    return leaving[0]


def slot_memory_chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_f: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Computes [`subquad_kernels.slot_memory`] in the widest dtype of the inputs. The third result is the logits of the
    slots, (B, T, H, M), which the backward pass needs.
    """
    out_dtype, floats = v.dtype, (q, k, v, log_f, initial_state)
    q, k, v, log_f, initial_state = cast(widest(*floats), *floats)
    layout, (q, k, v), _, decays, writes = _prepare((q, k, v), log_f, cu_seqlens)
    keys, values = _split(initial_state, k, v)

    def through_state(x, written, state, transposed):
        # Chunk by chunk, so that the states do not all exist at once.
        leaving, found = [], []
        for n, entering in enumerate(_enter(layout, decays.totals[-1].mT, writes.chunk, written, state, leaving)):
            found.append(x[:, :, n] @ (entering.mT if transposed else entering))
        return torch.stack(found, 2), torch.cat(leaving)

    found, keys = through_state(q, k, keys, True)
    z = _read(found, q @ k.mT, writes, decays)
    reads = _Reads(z.softmax(-1), decays)
    out, values = through_state(reads.chunk, v, values, False)
    out += _weights(reads, writes, decays) @ v
    return layout.from_chunks(out).to(out_dtype), torch.cat((keys, values), -1), layout.from_chunks(z)


def _form_backward(layout, a, b, x, writes, decays, initial_state, grad_state):
    """
    Both passes are sums over the tokens τ <= t of a_t · b_τ times the sum over slots of x_t p_τ and the decays between
    τ and t. Returns the gradients of a, b, x, p, the log decays (except through p) and the initial state.
    """
    reads, scores, decay = _Reads(x, decays), a @ b.mT, decays.totals[-1].mT
    states = list(_enter(layout, decay, writes.chunk, b, initial_state, []))
    n = len(states)
    da, db, dx, dp, dtotal = ([None] * n for _ in range(5))
    # The gradient of the state goes from the last chunk of each sequence to the first.
    grad_initial = [None] * len(layout.chunks)
    for sequence in reversed(range(len(layout.chunks))):
        grad = layout.state_of(grad_state, sequence)
        for _ in range(layout.chunks[sequence]):
            n -= 1
            state, reading = states.pop(), reads.chunk[:, :, n]
            da[n], dx[n] = reading @ state, a[:, :, n] @ state.mT
            db[n], dp[n] = writes.chunk[:, :, n] @ grad, b[:, :, n] @ grad.mT
            dtotal[n] = (state * grad).sum(-1)
            grad = torch.addcmul(reading.mT @ a[:, :, n], decay[:, :, n], grad)
        grad_initial[sequence] = grad
    da, db, dx, dp, dtotal = (torch.stack(chunks, 2) for chunks in (da, db, dx, dp, dtotal))
    dtotal = dtotal.unsqueeze(-2) * decays.totals[-1]

    weights = _weights(reads, writes, decays)
    da += weights @ b
    db += weights.mT @ a
    # dx is decayed from the start of a block, dp to its end; dtotal is the gradient of the block's summed log decay.
    for level, block, left, right in decays.pairs_down():
        x_right, p_left, between = halves(dx, block)[1], halves(dp, block)[0], _between(scores, block)
        dleft = left * (x_right * reads.levels[level]).sum(-2, keepdim=True)
        dright = right * (p_left * writes.levels[level]).sum(-2, keepdim=True)
        dtotal = (dtotal[..., None, None, :] + torch.stack((dleft, dright), -3)).flatten(-4, -2)
        x_right.mul_(left).add_(between @ writes.levels[level])
        p_left.mul_(right).add_(between.mT @ reads.levels[level])

    # Inside the smallest blocks, first through the decays of whole blocks, then through those between two tokens.
    x, p, own = reads.rising, writes.falling, decays.own(scores).tril()
    dx, dp = (decays.in_blocks(y) for y in (dx, dp))
    dx *= decays.first
    dp *= decays.last
    dfirst, dlast = (x * dx).sum(-2), (p * dp).sum(-2)
    dx += own @ p
    dp += own.mT @ x
    # The gradient of the log decay between the first token and each one. Its sums are the tokens' own gradients.
    dlog = (x * dx).addcmul_(p, dp, value=-1)
    dlog[..., -1, :] += dlast
    dlog = dlog.flip(-2).cumsum(-2).flip(-2)
    dlog[..., 0, :] = dfirst
    dlog += dtotal.unsqueeze(-2)
    dx, dp, dlog = (y.flatten(-3, -2) for y in (dx.mul_(decays.rise), dp.mul_(decays.fall), dlog))
    return da, db, dx, dp, dlog, torch.cat(grad_initial)


def slot_memory_chunked_backward(
    grad_out: torch.Tensor,
    grad_state: torch.Tensor,
    logits: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_f: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> list[torch.Tensor]:
    """
    Gradients of q, k, v, log_f and, if it is given, initial_state. The forward pass is recomputed, except for the
    logits.
    """
    floats = q, k, v, log_f, initial_state
    dtype = widest(*floats)
    grad_out, grad_state, q, k, v, log_f, initial_state = cast(dtype, grad_out, grad_state, *floats)
    layout, (q, k, v, g, z), log_f, decays, writes = _prepare((q, k, v, grad_out, logits), log_f, cu_seqlens)
    (keys, values), (grad_keys, grad_values) = (_split(x, k, v) for x in (initial_state, grad_state))
    s = z.softmax(-1)
    _, dv, ds, dp, dlog_f, grad_values = _form_backward(layout, g, v, s, writes, decays, values, grad_values)
    dz = s * (ds - (s * ds).sum(-1, keepdim=True))
    dq, dk, _, dp_k, dlog_f_k, grad_keys = _form_backward(layout, q, k, dz, writes, decays, keys, grad_keys)
    dlog_f += dlog_f_k - log_f.exp() * (dp + dp_k)
    grads = [layout.from_chunks(x) for x in (dq, dk, dv, dlog_f)]
    return grads if initial_state is None else [*grads, torch.cat((grad_keys, grad_values), -1)]

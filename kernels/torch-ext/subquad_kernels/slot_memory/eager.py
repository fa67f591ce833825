"""
The slot memory in plain torch, parallel over time, for any device.

It is two passes of gated linear attention with the same decays and writes. The first reads the keys of the slots with
q and finds the logits of the slots, the second reads the values of the slots with the softmax of the logits.

The token pairs of a chunk are covered by halving, see chunks.py. A token also reads what it writes itself: its read is
decayed from the start of its block up to and including its own decay, its write from there to the end of its block.
"""

from collections.abc import Iterator

import torch

from ..backend import cast, widest
from ..chunks import ChunkLayout, halves
from ..state_pool import step_in_pool


# Replaces -inf, which sums and products would turn into NaN. Its exponential is 0 too.
LOG_ZERO = -1e4


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


def _decays(log_f):
    """The decay of every block of 1, 2, 4, ... C tokens, (..., C / block, M) each."""
    totals = [log_f]
    while totals[-1].shape[-2] > 1:
        totals.append(totals[-1].unflatten(-2, (-1, 2)).sum(-2))
    return [total.exp() for total in totals]


def _pairs(decays):
    """Yields (level, size, decay of left blocks, decay of right blocks) for each block size below that of a chunk."""
    for level, decay in enumerate(decays[:-1]):
        left, right = decay.unflatten(-2, (-1, 2)).unsqueeze(-2).unbind(-3)
        yield level, 1 << level, left, right


def _pairs_down(decays):
    """As [`_pairs`], the largest blocks first."""
    return reversed(list(_pairs(decays)))


def _between(x, block):
    """The rows of right blocks in the columns of left ones: (..., C, C) -> (..., C / 2 / block, block, block)."""
    x = x.unflatten(-1, (-1, 2, block)).unflatten(-4, (-1, 2, block))
    return x[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _diagonal(x):
    return x.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)


def _writes(p, decays):
    """p of left blocks, decayed to the end of the block, for each size; p decayed to the end of the chunk."""
    levels, p = [], p.clone()
    for _, block, _, right in _pairs(decays):
        p_left = halves(p, block)[0]
        levels.append(p_left.clone())
        p_left.mul_(right)
    return levels, p


def _reads(x, decays):
    """x of right blocks, decayed from the start of the block, for each size; x decayed from the start of the chunk."""
    levels, x = [], x * decays[0]
    for _, block, left, _ in _pairs(decays):
        x_right = halves(x, block)[1]
        levels.append(x_right.clone())
        x_right.mul_(left)
    return levels, x


def _read(found, scores, p, writes, decays):
    """
    For each token and slot the sum of what the tokens up to it wrote, weighted by `scores` (..., C, C). Overwrites
    `found`, what a token reads from the state that enters its chunk.
    """
    for level, block, left, _ in _pairs_down(decays):
        halves(found, block)[1].mul_(left).add_(_between(scores, block) @ writes[level])
    return found.mul_(decays[0]).addcmul_(_diagonal(scores), p)


def _weights(x, p, reads, writes, decays):
    """Weight of the write of one token (column) in the read with x of another (row), over all slots: (..., C, C)."""
    weights = torch.diag_embed((x * p).sum(-1))
    for level, block, _, _ in _pairs(decays):
        _between(weights, block).copy_(reads[level] @ writes[level].mT)
    return weights


def _prepare(tensors, log_f, cu_seqlens):
    layout = ChunkLayout(log_f.shape[1], cu_seqlens, log_f.device)
    *tensors, log_f = (layout.to_chunks(x) for x in (*tensors, log_f.clamp_min(LOG_ZERO)))
    return layout, tensors, -log_f.expm1(), _decays(log_f)


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
    layout, (written,), p, decays = _prepare((torch.cat((k, v), -1),), log_f, None)
    leaving = []
    for _ in _enter(layout, decays[-1].mT, _writes(p, decays)[1], written, state, leaving):
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
    layout, (q, k, v), p, decays = _prepare((q, k, v), log_f, cu_seqlens)
    writes, p_chunk = _writes(p, decays)
    keys, values = _split(initial_state, k, v)

    def through_state(x, written, state, transposed):
        # Chunk by chunk, so that the states do not all exist at once.
        leaving, found = [], []
        for n, entering in enumerate(_enter(layout, decays[-1].mT, p_chunk, written, state, leaving)):
            found.append(x[:, :, n] @ (entering.mT if transposed else entering))
        return torch.stack(found, 2), torch.cat(leaving)

    found, keys = through_state(q, k, keys, True)
    z = _read(found, q @ k.mT, p, writes, decays)
    s = z.softmax(-1)
    reads, s_chunk = _reads(s, decays)
    out, values = through_state(s_chunk, v, values, False)
    out += _weights(s, p, reads, writes, decays) @ v
    return layout.from_chunks(out).to(out_dtype), torch.cat((keys, values), -1), layout.from_chunks(z)


def _form_backward(layout, a, b, x, p, decays, writes, p_chunk, initial_state, grad_state):
    """
    Both passes are sums over the tokens τ <= t of a_t · b_τ times the sum over slots of x_t p_τ and the decays between
    τ and t. Returns the gradients of a, b, x, p, the log decays (except through p) and the initial state.
    """
    (reads, x_chunk), scores, decay = _reads(x, decays), a @ b.mT, decays[-1].mT
    states = list(_enter(layout, decay, p_chunk, b, initial_state, []))
    n = len(states)
    da, db, dx, dp, dtotal = ([None] * n for _ in range(5))
    # The gradient of the state goes from the last chunk of each sequence to the first.
    grad_initial = [None] * len(layout.chunks)
    for sequence in reversed(range(len(layout.chunks))):
        grad = layout.state_of(grad_state, sequence)
        for _ in range(layout.chunks[sequence]):
            n -= 1
            state, reading = states.pop(), x_chunk[:, :, n]
            da[n], dx[n] = reading @ state, a[:, :, n] @ state.mT
            db[n], dp[n] = p_chunk[:, :, n] @ grad, b[:, :, n] @ grad.mT
            dtotal[n] = (state * grad).sum(-1)
            grad = torch.addcmul(reading.mT @ a[:, :, n], decay[:, :, n], grad)
        grad_initial[sequence] = grad
    da, db, dx, dp, dtotal = (torch.stack(chunks, 2) for chunks in (da, db, dx, dp, dtotal))
    dtotal = dtotal.unsqueeze(-2) * decays[-1]

    weights = _weights(x, p, reads, writes, decays)
    da += weights @ b
    db += weights.mT @ a
    # dx is decayed from the start of a block, dp to its end; dtotal is the gradient of the block's summed log decay.
    for level, block, left, right in _pairs_down(decays):
        x_right, p_left, between = halves(dx, block)[1], halves(dp, block)[0], _between(scores, block)
        dleft = left * (x_right * reads[level]).sum(-2, keepdim=True)
        dright = right * (p_left * writes[level]).sum(-2, keepdim=True)
        dtotal = (dtotal[..., None, None, :] + torch.stack((dleft, dright), -3)).flatten(-4, -2)
        x_right.mul_(left).add_(between @ writes[level])
        p_left.mul_(right).add_(between.mT @ reads[level])
    dx *= decays[0]
    dtotal.addcmul_(dx, x)
    own = _diagonal(scores)
    return da, db, dx.addcmul_(own, p), dp.addcmul_(own, x), dtotal, torch.cat(grad_initial)


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
    Gradients of q, k, v, log_f and, if it is given, initial_state. The forward pass is computed again, except for the
    logits.
    """
    floats = q, k, v, log_f, initial_state
    dtype = widest(*floats)
    grad_out, grad_state, q, k, v, log_f, initial_state = cast(dtype, grad_out, grad_state, *floats)
    layout, (q, k, v, g, z), p, decays = _prepare((q, k, v, grad_out, logits), log_f, cu_seqlens)
    (keys, values), (grad_keys, grad_values) = (_split(x, k, v) for x in (initial_state, grad_state))
    shared = p, decays, *_writes(p, decays)
    s = z.softmax(-1)
    _, dv, ds, dp, dlog_f, grad_values = _form_backward(layout, g, v, s, *shared, values, grad_values)
    dz = s * (ds - (s * ds).sum(-1, keepdim=True))
    dq, dk, _, dp_k, dlog_f_k, grad_keys = _form_backward(layout, q, k, dz, *shared, keys, grad_keys)
    dlog_f += dlog_f_k - decays[0] * (dp + dp_k)
    grads = [layout.from_chunks(x) for x in (dq, dk, dv, dlog_f)]
    return grads if initial_state is None else [*grads, torch.cat((grad_keys, grad_values), -1)]

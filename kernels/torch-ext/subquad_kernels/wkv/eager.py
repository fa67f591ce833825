"""
WKV in plain torch, parallel over time, for any device.

The token pairs of a chunk are covered by halving, see chunks.py; r reads and k writes. Finally, r is decayed from
the start of its chunk and k to the end of it, as needed to pass the state between chunks.
"""

import torch

from ..backend import cast, widest
from ..chunks import ChunkLayout, halves
from ..state_pool import step_in_pool


def only_token(
    r: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_w: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sequences of one token without the time axis; a static decay has none."""
    return r[:, 0], k[:, 0], v[:, 0], log_w if log_w.dim() == 2 else log_w[:, 0]


def wkv_step(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    u: torch.Tensor,
    state: torch.Tensor,
    new_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    One token: r, k, log_w (B, H, K), v (B, H, V), u (H, K), state (B, H, K, V). The state after it is written to
    `new_state`, which may be `state` itself; None makes a new tensor.
    """
    bonus = (r * u * k).sum(-1, keepdim=True)
    out = torch.addcmul((r.unsqueeze(-2) @ state).squeeze(-2), bonus, v)
    after = torch.mul(state, log_w.exp().unsqueeze(-1), out=new_state)
    return out, after.addcmul_(k.unsqueeze(-1), v.unsqueeze(-2))


def wkv_step_in_pool(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    u: torch.Tensor,
    pool: torch.Tensor,
    indices: torch.Tensor,
) -> torch.Tensor:
    """One token in float32 for rows with their states at `indices` (B) of a pool, which change; see [`wkv_step`]."""
    r, k, v, log_w, u = cast(torch.float32, r, k, v, log_w, u)

    def step(state, r, k, v, log_w):
        return wkv_step(r, k, v, log_w, u, state, state)[0]

    return step_in_pool(step, pool, indices, r, k, v, log_w.expand_as(k))


def wkv_step_inplace(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    u: torch.Tensor,
    state: torch.Tensor | None,
    new_state: torch.Tensor,
    indices: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """
    Sequences of one token in float32: see [`wkv_step`]. The state after it is written to `new_state`, which also holds
    the state before it if `state` is None. With `indices` it is a pool.
    """
    token = only_token(r, k, v, log_w)
    if indices is None:
        before = new_state if state is None else state
        out, _ = wkv_step(*cast(torch.float32, *token, u, before), new_state)
    else:
        out = wkv_step_in_pool(*token, u, new_state, indices)
    return out.unsqueeze(1).to(out_dtype)


def _join(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.stack((left, right), dim=-3).flatten(-4, -2)


def _decayed(r, k, total):
    """Yields (block, r, k, total) for each block size; total (..., C / block, K) is the log decay of a whole block."""
    block = 1
    yield block, r, k, total
    while block < r.shape[-2]:
        factor_left, factor_right = torch.unflatten(total.exp().unsqueeze(-2), -3, (-1, 2)).unbind(-3)
        r_left, r_right = halves(r, block)
        k_left, k_right = halves(k, block)
        r = _join(r_left, r_right * factor_left)
        k = _join(k_left * factor_right, k_right)
        total = torch.unflatten(total, -2, (-1, 2)).sum(-2)
        block *= 2
        yield block, r, k, total


def _enter(layout, decay, added, initial_state):
    """The states that enter the chunks, (B, H, N, K, V), and the states that leave the sequences."""
    entering, leaving, n = [], [], 0
    for sequence, chunks in enumerate(layout.chunks):
        if initial_state is None:
            state = torch.zeros_like(added[:, :, 0])
        else:
            state = layout.state_of(initial_state, sequence)
        for _ in range(chunks):
            entering.append(state)
            state = torch.addcmul(added[:, :, n], decay[:, :, n], state)
            n += 1
        leaving.append(state)
    return torch.stack(entering, dim=2), torch.cat(leaving)


def wkv_chunked(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    u: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    masks: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes [`subquad_kernels.wkv`] in the widest dtype of the inputs. Only the Triton kernels need the masks."""
    floats = r, k, v, log_w, u, initial_state
    r, k, v, log_w, u, initial_state = cast(widest(*floats), *floats)
    layout = ChunkLayout(k.shape[1], cu_seqlens, k.device)
    r, k, v, log_w = (layout.to_chunks(x) for x in (r, k, v, log_w.expand_as(k)))
    out = (r * u[:, None, None] * k).sum(-1, keepdim=True) * v
    for block, r_decayed, k_decayed, total in _decayed(r, k, log_w):  # noqa: B007 (the last one is used below)
        if block < layout.chunk:
            (_, r_right), (k_left, _), (v_left, _) = (halves(x, block) for x in (r_decayed, k_decayed, v))
            halves(out, block)[1].add_(r_right @ k_left.mT @ v_left)

    # Now r is decayed from the start of its chunk, k to the end, and `total` is the log decay of the chunk.
    entering, state = _enter(layout, total.exp().mT, k_decayed.mT @ v, initial_state)
    return layout.from_chunks(out + r_decayed @ entering).to(out_dtype), state


def wkv_chunked_backward(
    grad_out: torch.Tensor,
    grad_state: torch.Tensor,
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    u: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    masks: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> list[torch.Tensor]:
    """
    Gradients of r, k, v, log_w, u and, if it is given, initial_state. The forward pass is recomputed, so that only its
    inputs are kept.
    """
    floats = r, k, v, log_w, u, initial_state
    dtype = widest(*floats)
    grad_out, grad_state, r, k, v, log_w, u, initial_state = cast(dtype, grad_out, grad_state, *floats)
    layout, static_decay = ChunkLayout(k.shape[1], cu_seqlens, k.device), log_w.dim() == 2
    r, k, v, log_w, g = (layout.to_chunks(x) for x in (r, k, v, log_w.expand_as(k), grad_out))
    *levels, (_, r_chunk, k_chunk, total) = _decayed(r, k, log_w)
    decay = total.exp().mT
    entering, _ = _enter(layout, decay, k_chunk.mT @ v, initial_state)

    # The gradient of the state goes from the last chunk of each sequence to the first.
    read = r_chunk.mT @ g
    n = read.shape[2]
    leaving, grad_initial = [None] * n, [None] * len(layout.chunks)
    for sequence in reversed(range(len(layout.chunks))):
        grad = layout.state_of(grad_state, sequence)
        for _ in range(layout.chunks[sequence]):
            n -= 1
            leaving[n] = grad
            grad = torch.addcmul(read[:, :, n], decay[:, :, n], grad)
        grad_initial[sequence] = grad
    leaving = torch.stack(leaving, dim=2)

    dr = g @ entering.mT
    dk = v @ leaving.mT
    dv = k_chunk @ leaving
    dtotal = (decay * (entering * leaving).sum(-1, keepdim=True)).mT
    for block, r, k, total in reversed(levels):
        factor_left, factor_right = torch.unflatten(total.exp(), -2, (-1, 2)).unbind(-2)
        (_, r_right), (k_left, _), (v_left, _), (_, g_right) = (halves(x, block) for x in (r, k, v, g))
        (dr_left, dr_right), (dk_left, dk_right) = halves(dr, block), halves(dk, block)
        dtotal = torch.stack(
            (
                dtotal + factor_left * (dr_right * r_right).sum(-2),
                dtotal + factor_right * (dk_left * k_left).sum(-2),
            ),
            dim=-2,
        ).flatten(-3, -2)
        scores, dscores = r_right @ k_left.mT, g_right @ v_left.mT
        dr = _join(dr_left, dr_right * factor_left.unsqueeze(-2) + dscores @ k_left)
        dk = _join(dk_left * factor_right.unsqueeze(-2) + dscores.mT @ r_right, dk_right)
        halves(dv, block)[0].add_(scores.mT @ g_right)

    u = u[:, None, None]
    dbonus = (g * v).sum(-1, keepdim=True)
    dv += (r * u * k).sum(-1, keepdim=True) * g
    du = (dbonus * r * k).sum((0, 2, 3))
    dr, dk = dr + dbonus * u * k, dk + dbonus * u * r
    grads = [layout.from_chunks(x) for x in (dr, dk, dv, dtotal)]
    if static_decay:
        grads[3] = grads[3].sum((0, 1))
    grads.append(du)
    return grads if initial_state is None else [*grads, torch.cat(grad_initial)]

"""
WKV in plain torch, parallel over time, for any device.

The sequence is cut into chunks. Inside a chunk the token pairs are covered by halving: of two neighbouring blocks,
every token of the right one reads every token of the left one through one matrix product, after r has been decayed
from the border to its token and k from its token to the border. Blocks then merge, and blocks twice as long follow. At
the end r is decayed from the start of its chunk and k to the end, which is what passing the state from chunk to chunk
needs.

Every factor is the exponential of a sum of log decays, never of a difference: none exceeds 1 and none suffers
cancellation, whatever the decays. The price is log2(chunk) products over blocks in place of one over chunks.
"""

import itertools

import torch

from .reference import document_bounds


CHUNK_SIZE = 64


def wkv_step(
    r: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_w: torch.Tensor, u: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: r, k, log_w (B, H, K), v (B, H, V), u (H, K), state (B, H, K, V)."""
    bonus = (r * u * k).sum(-1, keepdim=True)
    out = (r.unsqueeze(-2) @ state).squeeze(-2) + bonus * v
    return out, log_w.exp().unsqueeze(-1) * state + k.unsqueeze(-1) * v.unsqueeze(-2)


class _Layout:
    """How sequences lie in chunks: (B, T, H, .) <-> (B, H, N, C, .), gaps filled with tokens that change nothing."""

    def __init__(self, length: int, cu_seqlens: torch.Tensor | None, device: torch.device):
        bounds = document_bounds(cu_seqlens, length)
        lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
        self.length = length
        self.chunk = min(CHUNK_SIZE, 1 << max(max(lengths) - 1, 0).bit_length())
        # Number of chunks of each sequence; a state passes through them and starts anew after them.
        self.chunks = [-(-n // self.chunk) for n in lengths]
        self.place = None
        if len(lengths) > 1:
            first = [sum(self.chunks[:n]) * self.chunk for n in range(len(lengths))]
            self.place = torch.cat([torch.arange(a, a + n) for a, n in zip(first, lengths, strict=True)]).to(device)

    def to_chunks(self, x: torch.Tensor) -> torch.Tensor:
        filled = sum(self.chunks) * self.chunk
        if self.place is not None:
            x = x.new_zeros(1, filled, *x.shape[2:]).index_copy_(1, self.place, x)
        else:
            x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, filled - self.length))
        return x.unflatten(1, (-1, self.chunk)).permute(0, 3, 1, 2, 4).contiguous()

    def from_chunks(self, x: torch.Tensor) -> torch.Tensor:
        x = x.permute(0, 2, 3, 1, 4).flatten(1, 2)
        return x[:, : self.length] if self.place is None else x[:, self.place]


def _halves(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., C, D) -> the left and the right block of every pair, (..., C / 2 / block, block, D) each."""
    return x.unflatten(-2, (-1, 2, block)).unbind(-3)


def _join(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.stack((left, right), dim=-3).flatten(-4, -2)


def _decayed(r, k, total):
    """For each block size: (block, r, k, total), total (..., C / block, K) being a block's summed log decay."""
    block = 1
    yield block, r, k, total
    while block < r.shape[-2]:
        factor_left, factor_right = total.exp().unsqueeze(-2).unflatten(-3, (-1, 2)).unbind(-3)
        r_left, r_right = _halves(r, block)
        k_left, k_right = _halves(k, block)
        r = _join(r_left, r_right * factor_left)
        k = _join(k_left * factor_right, k_right)
        total = total.unflatten(-2, (-1, 2)).sum(-2)
        block *= 2
        yield block, r, k, total


def _enter(layout, decay, added, initial_state):
    """The states that enter each chunk, (B, H, N, K, V), and the one that leaves each sequence."""
    entering, leaving, n = [], [], 0
    for sequence, chunks in enumerate(layout.chunks):
        if initial_state is None:
            state = torch.zeros_like(added[:, :, 0])
        elif layout.place is None:
            state = initial_state
        else:
            state = initial_state[sequence : sequence + 1]
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
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments, shapes and results are those of [`subquad_kernels.wkv`]; all floating inputs have one dtype."""
    layout = _Layout(k.shape[1], cu_seqlens, k.device)
    r, k, v, log_w = (layout.to_chunks(x) for x in (r, k, v, log_w.expand_as(k)))
    out = (r * u[:, None, None] * k).sum(-1, keepdim=True) * v
    for block, r_decayed, k_decayed, total in _decayed(r, k, log_w):  # noqa: B007 (the last one is used below)
        if block < layout.chunk:
            (_, r_right), (k_left, _), (v_left, _) = (_halves(x, block) for x in (r_decayed, k_decayed, v))
            _halves(out, block)[1].add_(r_right @ k_left.mT @ v_left)

    # Now r is decayed from the start of its chunk, k to the end, and the total is the chunk's.
    entering, state = _enter(layout, total.exp().mT, k_decayed.mT @ v, initial_state)
    return layout.from_chunks(out + r_decayed @ entering), state


def wkv_chunked_backward(
    grad_out: torch.Tensor,
    grad_state: torch.Tensor,
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    u: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """
    Gradients of r, k, v, log_w, u and, where it is given, initial_state. What the forward pass computed is computed
    again, so that only its inputs are kept between the two.
    """
    layout, static_decay = _Layout(k.shape[1], cu_seqlens, k.device), log_w.dim() == 2
    r, k, v, log_w, g = (layout.to_chunks(x) for x in (r, k, v, log_w.expand_as(k), grad_out))
    *levels, (_, r_chunk, k_chunk, total) = _decayed(r, k, log_w)
    decay = total.exp().mT
    entering, _ = _enter(layout, decay, k_chunk.mT @ v, initial_state)

    # The gradient of the state walks from the last chunk of each sequence to its first.
    read = r_chunk.mT @ g
    n = read.shape[2]
    leaving, grad_initial = [None] * n, [None] * len(layout.chunks)
    for sequence in reversed(range(len(layout.chunks))):
        grad = grad_state if layout.place is None else grad_state[sequence : sequence + 1]
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
        factor_left, factor_right = total.exp().unflatten(-2, (-1, 2)).unbind(-2)
        (_, r_right), (k_left, _), (v_left, _), (_, g_right) = (_halves(x, block) for x in (r, k, v, g))
        (dr_left, dr_right), (dk_left, dk_right) = _halves(dr, block), _halves(dk, block)
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
        _halves(dv, block)[0].add_(scores.mT @ g_right)

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

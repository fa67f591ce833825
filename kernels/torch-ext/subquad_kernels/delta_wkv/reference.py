"""The recurrence of Goose (RWKV-7) as written in the paper: the reference for all tests."""

import torch

from ..documents import sequences


def delta_wkv_reference(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    kappa: torch.Tensor,
    a: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The generalised delta rule of arXiv:2503.14456, token by token, in the dtype of the inputs (the caller casts): see
    [`subquad_kernels.delta_wkv`].
    """
    batch, length, heads, key_size = k.shape
    w = log_w.exp()
    out, states = torch.zeros_like(v), []
    for n, (b, start, stop) in enumerate(sequences(cu_seqlens, batch, length)):
        s = v.new_zeros(heads, v.shape[-1], key_size) if initial_state is None else initial_state[n]
        rows = []
        for t in range(start, stop):
            removed = s @ kappa[b, t, :, :, None]
            s = s * w[b, t, :, None, :]
            s = s - removed * (a[b, t] * kappa[b, t])[:, None, :]
            s = s + v[b, t, :, :, None] * k[b, t, :, None, :]
            rows.append((s @ r[b, t, :, :, None])[:, :, 0])
        if rows:
            out = out.index_put((torch.tensor(b), torch.arange(start, stop)), torch.stack(rows))
        states.append(s)
    return out, torch.stack(states)

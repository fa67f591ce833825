"""The WKV recurrence as written in the paper: the reference for all tests."""

import torch

from ..documents import sequences


def wkv_reference(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    u: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Equations 8, 9 (Eagle) and 21, 22 (Finch) of arXiv:2404.05892, token by token, in the dtype of the inputs (the
    caller casts): see [`subquad_kernels.wkv`].
    """
    batch, length, heads, key_size = k.shape
    w = log_w.expand(batch, length, heads, key_size).exp()
    out, states = torch.zeros_like(v), []
    for n, (b, start, stop) in enumerate(sequences(cu_seqlens, batch, length)):
        s = v.new_zeros(heads, key_size, v.shape[-1]) if initial_state is None else initial_state[n]
        rows = []
        for t in range(start, stop):
            kv = k[b, t, :, :, None] * v[b, t, :, None, :]
            rows.append((r[b, t, :, None, :] @ (s + u[:, :, None] * kv))[:, 0])
            s = w[b, t, :, :, None] * s + kv
        if rows:
            out = out.index_put((torch.tensor(b), torch.arange(start, stop)), torch.stack(rows))
        states.append(s)
    return out, torch.stack(states)

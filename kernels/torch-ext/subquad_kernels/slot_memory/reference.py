"""The slot memory of Raven as written in the paper: the reference for all tests."""

import torch

from ..documents import sequences


def slot_memory_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_f: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The recurrence of [`subquad_kernels.slot_memory`], token by token, in the dtype of the inputs (the caller casts).
    """
    batch, length, heads, key_size = k.shape
    written = torch.cat((k, v), -1)
    f, p = log_f.exp(), -log_f.expm1()
    out, states = torch.zeros_like(v), []
    for n, (b, start, stop) in enumerate(sequences(cu_seqlens, batch, length)):
        zeros = v.new_zeros(heads, log_f.shape[-1], written.shape[-1])
        s = zeros if initial_state is None else initial_state[n]
        rows = []
        for t in range(start, stop):
            s = f[b, t, :, :, None] * s + p[b, t, :, :, None] * written[b, t, :, None, :]
            slot_keys, slot_values = s[..., :key_size], s[..., key_size:]
            z = (slot_keys @ q[b, t, :, :, None])[..., 0]
            rows.append((z.softmax(-1)[:, None, :] @ slot_values)[:, 0])
        if rows:
            out = out.index_put((torch.tensor(b), torch.arange(start, stop)), torch.stack(rows))
        states.append(s)
    return out, torch.stack(states)

"""The slot memory of Raven as written in the paper: the reference for all tests."""

import torch

from ..documents import count_documents, sequences


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
    batch, _, heads, key_size = k.shape
    written = torch.cat((k, v), -1)
    if initial_state is None:
        initial_state = v.new_zeros(count_documents(cu_seqlens, batch), heads, log_f.shape[-1], written.shape[-1])
    outs, states = [], []
    tokens = sequences(cu_seqlens, q, written, log_f.exp(), -log_f.expm1())
    for s, sequence in zip(initial_state.split(batch), tokens, strict=True):
        for q_t, written_t, f_t, p_t in sequence:
            s = f_t[..., None] * s + p_t[..., None] * written_t[..., None, :]
            slot_keys, slot_values = s[..., :key_size], s[..., key_size:]
            z = (slot_keys @ q_t[..., None])[..., 0]
            outs.append((z.softmax(-1)[..., None, :] @ slot_values)[..., 0, :])
        states.append(s)
    return torch.stack(outs, 1), torch.cat(states)

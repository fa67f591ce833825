"""The recurrence of Goose (RWKV-7) as written in the paper: the reference for all tests."""

import torch

from ..documents import count_documents, sequences


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
    batch, _, heads, key_size = k.shape
    if initial_state is None:
        initial_state = v.new_zeros(count_documents(cu_seqlens, batch), heads, v.shape[-1], key_size)
    outs, states = [], []
    tokens = sequences(cu_seqlens, r, k, v, log_w.exp(), kappa, a)
    for s, sequence in zip(initial_state.split(batch), tokens, strict=True):
        for r_t, k_t, v_t, w_t, kappa_t, a_t in sequence:
            removed = s @ kappa_t[..., None]
            s = s * w_t[..., None, :]
            s = s - removed * (a_t * kappa_t)[..., None, :]
            s = s + v_t[..., None] * k_t[..., None, :]
            outs.append((s @ r_t[..., None])[..., 0])
        states.append(s)
    return torch.stack(outs, 1), torch.cat(states)

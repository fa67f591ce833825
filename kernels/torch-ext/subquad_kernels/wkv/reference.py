"""The WKV recurrence as written in the paper: the reference for all tests."""

import torch

from ..documents import count_documents, sequences


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
    if initial_state is None:
        initial_state = v.new_zeros(count_documents(cu_seqlens, batch), heads, key_size, v.shape[-1])
    outs, states = [], []
    for s, sequence in zip(initial_state.split(batch), sequences(cu_seqlens, r, k, v, w), strict=True):
        for r_t, k_t, v_t, w_t in sequence:
            kv = k_t[..., None] * v_t[..., None, :]
            outs.append((r_t[..., None, :] @ (s + u[:, :, None] * kv))[..., 0, :])
            s = w_t[..., None] * s + kv
        states.append(s)
    return torch.stack(outs, 1), torch.cat(states)

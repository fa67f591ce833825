"""The attention of Gecko as written in the paper: the reference for all tests."""

import torch


def chunk_attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: torch.Tensor, dropout_p: float = 0.0
) -> torch.Tensor:
    """[`subquad_kernels.chunk_attention`] in the dtype of the inputs (the caller casts)."""
    place = torch.arange(k.shape[2], device=k.device)
    seen = (first.unsqueeze(-1) <= place) & (place <= place[-q.shape[2] :, None])
    weights = (q @ k.mT).masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(-1)
    return torch.dropout(weights, dropout_p, train=True) @ v

"""The attention of Gecko as written in the paper: the reference for all tests."""

import torch


def chunk_attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: torch.Tensor, dropout_p: float = 0.0
) -> torch.Tensor:
    """[`subquad_kernels.chunk_attention`] token by token, in the dtype of the inputs (the caller casts)."""
    batch, _, length, _ = q.shape
    before = k.shape[2] - length
    first = first.expand(batch, length).tolist()
    rows = []
    for b in range(batch):
        outs = []
        for t in range(length):
            seen = slice(first[b][t], before + t + 1)
            weights = (k[b, :, seen] @ q[b, :, t, :, None])[..., 0].softmax(-1)
            weights = torch.dropout(weights, dropout_p, train=True)
            outs.append((weights[:, None, :] @ v[b, :, seen])[:, 0])
        rows.append(torch.stack(outs, 1))
    return torch.stack(rows)

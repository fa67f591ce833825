"""The dynamic layer as written in the paper, row by row: the reference for all tests."""

import torch


def dynamic_mixing_reference(features: torch.Tensor, width: int, normalization: str, eps: float) -> torch.Tensor:
    """
    Equations 5 to 7 of the paper, gate and head, in the dtype of the features: see
    [`subquad_kernels.dynamic_mixing`].
    """
    x, gate, head = features.split((width, width, features.shape[2] - 2 * width), dim=-1)
    if normalization == "l1":
        y = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(eps)
    else:
        y = x / torch.sqrt(x.square().sum(-1, keepdim=True) + eps)
    rows = []
    for row in y.unbind(1):
        cosines = (y * row[:, None]).sum(-1, keepdim=True)
        if normalization == "l1":
            weights = cosines / cosines.abs().sum(1, keepdim=True).clamp_min(eps)
        else:
            weights = cosines / (cosines.sum(1, keepdim=True) + eps)
        rows.append((weights * x).sum(1))
    return torch.cat((gate * torch.stack(rows, dim=1), head), dim=-1)

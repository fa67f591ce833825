"""The static layer as written in the paper, row by row: the reference for all tests."""

import torch


def static_mixing_reference(features: torch.Tensor, v: torch.Tensor, width: int) -> torch.Tensor:
    """
    Equation 4 of the paper without its optional activation and bias, gated as in equation 2, followed by the bypassed
    head as in equation 3, in the dtype of the inputs: see [`subquad_kernels.static_mixing`].
    """
    x, gate, head = features.split([width, width, features.shape[2] - 2 * width], dim=-1)
    mixed = torch.stack([(row.unsqueeze(-1) * x).sum(1) for row in v], dim=1)
    return torch.cat((gate * mixed, head), dim=-1)

"""The static layer as the paper writes it, one row after the other: the oracle of every test."""

import torch


def static_mixing_reference(features: torch.Tensor, v: torch.Tensor, width: int) -> torch.Tensor:
    """
    Equation 4 of the paper without its optional activation and bias, gated as in equation 2, then the bypassed head as
    in equation 3; in the dtype of the inputs. Arguments, shapes and result are those of
    [`subquad_kernels.static_mixing`].
    """
    x, gate, head = features.split([width, width, features.shape[2] - 2 * width], dim=-1)
    mixed = torch.stack([(row.unsqueeze(-1) * x).sum(1) for row in v], dim=1)
    return torch.cat((gate * mixed, head), dim=-1)

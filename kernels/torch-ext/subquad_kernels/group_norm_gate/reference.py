"""The gated norm of the heads as the paper writes it, one head after the other: the oracle of every test."""

import torch


def group_norm_gate_reference(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """In the dtype of the inputs. Arguments, shapes and result are those of [`subquad_kernels.group_norm_gate`]."""
    heads = []
    for head in x.unbind(-2):
        centred = head - head.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        heads.append(centred / torch.sqrt(variance + eps))
    return (torch.cat(heads, dim=-1) * weight + bias) * gate * torch.sigmoid(gate)

"""The gated norm of the heads as written in the paper, head by head: the reference for all tests."""

import torch


def group_norm_gate_reference(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    added: torch.Tensor | None,
    eps: float,
    silu: bool,
) -> torch.Tensor:
    """Computes [`subquad_kernels.group_norm_gate`] in the dtype of the inputs."""
    heads = []
    for head in x.unbind(-2):
        centred = head - head.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        heads.append(centred / torch.sqrt(variance + eps))
    out = torch.cat(heads, dim=-1) * weight + bias
    if added is not None:
        out = out + added.flatten(-2)
    return out * gate * torch.sigmoid(gate) if silu else out * gate

"""The router of Raven as written in the paper, token by token: the reference for all tests."""

import torch


def slot_routing_reference(
    logits: torch.Tensor, log_decay: torch.Tensor, topk: int, bias: torch.Tensor | None, score: str, scale: float
) -> torch.Tensor:
    """Computes [`subquad_kernels.slot_routing`] in the dtype of the inputs."""
    if log_decay.dim() == 3:
        log_decay = log_decay.unsqueeze(-1)
    tokens = []
    for x, a in zip(logits.unbind(1), log_decay.unbind(1), strict=True):
        m = torch.sigmoid(x) if score == "sigmoid" else torch.softmax(x, dim=-1)
        ranked = x if bias is None else m + bias
        best = torch.sort(ranked.detach(), dim=-1, descending=True, stable=True).indices[..., :topk]
        g = torch.zeros_like(m).scatter(-1, best, m.gather(-1, best))
        r = g / (g.sum(-1, keepdim=True) + 1e-9) if score == "sigmoid" else g
        tokens.append(a * r / scale)
    return torch.stack(tokens, dim=1)

"""The router of Raven in plain torch."""

import torch

from ..backend import cast, widest


def _scores(logits: torch.Tensor, score: str) -> torch.Tensor:
    if score == "sigmoid":
        return torch.sigmoid(logits)
    # Zeros if all slots are masked, otherwise the sum is at least 1.
    largest = logits.amax(-1, keepdim=True).clamp_min(torch.finfo(logits.dtype).min)
    weights = torch.exp(logits - largest)
    return weights / weights.sum(-1, keepdim=True).clamp_min(1.0)


def _chosen(ranked: torch.Tensor, topk: int) -> torch.Tensor:
    """True for the `topk` largest values of each row, the first ones if values are equal."""
    last = ranked.topk(topk, sorted=False).values.amin(-1, keepdim=True)
    above, equal = ranked > last, ranked == last
    room = topk - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= room))


def _route(
    logits: torch.Tensor, topk: int, bias: torch.Tensor | None, score: str, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """m and r of [`subquad_kernels.slot_routing`]."""
    m = _scores(logits, score)
    kept = m
    if topk < logits.shape[-1]:
        kept = m * _chosen(logits if bias is None else m + bias, topk)  # where() takes three times as long
    if score == "sigmoid":
        return m, kept / (scale * (kept.sum(-1, keepdim=True) + 1e-9))
    return m, kept / scale


def slot_routing_eager(
    logits: torch.Tensor, log_decay: torch.Tensor, topk: int, bias: torch.Tensor | None, score: str, scale: float
) -> torch.Tensor:
    """Computes [`subquad_kernels.slot_routing`]."""
    logits, log_decay, bias = cast(widest(logits, log_decay, bias), logits, log_decay, bias)
    r = _route(logits, topk, bias, score, scale)[1]
    return r * (log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(-1))


def slot_routing_eager_backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    log_decay: torch.Tensor,
    topk: int,
    bias: torch.Tensor | None,
    score: str,
    scale: float,
) -> list[torch.Tensor]:
    """Gradients of the logits and of log_decay."""
    logits, log_decay, bias = cast(grad.dtype, logits, log_decay, bias)
    m, r = _route(logits, topk, bias, score, scale)
    grad_r = grad * (log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(-1))
    total = (grad_r * r).sum(-1, keepdim=True)
    if score == "sigmoid":
        grad_logits = r * (1.0 - m) * (grad_r - scale * total)
    else:
        grad_logits = grad_r * r - m * total
    grad_decay = grad * r
    return [grad_logits, grad_decay if log_decay.dim() == 4 else grad_decay.sum(-1)]

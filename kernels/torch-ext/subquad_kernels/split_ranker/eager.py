"""The ranker in plain torch."""

import torch
import torch.nn.functional as F

from ..backend import widest, without_autocast
from ..linear import linear
from ..tracing import can_read_without_sync


TOKENS = 2048  # maxsim compares this many tokens with this many others at a time


def _unit(x: torch.Tensor) -> torch.Tensor:
    """x / (norm(x) + 1e-8) in float32 (float64 if x is). The gradient of a zero vector is zero."""
    x = x.to(widest(x))
    norm = x.norm(dim=-1, keepdim=True)
    return x * torch.where(norm > 0, 1 / (norm + 1e-8), 0)


def _scores(queries: torch.Tensor, splits: torch.Tensor) -> torch.Tensor:
    """MaxSim of unit vectors, queries (B, T, Q, D) with splits (B, T or 1, M, S, D): (B, T, M)."""
    batch, current, size, _ = queries.shape
    if splits.shape[1] != current:
        queries = queries.flatten(1, 2)[:, None]
    if queries.device.type == "cpu" and queries.shape[1] == splits.shape[1] == 1:
        rows = zip(queries[:, 0], splits[:, 0].flatten(1, 2), strict=True)
        similarity = torch.stack([linear(query, split) for query, split in rows])
    else:
        similarity = queries @ splits.flatten(2, 3).mT
    return similarity.view(batch, current, size, *splits.shape[2:4]).amax(-1).sum(2)


@torch.no_grad()
def maxsim_eager(
    queries: torch.Tensor, splits: torch.Tensor, number: torch.Tensor, first: torch.Tensor | None
) -> torch.Tensor:
    """Computes [`subquad_kernels.maxsim`] chunk by chunk."""
    (batch, current, per_query, size), (total, per_split) = queries.shape, splits.shape[1:3]
    number = number.expand(batch, current)
    first = torch.zeros_like(number) if first is None else first.expand(batch, current)
    scores = torch.zeros(batch, current, total, dtype=widest(queries), device=queries.device)

    t_step, m_step = max(min(TOKENS // per_query, current), 1), max(min(TOKENS // per_split, total), 1)
    query_tokens, split_tokens = t_step * per_query, m_step * per_split
    b_step = max(TOKENS**2 // max(query_tokens * split_tokens, query_tokens * size, split_tokens * size), 1)
    for rows in (slice(b, b + b_step) for b in range(0, batch, b_step)):
        for now in (slice(t, t + t_step) for t in range(0, current, t_step)):
            start, stop = 0, total
            if can_read_without_sync(queries):
                start, stop = max(int(first[rows, now].min()), 0), min(int(number[rows, now].max()), total)
            query = _unit(queries[rows, now])
            for past in (slice(m, min(m + m_step, stop)) for m in range(start, stop, m_step)):
                scores[rows, now, past] = _scores(query, _unit(splits[rows, None, past]))

    split = torch.arange(total, device=queries.device)
    return scores.masked_fill_((split < first[..., None]) | (split >= number[..., None]), -torch.inf)


def choose(scores: torch.Tensor, k: int, order: str) -> torch.Tensor:
    """The k - 1 best splits of scores (B, T, M), in an order, after -1 for missing ones: (B, T, k - 1)."""
    scores, index = scores.sort(dim=-1, descending=True, stable=True)
    scores, index = scores[..., : k - 1], index[..., : k - 1]
    index = index.masked_fill(scores == -torch.inf, -1)
    index = F.pad(index, (k - 1 - index.shape[-1], 0), value=-1)
    by = index if order == "sequence" else (index >= 0).int()
    return index.gather(-1, by.argsort(dim=-1, stable=True))


def scores_of(queries: torch.Tensor, splits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The scores of the splits of index (B, T, k - 1), with a gradient; split 0 takes the place of a missing one."""
    row = torch.arange(index.shape[0], device=index.device)[:, None, None]
    with without_autocast(queries):
        return _scores(_unit(queries), _unit(splits)[row, index.clamp_min(0)])


def normalize(selected: torch.Tensor, index: torch.Tensor, normalization: str) -> torch.Tensor:
    """Weights (B, T, k - 1) from scores and indices (B, T, k - 1)."""
    missing = index < 0
    if normalization == "first":
        earliest = index.masked_fill(missing, torch.iinfo(index.dtype).max).argmin(-1, keepdim=True)
        divisor = selected.gather(-1, earliest)
    elif normalization == "max":
        divisor = selected.masked_fill(missing, -torch.inf).amax(-1, keepdim=True)
    else:
        divisor = selected.masked_fill(missing, torch.inf).amin(-1, keepdim=True)
    denominator = divisor + 1e-8
    missing = missing | (divisor == 0) | (denominator == 0)
    # Missing ones are divided by 1, because a division by zero would make their gradient NaN.
    return (selected / denominator.masked_fill(missing, 1)).masked_fill(missing, 0)

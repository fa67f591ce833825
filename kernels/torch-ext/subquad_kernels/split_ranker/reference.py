"""The ranker as described in the paper, for each pair of splits: the reference for all tests."""

import torch


def maxsim_reference(
    queries: torch.Tensor, splits: torch.Tensor, number: torch.Tensor, first: torch.Tensor | None
) -> torch.Tensor:
    """Computes [`subquad_kernels.maxsim`] in the dtype of the inputs, with gradients."""
    batch, current = queries.shape[:2]
    queries = queries / (queries.norm(dim=-1, keepdim=True) + 1e-8)
    splits = splits / (splits.norm(dim=-1, keepdim=True) + 1e-8)
    number = number.expand(batch, current)
    first = torch.zeros_like(number) if first is None else first.expand(batch, current)
    scores = (queries[:, :, None] @ splits[:, None].mT).amax(dim=-1).sum(-1)
    split = torch.arange(splits.shape[1], device=splits.device)
    seen = (first.unsqueeze(-1) <= split) & (split < number.unsqueeze(-1))
    return scores.masked_fill(~seen, -torch.inf)


def split_ranker_reference(
    queries: torch.Tensor,
    splits: torch.Tensor,
    k: int,
    number: torch.Tensor,
    first: torch.Tensor | None,
    normalization: str,
    order: str,
    scores: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Computes [`subquad_kernels.split_ranker`]. The choice follows the given scores, if any; the weights are computed
    from the exact scores.
    """
    exact = maxsim_reference(queries, splits, number, first)
    scores = exact.detach() if scores is None else scores
    batch, current = queries.shape[:2]
    index = torch.full((batch, current, k - 1), -1, device=queries.device)
    weights = exact.new_zeros(batch, current, k - 1)
    for b in range(batch):
        for t in range(current):
            row = scores[b, t].tolist()
            candidates = [m for m, score in enumerate(row) if score != -torch.inf]
            best = sorted(candidates, key=lambda m: -row[m])[: k - 1]
            if not best:
                continue
            if order == "sequence":
                best.sort()
            selected = exact[b, t, best]
            divisors = {"first": exact[b, t, min(best)], "max": selected.max(), "min": selected.min()}
            divisor = divisors[normalization]
            index[b, t, -len(best) :] = torch.tensor(best)
            if divisor != 0 and divisor + 1e-8 != 0:
                weights[b, t, -len(best) :] = selected / (divisor + 1e-8)
    return index, weights, scores

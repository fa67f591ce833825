"""The ranker of Avey and Avey-B: the choice of earlier splits to read with the current one, and their weights."""

import torch
import torch.nn.functional as F

from ..backend import choose_backend, widest
from ..checks import check_tensors, needs_gradient
from .custom_ops import _maxsim
from .eager import choose, normalize, scores_of
from .reference import maxsim_reference, split_ranker_reference


BACKENDS = ("eager", "triton")
NORMALIZATIONS = ("first", "max", "min")
ORDERS = ("sequence", "score")


def maxsim(
    queries: torch.Tensor,
    splits: torch.Tensor,
    number: torch.Tensor,
    first: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """
    The similarity of earlier splits of a sequence to its current ones (the MaxSim operator of section 2.1 of
    arXiv:2506.11305):

        scores[t, m] = sum over q of max over s of cos(queries[t, q], splits[m, s])

    In a cosine each vector is divided by its norm + 1e-8. A vector of zeros, for a missing token, has
    cosine 0 with every other. There is no gradient.

    Scores are sums over the tokens of the current split. So while it grows, the scores of one more token, Q = 1, can
    be added to the earlier tokens' scores.

    Args:
        queries: (B, T, Q, D): Q tokens of each of T current splits.
        splits: (B, M, S, D): all splits of the row. Rows may be more than M * S * D apart in memory, also in queries.
        number: int64 (B, T) or (1, T): the number of the current split. Its candidates are the splits before it.
        first: int64 (B, T) or (1, T): the first candidate, the first split of the document; None means 0.
        backend: `"auto"`, `"triton"` (products in the dtype of the inputs, sums in float32) or `"eager"` (float32).

    Returns:
        scores (B, T, M) in float32 (float64 if the inputs are): -inf if m is not a candidate.

    Raises:
        ValueError: if a shape, a dtype or a device does not fit, before any work.
    """
    _check(queries, splits, number, first)
    backend = choose_backend("maxsim", backend, BACKENDS, queries)
    if needs_gradient(queries, splits):
        queries, splits = queries.detach(), splits.detach()
    # package only
    if backend == "reference":
        return maxsim_reference(queries, splits, number, first).to(widest(queries))
    return _maxsim(queries, splits, number, first, backend)


def split_ranker(
    queries: torch.Tensor,
    splits: torch.Tensor,
    k: int,
    number: torch.Tensor,
    first: torch.Tensor | None = None,
    *,
    normalization: str = "first",
    order: str = "sequence",
    scores: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    The k - 1 candidates that are most similar to each current split, and their weights (section 2.1 of
    arXiv:2506.11305). The earliest ones are chosen if scores are equal.

    The weights have gradients with respect to queries and splits, the choice does not. If a gradient is needed, the
    scores of the chosen splits are recomputed in plain torch.

    Args:
        queries, splits, number, first: see [`maxsim`].
        k: number of splits that are read together, including the current one.
        normalization: the score, plus 1e-8, that the scores of the chosen splits are divided by: `"first"`, the score
            of the earliest chosen split, as in the published Avey models; `"min"`, the smallest score, as in the
            published Avey-B models; `"max"`, the largest score, as in the papers.
        order: order of the chosen splits: `"sequence"`, or `"score"`, the best first.
        scores: (B, T, M), from [`maxsim`]; None to compute them. Candidates are the splits whose score is
            not -inf.
        backend: see [`maxsim`].

    Returns:
        index (B, T, k - 1), int64, the chosen splits in that order, after -1 if there are fewer candidates; weights
        (B, T, k - 1) in the dtype of the scores, 0 for missing candidates and if the score to divide by is 0; and
        scores (B, T, M).

    Raises:
        ValueError: if an argument does not fit, before any work.
    """
    _check(queries, splits, number, first)
    if k < 1:
        raise ValueError(f"`k` must be at least 1, got {k}.")
    for name, value, choices in (("normalization", normalization, NORMALIZATIONS), ("order", order, ORDERS)):
        if value not in choices:
            raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}.")
    if scores is not None:
        check_tensors({"scores": (scores, (*queries.shape[:2], splits.shape[1]))}, "queries", queries)
        if scores.dtype != widest(queries):
            raise ValueError(f"`scores` must be {widest(queries)}, got {scores.dtype}.")
    backend = choose_backend("split_ranker", backend, BACKENDS, queries)
    # package only
    if backend == "reference":
        return split_ranker_reference(queries, splits, k, number, first, normalization, order, scores)

    if scores is None:
        scores = maxsim(queries, splits, number, first, backend=backend)
    index = choose(scores.detach(), k, order)
    if k == 1:
        return index, scores.new_zeros(index.shape), scores
    if needs_gradient(queries, splits) and splits.shape[1] > 0:
        selected = scores_of(queries, splits, index)
    else:
        selected = F.pad(scores, (1, 0)).gather(-1, index + 1)
    return index, normalize(selected, index, normalization), scores


def _check(queries, splits, number, first):
    for name, tensor, shape in (("queries", queries, "(B, T, Q, D)"), ("splits", splits, "(B, M, S, D)")):
        if tensor.dim() != 4 or 0 in tensor.shape[2:]:
            raise ValueError(f"`{name}` must be {shape}, the last two at least 1, got {tuple(tensor.shape)}.")
    batch, current, _, size = queries.shape
    if not queries.is_floating_point():
        raise ValueError(f"`queries` must be floating point, got {queries.dtype}.")
    if splits.dtype != queries.dtype:
        raise ValueError(f"`splits` must be {queries.dtype} as `queries` are, got {splits.dtype}.")
    if (splits.shape[0], splits.shape[3]) != (batch, size):
        raise ValueError(f"`splits` must have shape ({batch}, M, S, {size}), got {tuple(splits.shape)}.")
    for name, tensor in (("number", number), ("first", first)):
        if tensor is None:
            continue
        if tensor.dim() != 2 or tensor.shape[0] not in (1, batch) or tensor.shape[1] != current:
            raise ValueError(
                f"`{name}` must have shape {(batch, current)} or {(1, current)}, got {tuple(tensor.shape)}."
            )
        if tensor.dtype != torch.int64:
            raise ValueError(f"`{name}` must be int64, got {tensor.dtype}.")
    for name, tensor in (("splits", splits), ("number", number), ("first", first)):
        if tensor is not None and tensor.device != queries.device:
            raise ValueError(f"`{name}` is on {tensor.device}, `queries` on {queries.device}.")

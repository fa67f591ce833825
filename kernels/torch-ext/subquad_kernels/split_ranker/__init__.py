"""The ranker of Avey and Avey-B: which splits the current one is read with, and how much each of them weighs."""

import torch
import torch.nn.functional as F

from ..backend import choose_backend, custom_op, dispatch, without_autocast
from .eager import choose, maxsim_eager, normalize, scores_of
from .reference import maxsim_reference, split_ranker_reference


BACKENDS = ("eager", "reference", "triton")
NORMALIZATIONS = ("first", "max", "min")
ORDERS = ("sequence", "score")


def _dtype(x):
    return torch.promote_types(x.dtype, torch.float32)


# Not for Triton alone: eager looks at values and loops over chunks, neither of which belongs into a graph.
@custom_op("maxsim", mutates_args=())
def _maxsim(
    queries: torch.Tensor, splits: torch.Tensor, number: torch.Tensor, first: torch.Tensor | None, backend: str
) -> torch.Tensor:
    def triton():
        from .triton_kernels import maxsim_triton

        return maxsim_triton(queries, splits, number, first)

    def eager():
        with without_autocast(queries):
            return maxsim_eager(queries, splits, number, first)

    return dispatch("maxsim", backend, queries, triton, eager)


@_maxsim.register_fake
def _(queries, splits, number, first, backend):
    return queries.new_empty(*queries.shape[:2], splits.shape[1], dtype=_dtype(queries))


def maxsim(
    queries: torch.Tensor,
    splits: torch.Tensor,
    number: torch.Tensor,
    first: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """
    How near earlier splits of a sequence are to its current ones (the MaxSim operator of section 2.1 of
    arXiv:2506.11305):

        scores[t, m] = sum over q of max over s of cos(queries[t, q], splits[m, s])

    where both vectors of a cosine are divided by their norm + 1e-8. A vector of zeros, of a token that is missing, is
    as near to every other as at a right angle. There is no gradient.

    The scores of a split that grows are sums over its tokens: those of one more token, Q = 1, may be added to what the
    tokens before it have had.

    Args:
        queries: (B, T, Q, D): Q tokens of each of T current splits.
        splits: (B, M, S, D): all splits of the row. Rows may be further apart than M * S * D, in queries too.
        number: int64 (B, T) or (1, T): the number of the current split. Its candidates are the splits before it,
        first: int64 (B, T) or (1, T): from this one on, the first of the document; 0 where it is None.
        backend: `"auto"`, `"triton"` (products in the dtype of the inputs, sums in float32), `"eager"` (everything in
            float32) or `"reference"` (everything in the dtype of the inputs).

    Returns:
        scores (B, T, M) in float32 (float64 where the inputs are): -inf where m is no candidate.

    Raises:
        ValueError: where a shape, a dtype or a device does not fit, before any work.
    """
    check(queries, splits, number, first)
    backend = choose_backend("maxsim", backend, BACKENDS, queries)
    queries, splits = queries.detach(), splits.detach()
    if backend == "reference":
        return maxsim_reference(queries, splits, number, first).to(_dtype(queries))
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
    The k - 1 candidates that are nearest to each current split, and their weights (section 2.1 of arXiv:2506.11305).
    Of equally near ones the earliest goes first.

    The weights have gradients with respect to queries and splits, the choice has none. Where one is asked for, the
    scores of the chosen splits are computed once more, in plain torch.

    Args:
        queries, splits, number, first: as [`maxsim`] takes them.
        k: how many splits are read together, the current one among them.
        normalization: what the score of a chosen split is divided by, after adding 1e-8: `"first"`, the score of the
            earliest chosen split, as the published Avey models have it; `"min"`, the smallest score, as those of
            Avey-B have it; `"max"`, the largest score, as the papers have it.
        order: of the chosen splits: `"sequence"`, or `"score"`, the best first.
        scores: (B, T, M), as [`maxsim`] returns them, which computes them where they are None. Candidates are those
            whose score is not -inf.
        backend: as [`maxsim`] takes it.

    Returns:
        index (B, T, k - 1), int64: the chosen splits in that order. Where there are fewer candidates, the places on
            the left are -1.
        weights (B, T, k - 1) in the dtype of the scores: 0 at those places, and where the score to divide by is 0.
        scores (B, T, M).

    Raises:
        ValueError: where an argument does not fit, before any work.
    """
    check(queries, splits, number, first)
    if k < 1:
        raise ValueError(f"`k` must be at least 1, got {k}.")
    for name, value, choices in (("normalization", normalization, NORMALIZATIONS), ("order", order, ORDERS)):
        if value not in choices:
            raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}.")
    if scores is not None:
        shape = (*queries.shape[:2], splits.shape[1])
        if scores.shape != shape:
            raise ValueError(f"`scores` must have shape {tuple(shape)}, got {tuple(scores.shape)}.")
        if scores.dtype != _dtype(queries):
            raise ValueError(f"`scores` must be {_dtype(queries)}, got {scores.dtype}.")
        if scores.device != queries.device:
            raise ValueError(f"`scores` is on {scores.device}, `queries` on {queries.device}.")
    if choose_backend("split_ranker", backend, BACKENDS, queries) == "reference":
        return split_ranker_reference(queries, splits, k, number, first, normalization, order, scores)

    if scores is None:
        scores = maxsim(queries, splits, number, first, backend=backend)
    index = choose(scores.detach(), k, order)
    if k == 1:
        return index, scores.new_zeros(index.shape), scores
    if torch.is_grad_enabled() and (queries.requires_grad or splits.requires_grad) and splits.shape[1] > 0:
        selected = scores_of(queries, splits, index)
    else:
        selected = F.pad(scores, (1, 0)).gather(-1, index + 1)
    return index, normalize(selected, index, normalization), scores


def check(queries, splits, number, first):
    """
    Raises:
        ValueError: where an argument of [`maxsim`] does not fit the others.
    """
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
        if tensor.shape not in ((batch, current), (1, current)):
            raise ValueError(
                f"`{name}` must have shape {(batch, current)} or {(1, current)}, got {tuple(tensor.shape)}."
            )
        if tensor.dtype != torch.int64:
            raise ValueError(f"`{name}` must be int64, got {tensor.dtype}.")
    for name, tensor in (("splits", splits), ("number", number), ("first", first)):
        if tensor is not None and tensor.device != queries.device:
            raise ValueError(f"`{name}` is on {tensor.device}, `queries` on {queries.device}.")

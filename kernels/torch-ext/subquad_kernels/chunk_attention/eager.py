"""
The attention of Gecko in plain torch, for any device: blocks of queries against the keys that they may see. So few
hidden scores are computed, and memory is bounded for any length of the sequence.

torch computes the softmax of bfloat16 or float16 in float32.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..backend import cast, contiguous, widest
from ..linear import matmul
from ..memoize import memoize_by_tensor
from ..state_pool import numbers_in, prefers_single_states


# Scores that are computed together: a GPU needs many for large products, a CPU must keep them in its cache.
SCORES, SCORES_OF_GPU = 1 << 18, 1 << 25


def _oldest(token, chunk_size, aligned):
    """The first key that a token may see; both are counted from the first query's token."""
    return token // chunk_size * chunk_size - chunk_size if aligned else token - 2 * chunk_size + 1


@dataclass
class _Block:
    """Consecutive queries of all heads, and the keys that they may see, up to their own."""

    queries: slice
    keys: slice

    def of_queries(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, self.queries]

    def of_keys(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, self.keys]

    def add_to_keys(self, x: torch.Tensor, added: torch.Tensor) -> None:
        self.of_keys(x).add_(added)

    def hidden(self, first: torch.Tensor) -> torch.Tensor:
        key = torch.arange(self.keys.start, self.keys.stop, device=first.device)
        own = key[self.queries.start - self.queries.stop :, None]
        return ((key < first[:, self.queries, None]) | (key > own)).unsqueeze(1)


@dataclass
class _Chunks:
    """
    The queries from `start` to `stop` of each of `count` consecutive chunks of one head, and the keys that they may
    see: from the `begin` of the chunk before the first one on, a chunk and `stop` keys each.
    """

    row: int
    head: int
    count: int
    size: int
    start: int
    stop: int
    begin: int
    before: int

    def _windows(self, x: torch.Tensor, begin: int, length: int) -> torch.Tensor:
        """`length` tokens of every chunk of x (tokens, ...), from `begin` on: (count, length, ...), a view."""
        end = begin + (self.count - 1) * self.size + length
        return x[begin:end].unfold(0, length, self.size).movedim(-1, 1)

    def of_queries(self, x: torch.Tensor) -> torch.Tensor:
        begin = self.begin + self.size - self.before + self.start
        return self._windows(x[self.row, self.head], begin, self.stop - self.start)

    def of_keys(self, x: torch.Tensor) -> torch.Tensor:
        return self._windows(x[self.row, self.head], self.begin, self.size + self.stop)

    def add_to_keys(self, x: torch.Tensor, added: torch.Tensor) -> None:
        x = x[self.row, self.head]  # the keys of neighbours overlap, but their own chunks do not
        self._windows(x, self.begin, self.size).add_(added[:, : self.size])
        self._windows(x, self.begin + self.size, self.stop).add_(added[:, self.size :])

    def hidden(self, first: torch.Tensor) -> torch.Tensor:
        begin, end = self.begin, self.begin + self.count * self.size
        first = self._windows(
            first[self.row % len(first)], begin + self.size - self.before + self.start, self.stop - self.start
        )
        begins = torch.arange(begin, end, self.size, device=first.device)[:, None]
        key = torch.arange(self.size + self.stop, device=first.device)
        return (key < (first - begins)[..., None]) | (key > key[self.size + self.start :, None])


def _block_size(chunk_size: int, device: torch.device) -> int:
    """Larger blocks compute more hidden scores. Smaller ones are slow, on a GPU because of the number of launches."""
    return max(chunk_size // 4, 64 if device.type == "cpu" else 512)


def _blocks(
    begin: int, end: int, before: int, chunk_size: int, aligned: bool, device: torch.device
) -> Iterator[_Block]:
    """The queries from `begin` to `end`, after `before` keys of earlier calls."""
    size = _block_size(chunk_size, device)
    for start in range(begin, end, size):
        stop = min(start + size, end)
        oldest = before + _oldest(start, chunk_size, aligned)
        yield _Block(slice(start, stop), slice(max(oldest, 0), before + stop))


def _pieces(
    q: torch.Tensor, k: torch.Tensor, first: torch.Tensor, chunk_size: int, aligned: bool
) -> Iterator[tuple[_Block | _Chunks, torch.Tensor]]:
    """
    All queries, piece by piece with their scores, -inf for hidden keys. If there are more whole chunks than heads, the
    chunks of a head are computed together, so that products are fewer and larger. The rest are blocks of all heads:
    the last tokens, and a chunk without another one before it.
    """
    (rows, heads, length, _), device = q.shape, q.device
    before, size = k.shape[2] - length, _block_size(chunk_size, device)
    begin, end = int(before == 0), length // chunk_size
    if not aligned or size > chunk_size or end - begin <= rows * heads:
        begin = end = 0
    for block in _blocks(0, begin * chunk_size, before, chunk_size, aligned, device):
        yield block, _scores(block, q, k, block.hidden(first))
    together = max((SCORES if device.type == "cpu" else SCORES_OF_GPU) // (2 * size * chunk_size), 1)
    starts = range(0, chunk_size, size)
    for chunk, row, start in itertools.product(range(begin, end, together), range(rows), starts):
        count, stop = min(together, end - chunk), min(start + size, chunk_size)
        shape = count, chunk_size, start, stop, before + (chunk - 1) * chunk_size, before
        hidden = _Chunks(row, 0, *shape).hidden(first)
        for head in range(heads):
            piece = _Chunks(row, head, *shape)
            yield piece, _scores(piece, q, k, hidden)
    for block in _blocks(end * chunk_size, length, before, chunk_size, aligned, device):
        yield block, _scores(block, q, k, block.hidden(first))


def _scores(piece: _Block | _Chunks, q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return matmul(piece.of_queries(q), piece.of_keys(k).mT).masked_fill_(hidden, -torch.inf)


def _assert_in_reach(first, keys, chunk_size, aligned):
    before = keys - first.shape[1]
    token = torch.arange(first.shape[1], device=first.device)
    oldest = before + _oldest(token, chunk_size, aligned)
    reached = (first >= oldest.clamp(min=0)) & (first <= before + token)
    torch._assert_async(reached.all(), "`first` must be a key up to the token and of the last two chunks.")


def chunk_attention_with_dropout(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: torch.Tensor,
    chunk_size: int,
    aligned: bool,
    dropout_p: float,
) -> torch.Tensor:
    """Computes [`subquad_kernels.chunk_attention`] differentiably for autograd; q, k and v have one dtype."""
    memoize_by_tensor(_assert_in_reach, (first,), k.shape[2], chunk_size, aligned)
    q, k, v = contiguous(q, k, v)  # once, not for every block
    outs, length = [], q.shape[2]
    for block in _blocks(0, length, k.shape[2] - length, chunk_size, aligned, q.device):
        weights = _scores(block, q, k, block.hidden(first)).softmax(-1)
        outs.append(torch.dropout(weights, dropout_p, train=True) @ block.of_keys(v))
    return torch.cat(outs, 2)


def chunk_attention_eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: torch.Tensor, chunk_size: int, aligned: bool
) -> torch.Tensor:
    """The same without dropout, so that the backward pass can recompute the weights."""
    memoize_by_tensor(_assert_in_reach, (first,), k.shape[2], chunk_size, aligned)
    q, k, v = contiguous(q, k, v)
    out = v.new_empty(*q.shape[:3], v.shape[3])
    for piece, scores in _pieces(q, k, first, chunk_size, aligned):
        piece.of_queries(out).copy_(matmul(scores.softmax(-1), piece.of_keys(v)))
    return out


def chunk_attention_eager_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: torch.Tensor,
    chunk_size: int,
    aligned: bool,
) -> list[torch.Tensor]:
    """Gradients of q, k and v without dropout. The weights are recomputed."""
    grad_out, q, k, v = contiguous(grad_out, q, k, v)
    grad_q = q.new_empty(q.shape)
    grad_k, grad_v = (x.new_zeros(x.shape, dtype=widest(x)) for x in (k, v))  # sums over pieces
    for piece, scores in _pieces(q, k, first, chunk_size, aligned):
        weights, grad = scores.softmax(-1), piece.of_queries(grad_out)
        piece.add_to_keys(grad_v, weights.mT @ grad)
        # The whole formula in one launch, with sums in float32. Plain torch would read the scores six times.
        grad_scores = torch._softmax_backward_data(grad @ piece.of_keys(v).mT, weights, -1, q.dtype)
        piece.of_queries(grad_q).copy_(grad_scores @ piece.of_keys(k))
        piece.add_to_keys(grad_k, grad_scores.mT @ piece.of_queries(q))
    return [grad_q, grad_k, grad_v]


def chunk_attention_masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, indices: torch.Tensor | None
) -> torch.Tensor:
    """Computes [`subquad_kernels.chunk_attention_step`]."""
    if indices is not None and prefers_single_states(v):
        mask = mask.expand(len(q), -1)
        ends = (mask * torch.arange(1, mask.shape[1] + 1)).amax(1)  # later keys are not read
        rows = zip(q.split(1), mask.split(1), numbers_in(v, indices), ends.tolist(), strict=True)
        return torch.cat(
            [_masked(q, k[n : n + 1, :, :end], v[n : n + 1, :, :end], m[:, :end]) for q, m, n, end in rows]
        )
    if indices is not None:
        k, v = k.index_select(0, indices), v.index_select(0, indices)
    return _masked(q, k, v, mask)


def _masked(q, k, v, mask):
    q, k = cast(v.dtype, q, k)
    scores = (k @ q.mT).mT  # k.mT would be copied if k is not contiguous
    return scores.masked_fill(~mask[:, None, None], -torch.inf).softmax(-1) @ v

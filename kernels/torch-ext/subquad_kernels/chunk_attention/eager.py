"""
The attention of Gecko in plain torch, for any device: a block of queries at a time against the keys that any of them
may see. So few scores are computed in vain, and memory is bounded for any length of the sequence.

torch computes the softmax of bfloat16 or float16 in float32.
"""

from collections.abc import Iterator

import torch

from ..backend import cast, contiguous, widest
from ..once import once


def _oldest(token, chunk_size, aligned):
    """The first key that a token may see; both are counted from the token of the first query."""
    return token // chunk_size * chunk_size - chunk_size if aligned else token - 2 * chunk_size + 1


def _blocks(
    q: torch.Tensor, k: torch.Tensor, first: torch.Tensor, chunk_size: int, aligned: bool
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Yields the queries of each block, the keys that they may see, and the scores, -inf for hidden keys."""
    length, device = q.shape[2], q.device
    before = k.shape[2] - length
    # Larger blocks compute more hidden scores. Smaller ones are slow, on a GPU because of the number of launches.
    queries = max(chunk_size // 4, 64 if device.type == "cpu" else 512)
    for start in range(0, length, queries):
        stop = min(start + queries, length)
        oldest = before + _oldest(start, chunk_size, aligned)
        block, seen = slice(start, stop), slice(max(oldest, 0), before + stop)
        key = torch.arange(seen.start, seen.stop, device=device)
        own = torch.arange(before + start, before + stop, device=device)[:, None]
        hidden = (key < first[:, block, None]) | (key > own)
        scores = q[:, :, block] @ k[:, :, seen].mT
        yield block, seen, scores.masked_fill_(hidden.unsqueeze(1), -torch.inf)


def _assert_in_reach(first, keys, chunk_size, aligned):
    before = keys - first.shape[1]
    token = torch.arange(first.shape[1], device=first.device)
    oldest = before + _oldest(token, chunk_size, aligned)
    reached = (first >= oldest.clamp(min=0)) & (first <= before + token)
    torch._assert_async(reached.all(), "`first` must be a key up to the token and of the last two chunks.")


def chunk_attention_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: torch.Tensor,
    chunk_size: int,
    aligned: bool,
    dropout_p: float,
) -> torch.Tensor:
    """Computes [`subquad_kernels.chunk_attention`]; q, k and v have one dtype."""
    once(_assert_in_reach, (first,), k.shape[2], chunk_size, aligned)
    q, k, v = contiguous(q, k, v)  # once, not for every block
    outs = []
    for _, seen, scores in _blocks(q, k, first, chunk_size, aligned):
        weights = scores.softmax(-1)
        if dropout_p:
            weights = torch.dropout(weights, dropout_p, train=True)
        outs.append(weights @ v[:, :, seen])
    return torch.cat(outs, 2)


def chunk_attention_eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: torch.Tensor, chunk_size: int, aligned: bool
) -> torch.Tensor:
    """The same without dropout, so that the backward pass can compute the weights again."""
    return chunk_attention_blocks(q, k, v, first, chunk_size, aligned, dropout_p=0.0)


def chunk_attention_eager_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: torch.Tensor,
    chunk_size: int,
    aligned: bool,
) -> list[torch.Tensor]:
    """Gradients of q, k and v without dropout. The weights are computed again."""
    dtype = widest(q)
    grad_out, q, k, v = contiguous(grad_out, q, k, v)
    grad_q = q.new_empty(q.shape)
    grad_k, grad_v = (x.new_zeros(x.shape, dtype=dtype) for x in (k, v))  # sums over blocks
    for block, seen, scores in _blocks(q, k, first, chunk_size, aligned):
        weights, grad = scores.softmax(-1, dtype=dtype), grad_out[:, :, block]
        grad_v[:, :, seen] += weights.to(v.dtype).mT @ grad
        grad_scores = weights * (grad @ v[:, :, seen].mT)
        grad_scores = grad_scores.addcmul_(weights, grad_scores.sum(-1, keepdim=True), value=-1).to(q.dtype)
        grad_q[:, :, block] = grad_scores @ k[:, :, seen]
        grad_k[:, :, seen] += grad_scores.mT @ q[:, :, block]
    return [grad_q, grad_k, grad_v]


def chunk_attention_masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Computes [`subquad_kernels.chunk_attention_step`]."""
    q, k = cast(v.dtype, q, k)
    scores = (k @ q.mT).mT  # k.mT would be copied if k is not contiguous
    return scores.masked_fill(~mask[:, None, None], -torch.inf).softmax(-1) @ v

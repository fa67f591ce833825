"""
MaxSim as a Triton kernel.

A program compares a current split with a block of candidates. It reads a few channels of the tokens of both at a time
and sums their products and squares. Of the similarities it keeps only the maximum for each token of the current split,
and then the sum of these.
"""

import torch
import triton
import triton.language as tl

from ..backend import block_size, cdiv, launch, next_power_of_2


@triton.jit
def _cosines_of_one(query, token, mask, size, TOKENS: tl.constexpr, SIZE: tl.constexpr):
    """One token with all others. Reading these takes most of the time; so sums over channels are done at the end."""
    dots, squares = tl.zeros((TOKENS, SIZE), tl.float32), tl.zeros((TOKENS, SIZE), tl.float32)
    query_squares = tl.zeros((SIZE,), tl.float32)
    for start in range(0, size, SIZE):
        channel = start + tl.arange(0, SIZE)
        inside = channel < size
        q = tl.load(query + channel, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(token[:, None] + channel[None, :], mask=mask[:, None] & inside[None, :], other=0.0).to(tl.float32)
        dots += x * q[None, :]
        squares += x * x
        query_squares += q * q
    cosines = tl.sum(dots, 1) / (tl.sqrt(tl.sum(squares, 1)) + 1e-8) / (tl.sqrt(tl.sum(query_squares, 0)) + 1e-8)
    return cosines[None, :]


@triton.jit
def _cosines(query, query_mask, token, mask, size, ROWS: tl.constexpr, TOKENS: tl.constexpr, SIZE: tl.constexpr):
    """Several tokens with all others."""
    dots = tl.zeros((ROWS, TOKENS), tl.float32)
    query_squares, squares = tl.zeros((ROWS,), tl.float32), tl.zeros((TOKENS,), tl.float32)
    for start in range(0, size, SIZE):
        channel = start + tl.arange(0, SIZE)
        inside = channel < size
        q = tl.load(query[:, None] + channel[None, :], mask=query_mask[:, None] & inside[None, :], other=0.0)
        x = tl.load(token[:, None] + channel[None, :], mask=mask[:, None] & inside[None, :], other=0.0)
        dots = tl.dot(q, tl.trans(x), dots, input_precision="ieee")
        q, x = q.to(tl.float32), x.to(tl.float32)
        query_squares += tl.sum(q * q, 1)
        squares += tl.sum(x * x, 1)
    return dots / (tl.sqrt(query_squares) + 1e-8)[:, None] / (tl.sqrt(squares) + 1e-8)[None, :]


@triton.jit
def _maxsim_kernel(
    queries,
    splits,
    number,
    first,
    scores,
    query_stride,
    split_stride,
    number_stride,
    first_stride,
    current,
    total,
    per_query,
    per_split,
    size,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Compares ROWS tokens of the current split at a time with TOKENS of each of SPLITS candidates."""
    # Programs that run at the same time read the same candidates.
    t, b = tl.program_id(0), tl.program_id(2).to(tl.int64)
    start = tl.program_id(1) * SPLITS
    split = start + tl.arange(0, SPLITS)
    before = tl.load(number + b * number_stride + t)
    since = start * 0
    if first is not None:
        since = tl.load(first + b * first_stride + t)

    result = tl.full((SPLITS,), -float("inf"), tl.float32)
    if tl.minimum(before, start + SPLITS) > tl.maximum(since, start):
        result = tl.zeros((SPLITS,), tl.float32)
        queries += b * query_stride + t.to(tl.int64) * per_query * size
        splits += b * split_stride + start.to(tl.int64) * per_split * size
        within = tl.arange(0, SPLITS * TOKENS) % TOKENS
        behind = tl.arange(0, SPLITS * TOKENS) // TOKENS
        for row_start in range(0, per_query, ROWS):
            row = row_start + tl.arange(0, ROWS)
            best = tl.full((ROWS, SPLITS), -float("inf"), tl.float32)
            for token_start in range(0, per_split, TOKENS):
                position = token_start + within
                mask = (position < per_split) & (start + behind < total)
                token = splits + (behind * per_split + position) * size
                if ROWS == 1:
                    query = queries + row_start * size
                    cosines = _cosines_of_one(query, token, mask, size, SPLITS * TOKENS, SIZE)
                else:
                    query = queries + row * size
                    cosines = _cosines(query, row < per_query, token, mask, size, ROWS, SPLITS * TOKENS, SIZE)
                # Rows beyond the last token have cosine zero, which adds nothing.
                cosines = tl.where((position < per_split)[None, :], cosines, -float("inf"))
                best = tl.maximum(best, tl.max(tl.reshape(cosines, (ROWS, SPLITS, TOKENS)), 2))
            result += tl.sum(best, 0)
        result = tl.where((split >= since) & (split < before), result, -float("inf"))
    out = scores + (b * current + t) * total + split
    tl.store(out, result, mask=split < total)


def _rows(x):
    """x, or a copy if its rows are not contiguous."""
    return x if x[:1].is_contiguous() else x.contiguous()


def maxsim_triton(
    queries: torch.Tensor, splits: torch.Tensor, number: torch.Tensor, first: torch.Tensor | None
) -> torch.Tensor:
    """Computes [`subquad_kernels.maxsim`]."""
    queries, splits = _rows(queries), _rows(splits)
    (batch, current, per_query, size), (total, per_split) = queries.shape, splits.shape[1:3]
    number, first = (x if x is None else x.contiguous().expand(batch, -1) for x in (number, first))
    scores = queries.new_empty(batch, current, total, dtype=torch.float32)

    # Products of float32 do not use tensor cores, and need many registers.
    one, wide = per_query == 1, queries.dtype == torch.float32
    block = 64 if one or wide else 128
    tokens = min(next_power_of_2(per_split), block)
    widest = 128 if one else 32 if wide else 64
    launch(
        _maxsim_kernel,
        (current, cdiv(total, block // tokens), batch),
        *(queries, splits, number, first, scores),
        *(queries.stride(0), splits.stride(0), number.stride(0), 0 if first is None else first.stride(0)),
        *(current, total, per_query, per_split, size),
        ROWS=1 if one else block_size(per_query, 64),
        SPLITS=block // tokens,
        TOKENS=tokens,
        SIZE=block_size(size, widest),
        num_warps=8,
    )
    return scores

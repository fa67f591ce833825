"""
MaxSim as Triton kernels.

A program compares current splits with a block of candidates. It reads a few channels of the tokens of both at a time
and sums their products. It keeps only the maximum similarity for each token of a current split, and then the sum of
these. With a single current split, reading the candidates takes most of the time, so the same kernel sums the squares
of the tokens. With several, the products do, so the norms are computed before.
"""

import torch
import triton
import triton.language as tl

from ..backend import block_size, cdiv, launch, next_power_of_2
from ..tiles import row_products, rows_at


@triton.jit
def _cosines_of_one(query, token, mask, size, TOKENS: tl.constexpr, SIZE: tl.constexpr):
    """One token with all others. Reading takes most of the time, so sums over channels are done at the end."""
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
def _one_kernel(
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
    """Compares ROWS tokens of a current split at a time with TOKENS of each of SPLITS candidates."""
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


@triton.jit
def _inverse_norms(x, norms, block, tokens, of_row, stride, size, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Writes 1 / (norm + 1e-8) of some of the tokens; a row of the batch has `of_row` of them."""
    token = block * ROWS + tl.arange(0, ROWS)
    here = tl.minimum(token, tokens - 1)
    x += (here // of_row).to(tl.int64) * stride + (here % of_row).to(tl.int64) * size
    squares = tl.zeros((ROWS, SIZE), tl.float32)
    for start in range(0, size, SIZE):
        channel = start + tl.arange(0, SIZE)
        values = tl.load(x[:, None] + channel[None, :], mask=(channel < size)[None, :], other=0.0).to(tl.float32)
        squares += values * values
    tl.store(norms + token, 1 / (tl.sqrt(tl.sum(squares, 1)) + 1e-8), mask=token < tokens)


@triton.jit
def _norms_kernel(
    queries, splits, query_norms, split_norms,
    query_tokens, query_of_row, query_stride, split_tokens, split_of_row, split_stride, size,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Inverse norms of the tokens of the current splits, and of the candidates."""
    block, blocks = tl.program_id(0), tl.cdiv(query_tokens, ROWS)
    if block < blocks:
        _inverse_norms(queries, query_norms, block, query_tokens, query_of_row, query_stride, size, ROWS, SIZE)
    else:
        block -= blocks
        _inverse_norms(splits, split_norms, block, split_tokens, split_of_row, split_stride, size, ROWS, SIZE)


@triton.jit
def _several_kernel(
    queries, splits, query_norms, split_norms, number, first, scores,
    query_stride, split_stride, number_stride, first_stride, current, total, per_query, per_split, size,
    CURRENT: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, TOKENS: tl.constexpr, SIZE: tl.constexpr,
    EVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compares ROWS tokens of each of CURRENT splits at a time with TOKENS of each of SPLITS candidates."""
    b, start = tl.program_id(2).to(tl.int64), tl.program_id(1) * SPLITS
    ts, split = tl.program_id(0) * CURRENT + tl.arange(0, CURRENT), start + tl.arange(0, SPLITS)
    before = tl.load(number + b * number_stride + ts, mask=ts < current, other=0)
    since = tl.zeros_like(before)
    if first is not None:
        since = tl.load(first + b * first_stride + ts, mask=ts < current, other=0)

    result = tl.full((CURRENT, SPLITS), -float("inf"), tl.float32)
    reached = tl.minimum(before, start + SPLITS) > tl.maximum(since, start)
    if tl.max(reached.to(tl.int32), 0) > 0:
        result = tl.zeros((CURRENT, SPLITS), tl.float32)
        queries, query_norms = queries + b * query_stride, query_norms + b * current * per_query
        splits, split_norms = splits + b * split_stride, split_norms + b * total * per_split
        rows, columns = tl.arange(0, CURRENT * ROWS), tl.arange(0, SPLITS * TOKENS)
        t = tl.minimum(tl.program_id(0) * CURRENT + rows // ROWS, current - 1)
        candidate = tl.minimum(start + columns // TOKENS, total - 1)
        for row_start in range(0, per_query, ROWS):
            row = row_start + rows % ROWS
            query = t * per_query + tl.minimum(row, per_query - 1)
            best = tl.full((CURRENT * ROWS, SPLITS), -float("inf"), tl.float32)
            for token_start in range(0, per_split, TOKENS):
                position = token_start + columns % TOKENS
                token = candidate * per_split + tl.minimum(position, per_split - 1)
                cosines = row_products(
                    rows_at(queries, size, query, current * per_query - 1),
                    rows_at(splits, size, token, total * per_split - 1),
                    size, CURRENT * ROWS, SPLITS * TOKENS, SIZE, EVEN, STAGES, "ieee",
                )  # fmt: skip
                cosines *= tl.load(query_norms + query)[:, None]
                cosines *= tl.load(split_norms + token)[None, :]
                cosines = tl.where((position < per_split)[None, :], cosines, -float("inf"))
                best = tl.maximum(best, tl.max(tl.reshape(cosines, (CURRENT * ROWS, SPLITS, TOKENS)), 2))
            best = tl.where((row < per_query)[:, None], best, 0.0)
            result += tl.sum(tl.reshape(best, (CURRENT, ROWS, SPLITS)), 1)
        inside = (split[None, :] >= since[:, None]) & (split[None, :] < before[:, None])
        result = tl.where(inside, result, -float("inf"))
    out = scores + (b * current + ts)[:, None] * total + split[None, :]
    tl.store(out, result, mask=(ts < current)[:, None] & (split < total)[None, :])


def _rows(x):
    """x, or a copy if its rows are not contiguous."""
    return x if x.is_contiguous() or x[:1].is_contiguous() else x.contiguous()


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
    strides = queries.stride(0), splits.stride(0), number.stride(0), 0 if first is None else first.stride(0)
    tensors, numbers = (number, first, scores), (*strides, current, total, per_query, per_split, size)
    sizes = {"ROWS": 1 if one else block_size(per_query, 64), "SPLITS": block // tokens, "TOKENS": tokens}
    if current == 1 or one or wide:
        widest = 128 if one else 32 if wide else 64
        grid = current, cdiv(total, block // tokens), batch
        sizes |= {"SIZE": block_size(size, widest), "num_warps": 8}
        launch(_one_kernel, grid, queries, splits, *tensors, *numbers, **sizes)
        return scores

    at_once = min(128 // sizes["ROWS"], next_power_of_2(current))
    norms = [scores.new_empty(x.shape[:3]) for x in (queries, splits)]
    of_tokens = [n for x in (queries, splits) for n in (x.shape[:3].numel(), x.shape[1:3].numel(), x.stride(0))]
    blocks = sum(cdiv(x.numel(), 16) for x in norms)
    launch(_norms_kernel, (blocks,), queries, splits, *norms, *of_tokens, size, ROWS=16, SIZE=256)
    even = size % 128 == 0
    launch(
        _several_kernel,
        (cdiv(current, at_once), cdiv(total, block // tokens), batch),
        *(queries, splits, *norms, *tensors, *numbers),
        CURRENT=at_once,
        **sizes,
        SIZE=64 if even else block_size(size, 32),
        EVEN=even,
        STAGES=3 if even and torch.version.hip is None else 1,
        num_warps=8 if at_once * sizes["ROWS"] == 128 else 4,
    )
    return scores

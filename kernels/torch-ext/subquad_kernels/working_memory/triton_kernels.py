"""
The working memory as Triton kernels: division of work, and the kernels of each pass.

A chunk changes the memory linearly, M' = M + r ⊙ (U - G M - M). U = Pᵀ V and G = Pᵀ F, with P and F the softmax of
the keys of the chunk over its tokens and over the features, are computed for all chunks in parallel. Only
`_absorb_kernel` goes from chunk to chunk, and stores each version of the memory. `_absorb_gradient_kernel` goes back
with the gradient of the memory.

The operands of products, including the versions of the memory, are kept in the dtype of the products.
"""

import functools
from typing import NamedTuple

import torch

from ..backend import (
    block_size,
    cdiv,
    common_dtype,
    contiguous,
    launch,
    multiprocessors,
    next_power_of_2,
    shared_memory,
    strided,
    without_autocast,
)
from ..memoize import memoize_by_tensor
from ..segments import operands
from .absorb_kernels import _absorb_gradient_kernel, _absorb_kernel, _normalizer_gradient_kernel
from .chunk_kernels import (
    _log_sum_kernel,
    _product_kernel,
    _readers_kernel,
    _rows_kernel,
    _weights_gradient_kernel,
    _weights_kernel,
)
from .eager import assert_chunks
from .step_kernels import _absorb_step_kernel, _prepare_step_kernel


def _warps(rows: int, narrow: bool) -> int:
    """
    The number of warps for a product. Four take 64 of its rows, and eight would share the columns of these. If that
    leaves each less than a row of shared memory, Triton misreads a bfloat16 operand on Hopper.
    """
    return 4 if narrow and rows < 128 else 8


class _Ranges(NamedTuple):
    """Ranges of tokens: see `_range`."""

    starts: torch.Tensor  # (B, N)
    more: torch.Tensor
    length: int  # of a row
    reads: bool

    def arguments(self, chunk_size):
        return self.starts, self.more, self.starts.shape[1], chunk_size, self.length


class _Plan:
    """The division of work into programs."""

    def __init__(self, q, k, v, leaving, begins, reads, chunk_size):
        self.batch, self.heads, length, self.key_size = q.shape
        self.value_size, self.chunk_size, self.chunks = v.shape[-1], chunk_size, leaving.shape[1]
        self.like = v
        dtype = common_dtype(q, k, v)
        self.products, narrow = operands(dtype), dtype == torch.bfloat16
        hip = torch.version.hip is not None
        # float32 needs twice the memory, and three products instead of one.
        self.dtype = torch.bfloat16 if narrow else torch.float32
        self.tile = 128 if narrow else 64
        self.depth = 64 if narrow else 32
        self.stages = {"STAGES": 3 if narrow and not hip else 1}
        self.of_keys = {"K": self.key_size, "BK": block_size(self.key_size)}
        self.of_columns = {
            **self.of_keys,
            "V": self.value_size,
            "BV": block_size(self.value_size, 32 if narrow else 16),
            "BS": 32 if self.key_size <= 512 else 16,
            **self.products,
            "num_warps": _warps(block_size(self.key_size), narrow),
        }
        self.column_tiles = cdiv(self.value_size, self.of_columns["BV"])

        self.leaving, self.begins = leaving.contiguous(), begins.contiguous()
        self.absorbed = _Ranges(self.leaving, self.begins, k.shape[2], False)
        versions, reads = self.chunks + 1, reads.contiguous()
        boundaries = reads.new_zeros(2, self.batch, versions)
        blocks = cdiv(length, 128)
        launch(_readers_kernel, (self.batch * blocks,), reads, *boundaries, length, versions, blocks, BT=128)
        self.reading = _Ranges(*boundaries, length, True)

    def pipeline(self, rows):
        """Launch options of a product with this number of rows."""
        warps = 4 if torch.version.hip is not None else _warps(rows, self.dtype == torch.bfloat16)
        return {**self.stages, "num_warps": warps}

    def empty(self, *shape, dtype=torch.float32):
        return self.like.new_empty(self.batch, self.heads, *shape, dtype=dtype)

    def _launch(self, kernel, tiles, tensors, ranges, *, block=None, **constants):
        """Runs a program for each tile of each range and, with `block`, for each block of its tokens."""
        numbers = ranges.arguments(self.chunk_size)
        if block is not None:
            blocks = cdiv(min(self.chunk_size, ranges.length), block)
            numbers, tiles, constants = (*numbers, blocks), tiles * blocks, {"BT": block, **constants}
        grid = (ranges.starts.numel() * self.heads * tiles,)
        launch(kernel, grid, *tensors, *numbers, self.heads, READS=ranges.reads, **constants)

    def softmax(self, x, ranges, log_sums=None):
        """The softmax over the features and, with `log_sums`, over the tokens of each chunk."""
        over_features = self.empty(ranges.length, self.key_size, dtype=self.dtype)
        over_tokens = None if log_sums is None else torch.empty_like(over_features)
        tensors = *strided(x), log_sums, over_tokens, over_features
        self._launch(_weights_kernel, 1, tensors, ranges, block=16, **self.of_keys)
        return over_features, over_tokens

    def softmax_gradient(self, out, ranges, y, grad_y, over_tokens=None, grad_tokens=None, shifts=None):
        tensors = y, grad_y, over_tokens, grad_tokens, shifts, out
        self._launch(_weights_gradient_kernel, 1, tensors, ranges, block=16, **self.of_keys)

    def product(self, a, x, ranges, dtype=torch.float32):
        """aᵀ x for each range."""
        width = x.shape[-1]
        out = self.empty(ranges.starts.shape[1], self.key_size, width, dtype=dtype)
        blocks = {"BT": self.depth, "BK": block_size(self.key_size, self.tile), "BW": block_size(width, self.tile)}
        tiles = cdiv(self.key_size, blocks["BK"]) * cdiv(width, blocks["BW"])
        sizes = {"K": self.key_size, "WIDTH": width, **blocks, **self.pipeline(blocks["BK"])}
        self._launch(_product_kernel, tiles, (a, *strided(x), out), ranges, **sizes, **self.products)
        return out

    def rows(self, a, matrices, out, ranges, *, transposed=False, add=False):
        """Each token of a times the matrix of its range, written to `out` or added to it."""
        size, width = a.shape[-1], out.shape[-1]
        block = block_size(min(self.chunk_size, ranges.length), self.tile)
        blocks = {"BS": block_size(size, self.depth), "BW": block_size(width, self.tile)}
        self._launch(
            _rows_kernel,
            cdiv(width, blocks["BW"]),
            (*strided(a), matrices, out),
            ranges,
            block=block,
            SIZE=size,
            WIDTH=width,
            TRANSPOSED=transposed,
            ADD=add,
            **blocks,
            **self.products,
            **self.pipeline(block),
        )
        return out

    def _walk(self, kernel, tensors, **constants):
        """Runs a kernel that walks from chunk to chunk with some columns of the memory."""
        grid = (self.batch * self.heads * self.column_tiles,)
        tensors = *tensors, self.leaving, self.begins
        launch(kernel, grid, *tensors, self.chunks, self.heads, **self.of_columns, **constants)

    def absorb(self, k, v, memory, normalizer, changes=False):
        """
        The states after the last chunk. Stores both softmaxes of the keys, G, U (or with `changes` the change of the
        memory by each chunk), the versions of the memory, and the fraction of it that each chunk replaces.
        """
        log_sums = self.empty(self.chunks, self.key_size)
        launch(
            _log_sum_kernel,
            (self.batch * self.heads * self.chunks * cdiv(self.key_size, 32),),
            *(*strided(k), self.leaving, self.begins, log_sums),
            *(self.chunks, self.chunk_size, k.shape[2], self.heads),
            K=self.key_size,
            BT=64,
            BK=32,
            num_warps=8,
        )
        self.over_features, self.over_tokens = self.softmax(k, self.absorbed, log_sums)
        self.gram = self.product(self.over_tokens, self.over_features, self.absorbed, self.dtype)
        self.added = self.product(self.over_tokens, v, self.absorbed)
        self.versions = self.empty(self.chunks + 1, self.key_size, self.value_size, dtype=self.dtype)
        self.ratios = torch.empty_like(log_sums)
        final = self.empty(self.key_size, self.value_size), self.empty(self.key_size)
        tensors = memory, normalizer, log_sums, self.gram, self.added, self.versions, self.ratios, *final
        self._walk(_absorb_kernel, tensors, CHANGES=changes)
        return final

    def absorb_backward(self, grad_memory, grad_normalizer, grad_versions, grad_initial):
        """
        The gradient of U, and the normalizer's contribution to the gradient of the keys, after [`absorb`] with
        `changes`. The gradients of the states are written to `grad_initial`, unless it is None.
        """
        grad_added = self.empty(self.chunks, self.key_size, self.value_size, dtype=self.dtype)
        of_changes, of_versions = (self.empty(self.chunks, self.column_tiles, self.key_size) for _ in range(2))
        tensors = grad_memory, grad_versions, self.gram, self.added, self.versions, self.ratios
        self._walk(_absorb_gradient_kernel, (*tensors, grad_added, of_changes, of_versions, grad_initial[0]))
        shifts = torch.empty_like(self.ratios)
        tensors = grad_normalizer, self.ratios, of_changes, of_versions, shifts, grad_initial[1]
        launch(
            _normalizer_gradient_kernel,
            (self.batch * self.heads * cdiv(self.key_size, 32),),
            *(*tensors, self.leaving, self.begins, self.chunks, self.heads),
            K=self.key_size,
            TILES=self.column_tiles,
            BT=next_power_of_2(self.column_tiles),
            BK=32,
        )
        return grad_added, shifts


def _states(*states):
    return [None if x is None else x.float().contiguous() for x in states]


def working_memory_triton(q, k, v, memory, normalizer, leaving, begins, reads, chunk_size):
    """Computes [`subquad_kernels.working_memory`]."""
    memoize_by_tensor(assert_chunks, (leaving, begins, reads), k.shape[2], chunk_size)
    plan = _Plan(q, k, v, leaving, begins, reads, chunk_size)
    final = plan.absorb(k, v, *_states(memory, normalizer))
    weights, _ = plan.softmax(q, plan.reading)
    out = v.new_zeros(*q.shape[:-1], v.shape[-1])  # for tokens that do not read
    return plan.rows(weights, plan.versions, out, plan.reading), *final


def working_memory_triton_backward(
    grad_out, grad_memory, grad_normalizer, q, k, v, memory, normalizer, leaving, begins, reads, chunk_size
):
    """Gradients of q, k, v, memory and normalizer, if given. The forward pass is recomputed."""
    plan = _Plan(q, k, v, leaving, begins, reads, chunk_size)
    states, grads = _states(memory, normalizer), _states(grad_memory, grad_normalizer)
    plan.absorb(k, v, *states, changes=True)
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))

    weights, _ = plan.softmax(q, plan.reading)
    grad_weights = torch.empty_like(weights, dtype=torch.float32)
    plan.rows(grad_out, plan.versions, grad_weights, plan.reading, transposed=True)
    plan.softmax_gradient(dq, plan.reading, weights, grad_weights)
    grad_versions = plan.product(weights, grad_out, plan.reading)

    grad_states = [None if x is None else torch.empty_like(x) for x in states]
    du, shifts = plan.absorb_backward(*grads, grad_versions, grad_states)
    with without_autocast(v):
        dg = (du @ plan.versions[:, :, :-1].mT).neg_()
    dg.masked_fill_((begins >= 0)[:, None, :, None, None], 0.0)
    p, f = plan.over_tokens, plan.over_features
    dp, df = (torch.empty_like(f, dtype=torch.float32) for _ in range(2))
    plan.rows(p, du, dv, plan.absorbed)
    plan.rows(p, dg, df, plan.absorbed)
    plan.rows(v, du, dp, plan.absorbed, transposed=True)
    plan.rows(f, dg, dp, plan.absorbed, transposed=True, add=True)
    plan.softmax_gradient(dk, plan.absorbed, f, df, p, dp, shifts)
    return [dq, dk, dv, *(x for x in grad_states if x is not None)]


def _power(most: int) -> int:
    """The largest power of two up to `most`, at least 16."""
    return max(1 << (most.bit_length() - 1), 16)


@functools.lru_cache
def _divide_step(batch, heads, key_size, value_size, chunk_size, dtypes, programs, shared):
    """
    The division of a step, for a device that runs that many programs with that much shared memory each: the length of
    the segments of a chunk and their number, whether their products are bfloat16, and the grid and the constants of
    the two kernels.
    """
    dtype = functools.reduce(torch.promote_types, dtypes)
    narrow, block = dtype == torch.bfloat16, block_size(key_size)
    sizes = {"K": key_size, "V": value_size, "BK": block, **operands(dtype)}
    most = _power(8192 // block)
    features, tokens = min(most, block), min(most, 32)
    tiles = cdiv(key_size, features)
    segments = min(cdiv(programs, batch * heads * tiles), cdiv(chunk_size, 256))
    segment = cdiv(cdiv(chunk_size, segments), 32) * 32
    prepare = {"BV": 32, "BF": features, "BT": tokens, "num_warps": _warps(features, narrow), **sizes}
    # Of the memory a program holds this many values, in registers and once in shared memory.
    most = _power(min(shared * 3 // 4, (128 if narrow else 32) * 1024) // 4)
    columns = block_size(value_size, _power(most // block))
    absorb = {"BV": columns, "BT": tokens, "BS": 32, **sizes}
    absorb["num_warps"] = 16 if block * columns > 16384 else _warps(block, narrow)
    absorb["STAGES"] = 3 if narrow and torch.version.hip is None else 1
    return (
        *(segment, segments, narrow),
        (batch * heads * (cdiv(value_size, 32) + tiles * segments),),
        prepare,
        (min(batch * heads * cdiv(value_size, columns), programs),),
        absorb,
    )


def working_memory_triton_step(q, k, v, memory, normalizer, leaving, begins, reads, chunk_size, indices):
    """
    One token and at most one chunk per row, q (B, H, 1, K), leaving, begins and reads (B, 1). Changes the states, in
    float32, in place and returns out (B, H, 1, V). With `indices` (B) the states, k and v are pools. The device
    decides which rows absorb a chunk. Only the last kernel changes the states, so they are unchanged if one fails.
    """
    (batch, heads, _, key_size), (_, _, length, value_size) = q.shape, v.shape
    dtypes, device = (q.dtype, k.dtype, v.dtype), (multiprocessors(v), shared_memory(v))
    segment, segments, narrow, grid, constants, absorb_grid, absorb_constants = _divide_step(
        batch, heads, key_size, value_size, chunk_size, dtypes, *device
    )
    out = v.new_empty(batch, heads, 1, value_size)
    normalizers = normalizer.new_empty(batch, heads, segments + 1, key_size)
    # Naming a dtype would take longer.
    grams = (v if narrow else normalizer).new_empty(batch, heads, segments, key_size, key_size)
    tensors = memory, normalizer, normalizers, grams
    tensors = *tensors, *contiguous(leaving, begins, reads, indices), memory.stride(0), normalizer.stride(0), out
    numbers = chunk_size, length, segment, segments, heads
    q, k, v = strided(q)[:3], strided(k), strided(v)
    launch(_prepare_step_kernel, grid, *q, *k, *tensors, *numbers, **constants)
    launch(_absorb_step_kernel, absorb_grid, *q, *k, *v, *tensors, batch, *numbers, **absorb_constants)
    return out

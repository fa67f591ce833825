"""
The slot memory as Triton kernels: division of work, and the kernels of each pass.

The forward pass reads the keys of the memory for the logits of the slots, then its values with the softmax of the
logits; the memories that enter the chunks, of keys and values together, are computed before. The backward pass
recomputes them, and computes their gradients in reverse. Of many tokens, a few rows are computed at a time, so that
the tensors that pass between the kernels do not grow with the batch.
"""

import torch

from ..backend import block_size, cast, cdiv, common_dtype, contiguous, launch, multiprocessors, next_power_of_2
from ..documents import count_documents
from ..segments import Segments, operands, passing
from .chunk_kernels import (
    _decay_kernel,
    _decay_sum_kernel,
    _features_kernel,
    _slots_kernel,
    _walk_kernel,
)
from .far_kernels import _far_writes_kernel
from .softmax_kernel import _softmax_kernel
from .step_kernels import _step_kernel, _step_logits_kernel


# The shortest segment for which computing its entering state pays off. Documents are always cut into segments of at
# most this length, so that short ones do not wait for long ones.
MIN_SEGMENT = 512
# From so many tokens on, summed over heads, rows are computed apart: several times what a GPU computes at a time.
MOST_TOKENS = 1 << 16


class _Plan(Segments):
    """The division of work into programs."""

    def __init__(self, k, v, log_f, cu_seqlens):
        batch, length, self.heads, self.key_size = k.shape
        self.value_size, self.slots = v.shape[-1], log_f.shape[-1]
        self.like = log_f
        self.chunk = 64
        # float32 needs twice the memory, and three products instead of one.
        narrow, self.hip = k.dtype == torch.bfloat16, torch.version.hip is not None
        self.dtype = torch.bfloat16 if narrow else torch.float32
        self.constants = {"M": self.slots, "C": self.chunk, "PACKED": cu_seqlens is not None}
        self.products = operands(k.dtype)
        self.walk_slots = block_size(self.slots, 64)
        self.walk_features = block_size(max(self.key_size, self.value_size), 128 if narrow else 32)
        # With fewer columns ptxas 12.8 reads a register that is never written, and the products are wrong (sm_90).
        self.slot_blocks = {"BM": max(64, block_size(self.slots, 128 if narrow else 64)), "BF": 64 if narrow else 32}
        self.feature_blocks = {"BM": block_size(self.slots, 64 if narrow else 32), "BF": 128 if narrow else 64}

        columns = sum(cdiv(size, self.walk_features) for size in (self.key_size, self.value_size))
        self.walk_tiles = cdiv(self.slots, self.walk_slots) * columns
        programs = batch * self.heads * self.walk_tiles
        wanted = 2 * multiprocessors(k)  # the number of programs that run at a time
        super().__init__(
            batch,
            length,
            chunk=self.chunk,
            programs=programs,
            wanted=wanted,
            shortest=MIN_SEGMENT,
            cu_seqlens=cu_seqlens,
            longest=MIN_SEGMENT,
        )
        self.per_segment = cdiv(self.segment, self.chunk)
        self.geometry = (self.boundaries, length, self.segment, self.per_sequence)
        self.far_chunks = log_f.new_zeros(self.chunks * self.heads, dtype=torch.int32)

    def pipeline(self, columns: int, *, chained: bool = False) -> dict:
        """
        The number of warps for a product with this number of columns, and of tiles to load ahead. `chained`: outside
        of a loop, a product's result is an operand of the next one.
        """
        narrow = self.dtype == torch.bfloat16
        # Eight warps of a Hopper GPU share the columns of 64 rows. Triton misreads a row-major bfloat16 operand if its
        # half has fewer than 64 columns, one row of shared memory. In a chain it gives all eight warps rows of their
        # own, but there are only enough rows for four; one such kernel was wrong on a GPU.
        few = self.hip or (narrow and (columns < 128 or chained))
        return {"STAGES": 2 if narrow and not self.hip else 1, "num_warps": 4 if few else 8}

    def empty(self, *shape, dtype=torch.float32):
        return self.like.new_empty(shape, dtype=dtype)

    def state(self, n, dtype=torch.float32):
        return self.empty(n, self.heads, self.slots, self.key_size + self.value_size, dtype=dtype)

    def by_slot(self, dtype=torch.float32):
        return self.empty(*self.like.shape, dtype=dtype)

    def launch(self, kernel, *arguments, tiles, last=None, **constants):
        """Runs one program for each tile of each head of each chunk."""
        grid = (self.segments * self.per_segment * self.heads * tiles,)
        geometry = *self.geometry, self.per_segment, self.heads, *(() if last is None else (last,))
        arguments = *arguments, self.far_chunks, *geometry
        constants = {"TILES": tiles, **self.constants, **constants}
        launch(kernel, grid, *arguments, **constants)

    def decays(self, log_f):
        """F of each token, and the remaining part of its write at the end of its chunk. Finds the far chunks."""
        decay, writes = self.by_slot(), self.by_slot(self.dtype)
        block = block_size(self.slots, 64)
        self.launch(_decay_sum_kernel, log_f, decay, writes, tiles=cdiv(self.slots, block), BM=block, num_warps=8)
        return decay, writes

    def _walk(self, inputs, initial, final, totals, chunk_states, reverse):
        launch(
            _walk_kernel,
            (self.segments * self.heads * self.walk_tiles,),
            *(*inputs, initial, final, totals, chunk_states, *self.geometry, self.heads),
            K=self.key_size,
            V=self.value_size,
            BM=self.walk_slots,
            BF=self.walk_features,
            REVERSE=reverse,
            **self.constants,
            **self.products,
            **self.pipeline(self.walk_features),
        )

    def walk(self, inputs, initial, final, *, store=True, reverse=False):
        """The memories that enter the chunks, if stored. Those that leave the sequences are written to `final`."""
        chunk_states = self.state(self.chunks, self.dtype) if store else None
        if self.whole:
            self._walk(inputs, initial, final, None, chunk_states, reverse)
            return chunk_states
        states, totals = self.state(self.segments), self.empty(self.segments, self.heads, self.slots)
        self._walk(inputs, None, states, totals, None, reverse)
        launch(*passing(self, states, totals, initial, final, reverse))
        if store:
            self._walk(inputs, states, None, None, chunk_states, reverse)
        return chunk_states

    def find(self, a, b, decay, writes, states, out, offset):
        """
        The readout of a from each slot of b: the logits, or the gradient of their softmax. [`softmax`] completes it.
        """
        self.launch(
            _slots_kernel,
            *(a, b, decay, writes, states, out),
            tiles=cdiv(self.slots, self.slot_blocks["BM"]),
            last=offset,
            SIZE=a.shape[-1],
            WIDTH=self.key_size + self.value_size,
            **self.slot_blocks,
            **self.products,
            **self.pipeline(self.slot_blocks["BM"], chained=a.shape[-1] <= self.slot_blocks["BF"]),
        )

    def softmax(self, a, b, logits, grads, log_f, decay):
        """
        The softmax x of the logits, or the gradient of the logits; x exp(F); and, for chunks that decay too far, the
        weights of the tokens' writes in each other's reads with x. For such chunks a and b complete the logits, or
        `grads`.
        """
        x, reads = self.by_slot(self.dtype), self.by_slot(self.dtype)
        pairs = self.empty(self.chunks, self.heads, self.chunk, self.chunk, dtype=self.dtype)
        self.launch(
            _softmax_kernel,
            *(a, b, logits, grads, log_f, decay, x, reads, pairs),
            tiles=self.chunk // 16,
            SIZE=0 if a is None else a.shape[-1],
            BM=block_size(self.slots, 256),
            **self.products,
            num_warps=8,
        )
        return x, reads, pairs

    def features(self, a, decay, reads, writes, far_pairs, states, out, offset, reverse=False):
        """The readout of x from a; in reverse the gradient of the writes."""
        self.launch(
            _features_kernel,
            *(a, decay, reads, writes, far_pairs, states, out),
            tiles=cdiv(a.shape[-1], self.feature_blocks["BF"]),
            last=offset,
            SIZE=a.shape[-1],
            WIDTH=self.key_size + self.value_size,
            REVERSE=reverse,
            **self.feature_blocks,
            **self.products,
            **self.pipeline(self.feature_blocks["BF"], chained=self.slots <= self.feature_blocks["BM"]),
        )

    def decay_grads(self, q, k, grad_out, v, x_keys, x_values, log_f, decay, *arguments, out):
        """The gradient of log_f."""
        reads, sizes = (q, k, grad_out, v), {"K": self.key_size, "V": self.value_size}
        self.launch(_far_writes_kernel, *reads, x_keys, x_values, decay, out, tiles=1, **sizes, **self.products)
        rows = min(self.slot_blocks["BM"], 64)
        self.launch(
            _decay_kernel,
            *(*reads, log_f, decay, *arguments, out),
            tiles=cdiv(self.slots, rows),
            **sizes,
            BM=rows,
            BF=self.slot_blocks["BF"],
            **self.products,
            **self.pipeline(rows, chained=True),
        )


def _parts(k, cu_seqlens):
    """The rows that are computed at a time, as slices. Packed documents are one row."""
    batch, length, heads, _ = k.shape
    rows = max(1, MOST_TOKENS // (length * heads))
    if cu_seqlens is not None or rows >= batch:
        return [slice(None)]
    return [slice(first, first + rows) for first in range(0, batch, rows)]


def _of(rows, *tensors):
    return [None if x is None else x[rows] for x in tensors]


def _room(x, dtype):
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _leaving(k, v, log_f, cu_seqlens):
    """Room for the memories that leave the sequences."""
    shape = count_documents(cu_seqlens, k.shape[0]), k.shape[2], log_f.shape[-1], k.shape[-1] + v.shape[-1]
    return log_f.new_empty(shape, dtype=torch.float32)


def slot_memory_triton(q, k, v, log_f, initial_state, cu_seqlens):
    """
    Computes [`subquad_kernels.slot_memory`]. Also returns the logits (B, T, H, M) in float32, which the backward pass
    needs.
    """
    out, logits, final = _room(v, v.dtype), _room(log_f, torch.float32), _leaving(k, v, log_f, cu_seqlens)
    dtype = common_dtype(q, k, v)
    for rows in _parts(k, cu_seqlens):
        _forward(dtype, cu_seqlens, *_of(rows, q, k, v, log_f, initial_state, out, final, logits))
    return out, final, logits


def _forward(dtype, cu_seqlens, q, k, v, log_f, initial_state, out, final, logits):
    q, k, v = contiguous(*cast(dtype, q, k, v))
    log_f, initial_state = _decays_and_state(log_f, initial_state)
    plan = _Plan(k, v, log_f, cu_seqlens)
    decay, writes = plan.decays(log_f)
    states = plan.walk((writes, k, writes, v, decay), initial_state, final)
    plan.find(q, k, decay, writes, states, logits, 0)
    _, reads, pairs = plan.softmax(q, k, logits, None, log_f, decay)
    plan.features(v, decay, reads, writes, pairs, states, out, k.shape[-1])


def _decays_and_state(log_f, state):
    return log_f.contiguous(), None if state is None else state.float().contiguous()


def slot_memory_triton_backward(grad_out, grad_state, logits, q, k, v, log_f, initial_state, cu_seqlens):
    """
    Gradients of q, k, v, log_f and, if it is given, initial_state, the last two in float32. The memories that enter
    the chunks are recomputed; they and their gradients are kept in the dtype of the products during the pass.
    """
    dtype, grads = common_dtype(q, k, v), [_room(x, x.dtype) for x in (q, k, v)]
    grads += [_room(log_f, torch.float32), _leaving(k, v, log_f, cu_seqlens)]
    for rows in _parts(k, cu_seqlens):
        inputs = _of(rows, grad_out, grad_state, logits, q, k, v, log_f, initial_state)
        _backward(dtype, cu_seqlens, *inputs, *_of(rows, *grads))
    return grads[:4] if initial_state is None else grads


def _backward(
    dtype, cu_seqlens, grad_out, grad_state, logits, q, k, v, log_f, initial_state, dq, dk, dv, dlog_f, grad_initial
):
    """Writes the gradients of some rows."""
    grad_out, q, k, v = contiguous(*cast(dtype, grad_out.to(v.dtype), q, k, v))
    log_f, initial_state = _decays_and_state(log_f, initial_state)
    logits, grad_state = logits.contiguous(), grad_state.float().contiguous()
    plan = _Plan(k, v, log_f, cu_seqlens)
    decay, writes = plan.decays(log_f)
    states = plan.walk((writes, k, writes, v, decay), initial_state, torch.empty_like(grad_initial))
    key_size = k.shape[-1]

    x_values, reads_values, value_pairs = plan.softmax(None, None, logits, None, log_f, decay)
    sums = plan.by_slot()
    plan.find(grad_out, v, decay, writes, states, sums, key_size)
    x_keys, reads_keys, key_pairs = plan.softmax(grad_out, v, logits, sums, log_f, decay)
    grads = plan.walk((reads_keys, q, reads_values, grad_out, decay), grad_state, grad_initial, reverse=True)

    plan.features(grad_out, decay, reads_values, writes, value_pairs, grads, dv, key_size, reverse=True)
    plan.features(k, decay, reads_keys, writes, key_pairs, states, dq, 0)
    plan.features(q, decay, reads_keys, writes, key_pairs, grads, dk, 0, reverse=True)
    arguments = x_keys, x_values, log_f, decay, writes, reads_keys, reads_values, sums, states, grads
    plan.decay_grads(q, k, grad_out, v, *arguments, out=dlog_f)


def slot_memory_triton_state(k, v, log_f, initial_state, cu_seqlens):
    """The state of [`slot_memory_triton`] alone."""
    final, dtype = _leaving(k, v, log_f, cu_seqlens), common_dtype(k, v)
    for rows in _parts(k, cu_seqlens):
        _state(dtype, cu_seqlens, *_of(rows, k, v, log_f, initial_state, final))
    return final


def _state(dtype, cu_seqlens, k, v, log_f, initial_state, final):
    k, v = contiguous(*cast(dtype, k, v))
    log_f, initial_state = _decays_and_state(log_f, initial_state)
    plan = _Plan(k, v, log_f, cu_seqlens)
    decay, writes = plan.decays(log_f)
    plan.walk((writes, k, writes, v, decay), initial_state, final, store=False)


def slot_memory_triton_step(q, k, v, log_f, state, new_state, indices):
    """
    One token: q, k (B, 1, H, K), v (B, 1, H, V), log_f (B, 1, H, M), state (B, H, M, K + V) in float32. If the state
    is None, `new_state` holds it, at `indices` (B) if there are any, and only the slots that the token writes to are
    stored. Writes the state after the token to `new_state`. Returns out (B, 1, H, V) in the dtype of v.
    """
    q, k, v, log_f, indices = contiguous(q, k, v, log_f, indices)
    heads, key_size = k.shape[0] * k.shape[2], k.shape[3]
    where = indices, k.shape[2], new_state.stride(0)
    value_size, slots = v.shape[-1], log_f.shape[-1]
    before = new_state if state is None else state
    logits, out = torch.empty_like(log_f, dtype=torch.float32), torch.empty_like(v)
    sizes = {"K": key_size, "V": value_size, "M": slots}
    rows, key_block = 8, next_power_of_2(key_size)
    grid = (heads * cdiv(slots, rows),)
    launch(_step_logits_kernel, grid, q, k, log_f, before, *where, logits, **sizes, BM=rows, BK=key_block)
    block, columns = min(next_power_of_2(slots), 256), 32  # a row of 128 bytes
    grid = (heads * (cdiv(key_size, columns) + cdiv(value_size, columns)),)
    arguments = k, v, log_f, logits, before, new_state, *where, out
    launch(_step_kernel, grid, *arguments, **sizes, BM=block, BF=columns, INPLACE=state is None)
    return out

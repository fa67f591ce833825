"""
The slot memory as Triton kernels: division of work, and the kernels of each pass.

The forward pass reads the keys of the memory for the logits of the slots, then its values with the softmax of the
logits; the memories that enter the chunks, of keys and values together, are computed before. The backward pass
recomputes them, and computes their gradients in reverse.
"""

import torch

from ..backend import block_size, cast, cdiv, common_dtype, contiguous, launch, multiprocessors, next_power_of_2
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

    def walk(self, inputs, initial, *, store=True, reverse=False):
        """The memories that enter the chunks, if stored, and the memories that leave the sequences."""
        chunk_states = self.state(self.chunks, self.dtype) if store else None
        final = self.state(self.sequences)
        if self.whole:
            self._walk(inputs, initial, final, None, chunk_states, reverse)
            return chunk_states, final
        states, totals = self.state(self.segments), self.empty(self.segments, self.heads, self.slots)
        self._walk(inputs, None, states, totals, None, reverse)
        launch(*passing(self, states, totals, initial, final, reverse))
        if store:
            self._walk(inputs, states, None, None, chunk_states, reverse)
        return chunk_states, final

    def find(self, a, b, decay, writes, states, offset):
        """
        The readout of a from each slot of b: the logits, or the gradient of their softmax. [`softmax`] completes it.
        """
        out = self.by_slot()
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
        return out

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

    def decay_grads(self, q, k, grad_out, v, x_keys, x_values, log_f, decay, *arguments):
        """The gradient of log_f."""
        out, sizes = self.by_slot(), {"K": self.key_size, "V": self.value_size}
        reads = q, k, grad_out, v
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
        return out


def _prepare(*tensors):
    """Contiguous tensors of one dtype."""
    return contiguous(*cast(common_dtype(*tensors), *tensors))


def slot_memory_triton(q, k, v, log_f, initial_state, cu_seqlens):
    """
    Computes [`subquad_kernels.slot_memory`]. Also returns the logits (B, T, H, M) in float32, which the backward pass
    needs.
    """
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    q, k, v = _prepare(q, k, v)
    log_f, initial_state = _decays_and_state(log_f, initial_state)
    plan = _Plan(k, v, log_f, cu_seqlens)
    decay, writes = plan.decays(log_f)
    states, final = plan.walk((writes, k, writes, v, decay), initial_state)
    logits = plan.find(q, k, decay, writes, states, 0)
    _, reads, pairs = plan.softmax(q, k, logits, None, log_f, decay)
    plan.features(v, decay, reads, writes, pairs, states, out, k.shape[-1])
    return out, final, logits


def _decays_and_state(log_f, state):
    return log_f.contiguous(), None if state is None else state.float().contiguous()


def slot_memory_triton_backward(grad_out, grad_state, logits, q, k, v, log_f, initial_state, cu_seqlens):
    """
    Gradients of q, k, v, log_f and, if it is given, initial_state, the last two in float32. The memories that enter
    the chunks are recomputed; they and their gradients are kept in the dtype of the products during the pass.
    """
    dtypes = [x.dtype for x in (q, k, v)]
    grad_out, q, k, v = _prepare(grad_out.to(v.dtype), q, k, v)
    log_f, initial_state = _decays_and_state(log_f, initial_state)
    logits, grad_state = logits.contiguous(), grad_state.float().contiguous()
    plan = _Plan(k, v, log_f, cu_seqlens)
    decay, writes = plan.decays(log_f)
    states, _ = plan.walk((writes, k, writes, v, decay), initial_state)
    key_size = k.shape[-1]

    x_values, reads_values, value_pairs = plan.softmax(None, None, logits, None, log_f, decay)
    sums = plan.find(grad_out, v, decay, writes, states, key_size)
    x_keys, reads_keys, key_pairs = plan.softmax(grad_out, v, logits, sums, log_f, decay)
    grads, grad_initial = plan.walk((reads_keys, q, reads_values, grad_out, decay), grad_state, reverse=True)

    dq, dk, dv = (torch.empty_like(x, dtype=dtype) for x, dtype in zip((q, k, v), dtypes, strict=True))
    plan.features(grad_out, decay, reads_values, writes, value_pairs, grads, dv, key_size, reverse=True)
    plan.features(k, decay, reads_keys, writes, key_pairs, states, dq, 0)
    plan.features(q, decay, reads_keys, writes, key_pairs, grads, dk, 0, reverse=True)
    arguments = x_keys, x_values, log_f, decay, writes, reads_keys, reads_values, sums, states, grads
    dlog_f = plan.decay_grads(q, k, grad_out, v, *arguments)
    found = [dq, dk, dv, dlog_f]
    return found if initial_state is None else [*found, grad_initial]


def slot_memory_triton_state(k, v, log_f, initial_state, cu_seqlens):
    """The state of [`slot_memory_triton`] alone."""
    k, v = _prepare(k, v)
    log_f, initial_state = _decays_and_state(log_f, initial_state)
    plan = _Plan(k, v, log_f, cu_seqlens)
    decay, writes = plan.decays(log_f)
    return plan.walk((writes, k, writes, v, decay), initial_state, store=False)[1]


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

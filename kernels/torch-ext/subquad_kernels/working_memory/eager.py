"""
The working memory in plain torch, for any device.

A chunk changes the memory linearly, to M + r (U - G M - M). U, G and the logarithm w of its denominator depend only on
the tokens of that chunk, and are computed for all chunks at once. The memory then passes from chunk to chunk, and one
more product reads all its versions. The tokens of a chunk, and the tokens that read one version, are placed next to
each other, in slots; a slot without a token is zero.
"""

import torch

from ..backend import widest
from ..memoize import memoize_by_tensor
from ..state_pool import numbers_in, prefers_single_states
from ..tracing import can_read_without_sync


def assert_chunks(leaving, begins, reads, keys, chunk_size):
    """Asserts on the device, without a synchronization, that all indices are in range and in order."""
    absent = leaving == -1
    inside = absent | ((leaving >= 0) & (leaving <= keys - chunk_size))
    torch._assert_async(inside.all(), "`leaving` must be -1 or where `chunk_size` tokens of `k` begin.")
    inside = absent | ((begins >= -1) & (begins < chunk_size))
    torch._assert_async(inside.all(), "`begins` must be -1 or a token of the chunk.")
    tokens = torch.arange(reads.shape[1], device=reads.device)
    before = torch.nn.functional.pad(reads[:, :-1], (1, 0), value=-1)
    starts = (reads >= 0) & (reads != before)
    rises = ~starts | (reads > before.cummax(1).values)
    few = (reads < 0) | (tokens - torch.where(starts, tokens, 0).cummax(1).values < chunk_size)
    inside = (reads >= -1) & (reads <= leaving.shape[1])
    torch._assert_async(
        (inside & rises & few).all(),
        "`reads` must be -1 or up to the number of chunks, rise, and have at most `chunk_size` of a number in a run.",
    )


def _run(index: torch.Tensor) -> tuple[int, int, int] | None:
    """
    If `index` (B, n) is one run of consecutive numbers, the same in every row, with -1 before and after it: the number
    of leading -1, its first number, and its length. Otherwise, or if reading the values would synchronize, None.
    """
    if not can_read_without_sync(index) or not index.numel() or not (index == index[:1]).all():
        return None
    there = (index[0] >= 0).nonzero().flatten()
    if not len(there) or int(there[-1] - there[0]) + 1 != len(there):
        return None
    run = index[0, there]
    return (int(there[0]), int(run[0]), len(run)) if (run.diff() == 1).all() else None


def _take(x: torch.Tensor, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows `index` (B, n) of x (B, H, ., D), zeros for negative indices: (B, H, n, D)."""
    if (run := _run(index)) is not None:  # as with consecutive chunks of one text
        before, first, length = run
        padding = 0, 0, before, index.shape[1] - before - length
        return torch.nn.functional.pad(x[:, :, first : first + length].to(dtype), padding)
    rows, heads = (torch.arange(size, device=x.device) for size in x.shape[:2])
    taken = x[rows[:, None, None], heads[:, None], index.clamp(min=0).unsqueeze(1)].to(dtype)
    return taken.masked_fill_((index < 0)[:, None, :, None], 0.0)


def _inverse(index: torch.Tensor, size: int) -> torch.Tensor:
    """The inverse of `index` (B, n), which is below `size` or -1: (B, size), -1 for numbers that are not in a row."""
    numbers = torch.arange(index.shape[1], device=index.device).expand_as(index)
    found = index.new_full((index.shape[0], size + 1), -1)  # the last entry takes all -1
    return found.scatter_(1, torch.where(index < 0, size, index), numbers)[:, :-1]


def _softmax_backward(grad, y, dim):
    return y * (grad - (grad * y).sum(dim, keepdim=True))


def _chunks(k, v, leaving, begins, chunk_size, dtype):
    """
    For absorbed chunks: the indices of their tokens (B, N C), -1 for ignored tokens, the values (B, H, N, C, V), the
    softmax of the keys over the chunk and over the features (B, H, N, C, K), and the log denominator of the former (B,
    H, N, K).
    """
    offsets = torch.arange(chunk_size, device=k.device)
    counted = (leaving >= 0).unsqueeze(-1) & (offsets >= begins.unsqueeze(-1))
    index = torch.where(counted, leaving.unsqueeze(-1) + offsets, -1).flatten(1)
    keys, values = (torch.unflatten(_take(x, index, dtype), 2, (*leaving.shape[1:], chunk_size)) for x in (k, v))
    scores = keys.masked_fill(~counted[:, None, ..., None], -torch.inf)
    w = scores.logsumexp(-2).masked_fill_((leaving < 0)[:, None, :, None], 0.0)
    return index, values, (scores - w.unsqueeze(-2)).exp(), keys.softmax(-1), w


def _absorb(memory, normalizer, u, g, w, absorbs, forgets):
    """
    One absorption: memory (B, H, K, V), normalizer and w (B, H, K), absorbs and forgets (B, 1, 1). Returns both states
    after it and the fraction of the memory that was replaced, r (B, H, K).
    """
    memory = memory.masked_fill(forgets.unsqueeze(-1), 0.0)
    normalizer = normalizer.masked_fill(forgets, -torch.inf)
    r = (w - normalizer).sigmoid().masked_fill_(~absorbs, 0.0)
    memory = torch.addcmul(memory, r.unsqueeze(-1), u - g @ memory - memory)
    return memory, torch.where(absorbs, torch.logaddexp(normalizer, w), normalizer), r


def _masks(leaving, begins):
    """Flags of absorptions that take place, and of absorptions that clear the memory first, bool (B, 1, N, 1)."""
    absorbs = (leaving >= 0)[:, None, :, None]
    return absorbs, absorbs & (begins >= 0)[:, None, :, None]


def _absorb_all(memory, normalizer, u, g, w, absorbs, forgets):
    """Both states after the last absorption, the versions of the memory (B, H, N + 1, K, V), r of each absorption."""
    versions, rates = [memory], []
    for n in range(w.shape[2]):
        inputs = (x[:, :, n] for x in (u, g, w, absorbs, forgets))
        memory, normalizer, r = _absorb(memory, normalizer, *inputs)
        versions.append(memory)
        rates.append(r)
    return memory, normalizer, torch.stack(versions, 2), rates


def _states(q, v, memory, normalizer, dtype):
    """Copies of the states in that dtype."""
    if memory is None:
        shape = *q.shape[:2], q.shape[-1]
        return v.new_zeros(*shape, v.shape[-1], dtype=dtype), v.new_zeros(shape, dtype=dtype)
    return memory.to(dtype, copy=True), normalizer.to(dtype, copy=True)


def _readers(reads, versions, chunk_size):
    """The slot in which each token reads, (B, T), -1 if it does not read, and the token of each slot."""
    size = min(reads.shape[1], chunk_size)
    tokens = torch.arange(reads.shape[1], device=reads.device).expand_as(reads)
    changes = reads.diff(dim=1, prepend=reads[:, :1]) != 0
    first = torch.where(changes, tokens, 0).cummax(1).values
    slots = torch.where(reads < 0, -1, reads * size + tokens - first)
    return slots, _inverse(slots, versions * size)


def _without_idle(leaving, begins, reads):
    """On a CPU, drops the absorptions after the last one that takes place in any row or is read."""
    if not can_read_without_sync(leaving):
        return leaving, begins
    used = (leaving >= 0).any(0).nonzero().flatten()
    size = max(int(used[-1]) + 1 if len(used) else 0, int(reads.max()))
    return leaving[:, :size], begins[:, :size]


def working_memory_chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    memory: torch.Tensor | None,
    normalizer: torch.Tensor | None,
    leaving: torch.Tensor,
    begins: torch.Tensor,
    reads: torch.Tensor,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes [`subquad_kernels.working_memory`] in the dtype of the states."""
    memoize_by_tensor(assert_chunks, (leaving, begins, reads), k.shape[2], chunk_size)
    dtype = widest(q, k, v, memory, normalizer)
    leaving, begins = _without_idle(leaving, begins, reads)
    _, values, p, f, w = _chunks(k, v, leaving, begins, chunk_size, dtype)
    states = _states(q, v, memory, normalizer, dtype)
    memory, normalizer, versions, _ = _absorb_all(*states, p.mT @ values, p.mT @ f, w, *_masks(leaving, begins))
    slots, tokens = _readers(reads, versions.shape[2], chunk_size)
    weights = torch.unflatten(_take(q, tokens, dtype).softmax(-1), 2, (versions.shape[2], -1))
    out = _take((weights @ versions).flatten(2, 3), slots, dtype)
    return out.to(v.dtype), memory, normalizer


def working_memory_chunked_backward(
    grad_out: torch.Tensor,
    grad_memory: torch.Tensor,
    grad_normalizer: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    memory: torch.Tensor | None,
    normalizer: torch.Tensor | None,
    leaving: torch.Tensor,
    begins: torch.Tensor,
    reads: torch.Tensor,
    chunk_size: int,
) -> list[torch.Tensor]:
    """Gradients of q, k, v, memory and normalizer, if given. The forward pass is recomputed."""
    dtype = widest(q, k, v, memory, normalizer)
    leaving, begins = _without_idle(leaving, begins, reads)
    index, values, p, f, w = _chunks(k, v, leaving, begins, chunk_size, dtype)
    u, g = p.mT @ values, p.mT @ f
    absorbs, forgets = _masks(leaving, begins)
    *_, versions, rates = _absorb_all(*_states(q, v, memory, normalizer, dtype), u, g, w, absorbs, forgets)

    slots, tokens = _readers(reads, versions.shape[2], chunk_size)
    weights = torch.unflatten(_take(q, tokens, dtype).softmax(-1), 2, (versions.shape[2], -1))
    grad = torch.unflatten(_take(grad_out, tokens, dtype), 2, (versions.shape[2], -1))
    dq = _softmax_backward(grad @ versions.mT, weights, -1)
    grads = [_take(dq.flatten(2, 3), slots, dtype)]
    dversions = weights.mT @ grad

    dm, dz = grad_memory.to(dtype) + dversions[:, :, -1], grad_normalizer.to(dtype, copy=True)
    du, dg, dw = (torch.empty_like(x) for x in (u, g, w))
    for n in reversed(range(w.shape[2])):
        forgotten, r = forgets[:, :, n].unsqueeze(-1), rates[n]
        before = versions[:, :, n].masked_fill(forgotten, 0.0)
        change = u[:, :, n] - g[:, :, n] @ before - before
        written = r.unsqueeze(-1) * dm
        by_rate = (1 - r) * (written * change).sum(-1)
        du[:, :, n], dg[:, :, n], dw[:, :, n] = written, -written @ before.mT, by_rate + r * dz
        dm = (dm - written - g[:, :, n].mT @ written).masked_fill_(forgotten, 0.0) + dversions[:, :, n]
        dz = (1 - r) * dz - by_rate

    if w.shape[2]:
        dp, df = values @ du.mT + f @ dg.mT, p @ dg
        dk = _softmax_backward(dp, p, -2) + p * dw.unsqueeze(-2) + _softmax_backward(df, f, -1)
        slots = _inverse(index, k.shape[2])
        grads += [_take(x.flatten(2, 3), slots, dtype) for x in (dk, p @ du)]
    else:
        grads += [torch.zeros_like(k), torch.zeros_like(v)]
    return grads if memory is None else [*grads, dm, dz]


def _read_pool(weights, memory, reads, indices):
    """weights (B, H, 1, K) times the memory (B, H, K, V), or a pool. Rows that do not read have undefined values."""
    if indices is None:
        return weights @ memory
    if not prefers_single_states(memory):
        return weights @ memory.index_select(0, indices)
    out = weights.new_zeros(*weights.shape[:-1], memory.shape[-1])
    for n, (index, read) in enumerate(zip(numbers_in(memory, indices), reads[:, 0].tolist(), strict=True)):
        if read >= 0:
            torch.matmul(weights[n], memory[index], out=out[n])
    return out


def working_memory_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    memory: torch.Tensor,
    normalizer: torch.Tensor,
    leaving: torch.Tensor,
    begins: torch.Tensor,
    reads: torch.Tensor,
    chunk_size: int,
    indices: torch.Tensor | None,
) -> torch.Tensor:
    """
    One token and at most one chunk per row, q (B, H, 1, K), leaving, begins and reads (B, 1). The states, in float32,
    are changed in place. Unless a graph is captured, only rows that absorb a chunk are computed for it. With `indices`
    (B) the states, and k and v, are pools.
    """
    weights = q.float().softmax(-1)
    out = _read_pool(weights, memory, reads, indices)
    # Finding these rows is worth a synchronization, which is impossible while a graph is traced or captured.
    captured = leaving.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    captured = captured or torch.compiler.is_compiling()
    rows = slice(None) if captured else (leaving[:, 0] >= 0).nonzero()[:, 0]
    if captured or len(rows):
        states = rows if indices is None else indices[rows]
        _, values, p, f, w = _chunks(k[states], v[states], leaving[rows], begins[rows], chunk_size, torch.float32)
        chunk = (x[:, :, 0] for x in (p.mT @ values, p.mT @ f, w, *_masks(leaving[rows], begins[rows])))
        memory[states], normalizer[states], _ = _absorb(memory[states], normalizer[states], *chunk)
        out = torch.where((reads == 1)[:, None, :, None], _read_pool(weights, memory, reads, indices), out)
    return out.masked_fill_((reads < 0)[:, None, :, None], 0.0).to(v.dtype)

"""Working memory: Gecko's fixed-size state for chunks that have left its attention."""

import functools

import torch

from ..backend import choose_backend, in_wide_dtype, of_widest
from ..checks import check_tensors, needs_gradient
from ..state_pool import check_indices, count_states
from .custom_ops import _working_memory, _working_memory_step
from .reference import working_memory_reference


BACKENDS = ("eager", "triton")


def working_memory(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    memory: torch.Tensor | None,
    normalizer: torch.Tensor | None,
    leaving: torch.Tensor,
    begins: torch.Tensor,
    reads: torch.Tensor,
    chunk_size: int,
    *,
    indices: torch.Tensor | None = None,
    inplace: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Adaptive working memory of Gecko (equations 17 to 24 and 27): a memory M absorbs chunks of C keys and values, one
    chunk at a time, by a delta rule with the softmax of the keys over all tokens absorbed so far:

        w_s = log sum over the chunk exp(K_s),    z_s = log(exp z_{s-1} + exp w_s)
        M_s = exp(z_{s-1} - z_s) M_{s-1} + exp(K_s - z_s)ᵀ (V_s - softmax(K_s) M_{s-1})
        out_t = softmax(q_t) M_{reads_t}

    Both softmaxes in these equations are over the features. Nothing is scaled. The normalizer z is a logarithm, so
    keys of any size neither overflow nor underflow.

    The states are float32 for any dtype of q, k and v, also under autocast (float64 if an input is float64), and plain
    torch computes in that dtype. Only the inputs are kept for the backward pass.

    L is the number of available keys: keys of earlier calls that are not absorbed yet, then keys of this call.

    Args:
        q: query, (B, H, T, K), T at least 1.
        k: key, (B, H, L, K), L at least 1.
        v: value, (B, H, L, V).
        memory, normalizer: M (B, H, K, V) and z (B, H, K) before the first absorption. If both are None the memory is
            empty: zeros, and the first absorbed chunk must begin its document.
        leaving: int64 (B, N), N at least 0: the chunks that are absorbed, each as the index of its first token in k;
            -1 absorbs nothing and leaves the states unchanged. A token may be in one chunk only.
        begins: int64 (B, N): the token of the chunk, 0 to C - 1, that begins the document of its last token: the
            states are cleared first, and the tokens before it are ignored. -1 if the document began earlier. Not used
            if `leaving` is -1.
        reads: int64 (B, T): the number of absorptions, 0 to N, after which a token reads the memory; -1 if it does not
            read: out is 0. Apart from -1 the numbers of a row never fall, and the tokens with equal numbers are
            adjacent, at most C of them.
        chunk_size: C.
        indices: int64 (B), for a decoding step: one token and N = 1. Then k, v, `memory` and `normalizer` are pools
            (states, ...), and row n reads keys and values indices[n], and reads and changes the states of that
            number. Both pools of states must be float32, contiguous except for the first stride, and are returned.
            Nothing may need a gradient.
        inplace: write both states into `memory` and `normalizer` and return these. They must be float32 and
            contiguous, and nothing may need a gradient. Decoding, one token with N = 1, then copies no state.
        backend: `"auto"`, `"triton"` or `"eager"` (plain torch, all chunks at once).

    Returns:
        out (B, H, T, V) in the dtype of v, the memory (B, H, K, V) and the normalizer (B, H, K), in float32 (float64).

    Raises:
        ValueError: if a shape, a dtype or a device does not fit, before any work. (Indices out of range fail
            assertions on the device, which avoid a synchronization; a decoding step's are not checked.)
    """
    _check(q, k, v, memory, normalizer, leaving, begins, reads, chunk_size, indices, inplace)
    floats, chunks = (q, k, v, memory, normalizer), (leaving, begins, reads, chunk_size)
    x = of_widest(*floats)
    backend = choose_backend("working_memory", backend, BACKENDS, x)
    one_token = q.shape[2] == 1 and leaving.shape[1] == 1 and x.dtype != torch.float64 and not needs_gradient(*floats)
    if indices is not None and (backend == "reference" or not one_token):
        taken = (y.index_select(0, indices) for y in floats[1:])
        out, *states = working_memory(q, *taken, *chunks, backend=backend)
        return out, *(pool.index_copy_(0, indices, y.float()) for pool, y in zip(floats[3:], states, strict=True))
    if one_token and backend != "reference":
        states = memory, normalizer
        if memory is None:
            shape = *q.shape[:2], q.shape[-1]
            states = [v.new_zeros(size, dtype=torch.float32) for size in ((*shape, v.shape[-1]), shape)]
        elif not inplace and indices is None:
            states = [state.to(torch.float32, copy=True).contiguous() for state in states]
        return _working_memory_step(q, k, v, *states, *chunks, indices, backend), *states
    run = functools.partial(_working_memory, *floats, *chunks, backend)
    # package only
    if backend == "reference":
        run = functools.partial(in_wide_dtype, working_memory_reference, floats, *chunks)
    out, *states = run()
    out = out.to(v.dtype)
    if inplace:
        states = memory.copy_(states[0]), normalizer.copy_(states[1])
    return out, *states


def _check(q, k, v, memory, normalizer, leaving, begins, reads, chunk_size, indices, inplace):
    shapes = {"q": q.shape, "k": k.shape, "v": v.shape}
    for name, shape in shapes.items():
        if len(shape) != 4 or shape[2] == 0:
            raise ValueError(f"`{name}` must be (batch, heads, length >= 1, size), got {tuple(shape)}.")
    (batch, heads, length, key_size), keys, value_size = shapes["q"], shapes["k"][2], shapes["v"][3]
    rows = batch if indices is None else count_states(memory, "memory")
    expected = {
        "q": (q, shapes["q"]),
        "k": (k, (rows, heads, keys, key_size)),
        "v": (v, (rows, heads, keys, value_size)),
        "memory": (memory, (rows, heads, key_size, value_size)),
        "normalizer": (normalizer, (rows, heads, key_size)),
    }
    check_tensors(expected, "q", q)
    if (memory is None) != (normalizer is None):
        raise ValueError("`memory` and `normalizer` go together: give both or neither.")
    if leaving.dim() != 2:
        raise ValueError(f"`leaving` must be ({batch}, chunks), got {tuple(leaving.shape)}.")
    chunks = batch, leaving.shape[1]
    places = {"leaving": (leaving, chunks), "begins": (begins, chunks), "reads": (reads, (batch, length))}
    check_tensors(places, "q", q, dtype=torch.int64)
    if chunk_size < 1:
        raise ValueError(f"`chunk_size` must be at least 1, got {chunk_size}.")
    if indices is not None:
        if length != 1 or chunks[1] != 1:
            raise ValueError(f"`indices` needs one token and one chunk, got {length} and {chunks[1]}.")
        for name, state in (("memory", memory), ("normalizer", normalizer)):
            check_indices(indices, batch, state, q, k, v, name=name)
    elif inplace:
        for name, state in (("memory", memory), ("normalizer", normalizer)):
            if state is None or state.dtype != torch.float32 or not state.is_contiguous():
                raise ValueError(f"`inplace` needs a float32, contiguous `{name}` to write the state to.")
        if needs_gradient(q, k, v, memory, normalizer):
            raise ValueError("`inplace` overwrites states that the backward pass needs: call it under no_grad.")

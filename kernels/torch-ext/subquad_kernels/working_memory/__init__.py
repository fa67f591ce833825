"""Working memory: what Gecko remembers of the chunks that have left its attention, in a state of fixed size."""

import torch

from ..backend import cast, choose_backend, custom_op, dispatch, of_widest, widest, without_autocast
from ..checks import check_tensors, needs_gradient
from .eager import working_memory_chunked, working_memory_chunked_backward, working_memory_step
from .reference import working_memory_reference


BACKENDS = ("eager", "reference", "triton")


@custom_op("working_memory", mutates_args=())
def _working_memory(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    memory: torch.Tensor | None,
    normalizer: torch.Tensor | None,
    leaving: torch.Tensor,
    begins: torch.Tensor,
    reads: torch.Tensor,
    chunk_size: int,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _assert_places(leaving, begins, reads, k.shape[2], chunk_size)
    inputs = q, k, v, memory, normalizer, leaving, begins, reads, chunk_size

    def triton():
        from .triton_kernels import working_memory_triton

        return working_memory_triton(*inputs)

    def eager():
        with without_autocast(v):
            out, *states = working_memory_chunked(*inputs)
        return out.to(v.dtype).contiguous(), *(state.contiguous() for state in states)

    return dispatch("working_memory", backend, v, triton, eager)


@_working_memory.register_fake
def _(q, k, v, memory, normalizer, leaving, begins, reads, chunk_size, backend):
    dtype = widest(q, k, v, memory, normalizer)
    shape = *q.shape[:2], q.shape[-1]
    states = v.new_empty(*shape, v.shape[-1], dtype=dtype), v.new_empty(shape, dtype=dtype)
    return v.new_empty(*q.shape[:-1], v.shape[-1]), *states


@custom_op("working_memory_backward", mutates_args=())
def _working_memory_backward(
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
    backend: str,
) -> list[torch.Tensor]:
    inputs = q, k, v, memory, normalizer, leaving, begins, reads, chunk_size

    def triton():
        from .triton_kernels import working_memory_triton_backward

        return working_memory_triton_backward(grad_out, grad_memory, grad_normalizer, *inputs)

    def eager():
        with without_autocast(v):
            return working_memory_chunked_backward(grad_out, grad_memory, grad_normalizer, *inputs)

    grads = dispatch("working_memory", backend, v, triton, eager)
    given = [x for x in (q, k, v, memory, normalizer) if x is not None]
    return [grad.to(x.dtype).contiguous() for grad, x in zip(grads, given, strict=True)]


@_working_memory_backward.register_fake
def _(
    grad_out, grad_memory, grad_normalizer, q, k, v, memory, normalizer, leaving, begins, reads, chunk_size, backend
):
    return [x.new_empty(x.shape) for x in (q, k, v, memory, normalizer) if x is not None]


def _setup_context(ctx, inputs, output):
    *tensors, ctx.chunk_size, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, *grads):
    grads = _working_memory_backward(*grads, *ctx.saved_tensors, ctx.chunk_size, ctx.backend)
    return (*grads, *[None] * (10 - len(grads)))


_working_memory.register_autograd(_backward, setup_context=_setup_context)


@custom_op("working_memory_step", mutates_args=("memory", "normalizer"))
def _working_memory_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    memory: torch.Tensor,
    normalizer: torch.Tensor,
    leaving: torch.Tensor,
    begins: torch.Tensor,
    reads: torch.Tensor,
    chunk_size: int,
    backend: str,
) -> torch.Tensor:
    """One token and at most one chunk a row, both states in place."""
    inputs = q, k, v, memory, normalizer, leaving, begins, reads, chunk_size

    def triton():
        from .triton_kernels import working_memory_triton_step

        return working_memory_triton_step(*inputs)

    def eager():
        with without_autocast(v):
            return working_memory_step(*inputs).to(v.dtype)

    return dispatch("working_memory_step", backend, v, triton, eager)


@_working_memory_step.register_fake
def _(q, k, v, memory, normalizer, leaving, begins, reads, chunk_size, backend):
    return v.new_empty(*q.shape[:-1], v.shape[-1])


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
    inplace: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Adaptive working memory of Gecko (equations 17 to 24 and 27): a memory M absorbs chunks of C keys and values, one
    chunk after the other, by a delta rule whose keys are softmaxed over all tokens absorbed so far:

        w_s = log sum over the chunk exp(K_s),    z_s = log(exp z_{s-1} + exp w_s)
        M_s = exp(z_{s-1} - z_s) M_{s-1} + exp(K_s - z_s)ᵀ (V_s - softmax(K_s) M_{s-1})
        out_t = softmax(q_t) M_{reads_t}

    The softmaxes written out are over the features. Nothing is scaled. The normalizer is z, a logarithm: keys of any
    size neither overflow nor vanish.

    The states are float32 whatever the dtype of q, k, v, under autocast too (float64 where one of the inputs is), and
    plain torch computes in that dtype. The backward pass keeps the inputs alone.

    Below, L is the number of keys at hand: those of this call and, before them, those of earlier calls that have not
    been absorbed yet.

    Args:
        q: query, (B, H, T, K), T at least 1.
        k: key, (B, H, L, K), L at least 1.
        v: value, (B, H, L, V).
        memory, normalizer: M (B, H, K, V) and z (B, H, K) before the first absorption. None, both of them, is a memory
            that holds nothing: zeros, and the first chunk that is absorbed must begin its document.
        leaving: int64 (B, N), N at least 0: the chunks that are absorbed, by their first token in k; -1 absorbs
            nothing and leaves the states as they are. A token may be in one of them only.
        begins: int64 (B, N): the token of the chunk, 0 to C - 1, at which the document of its last token begins: the
            states are forgotten first, and the tokens before it do not count. -1 where the document is older. Not
            looked at where `leaving` is -1.
        reads: int64 (B, T): after how many of the N absorptions a token reads the memory, 0 to N; -1 where it reads
            nothing: out is 0. Along a row they never fall, -1 aside, and tokens that read the same version of the
            memory stand side by side, at most C of them.
        chunk_size: C.
        inplace: write both states where `memory` and `normalizer` are, which must be float32, contiguous and in need
            of no gradient, and return those. Decoding, a token with N = 1, then moves no state.
        backend: `"auto"`, `"triton"`, `"eager"` (plain torch, all chunks at once) or `"reference"` (one token after
            the other).

    Returns:
        out (B, H, T, V) in the dtype of v, the memory (B, H, K, V) and the normalizer (B, H, K), in float32 (float64).

    Raises:
        ValueError: where a shape, a dtype or a device does not fit, before any work. (Places outside of the tensors
            are found by assertions on the device, so that nothing waits for it; those of a decoding step are not
            looked at.)
    """
    _check(q, k, v, memory, normalizer, leaving, begins, reads, chunk_size, inplace)
    floats, integers = (q, k, v, memory, normalizer), (leaving, begins, reads, chunk_size)
    x = of_widest(*floats)
    backend = choose_backend("working_memory", backend, BACKENDS, x)
    if backend == "reference":
        with without_autocast(v):
            out, *states = working_memory_reference(*cast(widest(x), *floats), *integers)
        out = out.to(v.dtype)
    elif q.shape[2] > 1 or leaving.shape[1] != 1 or x.dtype == torch.float64 or needs_gradient(*floats):
        out, *states = _working_memory(*floats, *integers, backend)
    else:
        states = memory, normalizer
        if memory is None:
            shape = *q.shape[:2], q.shape[-1]
            states = [v.new_zeros(size, dtype=torch.float32) for size in ((*shape, v.shape[-1]), shape)]
        elif not inplace:
            states = [state.to(torch.float32, copy=True).contiguous() for state in states]
        return _working_memory_step(q, k, v, *states, *integers, backend), *states
    if inplace:
        states = memory.copy_(states[0]), normalizer.copy_(states[1])
    return out, *states


def _assert_places(leaving, begins, reads, keys, chunk_size):
    """On the device, so that nothing waits for it: no place is outside of the tensors."""
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


def _check(q, k, v, memory, normalizer, leaving, begins, reads, chunk_size, inplace):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or x.shape[2] == 0:
            raise ValueError(f"`{name}` must be (batch, heads, length >= 1, size), got {tuple(x.shape)}.")
    (batch, heads, length, key_size), value_size = q.shape, v.shape[-1]
    expected = {
        "q": (q, q.shape),
        "k": (k, (batch, heads, k.shape[2], key_size)),
        "v": (v, (batch, heads, k.shape[2], value_size)),
        "memory": (memory, (batch, heads, key_size, value_size)),
        "normalizer": (normalizer, (batch, heads, key_size)),
    }
    check_tensors(expected, "q", q)
    if (memory is None) != (normalizer is None):
        raise ValueError("`memory` and `normalizer` go together: give both or neither.")
    if leaving.dim() != 2:
        raise ValueError(f"`leaving` must be ({batch}, chunks), got {tuple(leaving.shape)}.")
    chunks = batch, leaving.shape[1]
    for name, x, shape in (
        ("leaving", leaving, chunks),
        ("begins", begins, chunks),
        ("reads", reads, (batch, length)),
    ):
        if tuple(x.shape) != shape:
            raise ValueError(f"`{name}` must have shape {shape}, got {tuple(x.shape)}.")
        if x.dtype != torch.int64:
            raise ValueError(f"`{name}` must be int64, got {x.dtype}.")
        if x.device != q.device:
            raise ValueError(f"`{name}` is on {x.device}, `q` on {q.device}.")
    if chunk_size < 1:
        raise ValueError(f"`chunk_size` must be at least 1, got {chunk_size}.")
    if inplace:
        for name, state in (("memory", memory), ("normalizer", normalizer)):
            if state is None or state.dtype != torch.float32 or not state.is_contiguous():
                raise ValueError(f"`inplace` needs a float32, contiguous `{name}` to write the state to.")
        if needs_gradient(q, k, v, memory, normalizer):
            raise ValueError("`inplace` overwrites states that the backward pass needs: call it under no_grad.")

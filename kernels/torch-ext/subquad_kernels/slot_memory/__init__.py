"""Slot memory: the recurrence of Raven, which writes few rows of a state at a step and reads all of them."""

import torch

from ..backend import cast, choose_backend, custom_op, dispatch, of_widest, widest, without_autocast
from ..checks import check_inplace, check_sequences, check_tensors, count_documents, needs_gradient
from .eager import slot_memory_chunked, slot_memory_chunked_backward, slot_memory_step, slot_state_chunked
from .reference import slot_memory_reference


BACKENDS = ("eager", "reference", "triton")


@custom_op("slot_memory", mutates_args=())
def _slot_memory(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_f: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, state, and the logits of the slots, (B, T, H, M), which the backward pass needs."""

    def triton():
        from .triton_kernels import slot_memory_triton

        return slot_memory_triton(q, k, v, log_f, initial_state, cu_seqlens)

    def eager():
        inputs = cast(widest(q, k, v, log_f, initial_state), q, k, v, log_f, initial_state)
        with without_autocast(k):
            out, state, logits = slot_memory_chunked(*inputs, cu_seqlens)
        return out.to(v.dtype).contiguous(), state.contiguous(), logits.contiguous()

    return dispatch("slot_memory", backend, k, triton, eager)


@_slot_memory.register_fake
def _(q, k, v, log_f, initial_state, cu_seqlens, backend):
    batch, _, heads, key_size = k.shape
    dtype = widest(q, k, v, log_f, initial_state)
    documents = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = v.new_empty(documents, heads, log_f.shape[-1], key_size + v.shape[-1], dtype=dtype)
    return v.new_empty(v.shape), state, log_f.new_empty(log_f.shape, dtype=dtype)


@custom_op("slot_memory_backward", mutates_args=())
def _slot_memory_backward(
    grad_out: torch.Tensor,
    grad_state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_f: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    logits: torch.Tensor,
    backend: str,
) -> list[torch.Tensor]:
    given = [x for x in (q, k, v, log_f, initial_state) if x is not None]

    def triton():
        from .triton_kernels import slot_memory_triton_backward

        return slot_memory_triton_backward(grad_out, grad_state, q, k, v, log_f, initial_state, cu_seqlens, logits)

    def eager():
        inputs = cast(widest(*given), grad_out, grad_state, q, k, v, log_f, initial_state)
        with without_autocast(k):
            return slot_memory_chunked_backward(*inputs, cu_seqlens, logits)

    grads = dispatch("slot_memory", backend, k, triton, eager)
    return [grad.to(x.dtype).contiguous() for grad, x in zip(grads, given, strict=True)]


@_slot_memory_backward.register_fake
def _(grad_out, grad_state, q, k, v, log_f, initial_state, cu_seqlens, logits, backend):
    return [x.new_empty(x.shape) for x in (q, k, v, log_f, initial_state) if x is not None]


def _setup_context(ctx, inputs, output):
    *tensors, ctx.backend = inputs
    logits = output[2]
    ctx.mark_non_differentiable(logits)
    ctx.save_for_backward(*tensors, logits)


def _backward(ctx, grad_out, grad_state, _):
    grads = _slot_memory_backward(grad_out, grad_state, *ctx.saved_tensors, ctx.backend)
    return (*grads, *[None] * (7 - len(grads)))


_slot_memory.register_autograd(_backward, setup_context=_setup_context)


@custom_op("slot_memory_step", mutates_args=("new_state",))
def _slot_memory_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_f: torch.Tensor,
    state: torch.Tensor | None,
    new_state: torch.Tensor,
    backend: str,
) -> torch.Tensor:
    """One token, the state in place where `state` is None (then `new_state` holds it)."""

    def triton():
        from .triton_kernels import slot_memory_triton_step

        return slot_memory_triton_step(q, k, v, log_f, state, new_state)

    def eager():
        before = new_state if state is None else state
        with without_autocast(k):
            out = slot_memory_step(*cast(torch.float32, q, k, v, log_f), before, new_state)
        return out.to(v.dtype)

    return dispatch("slot_memory_step", backend, k, triton, eager)


@_slot_memory_step.register_fake
def _(q, k, v, log_f, state, new_state, backend):
    return v.new_empty(v.shape)


@custom_op("slot_memory_state", mutates_args=())
def _slot_memory_state(
    state: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, log_f: torch.Tensor, backend: str
) -> torch.Tensor:
    def triton():
        from .triton_kernels import slot_memory_triton_state

        return slot_memory_triton_state(k, v, log_f, state, None)

    def eager():
        with without_autocast(k):
            return slot_state_chunked(*cast(widest(k, v, log_f, state), k, v, log_f, state)).contiguous()

    return dispatch("slot_memory_state", backend, k, triton, eager)


@_slot_memory_state.register_fake
def _(state, k, v, log_f, backend):
    shape = k.shape[0], k.shape[2], log_f.shape[-1], k.shape[-1] + v.shape[-1]
    return v.new_empty(shape, dtype=widest(k, v, log_f, state))


def slot_memory(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_f: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    inplace: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Recurrence of Raven (equations 6 and 18, appendix A.5): a head remembers M slots, each with a key and a value, row
    by row in one state S = [S_k, S_v]. A token decays the slots that it writes and takes the place of what is lost:

        S_t = f_t ⊙ S_{t-1} + (1 - f_t) [k_t, v_t]ᵀ,    f_t = exp(log_f_t)
        out_t = S_v,tᵀ softmax(S_k,t q_t)

    A slot whose log_f is 0 keeps its bits. The token reads what it has written; logits are not scaled, and slots never
    written, which hold zeros, take part.

    The state is float32 whatever the dtype of q, k, v, under autocast too (float64 where one of the inputs is). Plain
    torch computes in that dtype; the Triton kernels multiply in bfloat16 where q, k and v are, in tf32 where they are
    float16, in float32 where they are, and accumulate in float32.

    Args:
        q: query, (B, T, H, K), T at least 1.
        k: key, (B, T, H, K).
        v: value, (B, T, H, V).
        log_f: logarithm of the decay of every slot, at most 0, (B, T, H, M): 0 where the token does not write, -inf
            where it replaces what was there.
        initial_state: state before the first token, (B, H, M, K + V), or (N, H, M, K + V) with `cu_seqlens`; zeros
            where None.
        cu_seqlens: int32 or int64 (N + 1), the borders 0, ..., T of N documents packed into one row (B = 1); each
            starts from its own initial state.
        inplace: write the state after the last token into `initial_state`, which must then be float32, contiguous and
            in need of no gradient, and return that tensor.
        backend: `"auto"`, `"triton"`, `"eager"` (plain torch, parallel over time) or `"reference"` (the recurrence).

    Returns:
        out (B, T, H, V) in the dtype of v, and the state after the last token of every row, or document, in float32
        (float64).

    Raises:
        ValueError: where a shape or a dtype does not fit, before any work. (On a GPU wrong `cu_seqlens` are found by
            an assertion on the device, so that nothing waits for it.)
    """
    _check(q, k, v, log_f, initial_state, cu_seqlens)
    if inplace:
        check_inplace(initial_state, q, k, v, log_f)
    x = of_widest(q, k, v, log_f, initial_state)
    backend = choose_backend("slot_memory", backend, BACKENDS, x)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(k.device)
    if backend == "reference":
        inputs = cast(widest(x), q, k, v, log_f, initial_state)
        with without_autocast(k):
            out, state = slot_memory_reference(*inputs, cu_seqlens)
        out = out.to(v.dtype)
    elif (
        k.shape[1] > 1
        or cu_seqlens is not None
        or x.dtype == torch.float64
        or needs_gradient(q, k, v, log_f, initial_state)
    ):
        out, state, _ = _slot_memory(q, k, v, log_f, initial_state, cu_seqlens, backend)
    else:
        return _step(q, k, v, log_f, initial_state, inplace, backend)
    return out, initial_state.copy_(state) if inplace else state


def _step(q, k, v, log_f, state, inplace, backend):
    if inplace:
        new_state, state = state, None
    else:
        if state is None:
            state = v.new_zeros(
                k.shape[0], k.shape[2], log_f.shape[-1], k.shape[-1] + v.shape[-1], dtype=torch.float32
            )
        state = state.float().contiguous()
        new_state = torch.empty_like(state)
    out = _slot_memory_step(q[:, 0], k[:, 0], v[:, 0], log_f[:, 0], state, new_state, backend)
    return out.unsqueeze(1), new_state


def slot_memory_state(
    state: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, log_f: torch.Tensor, *, backend: str = "auto"
) -> torch.Tensor:
    """
    The state of [`slot_memory`] alone: `state` (B, H, M, K + V; None for zeros) after the tokens k, v, log_f
    (B, T, H, .).
    """
    _check(k, k, v, log_f, state, None)
    chosen = choose_backend("slot_memory", backend, BACKENDS, of_widest(k, v, log_f, state))
    if chosen == "reference" or needs_gradient(k, v, log_f, state):
        return slot_memory(k, k, v, log_f, state, backend=backend)[1]
    return _slot_memory_state(state, k, v, log_f, chosen)


def _check(q, k, v, log_f, initial_state, cu_seqlens):
    check_sequences(k=k, v=v, log_f=log_f)
    batch, length, heads, key_size = k.shape
    slots, value_size = log_f.shape[-1], v.shape[-1]
    expected = {
        "q": (q, (batch, length, heads, key_size)),
        "v": (v, (batch, length, heads, value_size)),
        "log_f": (log_f, (batch, length, heads, slots)),
    }
    documents = count_documents(cu_seqlens, batch)
    if initial_state is not None:
        expected["initial_state"] = (initial_state, (documents, heads, slots, key_size + value_size))
    check_tensors(expected, "k", k)

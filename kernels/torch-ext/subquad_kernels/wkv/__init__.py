"""WKV: the linear attention of Eagle (RWKV-5) and Finch (RWKV-6)."""

import torch

from ..backend import cast, choose_backend, custom_op, dispatch, of_widest, widest, without_autocast
from ..checks import check_inplace, check_sequences, check_tensors, count_documents, needs_gradient
from ..group_norm_gate import check as check_gate
from ..group_norm_gate import group_norm_gate
from ..group_norm_gate.eager import group_norm_gate_eager
from .eager import wkv_chunked, wkv_chunked_backward, wkv_step
from .masks import masks_for
from .reference import wkv_reference


BACKENDS = ("eager", "reference", "triton")


@custom_op("wkv", mutates_args=())
def _wkv(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    u: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    masks: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    def triton():
        from .triton_kernels import wkv_triton

        return wkv_triton(r, k, v, log_w, u, initial_state, cu_seqlens, masks, out_dtype)

    def eager():
        inputs = cast(widest(r, k, v, log_w, u, initial_state), r, k, v, log_w, u, initial_state)
        with without_autocast(k):
            out, state = wkv_chunked(*inputs, cu_seqlens)
        return out.to(out_dtype).contiguous(), state.contiguous()

    return dispatch("wkv", backend, k, triton, eager)


@_wkv.register_fake
def _(r, k, v, log_w, u, initial_state, cu_seqlens, masks, out_dtype, backend):
    batch, _, heads, key_size = k.shape
    documents = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = v.new_empty(documents, heads, key_size, v.shape[-1], dtype=widest(r, k, v, log_w, u, initial_state))
    return v.new_empty(v.shape, dtype=out_dtype), state


@custom_op("wkv_backward", mutates_args=())
def _wkv_backward(
    grad_out: torch.Tensor,
    grad_state: torch.Tensor,
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    u: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    masks: torch.Tensor | None,
    backend: str,
) -> list[torch.Tensor]:
    given = [x for x in (r, k, v, log_w, u, initial_state) if x is not None]

    def triton():
        from .triton_kernels import wkv_triton_backward

        return wkv_triton_backward(grad_out, grad_state, r, k, v, log_w, u, initial_state, cu_seqlens, masks)

    def eager():
        inputs = cast(widest(*given), grad_out, grad_state, r, k, v, log_w, u, initial_state)
        with without_autocast(k):
            return wkv_chunked_backward(*inputs, cu_seqlens)

    grads = dispatch("wkv", backend, k, triton, eager)
    return [grad.to(x.dtype).contiguous() for grad, x in zip(grads, given, strict=True)]


@_wkv_backward.register_fake
def _(grad_out, grad_state, r, k, v, log_w, u, initial_state, cu_seqlens, masks, backend):
    return [x.new_empty(x.shape) for x in (r, k, v, log_w, u, initial_state) if x is not None]


def _setup_context(ctx, inputs, output):
    *tensors, _, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad_out, grad_state):
    grads = _wkv_backward(grad_out, grad_state, *ctx.saved_tensors, ctx.backend)
    return (*grads, *[None] * (10 - len(grads)))


_wkv.register_autograd(_backward, setup_context=_setup_context)


@custom_op("wkv_step", mutates_args=("new_state",))
def _wkv_step(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    u: torch.Tensor,
    state: torch.Tensor | None,
    new_state: torch.Tensor,
    gate: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    """One token, the state in place where `state` is None (then `new_state` holds it)."""

    def triton():
        from .triton_kernels import wkv_triton_step

        return wkv_triton_step(r, k, v, log_w, u, state, new_state, gate, weight, bias, eps, out_dtype)

    def eager():
        before = new_state if state is None else state
        with without_autocast(k):
            out, after = wkv_step(*cast(torch.float32, r, k, v, log_w, u, before))
            new_state.copy_(after)
            if gate is not None:
                out = group_norm_gate_eager(out, gate, weight, bias, eps).view(v.shape)
        return out.to(out_dtype)

    return dispatch("wkv_step", backend, k, triton, eager)


@_wkv_step.register_fake
def _(r, k, v, log_w, u, state, new_state, gate, weight, bias, eps, out_dtype, backend):
    return v.new_empty(v.shape, dtype=out_dtype)


def wkv(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    u: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    inplace: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Weighted key-value recurrence with a matrix-valued state a head, equations 6 and 19 of arXiv:2404.05892:

        out_t = r_t (S_{t-1} + diag(u) k_tᵀ v_t),    S_t = diag(w_t) S_{t-1} + k_tᵀ v_t,    w_t = exp(log_w_t)

    The state is float32 whatever the dtype of r, k, v, under autocast too (float64 where one of the inputs is). Plain
    torch computes in that dtype; the Triton kernels multiply in bfloat16 where r, k and v are, in tf32 where they are
    float16, in float32 where they are, and accumulate in float32.

    Args:
        r: receptance, (B, T, H, K), T at least 1. It is not scaled.
        k: key, (B, T, H, K).
        v: value, (B, T, H, V).
        log_w: logarithm of the decay, at most 0: (B, T, H, K) for a decay a step (Finch), (H, K) for a static one
            (Eagle).
        u: bonus of the current token, (H, K).
        initial_state: state before the first token, (B, H, K, V), or (N, H, K, V) with `cu_seqlens`; zeros where None.
        cu_seqlens: int32 or int64 (N + 1), the borders 0, ..., T of N documents packed into one row (B = 1); each
            starts from its own initial state.
        inplace: write the state after the last token into `initial_state`, which must then be float32, contiguous and
            in need of no gradient, and return that tensor.
        out_dtype: dtype of out; that of v where None.
        backend: `"auto"`, `"triton"`, `"eager"` (plain torch, parallel over time) or `"reference"` (the recurrence).

    Returns:
        out (B, T, H, V), and the state after the last token of every row, or document, in float32 (float64).

    Raises:
        ValueError: where a shape or a dtype does not fit, before any work. (On a GPU wrong `cu_seqlens` are found by
            an assertion on the device, so that nothing waits for it.)
    """
    _check(r, k, v, log_w, u, initial_state, cu_seqlens, inplace)
    backend = choose_backend("wkv", backend, BACKENDS, of_widest(r, k, v, log_w, u, initial_state))
    return _run(r, k, v, log_w, u, initial_state, cu_seqlens, inplace, out_dtype or v.dtype, backend)


def gated_wkv(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    log_w: torch.Tensor,
    u: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    initial_state: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    inplace: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    [`wkv`] followed by [`group_norm_gate`]: equations 19 to 22, and 6 to 9, of arXiv:2404.05892 up to the output
    projection. What passes between the two is float32 (float16 could not hold it). One kernel for one token.

    Args:
        gate: (B, T, H * V), before its SiLU.
        weight, bias: of the norm, (H * V).
        eps: of the norm.
        r, k, v, log_w, u, initial_state, cu_seqlens, inplace, backend: see [`wkv`].

    Returns:
        out (B, T, H * V) in the dtype of gate, and the state as [`wkv`] returns it.

    Raises:
        ValueError: where a shape or a dtype does not fit, before any work.
    """
    _check(r, k, v, log_w, u, initial_state, cu_seqlens, inplace)
    check_gate(v, gate, weight, bias)
    backend = choose_backend("wkv", backend, BACKENDS, of_widest(r, k, v, log_w, u, initial_state))
    if _one_step(r, k, v, log_w, u, initial_state, cu_seqlens, gate, weight, bias) and backend in ("auto", "triton"):
        out, state = _step(r, k, v, log_w, u, initial_state, inplace, gate.dtype, backend, gate, weight, bias, eps)
        return out.flatten(-2), state
    out_dtype = widest(r, k, v, log_w, u, initial_state)
    out, state = _run(r, k, v, log_w, u, initial_state, cu_seqlens, inplace, out_dtype, backend)
    return group_norm_gate(out, gate, weight, bias, eps, backend=backend), state


def _one_step(r, k, v, log_w, u, initial_state, cu_seqlens, *more):
    """Whether this is a decoding step: one token, and no gradient asked for."""
    if k.shape[1] > 1 or cu_seqlens is not None:
        return False
    return not needs_gradient(r, k, v, log_w, u, initial_state, *more)


def _step(r, k, v, log_w, u, state, inplace, out_dtype, backend, gate=None, weight=None, bias=None, eps=0.0):
    if inplace:
        new_state, state = state, None
    else:
        if state is None:
            state = v.new_zeros(k.shape[0], *k.shape[2:], v.shape[-1], dtype=torch.float32)
        state = state.float().contiguous()
        new_state = torch.empty_like(state)
    r, k, v = r[:, 0], k[:, 0], v[:, 0]
    log_w = log_w if log_w.dim() == 2 else log_w[:, 0]
    out = _wkv_step(r, k, v, log_w, u, state, new_state, gate, weight, bias, eps, out_dtype, backend)
    return out.unsqueeze(1), new_state


def _run(r, k, v, log_w, u, initial_state, cu_seqlens, inplace, out_dtype, backend):
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.to(k.device)
    if backend in ("auto", "triton"):
        if _one_step(r, k, v, log_w, u, initial_state, cu_seqlens):
            return _step(r, k, v, log_w, u, initial_state, inplace, out_dtype, backend)
        masks = masks_for(r, k, v)
        out, state = _wkv(r, k, v, log_w, u, initial_state, cu_seqlens, masks, out_dtype, backend)
    elif backend == "eager" and (k.shape[1] > 1 or cu_seqlens is not None):
        out, state = _wkv(r, k, v, log_w, u, initial_state, cu_seqlens, None, out_dtype, backend)
    else:
        dtype = widest(r, k, v, log_w, u, initial_state)
        r, k, v, log_w, u, before = cast(dtype, r, k, v, log_w, u, initial_state)
        with without_autocast(k):
            if backend == "reference":
                out, state = wkv_reference(r, k, v, log_w, u, before, cu_seqlens)
            else:
                if before is None:
                    before = v.new_zeros(k.shape[0], *k.shape[2:], v.shape[-1])
                log_w = log_w if log_w.dim() == 2 else log_w[:, 0]
                out, state = wkv_step(r[:, 0], k[:, 0], v[:, 0], log_w, u, before)
                out = out.unsqueeze(1)
        out = out.to(out_dtype)
    return out, initial_state.copy_(state) if inplace else state


def wkv_state(
    state: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, log_w: torch.Tensor, *, backend: str = "auto"
) -> torch.Tensor:
    """The state of [`wkv`] alone: `state` (B, H, K, V; None for zeros) after the tokens k, v, log_w (B, T, H, .)."""
    return wkv(k, k, v, log_w, k.new_zeros(k.shape[2:]), state, backend=backend)[1]


def _check(r, k, v, log_w, u, initial_state, cu_seqlens, inplace):
    check_sequences(k=k, v=v)
    batch, length, heads, key_size = k.shape
    expected = {
        "r": (r, (batch, length, heads, key_size)),
        "v": (v, (batch, length, heads, v.shape[-1])),
        "log_w": (log_w, (heads, key_size) if log_w.dim() == 2 else (batch, length, heads, key_size)),
        "u": (u, (heads, key_size)),
    }
    documents = count_documents(cu_seqlens, batch)
    if initial_state is not None:
        expected["initial_state"] = (initial_state, (documents, heads, key_size, v.shape[-1]))
    check_tensors(expected, "k", k)
    if inplace:
        check_inplace(initial_state, r, k, v, log_w, u)

"""WKV: the linear attention of Eagle (RWKV-5) and Finch (RWKV-6)."""

import torch

from ..backend import choose_backend, without_autocast
from .eager import wkv_chunked, wkv_chunked_backward, wkv_step
from .reference import wkv_reference


BACKENDS = ("eager", "reference")


@torch.library.custom_op("subquad_kernels::wkv", mutates_args=())
def _wkv(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    u: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, state = wkv_chunked(r, k, v, log_w, u, initial_state, cu_seqlens)
    return out.contiguous(), state.contiguous()


@_wkv.register_fake
def _(r, k, v, log_w, u, initial_state, cu_seqlens):
    batch, _, heads, key_size = k.shape
    documents = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return v.new_empty(v.shape), v.new_empty(documents, heads, key_size, v.shape[-1])


@torch.library.custom_op("subquad_kernels::wkv_backward", mutates_args=())
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
) -> list[torch.Tensor]:
    with without_autocast(k):
        grads = wkv_chunked_backward(grad_out, grad_state, r, k, v, log_w, u, initial_state, cu_seqlens)
    return [x.contiguous() for x in grads]


@_wkv_backward.register_fake
def _(grad_out, grad_state, r, k, v, log_w, u, initial_state, cu_seqlens):
    inputs = [r, k, v, log_w, u] + ([] if initial_state is None else [initial_state])
    return [x.new_empty(x.shape) for x in inputs]


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_out, grad_state):
    grads = _wkv_backward(grad_out, grad_state, *ctx.saved_tensors)
    return (*grads, *[None] * (7 - len(grads)))


_wkv.register_autograd(_backward, setup_context=_setup_context)


def wkv(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_w: torch.Tensor,
    u: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Weighted key-value recurrence with a matrix-valued state a head, equations 6 and 19 of arXiv:2404.05892:

        out_t = r_t (S_{t-1} + diag(u) k_tᵀ v_t),    S_t = diag(w_t) S_{t-1} + k_tᵀ v_t,    w_t = exp(log_w_t)

    Computed in float32 whatever the dtype of r, k, v, under autocast too (in float64 where one of the inputs is).

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
        backend: `"auto"`, `"eager"` (parallel over time) or `"reference"` (the plain recurrence).

    Returns:
        out (B, T, H, V) in the dtype of v, and the state after the last token of every row, or document, in float32
        (float64).

    Raises:
        ValueError: where a shape or a dtype does not fit, before any work.
    """
    _check(r, k, v, log_w, u, initial_state, cu_seqlens)
    backend = choose_backend("wkv", backend, BACKENDS, default="eager")
    dtype, out_dtype = torch.float32, v.dtype
    for x in (r, k, v, log_w, u, initial_state):
        if x is not None and x.dtype == torch.float64:
            dtype = torch.float64
    r, k, v, log_w, u = (x.to(dtype) for x in (r, k, v, log_w, u))
    if initial_state is not None:
        initial_state = initial_state.to(dtype)

    with without_autocast(k):
        if backend == "reference":
            out, state = wkv_reference(r, k, v, log_w, u, initial_state, cu_seqlens)
        elif k.shape[1] == 1 and cu_seqlens is None:
            if initial_state is None:
                initial_state = v.new_zeros(k.shape[0], *k.shape[2:], v.shape[-1])
            log_w = log_w if log_w.dim() == 2 else log_w[:, 0]
            out, state = wkv_step(r[:, 0], k[:, 0], v[:, 0], log_w, u, initial_state)
            out = out.unsqueeze(1)
        else:
            out, state = _wkv(r, k, v, log_w, u, initial_state, cu_seqlens)
    return out.to(out_dtype), state


def wkv_state(
    state: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, log_w: torch.Tensor, *, backend: str = "auto"
) -> torch.Tensor:
    """The state of [`wkv`] alone: `state` (B, H, K, V; None for zeros) after the tokens k, v, log_w (B, T, H, .)."""
    return wkv(k, k, v, log_w, k.new_zeros(k.shape[2:]), state, backend=backend)[1]


def _check(r, k, v, log_w, u, initial_state, cu_seqlens):
    for name, x in (("k", k), ("v", v)):
        if x.dim() != 4 or x.shape[1] == 0:
            raise ValueError(f"`{name}` must be (batch, length >= 1, heads, size), got {tuple(x.shape)}.")
    batch, length, heads, key_size = k.shape
    expected = {
        "r": (r, (batch, length, heads, key_size)),
        "v": (v, (batch, length, heads, v.shape[-1])),
        "log_w": (log_w, (heads, key_size) if log_w.dim() == 2 else (batch, length, heads, key_size)),
        "u": (u, (heads, key_size)),
    }
    documents = batch
    if cu_seqlens is not None:
        if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or len(cu_seqlens) < 2:
            raise ValueError(
                f"`cu_seqlens` must be int32 or int64 of shape (documents + 1,), got {cu_seqlens.dtype} "
                f"{tuple(cu_seqlens.shape)}."
            )
        if batch != 1:
            raise ValueError(f"`cu_seqlens` describes one packed row, got a batch of {batch}.")
        documents = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        expected["initial_state"] = (initial_state, (documents, heads, key_size, v.shape[-1]))
    for name, (x, shape) in expected.items():
        if tuple(x.shape) != tuple(shape):
            raise ValueError(f"`{name}` must have shape {tuple(shape)}, got {tuple(x.shape)}.")
        if not x.is_floating_point():
            raise ValueError(f"`{name}` must be floating point, got {x.dtype}.")
        if x.device != k.device:
            raise ValueError(f"`{name}` is on {x.device}, `k` on {k.device}.")

"""Token shift: the interpolation between a token and the one before it, of Eagle (RWKV-5) and Finch (RWKV-6)."""

import torch

from ..backend import choose_backend, custom_op, dispatch
from .eager import token_shift_eager, token_shift_eager_backward
from .reference import token_shift_reference


BACKENDS = ("eager", "reference", "triton")


@custom_op("token_shift", mutates_args=())
def _token_shift(
    x: torch.Tensor,
    state: torch.Tensor | None,
    mu: torch.Tensor,
    offset: torch.Tensor | None,
    starts: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    def triton():
        from .triton_kernels import token_shift_triton

        return token_shift_triton(x, state, mu, offset, starts)

    def eager():
        return token_shift_eager(x, state, mu, offset, starts).contiguous()

    return dispatch("token_shift", backend, x, triton, eager)


@_token_shift.register_fake
def _(x, state, mu, offset, starts, backend):
    return x.new_empty(mu.shape[0], *x.shape)


@custom_op("token_shift_backward", mutates_args=())
def _token_shift_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    state: torch.Tensor | None,
    mu: torch.Tensor,
    offset: torch.Tensor | None,
    starts: torch.Tensor | None,
    backend: str,
) -> list[torch.Tensor]:
    def triton():
        from .triton_kernels import token_shift_triton_backward

        return token_shift_triton_backward(grad, x, state, mu, offset, starts)

    def eager():
        return token_shift_eager_backward(grad, x, state, mu, offset, starts)

    return dispatch("token_shift", backend, x, triton, eager)


@_token_shift_backward.register_fake
def _(grad, x, state, mu, offset, starts, backend):
    return [tensor.new_empty(tensor.shape) for tensor in (x, mu, state, offset) if tensor is not None]


def _setup_context(ctx, inputs, output):
    *tensors, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    tensors = ctx.saved_tensors  # which non-reentrant checkpointing gives out once
    _, state, _, offset, _ = tensors
    grad_x, grad_mu, *rest = _token_shift_backward(grad, *tensors, ctx.backend)
    grad_state = None if state is None else rest[0]
    grad_offset = None if offset is None else rest[-1]
    return grad_x, grad_state, grad_mu, grad_offset, None, None


_token_shift.register_autograd(_backward, setup_context=_setup_context)


def token_shift(
    x: torch.Tensor,
    state: torch.Tensor | None,
    mu: torch.Tensor,
    offset: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """
    Interpolates n times between every token and the one before it: with `offset` the data-dependent interpolation of
    Finch, without one the static interpolation of Eagle (equations 14, 15 and 3 of arXiv:2404.05892):

        y[n, b, t] = x[b, t] + (previous[b, t] - x[b, t]) * (mu[n] + offset[n, b, t])

    previous[b, t] is x[b, t - 1], at t = 0 it is state[b], and it is zero where starts[b, t].

    Args:
        x: (B, T, D), T at least 1.
        state: the token before the first, (B, D); zeros where None.
        mu: weights of the token before, (n, D).
        offset: what is added to them for each token, (n, B, T, D).
        starts: bool (B, T) or (1, T), True where a packed document begins.
        backend: `"auto"`, `"triton"` (computes in float32), `"eager"` (in the widest dtype of the inputs) or
            `"reference"`.

    Returns:
        y (n, B, T, D) in the dtype of x.

    Raises:
        ValueError: where a shape, a dtype or a device does not fit, before any work.
    """
    _check(x, state, mu, offset, starts)
    backend = choose_backend("token_shift", backend, BACKENDS, x)
    if backend == "auto" and x.shape[1] == 1 and torch.compiler.is_compiling():
        backend = "eager"  # of a single token the compiler makes one kernel with what surrounds it
    if backend == "reference":
        return token_shift_reference(x, state, mu, offset, starts).to(x.dtype)
    if backend == "eager":
        return token_shift_eager(x, state, mu, offset, starts)
    return _token_shift(x, state, mu, offset, starts, backend)


def _check(x, state, mu, offset, starts):
    if x.dim() != 3 or x.shape[1] == 0:
        raise ValueError(f"`x` must be (batch, length >= 1, width), got {tuple(x.shape)}.")
    batch, length, width = x.shape
    if mu.dim() != 2 or mu.shape[0] == 0 or mu.shape[1] != width:
        raise ValueError(f"`mu` must be (n >= 1, {width}), got {tuple(mu.shape)}.")
    if state is not None and state.shape != (batch, width):
        raise ValueError(f"`state` must have shape {(batch, width)}, got {tuple(state.shape)}.")
    if offset is not None and offset.shape != (mu.shape[0], *x.shape):
        raise ValueError(f"`offset` must have shape {(mu.shape[0], *x.shape)}, got {tuple(offset.shape)}.")
    if starts is not None and (starts.dtype != torch.bool or starts.shape not in ((batch, length), (1, length))):
        raise ValueError(
            f"`starts` must be bool of shape {(batch, length)} or {(1, length)}, got {starts.dtype} "
            f"{tuple(starts.shape)}."
        )
    for name, tensor in (("x", x), ("state", state), ("mu", mu), ("offset", offset), ("starts", starts)):
        if tensor is None:
            continue
        if name != "starts" and not tensor.is_floating_point():
            raise ValueError(f"`{name}` must be floating point, got {tensor.dtype}.")
        if tensor.device != x.device:
            raise ValueError(f"`{name}` is on {tensor.device}, `x` on {x.device}.")

"""CEMA: the complex multi-dimensional damped moving average of Megalodon and Gecko."""

import torch

from ..backend import cast, choose_backend, custom_op, dispatch, of_widest, widest, without_autocast
from ..checks import check_inplace, check_tensors, needs_gradient
from .eager import cema_chunked, cema_chunked_backward, cema_step
from .reference import cema_reference


BACKENDS = ("eager", "reference", "triton")


@custom_op("cema", mutates_args=())
def _cema(
    x: torch.Tensor,
    alpha: torch.Tensor,
    delta: torch.Tensor,
    theta: torch.Tensor,
    gamma: torch.Tensor,
    initial_state: torch.Tensor | None,
    starts: torch.Tensor | None,
    real: torch.Tensor | None,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    def triton():
        from .triton_kernels import cema_triton

        return cema_triton(x, alpha, delta, theta, gamma, initial_state, starts, real)

    def eager():
        floats = x, alpha, delta, theta, gamma, initial_state
        with without_autocast(x):
            out, state = cema_chunked(*cast(widest(*floats), *floats), starts, real)
        return out.to(x.dtype).contiguous(), state.contiguous()

    return dispatch("cema", backend, x, triton, eager)


@_cema.register_fake
def _(x, alpha, delta, theta, gamma, initial_state, starts, real, backend):
    dtype = widest(x, alpha, delta, theta, gamma, initial_state)
    return x.new_empty(x.shape), x.new_empty(x.shape[0], *gamma.shape, dtype=dtype)


@custom_op("cema_backward", mutates_args=())
def _cema_backward(
    grad_out: torch.Tensor,
    grad_state: torch.Tensor,
    x: torch.Tensor,
    alpha: torch.Tensor,
    delta: torch.Tensor,
    theta: torch.Tensor,
    gamma: torch.Tensor,
    initial_state: torch.Tensor | None,
    starts: torch.Tensor | None,
    real: torch.Tensor | None,
    backend: str,
) -> list[torch.Tensor]:
    given = [tensor for tensor in (x, alpha, delta, theta, gamma, initial_state) if tensor is not None]

    def triton():
        from .triton_kernels import cema_triton_backward

        return cema_triton_backward(grad_out, grad_state, x, alpha, delta, theta, gamma, initial_state, starts, real)

    def eager():
        inputs = cast(widest(*given), grad_out, grad_state, x, alpha, delta, theta, gamma, initial_state)
        with without_autocast(x):
            return cema_chunked_backward(*inputs, starts, real)

    grads = dispatch("cema", backend, x, triton, eager)
    return [grad.to(of.dtype).contiguous() for grad, of in zip(grads, given, strict=True)]


@_cema_backward.register_fake
def _(grad_out, grad_state, x, alpha, delta, theta, gamma, initial_state, starts, real, backend):
    given = (x, alpha, delta, theta, gamma, initial_state)
    return [tensor.new_empty(tensor.shape) for tensor in given if tensor is not None]


def _setup_context(ctx, inputs, output):
    *tensors, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad_out, grad_state):
    grads = _cema_backward(grad_out, grad_state, *ctx.saved_tensors, ctx.backend)
    return (*grads, *[None] * (9 - len(grads)))


_cema.register_autograd(_backward, setup_context=_setup_context)


@custom_op("cema_step", mutates_args=("new_state",))
def _cema_step(
    x: torch.Tensor,
    alpha: torch.Tensor,
    delta: torch.Tensor,
    theta: torch.Tensor,
    gamma: torch.Tensor,
    state: torch.Tensor | None,
    new_state: torch.Tensor,
    starts: torch.Tensor | None,
    real: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    """One token, the state in place where `state` is None (then `new_state` holds it)."""

    def triton():
        from .triton_kernels import cema_triton_step

        return cema_triton_step(x, alpha, delta, theta, gamma, state, new_state, starts, real)

    def eager():
        before = new_state if state is None else state
        with without_autocast(x):
            floats = cast(torch.float32, x, alpha, delta, theta, gamma, before)
            out, after = cema_step(*floats, starts, real)
        new_state.copy_(after)
        return out.to(x.dtype)

    return dispatch("cema_step", backend, x, triton, eager)


@_cema_step.register_fake
def _(x, alpha, delta, theta, gamma, state, new_state, starts, real, backend):
    return x.new_empty(x.shape)


def cema(
    x: torch.Tensor,
    alpha: torch.Tensor,
    delta: torch.Tensor,
    theta: torch.Tensor,
    gamma: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    starts: torch.Tensor | None = None,
    real: torch.Tensor | None = None,
    inplace: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Damped moving averages of every channel in N complex states (equation 1 of "Gecko", without an expansion of x):

        h_t = q h_{t-1} + a x_t,    out_t = Re sum_n gamma h_t
        q = (1 - a d) exp(i angle),    a = sigmoid(alpha),    d = sigmoid(delta)
        angle_n = n 2π / N sigmoid(theta),    n = 1 ... N

    All is computed in float32 whatever the dtype of x, under autocast too (float64 where an input is), powers of q
    from float64. The backward pass keeps the inputs alone.

    Args:
        x: (B, T, D), T at least 1.
        alpha, delta: (D, N).
        theta: (D).
        gamma: real and imaginary part, (D, N, 2).
        initial_state: h before the first token, real and imaginary part, (B, D, N, 2); zeros where None.
        starts: bool (B, T) or (1, T), True where a document begins: h is cleared before that token.
        real: bool (B, T), False where a token is padding: h passes it unchanged, whatever x is there, and out is 0.
        inplace: write the state after the last token into `initial_state`, which must then be float32, contiguous and
            in need of no gradient, and return that tensor.
        backend: `"auto"`, `"triton"`, `"eager"` (plain torch, parallel over time) or `"reference"` (the recurrence).

    Returns:
        out (B, T, D) in the dtype of x, and the state after the last token (B, D, N, 2) in float32 (float64).

    Raises:
        ValueError: where a shape, a dtype or a device does not fit, before any work.
    """
    _check(x, alpha, delta, theta, gamma, initial_state, starts, real, inplace)
    floats = x, alpha, delta, theta, gamma, initial_state
    backend = choose_backend("cema", backend, BACKENDS, of_widest(*floats))
    one = x.shape[1] == 1
    if one and backend in ("auto", "triton") and not needs_gradient(*floats) and widest(*floats) == torch.float32:
        return _step(*floats, starts, real, inplace, backend)
    if backend != "reference" and not (one and backend == "eager"):
        out, state = _cema(*floats, starts, real, backend)
    else:
        floats = cast(widest(*floats), *floats)
        with without_autocast(x):
            if backend == "reference":
                out, state = cema_reference(*floats, starts, real)
            else:
                firsts = [None if flags is None else flags[:, 0] for flags in (starts, real)]
                out, state = cema_step(floats[0][:, 0], *floats[1:], *firsts)
                out = out.unsqueeze(1)
        out = out.to(x.dtype)
    return out, initial_state.copy_(state) if inplace else state


def _step(x, alpha, delta, theta, gamma, state, starts, real, inplace, backend):
    if inplace:
        new_state, state = state, None
    else:
        if state is None:
            state = x.new_zeros(x.shape[0], *gamma.shape, dtype=torch.float32)
        state = state.float().contiguous()
        new_state = torch.empty_like(state)
    flags = [None if flag is None else flag[:, 0] for flag in (starts, real)]
    out = _cema_step(x[:, 0], alpha, delta, theta, gamma, state, new_state, *flags, backend)
    return out.unsqueeze(1), new_state


def cema_state(
    state: torch.Tensor | None,
    x: torch.Tensor,
    alpha: torch.Tensor,
    delta: torch.Tensor,
    theta: torch.Tensor,
    real: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """The state of [`cema`] alone: `state` (B, D, N, 2; None for zeros) after the tokens x (B, T, D)."""
    gamma = alpha.new_zeros(*alpha.shape, 2)
    return cema(x, alpha, delta, theta, gamma, state, real=real, backend=backend)[1]


def _check(x, alpha, delta, theta, gamma, initial_state, starts, real, inplace):
    if x.dim() != 3 or x.shape[1] == 0:
        raise ValueError(f"`x` must be (batch, length >= 1, width), got {tuple(x.shape)}.")
    batch, length, width = x.shape
    if alpha.dim() != 2 or alpha.shape[1] == 0:
        raise ValueError(f"`alpha` must be ({width}, states >= 1), got {tuple(alpha.shape)}.")
    shape = width, alpha.shape[1]
    rows = 1 if starts is not None and starts.shape[:1] == (1,) else batch
    expected = {
        "x": (x, (batch, length, width)),
        "alpha": (alpha, shape),
        "delta": (delta, shape),
        "theta": (theta, (width,)),
        "gamma": (gamma, (*shape, 2)),
        "initial_state": (initial_state, (batch, *shape, 2)),
    }
    check_tensors(expected, "x", x)
    for name, tensor, shape in (("starts", starts, (rows, length)), ("real", real, (batch, length))):
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ValueError(f"`{name}` must have shape {shape}, got {tuple(tensor.shape)}.")
        if tensor.dtype != torch.bool:
            raise ValueError(f"`{name}` must be bool, got {tensor.dtype}.")
        if tensor.device != x.device:
            raise ValueError(f"`{name}` is on {tensor.device}, `x` on {x.device}.")
    if inplace:
        check_inplace(initial_state, x, alpha, delta, theta, gamma)

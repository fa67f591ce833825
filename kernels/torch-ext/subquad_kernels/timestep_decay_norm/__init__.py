"""Timestep decay normalization, of Gecko."""

import torch

from ..backend import cast, choose_backend, custom_op, dispatch, of_widest, widest, without_autocast
from ..checks import check_inplace, check_tensors, needs_gradient
from .eager import timestep_decay_norm_eager, timestep_decay_norm_eager_backward, timestep_decay_norm_step
from .reference import timestep_decay_norm_reference


BACKENDS = ("eager", "reference", "triton")
# Tokens and values of a strip, which a program of the Triton kernels holds in its registers.
LONGEST, LARGEST = 64, 4096


def _strip(width: int, groups: int) -> int:
    """Tokens of a strip: a power of 2."""
    return max(min(LONGEST, LARGEST >> (width // groups - 1).bit_length()), 1)


def _shape_of_entering(x, groups):
    """
    Of the statistics that enter every strip but the first. There is room for two strips more, because a size that may
    be 0 or 1 would tie an exported program to the lengths of its example.
    """
    strip = _strip(x.shape[-1], groups)
    return x.shape[0], (x.shape[1] + strip - 1) // strip + 1, 3, groups


@custom_op("timestep_decay_norm", mutates_args=())
def _timestep_decay_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    starts: torch.Tensor | None,
    real: torch.Tensor | None,
    groups: int,
    beta1: float,
    beta2: float,
    eps: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, state, and what the backward pass of the Triton kernels needs besides the inputs."""
    tensors = x, weight, bias, initial_state
    numbers = groups, beta1, beta2, eps

    def triton():
        from .triton_kernels import timestep_decay_norm_triton

        return timestep_decay_norm_triton(*tensors, starts, real, *numbers, _strip(x.shape[-1], groups))

    def eager():
        dtype = widest(*tensors)
        with without_autocast(x):
            out, state = timestep_decay_norm_eager(*cast(dtype, *tensors), starts, real, *numbers)
        return out.to(x.dtype).contiguous(), state, x.new_zeros(_shape_of_entering(x, groups), dtype=dtype)

    return dispatch("timestep_decay_norm", backend, of_widest(*tensors), triton, eager)


@_timestep_decay_norm.register_fake
def _(x, weight, bias, initial_state, starts, real, groups, beta1, beta2, eps, backend):
    dtype = widest(x, weight, bias, initial_state)
    state = x.new_empty(x.shape[0], 3, groups, dtype=dtype)
    return x.new_empty(x.shape), state, x.new_empty(_shape_of_entering(x, groups), dtype=dtype)


@custom_op("timestep_decay_norm_backward", mutates_args=())
def _timestep_decay_norm_backward(
    grad: torch.Tensor,
    grad_state: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    starts: torch.Tensor | None,
    real: torch.Tensor | None,
    entering: torch.Tensor,
    groups: int,
    beta1: float,
    beta2: float,
    eps: float,
    backend: str,
) -> list[torch.Tensor]:
    tensors = x, weight, bias, initial_state
    numbers = groups, beta1, beta2, eps

    def triton():
        from .triton_kernels import timestep_decay_norm_triton_backward

        strip = _strip(x.shape[-1], groups)
        return timestep_decay_norm_triton_backward(grad, grad_state, *tensors, entering, starts, real, *numbers, strip)

    def eager():
        inputs = cast(widest(*tensors), grad, grad_state, *tensors)
        with without_autocast(x):
            return timestep_decay_norm_eager_backward(*inputs, starts, real, *numbers)

    grads = dispatch("timestep_decay_norm", backend, of_widest(*tensors), triton, eager)
    given = [tensor for tensor in tensors if tensor is not None]
    return [grad.to(tensor.dtype).contiguous() for grad, tensor in zip(grads, given, strict=True)]


@_timestep_decay_norm_backward.register_fake
def _(grad, grad_state, x, weight, bias, initial_state, starts, real, entering, groups, beta1, beta2, eps, backend):
    return [tensor.new_empty(tensor.shape) for tensor in (x, weight, bias, initial_state) if tensor is not None]


def _setup_context(ctx, inputs, output):
    *tensors, ctx.groups, ctx.beta1, ctx.beta2, ctx.eps, ctx.backend = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*tensors, output[2])


def _backward(ctx, grad, grad_state, _):
    tensors = ctx.saved_tensors
    numbers = ctx.groups, ctx.beta1, ctx.beta2, ctx.eps
    grads = iter(_timestep_decay_norm_backward(grad, grad_state, *tensors, *numbers, ctx.backend))
    return (*(None if tensor is None else next(grads) for tensor in tensors[:4]), *[None] * 7)


_timestep_decay_norm.register_autograd(_backward, setup_context=_setup_context)


@custom_op("timestep_decay_norm_step", mutates_args=("new_state",))
def _timestep_decay_norm_step(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    state: torch.Tensor | None,
    new_state: torch.Tensor,
    starts: torch.Tensor | None,
    real: torch.Tensor | None,
    groups: int,
    beta1: float,
    beta2: float,
    eps: float,
    backend: str,
) -> torch.Tensor:
    """One token, the state in place where `state` is None (then `new_state` holds it)."""
    before = new_state if state is None else state
    numbers = groups, beta1, beta2, eps

    def triton():
        from .triton_kernels import timestep_decay_norm_triton

        return timestep_decay_norm_triton(x, weight, bias, before, starts, real, *numbers, 1, final=new_state)[0]

    def eager():
        with without_autocast(x):
            tensors = cast(torch.float32, x, weight, bias, before)
            out, after = timestep_decay_norm_step(*tensors, starts, real, *numbers)
        new_state.copy_(after)
        return out.to(x.dtype)

    return dispatch("timestep_decay_norm_step", backend, x, triton, eager)


@_timestep_decay_norm_step.register_fake
def _(x, weight, bias, state, new_state, starts, real, groups, beta1, beta2, eps, backend):
    return x.new_empty(x.shape)


@custom_op("timestep_decay_norm_state", mutates_args=())
def _timestep_decay_norm_state(
    x: torch.Tensor,
    state: torch.Tensor | None,
    starts: torch.Tensor | None,
    real: torch.Tensor | None,
    groups: int,
    beta1: float,
    beta2: float,
    backend: str,
) -> torch.Tensor:
    def triton():
        from .triton_kernels import timestep_decay_norm_triton_state

        strip = _strip(x.shape[-1], groups)
        return timestep_decay_norm_triton_state(x, state, starts, real, groups, beta1, beta2, strip)

    def eager():
        inputs = cast(widest(x, state), x, None, None, state)
        with without_autocast(x):
            return timestep_decay_norm_eager(*inputs, starts, real, groups, beta1, beta2, 1.0)[1]

    return dispatch("timestep_decay_norm_state", backend, of_widest(x, state), triton, eager)


@_timestep_decay_norm_state.register_fake
def _(x, state, starts, real, groups, beta1, beta2, backend):
    return x.new_empty(x.shape[0], 3, groups, dtype=widest(x, state))


def timestep_decay_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    groups: int,
    beta1: float,
    beta2: float,
    eps: float,
    initial_state: torch.Tensor | None = None,
    *,
    starts: torch.Tensor | None = None,
    real: torch.Tensor | None = None,
    inplace: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Normalizes every step with decayed averages of the means and variances so far (equations 11 and 12 of the paper of
    Gecko). For each of the groups of D / groups channels, with mean μ_t and population variance σ²_t of a step:

        m_t = β1 m_{t-1} + (1 - β1) μ_t,    v_t = β2 v_{t-1} + (1 - β2) σ²_t
        m'_t = m_t / (1 - β1^n_t),    v'_t = v_t / (1 - β2^n_t)
        out_t = (x_t - m'_t) / sqrt(v'_t + eps) * (weight + 1) + bias

    where n_t counts the document's tokens so far, this one included. Statistics are computed in float32 whatever the
    dtypes, under autocast too (in float64 where one of the inputs is).

    Args:
        x: (B, T, D), T at least 1.
        weight: the factor minus one, (D); a factor of 1 where None.
        bias: (D); none where None.
        groups: a divisor of D.
        beta1: decay of the mean, from 0 to below 1.
        beta2: decay of the variance, likewise.
        eps: added to the variance.
        initial_state: m, v and n before the first token, (B, 3, groups), n the same in every group; zeros, as they are
            at the beginning of a text, where None. n has no gradient. In float32 it counts exactly to 2^24 and may
            stay there: of a beta up to 1 - 1e-6 the power is 0 long before.
        starts: bool (B, T) or (1, T), True where a document begins: the statistics are zero before that token.
        real: bool (B, T), False where a token is padding, which changes no statistics. It is normalized by those that
            there are; before the first token the mean is 0 and the variance 1.
        inplace: write the state after the last token into `initial_state`, which must then be float32, contiguous and
            in need of no gradient, and return that tensor.
        backend: `"auto"`, `"triton"`, `"eager"` (plain torch, parallel over time) or `"reference"` (the recurrence).

    Returns:
        out (B, T, D) in the dtype of x, and the state after the last token (B, 3, groups) in float32 (float64).

    Raises:
        ValueError: where a shape, a dtype, a device or a number does not fit, before any work.
    """
    tensors = x, weight, bias, initial_state
    _check(*tensors, starts, real, groups, beta1, beta2)
    if inplace:
        check_inplace(initial_state, x, *(w for w in (weight, bias) if w is not None))
    widest_x = of_widest(*tensors)
    backend = choose_backend("timestep_decay_norm", backend, BACKENDS, widest_x)
    numbers = groups, float(beta1), float(beta2), float(eps)
    one = x.shape[1] == 1
    if one and backend in ("auto", "triton") and not needs_gradient(*tensors):
        return _step(*tensors, starts, real, *numbers, inplace, backend)
    if backend in ("auto", "triton") or (backend == "eager" and not one):
        out, state, _ = _timestep_decay_norm(*tensors, starts, real, *numbers, backend)
    else:
        dtype = widest(widest_x)
        with without_autocast(x):
            x_, weight, bias, before = cast(dtype, *tensors)
            if backend == "reference":
                out, state = timestep_decay_norm_reference(x_, weight, bias, before, starts, real, *numbers)
            else:
                before = x_.new_zeros(x.shape[0], 3, groups) if before is None else before
                out, state = timestep_decay_norm_step(x_, weight, bias, before, starts, real, *numbers)
        out = out.to(x.dtype)
    return out, initial_state.copy_(state) if inplace else state


def _step(x, weight, bias, state, starts, real, groups, beta1, beta2, eps, inplace, backend):
    if inplace:
        new_state, state = state, None
    else:
        if state is None:
            state = x.new_zeros(x.shape[0], 3, groups, dtype=torch.float32)
        state = state.float().contiguous()
        new_state = torch.empty_like(state)
    numbers = groups, beta1, beta2, eps
    out = _timestep_decay_norm_step(x, weight, bias, state, new_state, starts, real, *numbers, backend)
    return out, new_state


def timestep_decay_norm_state(
    state: torch.Tensor | None,
    x: torch.Tensor,
    groups: int,
    beta1: float,
    beta2: float,
    *,
    starts: torch.Tensor | None = None,
    real: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """
    The state of [`timestep_decay_norm`] alone: `state` (B, 3, groups; None for zeros) after the tokens x (B, T, D).
    """
    _check(x, None, None, state, starts, real, groups, beta1, beta2)
    chosen = choose_backend("timestep_decay_norm", backend, BACKENDS, of_widest(x, state))
    if chosen == "reference" or needs_gradient(x, state):
        more = {"starts": starts, "real": real, "backend": backend}
        return timestep_decay_norm(x, None, None, groups, beta1, beta2, 1.0, state, **more)[1]
    return _timestep_decay_norm_state(x, state, starts, real, groups, float(beta1), float(beta2), chosen)


def _check(x, weight, bias, initial_state, starts, real, groups, beta1, beta2):
    if x.dim() != 3 or x.shape[1] == 0 or x.shape[2] == 0:
        raise ValueError(f"`x` must be (batch, length >= 1, width >= 1), got {tuple(x.shape)}.")
    batch, length, width = x.shape
    if groups < 1 or width % groups:
        raise ValueError(f"`groups` must divide {width}, the width of `x`, got {groups}.")
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= beta < 1:
            raise ValueError(f"`{name}` must be from 0 to below 1, got {beta}.")
    expected = {
        "x": (x, (batch, length, width)),
        "weight": (weight, (width,)),
        "bias": (bias, (width,)),
        "initial_state": (initial_state, (batch, 3, groups)),
    }
    check_tensors(expected, "x", x)
    for name, tensor, rows in (("starts", starts, (batch, 1)), ("real", real, (batch,))):
        if tensor is None:
            continue
        shapes = [(row, length) for row in rows]
        if tensor.dtype != torch.bool or tuple(tensor.shape) not in shapes:
            wanted = " or ".join(dict.fromkeys(map(str, shapes)))
            raise ValueError(f"`{name}` must be bool of shape {wanted}, got {tensor.dtype} {tuple(tensor.shape)}.")
        if tensor.device != x.device:
            raise ValueError(f"`{name}` is on {tensor.device}, `x` on {x.device}.")

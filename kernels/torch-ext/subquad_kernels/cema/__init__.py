"""CEMA: the complex multi-dimensional damped moving average of Megalodon and Gecko."""

import torch

from ..backend import choose_backend, in_wide_dtype, of_widest, step_states, widest
from ..checks import check_inplace, check_tensors, needs_gradient
from .custom_ops import _cema, _cema_step
from .eager import cema_step
from .reference import cema_reference


BACKENDS = ("eager", "triton")


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
    Damped moving averages of each channel in N complex states (equation 1 of "Gecko", without an expansion of x):

        h_t = q h_{t-1} + a x_t,    out_t = Re sum_n gamma h_t
        q = (1 - a d) exp(i angle),    a = sigmoid(alpha),    d = sigmoid(delta)
        angle_n = n 2π / N sigmoid(theta),    n = 1 ... N

    Everything is computed in float32 for any dtype of x, also under autocast (float64 if an input is float64); powers
    of q are rounded from float64. Only the inputs are kept for the backward pass.

    Args:
        x: (B, T, D), T at least 1.
        alpha, delta: (D, N).
        theta: (D).
        gamma: real and imaginary part, (D, N, 2).
        initial_state: h before the first token, real and imaginary part, (B, D, N, 2); None means zeros.
        starts: bool (B, T) or (1, T), True for the first token of each document: h is cleared before it.
        real: bool (B, T), False for padding tokens: they leave h unchanged for any x, and their out is 0.
        inplace: write the state after the last token into `initial_state` and return that tensor. It must be float32
            and contiguous, and nothing may need a gradient.
        backend: `"auto"`, `"triton"` or `"eager"` (plain torch, parallel over time).

    Returns:
        out (B, T, D) in the dtype of x, and the state after the last token (B, D, N, 2) in float32 (float64).

    Raises:
        ValueError: if a shape, a dtype or a device does not fit, before any work.
    """
    _check(x, alpha, delta, theta, gamma, initial_state, starts, real, inplace)
    floats = x, alpha, delta, theta, gamma, initial_state
    backend = choose_backend("cema", backend, BACKENDS, of_widest(*floats))
    one_token, has_kernels = x.shape[1] == 1, backend in ("auto", "triton")
    if one_token and has_kernels and not needs_gradient(*floats) and widest(*floats) == torch.float32:
        return _step(*floats, starts, real, inplace, backend)
    if has_kernels or (backend == "eager" and not one_token):
        out, state = _cema(*floats, starts, real, backend)
    else:
        run = cema_step
        # package only
        if backend == "reference":
            run = cema_reference
        out, state = in_wide_dtype(run, floats, starts, real)
        out = out.to(x.dtype)
    return out, initial_state.copy_(state) if inplace else state


def _step(x, alpha, delta, theta, gamma, initial_state, starts, real, inplace, backend):
    states = step_states(initial_state, inplace, x, (x.shape[0], *gamma.shape))
    return _cema_step(x, alpha, delta, theta, gamma, *states, starts, real, backend), states[1]


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
    flags = {"starts": (starts, (rows, length)), "real": (real, (batch, length))}
    check_tensors(flags, "x", x, dtype=torch.bool)
    if inplace:
        check_inplace(initial_state, x, alpha, delta, theta, gamma)

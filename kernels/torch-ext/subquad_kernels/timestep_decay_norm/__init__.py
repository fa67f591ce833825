"""Timestep decay normalization, of Gecko."""

import torch

from ..backend import choose_backend, in_wide_dtype, of_widest, step_states
from ..checks import check_flags, check_inplace, check_tensors, needs_gradient
from .custom_ops import _timestep_decay_norm, _timestep_decay_norm_step
from .eager import timestep_decay_norm_step
from .reference import timestep_decay_norm_reference


BACKENDS = ("eager", "triton")


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
    Normalizes each token with decayed averages of the means and variances so far (equations 11 and 12 of "Gecko"). For
    each of the groups of D / groups channels, with the mean μ_t and population variance σ²_t of a token:

        m_t = β1 m_{t-1} + (1 - β1) μ_t,    v_t = β2 v_{t-1} + (1 - β2) σ²_t
        m'_t = m_t / (1 - β1^n_t),    v'_t = v_t / (1 - β2^n_t)
        out_t = (x_t - m'_t) / sqrt(v'_t + eps) * (weight + 1) + bias

    n_t is the number of tokens of the document so far, including this one. Statistics are computed in float32 for any
    dtypes, also under autocast (float64 if an input is float64).

    Args:
        x: (B, T, D), T at least 1.
        weight: the factor minus one, (D); None means a factor of 1.
        bias: (D), or None.
        groups: a divisor of D.
        beta1: decay of the mean, at least 0 and below 1.
        beta2: decay of the variance, at least 0 and below 1.
        eps: added to the variance.
        initial_state: m, v and n before the first token, (B, 3, groups), with the same n in every group; None means
            zeros, as at the beginning of a document. n has no gradient. In float32 it counts exactly to 2^24 and may
            stay there, because the power of any beta up to 1 - 1e-6 is 0 by then.
        starts: bool (B, T) or (1, T), True for the first token of each document: the statistics are cleared before it.
        real: bool (B, T), False for padding tokens. They do not change the statistics and are normalized with them;
            before the first real token the mean is 0 and the variance 1.
        inplace: write the state after the last token into `initial_state` and return that tensor. It must be float32
            and contiguous, and nothing may need a gradient.
        backend: `"auto"`, `"triton"` or `"eager"` (plain torch, parallel over time).

    Returns:
        out (B, T, D) in the dtype of x, and the state after the last token (B, 3, groups) in float32 (float64).

    Raises:
        ValueError: if a shape, a dtype, a device or a number does not fit, before any work.
    """
    tensors = x, weight, bias, initial_state
    _check(*tensors, starts, real, groups, beta1, beta2)
    if inplace:
        check_inplace(initial_state, x, *(w for w in (weight, bias) if w is not None))
    backend = choose_backend("timestep_decay_norm", backend, BACKENDS, of_widest(*tensors))
    numbers = groups, float(beta1), float(beta2), float(eps)
    one_token, has_kernels = x.shape[1] == 1, backend in ("auto", "triton")
    if one_token and has_kernels and not needs_gradient(*tensors):
        states = step_states(initial_state, inplace, x, (x.shape[0], 3, groups))
        out = _timestep_decay_norm_step(x, weight, bias, *states, starts, real, *numbers, backend)
        return out, states[1]
    if has_kernels or (backend == "eager" and not one_token):
        out, state, _ = _timestep_decay_norm(*tensors, starts, real, *numbers, backend)
    else:
        run = timestep_decay_norm_step
        # package only
        if backend == "reference":
            run = timestep_decay_norm_reference
        out, state = in_wide_dtype(run, tensors, starts, real, *numbers)
        out = out.to(x.dtype)
    return out, initial_state.copy_(state) if inplace else state


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
    check_flags("starts", starts, [(batch, length), (1, length)], x)
    check_flags("real", real, [(batch, length)], x)

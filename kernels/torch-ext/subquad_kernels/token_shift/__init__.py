"""Token shift: interpolation between each token and the one before it, of Eagle (RWKV-5) and Finch (RWKV-6)."""

import torch

from ..backend import choose_backend
from ..checks import check_flags, check_tensors
from ..shortcuts import shortcut
from .custom_ops import _token_shift
from .eager import token_shift_eager
from .reference import token_shift_reference


BACKENDS = ("eager", "triton")


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
    Interpolates between each token and the one before it, with n different weights: the data-dependent interpolation
    of Finch, or without `offset` the static one of Eagle (equations 14, 15 and 3 of arXiv:2404.05892):

        y[n, b, t] = x[b, t] + (previous[b, t] - x[b, t]) * (mu[n] + offset[n, b, t])

    previous[b, t] is x[b, t - 1], or state[b] if t = 0. It is zero if starts[b, t].

    Args:
        x: (B, T, D), T at least 1.
        state: the token before the first one, (B, D); None means zeros.
        mu: weights of the previous token, (n, D).
        offset: added to the weights for each token, (n, B, T, D).
        starts: bool (B, T) or (1, T), True for the first token of each packed document.
        backend: `"auto"`, `"triton"` (computes in float32) or `"eager"` (in the widest dtype of the inputs).

    Returns:
        y (n, B, T, D) in the dtype of x.

    Raises:
        ValueError: if a shape, a dtype or a device does not fit, before any work.
    """
    _check(x, state, mu, offset, starts)
    backend = choose_backend("token_shift", backend, BACKENDS, x)
    if backend == "auto" and x.shape[1] == 1 and torch.compiler.is_compiling():
        backend = "eager"  # the compiler fuses a single token with the operations around it
    # package only
    if backend == "reference":
        return token_shift_reference(x, state, mu, offset, starts).to(x.dtype)
    if backend == "eager":
        # package only
        if x.shape[1] == 1 and starts is None and (out := shortcut("token_shift", x, state, mu, offset)) is not None:
            return out
        return token_shift_eager(x, state, mu, offset, starts)
    return _token_shift(x, state, mu, offset, starts, backend)


def _check(x, state, mu, offset, starts):
    if x.dim() != 3 or x.shape[1] == 0:
        raise ValueError(f"`x` must be (batch, length >= 1, width), got {tuple(x.shape)}.")
    batch, length, width = x.shape
    if mu.dim() != 2 or mu.shape[0] == 0 or mu.shape[1] != width:
        raise ValueError(f"`mu` must be (n >= 1, {width}), got {tuple(mu.shape)}.")
    expected = {
        "x": (x, x.shape),
        "state": (state, (batch, width)),
        "mu": (mu, mu.shape),
        "offset": (offset, (len(mu), *x.shape)),
    }
    check_tensors(expected, "x", x)
    check_flags("starts", starts, [(batch, length), (1, length)], x)

"""Low-rank maps, which compute data-dependent offsets for each token."""

from collections.abc import Callable

import torch

from .linear import matmul
from .shortcuts import shortcut


_FUNCTIONS = (None, "tanh", "sigmoid", "exp")


def low_rank(
    x: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    inner: str | None = None,
    *,
    base: torch.Tensor | None = None,
    outer: str | None = None,
    scale: float = 1.0,
    wide: bool = False,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = matmul,
) -> torch.Tensor:
    """
    `scale * outer(base + inner(x @ down) @ up)`: the inputs of RWKV's decays, learning rates, gates and
    interpolations, equations 14 and 17 of arXiv:2404.05892 and 3 of arXiv:2503.14456.

    Args:
        x: (..., in).
        down: (in, rank), or (in, G * rank) for G maps.
        up: (rank, out), or (G, rank, out).
        inner, outer: `"tanh"`, `"sigmoid"`, `"exp"`, or None for none.
        base: broadcast to (..., out); None means zero.
        scale: a number.
        wide: whether the result, and everything after the products, is float32 (float64 if x is). Otherwise it has the
            dtype of x.
        multiply: the second product: [`matmul`], or a function for special weights.

    Returns:
        (..., out), or (G, ..., out).

    Raises:
        ValueError: if a function has no such name.
    """
    for name, function in (("inner", inner), ("outer", outer)):
        if function not in _FUNCTIONS:
            known = ", ".join(map(repr, _FUNCTIONS))
            raise ValueError(f"`{name}` must be one of {known}, got {function!r}.")
    dtype = torch.promote_types(x.dtype, torch.float32) if wide else x.dtype
    # package only
    if (done := shortcut("low_rank", x, down, up, base, inner, outer, scale, dtype)) is not None:
        return done
    low = _apply(inner, matmul(x, down))
    if up.dim() == 3:
        low = low.view(-1, up.shape[0], up.shape[1]).transpose(0, 1)
    out = multiply(low, up).to(dtype)
    if up.dim() == 3:
        out = out.view(up.shape[0], *x.shape[:-1], up.shape[-1])
    out = _apply(outer, out if base is None else base.to(dtype) + out)
    return out if scale == 1 else scale * out


def _apply(function: str | None, x: torch.Tensor) -> torch.Tensor:
    return x if function is None else getattr(torch, function)(x)

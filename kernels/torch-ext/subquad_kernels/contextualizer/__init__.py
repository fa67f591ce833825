"""The contextualizer of Avey: each row of a window reads the rows before it, weighted by their similarity to it."""

import torch

from ..backend import choose_backend
from ..checks import check_tensors
from .custom_ops import _contextualizer
from .reference import contextualizer_reference


BACKENDS = ("eager", "triton")


def contextualizer(
    z: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None = None,
    prefix: torch.Tensor | None = None,
    queries: int | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """
    Mixes the rows of each window (equation 2 of "Don't Pay Attention", arXiv:2506.11305, without activation and bias):

        out = gate * ((tril(v) * cos) x),    cos_ij = y_i · y_j,    y_i = x_i / sqrt(sum(x_i²) + 1e-8)

    The C rows of x are the first C - R rows of `prefix`, the same in every window, followed by the R rows of z. Norms
    and sums are float32 (float64 if z is), also under autocast; products have the dtype of z. Without a prefix, z and
    gate are not copied if the values of each row are adjacent in memory. The (C, C) weights of a few windows at a time
    take a few dozen MiB. They are not kept for the backward pass, which keeps only the arguments.

    Args:
        z: the last R rows of W windows, (W, R, H), H at least 1.
        v: learned weights, (C, C) with 1 <= R <= C; values above the diagonal are ignored.
        gate: (W, Q, H), or None.
        prefix: (P, H), P at least C - R; rows after the first C - R are ignored. Required if R < C.
        queries: Q, the number of last rows that are returned, from 1 to R; None means R.
        backend: `"auto"`, `"triton"` or `"eager"`.

    Returns:
        out (W, Q, H) in the dtype of z.

    Raises:
        ValueError: if a shape, a dtype or a device does not fit, before any work.
    """
    queries = z.shape[1] if queries is None and z.dim() == 3 else queries
    _check(z, v, gate, prefix, queries)
    backend = choose_backend("contextualizer", backend, BACKENDS, z)
    # package only
    if backend == "reference":
        return contextualizer_reference(z, v, gate, prefix, queries).to(z.dtype)
    return _contextualizer(z, v, gate, prefix, queries, backend)


def _check(z, v, gate, prefix, queries):
    if z.dim() != 3 or z.shape[1] == 0 or z.shape[2] == 0:
        raise ValueError(f"`z` must be (windows, rows >= 1, width >= 1), got {tuple(z.shape)}.")
    windows, rows, width = z.shape
    if v.dim() != 2 or v.shape[0] != v.shape[1] or v.shape[0] < rows:
        raise ValueError(f"`v` must be (context, context) with context >= {rows}, got {tuple(v.shape)}.")
    if not 1 <= queries <= rows:
        raise ValueError(f"`queries` must be from 1 to {rows}, the rows of `z`, got {queries}.")
    shared = v.shape[0] - rows
    if prefix is None and shared:
        raise ValueError(
            f"`prefix` must hold the first {shared} of {v.shape[0]} rows, of which `z` has {rows}; got None."
        )
    if prefix is not None and (prefix.dim() != 2 or prefix.shape[0] < shared or prefix.shape[1] != width):
        raise ValueError(f"`prefix` must be (rows >= {shared}, {width}), got {tuple(prefix.shape)}.")
    expected = {
        "z": (z, z.shape),
        "v": (v, v.shape),
        "gate": (gate, (windows, queries, width)),
        "prefix": (prefix, None if prefix is None else prefix.shape),
    }
    check_tensors(expected, "z", z)

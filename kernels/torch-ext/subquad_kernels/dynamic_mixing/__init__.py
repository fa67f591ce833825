"""The dynamic layer of Avey-B: each row of a window reads all rows, weighted by their similarity to it."""

import math

import torch

from ..backend import choose_backend
from ..checks import needs_gradient
from .custom_ops import _dynamic_mixing, _dynamic_mixing_
from .reference import dynamic_mixing_reference


BACKENDS = ("eager", "triton")
NORMALIZATIONS = ("l1", "sum")


def dynamic_mixing(
    features: torch.Tensor,
    width: int,
    *,
    normalization: str = "l1",
    eps: float = 1e-12,
    inplace: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """
    Mixes the rows of each window by their similarity (equations 5 to 7 of "Avey-B", without activation and bias),
    multiplies the result by the gate (equation 2) and passes the head through (equation 3). With

        x, gate, head = features[..., :width], features[..., width : 2 * width], features[..., 2 * width :]

    the result is

        out[..., :width] = gate * ((S / r) x),    S_ij = y_i · y_j,    out[..., width:] = head

        "l1":     y_i = x_i / max(norm(x_i), eps),         r_i = max(sum_j |S_ij|, eps)    (the published models)
        "sum":    y_i = x_i / sqrt(sum(x_i²) + eps),       r_i = sum_j S_ij + eps          (the paper)

    Each row reads all rows of its window. Norms, sums and r are float32 (float64 if the features are), also under
    autocast; products have the dtype of the features, which are not copied if the values of a row are adjacent in
    memory. The (C, C) weights of a few windows at a time take a few dozen MiB. They are not kept for the backward
    pass, which keeps only the features. The gradient of a row of zeros is clamped to the range of the dtype.

    Args:
        features: C rows of W windows, (W, C, F), C at least 1.
        width: number of columns of x and of the gate, from 1 to F / 2.
        normalization: `"l1"` or `"sum"`.
        eps: at least 1e-20, because float32 cannot divide by less.
        inplace: write the result over the gate instead of into a new tensor. No gradient may be needed.
        backend: `"auto"`, `"triton"` or `"eager"`.

    Returns:
        out (W, C, F - width) in the dtype of the features; with `inplace` it is `features[..., width:]`.

    Raises:
        ValueError: if a shape, a dtype or an option does not fit, or the features cannot be written in place, before
            any work.
    """
    _check(features, width, normalization, eps, inplace)
    backend = choose_backend("dynamic_mixing", backend, BACKENDS, features)
    # package only
    if backend == "reference":
        out = dynamic_mixing_reference(features, width, normalization, eps)
        if not inplace:
            return out
        features[..., width : 2 * width] = out[..., :width]
        return features[..., width:]
    if inplace:
        _dynamic_mixing_(features, width, normalization, eps, backend)
        return features[..., width:]
    return _dynamic_mixing(features, width, normalization, eps, backend)


def _check(features, width, normalization, eps, inplace):
    if features.dim() != 3 or features.shape[1] == 0:
        raise ValueError(f"`features` must be (windows, rows >= 1, features), got {tuple(features.shape)}.")
    if not features.is_floating_point():
        raise ValueError(f"`features` must be floating point, got {features.dtype}.")
    if not isinstance(width, int) or width < 1 or 2 * width > features.shape[2]:
        raise ValueError(f"`width` must be from 1 to {features.shape[2] // 2}, half of the features, got {width!r}.")
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"`normalization` must be one of {NORMALIZATIONS}, got {normalization!r}.")
    if not 1e-20 <= eps < math.inf:
        raise ValueError(f"`eps` must be at least 1e-20, got {eps!r}.")
    if inplace and needs_gradient(features):
        raise ValueError("`inplace=True`: autograd has to record what `features` requires.")
    if inplace and (features.stride(2) != 1 or 0 in features.stride()):
        raise ValueError(
            f"`inplace=True`: the values of a row must lie side by side, each row in its own place; got strides "
            f"{features.stride()}."
        )

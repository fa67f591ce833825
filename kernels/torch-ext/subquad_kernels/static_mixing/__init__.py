"""The static layer of Avey-B: each row of a window reads all rows, with learned weights that ignore their content."""

import torch

from ..backend import choose_backend
from ..checks import check_tensors, needs_gradient
from .custom_ops import _static_mixing, _static_mixing_
from .reference import static_mixing_reference


BACKENDS = ("eager", "triton")


def static_mixing(
    features: torch.Tensor,
    v: torch.Tensor,
    width: int,
    *,
    inplace: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """
    Mixes the rows of each window with learned weights, gates the result and passes the head through (equations 4, 2
    and 3 of "Avey-B", without activation and bias):

        out = [gate * (v x), head],    features = [x, gate, head]

    x and gate have `width` columns. Products have the dtype of features, sums are float32 (float64 if features are),
    also under autocast. Only features and v are kept for the backward pass.

    Args:
        features: C rows of W windows, (W, C, F) with F at least 2 * width. Not copied if the values of a row are
            adjacent in memory.
        v: learned weights, (C, C); cast to the dtype of features.
        width: number of columns of x, at least 1.
        inplace: write the result over the gate instead of into a new tensor. No gradient may be needed.
        backend: `"auto"`, `"triton"` or `"eager"`.

    Returns:
        out (W, C, F - width) in the dtype of features; with `inplace` it is `features[..., width:]`.

    Raises:
        ValueError: if a shape, a dtype or a device does not fit, or if with `inplace` a gradient is needed, rows
            overlap or the values of a row are not adjacent; before any work.
    """
    _check(features, v, width)
    backend = choose_backend("static_mixing", backend, BACKENDS, features)
    if inplace:
        _check_inplace(features, v)
    # package only
    if backend == "reference":
        out = static_mixing_reference(features, v, width).to(features.dtype)
        return features[..., width:].copy_(out) if inplace else out
    if inplace:
        _static_mixing_(features, v, width, backend)
        return features[..., width:]
    return _static_mixing(features, v, width, backend)


def _check(features, v, width):
    if features.dim() != 3 or features.shape[1] == 0 or features.shape[2] < 2:
        raise ValueError(f"`features` must be (windows, rows >= 1, features >= 2), got {tuple(features.shape)}.")
    rows = features.shape[1]
    check_tensors({"features": (features, features.shape), "v": (v, (rows, rows))}, "features", features)
    half = features.shape[2] // 2
    if not isinstance(width, int) or not 1 <= width <= half:
        raise ValueError(f"`width` must be an integer from 1 to {half}, half the columns of `features`, got {width}.")


def _check_inplace(features, v):
    if needs_gradient(features, v):
        raise ValueError("`inplace=True` overwrites what the backward pass would need, got tensors with gradients.")
    if features.stride(-1) != 1 or 0 in features.stride():
        raise ValueError(
            "`inplace=True` needs `features` with rows apart and the values of a row side by side, got strides "
            f"{features.stride()}."
        )

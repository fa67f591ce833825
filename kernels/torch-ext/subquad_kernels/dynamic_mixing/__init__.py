"""The dynamic layer of Avey-B: every row of a window reads all rows, weighted by their similarity to it."""

import math

import torch

from ..backend import choose_backend, custom_op, dispatch, without_autocast
from .eager import dynamic_mixing_eager, dynamic_mixing_eager_backward
from .reference import dynamic_mixing_reference


BACKENDS = ("eager", "reference", "triton")
NORMALIZATIONS = ("l1", "sum")


def _mix(out, features, width, normalization, eps, backend):
    def triton():
        from .triton_kernels import dynamic_mixing_triton

        dynamic_mixing_triton(out, features, width, normalization, eps)

    def eager():
        with without_autocast(features):
            dynamic_mixing_eager(out, features, width, normalization, eps)

    dispatch("dynamic_mixing", backend, features, triton, eager)


@custom_op("dynamic_mixing", mutates_args=())
def _dynamic_mixing(features: torch.Tensor, width: int, normalization: str, eps: float, backend: str) -> torch.Tensor:
    out = features.new_empty(*features.shape[:2], features.shape[2] - width)
    _mix(out[..., :width], features, width, normalization, eps, backend)
    out[..., width:] = features[..., 2 * width :]
    return out


@_dynamic_mixing.register_fake
def _(features, width, normalization, eps, backend):
    return features.new_empty(*features.shape[:2], features.shape[2] - width)


@custom_op("dynamic_mixing_", mutates_args=("features",))
def _dynamic_mixing_(features: torch.Tensor, width: int, normalization: str, eps: float, backend: str) -> None:
    _mix(features[..., width : 2 * width], features, width, normalization, eps, backend)


@_dynamic_mixing_.register_fake
def _(features, width, normalization, eps, backend):
    return None


@custom_op("dynamic_mixing_backward", mutates_args=())
def _dynamic_mixing_backward(
    grad: torch.Tensor, features: torch.Tensor, width: int, normalization: str, eps: float, backend: str
) -> torch.Tensor:
    def triton():
        from .triton_kernels import dynamic_mixing_triton_backward

        return dynamic_mixing_triton_backward(grad, features, width, normalization, eps)

    def eager():
        with without_autocast(features):
            return dynamic_mixing_eager_backward(grad, features, width, normalization, eps)

    return dispatch("dynamic_mixing", backend, features, triton, eager)


@_dynamic_mixing_backward.register_fake
def _(grad, features, width, normalization, eps, backend):
    return features.new_empty(features.shape)


def _setup_context(ctx, inputs, output):
    features, *ctx.options = inputs
    ctx.save_for_backward(features)


def _backward(ctx, grad):
    return _dynamic_mixing_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None


_dynamic_mixing.register_autograd(_backward, setup_context=_setup_context)


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
    Mixes the rows of each window by their similarity (equations 5 to 7 of "Avey-B", without activation
    and bias), multiplies with the gate (equation 2) and passes the head on (equation 3). With

        x, gate, head = features[..., :width], features[..., width : 2 * width], features[..., 2 * width :]

    the result is

        out[..., :width] = gate * ((S / r) x),    S_ij = y_i · y_j,    out[..., width:] = head

        "l1":     y_i = x_i / max(norm(x_i), eps),         r_i = max(sum_j |S_ij|, eps)    (the published models)
        "sum":    y_i = x_i / sqrt(sum(x_i²) + eps),       r_i = sum_j S_ij + eps          (the paper)

    All rows of a window see all. Norms, sums and r are float32 (float64 where the features are), under autocast too;
    products are of the dtype of the features, which are read in place where the values of a row lie side by side. The
    (C, C) weights never exist for all windows at once, whatever their number, nor are they kept for the backward pass,
    which keeps the features alone. What their dtype cannot hold of the gradient of a row of zeros is clamped.

    Args:
        features: C rows of W windows, (W, C, F), C at least 1.
        width: of x and of the gate, from 1 to F / 2.
        normalization: `"l1"` or `"sum"`.
        eps: at least 1e-20, or float32 could not divide by it.
        inplace: write the result over the gate, so that nothing is copied; not where autograd would have to record it.
        backend: `"auto"`, `"triton"`, `"eager"` or `"reference"` (everything in the dtype of the features).

    Returns:
        out (W, C, F - width) in the dtype of the features; with `inplace` it is features[..., width:].

    Raises:
        ValueError: where a shape, a dtype or an option does not fit, or the features cannot be written in place,
            before any work.
    """
    _check(features, width, normalization, eps, inplace)
    backend = choose_backend("dynamic_mixing", backend, BACKENDS, features)
    if backend == "reference":
        out = dynamic_mixing_reference(features, width, normalization, eps)
        if not inplace:
            return out
        features[..., width : 2 * width] = out[..., :width]
    elif inplace:
        _dynamic_mixing_(features, width, normalization, eps, backend)
    else:
        return _dynamic_mixing(features, width, normalization, eps, backend)
    return features[..., width:]


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
    if inplace and torch.is_grad_enabled() and features.requires_grad:
        raise ValueError("`inplace=True`: autograd has to record what `features` requires.")
    if inplace and (features.stride(2) != 1 or 0 in features.stride()):
        raise ValueError(
            f"`inplace=True`: the values of a row must lie side by side, each row in its own place; got strides "
            f"{features.stride()}."
        )

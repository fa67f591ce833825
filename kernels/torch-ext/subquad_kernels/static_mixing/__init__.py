"""The static layer of Avey-B: every row of a window reads all of them, weighted by learned numbers alone."""

import torch

from ..backend import choose_backend, custom_op, dispatch, without_autocast
from .eager import static_mixing_eager, static_mixing_eager_backward
from .reference import static_mixing_reference


BACKENDS = ("eager", "reference", "triton")


def _mix(features, v, width, out, backend):
    """Writes gate * (v x) to `out`, which may be the gate."""

    def triton():
        from .triton_kernels import static_mixing_triton

        static_mixing_triton(features, v, width, out)

    def eager():
        with without_autocast(features):
            static_mixing_eager(features, v, width, out)

    dispatch("static_mixing", backend, features, triton, eager)


@custom_op("static_mixing", mutates_args=())
def _static_mixing(features: torch.Tensor, v: torch.Tensor, width: int, backend: str) -> torch.Tensor:
    out = features.new_empty(*features.shape[:2], features.shape[2] - width)
    _mix(features, v, width, out[..., :width], backend)
    out[..., width:] = features[..., 2 * width :]
    return out


@_static_mixing.register_fake
def _(features, v, width, backend):
    return features.new_empty(*features.shape[:2], features.shape[2] - width)


@custom_op("static_mixing_backward", mutates_args=())
def _static_mixing_backward(
    grad: torch.Tensor, features: torch.Tensor, v: torch.Tensor, width: int, backend: str
) -> list[torch.Tensor]:
    def triton():
        from .triton_kernels import static_mixing_triton_backward

        return static_mixing_triton_backward(grad, features, v, width)

    def eager():
        with without_autocast(features):
            return static_mixing_eager_backward(grad, features, v, width)

    return dispatch("static_mixing", backend, features, triton, eager)


@_static_mixing_backward.register_fake
def _(grad, features, v, width, backend):
    return [features.new_empty(features.shape), v.new_empty(v.shape)]


def _setup_context(ctx, inputs, output):
    features, v, ctx.width, ctx.backend = inputs
    ctx.save_for_backward(features, v)


def _backward(ctx, grad):
    return (*_static_mixing_backward(grad, *ctx.saved_tensors, ctx.width, ctx.backend), None, None)


_static_mixing.register_autograd(_backward, setup_context=_setup_context)


@custom_op("static_mixing_", mutates_args=("features",))
def _static_mixing_(features: torch.Tensor, v: torch.Tensor, width: int, backend: str) -> None:
    _mix(features, v, width, features[..., width : 2 * width], backend)


@_static_mixing_.register_fake
def _(features, v, width, backend):
    return None


def static_mixing(
    features: torch.Tensor,
    v: torch.Tensor,
    width: int,
    *,
    inplace: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """
    Mixes the rows of each window by learned weights, gates the result and bypasses the head (equations 4, 2 and 3 of
    "Avey-B", without activation and bias):

        out = [gate * (v x), head],    features = [x, gate, head]

    where x and gate have `width` columns. Products are of the dtype of features, sums are float32 (float64 where
    features are), under autocast too. The backward pass keeps features and v alone.

    Args:
        features: C rows of W windows, (W, C, F) with F at least 2 * width. Read in place where the values of a row lie
            side by side.
        v: learned weights, (C, C); cast to the dtype of features.
        width: columns of x, at least 1.
        inplace: write over the gate in place of making a new tensor. For where no gradient is asked for.
        backend: `"auto"`, `"triton"`, `"eager"` or `"reference"` (everything in the dtype of the inputs).

    Returns:
        out (W, C, F - width) in the dtype of features; `features[..., width:]` itself where `inplace`.

    Raises:
        ValueError: where a shape, a dtype or a device does not fit, and where `inplace` meets gradients, or rows that
            overlap or do not lie side by side; before any work.
    """
    _check(features, v, width)
    backend = choose_backend("static_mixing", backend, BACKENDS, features)
    if inplace:
        _check_inplace(features, v)
        if backend == "reference":
            features[..., width:] = static_mixing_reference(features, v, width)
        else:
            _static_mixing_(features, v, width, backend)
        return features[..., width:]
    if backend == "reference":
        return static_mixing_reference(features, v, width).to(features.dtype)
    return _static_mixing(features, v, width, backend)


def _check(features, v, width):
    if features.dim() != 3 or features.shape[1] == 0 or features.shape[2] < 2:
        raise ValueError(f"`features` must be (windows, rows >= 1, features >= 2), got {tuple(features.shape)}.")
    rows = features.shape[1]
    if v.shape != (rows, rows):
        raise ValueError(f"`v` must have shape {(rows, rows)}, got {tuple(v.shape)}.")
    half = features.shape[2] // 2
    if not isinstance(width, int) or not 1 <= width <= half:
        raise ValueError(f"`width` must be an integer from 1 to {half}, half the columns of `features`, got {width}.")
    for name, tensor in (("features", features), ("v", v)):
        if not tensor.is_floating_point():
            raise ValueError(f"`{name}` must be floating point, got {tensor.dtype}.")
        if tensor.device != features.device:
            raise ValueError(f"`{name}` is on {tensor.device}, `features` on {features.device}.")


def _check_inplace(features, v):
    if torch.is_grad_enabled() and (features.requires_grad or v.requires_grad):
        raise ValueError("`inplace=True` overwrites what the backward pass would need, got tensors with gradients.")
    if features.stride(-1) != 1 or 0 in features.stride():
        raise ValueError(
            "`inplace=True` needs `features` with rows apart and the values of a row side by side, got strides "
            f"{features.stride()}."
        )

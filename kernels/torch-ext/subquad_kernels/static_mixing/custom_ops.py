"""The static layer as custom operators: with its backward pass, and in place."""

import torch

from ..registration import custom_op, register_backward
from .eager import static_mixing_eager, static_mixing_eager_backward


def _output_with_head(features: torch.Tensor, width: int) -> torch.Tensor:
    """The result (W, C, F - width), of which the first `width` columns are still to be written."""
    out = features.new_empty(*features.shape[:2], features.shape[2] - width)
    out[..., width:] = features[..., 2 * width :]
    return out


def _eager(features: torch.Tensor, v: torch.Tensor, width: int) -> torch.Tensor:
    out = _output_with_head(features, width)
    static_mixing_eager(features, v, width, out[..., :width])
    return out


def _eager_inplace(features: torch.Tensor, v: torch.Tensor, width: int) -> None:
    static_mixing_eager(features, v, width, features[..., width : 2 * width])


def _triton(features, v, width):
    from .triton_kernels import static_mixing_triton

    out = _output_with_head(features, width)
    static_mixing_triton(features, v, width, out[..., :width])
    return out


def _triton_inplace(features, v, width):
    from .triton_kernels import static_mixing_triton

    static_mixing_triton(features, v, width, features[..., width : 2 * width])


def _triton_backward(*inputs):
    from .triton_kernels import static_mixing_triton_backward

    return static_mixing_triton_backward(*inputs)


def _fake(features, v, width):
    return features.new_empty(*features.shape[:2], features.shape[2] - width)


_static_mixing = custom_op("static_mixing", eager=_eager, triton=_triton, fake=_fake)
_static_mixing_backward = register_backward(
    "static_mixing", _static_mixing, eager=static_mixing_eager_backward, triton=_triton_backward, gradients=2
)
_static_mixing_ = custom_op(
    "static_mixing_",
    eager=_eager_inplace,
    triton=_triton_inplace,
    fake=lambda features, v, width: None,
    mutates_args=("features",),
)

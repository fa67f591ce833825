"""The dynamic layer as custom operators: with its backward pass, and in place."""

import torch

from ..registration import custom_op, register_backward
from .eager import dynamic_mixing_eager, dynamic_mixing_eager_backward


def _output_with_head(features: torch.Tensor, width: int) -> torch.Tensor:
    """The result (W, C, F - width), of which the first `width` columns are still to be written."""
    out = features.new_empty(*features.shape[:2], features.shape[2] - width)
    out[..., width:] = features[..., 2 * width :]
    return out


def _eager(features: torch.Tensor, width: int, normalization: str, eps: float) -> torch.Tensor:
    out = _output_with_head(features, width)
    dynamic_mixing_eager(out[..., :width], features, width, normalization, eps)
    return out


def _eager_inplace(features: torch.Tensor, width: int, normalization: str, eps: float) -> None:
    dynamic_mixing_eager(features[..., width : 2 * width], features, width, normalization, eps)


def _triton(features, width, normalization, eps):
    from .triton_kernels import dynamic_mixing_triton

    out = _output_with_head(features, width)
    dynamic_mixing_triton(out[..., :width], features, width, normalization, eps)
    return out


def _triton_inplace(features, width, normalization, eps):
    from .triton_kernels import dynamic_mixing_triton

    dynamic_mixing_triton(features[..., width : 2 * width], features, width, normalization, eps)


def _triton_backward(*inputs):
    from .triton_kernels import dynamic_mixing_triton_backward

    return [dynamic_mixing_triton_backward(*inputs)]


def _fake(features, width, normalization, eps):
    return features.new_empty(*features.shape[:2], features.shape[2] - width)


_dynamic_mixing = custom_op("dynamic_mixing", eager=_eager, triton=_triton, fake=_fake)
_dynamic_mixing_backward = register_backward(
    "dynamic_mixing", _dynamic_mixing, eager=dynamic_mixing_eager_backward, triton=_triton_backward, gradients=1
)
_dynamic_mixing_ = custom_op(
    "dynamic_mixing_",
    eager=_eager_inplace,
    triton=_triton_inplace,
    fake=lambda features, width, normalization, eps: None,
    mutates_args=("features",),
)

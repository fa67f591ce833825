"""The dynamic layer as custom operators: out of place and in place."""

import torch

from ..custom_ops import custom_op
from .eager import dynamic_mixing_eager, dynamic_mixing_eager_backward


def _new(mix, features, width, *options):
    out = _fake(features, width, *options)
    mix(out[..., :width], features, width, *options)
    out[..., width:] = features[..., 2 * width :]
    return out


def _inplace(mix, features, width, *options):
    mix(features[..., width : 2 * width], features, width, *options)


def _eager(features: torch.Tensor, width: int, normalization: str, eps: float) -> torch.Tensor:
    return _new(dynamic_mixing_eager, features, width, normalization, eps)


def _eager_inplace(features: torch.Tensor, width: int, normalization: str, eps: float) -> None:
    _inplace(dynamic_mixing_eager, features, width, normalization, eps)


def _triton():
    from .triton_kernels import dynamic_mixing_triton, dynamic_mixing_triton_backward

    return lambda *inputs: _new(dynamic_mixing_triton, *inputs), dynamic_mixing_triton_backward


def _triton_inplace():
    from .triton_kernels import dynamic_mixing_triton

    return (lambda *inputs: _inplace(dynamic_mixing_triton, *inputs),)


def _fake(features, width, normalization, eps):
    return features.new_empty(*features.shape[:2], features.shape[2] - width)


_dynamic_mixing = custom_op(
    "dynamic_mixing",
    eager=_eager,
    eager_backward=dynamic_mixing_eager_backward,
    triton=_triton,
    fake=_fake,
    gradients=1,
)
_dynamic_mixing_ = custom_op(
    "dynamic_mixing_",
    eager=_eager_inplace,
    triton=_triton_inplace,
    fake=lambda *inputs: None,
    mutates_args=("features",),
)

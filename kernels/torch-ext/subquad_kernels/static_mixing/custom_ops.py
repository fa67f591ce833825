"""The static layer as custom operators: out of place and in place."""

import torch

from ..custom_ops import custom_op
from .eager import static_mixing_eager, static_mixing_eager_backward


def _new(mix, features, v, width):
    out = _fake(features, v, width)
    mix(features, v, width, out[..., :width])
    out[..., width:] = features[..., 2 * width :]
    return out


def _inplace(mix, features, v, width):
    mix(features, v, width, features[..., width : 2 * width])


def _eager(features: torch.Tensor, v: torch.Tensor, width: int) -> torch.Tensor:
    return _new(static_mixing_eager, features, v, width)


def _eager_inplace(features: torch.Tensor, v: torch.Tensor, width: int) -> None:
    _inplace(static_mixing_eager, features, v, width)


def _triton():
    from .triton_kernels import static_mixing_triton, static_mixing_triton_backward

    return lambda *inputs: _new(static_mixing_triton, *inputs), static_mixing_triton_backward


def _triton_inplace():
    from .triton_kernels import static_mixing_triton

    return (lambda *inputs: _inplace(static_mixing_triton, *inputs),)


def _fake(features, v, width):
    return features.new_empty(*features.shape[:2], features.shape[2] - width)


_static_mixing = custom_op(
    "static_mixing",
    eager=_eager,
    eager_backward=static_mixing_eager_backward,
    triton=_triton,
    fake=_fake,
    gradients=2,
)
_static_mixing_ = custom_op(
    "static_mixing_",
    eager=_eager_inplace,
    triton=_triton_inplace,
    fake=lambda *inputs: None,
    mutates_args=("features",),
)

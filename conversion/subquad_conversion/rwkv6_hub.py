"""Finch (RWKV-6.0) as published on the Hub: model type `rwkv6`, the names that this package keeps."""

from .formats import Tensors
from .rwkv_layout import rwkv_format


def matches(tensors: Tensors) -> bool:
    return "rwkv.blocks.0.attention.time_maa_x" in tensors


FORMAT = rwkv_format("rwkv6-hub", "Finch (RWKV-6.0), Hub model", "rwkv6", matches, str)

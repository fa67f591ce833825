"""Finch (RWKV-6.0) as the trainer saves it: one `.pth` whose names start with `emb`, `blocks`, `ln_out`, `head`."""

from .formats import Tensors
from .rwkv_layout import rwkv_format, trainer_name


def matches(tensors: Tensors) -> bool:
    return "blocks.0.att.time_maa_x" in tensors


FORMAT = rwkv_format("rwkv6-trainer", "Finch (RWKV-6.0), trainer checkpoint", "rwkv6", matches, trainer_name)

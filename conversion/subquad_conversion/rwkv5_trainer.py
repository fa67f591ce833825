"""Eagle (RWKV-5.2) as the trainer saves it: one `.pth` whose names start with `emb`, `blocks`, `ln_out`, `head`."""

import re

from .formats import Tensors
from .rwkv_layout import has_gate, has_vector_decay, rwkv_format, trainer_name


ATTENTION = "blocks.0.att."
MIXES = {"k": "key", "v": "value", "r": "receptance", "g": "gate"}


def matches(tensors: Tensors) -> bool:
    newer = f"{ATTENTION}time_maa_x" in tensors
    return has_gate(tensors, ATTENTION) and has_vector_decay(tensors, ATTENTION) and not newer


def canonical_name(name: str) -> str:
    return re.sub(r"(?<=\.time_mix_)[kvrg]$", lambda mix: MIXES[mix[0]], trainer_name(name))


FORMAT = rwkv_format("rwkv5-trainer", "Eagle (RWKV-5.2), trainer checkpoint", "rwkv5", matches, canonical_name)

"""Eagle (RWKV-5.2) as published on the Hub: model type `rwkv5`, the names that this package keeps."""

from .formats import Tensors
from .rwkv_layout import has_gate, has_vector_decay, rwkv_format


ATTENTION = "rwkv.blocks.0.attention."


def matches(tensors: Tensors) -> bool:
    newer = f"{ATTENTION}time_maa_x" in tensors
    return has_gate(tensors, ATTENTION) and has_vector_decay(tensors, ATTENTION) and not newer


FORMAT = rwkv_format("rwkv5-hub", "Eagle (RWKV-5.2), Hub model", "rwkv5", matches, str)

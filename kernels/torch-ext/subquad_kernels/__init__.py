"""Operators of sub-quadratic language models, one folder each. Only torch is required."""

from . import c as c
from . import layers as layers
from .cema import cema
from .chunk_attention import chunk_attention, chunk_attention_step
from .contextualizer import contextualizer
from .delta_wkv import delta_keys, delta_wkv, delta_wkv_state
from .dynamic_mixing import dynamic_mixing
from .group_norm_gate import group_norm_gate
from .int4_linear import int4_linear, quantize_groups
from .int8_linear import int8_linear, quantize_rows
from .linear import linear, matmul
from .low_rank import low_rank
from .slot_memory import slot_memory, slot_memory_state
from .slot_routing import slot_routing
from .split_ranker import maxsim, split_ranker
from .static_mixing import static_mixing
from .timestep_decay_norm import timestep_decay_norm
from .token_shift import token_shift
from .wkv import wkv, wkv_state
from .working_memory import working_memory


__all__ = [
    "cema",
    "chunk_attention",
    "chunk_attention_step",
    "contextualizer",
    "delta_keys",
    "delta_wkv",
    "delta_wkv_state",
    "dynamic_mixing",
    "group_norm_gate",
    "int4_linear",
    "int8_linear",
    "linear",
    "low_rank",
    "matmul",
    "maxsim",
    "quantize_groups",
    "quantize_rows",
    "slot_memory",
    "slot_memory_state",
    "slot_routing",
    "split_ranker",
    "static_mixing",
    "timestep_decay_norm",
    "token_shift",
    "wkv",
    "wkv_state",
    "working_memory",
]

"""Operators of sub-quadratic language models: one folder an operator, torch alone required."""

from .contextualizer import contextualizer
from .group_norm_gate import group_norm_gate
from .linear import linear
from .split_ranker import maxsim, split_ranker
from .token_shift import token_shift
from .wkv import gated_wkv, wkv, wkv_state


__all__ = [
    "contextualizer",
    "gated_wkv",
    "group_norm_gate",
    "linear",
    "maxsim",
    "split_ranker",
    "token_shift",
    "wkv",
    "wkv_state",
]

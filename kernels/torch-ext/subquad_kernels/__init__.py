"""Operators of sub-quadratic language models: one folder an operator, torch alone required."""

from .group_norm_gate import group_norm_gate
from .linear import linear
from .token_shift import token_shift
from .wkv import gated_wkv, wkv, wkv_state


__all__ = ["gated_wkv", "group_norm_gate", "linear", "token_shift", "wkv", "wkv_state"]

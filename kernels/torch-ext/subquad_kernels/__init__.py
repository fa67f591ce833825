"""Operators of sub-quadratic language models: one folder an operator, torch alone required."""

from .linear import linear
from .wkv import wkv, wkv_state


__all__ = ["linear", "wkv", "wkv_state"]

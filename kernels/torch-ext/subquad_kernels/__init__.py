"""Operators of sub-quadratic language models: one folder an operator, torch alone required."""

from .wkv import wkv, wkv_state


__all__ = ["wkv", "wkv_state"]

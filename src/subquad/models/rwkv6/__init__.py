"""Finch (RWKV-6)."""

"""Eagle (RWKV-5)."""

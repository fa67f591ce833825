"""VisualRWKV: images in front of Eagle (RWKV-5) and Finch (RWKV-6)."""

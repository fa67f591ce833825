"""Avey-B: Avey made an encoder, with static and dynamic layers and a compressor of what the ranker retrieves."""

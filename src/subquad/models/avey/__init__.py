"""Avey: a ranker that retrieves splits of the sequence, and a neural processor that contextualises them."""

"""Building blocks shared by the forward passes of all models."""

"""One token at a time."""

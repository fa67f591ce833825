"""Sub-quadratic language models as ordinary Hugging Face models."""

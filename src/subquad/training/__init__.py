"""Training: tuned states, optimizer, losses and adapters."""

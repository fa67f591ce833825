"""What every forward pass is made of."""

"""How plans meet PyTorch."""

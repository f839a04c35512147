"""Runs plans with PyTorch: operator by operator, or on the modules of a network; measures plans and this host."""

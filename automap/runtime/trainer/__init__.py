"""Runs a plan on the modules of a PyTorch model."""

"""Runs a plan on the modules of a PyTorch model."""

from automap.runtime.trainer.parallelize import parallelize

__all__ = ["parallelize"]

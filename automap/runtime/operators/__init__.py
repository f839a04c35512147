"""Torch functions for the kinds of `ir.operators`, a file a family, differentiable where the kind is."""

from automap.runtime.operators import (  # noqa: F401  (each module registers its kinds)
    attention,
    constant,
    contraction,
    elementwise,
    embedding,
    experts,
    loss,
    normalization,
    pooling,
    recurrent,
    reduction,
    resize,
    scans,
    shape,
)
from automap.runtime.operators.base import FUNCTIONS, Use

__all__ = ["FUNCTIONS", "Use"]

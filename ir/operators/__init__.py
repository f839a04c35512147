"""One table of operator kinds, a file a family: factor rule, shapes, FLOPs, traffic, saved tensors."""

from ir.operators import (  # noqa: F401  (each module registers its kinds)
    attention,
    constant,
    contraction,
    elementwise,
    embedding,
    experts,
    loss,
    measured,
    normalization,
    pooling,
    reduction,
    shape,
)
from ir.operators.base import KINDS, VIEW_KINDS, BakedBatch, Built, MissingBatch, Unsupported, Value, make_operator

__all__ = ["KINDS", "VIEW_KINDS", "BakedBatch", "Built", "MissingBatch", "Unsupported", "Value", "make_operator"]

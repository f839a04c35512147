"""The table of operator kinds, one file per family of operators.

An entry states the factor rule (written as one line), the output shapes, the FLOPs, the memory traffic and the tensors
that are saved for the backward pass.
"""

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
    scans,
    shape,
)
from ir.operators.base import KINDS, AcrossSamples, BakedBatch, MissingBatch, SortedSamples, Unsupported, Usage, Value
from ir.operators.make import Built, make_operator

__all__ = [
    "KINDS", "AcrossSamples", "BakedBatch", "Built", "MissingBatch", "SortedSamples", "Unsupported", "Usage", "Value",
    "make_operator",
]  # fmt: skip

"""PipelineEnv: the pipeline paradigm. The agent decides stages, cuts, virtual stages, recompute and ZeRO.

Operators are sharded in the Megatron manner of `automap.templates` for the mesh that it chose.
"""

from __future__ import annotations

import numpy as np

from automap.meshes import Shape
from automap.prefix import BoundTable
from automap.price.walk import LATER
from automap.space import PlanSpace, Slot, Values
from automap.templates import megatron_signatures
from envs.decision import Decisions, Ints, PlanEnv


class PipelineDecisions(Decisions):
    """Everything but the signatures."""

    def asks(self, slot: Slot) -> bool:
        """See `Decisions`."""
        return slot.kind != "signature"

    def preferred(self) -> Ints:
        """Signatures wait for the shape."""
        first = self.space.first_signature
        return np.array([*[-1] * first, *[LATER] * (len(self.space.slots) - first)], dtype=np.int64)

    def complete(self, head: Values, shape: Shape) -> Values:
        """Megatron's signatures."""
        return megatron_signatures(self.space, shape, head, sequence_parallel=False)


class PipelineEnv(PlanEnv):
    """Decides the pipeline."""

    def __init__(self, space: PlanSpace, table: BoundTable | None = None, *, reference_s: float | None = None) -> None:
        super().__init__(PipelineDecisions(space), table, reference_s=reference_s)

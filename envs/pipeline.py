"""PipelineEnv: the pipeline paradigm. The agent decides stages, cuts, virtual stages, recomputation and ZeRO.

Operators are sharded by the Megatron pattern of `automap.space.templates` on the mesh that the agent has chosen.
"""

from __future__ import annotations

import numpy as np

from automap.bounds.kernels.step_many import LATER
from automap.bounds.partial_plans import BoundTable
from automap.space.shape import Shape
from automap.space.space import PlanSpace, Slot, Values
from automap.space.templates import megatron_signatures, meshes_of
from envs.decision import Decisions, Ints, PlanEnv


class PipelineDecisions(Decisions):
    """Everything but the signatures."""

    def __init__(self, space: PlanSpace) -> None:
        super().__init__(space)
        self._signatures: dict[tuple[int, ...], Values] = {}

    def decides(self, slot: Slot) -> bool:
        """See `Decisions`."""
        return slot.kind != "signature"

    def preferred(self) -> Ints:
        """Signatures depend on the shape and are decided later."""
        first = self.space.first_signature
        return np.array([*[-1] * first, *[LATER] * (len(self.space.slots) - first)], dtype=np.int64)

    def complete(self, head: Values, shape: Shape) -> Values:
        """The signatures of the Megatron pattern."""
        meshes = meshes_of(self.space, shape, head)
        if meshes not in self._signatures:
            full = megatron_signatures(self.space, shape, head, sequence_parallel=False)
            self._signatures[meshes] = full[len(head) :]
        return (*head, *self._signatures[meshes])


class PipelineEnv(PlanEnv):
    """Decides the pipeline."""

    def __init__(self, space: PlanSpace, table: BoundTable | None = None, *, reference_s: float | None = None) -> None:
        super().__init__(PipelineDecisions(space), table, reference_s=reference_s)

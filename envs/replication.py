"""ReplicationEnv: the data-parallel paradigm. The agent decides replicas, mesh, micro-batches, recomputation and ZeRO.

There are no pipeline stages unless the hints require them; operators are sharded as in `envs.pipeline`.
"""

from __future__ import annotations

from automap.bounds.partial_plans import BoundTable
from automap.space.space import PlanSpace, Slot
from envs.decision import Ints, PlanEnv
from envs.pipeline import PipelineDecisions


class ReplicationDecisions(PipelineDecisions):
    """Everything but pipeline stages and signatures."""

    def decides(self, slot: Slot) -> bool:
        """See `Decisions`."""
        return slot.kind not in ("pp", "signature")

    def preferred(self) -> Ints:
        """One pipeline stage."""
        values = super().preferred()
        values[0] = 0
        return values


class ReplicationEnv(PlanEnv):
    """Decides how the whole model is replicated."""

    def __init__(self, space: PlanSpace, table: BoundTable | None = None, *, reference_s: float | None = None) -> None:
        super().__init__(ReplicationDecisions(space), table, reference_s=reference_s)

"""ReplicationEnv: the data-parallel paradigm. The agent decides replicas, mesh, micro-batches, recomputation and ZeRO.

There are no pipeline stages unless the hints require them; operators are sharded as in the best template for the mesh.
"""

from __future__ import annotations

from automap.bounds.partial_plans import BoundTable
from automap.problem import Problem
from automap.space.space import PlanSpace, Slot
from envs.decision import Decisions, Floats, Ints, PlanEnv, space_of


class ReplicationDecisions(Decisions):
    """Decides everything but pipeline stages and signatures."""

    def decides(self, slot: Slot) -> bool:
        """See `Decisions`."""
        return slot.kind not in ("pp", "signature")

    def known(self, values: Ints, prices: Floats) -> tuple[Ints, Floats]:
        """The templates with the fewest pipeline stages."""
        fewest = values[:, self.space.first.pp] == values[:, self.space.first.pp].min()
        return values[fewest], prices[fewest]


class ReplicationEnv(PlanEnv):
    """Decides how the whole model is replicated."""

    def __init__(self, problem: Problem | PlanSpace, table: BoundTable | None = None) -> None:
        super().__init__(ReplicationDecisions(space_of(problem)), table)

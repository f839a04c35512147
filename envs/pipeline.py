"""PipelineEnv: the pipeline paradigm. The agent decides stages, cuts, virtual stages, recomputation and ZeRO.

Operators are sharded as in the best template for the mesh that the agent has chosen.
"""

from __future__ import annotations

from automap.bounds.partial_plans import BoundTable
from automap.problem import Problem
from automap.space.space import PlanSpace, Slot
from envs.decision import Decisions, PlanEnv, space_of


class PipelineDecisions(Decisions):
    """Decides everything but the signatures."""

    def decides(self, slot: Slot) -> bool:
        """See `Decisions`."""
        return slot.kind != "signature"


class PipelineEnv(PlanEnv):
    """Decides the pipeline."""

    def __init__(self, problem: Problem | PlanSpace, table: BoundTable | None = None) -> None:
        super().__init__(PipelineDecisions(space_of(problem)), table)

"""HybridEnv: the agent decides the whole plan: shape, cuts, recomputation, ZeRO, then each influential linkage group.

In a model with more than `MAX_GROUPS` linkage groups only the most influential ones are decided; the others follow the
best known plan (`envs.pruning.most_influential`).
"""

from __future__ import annotations

from automap.bounds.partial_plans import BoundTable
from automap.problem import Problem
from automap.space.space import PlanSpace, Slot
from envs.decision import Decisions, PlanEnv, space_of
from envs.pruning import most_influential

MAX_GROUPS = 48
"""Number of linkage groups that an episode decides (assumed); an episode then has fewer than 200 decisions."""


class HybridDecisions(Decisions):
    """Decides everything but the signatures of groups of little influence."""

    def __init__(self, space: PlanSpace) -> None:
        super().__init__(space)
        self.groups = most_influential(space, MAX_GROUPS)

    def decides(self, slot: Slot) -> bool:
        """See `Decisions`."""
        return slot.kind != "signature" or (slot.unit_type, slot.group) in self.groups


class HybridEnv(PlanEnv):
    """Decides the whole plan."""

    def __init__(self, problem: Problem | PlanSpace, table: BoundTable | None = None) -> None:
        super().__init__(HybridDecisions(space_of(problem)), table)

"""ShardingEnv: the operator-partition paradigm. The shape is given; the agent shards one linkage group a step."""

from __future__ import annotations

import numpy as np

from automap.bounds.partial_plans import BoundTable
from automap.space.space import PlanSpace, Slot, Values
from envs.decision import Decisions, Ints, PlanEnv


class ShardingDecisions(Decisions):
    """The signatures of all linkage groups on every mesh axis, in topological order (docs/search.md says why)."""

    def __init__(self, space: PlanSpace, skeleton: Values) -> None:
        """Takes the skeleton.

        Args:
            space: plan space of the problem.
            skeleton: values of all slots before the first signature.
        """
        super().__init__(space)
        self.skeleton = skeleton

    def decides(self, slot: Slot) -> bool:
        """See `Decisions`."""
        return slot.kind == "signature"

    def preferred(self) -> Ints:
        """The values of the skeleton."""
        return np.array([*self.skeleton, *[-1] * (len(self.space.slots) - len(self.skeleton))], dtype=np.int64)


class ShardingEnv(PlanEnv):
    """Decides the signatures of a given shape."""

    def __init__(
        self, space: PlanSpace, skeleton: Values, table: BoundTable | None = None, *, reference_s: float | None = None
    ) -> None:
        super().__init__(ShardingDecisions(space, skeleton), table, reference_s=reference_s)

"""ShardingEnv: the operator-partition paradigm. The shape is given; the agent shards one linkage group a step."""

from __future__ import annotations

from automap.prefix import BoundTable, Prefix
from automap.space import PlanSpace, Slot, Values
from envs.decision import PlanEnv


class ShardingEnv(PlanEnv):
    """Decides the signatures of all linkage groups on every mesh axis, in topological order."""

    def __init__(
        self, space: PlanSpace, frame: Values, table: BoundTable | None = None, *, reference_s: float | None = None
    ) -> None:
        """Builds the environment.

        Args:
            space: of the problem.
            frame: values of all slots before the first signature.
            table: bounds of the space.
            reference_s: see `PlanEnv`.
        """
        super().__init__(space, table, reference_s=reference_s)
        self.frame = frame

    def decides(self, slot: Slot) -> bool:
        """Signatures only."""
        return slot.kind == "signature"

    def default(self, prefix: Prefix) -> int:
        """The frame's value."""
        return self.frame[prefix.position]

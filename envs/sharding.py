"""ShardingEnv: the operator-partition paradigm. The shape is given; the agent shards one linkage group a step."""

from __future__ import annotations

import numpy as np

from automap.bounds.known_plans import worth_s
from automap.bounds.partial_plans import BoundTable
from automap.problem import Problem
from automap.space.space import PlanSpace, Slot, Values
from automap.space.templates import megatron_signatures
from envs.decision import Decisions, Floats, Ints, PlanEnv, space_of


class ShardingDecisions(Decisions):
    """The signatures of all linkage groups on every mesh axis, in topological order (docs/searchers.md says why)."""

    def __init__(self, space: PlanSpace, skeleton: Values | None = None) -> None:
        """Takes the skeleton.

        Args:
            space: plan space of the problem.
            skeleton: values of all slots before the first signature; None = those of the best template.
        """
        super().__init__(space)
        self.skeleton = skeleton

    def decides(self, slot: Slot) -> bool:
        """See `Decisions`."""
        return slot.kind == "signature"

    def known(self, values: Ints, prices: Floats) -> tuple[Ints, Floats]:
        """The templates of the skeleton, or its signatures in Megatron-LM's manner where it is not a template's."""
        skeleton = self.skeleton
        if skeleton is None:
            worth = worth_s(prices, float(prices[:, 0].max()))
            skeleton = tuple(values[worth.argmin(), : self.space.first.signature].tolist())
        same = (values[:, : len(skeleton)] == np.array(skeleton)).all(axis=1)
        if same.any():
            return values[same], prices[same]
        shape = self.space.shape(skeleton)
        found = np.array([megatron_signatures(self.space, shape, skeleton, sequence_parallel=False)])
        return found, self.space.price(found)


class ShardingEnv(PlanEnv):
    """Decides the signatures of a given shape."""

    def __init__(
        self, problem: Problem | PlanSpace, skeleton: Values | None = None, table: BoundTable | None = None
    ) -> None:
        super().__init__(ShardingDecisions(space_of(problem), skeleton), table)

"""Solved skeletons: what elimination makes of the skeletons that a network decides while it learns.

The worth of a skeleton is that of the best plan with it, or with one next to it, which the search finds just as well
(`agents.planners.skeletons.SkeletonSearch.descend`). Units: seconds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from agents.incumbent import Incumbent
from agents.planners.elimination import propose
from agents.planners.linearization import Worth, worth_of
from agents.planners.skeletons import SkeletonSearch
from agents.sampling.expert import Grid
from agents.searcher import Budget
from automap.bounds.known_plans import worth_s
from automap.space.space import PlanSpace, Values


class Solved(NamedTuple):
    """A plan with its price."""

    values: Values
    step_time_s: float
    overflow: float
    """Overflow of memory, as a share of a device's capacity; at most 0 where the plan fits."""

    @property
    def worth(self) -> Worth:
        """What sorts plans."""
        return worth_of(self.step_time_s, self.overflow)

    def worth_s(self, reference_s: float) -> float:
        """Step time as which it is rewarded, see `automap.bounds.known_plans.worth_s`."""
        return float(worth_s(np.array([[self.step_time_s, self.overflow]]), reference_s)[0])


class SolvedSkeletons:
    """The skeletons of one problem that have been solved."""

    def __init__(self, space: PlanSpace, known: Grid) -> None:
        """Begins with none.

        Args:
            space: plan space of the problem.
            known: plans with their prices; only skeletons near the best of these are cut anew a second time.
        """
        self._space = space
        self._search = SkeletonSearch(Incumbent(space, Budget(), searcher="elimination"), propose)
        best = int(np.where(known.prices[:, 1] <= 0.0, known.prices[:, 0], np.inf).argmin())
        self._search.incumbent.price(known.values[best : best + 1])
        self._solved: dict[Values, Solved] = {}

    def solve(self, values: Values) -> Solved:
        """The best plan that the skeleton of a plan leads to; no skeleton is solved twice."""
        skeleton = values[: self._space.first.signature]
        if skeleton not in self._solved:
            found = [values, self._search.descend(values)]
            prices = self._space.price(np.array(found)).tolist()
            solved = [Solved(plan, seconds, overflow) for plan, (seconds, overflow) in zip(found, prices, strict=True)]
            self._solved[skeleton] = min(solved, key=lambda one: one.worth)
        return self._solved[skeleton]

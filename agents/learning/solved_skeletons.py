"""Solved skeletons: episodes that decide only a skeleton are rewarded by the plan that a planner finds for it.

The skeleton of a plan is all its decisions before the first signature. The network is trained on such episodes
(`agents.learning.pretraining`), and a search has some of them (`agents.learning.exploration`).
"""

from __future__ import annotations

import numpy as np

from agents.incumbent import Incumbent
from agents.planners.chunk_moves import moved
from agents.planners.descents import descend
from agents.planners.elimination import propose
from agents.planners.linearization import worth_of
from agents.planners.skeletons import SkeletonSearch
from automap.space.space import Values


class SolvedSkeletons:
    """The skeletons of one problem that episodes have decided, and the plans to which solving them has led."""

    def __init__(self, incumbent: Incumbent) -> None:
        """Begins without any.

        Args:
            incumbent: prices and counts the plans, and keeps the best.
        """
        self._search = SkeletonSearch(incumbent, propose)
        self._led_to: dict[Values, Values] = {}

    def solve(self, values: Values) -> Values:
        """The plan that a descent finds from a plan that an episode has decided (`agents.planners.descents`); each
        skeleton is solved once.

        The plan that the episode has decided counts as an evaluation of the episode, not of the descent.

        If it is near the best plan of the search, units also move between its chunks, starting from equally many units
        in each chunk.
        """
        search = self._search
        skeleton = values[: search.space.first.signature]
        if skeleton not in self._led_to:
            search.allow(1)
            ((seconds, overflow),) = search.space.price(np.array([values])).tolist()
            found = descend(search, values, worth_of(seconds, overflow))
            if not search.incumbent.finished and search.is_near(found):
                other = moved(search.space, found, also_evenly=True)
                before, _ = search.best[found[: search.space.first.signature]]
                if other != found and min(search.price(np.array([other], dtype=np.int64)), default=before) < before:
                    found = other
            self._led_to[skeleton] = found
        return self._led_to[skeleton]

    def led_to(self, values: Values) -> Values | None:
        """The plan that was found for the skeleton of a plan; None if this skeleton has not been solved."""
        return self._led_to.get(values[: self._search.space.first.signature])

"""Solved skeletons: an episode that decides a skeleton alone is worth the plan that solving the skeleton leads to.

The network is trained on such episodes (`agents.learning.pretraining`). A search has them beside those that decide
whole plans (`agents.learning.exploration`). The skeleton of a plan is all that it decides before the first signature.
"""

from __future__ import annotations

import numpy as np

from agents.incumbent import Incumbent
from agents.planners.chunk_moves import moved
from agents.planners.descents import descend
from agents.planners.elimination import propose
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
        """The plan to which solving the skeleton of a plan leads (`descend`); each skeleton is solved once.

        If this is near the best plan of all, units are also divided among its chunks again, beginning with equally many
        units in each.
        """
        search = self._search
        skeleton = values[: search.space.first.signature]
        if skeleton not in self._led_to:
            search.allow(1)
            found = descend(search, values)
            if not search.incumbent.finished and search.is_near(found):
                plans = [found, moved(search.space, found, also_evenly=True)]
                worth = search.price(np.array(plans, dtype=np.int64))
                found = plans[worth.index(min(worth))]
            self._led_to[skeleton] = found
        return self._led_to[skeleton]

    def led_to(self, values: Values) -> Values | None:
        """The plan to which solving the skeleton of a plan has led; None if it has not been solved."""
        return self._led_to.get(values[: self._search.space.first.signature])

"""Effort of divisions: how long the programs that divide pipelines among unlike stages may go on.

Units: seconds since the start of a search, evaluations, entries of stage tables.
"""

from __future__ import annotations

import math

from agents.incumbent import Incumbent

FAR = 4.0
"""A pipeline at most this many times as slow as the best plan is not far from it (assumed)."""
LONGER = 3.0
"""Times as many seconds as `divide_quickly` is given if it finds no plan that is near the best one (assumed)."""
ENTRIES_AN_EVALUATION = 100_000
"""Entries of stage tables for each of these evaluations, at most (assumed). An entry takes about 100 ns, so that tables
take at most 10 ms for each evaluation. On 16 devices they have 12 million entries, which 120 evaluations allow."""


def leads(incumbent: Incumbent) -> bool:
    """Whether the best plan lies outside the space, so that what searches the space is behind."""
    return incumbent.least_s < incumbent.best_s


class Effort:
    """How much the tables of divisions may take. A budget in evaluations limits the number of their entries, so that it
    does not depend on the clock.

    Attributes:
        until_s: seconds since the start of the search after which no further setting is divided.
        last_s: the same while every plan so far is more than `FAR` times as slow as the best one: the numbers of
            micro-batches that were tried do not suit unlike stages.
        leading_s: the same while the best plan lies outside the space.
        entries: how many entries may still be computed, see `StageTable.entries`.
    """

    def __init__(self, incumbent: Incumbent, seconds: float, leading_s: float) -> None:
        left, self._incumbent = incumbent.left, incumbent
        self.until_s, self.last_s = incumbent.seconds + seconds, incumbent.seconds + LONGER * seconds
        self.leading_s = incumbent.seconds + leading_s
        self.entries = math.inf if left is None else float(ENTRIES_AN_EVALUATION * left)

    def is_spent(self, divided_s: float) -> bool:
        """Whether no further setting is divided; `divided_s` is the step time of the best plan so far of a division."""
        until_s = self.until_s if divided_s <= FAR * self._incumbent.least_s else self.last_s
        if leads(self._incumbent):
            until_s = max(until_s, self.leading_s)
        return self.entries <= 0.0 or self._incumbent.finished or self._incumbent.seconds >= until_s

"""How long the programs that divide pipelines among unlike stages may go on.

Units: seconds since the start of a search, evaluations, entries of stage tables.
"""

from __future__ import annotations

import math

from agents.incumbent import Incumbent

FAR = 4.0
"""A pipeline is far from the best plan if it takes more than this many times its step time (assumed)."""
LONGER = 3.0
"""Factor of the seconds that a division may take while it finds only plans that are far from the best one (assumed)."""
ENTRIES_AN_EVALUATION = 100_000
"""Largest number of entries of stage tables that are computed for each evaluation left in a budget (assumed). An entry
takes about 100 ns, so this is 10 ms for each evaluation. On 16 devices tables have 12 million entries, which 120
evaluations allow."""


def leads(incumbent: Incumbent) -> bool:
    """Whether the best plan so far lies outside the plan space."""
    return incumbent.least_s < incumbent.best_s


class Effort:
    """The limits of the time that divisions take. With a budget in evaluations they do not depend on the clock: the
    number of entries of their stage tables is limited instead.

    Attributes:
        until_s: seconds since the start of the search after which no further setting is begun.
        last_s: the same while every plan of the division is far from the best plan (`FAR`): other numbers of
            micro-batches may suit unlike stages better.
        leading_s: the same while the best plan lies outside the plan space.
        entries: number of entries that may still be computed, see `StageTable.entries`.
    """

    def __init__(self, incumbent: Incumbent, seconds: float, leading_s: float) -> None:
        left, self._incumbent = incumbent.left, incumbent
        self.until_s, self.last_s = incumbent.seconds + seconds, incumbent.seconds + LONGER * seconds
        self.leading_s = incumbent.seconds + leading_s
        self.entries = math.inf if left is None else float(ENTRIES_AN_EVALUATION * left)

    def is_spent(self, divided_s: float) -> bool:
        """Whether no further setting may be begun; `divided_s`: step time of the best plan of the division so far."""
        until_s = self.until_s if divided_s <= FAR * self._incumbent.least_s else self.last_s
        if leads(self._incumbent):
            until_s = max(until_s, self.leading_s)
        return self.entries <= 0.0 or self._incumbent.finished or self._incumbent.seconds >= until_s

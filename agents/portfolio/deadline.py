"""Deadline: when each of several searches must end, so that all of them, and the choice among their plans, end in time.

A search ends with plans that are priced in full, verified and compared. This takes some hundredths of a second on most
problems, and seconds on models with thousands of unlike operators. So the time that one plan takes is measured, and
searches get what a budget in seconds leaves after the end. Units: seconds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from agents.searcher import Budget
from automap.bounds.priced_templates import priced_so_far
from automap.price.estimate import annotate
from automap.space.space import PlanSpace
from automap.verify import Verifier

PLANS_AT_END = 2.5
"""Time of the end of one search, in multiples of the time of the first plan that is priced in full and verified
(assumed). On ten problems with 0.1 to 1 seconds for the first plan it was 1 to 3: further plans take less."""
SLACK_S = 0.25
"""Seconds by which the end may be late (assumed): nothing is kept for ends that take less, since a search of a second
finds better plans in this time."""
MOST = 0.5
"""Largest share of the seconds that are left which is kept for the end, and share of a budget after which the end is
not measured (assumed)."""


class Deadline:
    """The end of a budget in seconds; a budget in evaluations has none.

    Attributes:
        end_s: seconds that the end of one search takes.
    """

    def __init__(self, budget: Budget, clock: Callable[[], float]) -> None:
        """Begins the budget now.

        Args:
            budget: budget of all searches together.
            clock: returns the time in seconds.
        """
        self._budget, self._clock = budget, clock
        self._began = clock()
        self.end_s = 0.0

    @property
    def spent_s(self) -> float:
        """Seconds since the budget began."""
        return self._clock() - self._began

    def passed(self, share: float) -> bool:
        """Whether more than a share of the seconds is spent."""
        return self._budget.seconds is not None and self.spent_s > share * self._budget.seconds

    def measure(self, space: PlanSpace) -> None:
        """Measures the time of the end of a search with the template that is the best so far.

        If much of the budget is spent already, nothing is measured and kept, since the searches are short anyway.
        """
        if self._budget.seconds is None or self.passed(MOST):
            return
        values, prices = priced_so_far(space)
        if not len(values):
            return
        before_s = self.spent_s
        best = tuple(values[np.lexsort((prices[:, 0], np.maximum(prices[:, 1], 0.0)))[0]].tolist())
        plan = annotate(space.decode(best), space.lowered(best), space.evaluator)
        Verifier(space.problem).violations(plan)
        self.end_s = PLANS_AT_END * (self.spent_s - before_s)

    def kept_s(self, searches: int) -> float:
        """Seconds that are spent, and those that the end of some searches takes."""
        if self._budget.seconds is None:
            return self.spent_s
        left_s = max(0.0, self._budget.seconds - self.spent_s)
        return self.spent_s + min(self._ends_s(searches), MOST * left_s)

    def shortened(self, planned: Budget, searches: int) -> Budget | None:
        """The budget of one search that leaves time for the end of some searches, its own included.

        Args:
            planned: the budget that was planned for it.
            searches: number of searches whose end is still to come.

        Returns:
            The planned budget or a smaller one; None if no time is left.
        """
        if self._budget.seconds is None or planned.seconds is None:
            return planned
        left_s = self._budget.seconds - self.spent_s - self._ends_s(searches)
        return Budget(seconds=min(planned.seconds, left_s)) if left_s > 0.0 else None

    def _ends_s(self, searches: int) -> float:
        """Seconds that are kept for the end of some searches."""
        return max(0.0, searches * self.end_s - SLACK_S)

"""The spent and the remaining budget of a search, as a whole and for the present phase.

Units: seconds, evaluations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agents.searcher import Budget, ShouldStop


class Spending:
    """The time and the evaluations of a search.

    Attributes:
        budget: budget of the whole search.
        should_stop: whether the caller wants the search to end.
        charged: number of plans that count against the budget.
    """

    def __init__(
        self, budget: Budget, should_stop: ShouldStop, clock: Callable[[], float], began: float | None = None
    ) -> None:
        """Begins to spend a budget.

        Args:
            budget, should_stop: see the attributes.
            clock: returns the time in seconds.
            began: when the search began, by this clock; None = now.
        """
        self.budget = budget
        self.should_stop = should_stop
        self.charged = 0
        self._clock = clock
        self._start = clock() if began is None else began
        self._pause_s: float | None = None
        self._pause_at: int | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the start of the search."""
        return self._clock() - self._start

    @property
    def fraction(self) -> float:
        """Share of the budget that is spent, from 0 to 1."""
        spent = 0.0
        if self.budget.seconds is not None:
            spent = self.seconds / self.budget.seconds
        if self.budget.evaluations is not None:
            spent = max(spent, self.charged / self.budget.evaluations)
        return min(spent, 1.0)

    @property
    def left(self) -> int | None:
        """Evaluations that are still allowed; None where only seconds count."""
        limits = [n for n in (self.budget.evaluations, self._pause_at) if n is not None]
        return max(0, min(limits) - self.charged) if limits else None

    @property
    def left_s(self) -> float | None:
        """Seconds that are still allowed; None where only evaluations count."""
        limits = [s for s in (self.budget.seconds, self._pause_s) if s is not None]
        return max(0.0, min(limits) - self.seconds) if limits else None

    @property
    def finished(self) -> bool:
        """Whether the searcher has to stop now: its budget or its share is spent, or the caller wants it."""
        return self.left == 0 or self.left_s == 0.0 or self.should_stop()

    @contextmanager
    def share(self, *, seconds: float | None = None, evaluations: int | None = None) -> Iterator[None]:
        """A context with a smaller budget: in its block, `finished` becomes true at the latest when so many further
        seconds or evaluations are spent."""
        outer = self._pause_s, self._pause_at
        if seconds is not None:
            self._pause_s = self.seconds + min(seconds, self.left_s if self.left_s is not None else seconds)
        if evaluations is not None:
            self._pause_at = self.charged + min(evaluations, self.left if self.left is not None else evaluations)
        try:
            yield
        finally:
            self._pause_s, self._pause_at = outer

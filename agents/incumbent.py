"""Incumbent: the best plan of a search, the budget it has used, and the result it ends with.

Every searcher prices through one of these, so that evaluations are counted alike. Units: seconds, evaluations.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from agents.results.diverse_top_k import MOST, Ranked
from agents.results.diverse_top_k import unlike as unlike_candidates
from agents.results.infeasibility_advice import nothing_fits
from agents.results.local_sgd import Synced, with_modes
from agents.results.plainest import IllegalPlan, Offer, as_it_is
from agents.results.plainest import plainest as plainest_of
from agents.searcher import Budget, OnProgress, Progress, SearchResult, ShouldStop
from automap.bounds.partial_plans import BoundTable
from automap.plan import Plan, SearchRecord, Sync
from automap.price.estimate import annotate, baseline_s, lower_bound_s
from automap.space.space import Ints, PlanSpace, Values
from automap.space.templates import templates
from automap.verify import Verifier

TEMPLATES = 256
"""That are priced at a time."""
REPORT_EVERY_S = 0.2
"""Pause between two progress reports."""


class Incumbent:
    """The best of what one searcher has priced.

    Attributes:
        evaluations: plans priced so far.
        charged: those that count against the budget.
        best: values of the best plan that fits, or None.
        best_s: its step time, or infinity.
        best_by: who found it.
        reached: best step time of each searcher, None where it found nothing that fits.
        nearest: values of the plan that overflows least while none fits.
        improvements: (evaluations, seconds, step time) of each plan that was the best when it came.
    """

    def __init__(
        self,
        space: PlanSpace,
        budget: Budget,
        *,
        searcher: str,
        on_progress: OnProgress,
        should_stop: ShouldStop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.space = space
        self.budget = budget
        self.evaluations = 0
        self.charged = 0
        self.best: Values | None = None
        self.best_s = float("inf")
        self.best_by = searcher
        self.reached: dict[str, float | None] = {}
        self.searcher = searcher
        self.nearest: Values | None = None
        self.least_overflow = float("inf")
        self.improvements: list[tuple[int, float, float]] = []
        self._on_progress = on_progress
        self._should_stop = should_stop
        self._clock = clock
        self._start = clock()
        self._ranked = Ranked(space)
        self._reported = -REPORT_EVERY_S
        self._pause_s: float | None = None
        self._pause_at: int | None = None
        self._bound_s = lower_bound_s(space.problem)

    @cached_property
    def table(self) -> BoundTable:
        """Bounds of the space."""
        return BoundTable(self.space)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self._clock() - self._start

    @property
    def fraction(self) -> float:
        """Share of the budget that is spent."""
        spent = 0.0
        if self.budget.seconds is not None:
            spent = self.seconds / self.budget.seconds
        if self.budget.evaluations is not None:
            spent = max(spent, self.charged / self.budget.evaluations)
        return min(spent, 1.0)

    @property
    def searcher(self) -> str:
        """Who searches now."""
        return self._searcher

    @searcher.setter
    def searcher(self, name: str) -> None:
        self._searcher = name
        self.reached.setdefault(name, None)

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
    def stopped(self) -> bool:
        """Whether the caller wants an end."""
        return self._should_stop()

    @property
    def finished(self) -> bool:
        """Whether to stop now."""
        return self.left == 0 or self.left_s == 0.0 or self._should_stop()

    @contextmanager
    def share(self, *, seconds: float | None = None, evaluations: int | None = None) -> Iterator[None]:
        """Within, it is `finished` after so much more at the latest."""
        outer = self._pause_s, self._pause_at
        if seconds is not None:
            self._pause_s = self.seconds + min(seconds, self.left_s if self.left_s is not None else seconds)
        if evaluations is not None:
            self._pause_at = self.charged + min(evaluations, self.left if self.left is not None else evaluations)
        try:
            yield
        finally:
            self._pause_s, self._pause_at = outer

    def price(self, plans: Sequence[Values] | Ints) -> npt.NDArray[np.float64]:
        """Prices plans, [plans, slots], and keeps the best.

        Returns:
            [plans, 2] seconds and overflow, see `PlanSpace.price`.
        """
        values = np.array(plans, dtype=np.int64).reshape(len(plans), len(self.space.slots))
        found = self.space.price(values)
        if not len(values):
            return found
        fits = found[:, 1] <= 0.0
        self._ranked.take(values, np.where(fits, found[:, 0], np.inf), self.searcher)
        at = int((np.where(fits, found[:, 0], np.inf) if fits.any() else found[:, 1]).argmin())
        # Of many plans the best one alone is told of, when its turn has come.
        self.count(at)
        self.offer(tuple(values[at].tolist()), float(found[at, 0]), float(found[at, 1]))
        self.count(len(values) - at - 1)
        return found

    def offer(self, values: Values, step_time_s: float, overflow: float) -> None:
        """Takes note of a plan that has been priced."""
        self.count(1)
        if overflow <= 0.0:
            self._rank(self.searcher, values, step_time_s)
        self.adopt(self.searcher, values, step_time_s, overflow)
        if self.seconds - self._reported >= REPORT_EVERY_S:
            self.report()

    def adopt(self, searcher: str, values: Values, step_time_s: float, overflow: float) -> None:
        """Takes note of a plan without counting it."""
        self.reached.setdefault(searcher, None)
        if overflow <= 0.0:
            before = self.reached[searcher]
            if before is None or step_time_s < before:
                self.reached[searcher] = step_time_s
                self._rank(searcher, values, step_time_s)
            if step_time_s < self.best_s:
                self.best, self.best_s, self.best_by = values, step_time_s, searcher
                self.improvements.append((self.evaluations, self.seconds, step_time_s))
        elif self.best is None and overflow < self.least_overflow:
            self.nearest, self.least_overflow = values, overflow

    def _rank(self, searcher: str, values: Values, step_time_s: float) -> None:
        self._ranked.take(np.array([values], dtype=np.int64), np.array([step_time_s]), searcher)

    def count(self, evaluations: int) -> None:
        """Counts plans that somebody else has priced, and charges the budget for them."""
        self.evaluations += evaluations
        self.charged += evaluations

    def report(self) -> None:
        """Tells how far the search is."""
        self._reported = self.seconds
        self._on_progress(
            Progress(
                searcher=self.searcher,
                evaluations=self.evaluations,
                seconds=self.seconds,
                best_step_time_s=None if self.best is None else self.best_s,
                lower_bound_s=self._bound_s,
                fraction=self.fraction,
            )
        )

    def _take_templates(self) -> None:
        """Prices the grid of templates whatever the budget: one too small to find a plan still gets the best of them.

        A caller who wants an end gets the first ones that fit.

        Raises:
            NothingFits: none of them fits either.
        """
        self.searcher = "expert"
        listed = templates(self.space)
        while some := list(itertools.islice(listed, TEMPLATES)):
            self.price([values for _, values in some])
            if self.best is not None and self.stopped:
                break
        if self.best is None:
            assert self.nearest is not None
            raise nothing_fits(self.space, self.nearest)

    def result(
        self,
        *,
        seed: int,
        baselines: Mapping[str, float | None] | None = None,
        proven: bool = False,
    ) -> SearchResult:
        """The plan found, priced in full; `proven` if no plan of the space is better.

        Raises:
            NothingFits: no plan that fits was found.
        """
        self.report()
        if self.best is None:
            self._take_templates()
        assert self.best is not None
        record = SearchRecord(
            found_by=self.best_by,
            seed=seed,
            evaluations=self.evaluations,
            baselines={**(baselines or {}), "yours": baseline_s(self.space.evaluator)},
            searchers=dict(self.reached),
            seconds=self.seconds,
            proven=proven,
            lower_bound_s=self.best_s if proven else max(self.table.first.time_s, self._bound_s),
        )
        first, in_order = self.best, self._in_order
        if self.space.problem.training.sync_modes != ("synchronous",):
            # What is known of the space holds for synchronous plans alone.
            proven, record = False, replace(record, proven=False, lower_bound_s=self._bound_s)
            modes = with_modes(self.space, self._ranked.best(MOST, first))
            record = replace(record, found_by=modes[0].item[0][1])

            def in_order(count: int) -> list[Synced]:
                return [found.item for found in unlike_candidates(modes, count)]

        ((values, _), sync), *_ = in_order(1)
        best = self._plan(values, record, sync)

        def unlike(count: int) -> tuple[Plan, ...]:
            (_, *others) = in_order(count)
            of_others = replace(record, proven=False)
            return (
                best,
                *(self._plan(values, replace(of_others, found_by=name), sync) for (values, name), sync in others),
            )

        def plainest(limit_s: float) -> Offer:
            found = (values, record.found_by)
            if sync.kind != "synchronous":
                return as_it_is(self.space, found, best)
            return plainest_of(self.space, found, self._ranked.best(MOST, first), limit_s)

        return SearchResult(
            plan=best,
            plainest=plainest,
            evaluations=self.evaluations,
            seconds=self.seconds,
            proven=proven,
            improvements=tuple(self.improvements),
            unlike=unlike,
        )

    def _in_order(self, count: int) -> list[Synced]:
        """The best unlike plans, synchronous."""
        assert self.best is not None
        return [(found, Sync()) for found in self._ranked.best(count, self.best)]

    def _plan(self, values: Values, record: SearchRecord, sync: Sync) -> Plan:
        """A plan in full, with what is counted of it in its record."""
        lowered = self.space.lowered(values)
        plan = annotate(replace(self.space.decode(values), sync=sync), lowered, self.space.evaluator)
        faults = Verifier(self.space.problem).violations(plan)
        if faults:
            raise IllegalPlan(f"{record.found_by} found a plan that breaks rules: " + "; ".join(map(str, faults)))
        free = [slot.kind for slot in self.space.free_slots(values)]
        return replace(
            plan,
            search=replace(record, num_decisions=len(free), num_operator_decisions=free.count("signature")),
        )

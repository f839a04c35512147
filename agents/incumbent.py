"""Incumbent: the best plan of a search so far, the budget that is used, and the result that the search ends with.

Every searcher prices its plans through one `Incumbent`, so that evaluations are counted alike. Units: seconds,
evaluations.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from agents.results.diverse_top_k import MOST, DiverseTopK, Found, unlike
from agents.results.history import history
from agents.results.infeasibility_advice import nothing_fits
from agents.results.local_sgd import PlanWithSync, with_sync_modes
from agents.results.plainest import NEAR, IllegalPlan, Offer, Outside, as_it_is, in_order, plainest
from agents.results.side_by_side import fastest_of_each, of_unlike_degrees
from agents.searcher import Budget, OnProgress, Progress, Reached, SearchResult, SearchTask, ShouldStop
from agents.spending import Spending
from automap.bounds.partial_plans import BoundTable
from automap.bounds.priced_templates import priced_in_parts
from automap.plan import Plan, Sync
from automap.price.estimate import annotate, lower_bound_s
from automap.price.lowered_plan import LoweredPlan, same_lowered
from automap.price.plan_writer import to_plan
from automap.search_record import SearchRecord
from automap.space.encode import values_of
from automap.space.space import Ints, PlanSpace, Values
from automap.space.target_limits import plan_space
from automap.verify import Verifier

REPORT_EVERY_S = 0.2
"""Least time between two progress reports, in seconds (assumed)."""


class Incumbent(Spending):
    """The best plan that one search has priced.

    Attributes:
        space: plan space of the problem.
        evaluations: number of plans priced so far.
        look_aheads: number of completions priced to look ahead, which are not plans of a searcher.
        first_proposal: step time of the network's first plan and seconds since the start, or None.
        best: values of the best plan that fits, or None.
        best_s: step time of that plan, or infinity.
        best_by: name of the searcher that found it.
        reached: best step time of each searcher, None where it found nothing that fits.
        priced: number of plans that each searcher has priced.
        nearest: values of the plan that overflows memory least while none fits.
        least_overflow: its overflow, as a share of a device's memory.
        baselines: step times of the baselines that have been priced, see `agents.sampling.expert.price_grid`.
        improvements: (evaluations, seconds, step time) of each plan that was better than all before it.
        by_searcher: the same for each searcher, with plans that were better than all of its own before.
    """

    def __init__(
        self,
        space: PlanSpace,
        budget: Budget,
        *,
        searcher: str,
        on_progress: OnProgress = lambda progress: None,
        should_stop: ShouldStop = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        began: float | None = None,
    ) -> None:
        super().__init__(budget, should_stop, clock, began)
        self.space = space
        self.evaluations = 0
        self.look_aheads = 0
        self.first_proposal: tuple[float, float] | None = None
        self.best: Values | None = None
        self.best_s = float("inf")
        self.best_by = searcher
        self._outside: list[Outside] = []
        self.reached: dict[str, float | None] = {}
        self.priced: Counter[str] = Counter()
        self.searcher = searcher
        self.nearest: Values | None = None
        self.least_overflow = float("inf")
        self.baselines: Mapping[str, float | None] = {}
        self.improvements: list[tuple[int, float, float]] = []
        self.by_searcher: dict[str, list[tuple[int, float, float]]] = {}
        self._on_progress = on_progress
        self._diverse = DiverseTopK(space)
        self._knows_templates = False
        self._reported = -REPORT_EVERY_S
        self._bound_s = lower_bound_s(space.problem)

    @staticmethod
    def begin(task: SearchTask, searcher: str) -> Incumbent:
        """Begins a search: builds the plan space of a task and the incumbent of a searcher in it."""
        began = time.monotonic()
        return Incumbent(
            task.space or plan_space(task.problem),
            task.budget,
            searcher=searcher,
            on_progress=task.on_progress,
            should_stop=task.should_stop,
            began=began,
        )

    def price_start(self, task: SearchTask, *, credit: str | None = None) -> list[Values]:
        """Prices the plans from which a task begins and returns their values; plans outside the space are left out.

        Args:
            task: the task.
            credit: who is credited with these plans; None = the searcher at work.
        """
        given = [values for values in map(self.space.encode, task.start) if values is not None]
        if given and credit is not None:
            self.searcher = credit
        self.price(given)
        return given

    @cached_property
    def table(self) -> BoundTable:
        """Lower bounds of the space, built on first use."""
        return BoundTable(self.space)

    @property
    def _table_bound_s(self) -> float:
        """Lower bound of all plans by the table; 0 where the time is over before a searcher has built the table, which
        takes up to a second for thousands of unlike operators."""
        return 0.0 if self.left_s == 0.0 and "table" not in vars(self) else self.table.first.time_s

    @cached_property
    def verifier(self) -> Verifier:
        """Checks plans of the problem."""
        return Verifier(self.space.problem)

    @property
    def outside(self) -> Outside | None:
        """The best plan that fits and lies outside the plan space, if one was offered."""
        return self._outside[-1] if self._outside else None

    @property
    def searcher(self) -> str:
        """Name of the searcher at work, which is credited with the plans that are priced."""
        return self._searcher

    @searcher.setter
    def searcher(self, name: str) -> None:
        self._searcher = name
        self.reached.setdefault(name, None)

    def price(self, plans: Sequence[Values] | Ints) -> npt.NDArray[np.float64]:
        """Prices plans and keeps the best.

        Args:
            plans: [plans, slots] values.

        Returns:
            [plans, 2] seconds of a step and overflow of memory, see `PlanSpace.price`.
        """
        values = np.array(plans, dtype=np.int64).reshape(len(plans), len(self.space.slots))
        found = self.space.price(values)
        self._take(values, found)
        return found

    def _take(self, values: Ints, found: npt.NDArray[np.float64]) -> None:
        """Counts plans that have been priced and keeps the best, see `price`."""
        if not len(values):
            return
        fits = found[:, 1] <= 0.0
        self._diverse.add(values, np.where(fits, found[:, 0], np.inf), self.searcher)
        at = int((np.where(fits, found[:, 0], np.inf) if fits.any() else found[:, 1]).argmin())
        # Only the best of many plans is added, at its place among them.
        self.count(at)
        self.add(tuple(values[at].tolist()), float(found[at, 0]), float(found[at, 1]))
        self.count(len(values) - at - 1)

    def add(self, values: Values, step_time_s: float, overflow: float) -> None:
        """Counts one plan that the searcher has priced, keeps it if it is the best, and reports if it is time to."""
        self.count(1)
        if overflow <= 0.0:
            self._add_diverse(self.searcher, values, step_time_s)
        self.add_from(self.searcher, values, step_time_s, overflow)
        if self.seconds - self._reported >= REPORT_EVERY_S:
            self.report()

    def add_from(self, searcher: str, values: Values, step_time_s: float, overflow: float) -> None:
        """Keeps a plan that `searcher` has priced if it is the best, without counting it."""
        self.reached.setdefault(searcher, None)
        if overflow <= 0.0:
            before = self.reached[searcher]
            if before is None or step_time_s < before:
                self._reach(searcher, step_time_s)
                self._add_diverse(searcher, values, step_time_s)
            if step_time_s < self.least_s:
                self.improvements.append((self.evaluations, self.seconds, step_time_s))
            if step_time_s < self.best_s:
                self.best, self.best_s, self.best_by = values, step_time_s, searcher
        elif self.best is None and overflow < self.least_overflow:
            self.nearest, self.least_overflow = values, overflow

    def offer(self, lowered: LoweredPlan) -> tuple[float, float]:
        """Prices one plan, which need not be in the plan space, and keeps it if it is the best.

        A plan outside the space must also pass `automap.verify`, because the masks of the space, which enforce hints
        and target, do not apply to it. Its memory is counted again at the end of the search (`result`), since this
        takes some tenths of a second for a long pipeline.

        Returns:
            Seconds of a step and overflow of memory, see `PlanSpace.price`.
        """
        space = self.space
        values = values_of(space, lowered)
        if values is not None and same_lowered(space.lowered(values), lowered):
            ((seconds, overflow),) = self.price([values]).tolist()
            return seconds, overflow
        outcome = space.evaluator.evaluate(lowered)
        self.count(1)
        seconds, before = outcome.step_time_s, self.reached[self.searcher]
        if outcome.fits and (before is None or seconds < before):
            plan = to_plan(lowered, space.evaluator)
            if not self.verifier.violations(plan, memory=False):
                self._reach(self.searcher, seconds)
                if seconds < self.least_s:
                    self.improvements.append((self.evaluations, self.seconds, seconds))
                if self.outside is None or seconds < self.outside.step_time_s:
                    self._outside.append(Outside(seconds, plan, lowered, self.searcher))
        if self.seconds - self._reported >= REPORT_EVERY_S:
            self.report()
        return seconds, outcome.overflow

    @property
    def least_s(self) -> float:
        """Step time of the best plan, in the space or outside; infinity where none fits."""
        return self.best_s if self.outside is None else min(self.best_s, self.outside.step_time_s)

    def _reach(self, searcher: str, step_time_s: float) -> None:
        self.reached[searcher] = step_time_s
        self.by_searcher.setdefault(searcher, []).append((self.evaluations, self.seconds, step_time_s))

    def _add_diverse(self, searcher: str, values: Values, step_time_s: float) -> None:
        self._diverse.add(np.array([values], dtype=np.int64), np.array([step_time_s]), searcher)

    def count(self, evaluations: int, searcher: str | None = None) -> None:
        """Counts plans that `searcher` has priced, or else the searcher at work, and charges the budget for them."""
        self.evaluations += evaluations
        self.charged += evaluations
        self.priced[searcher or self.searcher] += evaluations

    def report(self) -> None:
        """Reports how far the search has come."""
        self._reported = self.seconds
        self._on_progress(
            Progress(
                searcher=self.searcher,
                evaluations=self.evaluations,
                seconds=self.seconds,
                best_step_time_s=None if self.least_s == float("inf") else self.least_s,
                lower_bound_s=self._bound_s,
                fraction=self.fraction,
                members={
                    name: Reached(evaluations=self.priced[name], best_step_time_s=best_s)
                    for name, best_s in self.reached.items()
                },
                best=None if self.best is None else self._best_so_far,
            )
        )

    def _best_so_far(self, seed: int) -> Plan:
        assert self.best is not None
        record = SearchRecord(
            found_by=self.best_by,
            seed=seed,
            evaluations=self.evaluations,
            look_aheads=self.look_aheads,
            baselines=dict(self.baselines),
            searchers=dict(self.reached),
            history=history(self.by_searcher),
            seconds=self.seconds,
            lower_bound_s=self._bound_s,
        )
        return self.plan(self.best, Sync(), record)

    def price_templates(self) -> Iterator[None]:
        """Prices the templates of the space, some of them at each step of the iterator."""
        for values, prices in priced_in_parts(self.space):
            self._take(values, prices)
            yield
        self._knows_templates = True

    def _fall_back_on_templates(self) -> None:
        """Prices the templates whatever the budget: a search too short to find a plan still returns the best of them.

        Where the caller wants the search to end, or its time is over, the first ones that fit are enough.

        Raises:
            NothingFits: no template fits either.
        """
        self.searcher = "expert"
        for _ in () if self._knows_templates else self.price_templates():
            if self.best is not None and (self.should_stop() or self.left_s == 0.0):
                break
        if self.best is None:
            assert self.nearest is not None
            raise nothing_fits(self.space, self.nearest)

    def result(self, *, seed: int, proven: bool = False) -> SearchResult:
        """The result of the search, with plans that are priced in full and verified.

        Args:
            seed: seed of the search, for the record.
            proven: whether no plan of the space is better than the best one.

        Raises:
            NothingFits: no plan that fits was found.
        """
        self.report()
        while (found := self.outside) is not None and found.step_time_s < self.best_s:
            plan = annotate(found.plan, found.lowered, self.space.evaluator)
            if not self.verifier.violations(plan):
                return self._outside_result(found._replace(plan=plan), seed)
            self._outside.pop()
        if self.best is None:
            self._fall_back_on_templates()
        assert self.best is not None
        first, found_by, best_unlike = self.best, self.best_by, self._best_synchronous
        if self.space.problem.training.sync_modes == ("synchronous",):
            bound_s = self.best_s if proven else max(self._table_bound_s, self._bound_s)
        else:
            # What is known of the space holds for synchronous plans only.
            proven, bound_s = False, self._bound_s
            candidates = with_sync_modes(self.space, self._diverse.best(MOST, first))
            (_, found_by), _ = candidates[0].item

            def best_unlike(count: int) -> list[PlanWithSync]:
                return [found.item for found in unlike(candidates, count)]

        record = self._record(found_by, seed, bound_s, proven=proven)
        ((values, _), sync), *_ = best_unlike(1)
        best = self.plan(values, sync, record)

        def unlike_plans(count: int) -> tuple[Plan, ...]:
            others = best_unlike(count)[1:]
            records = (replace(record, proven=False, found_by=name) for (_, name), _ in others)
            return (best, *(self.plan(row, mode, of) for ((row, _), mode), of in zip(others, records, strict=True)))

        def plainest_plan(limit_s: float) -> Offer:
            if sync.kind != "synchronous":
                return as_it_is(self.space, (values, found_by), best)
            others = self._diverse.best(MOST, first)
            return plainest(self.space, (values, found_by), others, limit_s, self.verifier, best)

        return SearchResult(
            plan=best,
            plainest=plainest_plan,
            evaluations=self.evaluations,
            seconds=self.seconds,
            proven=proven,
            improvements=tuple(self.improvements),
            by_searcher=self.by_searcher,
            unlike=unlike_plans,
            others=self._others,
        )

    def _record(self, found_by: str, seed: int, bound_s: float, *, proven: bool) -> SearchRecord:
        first_s, first_after_s = self.first_proposal or (None, None)
        return SearchRecord(
            found_by=found_by,
            seed=seed,
            evaluations=self.evaluations,
            look_aheads=self.look_aheads,
            first_s=first_s,
            first_after_s=first_after_s,
            baselines=dict(self.baselines),
            searchers=dict(self.reached),
            history=history(self.by_searcher),
            seconds=self.seconds,
            proven=proven,
            lower_bound_s=bound_s,
        )

    def _outside_result(self, found: Outside, seed: int) -> SearchResult:
        """The result where the best plan lies outside the space; unlike plans after it are those of the space."""
        record = self._record(found.found_by, seed, self._bound_s, proven=False)
        plan = replace(found.plan, search=record)

        def plainest_plan(limit_s: float) -> Offer:
            offers = [found.offer(self.space.evaluator)]
            if self.best is not None and self.best_s <= limit_s:
                best = (self.best, self.best_by)
                others = self._diverse.best(MOST, self.best)
                offers.append(plainest(self.space, best, others, limit_s, self.verifier))
            near_s = NEAR * max(0.0, limit_s - min(found.step_time_s, self.best_s))
            return in_order(offers, lambda one: one.plainness, near_s)[0]

        def unlike_plans(count: int) -> tuple[Plan, ...]:
            others = self.unlike(count - 1) if count > 1 else []
            return (plan, *(self.plan(row, Sync(), replace(record, found_by=name)) for row, name in others))

        return SearchResult(
            plan=plan,
            plainest=plainest_plan,
            evaluations=self.evaluations,
            seconds=self.seconds,
            improvements=tuple(self.improvements),
            by_searcher=self.by_searcher,
            unlike=unlike_plans,
            others=lambda count: fastest_of_each((plan, *self._others(count)), count),
        )

    def _others(self, count: int) -> tuple[Plan, ...]:
        """The best plans of the space, each with other degrees, to be shown."""
        return of_unlike_degrees(self.space, [row for row, _ in self.unlike(MOST)], count)

    def unlike(self, count: int) -> list[Found]:
        """The best plans that are unlike each other, all synchronous; none where nothing fits."""
        return [] if self.best is None else self._diverse.best(count, self.best)

    def _best_synchronous(self, count: int) -> list[PlanWithSync]:
        return [(found, Sync()) for found in self.unlike(count)]

    def plan(self, values: Values, sync: Sync, record: SearchRecord) -> Plan:
        """A plan with its estimate, and with its numbers of decisions in its record.

        Raises:
            IllegalPlan: the plan breaks the rules of `automap.verify`.
        """
        lowered = self.space.lowered(values)
        plan = annotate(replace(self.space.decode(values), sync=sync), lowered, self.space.evaluator)
        faults = self.verifier.violations(plan)
        if faults:
            raise IllegalPlan(f"{record.found_by} found a plan that breaks rules: " + "; ".join(map(str, faults)))
        free = [slot.kind for slot in self.space.free_slots(values)]
        return replace(
            plan,
            search=replace(record, num_decisions=len(free), num_operator_decisions=free.count("signature")),
        )

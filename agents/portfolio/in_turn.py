"""In turn: several searchers one after another within one budget; the best plan of all is returned.

Each searcher has a fixed share of the budget and gets no plans of the others, so that it finds what it would find alone
with this share. (A `portfolio` is one searcher whose members exchange plans.) Units: seconds, evaluations.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from agents.results.diverse_top_k import unlike_plans
from agents.results.history import history
from agents.results.side_by_side import fastest_of_each
from agents.searcher import (
    SEARCHERS,
    Budget,
    OnProgress,
    Progress,
    Reached,
    SearchResult,
    ShouldStop,
    search,
    unknown_searcher,
)
from automap.errors import NothingFits, ProblemError, UserError
from automap.plan import Plan
from automap.problem import Problem
from automap.search_record import SearchRecord

if TYPE_CHECKING:
    from agents.results.plainest import Offer
    from automap.space.space import PlanSpace

LEAST_TURN_S = 0.01
"""Seconds that a searcher gets where the searchers before it have used up the budget (assumed): enough for a
template."""


def check_searchers(searchers: Sequence[str], budget: Budget) -> None:
    """Refuses lists of searchers that `search_in_turn` cannot run.

    Raises:
        ProblemError: none is named, one is unknown or named twice, there are fewer evaluations than searchers, or one
            name is given in place of a list.
    """
    if isinstance(searchers, str):
        repair = f'Write ["{searchers}"].'
        raise ProblemError("not a list of searchers", field="searchers", value=searchers, repair=repair)
    if not searchers:
        raise ProblemError(
            "names no searcher",
            field="searchers",
            value="[]",
            repair="Name at least one, such as portfolio, or leave it out.",
        )
    for number, name in enumerate(searchers):
        field = f"searchers[{number}]"
        if name not in SEARCHERS:
            raise unknown_searcher(name, field=field)
        if name in searchers[:number]:
            raise ProblemError("named twice", field=field, value=name, repair="Name each searcher once.")
    if budget.evaluations is not None and budget.evaluations < len(searchers):
        raise ProblemError(
            "less than one evaluation for each searcher",
            field="budget",
            value=str(budget),
            repair=f"Give at least {len(searchers)} evaluations, or name fewer searchers.",
        )


def search_in_turn(
    problem: Problem | PlanSpace,
    budget: Budget,
    *,
    searchers: Sequence[str],
    seed: int = 0,
    on_progress: OnProgress = lambda progress: None,
    should_stop: ShouldStop = lambda: False,
    start: Sequence[Plan] = (),
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """The fastest plan that any of the searchers finds; with one searcher the same as `search`.

    Each searcher has an equal share of a budget in evaluations, the first ones one more where it does not divide; or an
    equal share of the seconds that the ones before it have left. A proof ends the search. Where a searcher finds
    nothing or refuses the problem, the others still have their turns.

    Args:
        problem, on_progress, should_stop: see `search`.
        budget: budget of all searchers together.
        searchers: names of `SEARCHERS`, in the order of their turns.
        seed, start: seed and first plans of each searcher, see `search`.
        clock: returns the time in seconds.

    Raises:
        NothingFits: no searcher found a plan that fits.
        ProblemError: see `check_searchers`, or every searcher refuses the problem.
    """
    check_searchers(searchers, budget)
    run = functools.partial(search, problem, seed=seed, should_stop=should_stop, start=start)
    if len(searchers) == 1:
        return run(budget, searcher=searchers[0], on_progress=on_progress)
    turns = _Turns(len(searchers), clock, on_progress)
    for number, name in enumerate(searchers):
        try:
            found = run(turns.share(budget, number), searcher=name, on_progress=turns.report)
        except UserError as fault:
            turns.add_fault(name, fault)
        else:
            turns.add(name, found)
            if found.proven:
                break
        if should_stop():
            break
    return turns.result(seed)


class _Turns:
    """The turns so far."""

    def __init__(self, count: int, clock: Callable[[], float], on_progress: OnProgress) -> None:
        self._results: dict[str, SearchResult] = {}
        self._faults: dict[str, UserError] = {}
        self._reached: dict[str, float | None] = {}
        self._count, self._number = count, 0
        self._evaluations = 0
        self._improvements: list[tuple[int, float, float]] = []
        self._by_searcher: dict[str, list[tuple[int, float, float]]] = {}
        self._best_s = float("inf")
        self._members: dict[str, Reached] = {}
        self._latest: Mapping[str, Reached] = {}
        self._clock, self._began, self._turn_began_s = clock, clock(), 0.0
        self._on_progress = on_progress

    @property
    def _seconds(self) -> float:
        """Seconds since the start of the search."""
        return self._clock() - self._began

    def share(self, budget: Budget, number: int) -> Budget:
        """The budget of turn `number`, which begins now."""
        self._number, self._turn_began_s = number, self._seconds
        self._members, self._latest = joined(self._members, self._latest), {}
        if budget.evaluations is not None:
            share, more = divmod(budget.evaluations, self._count)
            return Budget(evaluations=share + (number < more))
        assert budget.seconds is not None
        return Budget(seconds=max(LEAST_TURN_S, budget.seconds - self._turn_began_s) / (self._count - number))

    def report(self, progress: Progress) -> None:
        """Reports how far all turns together have come."""
        best_s = min(self._best_s, progress.best_step_time_s or float("inf"))
        self._latest = progress.members
        self._on_progress(
            replace(
                progress,
                evaluations=self._evaluations + progress.evaluations,
                seconds=self._seconds,
                best_step_time_s=None if best_s == float("inf") else best_s,
                fraction=(self._number + progress.fraction) / self._count,
                members=joined(self._members, progress.members),
            )
        )

    def add(self, name: str, found: SearchResult) -> None:
        """Adds the result of a searcher."""
        for evaluations, seconds, step_time_s in found.improvements:
            if step_time_s < self._best_s:
                self._best_s = step_time_s
                self._improvements.append((self._evaluations + evaluations, self._turn_began_s + seconds, step_time_s))
        for searcher, own in found.by_searcher.items():
            self._by_searcher[searcher if name in found.by_searcher else f"{name}: {searcher}"] = [
                (self._evaluations + evaluations, self._turn_began_s + seconds, step_time_s)
                for evaluations, seconds, step_time_s in own
            ]
        self._evaluations += found.evaluations
        self._reached[name] = found.record.searchers.get(name, found.step_time_s)
        self._results[name] = found

    def add_fault(self, name: str, fault: UserError) -> None:
        """Adds a searcher that has no plan, and why."""
        self._reached[name] = None
        self._faults[name] = fault

    def result(self, seed: int) -> SearchResult:
        """The result with the best plan of all turns; of two equally fast plans, the earlier one.

        Raises:
            UserError: no searcher has a plan; the error of the first one.
        """
        if not self._results:
            raise next(iter(self._faults.values()))
        best_by, best = min(self._results.items(), key=lambda turn: turn[1].step_time_s)
        records = [found.record for found in self._results.values()]
        # For each baseline, the step time that the first searcher has recorded.
        baselines: dict[str, float | None] = {}
        for found in records:
            for name, seconds in found.baselines.items():
                if baselines.get(name) is None:
                    baselines[name] = seconds
        record = replace(
            best.record,
            found_by=_finder(best_by, best, best.record.found_by),
            seed=seed,
            evaluations=self._evaluations,
            baselines=baselines,
            searchers=self._reached,
            history=history(self._by_searcher),
            seconds=self._seconds,
            proven=any(r.proven for r in records),
            lower_bound_s=max((r.lower_bound_s for r in records if r.lower_bound_s is not None), default=None),
        )
        warnings = tuple(
            f"{name} did not search: {fault}"
            for name, fault in self._faults.items()
            if not isinstance(fault, NothingFits)
        )
        chosen = replace(best.plan, search=record, warnings=(*best.plan.warnings, *warnings))

        def unlike(count: int) -> tuple[Plan, ...]:
            in_order = sorted(self._results.values(), key=lambda found: found is not best)
            plans = unlike_plans([plan for found in in_order for plan in found.unlike(count)], count)
            return (chosen, *(with_record(plan, record) for plan in plans[1:]))

        def others(count: int) -> tuple[Plan, ...]:
            return fastest_of_each((p for found in self._results.values() for p in found.others(count)), count)

        def plainest(limit_s: float) -> Offer:
            from agents.results.plainest import NEAR, in_order  # it reads all of a search, which not every turn needs

            limit_s = max(limit_s, best.step_time_s)
            able = [(name, found) for name, found in self._results.items() if found.step_time_s <= limit_s]
            offers = [(found.plainest(limit_s), name, found) for name, found in able if found.plainest is not None]
            near_s = NEAR * (limit_s - best.step_time_s)
            offer, name, found = in_order(offers, lambda some: some[0].plainness, near_s)[0]
            plan = replace(offer.plan, warnings=(*offer.plan.warnings, *warnings))
            return replace(offer, plan=plan, found_by=_finder(name, found, offer.found_by))

        return SearchResult(
            plan=chosen,
            plainest=plainest,
            evaluations=self._evaluations,
            seconds=self._seconds,
            proven=record.proven,
            improvements=tuple(self._improvements),
            by_searcher=self._by_searcher,
            unlike=unlike,
            others=others,
        )


def joined(before: Mapping[str, Reached], now: Mapping[str, Reached]) -> dict[str, Reached]:
    """What each searcher has reached in earlier turns and in this one: a searcher may be a member in several turns."""
    found = dict(before)
    for name, reached in now.items():
        earlier = found.get(name, Reached())
        times = [s for s in (earlier.best_step_time_s, reached.best_step_time_s) if s is not None]
        found[name] = Reached(
            evaluations=earlier.evaluations + reached.evaluations, best_step_time_s=min(times, default=None)
        )
    return found


def _finder(name: str, found: SearchResult, found_by: str) -> str:
    """Name of the finder of a plan: the portfolio itself where the searcher is one, otherwise as the record says."""
    return found_by if name in found.record.searchers else name


def with_record(plan: Plan, record: SearchRecord) -> Plan:
    """A plan of one of several searches, with the record of all of them but its own finder and decisions."""
    own = plan.search
    assert own is not None
    return replace(
        plan,
        search=replace(
            record,
            found_by=own.found_by,
            fastest_s=None,
            proven=False,
            num_decisions=own.num_decisions,
            num_operator_decisions=own.num_operator_decisions,
        ),
    )

"""One job on several workers: the job itself and its members, which are jobs of their own that search for it.

A member searches for the same problem with another seed, in rounds, each of which begins with the best plan of all so
far. The job itself searches exactly as it would alone and takes the best plan of all at its end, so with members it
finds no worse a plan. It does the same when it runs again after a death: the plan that was kept is compared at the end,
and the search does not begin with it, because it might not get away from it. Job and members communicate only by the
plans that every run keeps in the store: members may begin late, die and run again, or never begin at all. Units:
seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from agents.searcher import Budget, OnProgress, Progress, Reached, SearchResult, ShouldStop
from automap.errors import NothingFits
from automap.plan import Plan
from automap.problem import Problem
from service.jobs.connection import left_out_while_away, paced
from service.jobs.records import members_of, parent_of
from service.jobs.run_job import JobRequest
from service.jobs.store import Store

ROUNDS = 4
"""Searches of a member, which begin with what the others have found meanwhile (assumed)."""
FINISH_S = 1.0
"""Longest time in which the job makes the best plan of all its own (assumed)."""
FINISH_SHARE = 0.05
"""Largest share of the budget for that (assumed)."""
LOOK_S = 0.5
"""Seconds between two looks at how far the others are."""
_SEEDS = 1_000_003
"""Distance of the seeds of two rounds; more than there are members."""

Search = Callable[..., SearchResult]


def searching(job_id: str, request: JobRequest, store: Store, search: Search) -> Search:
    """How a job searches: alone, with its members, or as a member of another job.

    Args:
        job_id: id of the job.
        request: its request; of a member see `JobRequest.of_member`.
        store: its tenant's store, whose client fails at once while Redis is away.
        search: `agents.search_offer`, or what is in its place.
    """
    if (parent := parent_of(job_id)) is not None:
        others = [name for name in (parent, *members_of(parent, request.workers)) if name != job_id]
        return _Member(_Others(store, others), search).search
    if request.workers > 1:
        return _Lead(_Others(store, members_of(job_id, request.workers)), search).search
    return search


class _Others:
    """What the other searches for the same job have reached, as the store has it.

    Args:
        store: see `searching`.
        ids: their jobs.
    """

    def __init__(self, store: Store, ids: Sequence[str]) -> None:
        self._store, self._ids = store, ids
        self._look = paced(self._read, every_s=LOOK_S)
        self._reached: dict[str, Reached] = {}

    def reached(self) -> dict[str, Reached]:
        """Name of each one that has begun -> how far it has come."""
        self._look()
        return self._reached

    def best(self) -> Plan | None:
        """The fastest of the plans that they have kept; None where there is none, or Redis is away."""
        plans = []
        with left_out_while_away():
            for name in self._ids:
                if (kept := self._store.plan(name, so_far=True)) is not None:
                    plans.append(Plan.from_json(kept))
        return min(plans, key=lambda plan: plan.step_time_s, default=None)

    def _read(self) -> None:
        found = {}
        for number, progress in enumerate(self._store.progress_of(self._ids), 1):
            if progress is not None:
                found[f"worker {number + 1}"] = Reached(
                    evaluations=progress["evaluations"], best_step_time_s=progress["best_step_time_s"]
                )
        self._reached = found


class _Member:
    """A search for another job, in rounds."""

    def __init__(self, others: _Others, search: Search) -> None:
        self._others, self._search = others, search

    def search(
        self,
        problem: Problem,
        budget: Budget,
        *,
        seed: int,
        on_progress: OnProgress,
        should_stop: ShouldStop,
        start: Sequence[Plan],
        **more: Any,
    ) -> SearchResult:
        """See `agents.search_offer`."""
        assert budget.seconds is not None
        began, evaluations = time.monotonic(), 0
        found: list[SearchResult] = []
        known = self._known(start)
        for number in range(ROUNDS):
            left_s = budget.seconds - (time.monotonic() - began)
            if found and (should_stop() or left_s <= 0):
                break
            before = evaluations

            def told(progress: Progress, number: int = number, before: int = before) -> None:
                spent_s = time.monotonic() - began
                on_progress(
                    replace(
                        progress,
                        evaluations=before + progress.evaluations,
                        seconds=spent_s,
                        fraction=(number + progress.fraction) / ROUNDS,
                    )
                )

            result = self._search(
                problem,
                Budget(seconds=left_s / (ROUNDS - number)),
                seed=(seed + number * _SEEDS) % 2**32,
                on_progress=told,
                should_stop=should_stop,
                start=known,
                **more,
            )
            evaluations += result.evaluations
            found.append(result)
            known = self._known([result.plan])
        fastest = min(found, key=lambda result: result.step_time_s)
        return replace(fastest, evaluations=evaluations)

    def _known(self, own: Sequence[Plan]) -> list[Plan]:
        best = self._others.best()
        return [*own, *([best] if best is not None else [])]


class _Lead:
    """The search of a job that has members."""

    def __init__(self, others: _Others, search: Search) -> None:
        self._others, self._search = others, search
        self._kept: Plan | None = None
        """The best plan of the runs before this one."""

    def search(
        self,
        problem: Problem,
        budget: Budget,
        *,
        on_progress: OnProgress,
        should_stop: ShouldStop,
        start: Sequence[Plan],
        **more: Any,
    ) -> SearchResult:
        """See `agents.search_offer`."""
        assert budget.seconds is not None
        finish_s = min(FINISH_S, FINISH_SHARE * budget.seconds)
        more |= {"should_stop": should_stop}
        self._kept = min(start, key=lambda plan: plan.step_time_s, default=None)
        own: SearchResult | None = None
        nothing: NothingFits | None = None
        try:
            own = self._search(
                problem,
                Budget(seconds=budget.seconds - finish_s),
                on_progress=lambda progress: on_progress(self._together(progress)),
                start=(),
                **more,
            )
        except NothingFits as fault:
            nothing = fault
        best = self._best()
        if own is not None and (best is None or _fastest_s(own) <= best.step_time_s):
            return self._counted(own)
        if best is None:
            assert nothing is not None
            raise nothing
        begin = [best, *([own.plan] if own is not None else [])]
        last = self._search(problem, Budget(seconds=finish_s), on_progress=lambda p: None, start=begin, **more)
        if _fastest_s(last) > best.step_time_s:  # it is not in the plan space, so no search begins with it
            last = replace(last, plan=best)
        return self._counted(replace(last, evaluations=last.evaluations + (own.evaluations if own else 0)))

    def _best(self) -> Plan | None:
        """The fastest of the plans that others found and that were kept before."""
        plans = (self._others.best(), self._kept)
        return min((plan for plan in plans if plan is not None), key=lambda plan: plan.step_time_s, default=None)

    def _counted(self, result: SearchResult) -> SearchResult:
        """A result whose plan says what all searches together have priced."""
        total = result.evaluations + sum(each.evaluations for each in self._others.reached().values())
        plan = replace(result.plan, search=replace(result.record, evaluations=total))
        return replace(result, plan=plan, evaluations=total)

    def _together(self, progress: Progress) -> Progress:
        """The progress of the own search and of all members together."""
        reached = self._others.reached()
        times = [each.best_step_time_s for each in reached.values() if each.best_step_time_s is not None]
        times += [self._kept.step_time_s] if self._kept is not None else []
        theirs_s, own_s, best = min(times, default=None), progress.best_step_time_s, progress.best
        if theirs_s is not None and (own_s is None or theirs_s < own_s):

            def best_of_all(seed: int) -> Plan:
                found = self._best()
                return found if found is not None and (own_s is None or found.step_time_s < own_s) else own(seed)

            own = progress.best or _none_yet
            best = best_of_all
        return replace(
            progress,
            evaluations=progress.evaluations + sum(each.evaluations for each in reached.values()),
            best_step_time_s=min((s for s in (theirs_s, own_s) if s is not None), default=None),
            members={**progress.members, **reached},
            best=best,
        )


def _none_yet(seed: int) -> Plan:
    raise NothingFits(
        "no plan so far", field="budget", value="", repair="Ask again when the search has found a first plan."
    )


def _fastest_s(result: SearchResult) -> float:
    """Step time of the fastest plan that a search found; the one that it returns may be plainer."""
    return result.record.fastest_s or result.step_time_s

"""Searches on parts of a cluster: which parts, with which shares of the budget, and how their progress is reported.

The search on all devices comes first. Then the part with the fastest template is searched, and up to two more parts,
each with a smaller share: a search gains more over some templates than over others, so that the part with the fastest
template need not have the fastest plan. Units: seconds, evaluations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from typing import NamedTuple

from agents.portfolio.in_turn import LEAST_TURN_S, joined
from agents.results.fewer_devices import NEAR, Part, on_all
from agents.searcher import Budget, OnProgress, Progress, Reached, SearchResult
from automap.errors import NothingFits
from automap.plan import Plan
from automap.price.evaluator import Evaluator
from automap.problem import Problem

PART_SHARE, FASTER_PART_SHARE = 0.25, 0.5
"""Share of the budget for the part with the fastest template: usually, and if this template is faster than the best one
on all devices. Assumed. Example: on a part with 22 of 23 T4 devices and links of 10 Gbit/s, whose template is 9 %
faster, a search with a quarter of 1,000 evaluations found no plan faster than the best on all 23; with half of them it
found one that is 7 % faster."""
MOST_PARTS = 3
"""Most parts that are searched (assumed)."""
FURTHER_SHARE = 0.1, 0.05
"""Share of the budget for each part after the first: where the first part's template is faster than the best one on all
devices, and where it is not. It is taken from the search on all devices. When it was taken from the first part, a fifth
for each further one, the plan on 23 T4 was 7 % slower with 1,000 evaluations."""
SEVERAL_PARTS_EVALUATIONS, SEVERAL_PARTS_S = 256, 4.0
"""Smallest budget, in evaluations or in seconds, with which more than one part is searched (assumed)."""


def parts_to_search(parts: tuple[Part, ...], budget: Budget) -> tuple[Part, ...]:
    """The parts with the fastest templates, if these are nearly as fast as the best one on all devices (`NEAR`).

    Args:
        parts: parts in the order of their fastest templates.
        budget: budget of the whole search; a small one has time for one part.
    """
    is_small = (budget.evaluations or inf) < SEVERAL_PARTS_EVALUATIONS or (budget.seconds or inf) < SEVERAL_PARTS_S
    near = [part for part in parts if part.template_s is not None and part.template_s <= NEAR * part.reference_s]
    return tuple(near[: 1 if is_small else MOST_PARTS])


def shares_of(parts: tuple[Part, ...]) -> tuple[float, ...]:
    """[parts] share of the budget of each part; larger where a part has a faster template than all devices have."""
    if not parts:
        return ()
    is_faster = parts[0].template_s is not None and parts[0].template_s < parts[0].reference_s
    share, further = (FASTER_PART_SHARE, FURTHER_SHARE[0]) if is_faster else (PART_SHARE, FURTHER_SHARE[1])
    return share, *(further,) * (len(parts) - 1)


def divided(budget: Budget, spent_s: float, shares: tuple[float, ...]) -> tuple[Budget, ...]:
    """The budget of the search on all devices, then that of each search on a part that gets evaluations or seconds.

    Args:
        budget: budget of all searches together.
        spent_s: seconds of it that have been spent; at least `LEAST_TURN_S` are taken to be left.
        shares: [parts] share of the budget of each part.
    """
    if budget.evaluations is not None:
        counts = [int(share * budget.evaluations) for share in shares]
        return Budget(evaluations=budget.evaluations - sum(counts)), *(Budget(evaluations=n) for n in counts if n)
    assert budget.seconds is not None
    left = max(LEAST_TURN_S, budget.seconds - spent_s)
    return Budget(seconds=left * (1.0 - sum(shares))), *(Budget(seconds=share * left) for share in shares)


Lift = Callable[[Plan], Plan | None]
"""Writes a plan of a part as one of the whole cluster; None where the hints forbid it."""


class OnPart(NamedTuple):
    """A part of the cluster that was searched, and what was found on it."""

    part: Part
    found: SearchResult


class Before(NamedTuple):
    """What is known before a search on a part."""

    best: Plan
    """The fastest plan so far, on all devices."""
    evaluations: int
    seconds: float
    reached: Mapping[str, Reached]
    """What each searcher has reached."""

    def after(self, found: SearchResult, lift: Lift) -> Before:
        """What is known after a search on a part."""
        plan = lift(found.plan)
        is_faster = plan is not None and plan.step_time_s < self.best.step_time_s
        best = plan if plan is not None and is_faster else self.best
        return Before(best, self.evaluations + found.evaluations, self.seconds + found.seconds, self.reached)


def lifting(problem: Problem, part: Part, evaluator: Callable[[], Evaluator]) -> Lift:
    """Returns the function `Lift` of a part; it keeps the reasons (`why`) that the search has written into the plan."""

    def lift(plan: Plan) -> Plan | None:
        found = on_all(plan, part, problem, evaluator())
        return None if found is None else replace(found, why=plan.why)

    return lift


def lifted_best(progress: Progress, lift: Lift) -> Callable[[int], Plan] | None:
    """The best plan of a search on a part so far, as one of the whole cluster."""
    best = progress.best

    def lifted(seed: int) -> Plan:
        assert best is not None
        found = lift(best(seed))
        if found is None:
            repair = "Ask again later in the search, or fix fewer degrees."
            raise NothingFits("no plan on all devices so far", field="hints.fix", value="", repair=repair)
        return found

    return None if best is None else lifted


def scaled(progress: Progress, done: float, share: float) -> Progress:
    """Progress of one of several searches as the progress of all together.

    Args:
        progress: progress of the search at work.
        done: share of the whole budget that is spent before it begins.
        share: its share of the whole budget.
    """
    return replace(progress, fraction=done + share * progress.fraction)


def _scaled_on_part(progress: Progress, done: float, share: float, before: Before, lift: Lift) -> Progress:
    """`scaled` for a search on a part of the cluster.

    Args:
        progress, done, share: see `scaled`.
        before: what is known before it.
        lift: writes its plans as those of the whole cluster.
    """
    assert before.best.estimate is not None
    best_s = before.best.step_time_s
    is_faster = (progress.best_step_time_s or inf) < best_s
    return replace(
        scaled(progress, done, share),
        best=lifted_best(progress, lift) if is_faster else lambda seed: before.best,
        evaluations=before.evaluations + progress.evaluations,
        seconds=before.seconds + progress.seconds,
        best_step_time_s=min(best_s, progress.best_step_time_s or best_s),
        lower_bound_s=before.best.estimate.lower_bound_s,
        members=joined(before.reached, progress.members),
    )


class PartProgress:
    """Reports the progress of a search on a part as progress of the whole search.

    Attributes:
        reached: what each searcher has reached so far, in earlier searches too.
        lift: writes plans of the part as plans of the whole cluster.
    """

    def __init__(self, on_progress: OnProgress, done: float, share: float, before: Before, lift: Lift) -> None:
        self.reached, self.lift = before.reached, lift
        self._on_progress = on_progress
        self._scaled = functools.partial(_scaled_on_part, done=done, share=share, before=before, lift=lift)

    def __call__(self, progress: Progress) -> None:
        """Reports progress of the search on the part."""
        whole = self._scaled(progress)
        self.reached = whole.members
        self._on_progress(whole)

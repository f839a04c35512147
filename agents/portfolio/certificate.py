"""Certificates: proofs of how much faster than the best plan found any plan can be at most.

All plans of a space are divided into families (`automap.cost_graph.families`), and each family has a lower bound of
its step times. The least of these bounds holds for all plans. It is raised in rounds: each round computes a sharper
bound of the family whose bound is the least at that time. The first bound of a family is that of its shapes
(`BoundTable`); sharper ones come from a cost graph of all its ZeRO stages together (`STAGES`), then of each ZeRO stage.
The rounds end when the least bound cannot be raised further, or the time is over. If the least bound equals the step
time of the plan found, this plan is proven to be the best. If plans on a part of the cluster may be as fast, they are
bounded too. Units: seconds.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import replace

from agents.results.fewer_devices import promising
from automap.bounds.partial_plans import BoundTable
from automap.cost_graph.families import Family, families, parts
from automap.cost_graph.family_bounds import FamilyBounds
from automap.cost_graph.stage_bounds import Level
from automap.errors import UserError
from automap.plan import Plan
from automap.price.estimate import lower_bound_s
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.space.target_limits import plan_space

EXACT = 1e-9
"""Share by which a bound may be below a step time through rounding."""
STAGES = (
    (0.9, Level.UNDECIDED),
    (0.9, Level.ALONE),
    (0.9, Level.TOGETHER),
    (0.97, Level.TOGETHER),
    (1.0, Level.TOGETHER),
)
"""The stages in which the bound of a family is raised (assumed). Each has the share of the step time up to which it
raises the bound, and how sharp the bound is. Low shares come first, because many families quickly exceed them."""
PARTS_SHARE = 0.3
"""Share of the time that parts of the cluster may take together (assumed)."""


def certify(problem: Problem, plan: Plan, seconds: float) -> Plan:
    """The plan of a search with a sharper bound in its record.

    Plans that do not synchronise gradients in every step are not bounded: where the problem allows them, nothing
    changes.

    Args:
        problem: the problem that was searched.
        plan: the plan that the search returned.
        seconds: time that the bound may take.
    """
    if plan.search is None or plan.estimate is None or problem.training.sync_modes != ("synchronous",):
        return plan
    began = time.monotonic()
    fastest_s = plan.search.fastest_s or plan.estimate.step_time_s
    fewer = promising(problem, lambda: time.monotonic() - began > PARTS_SHARE * seconds)
    waiting = [part.problem for part in fewer if part.bound_s < fastest_s]
    bounds = [part.bound_s for part in fewer if part.bound_s >= fastest_s]
    for number, each in enumerate([*waiting, problem]):
        # A part that needs less than its share of the time leaves the rest to the next parts.
        share = 1.0 if number == len(waiting) else PARTS_SHARE * (number + 1) / len(waiting)
        until = began + share * seconds
        try:
            space = plan_space(each)
        except UserError:
            continue  # The hints leave no plan on so few devices.
        bounds.append(certified_s(space, fastest_s, functools.partial(_is_after, until)))
    least = min(bounds)
    proven = plan.search.proven or least >= fastest_s * (1.0 - EXACT)
    found = max(plan.search.lower_bound_s or 0.0, min(least, fastest_s))
    taken_s = time.monotonic() - began
    return replace(plan, search=replace(plan.search, lower_bound_s=found, proven=proven, certified_after_s=taken_s))


def _is_after(moment: float) -> bool:
    """Whether a moment of the clock has passed."""
    return time.monotonic() > moment


def certified_s(space: PlanSpace, step_time_s: float, should_stop: Callable[[], bool]) -> float:
    """Lower bound, in seconds, on the step time of all synchronous plans of a space; it is raised up to `step_time_s`.

    Args:
        space: plans.
        step_time_s: step time of the best plan known.
        should_stop: called before each bound; once it returns true, the bounds so far count.
    """
    table = BoundTable(space)
    anyhow_s = max(table.first.time_s, lower_bound_s(space.problem))
    bounds = FamilyBounds(space)
    if not bounds.is_known:
        return anyhow_s
    weak = {shape: float(seconds) for shape, (seconds, _) in zip(space.shapes, table.shape_bounds, strict=True)}
    fits = [shape for shape, (_, over) in zip(space.shapes, table.shape_bounds, strict=True) if over <= 0.0]
    number = itertools.count()
    waiting: list[tuple[float, int, Family, int]] = []

    def add(seconds: float, family: Family, tried: int) -> None:
        heapq.heappush(waiting, (seconds, next(number), family, tried))

    for family in families(space, fits):
        add(max(anyhow_s, min(weak[shape] for shape in family.shapes)), family, 0)
    least = step_time_s
    while waiting:
        # `tried` is the number of stages that have been tried for the family.
        seconds, _, family, tried = heapq.heappop(waiting)
        if seconds >= least or should_stop():
            least = min(least, seconds)
            break
        stage = _next_stage(tried, seconds / step_time_s)
        if stage is not None:
            share, level = STAGES[stage]
            add(max(seconds, bounds.bound(family, min(least, share * step_time_s), level)), family, stage + 1)
            continue
        divided = parts(family)
        for part in divided:
            add(seconds, part, 0)
        if not divided:
            least = min(least, seconds)
    return max(anyhow_s, least)


def _next_stage(tried: int, reached: float) -> int | None:
    """Number of the next stage that may raise the bound of a family; None where none does.

    Args:
        tried: number of stages that have been tried for the family.
        reached: its bound as a share of the step time.
    """
    share, level = STAGES[tried - 1] if tried else (0.0, None)
    if tried and reached < share * (1.0 - EXACT):
        return tried if level is not Level.TOGETHER else None
    return next((number for number in range(tried, len(STAGES)) if STAGES[number][0] > share), None)

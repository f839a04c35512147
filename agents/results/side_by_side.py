"""Side by side: the best plans with other degrees of parallelism, which a search shows besides the plan that it
returns.

To save time, the plans are priced without reasons (`why`), and verified only where hints may forbid their plainest
form: five of them take a tenth of a second for most models, in place of a second. Units: seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from agents.results.plainest import plain
from automap.bounds.priced_templates import priced_so_far
from automap.hints import Hints
from automap.plan import Degrees, Plan
from automap.price.degrees import degrees_of
from automap.price.estimate import estimated
from automap.price.evaluator import Evaluator
from automap.price.lowered_plan import LoweredPlan
from automap.price.plan_writer import to_plan
from automap.space.space import PlanSpace, Values
from automap.verify import Verifier

Key = frozenset[tuple[int, ...]]
"""Ranks of each kind, in every stage; plans with the same key differ in details."""


def key_of(degrees: Sequence[Degrees]) -> Key:
    """The key of a plan with these degrees."""
    return frozenset(
        (one.pipeline, one.data, one.tensor, one.context, one.expert, one.other, one.repeated) for one in degrees
    )


def fastest_of_each(plans: Iterable[Plan], count: int) -> tuple[Plan, ...]:
    """The fastest plan of each key, at most `count`, the fastest first.

    Args:
        plans: plans with estimates.
        count: largest number of plans.
    """
    found: dict[Key, Plan] = {}
    for plan in sorted(plans, key=lambda plan: plan.step_time_s):
        found.setdefault(key_of(plan.degrees), plan)
    return tuple(found.values())[:count]


def of_unlike_degrees(space: PlanSpace, known: Sequence[Values], count: int) -> tuple[Plan, ...]:
    """The best plans of a space that are known, one for each key, the fastest first.

    Args:
        space: space of the plans.
        known: the best plans of a search, the fastest first; where they have too few keys, templates are added.
        count: largest number of plans.
    """
    evaluator = space.evaluator
    found: dict[Key, LoweredPlan] = {}
    for values in itertools.chain(known, _fastest_templates(space)):
        if len(found) == count:
            break
        lowered = space.lowered(values)
        found.setdefault(key_of(degrees_of(lowered, evaluator)), lowered)
    verifier = Verifier(space.problem) if space.problem.hints != Hints() else None
    written = [_written(lowered, evaluator, verifier) for lowered in found.values()]
    return tuple(sorted(written, key=lambda plan: plan.step_time_s))


def _written(lowered: LoweredPlan, evaluator: Evaluator, verifier: Verifier | None) -> Plan:
    """A plan in its plainest form, unless that breaks a hint that the plan obeys as it was found.

    Args:
        lowered: a plan that fits and obeys the hints.
        evaluator: evaluator of its problem.
        verifier: verifier of its problem; None if there are no hints.
    """
    simple = plain(lowered, evaluator, 0.0)
    plan = estimated(to_plan(simple, evaluator), simple, evaluator)
    if verifier is not None and verifier.violations(plan, memory=False):
        return estimated(to_plan(lowered, evaluator), lowered, evaluator)
    return plan


def _fastest_templates(space: PlanSpace) -> Iterator[Values]:
    """The fastest template that fits into memory of each mesh, sizes of stages and sharding, the fastest first."""
    _, prices = priced_so_far(space)
    times = np.where(prices[:, 1] <= 0.0, prices[:, 0], np.inf)
    seen: set[object] = set()
    for at in np.argsort(times, kind="stable").tolist():
        shape, values = space.listed[at]
        stages = values[space.first.devices : space.first.shares]
        kind = shape.pp, shape.tp, shape.middle, shape.dp, stages, values[space.first.signature :]
        if times[at] < np.inf and kind not in seen:
            seen.add(kind)
            yield values

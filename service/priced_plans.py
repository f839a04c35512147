"""Plans with a price: one of stated degrees, and one that somebody has written, with all that a picture of it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from automap.errors import PlanError

if TYPE_CHECKING:
    from automap.hints import Fix
    from automap.plan import Plan
    from automap.price.evaluator import Evaluator


FIXED = {degree: degree for degree in ("dp", "tp", "pp", "cp", "ep", "zero", "recompute", "schedule")} | {
    "virtual": "virtual_stages"
}
"""Degree of a strategy -> its name in `hints.fix`."""


def hand_made_plan(evaluator: Evaluator, stated: Mapping[str, Any]) -> Plan:
    """The plan of the stated degrees, with its estimate and reasons.

    Args:
        evaluator: of the problem.
        stated: fields of `automap.space.stated_strategy.Strategy`; and `sync`, the mode of which the plan has the
            cheapest variant, synchronous where it is left out.

    Raises:
        PlanError: a degree that does not fit, or that the hints fix to something else; or replicas that cannot be
            trained apart.
    """
    from automap.price.estimate import annotate
    from automap.price.local_sgd import cheapest
    from automap.price.plan_writer import to_plan
    from automap.space.stated_strategy import Strategy, hand_made, recomputes_nothing, undivided

    shape = {name: value for name, value in stated.items() if name != "sync"}
    degrees = Strategy(**_with_fixed(evaluator.problem.hints.fix, shape))
    lowered = hand_made(evaluator, degrees)
    plan = to_plan(lowered, evaluator)
    plan = replace(plan, sync=cheapest(stated.get("sync", "synchronous"), plan, lowered, evaluator))
    plan = annotate(plan, lowered, evaluator)
    notes = (*undivided(evaluator, lowered), *recomputes_nothing(degrees, lowered, plan.training.trainer))
    return replace(plan, warnings=(*plan.warnings, *notes))


def _with_fixed(fix: Fix, stated: Mapping[str, Any]) -> dict[str, Any]:
    """The stated degrees and those that the hints fix.

    Raises:
        PlanError: one of them is stated and fixed to something else.
    """
    found = dict(stated)
    for degree, name in FIXED.items():
        value = getattr(fix, name)
        if value is None:
            continue
        if found.get(degree, value) != value:
            repair = f"Make it {value}, or leave hints.fix.{name} out."
            what = f"contradicts hints.fix.{name}, which is {value}"
            raise PlanError(what, field=degree, value=found[degree], repair=repair)
        found[degree] = value
    return found


def priced_anew(plan: Plan, evaluator: Evaluator, *, with_timeline: bool = False) -> Plan:
    """A plan with a new estimate and new reasons.

    Args:
        plan: any plan.
        evaluator: of its problem.
        with_timeline: whether the estimate says when each action of the step begins and ends, for pictures.

    Raises:
        PlanError: the plan is illegal, or for another model.
    """
    from automap.price.estimate import annotate, timeline
    from automap.price.plan_reader import lower_plan

    lowered = lower_plan(plan, evaluator)
    plan = annotate(plan, lowered, evaluator)
    assert plan.estimate is not None
    if not with_timeline:
        return plan
    return replace(plan, estimate=replace(plan.estimate, timeline=timeline(lowered, evaluator)))

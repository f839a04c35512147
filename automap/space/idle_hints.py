"""Warnings about hints without effect: those about a part of a plan that the found plan does not have."""

from __future__ import annotations

from automap.hints import Hints
from automap.plan import Plan

_FREE_OF = {
    "selective": "it recomputes attention that is not one fused kernel, and the plan has none",
    "full": "the plan has nothing that can be recomputed",
}
"""Recompute mode -> why a plan has none of it."""


def idle_hints(plan: Plan, hints: Hints) -> tuple[str, ...]:
    """One sentence for each hint without effect on a plan.

    These may be `hints.fix.recompute`, `schedule` and `batch_shares`, shardings of constraints, a `hints.fix.dp` whose
    ranks are not replicas, and a `hints.fix.ep` whose ranks split no experts.
    """
    found = []
    mode, schedule = hints.fix.recompute, hints.fix.schedule
    if mode in _FREE_OF and not any(stage.recompute for stage in plan.stages):
        found.append(f"hints.fix.recompute, {mode}, changes nothing: {_FREE_OF[mode]}")
    ranks = len({stage.devices for stage in plan.stages})
    if schedule is not None and ranks == 1:
        found.append(f"hints.fix.schedule, {schedule}, changes nothing: the plan has no pipeline")
    elif schedule == "interleaved" and len(plan.stages) == ranks:
        found.append("hints.fix.schedule, interleaved, changes nothing: each rank of the pipeline has one stage")
    if hints.fix.batch_shares == "proportional" and not any(stage.batch_shares for stage in plan.stages):
        found.append(
            "hints.fix.batch_shares, proportional, changes nothing: no stage has replicas on devices of several kinds, "
            "or they are equally fast"
        )
    uses = {degrees.axes.get("dp", "data") for degrees in plan.degrees}
    if hints.fix.dp not in (None, 1) and "data" not in uses:
        ask = 'the constraint {"scope": "**", "replicate": true} asks for replicas'
        found.append(
            f"hints.fix.dp, {hints.fix.dp}, has ranks that split no samples: their split of something else is faster; "
            f"{ask}"
        )
    if (hints.fix.ep or 1) > 1 and not any("ep" in degrees.expert_axes for degrees in plan.degrees):
        found.append(
            f"hints.fix.ep, {hints.fix.ep}, has ranks that split no experts: hints.constraints bind the experts to "
            "something else; leave one of them out"
        )
    sizes = {axis: max(dict(stage.mesh).get(axis, 1) for stage in plan.stages) for axis in ("dp", "cp", "ep", "tp")}
    for number, constraint in enumerate(hints.constraints):
        for axis, placement in (constraint.sharding or {}).items():
            if sizes.get(axis, 2) == 1 and placement != "B":
                where = f"hints.constraints[{number}].sharding.{axis}"
                ask = f"hints.fix.{axis} can ask for one"
                found.append(f"{where}, {placement}, changes nothing: the plan has no axis {axis}; {ask}")
    return tuple(found)

"""Neighbouring skeletons: plans with as many stages and the same inner axes whose other decisions differ a little."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from agents.planners.pipeline_cuts import cut_anew
from agents.planners.recompute_less import recompute_less
from automap.price.lowered_plan import RECOMPUTE_MODES
from automap.space.batch_shares import NUM_WAYS
from automap.space.shape import Shape
from automap.space.space import PlanSpace, Values

TRIED_CUTS = 4
"""Number of ends of a chunk that are tried, those nearest to its share of the work first."""
TRIED_MOVES = (-2, -1, 1, 2)
"""By how many groups of inner axes the devices of a stage are changed (assumed)."""
FEWER_MICRO_BATCHES = 2
"""Up to so many times fewer or more micro-batches are tried in descents (assumed)."""
TRIED_ORDERS = 8
"""Number of orders of the devices that are tried."""


def repaired(space: PlanSpace, plan: Sequence[int], values: Values) -> Values:
    """The nearest legal plan to one whose signatures are those of a legal plan.

    Args:
        space: space of both.
        plan: [slots] a plan that need not be legal.
        values: the legal plan.
    """
    first = space.first
    kept = next((at for at, (one, other) in enumerate(zip(plan, values, strict=True)) if one != other), len(values))
    if kept < first.cut:
        return space.repair(plan, kept)
    # On the same mesh with the same samples the signatures stay legal, and most of the slots are signatures.
    return (*space.repair(plan[: first.signature], kept), *plan[first.signature :])


def neighbouring_skeletons(space: PlanSpace, values: Values) -> list[Values]:
    """Distinct legal plans with the stages and inner axes of a plan that differ in one decision before the signatures.

    Cuts, devices of a stage, ZeRO stage, batch shares, order of the devices and schedule take other values; all ranks
    recompute alike, or just as much as memory takes; the pipeline is cut again; micro-batches and virtual stages have
    other numbers. Signatures are kept as far as they are legal.
    """
    first, shape = space.first.signature, space.shape(values)
    found: list[list[int]] = []
    tried = {"cut": TRIED_CUTS, "zero": space.zeros.shape[1], "shares": NUM_WAYS}
    tried["order"] = min(TRIED_ORDERS, space.meshes.num_orders(shape.pp))
    if shape.pp > 1 and shape.virtual == 1:
        tried["schedule"] = len(space.schedules)
    idle = {"cut": shape.num_chunks - 1}
    for at, slot in enumerate(space.slots[:first]):
        if slot.index < idle.get(slot.kind, 1):
            others = range(min(slot.num_values, tried.get(slot.kind, 0)))
            found += [[*values[:at], other, *values[at + 1 :]] for other in others if other != values[at]]
    found += _with_other_stages(space, values)
    # More recomputation than is needed may pay with other signatures, which then fit.
    ranks = range(space.first.recompute, space.first.recompute + shape.pp)
    for mode in np.flatnonzero(space.modes).tolist():
        level = space.levels.of_mode(RECOMPUTE_MODES[mode])
        found.append([level if at in ranks else value for at, value in enumerate(values)])
    alike = (shape.pp, shape.tp, shape.middle)
    found += [
        _with_shape(space, values, other)
        for other in space.shapes
        if other != shape and (other.pp, other.tp, other.middle) == alike
    ]
    legal = (repaired(space, plan, values) for plan in found)
    return list(dict.fromkeys([*recompute_less(space, values), *cut_anew(space, values), *legal]))


def _with_shape(space: PlanSpace, values: Values, other: Shape) -> list[int]:
    """A plan with another number of micro-batches or of virtual stages, then cut evenly; it need not be legal."""
    row = space.meshes.values(other)
    plan = [*row, *values[len(row) :]]
    if other.virtual != space.shape(values).virtual:
        plan[space.first.cut : space.first.recompute] = [0] * (space.first.recompute - space.first.cut)
    if other.virtual > 1:
        plan[space.first.schedule] = 0
    return plan


def with_other_virtual_stages(space: PlanSpace, values: Values) -> list[Values]:
    """A plan with each other number of virtual stages, and with as many micro-batches, or about half or twice as many,
    that is legal; none for plans of one stage."""
    shape = space.shape(values)
    if shape.pp == 1:
        return []
    others = (other for other in _similar_shapes(space, shape) if other.virtual != shape.virtual)
    return list(dict.fromkeys(repaired(space, _with_shape(space, values, other), values) for other in others))


def with_other_micro_batches(space: PlanSpace, values: Values) -> list[Values]:
    """A plan with each other number of micro-batches from about half to twice as many, and each stage of ZeRO, that is
    legal."""
    shape, found = space.shape(values), dict[Values, None]()
    for other in _similar_shapes(space, shape):
        if other.virtual == shape.virtual:
            plan = repaired(space, _with_shape(space, values, other), values)
            found |= dict.fromkeys((plan, *with_other_zero(space, plan)))
    return list(found)


def _similar_shapes(space: PlanSpace, shape: Shape) -> list[Shape]:
    """Other shapes with the stages and inner axes of a shape and from about half to twice as many micro-batches."""
    few, many = shape.num_micro_batches / FEWER_MICRO_BATCHES, shape.num_micro_batches * FEWER_MICRO_BATCHES
    alike = (shape.pp, shape.tp, shape.middle)
    return [
        other
        for other in space.shapes
        if (other.pp, other.tp, other.middle) == alike and other != shape and few <= other.num_micro_batches <= many
    ]


def _with_other_stages(space: PlanSpace, values: Values) -> list[list[int]]:
    """A plan in which one stage has a few devices more or fewer, which the last one has fewer or more."""
    shape, meshes = space.shape(values), space.meshes
    if shape.pp == 1 or not meshes.may_differ(shape):
        return []
    # Devices are counted in parts; a stage has whole groups of inner axes. 0 stands for the usual number.
    step, found = max(1, shape.tp * shape.middle // meshes.part), list[list[int]]()
    for stage, devices in enumerate(space.stage_devices(values)[:-1]):
        at = space.first.devices + stage
        for move in TRIED_MOVES:
            parts = devices // meshes.part + step * move
            if 0 < parts < space.slots[at].num_values:
                value = 0 if parts * meshes.part == shape.size else parts
                found.append([*values[:at], value, *values[at + 1 :]])
    return found


def with_other_zero(space: PlanSpace, values: Values) -> list[Values]:
    """A plan with each other stage of ZeRO that is legal."""
    at = space.first.zero
    others = (repaired(space, [*values[:at], zero, *values[at + 1 :]], values) for zero in range(space.zeros.shape[1]))
    return [plan for plan in dict.fromkeys(others) if plan != values]


def with_other_schedule(space: PlanSpace, values: Values) -> list[Values]:
    """A plan with each other order of its micro-batches that is legal; none for plans with virtual stages."""
    at, shape = space.first.schedule, space.shape(values)
    if shape.pp == 1 or shape.virtual > 1:
        return []
    others = (repaired(space, [*values[:at], one, *values[at + 1 :]], values) for one in range(len(space.schedules)))
    return [plan for plan in dict.fromkeys(others) if plan != values]


def with_other_shares(space: PlanSpace, values: Values) -> list[Values]:
    """A plan with each other way to share out samples, where devices of a stage are unlike.

    Samples that one way cannot share out over all axes of a mesh may be shared out with the next smaller or larger
    number of micro-batches.
    """
    first = space.first
    ways = range(space.slots[first.shares].num_values) if len(set(space.problem.cluster.alike)) > 1 else ()
    found: dict[Values, None] = {}
    for step, way in itertools.product((0, -1, 1), ways):
        plan = list(values)
        plan[first.micro_batches] += step
        plan[first.shares] = way
        if 0 <= plan[first.micro_batches] < space.slots[first.micro_batches].num_values:
            found[repaired(space, plan, values)] = None
    found.pop(values, None)
    return list(found)

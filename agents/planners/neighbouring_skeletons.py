"""Neighbouring skeletons: plans with the same number of stages and the same inner axes, and one other decision changed.

A skeleton is all decisions of a plan but its signatures.
"""

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
"""Number of ends of a chunk that are tried (assumed): those with which its work is nearest to its share of all work."""
TRIED_MOVES = (-2, -1, 1, 2)
"""How many replicas are added to a stage, or taken from it where negative; a replica is the devices of the inner axes
(assumed)."""
FEWER_MICRO_BATCHES = 2
"""Largest factor by which descents change the number of micro-batches (assumed)."""
TRIED_ORDERS = 8
"""Number of orders of the devices that are tried (assumed)."""


def repaired(space: PlanSpace, plan: Sequence[int], values: Values) -> Values:
    """Makes a changed plan legal, with as few further changes as possible.

    Args:
        space: the plan space.
        plan: [slots] values of the changed plan, whose signatures are those of `values`.
        values: values of the legal plan before the change.
    """
    first = space.first
    same = next((at for at, (one, other) in enumerate(zip(plan, values, strict=True)) if one != other), len(values))
    if same < first.cut:
        return space.repair(plan, same)
    # On the same mesh with the same samples the signatures stay legal, and most of the slots are signatures.
    return (*space.repair(plan[: first.signature], same), *plan[first.signature :])


def neighbouring_skeletons(space: PlanSpace, values: Values) -> list[Values]:
    """Distinct legal plans that differ from a plan in one decision, with the same stages and inner axes.

    These have another cut, other devices of a stage, another ZeRO stage, other batch shares, another order of the
    devices, another schedule, or another number of micro-batches or virtual stages. In others all ranks recompute
    alike, each rank recomputes only as much as memory requires, or all cuts are new (`cut_anew`). Signatures stay as
    far as they are legal.
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
    # More recomputation than is needed can gain: it makes room for faster signatures.
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
    """A plan with the numbers of micro-batches and virtual stages of another shape; it need not be legal.

    If the number of virtual stages differs, the pipeline is cut evenly.
    """
    row = space.meshes.values(other)
    plan = [*row, *values[len(row) :]]
    if other.virtual != space.shape(values).virtual:
        plan[space.first.cut : space.first.recompute] = [0] * (space.first.recompute - space.first.cut)
    if other.virtual > 1:
        plan[space.first.schedule] = 0
    return plan


def with_other_virtual_stages(space: PlanSpace, values: Values) -> list[Values]:
    """Legal plans with other numbers of virtual stages, and from half to twice as many micro-batches; none for plans of
    one stage."""
    shape = space.shape(values)
    if shape.pp == 1:
        return []
    others = (other for other in _similar_shapes(space, shape) if other.virtual != shape.virtual)
    return list(dict.fromkeys(repaired(space, _with_shape(space, values, other), values) for other in others))


def with_other_micro_batches(space: PlanSpace, values: Values) -> list[Values]:
    """Legal plans with other numbers of micro-batches, from half to twice as many, each under every ZeRO stage."""
    shape, found = space.shape(values), dict[Values, None]()
    for other in _similar_shapes(space, shape):
        if other.virtual == shape.virtual:
            plan = repaired(space, _with_shape(space, values, other), values)
            found |= dict.fromkeys((plan, *with_other_zero(space, plan)))
    return list(found)


def _similar_shapes(space: PlanSpace, shape: Shape) -> list[Shape]:
    """Other shapes with the same stages and inner axes, and from half to twice as many micro-batches."""
    few, many = shape.num_micro_batches / FEWER_MICRO_BATCHES, shape.num_micro_batches * FEWER_MICRO_BATCHES
    alike = (shape.pp, shape.tp, shape.middle)
    return [
        other
        for other in space.shapes
        if (other.pp, other.tp, other.middle) == alike and other != shape and few <= other.num_micro_batches <= many
    ]


def _with_other_stages(space: PlanSpace, values: Values) -> list[list[int]]:
    """Plans in which devices move between one stage and the last one; they need not be legal."""
    shape, meshes = space.shape(values), space.meshes
    if shape.pp == 1 or not meshes.may_differ(shape):
        return []
    # Slots count devices in parts of `meshes.part`. The value 0 stands for equally many devices in each stage.
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
    """Legal plans that differ in their ZeRO stage."""
    at = space.first.zero
    others = (repaired(space, [*values[:at], zero, *values[at + 1 :]], values) for zero in range(space.zeros.shape[1]))
    return [plan for plan in dict.fromkeys(others) if plan != values]


def with_other_schedule(space: PlanSpace, values: Values) -> list[Values]:
    """Legal plans that differ in their schedule; none for plans of one stage or with virtual stages."""
    at, shape = space.first.schedule, space.shape(values)
    if shape.pp == 1 or shape.virtual > 1:
        return []
    others = (repaired(space, [*values[:at], one, *values[at + 1 :]], values) for one in range(len(space.schedules)))
    return [plan for plan in dict.fromkeys(others) if plan != values]


def with_other_shares(space: PlanSpace, values: Values) -> list[Values]:
    """Legal plans with other batch shares; none where all hosts are of one kind.

    With some numbers of samples a way to share them out is not possible on all axes of a mesh, so the next smaller and
    the next larger number of micro-batches are tried too.
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

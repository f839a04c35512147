"""From a choice to the values of a space that decide it: the way back of `PlanSpace.choice`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from automap.price.lowered_plan import RECOMPUTE_MODES, LoweredPlan
from automap.price.plan_reader import same_lowered
from automap.space.shape import Shape

if TYPE_CHECKING:
    from automap.space.space import PlanSpace

Ints = npt.NDArray[np.int64]


def values_of(space: PlanSpace, lowered: LoweredPlan) -> tuple[int, ...] | None:
    """The values that decide `lowered`, or None if it lies outside `space`."""
    stages = lowered.layout.stages
    inner = {tuple(int(size) for size in stage.axes[1:]) for stage in stages}
    if lowered.axes != space.axes or len(inner) != 1:
        return None
    (*middle, tp), pp = next(iter(inner)), len(stages)
    shape = Shape(
        pp=pp,
        tp=tp,
        dp=space.meshes.devices // pp // math.prod((*middle, tp)),
        num_micro_batches=lowered.num_micro_batches,
        samples=lowered.samples,
        virtual=len(lowered.chunks) // pp,
        middle=math.prod(middle),
    )
    placed = _stage_values(space, lowered)
    if shape not in space.shapes or placed is None:
        return None
    values: list[int] = [*space.meshes.values(shape), *placed]
    if space.layout(values) is not lowered.layout:
        return None
    way = _shares_value(space, values, lowered)
    if way is None:
        return None
    values.append(way)
    shares = space.cut_shares(values)
    start = 0
    for slot in space.slots[space.first_cut : space.first_signature]:
        if slot.kind == "cut" and slot.index < shape.num_chunks - 1:
            end = start + len(lowered.chunks[slot.index])
            candidates = space.candidates(start, slot.index, shape.num_chunks, shares[slot.index]).tolist()
            if end not in candidates:
                return None
            values.append(candidates.index(end))
            start = end
        elif slot.kind == "recompute" and slot.index < pp:
            values.append(_mode(space, lowered, slot.index))
        elif slot.kind == "zero":
            values.append(lowered.zero)
        else:
            values.append(0)
    chosen: dict[int, Ints] = {}
    for segment in (s for chunk in lowered.chunks for s in chunk):
        chosen.setdefault(space.linkage.blocks.units[segment.unit].type, segment.chosen)
    for slot in space.slots[space.first_signature :]:
        group = space.linkage.types[slot.unit_type].groups[slot.group]
        values.append(int(chosen[slot.unit_type][group.leader, slot.index]))
    found = space.repair(values)
    return found if found == tuple(values) and same_lowered(space.lowered(found), lowered) else None


def _stage_values(space: PlanSpace, lowered: LoweredPlan) -> list[int] | None:
    """The values of the slots of `STAGE_KINDS`, or None if there are none such."""
    stages, meshes = lowered.layout.stages, space.meshes
    turn = tuple(device for stage in stages for device in stage.devices)
    kind = space.schedules[0] if lowered.kind == "interleaved" else lowered.kind
    if turn not in meshes.orders or kind not in space.schedules:
        return None
    values = [space.schedules.index(kind), meshes.orders.index(turn)]
    even = meshes.devices // len(stages)
    for slot in space.slots[space.first_stage + 2 : space.shares_slot]:
        size = len(stages[slot.index].devices) if slot.index < len(stages) - 1 else even
        if size != even and size % meshes.part:
            return None
        values.append(0 if size == even else size // meshes.part)
    return values


def _shares_value(space: PlanSpace, values: Sequence[int], lowered: LoweredPlan) -> int | None:
    """The value of the slot `shares` behind all slots before, or None if there is none such."""
    if not lowered.shares:
        return 0
    legal = np.flatnonzero(space.legal(values)).tolist()
    return next((way for way in legal if space.batch_shares((*values, way)) == lowered.shares), None)


def _mode(space: PlanSpace, lowered: LoweredPlan, rank: int) -> int:
    """The first recompute mode that all chunks of a rank follow; 0 where none does."""
    segments = [s for chunk in lowered.chunks[rank :: len(lowered.layout.stages)] for s in chunk]
    types = [space.linkage.blocks.units[s.unit].type for s in segments]
    for mode, name in enumerate(RECOMPUTE_MODES):
        if all(
            np.array_equal(s.recomputed, space.evaluator.masks(t)[name]) for s, t in zip(segments, types, strict=True)
        ):
            return mode
    return 0

"""From a lowered plan to its values in a space: the inverse of `PlanSpace.lowered`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from automap.arrays import Ints
from automap.price.lowered_plan import LoweredPlan, Segment
from automap.space.decisions import DECISIONS, SHAPE_KINDS, Values
from automap.space.shape import Shape
from automap.space.stepping import SteppedSpace


def values_of(space: SteppedSpace, lowered: LoweredPlan) -> Values | None:
    """The values of the plan of `space` that may be equal to `lowered`; None if it has no such plan. The caller must
    compare the two plans."""
    stages = lowered.layout.stages
    inner = {tuple(int(size) for size in stage.axes[1:]) for stage in stages}
    if lowered.axes != space.axes or len(inner) != 1:
        return None
    (*middle, tp), pp = next(iter(inner)), len(stages)
    # If equal stages are not possible, all stages but the first one have equally many devices.
    is_equal = space.meshes.has_equal(pp, math.prod((*middle, tp)))
    size = space.meshes.devices // pp if is_equal else len(stages[-1].devices)
    shape = Shape(
        pp=pp,
        tp=tp,
        dp=size // math.prod((*middle, tp)),
        num_micro_batches=lowered.num_micro_batches,
        samples=lowered.samples,
        virtual=len(lowered.chunks) // pp,
        middle=math.prod(middle),
    )
    if shape not in space.shapes:
        return None
    values = list(space.meshes.values(shape))
    for decision in DECISIONS[len(SHAPE_KINDS) :]:
        read = _READERS.get(decision.kind)
        found = decision.read(space, lowered) if read is None else read(space, values, lowered)
        if found is None:
            return None
        values += found
    return tuple(values) if space.repair(values) == tuple(values) else None


def _order(space: SteppedSpace, values: Sequence[int], lowered: LoweredPlan) -> list[int] | None:
    turn = tuple(device for stage in lowered.layout.stages for device in stage.devices)
    if turn not in space.meshes.orders:
        return None
    # A single stage has one order; the kernels have no layout for it in another one.
    number = space.meshes.orders.index(turn)
    return [number] if number in np.flatnonzero(space.legal(values)) else None


def _devices(space: SteppedSpace, values: Sequence[int], lowered: LoweredPlan) -> list[int] | None:
    stages, part = lowered.layout.stages, space.meshes.part
    found: list[int] = []
    usual = space.meshes.sizes(space.shape(values))
    for slot in space.slots[space.first.devices : space.first.shares]:
        if slot.index >= len(stages) - 1 or (size := len(stages[slot.index].devices)) == usual[slot.index]:
            found.append(0)
            continue
        if size % part or not space.legal((*values, *found))[size // part]:
            return None
        found.append(size // part)
    return found if space.layout((*values, *found)) is lowered.layout else None


def _shares(space: SteppedSpace, values: Sequence[int], lowered: LoweredPlan) -> list[int] | None:
    if not lowered.shares:
        return [0]
    legal = np.flatnonzero(space.legal(values)).tolist()
    return next(([way] for way in legal if space.batch_shares((*values, way)) == lowered.shares), None)


def _cuts(space: SteppedSpace, values: Sequence[int], lowered: LoweredPlan) -> list[int] | None:
    num_chunks, shares = len(lowered.chunks), space.cut_shares(values)
    found = [0] * (space.first.recompute - space.first.cut)
    start = 0
    for chunk in range(num_chunks - 1):
        end = start + len(lowered.chunks[chunk])
        candidates = space.candidates(start, chunk, num_chunks, shares[chunk]).tolist()
        if end not in candidates:
            return None
        found[chunk] = candidates.index(end)
        start = end
    return found


def _levels(space: SteppedSpace, values: Sequence[int], lowered: LoweredPlan) -> list[int] | None:
    """For each rank, the first level of recomputation that all of its chunks have; None if there is none."""
    found = [0] * (space.first.zero - space.first.recompute)
    num_ranks = len(lowered.layout.stages)
    legal = np.flatnonzero(space.levels.legal(len(lowered.chunks))).tolist()
    for rank in range(num_ranks):
        chunks = lowered.chunks[rank::num_ranks]
        level = next((level for level in legal if all(_follows(space, chunk, level) for chunk in chunks)), None)
        if level is None:
            return None
        found[rank] = level
    return found


def _follows(space: SteppedSpace, chunk: Sequence[Segment], level: int) -> bool:
    """Whether the recomputation of a chunk's units is that of a level."""
    units = space.linkage.blocks.units
    for place, segment in enumerate(chunk):
        mask = space.evaluator.masks(units[segment.unit].type)[space.levels.mode(level, place, len(chunk))]
        if not np.array_equal(segment.recomputed, mask):
            return False
    return True


def _signatures(space: SteppedSpace, values: Sequence[int], lowered: LoweredPlan) -> list[int]:
    chosen: dict[int, Ints] = {}
    for segment in (s for chunk in lowered.chunks for s in chunk):
        chosen.setdefault(space.linkage.blocks.units[segment.unit].type, segment.chosen)
    found = []
    for slot in space.slots[space.first.signature :]:
        group = space.linkage.types[slot.unit_type].groups[slot.group]
        found.append(int(chosen[slot.unit_type][group.leader, slot.index]))
    return found


_READERS: dict[str, Callable[[SteppedSpace, Sequence[int], LoweredPlan], list[int] | None]] = {
    "order": _order,
    "devices": _devices,
    "shares": _shares,
    "cut": _cuts,
    "recompute": _levels,
    "signature": _signatures,
}
"""For kinds of decisions whose values depend on the values before them: a function of the space, these values and the
plan that returns the kind's values, or None if there are none."""

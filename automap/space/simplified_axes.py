"""Simplified axes: a plan can be written with several sets of mesh axes; this module finds the simplest one.

An axis on which nothing is split can be removed: its ranks all do the same work, and the plan without the axis leaves
all but one of them idle. Two neighbouring axes can be written as one axis if every operator has the same placements on
both, and ZeRO shards over both or neither. By convention, an axis that splits the batch is the outermost one, and an
axis that does not is the innermost one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from automap.arrays import Ints
from automap.price.evaluator import Evaluator
from automap.price.lowered_plan import LoweredPlan, Segment
from automap.price.stage_reader import default_signatures

Role = Literal["none", "batch", "other", "idle"]
"""Use of an axis. `none`: it has one rank. `batch`: most operators split their batch over it. `other`: some operators
split something over it. `idle`: no operator splits anything over it."""

ROUNDING = 1e-9
"""Relative difference below which prices count as equal: sums of the same terms in another order (assumed)."""


def sizes(lowered: LoweredPlan) -> Ints:
    """[axes] largest number of ranks of each axis in any stage."""
    found: Ints = np.max([stage.axes for stage in lowered.layout.stages], axis=0).astype(np.int64)
    return found


def role(lowered: LoweredPlan, evaluator: Evaluator, axis: int) -> Role:
    """The use of an axis, see `Role`."""
    if sizes(lowered)[axis] == 1:
        return "none"
    num_batch = num_whole = num_other = 0
    for _, value, (whole, batch) in _signatures(lowered, evaluator, axis):
        num_batch += value == batch != whole
        num_whole += value == whole != batch
        num_other += value not in (whole, batch)
    if num_batch > num_whole:
        return "batch"
    return "other" if num_batch + num_other else "idle"


def num_unlike(lowered: LoweredPlan, evaluator: Evaluator) -> int:
    """Number of operators that differ from the default of an axis, summed over the axes.

    The default is to split the batch on an axis with the role `batch`, and to be whole on all others. Operators of
    equal units with equal signatures count once.
    """
    seen: set[tuple[int, int, int]] = set()
    for axis in np.flatnonzero(sizes(lowered) > 1).tolist():
        is_batch = role(lowered, evaluator, axis) == "batch"
        for row, value, usual in _signatures(lowered, evaluator, axis):
            if value != usual[is_batch]:
                seen.add((row, axis, value))
    return len(seen)


def canonical(lowered: LoweredPlan, evaluator: Evaluator) -> LoweredPlan:
    """The same plan with axes in their conventional places; axes with the same use are joined if the price stays the
    same."""
    lowered, limit_s = in_place(lowered, evaluator), 0.0
    for merge in merges(lowered, evaluator, same_zero=True):
        limit_s = limit_s or evaluator.evaluate(lowered).step_time_s * (1.0 + ROUNDING)
        outcome = evaluator.evaluate(merge)
        if outcome.fits and outcome.step_time_s <= limit_s:
            return canonical(merge, evaluator)
    return lowered


def in_place(lowered: LoweredPlan, evaluator: Evaluator) -> LoweredPlan:
    """The same plan with its only axis moved to the conventional place: outermost if it splits the batch, else
    innermost."""
    live = np.flatnonzero(sizes(lowered) > 1).tolist()
    if not live:
        return lowered
    first, last = live[0], live[-1]
    if first > 0 and role(lowered, evaluator, first) == "batch":
        return _moved(lowered, evaluator, first, 0)
    inner = len(lowered.axes) - 1
    is_lone_outer = first == last == 0 != inner
    if is_lone_outer and role(lowered, evaluator, 0) == "other" and not lowered.shares and not lowered.spread_over:
        return _moved(lowered, evaluator, 0, inner)
    return lowered


def merges(lowered: LoweredPlan, evaluator: Evaluator, *, same_zero: bool = False) -> Iterator[LoweredPlan]:
    """The plans with two neighbouring axes joined, for every two on which each operator has the same placements.

    Args:
        same_zero: whether to join only axes of which ZeRO shards over both or neither; otherwise ZeRO over one of them
            becomes ZeRO over both.
    """
    live = np.flatnonzero(sizes(lowered) > 1).tolist()
    for outer, inner in itertools.pairwise(live):
        if any(mine is not None for mine in lowered.shares) and outer == 0:
            continue
        is_alike = all(np.array_equal(s.chosen[:, outer], s.chosen[:, inner]) for s in _distinct(lowered, evaluator))
        if not is_alike or (same_zero and lowered.zero and lowered.zero_axes[outer] != lowered.zero_axes[inner]):
            continue
        ranks = [int(stage.axes[outer] * stage.axes[inner]) for stage in lowered.layout.stages]
        if role(lowered, evaluator, outer) == "batch" and any(lowered.samples % count for count in ranks):
            continue

        def joined(mesh: list[int], rank: int, outer: int = outer, inner: int = inner) -> list[int]:
            mesh[outer], mesh[inner] = mesh[outer] * mesh[inner], 1
            return mesh

        zero_axes = lowered.zero_axes.copy()
        zero_axes[outer] |= zero_axes[inner]
        both = replace(lowered, zero_axes=zero_axes)
        yield in_place(_with_meshes(both, evaluator, joined, whole=inner), evaluator)


def without_idle(lowered: LoweredPlan, evaluator: Evaluator) -> Iterator[LoweredPlan]:
    """The plans without an axis on the stages that split nothing over it, for every such axis; see `dropped`."""
    ranks = range(len(lowered.layout.stages))
    for axis in range(len(lowered.axes)):
        idle = [rank for rank in ranks if _is_idle(lowered, evaluator, axis, rank)]
        if idle:
            yield in_place(dropped(lowered, evaluator, axis, idle), evaluator)


def repeats(lowered: LoweredPlan, evaluator: Evaluator) -> bool:
    """Whether in some stage all ranks of some axis do the same work."""
    ranks = range(len(lowered.layout.stages))
    return any(_is_idle(lowered, evaluator, axis, rank) for axis in range(len(lowered.axes)) for rank in ranks)


def _is_idle(lowered: LoweredPlan, evaluator: Evaluator, axis: int, rank: int) -> bool:
    """Whether all ranks of an axis do the same work in a stage."""
    if lowered.layout.stages[rank].axes[axis] == 1:
        return False
    mine = replace(lowered, chunks=lowered.chunks[rank :: len(lowered.layout.stages)])
    return all(value == whole for _, value, (whole, _) in _signatures(mine, evaluator, axis))


def dropped(lowered: LoweredPlan, evaluator: Evaluator, axis: int, ranks: Sequence[int]) -> LoweredPlan:
    """The plan in which some pipeline ranks, which split nothing over an axis, use only its first devices."""

    def alone(mesh: list[int], rank: int) -> list[int]:
        mesh[axis] = 1 if rank in ranks else mesh[axis]
        return mesh

    gone = len(ranks) == len(lowered.layout.stages)
    found = _with_meshes(lowered, evaluator, alone, whole=axis if gone else None)
    if axis == 0 and lowered.shares:
        found = replace(found, shares=tuple(None if r in ranks else mine for r, mine in enumerate(lowered.shares)))
    return found


def _distinct(lowered: LoweredPlan, evaluator: Evaluator) -> list[Segment]:
    """One segment for each set of segments with the same operators and signatures."""
    found: dict[tuple[int, int, int, bytes], Segment] = {}
    for segments in lowered.chunks:
        for s in segments:
            key = (evaluator.blocks.units[s.unit].type, s.first, s.last, s.chosen.tobytes())
            found.setdefault(key, s)
    return list(found.values())


def _signatures(lowered: LoweredPlan, evaluator: Evaluator, axis: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """The operator row and the signature of every operator on an axis, and its `default_signatures`."""
    for segment in _distinct(lowered, evaluator):
        unit_type = evaluator.blocks.units[segment.unit].type
        base = int(evaluator.tables.spans[unit_type])
        for k, value in enumerate(segment.chosen[:, axis].tolist()):
            yield segment.first + k, value, default_signatures(evaluator, unit_type, segment.first - base + k)


def _with_meshes(
    lowered: LoweredPlan, evaluator: Evaluator, change: Callable[[list[int], int], list[int]], *, whole: int | None
) -> LoweredPlan:
    """The plan on other meshes.

    Devices are kept as far as a mesh has places for them, the first ones along every axis.

    Args:
        change: mesh of a stage and its pipeline rank to the new mesh.
        whole: axis that has one rank in all new meshes, so that nothing is split over it; None = no such axis.
    """
    stages = []
    for rank, stage in enumerate(lowered.layout.stages):
        before = [int(size) for size in stage.axes]
        mesh = change(list(before), rank)
        grid = np.array(stage.devices)
        if np.prod(mesh) < grid.size:
            grid = grid.reshape(before)[tuple(slice(size) for size in mesh)]
        stages.append((tuple(grid.reshape(-1).tolist()), tuple(mesh)))
    zero_axes = lowered.zero_axes.copy()
    if whole is not None:
        zero_axes[whole] = False
    return replace(
        lowered,
        layout=evaluator.layout_of(stages),
        chunks=lowered.chunks if whole is None else _with_columns(lowered, evaluator, {whole: None}),
        zero=lowered.zero if zero_axes.any() else 0,
        zero_axes=zero_axes,
    )


def _moved(lowered: LoweredPlan, evaluator: Evaluator, source: int, target: int) -> LoweredPlan:
    """The plan with an axis moved to the place of one that has one rank; the axes between them have one rank too."""
    stages = []
    for stage in lowered.layout.stages:
        mesh = [int(size) for size in stage.axes]
        mesh[target], mesh[source] = mesh[source], mesh[target]
        stages.append((stage.devices, tuple(mesh)))
    zero_axes = lowered.zero_axes.copy()
    zero_axes[target], zero_axes[source] = zero_axes[source], False
    return replace(
        lowered,
        layout=evaluator.layout_of(stages),
        chunks=_with_columns(lowered, evaluator, {target: source, source: None}),
        zero_axes=zero_axes,
        spread_over=tuple(target if axis == source else axis for axis in lowered.spread_over),
    )


def _with_columns(
    lowered: LoweredPlan, evaluator: Evaluator, columns: dict[int, int | None]
) -> tuple[tuple[Segment, ...], ...]:
    """The chunks with the signatures of each target axis taken from its source axis, or whole where that is None."""
    known: dict[tuple[int, int, bytes], Ints] = {}

    def changed(segment: Segment) -> Segment:
        unit_type = evaluator.blocks.units[segment.unit].type
        key = (unit_type, segment.first, segment.chosen.tobytes())
        if key not in known:
            base = int(evaluator.tables.spans[unit_type])
            offsets = range(segment.first - base, segment.last - base)
            chosen = segment.chosen.copy()
            for target, source in columns.items():
                chosen[:, target] = (
                    [default_signatures(evaluator, unit_type, offset)[0] for offset in offsets]
                    if source is None
                    else segment.chosen[:, source]
                )
            known[key] = chosen
        return replace(segment, chosen=known[key])

    return tuple(tuple(changed(segment) for segment in segments) for segments in lowered.chunks)

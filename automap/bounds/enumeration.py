"""Enumeration: all plans of a space in the order of their values, many at a time.

A *beginning* is a plan of which only the first slots are decided. `extend` gives every legal continuation of many
beginnings by one decision, and `bounded` the lower bounds of each. Legal values come from `PlanSpace.legal`, which is
called once for all beginnings that have equal legal values. Units: seconds; memory as share of capacity (overflow).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from automap.arrays import Floats, Ints, Mask
from automap.bounds.partial_plans import BoundTable
from automap.price.lowered_plan import RECOMPUTE_MODES
from automap.schedule import SPLIT_KINDS
from automap.space.space import PlanSpace, Slot

LISTED = 4096
"""Approximate number of plans that `plans` lists at a time (assumed)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beginnings:
    """Beginnings of plans in which equally many slots are decided."""

    values: Ints
    """[n, decided slots] values."""
    ends: Ints
    """[n, decided cuts] units before the end of each chunk; for chunks that a plan does not have, that of its last
    one."""
    bounds: Floats
    """[n, 2] lower bounds on seconds and overflow of all completions."""
    meshes: Ints
    """[n] number of the set of meshes of the stages; 0 until all slots before the signatures are decided."""

    def __len__(self) -> int:
        return len(self.values)

    def take(self, which: Ints | Mask | slice) -> Beginnings:
        """Some of the beginnings, in order."""
        return Beginnings(
            values=self.values[which], ends=self.ends[which], bounds=self.bounds[which], meshes=self.meshes[which]
        )


class Enumeration:
    """The plans of a space as a tree."""

    def __init__(self, space: PlanSpace) -> None:
        self.space = space
        self.table = BoundTable(space)
        # [levels] steps of a chunk that are recomputed as a whole.
        full = RECOMPUTE_MODES.index("full")
        self._full_steps = np.rint(space.levels.shares()[:, full] * space.levels.steps).astype(np.int64)
        self._shapes = {space.meshes.values(shape): number for number, shape in enumerate(space.shapes)}
        self._meshes: dict[tuple[tuple[tuple[float, ...], int], ...], int] = {}
        self._masks: dict[tuple[int, ...], Mask] = {}
        self._works: dict[tuple[int, ...], tuple[Floats, Floats, Floats]] = {}
        self._of_shapes: dict[tuple[int, ...], Floats] = {}
        for values, number in self._shapes.items():
            bound = self.table.shape_bounds[number]
            for depth in range(len(values) + 1):
                known = self._of_shapes.get(values[:depth], bound)
                self._of_shapes[values[:depth]] = np.minimum(known, bound)

    def root(self) -> Beginnings:
        """The beginning in which no slot is decided."""
        return Beginnings(
            values=np.zeros((1, 0), dtype=np.int64),
            ends=np.zeros((1, 0), dtype=np.int64),
            bounds=self._of_shapes[()][None],
            meshes=np.zeros(1, dtype=np.int64),
        )

    def is_done(self, beginnings: Beginnings) -> bool:
        """Whether every slot is decided."""
        return bool(beginnings.values.shape[1] == len(self.space.slots))

    def plans(self, beginnings: Beginnings | None = None) -> Iterator[Ints]:
        """All completions, [n, slots] at a time, in the order of their values."""
        pending = [self.root() if beginnings is None else beginnings]
        while pending:
            head = pending.pop()
            if self.is_done(head):
                yield head.values
                continue
            grown = self.extend(head)
            parts = [grown.take(slice(i, i + LISTED)) for i in range(0, len(grown), LISTED)]
            pending += reversed(parts)

    def extend(self, beginnings: Beginnings) -> Beginnings:
        """Every legal continuation by one slot, in the order of the values, with the bounds of its beginning."""
        slot = self.space.slots[beginnings.values.shape[1]]
        if beginnings.values.shape[1] == self.space.first.signature:
            beginnings = self._with_meshes(beginnings)
        keys = self._keys(slot, beginnings)
        first, alike = _distinct(keys)
        rows = [tuple(row) for row in beginnings.values[first].tolist()]
        legal = np.array([self._mask(slot, row, key) for row, key in zip(rows, keys[first].tolist(), strict=True)])
        parent, value = np.nonzero(legal[alike])
        ends = beginnings.ends[parent]
        if slot.kind == "cut":
            found = np.zeros(legal.shape, dtype=np.int64)
            for at, row in enumerate(rows):
                found[at] = beginnings.ends[first[at], -1] if slot.index else 0
                shape = self.space.shape(row)
                if slot.index < shape.num_chunks - 1:
                    share = self.space.cut_shares(row)[slot.index]
                    candidates = self.space.candidates(found[at, 0], slot.index, shape.num_chunks, share)
                    found[at, : len(candidates)] = candidates
            ends = _with_column(ends, found[alike[parent], value])
        return Beginnings(
            values=_with_column(beginnings.values[parent], value),
            ends=ends,
            bounds=beginnings.bounds[parent],
            meshes=beginnings.meshes[parent],
        )

    def _with_meshes(self, beginnings: Beginnings) -> Beginnings:
        """The beginnings with their sets of meshes filled in."""
        first, alike = _distinct(beginnings.values[:, : self.space.first.cut])
        numbers = []
        for row in beginnings.values[first].tolist():
            sizes, samples = self.space.unlike_meshes(row)
            key = tuple(sorted(zip(map(tuple, sizes.tolist()), samples.tolist(), strict=True)))
            numbers.append(self._meshes.setdefault(key, len(self._meshes)))
        return replace(beginnings, meshes=np.array(numbers, dtype=np.int64)[alike])

    def _mask(self, slot: Slot, row: tuple[int, ...], key: list[int]) -> Mask:
        """[values] legal values of a slot after `row`; they are the same after all beginnings with the same key."""
        if slot.kind != "signature":
            return self.space.legal(row)
        known = (len(row), *key)
        if known not in self._masks:
            self._masks[known] = self.space.legal(row)
        return self._masks[known]

    def _keys(self, slot: Slot, beginnings: Beginnings) -> Ints:
        """[n, columns] key of each beginning: beginnings with equal keys have the same legal values of a slot."""
        values, space = beginnings.values, self.space
        if len(values[0]) < space.first.cut:
            return values
        shape = values[:, : space.first.cut]
        if slot.kind == "cut":
            return np.concatenate([shape, beginnings.ends[:, -1:]], axis=1)
        if slot.kind == "recompute" and space.constrained.recomputes:
            return np.concatenate([shape, beginnings.ends], axis=1)
        if slot.kind == "signature":
            return np.concatenate([beginnings.meshes[:, None], values[:, values.shape[1] - slot.index :]], axis=1)
        return shape

    # -- bounds --------------------------------------------------------------------------------------------------

    def bounded(self, beginnings: Beginnings) -> Beginnings:
        """The beginnings with bounds from all of their decisions."""
        depth = beginnings.values.shape[1]
        if depth >= self.space.first.signature:
            values = np.full((len(beginnings), len(self.space.slots)), -1, dtype=np.int64)
            values[:, :depth] = beginnings.values
            found = self.space.bound(values)
        elif depth <= self.space.first.cut:
            found = np.array(
                [self._of_shapes[tuple(row)] for row in beginnings.values[:, : self.space.first.schedule].tolist()]
            )
        else:
            found = beginnings.bounds.copy()
            stages, alike = np.unique(beginnings.values[:, : self.space.first.cut], axis=0, return_inverse=True)
            for number, values in enumerate(stages.tolist()):
                rows = np.flatnonzero(alike.reshape(-1) == number)
                found[rows, 0] = self._pipeline_bounds(tuple(values), beginnings.take(rows))
        return replace(beginnings, bounds=np.maximum(beginnings.bounds, found))

    def _work(self, values: tuple[int, ...]) -> tuple[Floats, Floats, Floats]:
        """`BoundTable.work` of the stages that `values` decide, and [ranks] their devices."""
        if values not in self._works:
            space = self.space
            number = self._shapes[values[: space.first.schedule]]
            is_unlike = any(values[space.first.schedule + 2 : space.first.shares])
            stages = space.rows_seen(values) if is_unlike else ()
            devices = np.array(space.stage_devices(values), dtype=np.float64)
            self._works[values] = (*self.table.work(number, stages), devices)
        return self._works[values]

    def _pipeline_bounds(self, values: tuple[int, ...], beginnings: Beginnings) -> Floats:
        """[n] lower bounds on the step time: from the chunks whose ends are decided on their ranks, and from the other
        units on the other ranks.

        These are the bounds of `PartialPlan` without transfers, for many beginnings with the same stages.
        """
        space = self.space
        shape = space.shape(values)
        least, added, devices = self._work(values)
        num_cuts = min(beginnings.ends.shape[1], shape.num_chunks - 1)
        edges = np.pad(beginnings.ends[:, :num_cuts], ((0, 0), (1, 0)))
        if num_cuts == shape.num_chunks - 1:
            edges = np.pad(edges, ((0, 0), (0, 1)), constant_values=space.num_units)
        known = edges.shape[1] - 1
        work = np.empty((len(beginnings), known))
        busy = np.zeros((len(beginnings), shape.pp))
        for chunk in range(known):
            rank = chunk % shape.pp
            first, last = edges[:, chunk], edges[:, chunk + 1]
            work[:, chunk] = least[rank, last] - least[rank, first]
            slot = space.first.recompute + rank
            if slot < beginnings.values.shape[1]:
                again = first + space.levels.first_units(self._full_steps[beginnings.values[:, slot]], last - first)
                work[:, chunk] += added[rank, again] - added[rank, first]
            busy[:, rank] += work[:, chunk]
        before = np.zeros_like(busy)
        passed = min(known, shape.pp - 1)
        before[:, 1 : passed + 1] = np.cumsum(work[:, :passed], axis=1)
        if shape.virtual == 1 and space.schedules[values[space.first.schedule]] in SPLIT_KINDS:
            # Ranks may compute gradients of weights while they wait.
            before[:] = 0.0
        count = shape.num_micro_batches
        seconds: Floats = (before + count * busy).max(axis=1)
        if shape.virtual == 1 and known < shape.num_chunks:
            # The other units are divided among the other ranks, at best in proportion to their devices.
            each = (np.diff(least[known:], axis=1) * devices[known:, None]).min(axis=0) / devices[known:].sum()
            behind = np.concatenate([np.cumsum(each[::-1])[::-1], [0.0]])
            seconds = np.maximum(seconds, count * behind[edges[:, -1]])
        return seconds


def _with_column(rows: Ints, column: Ints) -> Ints:
    """`rows` with one more column."""
    return np.concatenate([rows, column[:, None]], axis=1)


def _distinct(keys: Ints) -> tuple[Ints, Ints]:
    """[distinct] the first row of each distinct key, and [rows] the number of each row's key among these."""
    keys = keys[:, (keys != keys[:1]).any(axis=0)]
    if not keys.shape[1]:
        return np.zeros(1, dtype=np.int64), np.zeros(len(keys), dtype=np.int64)
    if keys.shape[1] > 1:
        _, first, alike = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    else:
        _, first, alike = np.unique(keys[:, 0], return_index=True, return_inverse=True)
    return first, alike.reshape(-1)

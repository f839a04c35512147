"""Prefix: a plan being decided, with lower bounds on its time and memory after every decision.

All bounds are admissible: no completion of the prefix is faster or smaller. Before the shape is decided they come
from a table over shapes; while the cuts are decided, from unit costs under the best undecided signatures; then from
the evaluator itself with undecided signatures at their best. Units: seconds; memory as share of capacity (overflow).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from automap.meshes import Shape
from automap.price.evaluator import RECOMPUTE_MODES, Outcome, Segment
from automap.price.skeleton import Skeleton
from automap.price.vectors import (
    C_BACKWARD,
    C_BACKWARD_HOST,
    C_FORWARD,
    C_FORWARD_COMM,
    C_FORWARD_HOST,
    C_RECOMPUTE,
    C_REDUCE,
    C_ZERO,
)
from automap.space import SHAPE_KINDS, PlanSpace, Slot, Values

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Bound:
    """No completion is faster than `time_s`, or overflows memory by less than `overflow`."""

    time_s: float
    overflow: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _UnitFloor:
    """Least seconds and parameter bytes of each unit under one shape."""

    seconds: Floats
    again: Floats
    """What recomputation adds to `seconds`."""
    bytes: Floats


class BoundTable:
    """Bounds that need no signatures, shared by all prefixes of a space."""

    def __init__(self, space: PlanSpace) -> None:
        self.space = space
        self._floors: dict[tuple[int, ...], _UnitFloor] = {}

    def floor(self, shape: Shape) -> _UnitFloor:
        """Per-unit floors of one micro-batch on the ranks of a stage."""
        key = (shape.pp, *self.space.meshes.mesh(shape), shape.samples)
        if key not in self._floors:
            self._floors[key] = self._unit_floor(shape)
        return self._floors[key]

    def _unit_floor(self, shape: Shape) -> _UnitFloor:
        space, evaluator = self.space, self.space.evaluator
        layout = evaluator.layout(space.meshes.mesh(shape), shape.pp)
        problem = space.problem
        state = sum(problem.state_bytes)
        seconds_of, again_of, bytes_of = [], [], []
        incoming = np.full(len(space.axes), -3, dtype=np.int64)
        zero = space.zero_axes(shape)
        ranks = [0] if layout.uniform else range(shape.pp)
        for kind, unit in enumerate(space.linkage.types):
            exposed = evaluator.exposed
            masks = evaluator.masks(kind)
            segment = Segment(
                unit=0,
                first=int(evaluator.tables.spans[kind]),
                last=int(evaluator.tables.spans[kind + 1]),
                chosen=np.full((len(unit.signatures), len(space.axes)), -1, dtype=np.int64),
                recomputed=masks["none"],
            )
            rows, again = (
                [evaluator.unit_row(s, rank, layout, incoming, shape.samples, zero, -1) for rank in ranks]
                for s in (segment, replace(segment, recomputed=masks["full"]))
            )
            seconds_of.append(min(_seconds(row, exposed) for row in rows))
            again_of.append(max(0.0, min(_seconds(row, exposed) for row in again) - seconds_of[-1]))
            bytes_of.append(min(r[C_ZERO] for r in rows) * state)
        kinds = [unit.type for unit in space.linkage.blocks.units]
        return _UnitFloor(
            seconds=np.array(seconds_of)[kinds],
            again=np.array(again_of)[kinds],
            bytes=np.array(bytes_of)[kinds],
        )

    def of_shape(self, shape: Shape) -> Bound:
        """Bound of every plan of a shape."""
        floor = self.floor(shape)
        total = float(floor.seconds.sum())
        count, ranks = shape.num_micro_batches, shape.pp
        time = count * total / ranks
        if shape.virtual == 1 and not self.space.is_split:
            # The best spread of the work when rank r must wait for one pass through the ranks before it.
            time = max(time, total / (1.0 - (1.0 - 1.0 / count) ** ranks))
        capacity = max(s.capacity for s in self.space.evaluator.layout(self.space.meshes.mesh(shape), ranks).stages)
        tied = sum(self.space.problem.graph.tensors[n].num_elements for n, _, _ in self.space.evaluator.tied)
        used = (float(floor.bytes.sum()) - tied * sum(self.space.problem.state_bytes)) / ranks
        return Bound(time, used / max(capacity, 1.0) - 1.0)

    @functools.cached_property
    def of_prefix(self) -> dict[tuple[int, ...], Bound]:
        """Bound of every decided beginning of a shape's values."""
        found: dict[tuple[int, ...], Bound] = {}
        for shape in self.space.shapes:
            bound = self.of_shape(shape)
            row = self.space.meshes.values(shape)
            for depth in range(len(row) + 1):
                old = found.get(row[:depth])
                found[row[:depth]] = (
                    bound if old is None else Bound(min(old.time_s, bound.time_s), min(old.overflow, bound.overflow))
                )
        return found


def _seconds(row: Floats, exposed: Floats) -> float:
    """Of one micro-batch through a unit of these costs; `exposed` [KIND_COUNT] of its collectives is not hidden."""
    compute = row[C_FORWARD] + row[C_BACKWARD] + row[C_RECOMPUTE] + row[C_FORWARD_HOST] + row[C_BACKWARD_HOST]
    return float(compute + row[C_FORWARD_COMM:C_REDUCE].reshape(-1, len(exposed)).sum(axis=0) @ exposed)


class Prefix:
    """Decisions so far. Forced slots are filled in at once; `values` always ends before a real choice or at the end."""

    def __init__(self, space: PlanSpace, table: BoundTable) -> None:
        self.space = space
        self.table = table
        self.values: list[int] = []
        self.bound = table.of_prefix[()]
        self.chosen = space.signatures(())
        self.skeleton: Skeleton | None = None
        self.costs: Floats = np.zeros((0, 0))
        self._stale: set[int] = set()
        self._shape: Shape | None = None
        self._ahead: tuple[Ints, Floats, Floats | None] | None = None
        self._fill()

    @property
    def done(self) -> bool:
        """Whether every slot is decided."""
        return len(self.values) == len(self.space.slots)

    @property
    def position(self) -> int:
        """Number of the slot to decide."""
        return len(self.values)

    @property
    def shape(self) -> Shape | None:
        """The shape once it is decided."""
        return self._shape

    def legal(self) -> Ints:
        """Legal values of the slot to decide."""
        return self._legal

    def bounds(self) -> Floats:
        """[values, 2] seconds and overflow behind each legal value, in the order of `legal()`."""
        return self._look_ahead()[1]

    def decide(self, value: int) -> None:
        """Decides the current slot and fills in what is forced behind it.

        Args:
            value: one of `legal()`.
        """
        legal, bounds, costs = self._look_ahead()
        at = int(np.searchsorted(legal, value))
        assert legal[at] == value, (self.space.slots[self.position], value)
        self._accept(value)
        self._tighten(float(bounds[at, 0]), float(bounds[at, 1]))
        if costs is not None:
            self.costs = costs[at]
            self._stale.clear()
        self._fill()

    def force(self, value: int) -> None:
        """Like `decide`, without looking ahead: the bound catches up with the next look.

        Args:
            value: one of `legal()`.
        """
        self._accept(value)
        self._fill()

    def refresh(self) -> None:
        """Brings the bound up to date after `force`."""
        if self.skeleton is not None and self._stale:
            for unit_type in sorted(self._stale):
                self.skeleton.update(self.costs, self.chosen, unit_type)
            self._stale.clear()
            outcome = self.skeleton.outcome(self.costs, self.chosen, exact=False)
            self._tighten(outcome.step_time_s, outcome.overflow)

    def outcome(self) -> Outcome:
        """The price of a complete prefix."""
        assert self.done and self.skeleton is not None
        self.refresh()
        return self.skeleton.outcome(self.costs, self.chosen, exact=True)

    def _fill(self) -> None:
        while not self.done:
            self._legal = np.flatnonzero(self.space.legal(self.values))
            if len(self._legal) > 1:
                return
            value = int(self._legal[0])
            if self.space.slots[self.position].kind in SHAPE_KINDS:
                bound = self._bound_of_shape(value)
                self._tighten(bound.time_s, bound.overflow)
            self._accept(value)

    def _tighten(self, time_s: float, overflow: float) -> None:
        # A later, sharper family of bounds never loosens what is known already.
        self.bound = Bound(max(time_s, self.bound.time_s), max(overflow, self.bound.overflow))

    def _accept(self, value: int) -> None:
        slot = self.space.slots[self.position]
        self.values.append(value)
        self._ahead = None
        if slot.kind == "virtual":
            self._shape = self.space.shape(self.values)
        if slot.kind == "signature":
            self.space.assign(self.chosen, slot, value)
            self._stale.add(slot.unit_type)
        if len(self.values) == self.space.first_signature:
            self.skeleton = Skeleton(self.space.evaluator, self.space.choice_of(self.values, self.chosen))
            self.costs = self.skeleton.costs(self.chosen)

    def _look_ahead(self) -> tuple[Ints, Floats, Floats | None]:
        if self._ahead is None:
            self.refresh()
            legal = self._legal
            slot = self.space.slots[self.position]
            costs: Floats | None = None
            if slot.kind == "signature":
                assert self.skeleton is not None
                members, assignment = self.space.group_rows[slot.unit_type, slot.group]
                bounds, costs = self.skeleton.look_ahead(
                    self.costs, self.chosen, slot.unit_type, members, assignment[legal], slot.index
                )
            else:
                bounds = np.array([[b.time_s, b.overflow] for b in self._coarse(slot, legal)])
            np.maximum(bounds, [self.bound.time_s, self.bound.overflow], out=bounds)
            self._ahead = (legal, bounds, costs)
        return self._ahead

    def _coarse(self, slot: Slot, legal: Ints) -> list[Bound]:
        """Bounds behind each value of a slot that comes before the signatures."""
        if slot.kind in SHAPE_KINDS:
            return [self._bound_of_shape(int(v)) for v in legal]
        if slot.kind == "cut":
            return self._cut_bounds(len(legal))
        if slot.kind == "recompute":
            return [self._recompute_bound(slot.index, int(v)) for v in legal]
        return [self._zero_bound(int(v)) for v in legal]

    def _bound_of_shape(self, value: int) -> Bound:
        return self.table.of_prefix[(*self.values, value)]

    def _work(self, ends: Sequence[int], *, again: bool = False) -> Floats:
        """Floor of the seconds of each chunk that is cut already, or of what recomputation adds to them."""
        assert self._shape is not None
        floor = self.table.floor(self._shape)
        cumulative = np.concatenate([[0.0], np.cumsum(floor.again if again else floor.seconds)])
        work: Floats = np.diff(cumulative[[0, *ends]])
        return work

    def _cut_bounds(self, count: int) -> list[Bound]:
        shape = self._shape
        assert shape is not None
        slot = self.space.slots[self.position]
        ends = self.space.cuts(self.values, slot.index)
        candidates = self.space.cut_candidates(self.values, slot.index, shape)[:count]
        total = float(self.table.floor(shape).seconds.sum())
        left = shape.num_chunks - slot.index - 1
        bounds = []
        for end in candidates:
            work = self._work([*ends, int(end)])
            time = self._pipeline_floor(work, shape)
            if shape.virtual == 1:
                time = max(time, shape.num_micro_batches * (total - float(work.sum())) / left)
            bounds.append(Bound(time, self.bound.overflow))
        return bounds

    def _pipeline_floor(self, work: Floats, shape: Shape) -> float:
        """The step is at least what the known chunks ask of their ranks, behind the chunks before them."""
        busy = np.zeros(shape.pp)
        for chunk, seconds in enumerate(work):
            busy[chunk % shape.pp] += seconds
        before = np.concatenate([[0.0], np.cumsum(work[: shape.pp])])[: shape.pp]
        before = np.pad(before, (0, shape.pp - len(before)))
        if self.space.is_split:
            # Gradients of weights fill the pipeline.
            before[:] = 0.0
        return float((before + shape.num_micro_batches * busy).max())

    def _recompute_bound(self, rank: int, mode: int) -> Bound:
        shape = self._shape
        assert shape is not None
        ends = [*self.space.cuts(self.values, shape.num_chunks - 1), self.space.num_units]
        work = self._work(ends)
        modes = [*self.values[self.space.first_recompute :], mode]
        again = self._work(ends, again=True)
        for chunk in range(shape.num_chunks):
            place = chunk % shape.pp
            if place <= rank and RECOMPUTE_MODES[modes[place]] == "full":
                work[chunk] += again[chunk]
        return Bound(self._pipeline_floor(work, shape), self.bound.overflow)

    def _zero_bound(self, value: int) -> Bound:
        values = [*self.values, value]
        skeleton = Skeleton(self.space.evaluator, self.space.choice_of(values, self.chosen))
        outcome = skeleton.outcome(skeleton.costs(self.chosen), self.chosen, exact=False)
        return Bound(outcome.step_time_s, outcome.overflow)


def walk(space: PlanSpace, table: BoundTable, values: Values) -> Prefix:
    """The prefix that has decided `values` (and what is forced behind them)."""
    prefix = Prefix(space, table)
    while prefix.position < len(values):
        prefix.decide(values[prefix.position])
    return prefix

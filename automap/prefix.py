"""Prefix: a plan being decided, with lower bounds on its time and memory after every decision.

All bounds are admissible: no completion of the prefix is faster or smaller. Before the shape is decided they come
from a table over shapes; while the cuts are decided, from unit costs under the best undecided signatures; then from
the evaluator itself with undecided signatures at their best. Units: seconds; memory as share of capacity (overflow).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from automap.price.combine import P_GRADIENT, P_OPTIMIZER, P_PARAMETER
from automap.price.evaluator import RECOMPUTE_MODES, Outcome, Segment
from automap.price.kernels import (
    C_BACKWARD,
    C_BACKWARD_COMM,
    C_FORWARD,
    C_FORWARD_COMM,
    C_RECOMPUTE_COMM,
    C_ZERO,
)
from automap.price.skeleton import Skeleton
from automap.space import AXES, PlanSpace, Shape, Values

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Bound:
    """No completion is faster than `time_s`, or overflows memory by less than `overflow`."""

    time_s: float
    overflow: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _UnitFloor:
    """Least seconds and parameter bytes of each unit under one shape."""

    seconds: Floats
    forward: Floats
    """The part of `seconds` that recomputation repeats."""
    bytes: Floats


class BoundTable:
    """Bounds that need no signatures, shared by all prefixes of a space."""

    def __init__(self, space: PlanSpace) -> None:
        self.space = space
        self._floors: dict[tuple[int, int, int, int], _UnitFloor] = {}

    def floor(self, shape: Shape) -> _UnitFloor:
        """Per-unit floors of one micro-batch on the ranks of a stage."""
        key = (shape.pp, shape.dp, shape.tp, shape.samples)
        if key not in self._floors:
            self._floors[key] = self._unit_floor(shape)
        return self._floors[key]

    def _unit_floor(self, shape: Shape) -> _UnitFloor:
        space, evaluator = self.space, self.space.evaluator
        layout = evaluator.layout((shape.dp, shape.tp), shape.pp)
        problem = space.problem
        state = sum(problem.state_bytes)
        seconds_of, forward_of, bytes_of = [], [], []
        incoming = np.full(len(AXES), -3, dtype=np.int64)
        zero = np.array([True, False])
        ranks = [0] if layout.uniform else range(shape.pp)
        for kind, unit in enumerate(space.linkage.types):
            segment = Segment(
                unit=0,
                first=int(evaluator.tables.spans[kind]),
                last=int(evaluator.tables.spans[kind + 1]),
                chosen=np.full((len(unit.signatures), len(AXES)), -1, dtype=np.int64),
                recomputed=evaluator.masks(kind)["none"],
            )
            rows = [
                evaluator.unit_row(segment, rank, layout, incoming, shape.samples, zero, -1) for rank in ranks
            ]
            exposed = 1.0 - problem.trainer.tensor_overlap
            seconds_of.append(
                min(
                    r[C_FORWARD] + r[C_BACKWARD] + exposed * (r[C_FORWARD_COMM:C_RECOMPUTE_COMM].sum())
                    for r in rows
                )
            )
            forward_of.append(min(r[C_FORWARD] for r in rows))
            bytes_of.append(min(r[C_ZERO] for r in rows) * state / shape.dp)
        kinds = [unit.type for unit in space.linkage.blocks.units]
        return _UnitFloor(
            seconds=np.array(seconds_of)[kinds],
            forward=np.array(forward_of)[kinds],
            bytes=np.array(bytes_of)[kinds],
        )

    def of_shape(self, shape: Shape) -> Bound:
        """Bound of every plan of a shape."""
        floor = self.floor(shape)
        total = float(floor.seconds.sum())
        count, ranks = shape.num_micro_batches, shape.pp
        time = count * total / ranks
        if shape.virtual == 1:
            # The best spread of the work when rank r must wait for one pass through the ranks before it.
            time = max(time, total / (1.0 - (1.0 - 1.0 / count) ** ranks))
        capacity = max(s.capacity for s in self.space.evaluator.layout((shape.dp, shape.tp), ranks).stages)
        tied = sum(self.space.problem.graph.tensors[n].num_elements for n, _, _ in self.space.evaluator.tied)
        used = (float(floor.bytes.sum()) - tied * sum(self.space.problem.state_bytes)) / ranks
        return Bound(time, used / max(capacity, 1.0) - 1.0)

    @functools.cached_property
    def of_prefix(self) -> dict[tuple[int, ...], Bound]:
        """Bound of every decided beginning of (pp, tp, micro-batches, virtual)."""
        found: dict[tuple[int, ...], Bound] = {}
        for shape in self.space.shapes:
            bound = self.of_shape(shape)
            row = self.space.shape_values(shape)
            for depth in range(len(row) + 1):
                old = found.get(row[:depth])
                found[row[:depth]] = (
                    bound
                    if old is None
                    else Bound(min(old.time_s, bound.time_s), min(old.overflow, bound.overflow))
                )
        return found


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
        self._shape: Shape | None = None
        self._ahead: tuple[npt.NDArray[np.int64], list[Bound], list[Floats | None]] | None = None
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

    def legal(self) -> npt.NDArray[np.int64]:
        """Legal values of the slot to decide."""
        return self._look_ahead()[0]

    def bounds(self) -> list[Bound]:
        """The bound after each legal value, in the order of `legal()`."""
        return self._look_ahead()[1]

    def decide(self, value: int) -> None:
        """Decides the current slot and fills in what is forced behind it.

        Args:
            value: one of `legal()`.
        """
        legal, bounds, costs = self._look_ahead()
        at = int(np.searchsorted(legal, value)) if len(legal) else 0
        assert legal[at] == value, (self.space.slots[self.position], value)
        self._accept(value, bounds[at], costs[at])
        self._fill()

    def outcome(self) -> Outcome:
        """The price of a complete prefix."""
        assert self.done and self.skeleton is not None
        return self.skeleton.outcome(self.costs, self.chosen, exact=True)

    def _fill(self) -> None:
        while not self.done:
            legal = np.flatnonzero(self.space.legal(self.values))
            if len(legal) > 1:
                return
            value = int(legal[0])
            slot = self.space.slots[self.position]
            if slot.kind in ("pp", "tp", "micro_batches", "virtual"):
                self._accept(value, self._bound_of_shape(value), None)
            elif slot.kind == "signature" and self.skeleton is not None:
                self.space.assign(self.chosen[slot.unit_type], slot, value)
                self.costs = self.skeleton.update(self.costs, self.chosen, slot.unit_type)
                self.values.append(value)
            else:
                self._accept(value, self.bound, None)
        if self.skeleton is not None:
            self.bound = self._signature_bound(self.costs, self.chosen)

    def _accept(self, value: int, bound: Bound, costs: Floats | None) -> None:
        slot = self.space.slots[self.position]
        self.values.append(value)
        self._ahead = None
        # A later, sharper family of bounds never loosens what is known already.
        self.bound = Bound(max(bound.time_s, self.bound.time_s), max(bound.overflow, self.bound.overflow))
        if slot.kind == "virtual":
            self._shape = self.space.shape(self.values)
        if slot.kind == "signature":
            self.space.assign(self.chosen[slot.unit_type], slot, value)
            assert costs is not None
            self.costs = costs
        if len(self.values) == self.space.first_signature:
            self.skeleton = Skeleton(self.space.evaluator, self.space.choice_of(self.values, self.chosen))
            self.costs = self.skeleton.costs(self.chosen)

    def _look_ahead(self) -> tuple[npt.NDArray[np.int64], list[Bound], list[Floats | None]]:
        if self._ahead is None:
            legal = np.flatnonzero(self.space.legal(self.values))
            slot = self.space.slots[self.position]
            costs: list[Floats | None] = [None] * len(legal)
            if slot.kind in ("pp", "tp", "micro_batches", "virtual"):
                bounds = [self._bound_of_shape(int(v)) for v in legal]
            elif slot.kind == "cut":
                bounds = self._cut_bounds(len(legal))
            elif slot.kind == "recompute":
                bounds = [self._recompute_bound(slot.index, int(v)) for v in legal]
            elif slot.kind == "zero":
                bounds = [self._zero_bound(int(v)) for v in legal]
            else:
                bounds = []
                for i, value in enumerate(legal):
                    trial = list(self.chosen)
                    trial[slot.unit_type] = self.chosen[slot.unit_type].copy()
                    self.space.assign(trial[slot.unit_type], slot, int(value))
                    assert self.skeleton is not None
                    fresh = self.skeleton.update(self.costs, trial, slot.unit_type)
                    costs[i] = fresh
                    bounds.append(self._signature_bound(fresh, trial))
            floor = self.bound
            bounds = [Bound(max(b.time_s, floor.time_s), max(b.overflow, floor.overflow)) for b in bounds]
            self._ahead = (legal, bounds, costs)
        return self._ahead

    def _signature_bound(self, costs: Floats, chosen: Sequence[npt.NDArray[np.int64]]) -> Bound:
        assert self.skeleton is not None
        outcome = self.skeleton.outcome(costs, chosen, exact=False)
        return Bound(max(outcome.step_time_s, self.bound.time_s), max(outcome.overflow, self.bound.overflow))

    def _bound_of_shape(self, value: int) -> Bound:
        return self.table.of_prefix[(*self.values, value)]

    def _work(self, ends: Sequence[int], *, forward: bool = False) -> Floats:
        """Floor of the seconds of each chunk that is cut already."""
        assert self._shape is not None
        floor = self.table.floor(self._shape)
        cumulative = np.concatenate([[0.0], np.cumsum(floor.forward if forward else floor.seconds)])
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
        return float((before + shape.num_micro_batches * busy).max())

    def _recompute_bound(self, rank: int, mode: int) -> Bound:
        shape = self._shape
        assert shape is not None
        ends = [*self.space.cuts(self.values, shape.num_chunks - 1), self.space.num_units]
        work = self._work(ends)
        modes = [*self.values[self.space.first_recompute :], mode]
        again = self._work(ends, forward=True)
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

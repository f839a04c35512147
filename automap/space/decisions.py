"""SpaceOutline: the slots of a plan space, kind by kind, and the numbers that their values stand for.

A plan is a sequence of decisions. A *slot* is one decision, and a *value* is the number of the chosen option. A kind of
decision may have several slots: `cut` has one for each chunk but the last. `DECISIONS` lists the kinds in the order in
which they are decided. A new kind needs

1. here: its `Decision` in `DECISIONS`, with its slots, the probability of its moves, the number of ways to decide it,
   its meaning in a `LoweredPlan`, and its features for agents;
2. in `kernels/records.py`: the number of its first slot, a field of `FirstSlots` of the same name and place;
3. in `kernels/stepper.py`: how many of its slots decide something (`active_slots`), and their legal values
   (`legal_values`);
4. in `kernels/workspace.py` or `kernels/layout.py`: its effect on the compiled price, as `set_rows` has that of ZeRO.

Sampling, neighbours, repair, environments, counting, decoding and encoding follow from these.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from automap.arrays import Floats, Ints, Mask
from automap.errors import ProblemError
from automap.price.evaluator import Evaluator
from automap.price.lowered_plan import RECOMPUTE_MODES, LoweredPlan
from automap.price.stage_layout import PipelineLayout
from automap.problem import Problem
from automap.schedule import SPLIT_KINDS
from automap.space.batch_shares import NUM_WAYS
from automap.space.constraints import Constrained
from automap.space.kernels.records import FirstSlots
from automap.space.limits import WHOLE, Limits
from automap.space.mesh_shapes import Meshes
from automap.space.recomputation import Levels
from automap.space.shape import Shape
from automap.targets import Target
from ir.graph import Operator

Values = tuple[int, ...]
"""One value for each slot, in the order of the slots."""

SHAPE_KINDS = ("pp", "tp", "middle", "micro_batches", "virtual")
"""Kinds of the slots that decide a shape; there is a slot `middle` if meshes have a third axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One decision."""

    kind: str
    """Kind of the decision, see `DECISIONS`."""
    name: str
    """Name for people."""
    num_values: int
    """Number of values, legal or not, in any plan."""
    index: int = 0
    """Number of the stage, chunk, rank or mesh axis that the slot is about: for `devices`, `cut`, `recompute` and
    `signature`."""
    unit_type: int = -1
    """Unit type of a signature."""
    group: int = -1
    """Linkage group of a signature, by its number in the unit type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """One kind of decision."""

    kind: str
    """Name of the kind, a field of `FirstSlots`."""
    slots: Callable[[SpaceOutline], list[Slot]]
    """Slots of the kind in a space."""
    moved: float = 0.0
    """Probability that a move of one decision varies a slot of the kind."""
    is_numbered: bool = False
    """Whether a plan may have several slots of the kind that decide something."""
    ways: Callable[[SpaceOutline, Shape], int] = lambda space, shape: 1
    """Number of ways to decide all slots of the kind in a plan of a shape. Kinds whose ways depend on each other
    (shapes, stages, cuts, signatures) are counted by `automap.space.count`."""
    write: Callable[[SpaceOutline, Sequence[int]], Mapping[str, Any]] = lambda space, values: {}
    """Fields of a `LoweredPlan` that follow from the values of the kind's slots alone."""
    read: Callable[[SpaceOutline, LoweredPlan], list[int] | None] = lambda space, lowered: []
    """The inverse of `write`: values of the kind's slots for a plan, or None if the space does not have the plan."""
    amounts: Callable[[SpaceOutline], Floats] = lambda space: np.zeros(0)
    """[values] feature of each value for agents, about 0 to 1; empty: 0 for all values."""
    seen_as: str = ""
    """Kind of the slots in the features for agents, if it differs: the inputs of trained networks are fixed."""
    seen_index: int | None = None
    """Index of the slots in the features for agents; None = that of the slot."""


class SpaceOutline:
    """The decisions of a problem.

    Attributes:
        problem, evaluator, limits: the problem, the evaluator of its plans, and the part of the decisions that is kept.
        linkage, num_units: unit types with their linkage groups, and the number of units.
        constrained: the user's constraints.
        meshes, shapes: shapes of plans and the numbers that they are made of.
        axes: names of the mesh axes, outermost first.
        modes: [modes] whether trainer, target and `hints.fix` allow a recompute mode.
        levels: levels of recomputation of a rank. For a target without mixtures of two modes, each level is one mode.
        zeros: [3, 4] whether `hints.fix` and the target allow a ZeRO stage if there are replicas: in plans whose outer
            axis alone has several ranks, in plans with other axes, and in pipelines.
        schedules: schedules of plans without virtual stages, the usual one first.
        slots: all decisions in order.
        first: number of the first slot of each kind.
    """

    def __init__(self, problem: Problem, evaluator: Evaluator | None = None, *, limits: Limits = WHOLE) -> None:
        """Lists the decisions within `limits`.

        Raises:
            ProblemError: the batch and the devices, or the hints, allow no plan.
        """
        self.problem = problem
        self.evaluator = evaluator or Evaluator(problem)
        self.linkage = self.evaluator.tables.linkage
        self.num_units = len(self.linkage.blocks.units)
        self.limits = limits
        self.constrained = Constrained(problem, self.evaluator, limits)
        self.meshes = Meshes(problem, self.linkage.blocks, self.constrained, limits)
        self.shapes, self.axes = self.meshes.shapes, self.meshes.axes
        self.constrained.check_axes(self.axes)
        fix = problem.hints.fix
        self.schedules = _schedules(problem)
        self.modes = _modes(problem)
        if fix.recompute is None:
            self.modes[RECOMPUTE_MODES.index("selective")] &= self.evaluator.has_core and limits.cores
        self.levels = Levels(self.modes, self.num_units, mixes=limits.mixes and not limits.one_mode)
        self.zeros = _zero_stages(problem)
        by_kind = [decision.slots(self) for decision in DECISIONS]
        self.slots = tuple(slot for slots in by_kind for slot in slots)
        self.first = FirstSlots(*itertools.accumulate([0, *(len(slots) for slots in by_kind[:-1])]))
        self._layouts: dict[tuple[int, ...], PipelineLayout] = {}

    @property
    def is_split(self) -> bool:
        """Whether some schedule splits backward passes into gradients of inputs and of weights."""
        return any(kind in SPLIT_KINDS for kind in self.schedules)

    def shape(self, values: Sequence[int]) -> Shape:
        """The shape that the first values decide."""
        return self.meshes.shape(values)

    def of_kind(self, values: Sequence[int], number: int) -> Sequence[int]:
        """The values of the slots of `DECISIONS[number]`."""
        return values[self.first[number] : (*self.first, len(self.slots))[number + 1]]

    def zero_axes(self, shape: Shape) -> Mask:
        """[axes] whether ZeRO shards over an axis: over all with several ranks but the innermost."""
        # If the stages differ in size, this is the mesh of an even share, which has replicas too.
        return np.array([size > 1 for size in self.meshes.mesh(shape)[:-1]] + [False])

    def zeros_of(self, shape: Shape) -> Mask:
        """[4] whether each ZeRO stage is allowed in plans of a shape that has replicas."""
        found: Mask = self.zeros[2 if shape.pp > 1 else 1 if shape.tp * shape.middle > 1 else 0]
        return found

    def layout_of(self, shape: Shape, order: int, devices: Sequence[int]) -> PipelineLayout:
        """The layout of a shape with given numbers of devices of the stages, in one of `Meshes.orders`."""
        key = (shape.tp, shape.middle, order, *devices)
        if key not in self._layouts:
            ends = np.cumsum([0, *devices]).tolist()
            if order == 0 and len(set(devices)) == 1:
                self._layouts[key] = self.evaluator.layout(self.meshes.mesh(shape), shape.pp)
            else:
                turn = self.meshes.orders[order]
                self._layouts[key] = self.evaluator.layout_of(
                    [
                        (turn[first:last], self.meshes.mesh_of(last - first, shape.tp, shape.middle))
                        for first, last in itertools.pairwise(ends)
                    ]
                )
        return self._layouts[key]

    @functools.cached_property
    def cumulative_weight(self) -> Floats:
        """[units + 1] weight of all units before each."""
        return np.concatenate([[0.0], np.cumsum(self.evaluator.unit_weights)])

    @functools.cached_property
    def group_rows(self) -> dict[tuple[int, int], tuple[Ints, Ints]]:
        """(unit type, group) -> operator rows of its members, and [values, members] the members' signatures."""
        spans = self.evaluator.tables.spans
        return {
            (unit_type, number): (
                np.array(group.members, dtype=np.int64) + int(spans[unit_type]),
                np.array(group.assignment, dtype=np.int64),
            )
            for unit_type, unit in enumerate(self.linkage.types)
            for number, group in enumerate(unit.groups)
        }

    def operator(self, unit_type: int, offset: int) -> Operator:
        """An operator of the representative unit of a type."""
        return self.problem.graph.operators[self.linkage.blocks.representative(unit_type).start + offset]

    def operator_name(self, unit_type: int, offset: int) -> str:
        """Name of an operator in the representative unit of a type."""
        return self.operator(unit_type, offset).name

    def is_view(self, name: str) -> bool:
        """Whether the tensor is a view of a parameter."""
        maker = self.problem.graph.maker(name)
        return maker is not None and maker.is_view


def _schedules(problem: Problem) -> tuple[str, ...]:
    """Schedules without virtual stages: the one that the user fixes, else all that the trainer and the target can run.

    Raises:
        ProblemError: the target does not have the fixed one.
    """
    fixed, target = problem.hints.fix.schedule, problem.target
    if fixed is None:
        return problem.trainer.schedules if target is None else target.schedules
    if target is not None and fixed != "interleaved" and fixed not in target.schedules:
        raise _unknown_to(target, "schedule", fixed, target.schedules)
    return ("1f1b",) if fixed == "interleaved" else (fixed,)


def _modes(problem: Problem) -> Mask:
    """[modes] whether the target and `hints.fix` allow a recompute mode.

    Raises:
        ProblemError: the target does not have the fixed one.
    """
    fixed, target = problem.hints.fix.recompute, problem.target
    kept = problem.recompute_modes
    if target is not None and fixed is not None and fixed not in kept:
        raise _unknown_to(target, "recompute", fixed, kept)
    return np.array([fixed in (None, mode) and mode in kept for mode in RECOMPUTE_MODES])


def _unknown_to(target: Target, name: str, value: object, known: Iterable[object]) -> ProblemError:
    """The error for a fixed decision that the target does not have."""
    repair = f"Use one of {', '.join(map(str, known))}, or another target."
    what = {"schedule": "schedule", "recompute": "recomputation", "zero": "ZeRO stage"}[name]
    return ProblemError(f"{target.name} has no such {what}", field=f"hints.fix.{name}", value=value, repair=repair)


def _zero_stages(problem: Problem) -> Mask:
    """See `SpaceOutline.zeros`. A row without the fixed stage is all False, so there are no such plans.

    Raises:
        ProblemError: the target does not have the fixed one.
    """
    fixed, target = problem.hints.fix.zero, problem.target
    every: tuple[int, ...] = (0, 1, 2, 3)
    rows = [every] * 3 if target is None else [target.zero, target.zero_with_others, target.zero_in_pipelines]
    known = sorted({stage for row in rows for stage in row})
    if target is not None and fixed is not None and fixed not in known:
        raise _unknown_to(target, "zero", fixed, known)
    return np.array([[fixed in (None, stage) and stage in row for stage in every] for row in rows])


def _one(kind: str, name: str, num_values: int) -> list[Slot]:
    return [Slot(kind=kind, name=name, num_values=num_values)]


def _several(kind: str, name: str, num_values: int, count: int) -> list[Slot]:
    """Slots whose names end in their index."""
    return [Slot(kind=kind, name=f"{name} {i}", num_values=num_values, index=i) for i in range(count)]


def _middle(space: SpaceOutline) -> list[Slot]:
    axis = space.meshes.middle
    return [] if axis is None else _one("middle", f"size of the middle mesh axis, {axis.name}", len(axis.degrees))


def _devices(space: SpaceOutline) -> list[Slot]:
    meshes = space.meshes
    return _several("devices", "devices of stage", meshes.devices // meshes.part, meshes.longest - 1)


def _shares(space: SpaceOutline) -> list[Slot]:
    is_mixed = len({host.device for host in space.problem.cluster.hosts}) > 1
    ways = {None: NUM_WAYS, "even": 1, "proportional": 2}[space.problem.hints.fix.batch_shares]
    return _one("shares", "samples of unlike devices", ways if is_mixed and not space.meshes.alike else 1)


def _cuts(space: SpaceOutline) -> list[Slot]:
    return _several("cut", "end of chunk", space.num_units, max(s.num_chunks for s in space.shapes) - 1)


def _recompute(space: SpaceOutline) -> list[Slot]:
    return _several("recompute", "recompute on rank", len(space.levels), max(s.pp for s in space.shapes))


def _ways_to_recompute(space: SpaceOutline, shape: Shape) -> int:
    ways: int = int(space.levels.legal(shape.num_chunks).sum()) ** (1 if space.limits.one_mode else shape.pp)
    return ways


def _signatures(space: SpaceOutline) -> list[Slot]:
    slots = []
    for (unit_type, number), (_, assignment) in space.group_rows.items():
        leader = space.linkage.types[unit_type].groups[number].leader
        slots += [
            Slot(
                kind="signature",
                name=f"{space.operator_name(unit_type, leader)} on {name}",
                num_values=len(assignment),
                index=axis,
                unit_type=unit_type,
                group=number,
            )
            for axis, name in enumerate(space.axes)
        ]
    return slots


def _read_schedule(space: SpaceOutline, lowered: LoweredPlan) -> list[int] | None:
    kind = space.schedules[0] if lowered.kind == "interleaved" else lowered.kind
    return [space.schedules.index(kind)] if kind in space.schedules else None


def _logs(counts: Sequence[int]) -> Floats:
    """Features for agents of values that are counts: their logarithms, scaled."""
    found: Floats = np.log2(np.array(counts, dtype=np.float64)) / 8.0
    return found


def _counted(kind: str, name: str, counts: Callable[[Meshes], Sequence[int]]) -> Decision:
    """A decision whose values are counts."""
    return Decision(
        kind=kind,
        slots=lambda s: _one(kind, name, len(counts(s.meshes))),
        amounts=lambda s: _logs(counts(s.meshes)),
    )


DECISIONS = (
    _counted("pp", "pipeline stages", lambda meshes: [stages for stages, _ in meshes.divisions]),
    _counted("tp", "size of the inner mesh axis", lambda meshes: meshes.degrees),
    Decision(kind="middle", slots=_middle, amounts=lambda s: _logs(s.meshes.middles)),
    _counted("micro_batches", "micro-batches", lambda meshes: meshes.micro_batches),
    _counted("virtual", "virtual stages a rank", lambda meshes: meshes.virtuals),
    Decision(
        kind="schedule",
        slots=lambda s: _one("schedule", "order of micro-batches", len(s.schedules)),
        moved=0.04,
        ways=lambda s, shape: len(s.schedules) if shape.pp > 1 and shape.virtual == 1 else 1,
        write=lambda s, values: {"kind": s.schedules[values[0]]},
        read=_read_schedule,
    ),
    Decision(kind="order", slots=lambda s: _one("order", "order of the devices", len(s.meshes.orders)), moved=0.04),
    Decision(kind="devices", slots=_devices, moved=0.06, is_numbered=True),
    # In the features for agents, the slot `shares` is a ninth slot of `devices`.
    Decision(kind="shares", slots=_shares, moved=0.06, seen_as="devices", seen_index=8),
    Decision(kind="cut", slots=_cuts, moved=0.08, is_numbered=True),
    Decision(
        kind="recompute",
        slots=_recompute,
        moved=0.12,
        is_numbered=True,
        ways=_ways_to_recompute,
        amounts=lambda s: np.array([s.levels.amount(level) for level in range(len(s.levels))]) / 8.0,
    ),
    Decision(
        kind="zero",
        slots=lambda s: _one("zero", "ZeRO stage", 4),
        moved=0.05,
        ways=lambda s, shape: int(s.zeros_of(shape).sum()) if shape.replicas > 1 else 1,
        write=lambda s, values: {"zero": values[0]},
        read=lambda s, lowered: [lowered.zero],
        amounts=lambda s: np.arange(4) / 8.0,
    ),
    Decision(kind="signature", slots=_signatures),
)
"""All kinds, in the order in which they are decided. Moves that vary none of the others vary a signature."""

"""PlanSpace: the plans of a problem as a sequence of decisions with legal values.

One meaning of "optimum" for every searcher: environments, exhaustive search and templates all walk these decisions.
A plan of the space has meshes on pp pipeline ranks that are equal but for the outer axis
(`automap.space.mesh_shapes`), chunks cut
between units, one recompute mode a rank, one ZeRO stage, and for each linkage group of each unit type one signature on
each mesh axis; equal units are decided once. `values` is a tuple with one number a slot; a slot with a
single legal value is forced.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from automap.plan import Plan
from automap.price.evaluator import Evaluator, blank, by_type
from automap.price.lowered_plan import RECOMPUTE_MODES, LoweredPlan, Segment, spread
from automap.price.plan_reader import lower_plan
from automap.price.plan_writer import to_plan
from automap.price.stage_layout import PipelineLayout
from automap.problem import Problem
from automap.schedule import SPLIT_KINDS
from automap.space.batch_shares import NUM_WAYS, dealt
from automap.space.compile import SpaceArrays, compile_space
from automap.space.constraints import Constrained
from automap.space.count import count_decades
from automap.space.encode import values_of
from automap.space.kernels.masks import mode_mask, share_mask, signature_mask, size_mask
from automap.space.limits import WHOLE, Limits
from automap.space.mesh_shapes import Meshes
from automap.space.shape import Shape
from ir.graph import Operator

if TYPE_CHECKING:
    from automap.space.kernels.unit_cache import UnitCache

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Values = tuple[int, ...]

MOVE_CHANCES = (0.3, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05, 0.1, 0.05, 0.05, 0.1)
"""Of each kind of move of `automap.space.kernels.neighbours`."""

SHAPE_KINDS = ("pp", "tp", "middle", "micro_batches", "virtual")
"""Kinds of the slots that decide a shape; `middle` is there where meshes have a third axis."""
STAGE_KINDS = ("schedule", "order", "devices", "shares")
"""Kinds of the slots behind them: order of micro-batches, order of the devices, devices of each stage but the last, and
how samples are spread over unlike devices of a stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One decision."""

    kind: str
    """One of `SHAPE_KINDS` and `STAGE_KINDS`, cut, recompute, zero or signature."""
    name: str
    """For people."""
    num_values: int
    index: int = 0
    """Stage of devices, chunk of a cut, rank of a recompute mode, axis of a signature."""
    unit_type: int = -1
    group: int = -1


class PlanSpace:
    """The decisions of `problem`.

    Attributes:
        slots: all decisions in order.
        evaluator: prices what is decided.
        meshes: the shapes.
        axes: names of the mesh axes, outermost first.
        first_stage, shares_slot, first_cut, first_recompute, zero_slot, first_signature: numbers of slots; the first
            one of `STAGE_KINDS` stands behind those of the shape.
        modes: [modes] recompute modes that the trainer and `hints.fix` leave.
        zeros: [4] ZeRO stages that `hints.fix` leaves where there are replicas.
        schedules: of plans without virtual stages, the usual one first.
        limits: what pruning leaves.
    """

    def __init__(self, problem: Problem, evaluator: Evaluator | None = None, *, limits: Limits = WHOLE) -> None:
        """Builds the space, or what `limits` leave of it.

        Raises:
            ProblemError: the batch and the devices, or the hints, leave no plan.
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
        wanted = range(len(RECOMPUTE_MODES)) if fix.recompute is None else [RECOMPUTE_MODES.index(fix.recompute)]
        self.modes = np.array([i in wanted for i in range(len(RECOMPUTE_MODES))])
        if fix.recompute is None:
            self.modes[RECOMPUTE_MODES.index("selective")] = self.evaluator.has_core
        self.zeros = np.array([fix.zero in (None, stage) for stage in range(4)])
        self.slots = self._slots()
        kinds = [slot.kind for slot in self.slots]
        self.first_recompute, self.zero_slot = kinds.index("recompute"), kinds.index("zero")
        self.first_stage = kinds.index("schedule")
        self.shares_slot = kinds.index("shares")
        self.first_cut = self.shares_slot + 1
        self.first_signature = self.zero_slot + 1
        self._legal: dict[tuple[object, ...], Mask] = {}
        self._targets: dict[tuple[float, ...], Ints] = {}
        self._layouts: dict[tuple[int, ...], PipelineLayout] = {}

    def _slots(self) -> tuple[Slot, ...]:
        meshes = self.meshes
        pp, chunks = max(s.pp for s in self.shapes), max(s.num_chunks for s in self.shapes)
        slots = [
            Slot(kind="pp", name="pipeline stages", num_values=len(meshes.degrees)),
            Slot(kind="tp", name="size of the inner mesh axis", num_values=len(meshes.degrees)),
        ]
        if meshes.middle is not None:
            name = f"size of the middle mesh axis, {meshes.middle.name}"
            slots.append(Slot(kind="middle", name=name, num_values=len(meshes.middles)))
        slots += [
            Slot(kind="micro_batches", name="micro-batches", num_values=len(meshes.micro_batches)),
            Slot(kind="virtual", name="virtual stages a rank", num_values=len(meshes.virtuals)),
        ]
        parts = meshes.devices // meshes.part
        slots += [
            Slot(kind="schedule", name="order of micro-batches", num_values=len(self.schedules)),
            Slot(kind="order", name="order of the devices", num_values=len(meshes.orders)),
        ]
        slots += [
            Slot(kind="devices", name=f"devices of stage {i}", num_values=parts, index=i)
            for i in range(meshes.longest - 1)
        ]
        is_mixed = len({host.device for host in self.problem.cluster.hosts}) > 1
        ways = {None: NUM_WAYS, "even": 1, "proportional": 2}[self.problem.hints.fix.batch_shares]
        slots.append(Slot(kind="shares", name="samples of unlike devices", num_values=ways if is_mixed else 1))
        slots += [
            Slot(kind="cut", name=f"end of chunk {i}", num_values=self.num_units, index=i) for i in range(chunks - 1)
        ]
        slots += [
            Slot(kind="recompute", name=f"recompute on rank {i}", num_values=len(RECOMPUTE_MODES), index=i)
            for i in range(pp)
        ]
        slots.append(Slot(kind="zero", name="ZeRO stage", num_values=4))
        for (unit_type, number), (_, assignment) in self.group_rows.items():
            leader = self.linkage.types[unit_type].groups[number].leader
            slots += [
                Slot(
                    kind="signature",
                    name=f"{self.operator_name(unit_type, leader)} on {name}",
                    num_values=len(assignment),
                    index=axis,
                    unit_type=unit_type,
                    group=number,
                )
                for axis, name in enumerate(self.axes)
            ]
        return tuple(slots)

    @property
    def is_split(self) -> bool:
        """Whether backward passes may be split into gradients of inputs and of weights."""
        return any(kind in SPLIT_KINDS for kind in self.schedules)

    # -- what is legal ------------------------------------------------------------------------------------------

    def shape(self, values: Sequence[int]) -> Shape:
        """The shape that the first values decide."""
        return self.meshes.shape(values)

    def zero_axes(self, shape: Shape) -> Mask:
        """[axes] over which ZeRO shards what is whole there: all but the innermost."""
        # Where stages differ, the even share has replicas too.
        return np.array([size > 1 for size in self.meshes.mesh(shape)[:-1]] + [False])

    def stage_devices(self, values: Sequence[int]) -> tuple[int, ...]:
        """[stages] devices of each; the undecided ones share what is left evenly, as far as it goes."""
        shape, meshes = self.shape(values), self.meshes
        picked = values[self.first_stage + 2 : self.shares_slot]
        if not any(picked):
            return (meshes.devices // shape.pp,) * shape.pp
        sizes = [value * meshes.part if value else meshes.devices // shape.pp for value in picked[: shape.pp - 1]]
        return (*sizes, meshes.devices - sum(sizes))

    def layout(self, values: Sequence[int]) -> PipelineLayout:
        """Where the stages stand that `values` decide."""
        return self.layout_of(self.shape(values), values[self.first_stage + 1], self.stage_devices(values))

    def layout_of(self, shape: Shape, order: int, devices: Sequence[int]) -> PipelineLayout:
        """Where the stages of a shape stand, of so many devices each, in one of `Meshes.orders`."""
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

    def stage_rows(self, values: Sequence[int]) -> list[int]:
        """[stages] row of each among the distinct stages of `arrays`; all slots before `shares` are decided."""
        decided = np.array(values[: self.first_cut], dtype=np.int64)
        devices, rows, boundaries = np.empty((3, self.arrays.windows.shape[1]), dtype=np.int64)
        from automap.space.kernels.workspace import find_stages  # who prices one plan need not load it

        find_stages(self.arrays, decided, devices, rows, boundaries)
        found: list[int] = rows[: self.shape(values).pp].tolist()
        return found

    def rows_seen(self, values: Sequence[int]) -> list[int]:
        """[stages] `stage_rows` as the slowest kind of device sees them, see `LoweredPlan.views`."""
        arrays, rows = self.arrays, self.stage_rows(values)
        shares = self.batch_shares(values) or (None,) * len(rows)
        return [
            row if mine is None else int(arrays.kind_rows[arrays.mixed[row], 0])
            for row, mine in zip(rows, shares, strict=True)
        ]

    def batch_shares(self, values: Sequence[int]) -> tuple[tuple[int, ...] | None, ...]:
        """[stages] samples of a micro-batch for each index of the outer axis; None and empty: as evenly as they go."""
        way = values[self.shares_slot]
        if not way:
            return ()
        shape, arrays, found = self.shape(values), self.arrays, list[tuple[int, ...] | None]()
        count = self.meshes.micro_batches.index(shape.num_micro_batches)
        for row, stage in zip(self.stage_rows(values), self.layout(values).stages, strict=True):
            number = int(arrays.mixed[row])
            if number < 0 or not arrays.share_ways[number, count, way]:
                found.append(None)
                continue
            shares = [0] * int(stage.axes[0])
            for kind, total in zip(stage.kinds, arrays.kind_samples[number, count, way].tolist(), strict=False):
                of_kind = dealt(total, len(kind.ranks), int(arrays.quanta[number]))
                for rank, mine in zip(kind.ranks, of_kind, strict=True):
                    shares[rank] = mine
            found.append(tuple(shares))
        return tuple(found)

    def unlike_meshes(self, values: Sequence[int]) -> tuple[npt.NDArray[np.float64], Ints]:
        """[meshes, axes] distinct meshes of the stages, and [meshes] samples of a micro-batch that divide over each:
        the share of a rank times the ranks."""
        shape = self.shape(values)
        devices = self.stage_devices(values)
        meshes = [self.meshes.mesh_of(mine, shape.tp, shape.middle) for mine in devices]
        shares = self.batch_shares(values) or (None,) * len(meshes)
        found = dict.fromkeys(
            (mesh, share * mesh[0])
            for mesh, mine in zip(meshes, shares, strict=True)
            for share in ([spread(shape.samples, mesh[0]) // mesh[0]] if mine is None else dict.fromkeys(mine))
        )
        return np.array([mesh for mesh, _ in found], dtype=np.float64), np.array([n for _, n in found], dtype=np.int64)

    def legal(self, prefix: Sequence[int]) -> Mask:
        """Which values of slot `len(prefix)` may follow; at least one always may."""
        slot = self.slots[len(prefix)]
        if slot.kind == "signature":
            return self._legal_signature(slot, prefix)
        mask = np.zeros(slot.num_values, dtype=np.bool_)
        if slot.kind in SHAPE_KINDS:
            mask[list(self.meshes.followers[tuple(prefix)])] = True
            return mask
        shape = self.shape(prefix)
        if slot.kind == "devices":
            size_mask(self.arrays, np.array(prefix, dtype=np.int64), slot.index, mask)
        elif slot.kind == "order":
            mask[: self.meshes.num_orders(shape.pp)] = True
        elif slot.kind == "shares" and slot.num_values > 1:
            decided = np.array([*prefix, 0], dtype=np.int64)
            share_mask(self.arrays, decided, shape.pp, np.array(self.stage_rows(prefix), dtype=np.int64), mask)
        elif slot.kind == "schedule" and shape.pp > 1 and shape.virtual == 1:
            mask[:] = True
        elif slot.kind == "cut" and slot.index < shape.num_chunks - 1:
            mask[: len(self.cut_candidates(prefix, slot.index, shape))] = True
        elif slot.kind == "recompute" and slot.index < shape.pp:
            ends = np.array([*self.cuts(prefix, shape.num_chunks - 1), self.num_units], dtype=np.int64)
            mode_mask(self.arrays, ends, shape.pp, slot.index, mask)
        elif slot.kind == "zero" and shape.replicas > 1:
            mask[:] = self.zeros
        else:
            mask[0] = True
        return mask

    def _legal_signature(self, slot: Slot, prefix: Sequence[int]) -> Mask:
        sizes, samples = self.unlike_meshes(prefix)
        outer = prefix[len(prefix) - slot.index :]
        key = (len(prefix), sizes.tobytes(), samples.tobytes(), *outer)
        if key not in self._legal:
            members, assignment = self.group_rows[slot.unit_type, slot.group]
            chosen = blank(self.evaluator, len(self.axes))
            for axis, value in enumerate(outer):
                chosen[members, axis] = assignment[value]
            mask = np.empty(slot.num_values, dtype=np.bool_)
            group = (len(prefix) - self.first_signature) // len(self.axes)
            arrays = self.evaluator.tables.arrays
            signature_mask(arrays, self.arrays, group, slot.index, chosen, sizes, samples, mask)
            self._legal[key] = mask
        return self._legal[key]

    def operator(self, unit_type: int, offset: int) -> Operator:
        """An operator of the representative unit of a type."""
        return self.problem.graph.operators[self.linkage.blocks.representative(unit_type).start + offset]

    def is_view(self, name: str) -> bool:
        """Whether a parameter view makes the tensor."""
        index = self.problem.graph.producer.get(name)
        return index is not None and self.problem.graph.operators[index].is_view

    def operator_name(self, unit_type: int, offset: int) -> str:
        """Name of an operator in the representative unit of a type."""
        return self.operator(unit_type, offset).name

    # -- cuts ----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def cumulative_weight(self) -> npt.NDArray[np.float64]:
        """[units + 1] weight of all units before each."""
        return np.concatenate([[0.0], np.cumsum(self.evaluator.unit_weights)])

    def cut_shares(self, values: Sequence[int]) -> list[float]:
        """[chunks] how many times its rank's speed the ranks of a chunk and of all behind it have together."""
        stages = self.layout(values).stages
        samples = self.batch_shares(values) or (None,) * len(stages)
        # With its own share each kind works at its own speed.
        found = [s.speed if mine is None else s.kinds[0].stage.speed for s, mine in zip(stages, samples, strict=True)]
        speeds = [found[chunk % len(stages)] for chunk in range(self.shape(values).num_chunks)]
        left = functools.reduce(operator.add, speeds, 0.0)
        shares = []
        for speed in speeds:
            shares.append(left / speed)
            left -= speed
        return shares

    def cut_candidates(self, prefix: Sequence[int], chunk: int, shape: Shape) -> Ints:
        """Ends of `chunk` (units before it): nearest first to its rank's share, by speed, of what is left."""
        start = self.cuts(prefix, chunk)[-1] if chunk else 0
        return self.candidates(start, chunk, shape.num_chunks, self.cut_shares(prefix)[chunk])

    def candidates(self, start: int, chunk: int, num_chunks: int, share: float) -> Ints:
        """Ends of `chunk` when it begins at unit `start`: nearest first to one `share`-th of what is left."""
        low, high = self.constrained.window(chunk, num_chunks)
        low = max(low, start + 1)
        key = (start, low, high, share)
        if key not in self._targets:
            ends = np.arange(low, high + 1, dtype=np.int64)
            total = self.cumulative_weight
            target = total[start] + (total[-1] - total[start]) / share
            order = np.lexsort((ends, np.abs(total[ends] - target)))
            self._targets[key] = ends[order]
        return self._targets[key]

    def cuts(self, values: Sequence[int], num_cuts: int) -> list[int]:
        """The first `num_cuts` chunk ends that `values` decide."""
        if num_cuts == 0:
            return []
        shape, shares = self.shape(values), self.cut_shares(values)
        ends: list[int] = []
        start = 0
        for chunk in range(num_cuts):
            found = self.candidates(start, chunk, shape.num_chunks, shares[chunk])
            start = int(found[values[self.first_cut + chunk]])
            ends.append(start)
        return ends

    # -- from values to choices ----------------------------------------------------------------------------------

    def even_values(self, shape: Shape, *, recompute: str, zero: int, stages: Sequence[int] = ()) -> Values:
        """The prefix, up to the signatures, of a plan with even cuts and one recompute mode, as constraints allow.

        Args:
            shape: of the plan.
            recompute: mode.
            zero: ZeRO stage, where there are replicas.
            stages: values of the slots of schedule, order and devices; those left out are 0.
        """
        mode = RECOMPUTE_MODES.index(recompute)
        values = [*self.meshes.values(shape), *stages]
        values += [0] * (self.first_recompute - len(values))
        for _ in range(shape.pp):
            legal = self.legal(values) if self.constrained.recomputes else None
            values.append(mode if legal is None or legal[mode] else int(np.flatnonzero(legal)[0]))
        values += [0] * (self.zero_slot - len(values))
        return (*values, zero if shape.replicas > 1 else 0)

    def signatures(self, values: Sequence[int]) -> Ints:
        """[operator rows, axes] signature of every operator; -1 where `values` has not decided yet."""
        chosen = blank(self.evaluator, len(self.axes))
        for position in range(self.first_signature, len(values)):
            self.assign(chosen, self.slots[position], values[position])
        return chosen

    def assign(self, chosen: Ints, slot: Slot, value: int) -> None:
        """Writes the signatures of a whole group."""
        members, assignment = self.group_rows[slot.unit_type, slot.group]
        chosen[members, slot.index] = assignment[value]

    @functools.cached_property
    def group_rows(self) -> dict[tuple[int, int], tuple[Ints, Ints]]:
        """(unit type, group) -> operator rows of its members, and [values, members] their signatures."""
        spans = self.evaluator.tables.spans
        return {
            (unit_type, number): (
                np.array(group.members, dtype=np.int64) + int(spans[unit_type]),
                np.array(group.assignment, dtype=np.int64),
            )
            for unit_type, unit in enumerate(self.linkage.types)
            for number, group in enumerate(unit.groups)
        }

    def lowered(self, values: Sequence[int]) -> LoweredPlan:
        """What `values` decide, all but the signatures complete."""
        return self.choice_of(values, self.signatures(values))

    def choice_of(self, values: Sequence[int], signatures: Ints) -> LoweredPlan:
        """The choice with the given signatures, [operator rows, axes]."""
        chosen = by_type(self.evaluator, signatures)
        shape = self.shape(values)
        ends = [0, *self.cuts(values, shape.num_chunks - 1), self.num_units]
        units = self.linkage.blocks.units
        spans = self.evaluator.tables.spans
        chunks = []
        for chunk in range(shape.num_chunks):
            mode = RECOMPUTE_MODES[values[self.first_recompute + chunk % shape.pp]]
            segments = []
            for number in range(ends[chunk], ends[chunk + 1]):
                kind = units[number].type
                segments.append(
                    Segment(
                        unit=number,
                        first=int(spans[kind]),
                        last=int(spans[kind + 1]),
                        chosen=chosen[kind],
                        recomputed=self.evaluator.masks(kind)[mode],
                    )
                )
            chunks.append(tuple(segments))
        layout = self.layout(values)
        is_unlike = any(values[self.first_stage + 2 : self.shares_slot]) or shape.samples % shape.dp != 0
        return LoweredPlan(
            axes=self.axes,
            layout=layout,
            num_micro_batches=shape.num_micro_batches,
            samples=shape.samples,
            kind="interleaved" if shape.virtual > 1 else self.schedules[values[self.first_stage]],
            chunks=tuple(chunks),
            zero=values[self.zero_slot],
            zero_axes=self.zero_axes(shape),
            spread_over=(0,) * shape.pp if is_unlike else (),
            shares=self.batch_shares(values),
        )

    def price(self, values: Ints) -> npt.NDArray[np.float64]:
        """Prices complete plans, [n, slots], in one compiled call.

        Returns:
            [n, 2] seconds of a step, and the largest share of its memory by which a device overflows (at most 0 where
            the plan fits); the floats of `Evaluator.evaluate`.
        """
        return self._price(values, exact=True)

    def bound(self, values: Ints) -> npt.NDArray[np.float64]:
        """Lower bounds, as of `price`, on all completions of plans whose last signatures are -1, undecided, [n, slots].

        Those of `PartialPlan` behind the shape and the cuts: undecided signatures at their best, the schedule in closed
        form.
        """
        return self._price(values, exact=False)

    def _price(self, values: Ints, *, exact: bool) -> npt.NDArray[np.float64]:
        from automap.space.kernels.price_many import price_many  # who prices one plan need not load it

        out = np.empty((len(values), 2))
        plans = np.ascontiguousarray(values, dtype=np.int64)
        price_many(self.evaluator.tables.arrays, self.arrays, self.cache, plans, exact, out)
        return out

    @functools.cached_property
    def cache(self) -> UnitCache:
        """What units cost, of the plans priced last."""
        from automap.space.kernels.unit_cache import new_memo

        return new_memo()

    @functools.cached_property
    def arrays(self) -> SpaceArrays:
        """The decisions for the compiled kernels."""
        return compile_space(self)

    def random(self, rng: np.random.Generator) -> Values:
        """A plan drawn by uniform choices among the legal values of each slot."""
        return tuple(self.random_batch(rng, 1)[0].tolist())

    def random_batch(self, rng: np.random.Generator, count: int) -> Ints:
        """[count, slots] plans drawn like `random`, in one compiled call."""
        from automap.space.kernels.sample import draw_many

        rows, chances = self._shape_chances
        values = np.zeros((count, len(self.slots)), dtype=np.int64)
        values[:, : self.first_stage] = rows[rng.choice(len(rows), size=count, p=chances)]
        draw_many(self.evaluator.tables.arrays, self.arrays, rng.random(values.shape), values)
        return values

    @functools.cached_property
    def _shape_chances(self) -> tuple[Ints, npt.NDArray[np.float64]]:
        """Values of all shapes, and the probability of each under uniform choices of one value after the other."""
        rows = [self.meshes.values(shape) for shape in self.shapes]
        followers = self.meshes.followers
        ways = [[len(followers[row[:depth]]) for depth in range(len(row))] for row in rows]
        chances = 1.0 / np.prod(np.array(ways, dtype=np.float64), axis=1)
        return np.array(rows, dtype=np.int64), chances / chances.sum()

    def free_slots(self, values: Sequence[int]) -> list[Slot]:
        """The slots of a plan at which more than one value is legal behind those before."""
        return [slot for i, slot in enumerate(self.slots) if self.legal(values[:i]).sum() > 1]

    def repair(self, values: Sequence[int], kept: int = 0) -> Values:
        """The nearest legal plan: each value kept if it is legal behind those before it, else the first legal one.

        Args:
            values: of a plan.
            kept: so many of the first are known to be legal.
        """
        fixed = list(values[:kept])
        for value in values[kept:]:
            legal = self.legal(fixed)
            fixed.append(int(value) if value < len(legal) and legal[value] else int(np.flatnonzero(legal)[0]))
        return tuple(fixed)

    def decode(self, values: Sequence[int]) -> Plan:
        """The plan that `values` decide, not yet priced."""
        return to_plan(self.lowered(values), self.evaluator)

    def encode(self, plan: Plan) -> Values | None:
        """The values that decode to `plan`, or None if it lies outside the space.

        Raises:
            PlanError: the plan is malformed or for another problem.
        """
        lowered = lower_plan(plan, self.evaluator, self.axes)
        return values_of(self, lowered) if plan.sync.kind == "synchronous" else None

    def neighbours(
        self, rng: np.random.Generator, values: Ints, donors: Ints, chances: Sequence[float] = MOVE_CHANCES
    ) -> Ints:
        """[n, slots] one neighbour of each plan: some decisions changed, the others kept as far as they stay legal.

        Args:
            rng: of the moves.
            values: [n, slots] legal plans.
            donors: [m, slots] legal plans, the best first, from which shapes and signatures may be borrowed.
            chances: of each kind of move, see `automap.space.kernels.neighbours`.
        """
        from automap.space.kernels.neighbours import move_many

        shares = np.cumsum(np.array(chances)) / sum(chances)
        rows, _ = self._shape_chances
        seeds = rng.integers(1, 1 << 63, len(values), dtype=np.uint64)
        out = np.empty_like(values)
        move_many(self.evaluator.tables.arrays, self.arrays, rows, shares, seeds, donors, values, out)
        return out

    @functools.cached_property
    def decades(self) -> float:
        """log10 of the number of plans; constraints on recomputation are not counted off."""
        return count_decades(self)


def _schedules(problem: Problem) -> tuple[str, ...]:
    """Schedules without virtual stages that the user wants or, else, the trainer can run."""
    fixed = problem.hints.fix.schedule
    if fixed is None:
        return problem.trainer.schedules
    return ("1f1b",) if fixed == "interleaved" else (fixed,)

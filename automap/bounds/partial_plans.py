"""Partial plans: plans being decided, with lower bounds on their time and memory after every decision.

All bounds are admissible: no completion of a partial plan is faster or needs less memory
(`automap.bounds.kernels.step_many`). `PartialPlans` decides many plans at once, `PartialPlan` one. Units: seconds;
memory as share of capacity (overflow).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from automap.arrays import Floats, Ints, Mask
from automap.bounds.kernels.cut_bounds import LowerBounds
from automap.bounds.kernels.step_many import BEGIN, EpisodeArrays, step_many
from automap.bounds.kernels.unit_lower_bounds import UnitBounds, forced_signatures, unit_lower_bounds
from automap.price.lowered_plan import RECOMPUTE_MODES, spread
from automap.space.shape import Shape
from automap.space.space import PlanSpace, Slot, Values


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound on all completions of a partial plan."""

    time_s: float
    """Seconds of a step."""
    overflow: float
    """Bytes by which the fullest device exceeds its memory, as a share of the latter; at most 0 if the plan may fit."""


class BoundTable:
    """Bounds that need no signatures, shared by all partial plans of a space.

    The lower bound of a unit depends on its stage and on the samples of a micro-batch there; both together are called a
    *setting*. In a stage with several kinds of devices and unlike shares, two settings count: the time is at least that
    of the fastest kind with its smallest possible share, and the memory at least that of the slowest kind. Such a pair
    is a setting of its own, numbered after the others.

    Attributes:
        settings: row among the distinct stages and samples of a micro-batch of each setting, in order.
        shape_bounds: [shapes, 2] lower bounds on seconds and overflow of all plans of a shape.
        lower_bounds: the tables for the kernels.
    """

    def __init__(self, space: PlanSpace) -> None:
        """Prices every unit type in every setting of the space."""
        self.space = space
        self.settings: dict[tuple[int, int], int] = {}
        self._pairs: dict[tuple[int, int], int] = {}
        self._of_unlike: dict[tuple[int, int, int, int], tuple[int, ...]] = {}
        even = [self._usual(shape) for shape in space.shapes]
        unlike = [self._unlike(shape) for shape in space.shapes]
        settings, least = self._least(even, unlike)
        even, unlike = ([self._numbered(some) for some in every] for every in (even, unlike))
        # Rows of the tables: the settings; then, for each set of settings that the usual stages of a shape may have,
        # the least of all of them.
        sets: dict[tuple[int, ...], int] = {(setting,): setting for setting in range(len(settings))}
        self._rows = np.array([sets.setdefault(some, len(sets)) for some in even], dtype=np.int64)
        flat, starts = np.concatenate([*map(list, sets)]), np.cumsum([0, *map(len, sets)])[:-1]
        found = UnitBounds(*(np.minimum.reduceat(column[flat], starts, axis=0) for column in least))
        units = space.arrays.units
        self._again = self._before(np.maximum(0.0, found.again_s - found.work_s))
        some_sets = [some for some in dict.fromkeys([*even, *unlike]) if some]
        of_stages = dict(zip(some_sets, self._of_stages(some_sets, settings, least).tolist(), strict=True))
        self.shape_bounds = np.array(
            [
                self._of_shape(shape, [of_stages[some] for some in both if some])
                for shape, *both in zip(space.shapes, even, unlike, strict=True)
            ]
        )
        rows = np.full((len(space.arrays.axes), len(space.meshes.micro_batches)), -1, dtype=np.int64)
        for shape, others in zip(space.shapes, unlike, strict=True):
            rows[settings[list(others), 0], space.meshes.micro_batches.index(shape.num_micro_batches)] = others
        self.lower_bounds = LowerBounds(
            nodes=self._of_nodes(),
            shapes=self._rows,
            unlike=rows,
            work=self._before(found.work_s),
            states=self._before(found.state_bytes),
            gradients=self._before(found.gradient_bytes),
            saved=self._before(found.saved_bytes),
            sent=np.ascontiguousarray(np.pad(found.sent_bytes[:, units], ((0, 0), (1, 0)))),
            shared_bytes=self._tied_bytes,
            reserved_bytes=float(space.arrays.settings.reserved_bytes),
        )

    @functools.cached_property
    def _tied_bytes(self) -> float:
        """Bytes of the state of parameters that several units use, once for each unit but the first."""
        problem, tied = self.space.problem, self.space.evaluator.tied.parameters
        tensors = [problem.graph.tensors[name] for name, _, _ in tied]
        trained = sum(t.num_elements for t in tensors if not t.frozen)
        frozen = sum(t.num_elements for t in tensors if t.frozen)
        return trained * float(sum(problem.state_bytes)) + frozen * (problem.state_bytes[0] + problem.frozen_bytes)

    def _before(self, of_types: Floats) -> Floats:
        """[rows, units + 1] sum over all units before each, of [rows, types]."""
        # np.pad keeps the order of the columns in memory; the kernels read rows.
        return np.ascontiguousarray(np.pad(np.cumsum(of_types[:, self.space.arrays.units], axis=1), ((0, 0), (1, 0))))

    def _least(self, even: Sequence[Sequence[int]], unlike: Sequence[Sequence[int]]) -> tuple[Ints, UnitBounds]:
        """[settings, 2] stage and samples of each setting, and lower bounds on the costs of units there."""
        space, evaluator = self.space, self.space.evaluator
        settings = np.array(list(self.settings), dtype=np.int64)
        found = UnitBounds(*np.empty((len(UnitBounds._fields), len(settings), evaluator.blocks.num_types)))
        again = RECOMPUTE_MODES.index("full")
        unit_lower_bounds(space.compiled, settings, self._forced(settings, even, unlike), again, found)
        slow, fast = np.array(list(self._pairs), dtype=np.int64).reshape(-1, 2).T
        pairs = UnitBounds(
            work_s=found.work_s[fast],
            again_s=found.again_s[fast],
            state_bytes=found.state_bytes[slow],
            gradient_bytes=found.gradient_bytes[slow],
            saved_bytes=found.saved_bytes[slow],
            sent_bytes=np.minimum(found.sent_bytes[slow], found.sent_bytes[fast]),
        )
        return np.concatenate([settings, settings[slow]]), UnitBounds(
            *map(np.concatenate, zip(found, pairs, strict=True))
        )

    def _forced(self, settings: Ints, even: Sequence[Sequence[int]], unlike: Sequence[Sequence[int]]) -> Ints:
        """[settings, groups, axes] forced signatures; -1 where there is a choice.

        If the stages of a pipeline differ in their meshes or shares, a signature must be legal on all of them. So only
        signatures count that are forced in all these settings.
        """
        arrays = self.space.arrays
        picked = np.empty((len(settings), len(arrays.groups), len(arrays.obeys)), dtype=np.int64)
        forced_signatures(self.space.compiled, settings, picked)
        are_even = map(self.space.meshes.is_even, self.space.shapes)
        bound_up = {
            setting
            for some, is_even in zip(even, are_even, strict=True)
            if min(some) < 0 or not is_even
            for setting in some
            if setting >= 0
        }
        bound_up |= {setting for some in (*self._pairs, *unlike) for setting in some if setting >= 0}
        some = sorted(bound_up)
        if some:
            is_split = (arrays.axes[settings[some, 0]] > 1.0)[:, None, :]
            most = np.where(is_split, picked[some], -1).max(axis=0)
            agreed = (~is_split | (picked[some] == most)).all(axis=0)
            # If the signature on an axis is undecided, those on later axes are undecided too.
            agreed = np.logical_and.accumulate(agreed, axis=1)
            picked[some] = np.where(agreed, picked[some], -1)
        return picked

    def _setting(self, row: int, samples: int) -> int:
        """Number of the setting of a distinct stage (its row) and samples; a new one if it is not known."""
        return self.settings.setdefault((row, samples), len(self.settings))

    def _shared(self, row: int, count: int) -> list[int]:
        """Settings of a distinct stage if its devices may have unlike shares; negative numbers stand for pairs.

        Args:
            row: row of the stage among the distinct ones.
            count: value of the slot `micro_batches`.
        """
        arrays = self.space.arrays
        number = int(arrays.mixed[row])
        if number < 0:
            return []
        ways = np.flatnonzero(arrays.share_ways[number, count])
        if not len(ways):
            return []
        each = arrays.kind_ranks[number] * arrays.quanta[number]
        most = -(-arrays.kind_samples[number, count, ways] // each) * arrays.quanta[number] * int(arrays.axes[row, 0])
        slow, fast = (
            self._setting(int(arrays.kind_rows[number, kind]), int(most[:, kind].min()))
            for kind in (0, most.shape[1] - 1)
        )
        return [-1 - self._pairs.setdefault((slow, fast), len(self._pairs))]

    def _numbered(self, some: Sequence[int]) -> tuple[int, ...]:
        """The same settings, with the numbers of pairs after all others."""
        return tuple(setting if setting >= 0 else len(self.settings) - 1 - setting for setting in some)

    def _usual(self, shape: Shape) -> tuple[int, ...]:
        """Settings of the stages of usual size of a shape, over all orders of the devices."""
        meshes = self.space.meshes
        rows = sorted(
            {row for order in range(meshes.num_orders(shape.pp)) for row in self.space.usual_rows(shape, order)}
        )
        count = meshes.micro_batches.index(shape.num_micro_batches)
        shared = [setting for row in rows for setting in self._shared(row, count)]
        # Also in equal stages, samples may not divide evenly over the replicas.
        samples = [spread(shape.samples, int(ranks)) for ranks in self.space.arrays.axes[rows, 0]]
        return (*map(self._setting, rows, samples), *shared)

    def _unlike(self, shape: Shape) -> tuple[int, ...]:
        """Settings of all stages that a shape may have if the stages are of unlike size."""
        meshes = self.space.meshes
        if not meshes.may_differ(shape):
            return ()
        tp, middle = meshes.degrees.index(shape.tp), meshes.middles.index(shape.middle)
        key = (tp, middle, meshes.micro_batches.index(shape.num_micro_batches), shape.samples)
        # Shapes that differ in the numbers of stages and replicas alone have the same settings.
        if key not in self._of_unlike:
            self._of_unlike[key] = self._unlike_with(*key)
        return self._of_unlike[key]

    def _unlike_with(self, tp: int, middle: int, count: int, samples: int) -> tuple[int, ...]:
        """Settings of all stages with these inner axes.

        Args:
            tp, middle, count: values of the slots of the two axes and of the micro-batches.
            samples: samples of a micro-batch.
        """
        arrays = self.space.arrays
        rows = np.unique(arrays.stage_rows[:, tp, middle, :, arrays.fills[tp, middle, count, 1]])
        rows = rows[rows >= 0]
        shared = [setting for row in rows.tolist() for setting in self._shared(row, count)]
        outer = arrays.axes[rows, 0].astype(np.int64).tolist()
        even = [self._setting(row, spread(samples, ranks)) for row, ranks in zip(rows.tolist(), outer, strict=True)]
        return (*even, *shared)

    def _of_stages(self, sets: Sequence[Sequence[int]], settings: Ints, least: UnitBounds) -> Floats:
        """Lower bounds for all units of the model, on stages whose settings are from a set.

        Args:
            sets: sets of settings.
            settings: [settings, 2] see `_least`.
            least: bounds of units, see `_least`.

        Returns:
            [sets, 3] seconds of a micro-batch if all devices share all units; seconds of one micro-batch through all
            units; and the share of a device's memory that all units need.
        """
        space, arrays = self.space, self.space.arrays
        flat, starts = np.concatenate([*map(list, sets)]), np.cumsum([0, *map(len, sets)])[:-1]
        times = np.bincount(arrays.units, minlength=least.work_s.shape[1])
        work_s, rows = least.work_s[flat], settings[flat, 0]
        devices = arrays.axes[rows].prod(axis=1)
        capacity = np.maximum.reduceat(arrays.capacity[rows], starts).astype(np.float64)
        # A unit keeps all devices of its stage busy.
        busy_s = np.minimum.reduceat(work_s * devices[:, None], starts) @ times / space.meshes.devices
        held = np.minimum.reduceat(least.state_bytes[flat], starts) @ times - self._tied_bytes
        held *= 1.0 + float(arrays.settings.unused_share)
        return np.stack([busy_s, np.minimum.reduceat(work_s, starts) @ times, held / np.maximum(1.0, capacity)], axis=1)

    def _of_shape(self, shape: Shape, of_stages: Sequence[Sequence[float]]) -> tuple[float, float]:
        """Lower bounds on seconds and overflow of all plans of a shape.

        Args:
            shape: the shape.
            of_stages: `_of_stages` of its stages of usual size, and of those whose sizes slots decide.
        """
        found, count = [], shape.num_micro_batches
        for busy_s, through_s, held in of_stages:
            seconds = count * busy_s
            if shape.virtual == 1 and not self.space.is_split:
                # The best division of the work, if each rank waits while a micro-batch passes the ranks before it.
                seconds = max(seconds, through_s / (1.0 - (1.0 - 1.0 / count) ** shape.pp))
            found.append((seconds, held / shape.pp - 1.0))
        return min(seconds for seconds, _ in found), min(overflow for _, overflow in found)

    def _of_nodes(self) -> Floats:
        """See `LowerBounds.nodes`."""
        nodes = self.space.arrays.shape_nodes
        found = np.empty((len(nodes), 2))
        for number in range(len(nodes) - 1, -1, -1):
            first, count, _, shape = nodes[number].tolist()
            found[number] = self.shape_bounds[shape] if shape >= 0 else found[first : first + count].min(axis=0)
        return found

    @property
    def first(self) -> Bound:
        """Bound of all plans of the space."""
        return Bound(*self.lower_bounds.nodes[0].tolist())

    def work(self, number: int, stages: Sequence[int]) -> tuple[Floats, Floats]:
        """Least seconds of a micro-batch in all units before each, and the seconds that recomputation adds to them.

        Args:
            number: number of the shape.
            stages: [ranks] rows of `SpaceArrays.axes` of stages of unlike size; empty for the usual sizes.

        Returns:
            Two arrays [ranks, units + 1].
        """
        shape = self.space.shapes[number]
        at = [int(self._rows[number])] * shape.pp
        if stages:
            count = self.space.meshes.micro_batches.index(shape.num_micro_batches)
            at = self.lower_bounds.unlike[list(stages), count].tolist()
            assert min(at) >= 0, "a stage that the shape cannot have"
        return self.lower_bounds.work[at], self._again[at]


class PartialPlans:
    """Plans being decided at the same time. Slots that are forced or not asked are filled in at once.

    Attributes:
        episodes: the plans, their legal values and bounds.
    """

    def __init__(
        self,
        table: BoundTable,
        count: int,
        *,
        most: int | None = None,
        num_cuts: int | None = None,
        free_ranks: int | None = None,
        asks: Callable[[Slot], bool] = lambda slot: True,
        preferred: Ints | None = None,
    ) -> None:
        """Begins `count` plans.

        Args:
            table: bounds of the space.
            count: number of plans.
            most: only values below it are offered; None = all.
            num_cuts: number of ends of chunks that are offered along a pipeline, the most even ones first; None = all.
            free_ranks: in longer pipelines a rank, except for the last one, recomputes no more than the one before it;
                None = no such limit.
            asks: whether a slot is decided by an action. All other slots take their preferred value if it is legal,
                else the one that keeps operators whole, else the first legal one.
            preferred: [slots] preferred values of slots that are not asked; None = none.
        """
        space = table.space
        num_slots = len(space.slots)
        most = most or max(slot.num_values for slot in space.slots)
        self.space = space
        self.table = table
        wanted = np.full(num_slots, -1, dtype=np.int64) if preferred is None else preferred
        self.episodes = EpisodeArrays(
            values=np.zeros((count, num_slots), dtype=np.int64),
            position=np.zeros(count, dtype=np.int64),
            hashes=np.zeros((count, 2), dtype=np.int64),
            asks=np.zeros(count, dtype=np.int64),
            bound=np.zeros((count, 2)),
            legal=np.zeros((count, most), dtype=np.int64),
            offered=np.zeros(count, dtype=np.int64),
            action_bounds=np.zeros((count, most, 2)),
            preferred=np.tile(wanted, (count, 1)),
            asked=np.tile([asks(slot) for slot in space.slots], (count, 1)),
            num_cuts=1 << 40 if num_cuts is None else num_cuts,
            free_ranks=num_slots if free_ranks is None else free_ranks,
        )
        self.step(np.full(count, BEGIN, dtype=np.int64))

    @property
    def done(self) -> Mask:
        """[plans] whether every slot is decided."""
        done: Mask = self.episodes.position == len(self.space.slots)
        return done

    def step(self, actions: Ints) -> None:
        """Takes one decision of every plan.

        Args:
            actions: [plans] index into `episodes.legal`, or `BEGIN` or `WAIT` of `automap.bounds.kernels.step_many`.
        """
        step_many(self.space.compiled, self.table.lower_bounds, self.episodes, actions)


class PartialPlan:
    """One plan being decided. Slots with one legal value are filled in, so the next slot always is a real choice."""

    def __init__(self, space: PlanSpace, table: BoundTable) -> None:
        self.space = space
        self._one = PartialPlans(table, 1)

    @property
    def done(self) -> bool:
        """Whether every slot is decided."""
        return bool(self._one.done[0])

    @property
    def position(self) -> int:
        """Number of the slot to decide."""
        return int(self._one.episodes.position[0])

    @property
    def values(self) -> list[int]:
        """The decided values."""
        decided: list[int] = self._one.episodes.values[0, : self.position].tolist()
        return decided

    @property
    def bound(self) -> Bound:
        """The lower bound on all completions; the price of a complete plan."""
        return Bound(*self._one.episodes.bound[0].tolist())

    @property
    def shape(self) -> Shape | None:
        """The shape once it is decided."""
        return self.space.shape(self.values) if self.position >= self.space.first.cut else None

    def legal(self) -> Ints:
        """Legal values of the slot to decide."""
        legal: Ints = self._one.episodes.legal[0, : self._one.episodes.offered[0]]
        return legal

    def bounds(self) -> Floats:
        """[values, 2] seconds and overflow after each legal value, in the order of `legal()`."""
        bounds: Floats = self._one.episodes.action_bounds[0, : self._one.episodes.offered[0]]
        return bounds

    def decide(self, value: int) -> None:
        """Decides the current slot, and fills in the following slots that have one legal value.

        Args:
            value: one of `legal()`.
        """
        at = int(np.searchsorted(self.legal(), value))
        assert self.legal()[at] == value, (self.space.slots[self.position], value)
        self._one.step(np.array([at]))


def walk(space: PlanSpace, table: BoundTable, values: Values) -> PartialPlan:
    """The partial plan with these values, and with the following slots that have one legal value filled in."""
    partial = PartialPlan(space, table)
    while partial.position < len(values):
        partial.decide(values[partial.position])
    return partial

"""Prefixes: plans being decided, with lower bounds on their time and memory after every decision.

All bounds are admissible: no completion of a prefix is faster or smaller (`automap.bounds.kernels.step_many` says
where they come
from). `Prefixes` walks many plans at once, `PartialPlan` one. Units: seconds; memory as share of capacity (overflow).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from automap.bounds.kernels.step_many import BEGIN, Tree, Walks, step_many
from automap.bounds.kernels.unit_floors import floors, settled
from automap.price.lowered_plan import RECOMPUTE_MODES, spread
from automap.space.compile import Y_FIRST
from automap.space.shape import Shape
from automap.space.space import PlanSpace, Slot, Values

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Bound:
    """No completion is faster than `time_s`, or overflows memory by less than `overflow`."""

    time_s: float
    overflow: float


class BoundTable:
    """Bounds that need no signatures, shared by all prefixes of a space.

    Attributes:
        shape_bounds: [shapes, 2] seconds and overflow that no plan of a shape goes below.
        frames: the distinct stages, rows of `SpaceArrays.axes`, with the samples of a micro-batch there.

    A stage whose unlike devices have unlike shares takes at least as long as its fastest kind with the smallest share
    that any way gives it, and keeps at least what the slowest does: both together are a frame of their own.
    """

    def __init__(self, space: PlanSpace) -> None:
        self.space = space
        evaluator, meshes, arrays = space.evaluator, space.meshes, space.arrays
        full = RECOMPUTE_MODES.index("full")
        self.frames: dict[tuple[int, int], int] = {}
        self._pairs: dict[tuple[int, int], int] = {}
        even = [self._even(shape) for shape in space.shapes]
        unlike = [self._unlike(shape) for shape in space.shapes]
        least = np.empty((len(self.frames), 6, evaluator.blocks.num_types))
        frames = np.array(list(self.frames), dtype=np.int64)
        exposed = np.asarray(evaluator.exposed, dtype=np.float64)
        floors(evaluator.tables.arrays, arrays, frames, self._settled(frames, even, unlike), exposed, full, least)
        least[:, 2] = self._held(least)
        # Frames of two kinds stand behind the others: time of the fastest, memory of the slowest.
        pairs = np.array(list(self._pairs), dtype=np.int64).reshape(-1, 2)
        of_pairs = np.concatenate([least[pairs[:, 1], :2], least[pairs[:, 0], 2:]], axis=1)
        of_pairs[:, 4] = np.minimum(least[pairs[:, 0], 4], least[pairs[:, 1], 4])
        least = np.concatenate([least, of_pairs])
        even, unlike = ([self._numbered(some, len(frames)) for some in every] for every in (even, unlike))
        frames = np.concatenate([frames, frames[pairs[:, 0]]])
        # Floors of stages of unlike size come first, by frame; then those of all ranks of a shape.
        sets: dict[tuple[int, ...], int] = {(frame,): frame for frame in range(len(frames))}
        self._rows = np.array([sets.setdefault(some, len(sets)) for some in even], dtype=np.int64)
        found = np.array([least[list(some)].min(axis=0) for some in sets])
        found[:, 1] = np.maximum(0.0, found[:, 1] - found[:, 0])
        of_units = np.cumsum(found[:, :, arrays.units], axis=2)
        of_units = np.concatenate([np.zeros((len(found), 6, 1)), of_units], axis=2)
        sent = np.ascontiguousarray(np.pad(found[:, 4, arrays.units], ((0, 0), (1, 0))))
        self.shape_bounds = np.array(
            [
                self._of_shape(shape, frames, least, some, others)
                for shape, some, others in zip(space.shapes, even, unlike, strict=True)
            ]
        )
        nodes, bounds = self._tree()
        rows = np.full((len(arrays.axes), len(meshes.micro_batches)), -1, dtype=np.int64)
        for shape, others in zip(space.shapes, unlike, strict=True):
            rows[frames[list(others), 0], meshes.micro_batches.index(shape.num_micro_batches)] = others
        self._arrays = (
            nodes,
            bounds,
            np.ascontiguousarray(of_units[:, 0]),
            np.ascontiguousarray(of_units[:, 2]),
            np.ascontiguousarray(of_units[:, 3]),
            sent,
            rows,
        )
        self._again = of_units[:, 1]
        shared = sum(space.problem.graph.tensors[name].num_elements for name, _, _ in evaluator.tied.parameters)
        held = float(arrays.settings.reserved_bytes)
        self._aside = np.array([shared * float(sum(space.problem.state_bytes)), held])

    def _settled(self, frames: Ints, even: Sequence[Sequence[int]], unlike: Sequence[Sequence[int]]) -> Ints:
        """[frames, groups, axes] signatures that leave no choice, -1 where one is left.

        Where meshes or shares of the stages of a pipeline differ, a signature must divide on all of them: there only
        those count that all such frames agree on.
        """
        arrays = self.space.arrays
        picked = np.empty((len(frames), len(arrays.groups), len(arrays.obeys)), dtype=np.int64)
        settled(self.space.evaluator.tables.arrays, arrays, frames, picked)
        bound_up = {frame for some in even if min(some) < 0 for frame in some if frame >= 0}
        bound_up |= {frame for some in (*self._pairs, *unlike) for frame in some if frame >= 0}
        some = sorted(bound_up)
        if some:
            is_split = (arrays.axes[frames[some, 0]] > 1.0)[:, None, :]
            most = np.where(is_split, picked[some], -1).max(axis=0)
            agreed = (~is_split | (picked[some] == most)).all(axis=0)
            # What is undecided on an axis leaves those behind it undecided.
            agreed = np.logical_and.accumulate(agreed, axis=1)
            picked[some] = np.where(agreed, picked[some], -1)
        return picked

    def _held(self, least: Floats) -> Floats:
        """[frames, types] bytes of parameters, gradients and moments under the ZeRO stage that leaves least."""
        stage = int(np.flatnonzero(self.space.zeros).max())
        parameter, gradient, optimizer = self.space.problem.state_bytes
        sharded = (stage >= 3) * parameter + (stage >= 2) * gradient + (stage >= 1) * optimizer
        whole = parameter + gradient + optimizer - sharded
        found: Floats = sharded * least[:, 2] + whole * least[:, 5]
        return found

    def _frame(self, row: int, samples: int) -> int:
        """Number of a distinct stage with the samples that it is priced with."""
        return self.frames.setdefault((row, samples), len(self.frames))

    def _shared(self, row: int, count: int) -> list[int]:
        """Frames of a distinct stage in which devices may have unlike shares; numbers below 0 are of pairs.

        Args:
            row: of the stage among the distinct ones.
            count: value of the slot of micro-batches.
        """
        arrays = self.space.arrays
        number = int(arrays.mixed[row])
        ways = np.flatnonzero(arrays.share_ways[number, count]) if number >= 0 else ()
        if not len(ways):
            return []
        each = arrays.kind_ranks[number] * arrays.quanta[number]
        most = -(-arrays.kind_samples[number, count, ways] // each) * arrays.quanta[number] * int(arrays.axes[row, 0])
        slow, fast = (
            self._frame(int(arrays.kind_rows[number, kind]), int(most[:, kind].min()))
            for kind in (0, most.shape[1] - 1)
        )
        return [-1 - self._pairs.setdefault((slow, fast), len(self._pairs))]

    @staticmethod
    def _numbered(some: Sequence[int], num_frames: int) -> tuple[int, ...]:
        """Frames with pairs numbered behind the others."""
        return tuple(frame if frame >= 0 else num_frames - 1 - frame for frame in some)

    def _even(self, shape: Shape) -> tuple[int, ...]:
        """Frames of the ranks of a shape whose stages are alike, in any order of the devices."""
        meshes, arrays = self.space.meshes, self.space.arrays
        at = meshes.degrees.index(shape.pp), meshes.degrees.index(shape.tp), meshes.middles.index(shape.middle)
        rows: set[int] = set()
        for order in range(meshes.num_orders(shape.pp)):
            first = int(arrays.layouts[order][at][Y_FIRST])
            rows.update(arrays.stages[first : first + shape.pp].tolist())
        count = meshes.micro_batches.index(shape.num_micro_batches)
        shared = [frame for row in sorted(rows) for frame in self._shared(row, count)]
        return (*(self._frame(row, shape.samples) for row in sorted(rows)), *shared)

    def _unlike(self, shape: Shape) -> tuple[int, ...]:
        """Frames of all stages that a shape may have where they are of unlike size."""
        meshes, arrays = self.space.meshes, self.space.arrays
        if not meshes.may_differ(shape):
            return ()
        tp, middle = meshes.degrees.index(shape.tp), meshes.middles.index(shape.middle)
        count = meshes.micro_batches.index(shape.num_micro_batches)
        rows = np.unique(arrays.stage_rows[:, tp, middle, :, arrays.fills[tp, middle, count, 1]])
        rows = rows[rows >= 0]
        shared = [frame for row in rows.tolist() for frame in self._shared(row, count)]
        outer = arrays.axes[rows, 0].astype(np.int64).tolist()
        even = [self._frame(row, spread(shape.samples, ranks)) for row, ranks in zip(rows.tolist(), outer, strict=True)]
        return (*even, *shared)

    def _of_shape(
        self, shape: Shape, frames: Ints, least: Floats, even: Sequence[int], unlike: Sequence[int]
    ) -> tuple[float, float]:
        """Seconds and overflow that no plan of a shape goes below; `least` [frames, 6, types], see `floors`."""
        space, arrays = self.space, self.space.arrays
        times = np.bincount(arrays.units, minlength=least.shape[2])
        state = sum(space.problem.state_bytes)
        tied = sum(space.problem.graph.tensors[name].num_elements for name, _, _ in space.evaluator.tied.parameters)
        found = []
        for some in (even, unlike):
            if not some:
                continue
            mine, rows = least[list(some)], frames[list(some), 0]
            devices = arrays.axes[rows].prod(axis=1)
            # Devices are busy for as long as units take, on as many as a stage has.
            busy = float((mine[:, 0] * devices[:, None]).min(axis=0) @ times) / space.meshes.devices
            through = float(mine[:, 0].min(axis=0) @ times)
            count = shape.num_micro_batches
            seconds = count * busy
            if shape.virtual == 1 and not space.is_split:
                # The best spread of the work when rank r must wait for one pass through the ranks before it.
                seconds = max(seconds, through / (1.0 - (1.0 - 1.0 / count) ** shape.pp))
            held = float(mine[:, 2].min(axis=0) @ times)
            capacity = max(1.0, float(arrays.capacity[rows].max()))
            found.append((seconds, (held - tied * state) / shape.pp / capacity - 1.0))
        return min(seconds for seconds, _ in found), min(overflow for _, overflow in found)

    def _tree(self) -> tuple[Ints, Floats]:
        """Nodes and bounds of `Tree`."""
        shapes = self.space.shapes
        paths = [self.space.meshes.values(shape) for shape in shapes]
        order = sorted(range(len(shapes)), key=paths.__getitem__)
        nodes: list[list[int]] = [[-1, 0, -1, -1, 0, 0, 0]]
        bounds = [self.shape_bounds.min(axis=0)]
        level = [(0, order)]
        for depth in range(len(paths[0])):
            below = []
            for node, members in level:
                nodes[node][0] = len(nodes)
                by_value: dict[int, list[int]] = {}
                for member in members:
                    by_value.setdefault(paths[member][depth], []).append(member)
                nodes[node][1] = len(by_value)
                for value, some in by_value.items():
                    below.append((len(nodes), some))
                    nodes.append([-1, 0, value, -1, 0, 0, 0])
                    bounds.append(self.shape_bounds[some].min(axis=0))
            level = below
        for node, (member,) in level:
            shape = shapes[member]
            nodes[node][3:] = [int(self._rows[member]), shape.pp, shape.num_chunks, shape.num_micro_batches]
        return np.array(nodes, dtype=np.int64), np.array(bounds)

    @property
    def first(self) -> Bound:
        """Bound of all plans of the space."""
        return Bound(*self._arrays[1][0].tolist())

    def work(self, number: int, stages: Sequence[int]) -> tuple[Floats, Floats]:
        """Least seconds of a micro-batch in all units before each, and what recomputation adds to them.

        Args:
            number: of the shape.
            stages: [ranks] rows of `SpaceArrays.axes`, of stages of unlike size; empty where they are alike.

        Returns:
            twice [ranks, units + 1].
        """
        _, _, work, _, _, _, rows = self._arrays
        shape = self.space.shapes[number]
        at = [int(self._rows[number])] * shape.pp
        if stages:
            at = rows[list(stages), self.space.meshes.micro_batches.index(shape.num_micro_batches)].tolist()
            assert min(at) >= 0, "a stage that the shape cannot have"
        return work[at], self._again[at]

    def tree(self, asked: npt.NDArray[np.bool_], free_ranks: int) -> Tree:
        """The bounds for the kernels, [slots] which decisions are asked, and `Prefixes`' free ranks."""
        return Tree(*self._arrays, np.ascontiguousarray(asked), np.array([free_ranks]), self._aside)


class Prefixes:
    """Plans being decided side by side. What is forced, or not asked, is filled in at once.

    Attributes:
        walks: see `automap.bounds.kernels.step_many.Walks`; values, legal values and their bounds are read here.
    """

    def __init__(
        self,
        table: BoundTable,
        count: int,
        *,
        most: int | None = None,
        free_ranks: int | None = None,
        asks: Callable[[Slot], bool] = lambda slot: True,
        preferred: Ints | None = None,
    ) -> None:
        """Begins `count` plans.

        Args:
            table: bounds of the space.
            count: of plans.
            most: only values below it are offered; None = all.
            free_ranks: on longer pipelines a rank, but for the last one, recomputes no more than the one before it;
                None = every rank is free.
            asks: which slots are decided; the others take their preferred value if it is legal, else keep operators
                whole, else take the first legal one.
            preferred: [slots] values of slots that are not asked; None = none.
        """
        space = table.space
        num_slots = len(space.slots)
        most = most or max(slot.num_values for slot in space.slots)
        self.space = space
        longest = num_slots if free_ranks is None else free_ranks
        self.tree = table.tree(np.array([asks(slot) for slot in space.slots]), longest)
        wanted = np.full(num_slots, -1, dtype=np.int64) if preferred is None else preferred
        self.walks = Walks(
            values=np.zeros((count, num_slots), dtype=np.int64),
            position=np.zeros(count, dtype=np.int64),
            node=np.zeros(count, dtype=np.int64),
            bound=np.zeros((count, 2)),
            legal=np.zeros((count, most), dtype=np.int64),
            offered=np.zeros(count, dtype=np.int64),
            ahead=np.zeros((count, most, 2)),
            preferred=np.tile(wanted, (count, 1)),
        )
        self.step(np.full(count, BEGIN, dtype=np.int64))

    @property
    def done(self) -> npt.NDArray[np.bool_]:
        """[plans] whether every slot is decided."""
        done: npt.NDArray[np.bool_] = self.walks.position == len(self.space.slots)
        return done

    def step(self, actions: Ints) -> None:
        """Takes one decision of every plan.

        Args:
            actions: [plans] index into `walks.legal`, or `BEGIN` or `GO_ON` of `automap.bounds.kernels.step_many`.
        """
        step_many(
            self.space.evaluator.tables.arrays, self.space.arrays, self.space.cache, self.tree, self.walks, actions
        )


class PartialPlan:
    """One plan being decided; `values` always ends before a real choice or at the end."""

    def __init__(self, space: PlanSpace, table: BoundTable) -> None:
        self.space = space
        self._one = Prefixes(table, 1)

    @property
    def done(self) -> bool:
        """Whether every slot is decided."""
        return bool(self._one.done[0])

    @property
    def position(self) -> int:
        """Number of the slot to decide."""
        return int(self._one.walks.position[0])

    @property
    def values(self) -> list[int]:
        """What is decided."""
        decided: list[int] = self._one.walks.values[0, : self.position].tolist()
        return decided

    @property
    def bound(self) -> Bound:
        """Of all completions; the price of a complete plan."""
        return Bound(*self._one.walks.bound[0].tolist())

    @property
    def shape(self) -> Shape | None:
        """The shape once it is decided."""
        return self.space.shape(self.values) if self.position >= self.space.first_cut else None

    def legal(self) -> Ints:
        """Legal values of the slot to decide."""
        legal: Ints = self._one.walks.legal[0, : self._one.walks.offered[0]]
        return legal

    def bounds(self) -> Floats:
        """[values, 2] seconds and overflow behind each legal value, in the order of `legal()`."""
        bounds: Floats = self._one.walks.ahead[0, : self._one.walks.offered[0]]
        return bounds

    def decide(self, value: int) -> None:
        """Decides the current slot and fills in what is forced behind it.

        Args:
            value: one of `legal()`.
        """
        at = int(np.searchsorted(self.legal(), value))
        assert self.legal()[at] == value, (self.space.slots[self.position], value)
        self._one.step(np.array([at]))


def walk(space: PlanSpace, table: BoundTable, values: Values) -> PartialPlan:
    """The prefix that has decided `values` (and what is forced behind them)."""
    prefix = PartialPlan(space, table)
    while prefix.position < len(values):
        prefix.decide(values[prefix.position])
    return prefix

"""Lower bounds on the costs of the stages of a family of plans: units on one stage, exchanges, and memory.

`automap.cost_graph.family_bounds` combines them into bounds of whole plans. Units: seconds, bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np

from automap.arrays import Floats, Ints
from automap.cost_graph.families import Family
from automap.cost_graph.kernels.values_on_mesh import values_on_mesh
from automap.cost_graph.open_costs import OpenCosts
from automap.cost_graph.paths import Path, exchanged_s, least_in_flight, path_trips, sends_on
from automap.cost_graph.relaxation import BOUNDARY_BYTES, SAVED_BYTES, Relaxation
from automap.cost_graph.relaxed_costs import OfTypes, State, Undecided
from automap.cost_graph.unlike_stages import RankBounds
from automap.price.kernels.memory import makes_gradients
from automap.price.kernels.stage_records import Stage
from automap.price.lowered_plan import spread
from automap.space.kernels.draft import new_draft
from automap.space.shape import Shape
from automap.space.space import PlanSpace


class Level(enum.Enum):
    """How sharply the costs on a stage are bounded, from the quickest bound to the sharpest one."""

    UNDECIDED = enum.auto()
    """Every signature is undecided."""
    ALONE = enum.auto()
    """Groups have signatures, and conversions between groups cost nothing."""
    TOGETHER = enum.auto()
    """Groups have signatures, and conversions between them count."""


MOST_COSTS = {Level.UNDECIDED: 8192, Level.ALONE: 1024, Level.TOGETHER: 256}
"""Largest number of stages whose costs are cached for each level (assumed)."""


class StageBounds:
    """Lower bounds on the costs of the stages of a space. They are cached, since families share stages."""

    def __init__(self, space: PlanSpace) -> None:
        self.space = space
        self._costs: dict[Level, dict[tuple[object, ...], OpenCosts]] = {level: {} for level in Level}
        self._of_types: dict[tuple[object, ...], OfTypes] = {}
        self._undecided: dict[tuple[object, ...], Undecided] = {}
        self._draft = new_draft(space.compiled)

    # -- units on one stage ---------------------------------------------------------------------------------------

    def _rank_bounds(
        self, stage: Stage, room: float, family: Family, trips: Sequence[Path], level: Level
    ) -> RankBounds:
        """Bounds of a rank with a stage: for all micro-batches, and on some paths through all ranks."""
        shape, costs = family.shapes[0], self._costs_on(stage, level)
        opened = max(each.num_chunks for each in family.shapes) - 1
        count = float(shape.num_micro_batches)
        busy = Path(forward=count, backward=count, gradients=1.0)
        saved_bytes = (costs.times[:, None] * costs.modes[..., SAVED_BYTES]).T
        crossing = self._crossing(costs)
        if level is Level.UNDECIDED:
            undecided = self._undecided_on(stage, family)
            found_s = [undecided.on(path) for path in (busy, *trips)]
            return RankBounds.undecided(found_s, undecided.state_bytes, saved_bytes, room=room, crossing=crossing)
        plenty = room - max(*self._in_flight(family), shape.pp) * float(saved_bytes.max(axis=0).sum())
        found: list[OfTypes] = []
        for number, path in enumerate((busy, *trips)):
            # All paths share the same state, so its price is computed for the most important paths alone.
            enough = plenty if shape.virtual == 1 or number < 2 else np.inf
            state = self._state_of(family)
            key = (*_key(stage), level, opened, path, state, enough)
            if key not in self._of_types:
                relaxation = Relaxation(self.space, costs, path, state, num_opened=opened)
                self._of_types[key] = relaxation.of_types(enough, found[0].picked if found else None)
            found.append(self._of_types[key])
        return RankBounds.of(found, saved_bytes, room=room, crossing=crossing)

    def _undecided_on(self, stage: Stage, family: Family) -> Undecided:
        """Bounds of units on a stage with every signature undecided."""
        state = self._state_of(family)
        key = (*_key(stage), state)
        if key not in self._undecided:
            if len(self._undecided) >= MOST_COSTS[Level.UNDECIDED]:
                self._undecided.pop(next(iter(self._undecided)))
            path = Path(forward=0.0, backward=0.0, gradients=0.0)
            costs = self._costs_on(stage, Level.UNDECIDED)
            self._undecided[key] = Relaxation(self.space, costs, path, state, num_opened=0).undecided()
        return self._undecided[key]

    def _crossing(self, costs: OpenCosts) -> Floats:
        """[units - 1] least bytes that are sent from one stage to the next if the pipeline is cut after each unit."""
        found: Floats = costs.bases[self.space.arrays.units[:-1], BOUNDARY_BYTES]
        return found

    def _bound(self, ranks: int) -> Floats:
        """[ranks, types] see `Spreads.bound`."""
        ends = self._ends()
        found = np.zeros((ranks, ends.shape[1]))
        for rank, share in zip((0, -1), ends, strict=True):
            found[rank] += share
        return found

    def _ends(self) -> Floats:
        """[2, types] the first unit, and the last one, as a share of all units of its type; 0 for other types."""
        units = self.space.arrays.units
        shares: Floats = np.eye(int(units.max()) + 1)[units[[0, -1]]] / np.bincount(units)
        return shares

    # -- besides units --------------------------------------------------------------------------------------------

    def _besides_trips_s(
        self, family: Family, views: Sequence[Sequence[RankBounds]], rates: Sequence[float]
    ) -> list[float]:
        """[ranks] seconds of the path that ends on each rank, without its units."""
        shape, settings = family.shapes[0], self.space.evaluator.settings(0)
        exchanged, (before, _, behind) = (
            self._exchanged_on_s(family, views, rates),
            path_trips(shape, self.space.schedules),
        )
        passes_s = float(settings.step_s) + before.forward * shape.pp * float(settings.micro_batch_s)
        return [
            passes_s + sends_on(before) * sum(exchanged[:last]) + sends_on(behind) * sum(exchanged[last:])
            for last in range(shape.pp)
        ]

    def _besides_s(self, family: Family, views: Sequence[Sequence[RankBounds]], rates: Sequence[float]) -> list[float]:
        """[ranks] seconds of each rank besides its units: exchanges and host overhead."""
        settings, count = self.space.evaluator.settings(0), float(family.shapes[0].num_micro_batches)
        exchanged = self._exchanged_on_s(family, views, rates)
        return [float(settings.step_s) + count * (float(settings.micro_batch_s) + each) for each in exchanged]

    def _exchanged_on_s(
        self, family: Family, views: Sequence[Sequence[RankBounds]], rates: Sequence[float]
    ) -> list[float]:
        """[ranks] seconds of exchanges of a micro-batch, at least."""
        if len(views) == 1:
            return [0.0]
        crossing = [np.min([view.crossing for view in some], axis=0) for some in views]
        of_chunks = [
            exchanged_s(self._sent_s(least_crossing(crossing, each.virtual), rates), each.virtual)
            for each in family.shapes
        ]
        return [min(sum(some[rank :: len(views)]) for some in of_chunks) for rank in range(len(views))]

    # -- pipelines --------------------------------------------------------------------------------------------------

    def _in_flight(self, family: Family) -> list[int]:
        """[ranks] lower bound on the micro-batches in flight on each rank."""
        of_shapes = [least_in_flight(shape, self.space.schedules) for shape in family.shapes]
        return [min(each) for each in zip(*of_shapes, strict=True)]

    def _state_of(self, family: Family) -> State:
        """The `State` of the plans of a family."""
        makes = makes_gradients(family.shapes[0].num_micro_batches, self.space.evaluator.settings(0))
        return State(zeros=tuple(family.zeros), makes_gradients=bool(makes))

    def _room(self, row: int, shape: Shape) -> float:
        """Bytes of a device that state and saved activations may take."""
        settings = self.space.evaluator.settings(0)
        pipeline_bytes = float(settings.pipeline_bytes) if shape.pp > 1 else 0.0
        room = float(self.space.arrays.capacity[row]) - float(settings.reserved_bytes) - pipeline_bytes
        return room / (1.0 + float(settings.unused_share))

    def _rates(self, shape: Shape, order: int) -> list[float]:
        """[ranks] bytes a second from each rank to the next one, for stages of the usual sizes."""
        degrees, middles = self.space.meshes.degrees, self.space.meshes.middles
        at = (order, self.space.meshes.division(shape), degrees.index(shape.tp), middles.index(shape.middle))
        first = int(self.space.arrays.usual_layouts[at]["first"])
        found: list[float] = self.space.arrays.send_bytes_per_s[first : first + shape.pp].tolist()
        return found

    def _sent_s(self, crossing: Sequence[float], rates: Sequence[float]) -> list[float]:
        """[ranks] seconds of an exchange of this number of bytes with the next rank."""
        settings = self.space.evaluator.settings(0)
        shown = 1.0 - float(settings.send_overlap)
        return [float(settings.send_s) + shown * size / rate for size, rate in zip(crossing, rates, strict=True)]

    # -- stages and their costs -----------------------------------------------------------------------------------

    def _rows(self, shape: Shape) -> list[int]:
        """The distinct stages of a shape with the usual sizes, over all orders of the devices."""
        space = self.space
        orders = range(space.meshes.num_orders(shape.pp))
        return sorted({row for order in orders for row in space.usual_rows(shape, order)})

    def _stage(self, row: int, shape: Shape, samples: int = 0) -> Stage:
        arrays = self.space.arrays
        samples = samples or spread(shape.samples, int(arrays.axes[row, 0]))
        zero_axes = self.space.zero_axes(shape)
        return Stage(arrays.axes[row], arrays.links[row], arrays.hardware[row], zero_axes, float(samples))

    def _costs_on(self, stage: Stage, level: Level) -> OpenCosts:
        key, known = _key(stage), self._costs[level]
        if key not in known:
            if len(known) >= MOST_COSTS[level]:
                known.pop(next(iter(known)))
            values = () if level is Level.UNDECIDED else self._values(stage)
            known[key] = OpenCosts(self.space, stage, values, with_conversions=level is Level.TOGETHER)
        return known[key]

    def _values(self, stage: Stage) -> tuple[Ints, ...]:
        """For each group, [values, axes] the joint values that are legal on a stage."""
        space, found = self.space, []
        for group in range(len(space.group_rows)):
            num_values = int(space.arrays.groups[group]["num_values"])
            room = np.empty((num_values ** len(space.axes), len(space.axes)), dtype=np.int64)
            count = values_on_mesh(space.compiled, stage.axes, int(stage.samples), group, self._draft, room)
            found.append(room[:count].copy())
        return tuple(found)


def least_crossing(crossing: Sequence[Floats], virtual: int) -> list[float]:
    """[ranks] lower bound on the bytes that each rank sends to the next one.

    Each chunk has at least one unit. So the last unit of a chunk has at least as many units before it as there are
    chunks before, and at least as many units after it as there are chunks after.

    Args:
        crossing: [ranks][units - 1] bytes that cross after each unit if a chunk of the rank ends there.
        virtual: chunks of each rank.
    """
    ranks, found = len(crossing), []
    for rank, each in enumerate(crossing):
        last = ranks * (virtual - 1) + rank - (ranks if rank == ranks - 1 else 0)
        room = len(each) + 1 - ranks * virtual
        found.append(float(each[rank : room + last + 1].min(initial=np.inf)) if last >= rank and room >= 0 else 0.0)
    return found


def _key(stage: Stage) -> tuple[object, ...]:
    """The content of a stage as a hashable key."""
    parts = (stage.axes, stage.links, stage.hardware, stage.zero_axes)
    return (*(part.tobytes() for part in parts), stage.samples)

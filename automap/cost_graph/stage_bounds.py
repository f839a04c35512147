"""Lower bounds on the costs of the stages of a family of plans: units on one stage, exchanges, and memory.

`automap.cost_graph.family_bounds` combines them into bounds of whole plans. Units: seconds, bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from automap.arrays import Floats, Ints
from automap.cost_graph.families import Family
from automap.cost_graph.kernels.values_on_mesh import values_on_mesh
from automap.cost_graph.open_costs import OpenCosts
from automap.cost_graph.paths import PASSES, Path, exchanged_s, least_in_flight, path_trips, sends_on
from automap.cost_graph.relaxation import BOUNDARY_BYTES, SAVED_BYTES, Relaxation
from automap.cost_graph.relaxed_costs import OfTypes, State, Undecided
from automap.cost_graph.stage_layouts import Layouts
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


@dataclass(frozen=True, kw_only=True)
class Tie:
    """Parameters that the first unit shares with units of other ranks. The ranks exchange their gradients."""

    parameter_s: float
    """Seconds of the exchange for each parameter; 0: nothing is exchanged."""
    untied: float
    """Parameters of the first unit that it does not share."""
    types: Floats
    """[types] 1 for types with one unit whose rank takes part in the exchange, else 0."""


class StageBounds:
    """Lower bounds on the costs of the stages of a space. They are cached, since families share stages."""

    def __init__(self, space: PlanSpace) -> None:
        self.space = space
        self._costs: dict[Level, dict[tuple[object, ...], OpenCosts]] = {level: {} for level in Level}
        self._of_types: dict[tuple[object, ...], OfTypes] = {}
        self._undecided: dict[tuple[object, ...], Undecided] = {}
        self._ties: dict[tuple[Shape, bool], Tie] = {}
        self._tied_parameters: dict[tuple[object, ...], float] = {}
        self._draft = new_draft(space.compiled)
        self._layouts = Layouts(space)

    # -- units on one stage ---------------------------------------------------------------------------------------

    def _rank_bounds(self, stage: Stage, room: float, family: Family, level: Level, *, with_passes: bool) -> RankBounds:
        """Bounds of a rank with a stage: for all micro-batches, and if asked for, of the passes of one micro-batch."""
        found = self._without_ties(stage, room, family, level, PASSES if with_passes else ())
        tie = self._tie(family)
        if tie.parameter_s:
            found = found.with_gradients(tie.types * self._tied_s(stage, family, tie, level))
        return found

    def _without_ties(
        self, stage: Stage, room: float, family: Family, level: Level, passes: Sequence[Path]
    ) -> RankBounds:
        """The same without the exchange of gradients of parameters that several ranks hold."""
        shape, costs = family.shapes[0], self._costs_on(stage, level)
        opened = max(each.num_chunks for each in family.shapes) - 1
        count = float(shape.num_micro_batches)
        busy = Path(forward=count, backward=count, gradients=1.0)
        saved_bytes = (costs.times[:, None] * costs.modes[..., SAVED_BYTES]).T
        crossing = self._crossing(costs)
        if level is Level.UNDECIDED:
            undecided = self._undecided_on(stage, family)
            found_s = [undecided.on(path) for path in (busy, *passes)]
            return RankBounds.undecided(found_s, undecided.state_bytes, saved_bytes, room=room, crossing=crossing)
        plenty = room - max(*self._in_flight(family), shape.pp) * float(saved_bytes.max(axis=0).sum())
        found: list[OfTypes] = []
        for number, path in enumerate((busy, *passes)):
            # All passes share the same state, so its price is computed for the most important ones alone.
            enough = plenty if number < 2 else np.inf
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

    def _tied_s(self, stage: Stage, family: Family, tie: Tie, level: Level) -> float:
        """Least seconds of the exchange of tied parameters if the first unit is on a stage."""
        key = (*_key(stage), level, self._state_of(family))
        if key not in self._tied_parameters:
            nothing, costs = Path(forward=0.0, backward=0.0, gradients=0.0), self._costs_on(stage, level)
            of = Relaxation(self.space, costs, nothing, self._state_of(family), num_opened=0, parameter_s=1.0)
            first = int(self.space.arrays.units[0])
            self._tied_parameters[key] = float(of.of_types(np.inf).fast_s.min(axis=0)[first])
        return tie.parameter_s * max(0.0, self._tied_parameters[key] - tie.untied)

    def _tie(self, family: Family) -> Tie:
        """What the plans of a family exchange of the gradients of parameters that the first unit shares."""
        key = (family.shapes[0], family.is_unlike)
        if key not in self._ties:
            shape = family.shapes[0]
            if family.is_unlike:
                rates = list(self._layouts.of(shape).values())
            else:
                rates = [self._rates(shape, order) for order in range(self.space.meshes.num_orders(shape.pp))]
            self._ties[key] = self._tie_at(rates)
            if family.is_unlike:
                # The first rank may split the parameter further than the ranks of other readers could.
                first_only = np.arange(len(self._ties[key].types)) == self.space.arrays.units[0]
                self._ties[key] = replace(self._ties[key], types=self._ties[key].types * first_only)
        return self._ties[key]

    def _tie_at(self, rates: Sequence[Sequence[float]]) -> Tie:
        """The same for pipelines with these bytes a second from each rank to the next one, [pipelines][ranks]."""
        space, units = self.space, self.space.arrays.units.tolist()
        graph, types, ranks = space.problem.graph, np.zeros(len(space.linkage.types)), len(rates[0]) if rates else 0
        # Each chunk has a unit. So a reader is not on the first rank if fewer units than ranks are after it.
        readers: dict[int, set[str]] = {}
        for name, one, other in space.evaluator.tied.parameters:
            if one == 0 and ranks > len(units) - other and not graph.tensors[name].frozen:
                readers.setdefault(other, set()).add(name)
        names = set[str]().union(*readers.values())
        if not names or units.count(units[0]) > 1:
            return Tie(parameter_s=0.0, untied=0.0, types=types)
        first = space.linkage.blocks.units[0]
        read = {name for operator in graph.operators[first.start : first.stop] for name in operator.inputs}
        untied = sum(tensor.num_elements for tensor in graph.parameters if tensor.name in read - names)
        for unit in (0, *(other for other, some in readers.items() if some == names)):
            types[units[unit]] = float(units.count(units[unit]) == 1)
        # The gradient goes along the pipeline to the rank of the first reader, or past the last rank to the first one.
        least = ranks - len(units) + min(readers)
        rate = max(max(min(some[:least]), some[-1]) for some in rates)
        parameter_s = float(space.evaluator.settings(0).sent_gradient_bytes) / rate
        return Tie(parameter_s=parameter_s, untied=float(untied), types=types)

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

    def _has_paths(self, shape: Shape) -> bool:
        """Whether bounds of the passes of one micro-batch serve: whether paths through the passes are known."""
        return shape.virtual > 1 or bool(path_trips(shape, self.space.schedules))

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

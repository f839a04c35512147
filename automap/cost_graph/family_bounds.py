"""Bounds of families of plans: what no plan of some shapes goes below, from their relaxed cost graphs.

A *family* is all plans of the same degrees and micro-batches whose stages are alike in size or not, with or without
virtual stages, of some ZeRO stages and one way to share out samples. Where all stages are alike, one graph holds all
units (`automap.cost_graph.relaxation`). Where they differ, each type of units is bounded on each stage by itself, and a
linear program spreads the units over the stages (`automap.cost_graph.unlike_stages`). Units: seconds.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from automap.arrays import Ints
from automap.cost_graph.kernels.values_on_mesh import values_on_mesh
from automap.cost_graph.open_costs import OpenCosts
from automap.cost_graph.paths import SHARES, Path, exchanged_s, held, path_to_ranks, sends_on, ways
from automap.cost_graph.relaxation import BOUNDARY_BYTES, SAVED_BYTES, WORKSPACE_BYTES, OfTypes, Relaxation
from automap.cost_graph.unlike_stages import Standing, compositions, fastest_spread, quick_spreads
from automap.cost_graph.virtual_stages import Interleaving, fastest_interleaving
from automap.price.kernels.array_types import Rows
from automap.price.kernels.stage_records import Stage
from automap.price.lowered_plan import spread
from automap.space.kernels.draft import new_draft
from automap.space.shape import Shape
from automap.space.space import PlanSpace

MOST_COSTS = 256
"""Largest number of stages whose group costs are kept."""

StageClass = tuple[object, ...]
"""A class of stages of unlike pipelines: parts of the cluster, ranks of each axis, hardware of each kind of devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Plans that are bounded together."""

    shapes: tuple[Shape, ...]
    """Their shapes, which differ in the virtual stages alone: one without any, or several with some."""
    zeros: tuple[int, ...]
    """Their ZeRO stages: 0 alone, or some of 1 to 3."""
    way: int = 0
    """Their way to share out the samples of unlike devices; 0: evenly."""
    is_unlike: bool = False
    """Whether their stages are of unlike size."""


class FamilyBounds:
    """Bounds of the families of a space."""

    def __init__(self, space: PlanSpace) -> None:
        self.space = space
        self._costs: dict[tuple[object, ...], OpenCosts] = {}
        self._of_types: dict[tuple[object, ...], OfTypes] = {}
        self._all_layouts: dict[tuple[int, ...], dict[tuple[StageClass, ...], list[float]]] = {}
        self._rows_of: defaultdict[StageClass, set[int]] = defaultdict(set)
        self._draft = new_draft(space.compiled)

    @property
    def is_known(self) -> bool:
        """Whether the graphs hold: not where times of whole blocks were measured."""
        return len(self.space.evaluator.tables.arrays.blocks) == 0

    def families(self, shapes: Sequence[Shape]) -> list[Family]:
        """All plans of some shapes of the space, each in one family."""
        space = self.space
        num_ways = space.slots[space.first.shares].num_values
        together: dict[tuple[int, ...], list[Shape]] = {}
        for shape in shapes:
            key = (shape.pp, shape.tp, shape.middle, shape.num_micro_batches, min(shape.virtual, 2))
            together.setdefault(key, []).append(shape)
        found = []
        for some in together.values():
            first = some[0]
            legal = np.flatnonzero(space.zeros_of(first)).tolist() if first.replicas > 1 else [0]
            zeros: list[tuple[int, ...]] = [(0,)] if 0 in legal else []
            zeros += [tuple(zero for zero in legal if zero > 0)] if max(legal) > 0 else []
            for each in zeros:
                found += [Family(shapes=tuple(some), zeros=each, way=way) for way in range(num_ways)]
                if space.meshes.may_differ(first):
                    found.append(Family(shapes=tuple(some), zeros=each, is_unlike=True))
        return found

    def parts(self, family: Family) -> list[Family]:
        """The family in parts, which may be bounded more sharply; none where it has no parts."""
        if len(family.zeros) == 1:
            return []
        return [replace(family, zeros=(zero,)) for zero in family.zeros]

    def bound(self, family: Family, target_s: float) -> float:
        """Seconds that no plan of a family is faster than; it is not raised beyond `target_s`, but may be infinite."""
        if family.is_unlike:
            return self._of_sizes(family, target_s)
        if not family.way and len(self._rows(family.shapes[0])) == 1:
            return self._of_alike(family, target_s)
        return self._of_rows(family, target_s)

    # -- stages that are all alike --------------------------------------------------------------------------------

    def _of_alike(self, family: Family, target_s: float) -> float:
        space, shape = self.space, max(family.shapes, key=lambda each: each.num_chunks)
        (row,) = self._rows(shape)
        stage = self._stage(row, shape)
        costs, held, settings = self._costs_on(stage), self._held(family), space.evaluator.settings(0)
        room = shape.pp * self._room(row, shape) - 2.0 * float(costs.modes[..., WORKSPACE_BYTES].max())
        if room <= 0.0:
            return np.inf
        best = -np.inf
        for way in ways(shape, space.schedules):
            constant_s = float(settings.step_s) + way.passes * float(settings.micro_batch_s)
            constant_s += way.sends * self._exchanged_s(costs, family) if shape.pp > 1 else 0.0
            relaxation = Relaxation(
                space,
                costs,
                way.path,
                family.zeros,
                num_opened=shape.num_chunks - 1,
                room=room,
                held=min(held),
            )
            best = max(best, constant_s + relaxation.bound(target_s - constant_s))
            if best >= target_s:
                return best
        if shape.pp == 1:
            return best
        spread = self._of_chunks if shape.virtual > 1 else self._of_short
        return max(best, spread(family, row, best))

    def _of_short(self, family: Family, row: int, best: float) -> float:
        """Where memory may be short on some ranks, for the first ones keep more micro-batches than the last ones."""
        shape = family.shapes[0]
        stage, room, most = self._stage(row, shape), self._room(row, shape), max(self._held(family))
        if not self._standing_on(stage, room, family, ()).may_be_short(most, 1.0 / shape.pp):
            return best
        standing = self._standing_on(stage, room, family, self._trips(shape))
        orders = range(self.space.meshes.num_orders(shape.pp))
        return min(self._spread(family, [[standing]] * shape.pp, self._rates(shape, order)) for order in orders)

    def _of_chunks(self, family: Family, row: int, best: float) -> float:
        """Of virtual stages, one number of them after the other."""
        shape, settings = family.shapes[0], self.space.evaluator.settings(0)
        # What gradients may hide under is not only on the path that they end.
        ends = 1.0 if float(settings.gradient_overlap) <= 0.0 else 0.0
        once = [Path(forward=1.0, backward=1.0, gradients=gradients) for gradients in (0.0, ends)]
        stage = self._stage(row, shape)
        standing = self._standing_on(stage, self._room(row, shape), family, once)
        found = np.inf
        for each in sorted(family.shapes, key=lambda each: -each.virtual):
            for order in range(self.space.meshes.num_orders(shape.pp)):
                sent_s = self._sent_s([standing.crossing] * shape.pp, self._rates(shape, order))
                besides_s = np.array(exchanged_s(sent_s, each.virtual))
                of = Interleaving(
                    standing=standing,
                    times=self._costs_on(stage).times,
                    ranks=each.pp,
                    virtual=each.virtual,
                    num_micro_batches=each.num_micro_batches,
                    held=held(each, self.space.schedules),
                    besides_s=besides_s + float(settings.micro_batch_s) / each.virtual,
                    step_s=float(settings.step_s),
                )
                found = min(found, fastest_interleaving(of))
                if found <= best:
                    return best
        return found

    def _exchanged_s(self, costs: OpenCosts, family: Family) -> float:
        """Seconds of exchanges of a micro-batch on all ranks together, at least."""
        crossing, shape = self._least_crossing(costs), family.shapes[0]
        orders = range(self.space.meshes.num_orders(shape.pp))
        sent = [self._sent_s([crossing] * shape.pp, self._rates(shape, order)) for order in orders]
        return min(sum(exchanged_s(some, each.virtual)) for some in sent for each in family.shapes)

    def _least_crossing(self, costs: OpenCosts) -> float:
        """Bytes that cross at least from one stage to the next."""
        return float(costs.bases[self.space.arrays.boundary >= 0, BOUNDARY_BYTES].min())

    # -- stages that differ ---------------------------------------------------------------------------------------

    def _of_rows(self, family: Family, target_s: float) -> float:
        """Of stages of equal size and unlike devices, in any order."""
        space, shape = self.space, family.shapes[0]
        found = []
        for order in range(space.meshes.num_orders(shape.pp)):
            quick = -np.inf
            for trips in ((), self._trips(shape)):
                views: list[list[Standing]] = [[] for _ in range(shape.pp)]
                for rank, row in enumerate(space.even_rows(shape, order)):
                    for seen, samples in self._seen(row, shape, family.way):
                        stage = self._stage(seen, shape, samples)
                        views[rank].append(self._standing_on(stage, self._room(seen, shape), family, trips))
                quick = max(quick, self._spread(family, views, self._rates(shape, order)))
                if quick >= target_s:
                    break
            found.append(quick)
        return min(found)

    def _seen(self, row: int, shape: Shape, way: int) -> list[tuple[int, int]]:
        """Rows of a stage as its kinds of devices see it, and the samples with which each is priced."""
        arrays = self.space.arrays
        number = int(arrays.mixed[row])
        count = self.space.meshes.micro_batches.index(shape.num_micro_batches)
        outer = int(arrays.axes[row, 0])
        if not way or number < 0 or not arrays.share_ways[number, count, way]:
            return [(row, spread(shape.samples, outer))]
        quantum = int(arrays.quanta[number])
        found = []
        for kind, seen in enumerate(arrays.kind_rows[number].tolist()):
            total = int(arrays.kind_samples[number, count, way, kind])
            each = int(arrays.kind_ranks[number, kind]) * quantum
            found.append((seen, -(-total // each) * quantum * outer))
        return found

    def _of_sizes(self, family: Family, target_s: float) -> float:
        """Of stages of unlike size."""
        shape = family.shapes[0]
        layouts = self._layouts(shape)
        classes = sorted({stage for some in layouts for stage in some})
        if not layouts:
            return np.inf
        quick = {stage: self._least_standing(stage, family, ()) for stage in classes}
        ranks = [[[quick[stage]] for stage in some] for some in layouts]
        besides = [self._besides_s(family, views, rates) for views, rates in zip(ranks, layouts.values(), strict=True)]
        busy = np.array([[views[0].busy_s.min(axis=0) for views in some] for some in ranks])
        found = quick_spreads(busy, np.array(besides))
        for trips in ((), self._trips(shape)):
            best = target_s
            for number in np.argsort(found, kind="stable").tolist():
                if found[number] >= best:
                    break
                some = list(layouts)[number]
                views = [[self._least_standing(stage, family, trips)] for stage in some]
                found[number] = max(found[number], self._spread(family, views, layouts[some]))
                best = min(best, found[number])
        return float(found.min())

    def _layouts(self, shape: Shape) -> dict[tuple[StageClass, ...], list[float]]:
        """All ways to divide the devices into stages of unlike size, and the bytes a second between them at most."""
        space, arrays, pp = self.space, self.space.arrays, shape.pp
        tp, middle = space.meshes.degrees.index(shape.tp), space.meshes.middles.index(shape.middle)
        count = space.meshes.micro_batches.index(shape.num_micro_batches)
        fills = np.flatnonzero(arrays.fills[tp, middle, count, 1]).tolist()
        key = (pp, shape.tp, shape.middle, *fills)
        if key in self._all_layouts:
            return self._all_layouts[key]
        found: dict[tuple[StageClass, ...], list[float]] = {}
        for order in range(len(space.meshes.orders)):
            for sizes in compositions(space.meshes.devices // space.meshes.part, pp, fills):
                ends = list(itertools.accumulate(sizes))
                rows = [int(arrays.stage_rows[order, tp, middle, e - s, s]) for e, s in zip(ends, sizes, strict=True)]
                if len(set(sizes)) == 1 or min(rows) < 0:
                    continue
                at = zip(ends[:-1], sizes[:-1], sizes[1:], strict=True)
                rates = [float(arrays.send_bytes_per_s[arrays.send_rows[order, e, s, n]]) for e, s, n in at]
                some = tuple(self._class(parts, row) for parts, row in zip(sizes, rows, strict=True))
                known = found.setdefault(some, [*rates, np.inf])
                found[some] = [max(pair) for pair in zip(known, [*rates, np.inf], strict=True)]
        self._all_layouts[key] = found
        return found

    def _class(self, parts: int, row: int) -> StageClass:
        """The class of a stage, to which it is added."""
        arrays = self.space.arrays
        number = int(arrays.mixed[row])
        kinds = [row] if number < 0 else [row, *arrays.kind_rows[number].tolist()]
        found = parts, *arrays.axes[row].tolist(), *(arrays.hardware[kind].tobytes() for kind in kinds)
        self._rows_of[found].add(row)
        return found

    def _least_standing(self, of: StageClass, family: Family, trips: Sequence[Path]) -> Standing:
        """The least that units take on all stages of a class: each kind of devices there with the best links."""
        shape, arrays = family.shapes[0], self.space.arrays
        views: dict[int, list[tuple[int, int]]] = {}
        for row in self._rows_of[of]:
            for number, seen in enumerate(self._fastest(row, shape)):
                views.setdefault(number, []).append(seen)
        found = []
        for some in views.values():
            rows = sorted({row for row, _ in some})
            stage = self._stage(rows[0], shape, min(samples for _, samples in some))
            stage = stage._replace(links=best_links(arrays.links[rows]))
            found.append(self._standing_on(stage, max(self._room(row, shape) for row in rows), family, trips))
        return Standing.least(found)

    def _fastest(self, row: int, shape: Shape) -> list[tuple[int, int]]:
        """The fastest kind of devices of a stage and the fewest samples with which it may be priced."""
        arrays = self.space.arrays
        number, outer = int(arrays.mixed[row]), int(arrays.axes[row, 0])
        seen = [(row, spread(shape.samples, outer))]
        if number < 0:
            return seen
        last = arrays.kind_rows.shape[1] - 1
        ways = range(1, self.space.slots[self.space.first.shares].num_values)
        shared = [self._seen(row, shape, way) for way in ways]
        fastest = [some[last] for some in shared if len(some) > last]
        return [min(fastest, key=lambda one: one[1]), *seen] if fastest else seen

    def _trips(self, shape: Shape) -> list[Path]:
        """The paths through all ranks that are told apart."""
        return [path_to_ranks(shape, self.space.schedules, share) for share in SHARES]

    def _standing_on(self, stage: Stage, room: float, family: Family, trips: Sequence[Path]) -> Standing:
        """What units take on a rank with a stage, alone and on some paths through all ranks."""
        shape, costs = family.shapes[0], self._costs_on(stage)
        opened = max(each.num_chunks for each in family.shapes) - 1
        count = float(shape.num_micro_batches)
        busy = Path(forward=count, backward=count, gradients=1.0)
        found = []
        for path in (busy, *trips):
            key = (*_key(stage), opened, path, family.zeros)
            if key not in self._of_types:
                self._of_types[key] = Relaxation(self.space, costs, path, family.zeros, num_opened=opened).of_types()
            found.append(self._of_types[key])
        saved_bytes = (costs.times[:, None] * costs.modes[..., SAVED_BYTES]).T
        return Standing.of(found, saved_bytes, room=room, crossing=self._least_crossing(costs))

    def _spread(self, family: Family, views: Sequence[Sequence[Standing]], rates: Sequence[float]) -> float:
        """Seconds of the best spread of units over ranks, each seen in some ways.

        Args:
            rates: [ranks] bytes a second from each rank to the next one, from the last one to the first.
        """
        shape, settings = family.shapes[0], self.space.evaluator.settings(0)
        exchanged = sum(self._exchanged_on_s(family, views, rates))
        paths = self._trips(shape)[: len(views[0][0].trip_s)]
        trip_s = [
            float(settings.step_s)
            + path.forward * shape.pp * float(settings.micro_batch_s)
            + sends_on(path) * exchanged
            for path in paths
        ]
        return fastest_spread(views, self._besides_s(family, views, rates), trip_s, self._held(family))

    def _besides_s(self, family: Family, views: Sequence[Sequence[Standing]], rates: Sequence[float]) -> list[float]:
        """[ranks] seconds that each rank takes besides its units."""
        settings, count = self.space.evaluator.settings(0), float(family.shapes[0].num_micro_batches)
        exchanged = self._exchanged_on_s(family, views, rates)
        return [float(settings.step_s) + count * (float(settings.micro_batch_s) + each) for each in exchanged]

    def _exchanged_on_s(
        self, family: Family, views: Sequence[Sequence[Standing]], rates: Sequence[float]
    ) -> list[float]:
        """[ranks] seconds of exchanges of a micro-batch, at least."""
        sent_s = self._sent_s([min(view.crossing for view in some) for some in views], rates)
        if len(views) == 1:
            return [0.0]
        of_chunks = [exchanged_s(sent_s, each.virtual) for each in family.shapes]
        return [min(sum(some[rank :: len(views)]) for some in of_chunks) for rank in range(len(views))]

    # -- pipelines --------------------------------------------------------------------------------------------------

    def _held(self, family: Family) -> list[int]:
        """[ranks] micro-batches for which a rank keeps what its units save, at least."""
        of_shapes = [held(shape, self.space.schedules) for shape in family.shapes]
        return [min(each) for each in zip(*of_shapes, strict=True)]

    def _room(self, row: int, shape: Shape) -> float:
        """Bytes of a device that state and saved activations may take."""
        settings = self.space.evaluator.settings(0)
        pipeline_bytes = float(settings.pipeline_bytes) if shape.pp > 1 else 0.0
        return float(self.space.arrays.capacity[row]) - float(settings.reserved_bytes) - pipeline_bytes

    def _rates(self, shape: Shape, order: int) -> list[float]:
        """[ranks] bytes a second from each rank to the next one, of stages of equal size."""
        degrees, middles = self.space.meshes.degrees, self.space.meshes.middles
        at = (order, degrees.index(shape.pp), degrees.index(shape.tp), middles.index(shape.middle))
        first = int(self.space.arrays.even_layouts[at]["first"])
        found: list[float] = self.space.arrays.send_bytes_per_s[first : first + shape.pp].tolist()
        return found

    def _sent_s(self, crossing: Sequence[float], rates: Sequence[float]) -> list[float]:
        """[ranks] seconds of an exchange of so many bytes with the next rank."""
        settings = self.space.evaluator.settings(0)
        shown = 1.0 - float(settings.send_overlap)
        return [float(settings.send_s) + shown * size / rate for size, rate in zip(crossing, rates, strict=True)]

    # -- stages and their costs -----------------------------------------------------------------------------------

    def _rows(self, shape: Shape) -> list[int]:
        """The distinct stages of equal size of a shape, in any order of the devices."""
        space = self.space
        orders = range(space.meshes.num_orders(shape.pp))
        return sorted({row for order in orders for row in space.even_rows(shape, order)})

    def _stage(self, row: int, shape: Shape, samples: int = 0) -> Stage:
        arrays = self.space.arrays
        samples = samples or spread(shape.samples, int(arrays.axes[row, 0]))
        zero_axes = self.space.zero_axes(shape)
        return Stage(arrays.axes[row], arrays.links[row], arrays.hardware[row], zero_axes, float(samples))

    def _costs_on(self, stage: Stage) -> OpenCosts:
        key = _key(stage)
        if key not in self._costs:
            if len(self._costs) >= MOST_COSTS:
                self._costs.pop(next(iter(self._costs)))
            self._costs[key] = OpenCosts(self.space, stage, self._values(stage))
        return self._costs[key]

    def _values(self, stage: Stage) -> tuple[Ints, ...]:
        """For each group, [values, axes] its values that are legal on a stage."""
        space, found = self.space, []
        for group in range(len(space.group_rows)):
            num_values = int(space.arrays.groups[group]["num_values"])
            room = np.empty((num_values ** len(space.axes), len(space.axes)), dtype=np.int64)
            count = values_on_mesh(space.compiled, stage.axes, int(stage.samples), group, self._draft, room)
            found.append(room[:count].copy())
        return tuple(found)


def _key(stage: Stage) -> tuple[object, ...]:
    """All that a stage consists of."""
    parts = (stage.axes, stage.links, stage.hardware, stage.zero_axes)
    return (*(part.tobytes() for part in parts), stage.samples)


def best_links(links: Rows) -> Rows:
    """[axes] links of which each number is the best of some links, [links, axes]."""
    found: Rows = links[0].copy()
    for name in ("latency_s", "ramp", "host_time"):
        found[name] = links[name].min(axis=0)
    for name in ("bytes_per_s", "gather_bytes_per_s"):
        found[name] = links[name].max(axis=0)
    return found

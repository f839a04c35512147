"""Bounds of families of plans: what no plan of some shapes goes below, from their relaxed cost graphs.

A *family* is all plans of the same degrees and micro-batches whose stages are alike in size or not, with or without
virtual stages, of some ZeRO stages and one way to share out samples. Where all stages are alike, one graph holds all
units (`automap.cost_graph.relaxation`). Where they differ, each type of units is bounded on each stage by itself, and a
linear program spreads the units over the stages (`automap.cost_graph.unlike_stages`). Units: seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from automap.arrays import Floats, Ints
from automap.cost_graph.kernels.values_on_mesh import values_on_mesh
from automap.cost_graph.open_costs import OpenCosts
from automap.cost_graph.paths import SHARES, Path, Ways, path_to_ranks, ways
from automap.cost_graph.relaxation import BOUNDARY_BYTES, Relaxation
from automap.cost_graph.unlike_stages import Standing, fastest_spread, partitions, quick_spread
from automap.price.kernels.array_types import Rows
from automap.price.kernels.stage_records import Stage
from automap.price.lowered_plan import spread
from automap.space.kernels.draft import new_draft
from automap.space.shape import Shape
from automap.space.space import PlanSpace

MOST_COSTS = 256
"""Largest number of stages whose group costs are kept."""


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
        self._of_types: dict[tuple[object, ...], Floats] = {}
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
            zeros = [(0,)] if 0 in legal else []
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
        """Seconds that no plan of a family is faster than; it is not raised beyond `target_s`."""
        if family.is_unlike:
            quick = self._of_sizes(family, target_s, with_paths=False)
            return quick if quick >= target_s else self._of_sizes(family, target_s, with_paths=True)
        if not family.way and len(self._rows(family.shapes[0])) == 1:
            return self._of_alike(family, target_s)
        quick = self._of_rows(family, target_s, with_paths=False)
        return quick if quick >= target_s else self._of_rows(family, target_s, with_paths=True)

    # -- stages that are all alike --------------------------------------------------------------------------------

    def _of_alike(self, family: Family, target_s: float) -> float:
        space, shape = self.space, max(family.shapes, key=lambda each: each.num_chunks)
        (row,) = self._rows(shape)
        costs = self._costs_on(self._stage(row, shape))
        settings = space.evaluator.settings(0)
        room = shape.pp * (float(space.arrays.capacity[row]) - float(settings.reserved_bytes))
        best = -np.inf
        for way in ways(shape, space.schedules):
            constant_s = float(settings.step_s) + way.passes * float(settings.micro_batch_s)
            constant_s += min(self._sent_s(costs, way, each) for each in family.shapes) if shape.pp > 1 else 0.0
            relaxation = Relaxation(space, costs, way.path, family.zeros, num_opened=shape.num_chunks - 1, room=room)
            best = max(best, constant_s + relaxation.bound(target_s - constant_s))
            if best >= target_s:
                break
        return best

    def _sent_s(self, costs: OpenCosts, way: Ways, shape: Shape) -> float:
        """Seconds of exchanges between stages that are alike, at least."""
        settings = self.space.evaluator.settings(0)
        degrees, middles = self.space.meshes.degrees, self.space.meshes.middles
        found = []
        for order in range(self.space.meshes.num_orders(shape.pp)):
            at = (order, degrees.index(shape.pp), degrees.index(shape.tp), middles.index(shape.middle))
            first = int(self.space.arrays.even_layouts[at]["first"])
            rates = np.tile(self.space.arrays.send_bytes_per_s[first : first + shape.pp], shape.virtual)
            shown = (1.0 - float(settings.send_overlap)) * self._least_crossing(costs)
            found.append(float((float(settings.send_s) + shown / rates[: shape.num_chunks - 1]).sum()))
        return way.sends * min(found)

    def _least_crossing(self, costs: OpenCosts) -> float:
        """Bytes that cross at least from one stage to the next."""
        return float(costs.bases[self.space.arrays.boundary >= 0, BOUNDARY_BYTES].min())

    # -- stages that differ ---------------------------------------------------------------------------------------

    def _of_rows(self, family: Family, target_s: float, *, with_paths: bool) -> float:
        """Of stages of equal size and unlike devices, in any order."""
        space, shape = self.space, family.shapes[0]
        found = []
        for order in range(space.meshes.num_orders(shape.pp)):
            views: list[list[Standing]] = [[] for _ in range(shape.pp)]
            for rank, row in enumerate(space.even_rows(shape, order)):
                for seen, samples in self._seen(row, shape, family.way):
                    views[rank].append(self._standing_on(self._stage(seen, shape, samples), family, with_paths))
            found.append(self._spread(family, views, target_s))
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

    def _of_sizes(self, family: Family, target_s: float, *, with_paths: bool) -> float:
        """Of stages of unlike size."""
        space, shape = self.space, family.shapes[0]
        meshes, arrays = space.meshes, space.arrays
        tp, middle = meshes.degrees.index(shape.tp), meshes.middles.index(shape.middle)
        count = meshes.micro_batches.index(shape.num_micro_batches)
        fills = arrays.fills[tp, middle, count, 1]
        sizes = {}
        for parts in np.flatnonzero(fills).tolist():
            rows = sorted({int(row) for row in arrays.stage_rows[:, tp, middle, :, parts].reshape(-1) if row >= 0})
            if not rows:
                continue
            # Each kind of devices that may be the slowest of such a stage, with the best links of all its places.
            kinds: dict[bytes, list[int]] = {}
            for row in rows:
                for seen, _ in self._fastest(row, shape):
                    kinds.setdefault(arrays.hardware[seen].tobytes(), []).append(seen)
            views = []
            for some in kinds.values():
                samples = min(self._fastest(row, shape)[0][1] for row in rows)
                stage = self._stage(some[0], shape, samples)._replace(links=best_links(arrays.links[some]))
                views.append(self._standing_on(stage, family, with_paths))
            sizes[parts] = Standing.least(views)
        found = [
            self._spread(family, [[sizes[parts]] for parts in some], target_s)
            for some in partitions(meshes.devices // meshes.part, shape.pp, tuple(sizes))
            if len(set(some)) > 1
        ]
        return min(found, default=np.inf)

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

    def _standing_on(self, stage: Stage, family: Family, with_paths: bool) -> Standing:
        """What units take on a rank with a stage, alone or also on paths through all ranks."""
        shape, costs = family.shapes[0], self._costs_on(stage)
        opened = max(each.num_chunks for each in family.shapes) - 1
        count = float(shape.num_micro_batches)
        busy = Path(forward=count, backward=count, gradients=1.0)
        paths = [path_to_ranks(shape, self.space.schedules, share) for share in SHARES] if with_paths else []
        of_paths = []
        for path in (busy, *paths):
            key = (*_key(stage), opened, path, family.zeros)
            if key not in self._of_types:
                relaxation = Relaxation(self.space, costs, path, family.zeros, num_opened=opened)
                self._of_types[key] = relaxation.of_types()
            of_paths.append(self._of_types[key])
        return Standing(
            busy_s=of_paths[0],
            trip_s=np.array(of_paths[1:]).reshape(len(paths), len(of_paths[0])),
            crossing=self._least_crossing(costs),
        )

    def _spread(self, family: Family, views: Sequence[Sequence[Standing]], target_s: float) -> float:
        """Seconds of the best spread of units over ranks, each seen in some ways; not raised beyond a target."""
        shape, settings = family.shapes[0], self.space.evaluator.settings(0)
        count, step_s = float(shape.num_micro_batches), float(settings.step_s)
        crossing = min(view.crossing for some in views for view in some)
        rate = float(self.space.arrays.send_bytes_per_s.max())
        shown = (1.0 - float(settings.send_overlap)) * crossing / rate
        # A rank of a pipeline has one neighbour at least, and between those in the middle each boundary counts twice.
        sent_s = float(settings.send_s) + shown if shape.pp > 1 else 0.0
        busy_s = step_s + count * (float(settings.micro_batch_s) + sent_s)
        quick = quick_spread(views, busy_s)
        if quick >= target_s:
            return quick
        trip_s = []
        for path in [path_to_ranks(shape, self.space.schedules, share) for share in SHARES][: len(views[0][0].trip_s)]:
            sends = 2.0 * min(path.forward, path.backward) * (shape.pp - 1) * sent_s
            trip_s.append(step_s + path.forward * shape.pp * float(settings.micro_batch_s) + sends)
        return fastest_spread(views, busy_s, trip_s)

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
    found = links[0].copy()
    for name in ("latency_s", "ramp", "host_time"):
        found[name] = links[name].min(axis=0)
    for name in ("bytes_per_s", "gather_bytes_per_s"):
        found[name] = links[name].max(axis=0)
    return found

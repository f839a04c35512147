"""Lower bounds for stages that have devices of several kinds, for `automap.cost_graph.family_bounds`.

Such a stage has one bound for each kind of device: the time that it would take if all of its devices were of this kind,
with the samples that devices of this kind get. Each of these is a lower bound of the stage. Units: seconds.
"""

from __future__ import annotations

import itertools

import numpy as np

from automap.cost_graph.families import Family
from automap.cost_graph.stage_bounds import Level, StageBounds
from automap.cost_graph.stage_layouts import StageClass, best_links
from automap.cost_graph.unlike_stages import RankBounds
from automap.price.lowered_plan import spread
from automap.space.shape import Shape
from automap.space.space import PlanSpace

STEPS = (
    (Level.UNDECIDED, Level.UNDECIDED),
    (Level.ALONE, Level.UNDECIDED),
    (Level.TOGETHER, Level.UNDECIDED),
    (Level.TOGETHER, Level.TOGETHER),
)
"""The levels of each step in which layouts are bounded: that for stages of one kind of devices, and that for stages of
several kinds. There are many stages of several kinds, so their sharper levels come last."""


class MixedStages(StageBounds):
    """Bounds of the stages of a space, for each of their kinds of devices."""

    def __init__(self, space: PlanSpace) -> None:
        super().__init__(space)
        self._ways: dict[tuple[StageClass, int], dict[tuple[int, ...], list[list[int]]]] = {}

    def _row_views(self, row: int, family: Family, level: Level, *, with_passes: bool) -> list[RankBounds]:
        """Bounds of a stage of the usual size, for each of its kinds of devices."""
        shape, found = family.shapes[0], []
        for seen, samples in self._seen(row, shape, family.way):
            stage = self._stage(seen, shape, samples)
            found.append(self._rank_bounds(stage, self._room(seen, shape), family, level, with_passes=with_passes))
        return found

    def _seen(self, row: int, shape: Shape, way: int) -> list[tuple[int, int]]:
        """For each kind of devices: number of the stage as if it had this kind alone, and samples of its micro-batch.

        Args:
            row: number of the stage.
            shape: shape of the plans.
            way: number of the way to share out samples.
        """
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
        # Where a stage has fewer kinds than others, its last one is repeated.
        return list(dict.fromkeys(found))

    def _shared(self, of: StageClass, family: Family) -> dict[tuple[int, ...], list[list[int]]]:
        """The samples of each kind of devices on the stages of a class under each way to share them out.

        Returns:
            Samples of each kind -> for each kind, the stages as if they had this kind alone. A class with one kind of
            devices has one entry, with the stages as they are.
        """
        shape = family.shapes[0]
        key = (of, shape.num_micro_batches)
        if key not in self._ways:
            is_mixed = any(self.space.arrays.mixed[row] >= 0 for row in self._layouts.rows[of])
            ways = range(self.space.slots[self.space.first.shares].num_values if is_mixed else 1)
            found: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
            for row, way in itertools.product(sorted(self._layouts.rows[of]), ways):
                rows, samples = zip(*self._seen(row, shape, way), strict=True)
                found.setdefault(samples, set()).add(rows)
            self._ways[key] = {
                samples: [list(rows) for rows in zip(*some, strict=True)] for samples, some in sorted(found.items())
            }
        return self._ways[key]

    def _each_way(self, of: StageClass, family: Family) -> list[tuple[StageClass, tuple[int, ...]]]:
        """The class with the samples of each kind of devices under each way to share them out."""
        return [(of, samples) for samples in self._shared(of, family)]

    def _is_mixed(self, of: StageClass, family: Family) -> bool:
        """Whether samples may be shared out in several ways on the stages of a class."""
        return len(self._shared(of, family)) > 1

    def _views(
        self,
        of: StageClass,
        samples: tuple[int, ...],
        family: Family,
        levels: tuple[Level, Level],
    ) -> list[RankBounds]:
        """Bounds of all stages of a class, for each kind of devices, with the best links of the class.

        Args:
            of: the class.
            samples: samples of each kind; empty: the bound holds for any way to share them out.
            family: the plans.
            levels: levels of costs for stages of one kind of devices, and for stages of several kinds.
        """
        shape, arrays, shared = family.shapes[0], self.space.arrays, self._shared(of, family)
        if not samples and len(shared) > 1:
            return [self._any_way(of, family)]
        samples = samples or next(iter(shared))
        found = []
        for rows, count in zip(shared[samples], samples, strict=True):
            stage = self._stage(rows[0], shape, count)._replace(links=best_links(arrays.links[rows]))
            room = max(self._room(row, shape) for row in rows)
            found.append(
                self._rank_bounds(stage, room, family, levels[len(shared) > 1], with_passes=self._has_paths(shape))
            )
        return found

    def _any_way(self, of: StageClass, family: Family) -> RankBounds:
        """Bounds of all stages of a class for any way to share out samples: the least over the ways.

        For each way, the bounds of the kinds are averaged with weights in proportion to their speed. These means differ
        little between the ways: if one kind has fewer samples, the others have more.
        """
        shared, arrays = self._shared(of, family), self.space.arrays
        found = [self._views(of, samples, family, STEPS[0]) for samples in shared]
        (number,) = {tuple(arrays.kind_ranks[arrays.mixed[row]].tolist()) for row in self._layouts.rows[of]}
        rates = [
            np.array(samples) / [float(view.busy_s.min(axis=0).sum()) for view in some]
            for samples, some in zip(shared, found, strict=True)
            if len(some) > 1
        ]
        weights = np.mean(rates, axis=0) * number[: len(rates[0])]
        return RankBounds.minimum([RankBounds.mixed(some, weights if len(some) > 1 else None) for some in found])

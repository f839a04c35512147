"""Stages of several kinds of devices, as each kind sees them: what bounds of families know of them.

Every kind is priced as if all devices of a stage were of it, with the samples that it is given. See
`automap.cost_graph.family_bounds`. Units: seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from automap.cost_graph.families import Family
from automap.cost_graph.paths import Path
from automap.cost_graph.stage_bounds import Level, StageBounds
from automap.cost_graph.stage_layouts import Layouts, StageClass, best_links
from automap.cost_graph.unlike_stages import Standing
from automap.price.lowered_plan import spread
from automap.space.shape import Shape
from automap.space.space import PlanSpace

STEPS = (
    (Level.UNDECIDED, Level.UNDECIDED),
    (Level.ALONE, Level.UNDECIDED),
    (Level.TOGETHER, Level.UNDECIDED),
    (Level.TOGETHER, Level.TOGETHER),
)
"""Levels of stages of one kind of devices and of several kinds, in the order in which layouts are bounded: the latter
are many."""


class MixedStages(StageBounds):
    """What units take on the stages of a space, seen by each kind of their devices."""

    def __init__(self, space: PlanSpace) -> None:
        super().__init__(space)
        self._ways: dict[tuple[StageClass, int], dict[tuple[int, ...], list[list[int]]]] = {}
        self._layouts = Layouts(space)

    def _row_views(self, row: int, family: Family, trips: Sequence[Path], level: Level) -> list[Standing]:
        """What units take on a stage of equal size as each kind of its devices sees it."""
        shape, found = family.shapes[0], []
        for seen, samples in self._seen(row, shape, family.way):
            stage = self._stage(seen, shape, samples)
            found.append(self._standing_on(stage, self._room(seen, shape), family, trips, level))
        return found

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
        # Where a stage has fewer kinds than others, its last one is repeated.
        return list(dict.fromkeys(found))

    def _shared(self, of: StageClass, family: Family) -> dict[tuple[int, ...], list[list[int]]]:
        """The samples of each kind of devices on the stages of a class under each way to share them out.

        Returns:
            For the samples that each kind is priced with, for each kind the stages as if all of their devices were of
            it. Of one kind without a way: the stages.
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
        trips: Sequence[Path],
        levels: tuple[Level, Level],
    ) -> list[Standing]:
        """What units take on the stages of a class as each kind of devices sees it, with the best links.

        Args:
            samples: what each kind is priced with; empty: any way to share out the samples.
            levels: of stages of one kind of devices and of several.
        """
        shape, arrays, shared = family.shapes[0], self.space.arrays, self._shared(of, family)
        if not samples and len(shared) > 1:
            return [self._any_way(of, family, trips)]
        samples = samples or next(iter(shared))
        found = []
        for rows, count in zip(shared[samples], samples, strict=True):
            stage = self._stage(rows[0], shape, count)._replace(links=best_links(arrays.links[rows]))
            room = max(self._room(row, shape) for row in rows)
            found.append(self._standing_on(stage, room, family, trips, levels[len(shared) > 1]))
        return found

    def _any_way(self, of: StageClass, family: Family, trips: Sequence[Path]) -> Standing:
        """What units take on the stages of a class at least, however samples are shared out.

        A kind weighs as much as it is fast, so that seconds in the mean of the kinds differ little between the ways:
        what one kind has less of, the others have more of.
        """
        shared, arrays = self._shared(of, family), self.space.arrays
        found = [self._views(of, samples, family, trips, STEPS[0]) for samples in shared]
        (number,) = {tuple(arrays.kind_ranks[arrays.mixed[row]].tolist()) for row in self._layouts.rows[of]}
        rates = [
            np.array(samples) / [float(view.busy_s.min(axis=0).sum()) for view in some]
            for samples, some in zip(shared, found, strict=True)
            if len(some) > 1
        ]
        weights = np.mean(rates, axis=0) * number[: len(rates[0])]
        return Standing.least([Standing.mixed(some, weights if len(some) > 1 else None) for some in found])

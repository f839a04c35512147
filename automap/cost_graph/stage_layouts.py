"""Stage layouts: all ways to divide the devices of a cluster into stages of unlike size.

Stages are grouped into classes: stages of one class have equally many devices of the same kinds. They may differ in
which devices these are, and so in their links.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from automap.price.kernels.array_types import Rows
from automap.space.shape import Shape
from automap.space.space import PlanSpace

StageClass = tuple[object, ...]
"""Parts of the cluster, ranks of each axis and of each kind of devices, hardware of each kind."""


class Layouts:
    """The layouts of a space.

    Attributes:
        rows: for each class, rows of its stages among the distinct ones.
    """

    def __init__(self, space: PlanSpace) -> None:
        self.space = space
        self.rows: defaultdict[StageClass, set[int]] = defaultdict(set)
        self._found: dict[tuple[int, ...], dict[tuple[StageClass, ...], list[float]]] = {}

    def of(self, shape: Shape) -> dict[tuple[StageClass, ...], list[float]]:
        """For each layout of a shape, bytes a second at most from each stage to the next, and from the last to the
        first."""
        space, arrays, pp = self.space, self.space.arrays, shape.pp
        tp, middle = space.meshes.degrees.index(shape.tp), space.meshes.middles.index(shape.middle)
        count = space.meshes.micro_batches.index(shape.num_micro_batches)
        fills = np.flatnonzero(arrays.fills[tp, middle, count, 1]).tolist()
        key = (pp, shape.tp, shape.middle, *fills)
        if key in self._found:
            return self._found[key]
        found: dict[tuple[StageClass, ...], list[float]] = {}
        for order in range(len(space.meshes.orders)):
            for sizes in compositions(space.meshes.devices // space.meshes.part, pp, fills):
                ends = list(itertools.accumulate(sizes))
                rows = [int(arrays.stage_rows[order, tp, middle, e - s, s]) for e, s in zip(ends, sizes, strict=True)]
                if len(set(sizes)) == 1 or min(rows) < 0:
                    continue
                at = zip(ends, sizes, (*sizes[1:], sizes[0]), strict=True)
                rates = [float(arrays.send_bytes_per_s[arrays.send_rows[order, e, s, n]]) for e, s, n in at]
                some = tuple(self._class(parts, row) for parts, row in zip(sizes, rows, strict=True))
                found[some] = list(map(max, zip(found.get(some, rates), rates, strict=True)))
        self._found[key] = found
        return found

    def _class(self, parts: int, row: int) -> StageClass:
        """The class of a stage, to which it is added."""
        arrays = self.space.arrays
        number = int(arrays.mixed[row])
        kinds = [row] if number < 0 else [row, *arrays.kind_rows[number].tolist()]
        ranks = [] if number < 0 else arrays.kind_ranks[number].tolist()
        found = parts, *arrays.axes[row].tolist(), *ranks, *(arrays.hardware[kind].tobytes() for kind in kinds)
        self.rows[found].add(row)
        return found


def compositions(total: int, count: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a sum of a given number of terms, each one of some sizes, in any order."""
    if count == 1:
        if total in sizes:
            yield (total,)
        return
    for size in sizes:
        if size < total:
            for rest in compositions(total - size, count - 1, sizes):
                yield (size, *rest)


def best_links(links: Rows) -> Rows:
    """[axes] links of which each number is the best of some links, [links, axes]."""
    found: Rows = links[0].copy()
    for name in ("latency_s", "ramp", "host_time"):
        found[name] = links[name].min(axis=0)
    for name in ("bytes_per_s", "gather_bytes_per_s"):
        found[name] = links[name].max(axis=0)
    return found

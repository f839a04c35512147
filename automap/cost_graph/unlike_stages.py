"""Unlike stages: the fastest spread of a model's units over ranks that differ, as a linear program.

Each type of units takes so long at least on each rank. Neither the order of the units nor their being whole counts:
the program says what no pipeline over these ranks goes below. Units: seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from automap.arrays import Floats


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What the units of a model take at least on one rank."""

    busy_s: Floats
    """[types] seconds of all micro-batches, of the gradients and of the update, of all units of a type together."""
    trip_s: Floats
    """[paths, types] seconds of passes that follow each other on paths through all ranks."""
    crossing: float
    """Bytes that cross to the next rank."""

    @staticmethod
    def least(some: Sequence[Standing]) -> Standing:
        """The least of each."""
        return Standing(
            busy_s=np.min([one.busy_s for one in some], axis=0),
            trip_s=np.min([one.trip_s for one in some], axis=0),
            crossing=min(one.crossing for one in some),
        )


def quick_spread(views: Sequence[Sequence[Standing]], busy_s: float) -> float:
    """Seconds that no spread is faster than, where each rank weighs as much as it is fast; see `fastest_spread`."""
    busy = np.array([some[0].busy_s for some in views])
    speed = 1.0 / np.maximum(busy.sum(axis=1), 1e-30)
    return busy_s + float((busy * (speed / speed.sum())[:, None]).min(axis=0).sum())


def fastest_spread(views: Sequence[Sequence[Standing]], busy_s: float, trip_s: Sequence[float]) -> float:
    """Seconds of the fastest spread.

    Args:
        views: for each rank, what units take there in each of several views, all of which hold.
        busy_s: seconds that each rank takes besides.
        trip_s: [paths] seconds that each path through all ranks takes besides.
    """
    from scipy.optimize import linprog  # it takes longer to import than most programs to run

    ranks, types = len(views), len(views[0][0].busy_s)
    if ranks == 1:
        return busy_s + max(float(view.busy_s.sum()) for view in views[0])
    scale = max(float(views[0][0].busy_s.sum()), 1e-30)
    # Variables: the share of each type on each rank, rank by rank; then the seconds.
    count = ranks * types + 1
    rows, right = [], []
    for rank, some in enumerate(views):
        for view in some:
            row = np.zeros(count)
            row[rank * types : (rank + 1) * types] = view.busy_s / scale
            row[-1] = -1.0
            rows.append(row)
            right.append(-busy_s / scale)
    for number in range(max(map(len, views))):
        # All ranks as one kind of devices sees them.
        seen = [some[min(number, len(some) - 1)] for some in views]
        for path, more_s in enumerate(trip_s):
            row = np.concatenate([*(view.trip_s[path] for view in seen), np.zeros(1)]) / scale
            row[-1] = -1.0
            rows.append(row)
            right.append(-more_s / scale)
    shares = np.tile(np.eye(types), (1, ranks))
    costs = np.zeros(count)
    costs[-1] = 1.0
    found = linprog(
        costs,
        A_ub=np.array(rows),
        b_ub=np.array(right),
        A_eq=np.concatenate([shares, np.zeros((types, 1))], axis=1),
        b_eq=np.ones(types),
        bounds=(0.0, None),
    )
    # The solver is exact to about 1e-7.
    return float(found.fun) * scale * (1.0 - 1e-6) if found.status == 0 else 0.0


def partitions(total: int, count: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a sum of so many of some sizes, each way in falling order once."""
    if count == 1:
        if total in sizes:
            yield (total,)
        return
    for size in sorted(sizes, reverse=True):
        if size < total:
            for rest in partitions(total - size, count - 1, [other for other in sizes if other <= size]):
                yield (size, *rest)

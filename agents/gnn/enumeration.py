"""Every feasible placement of a small problem: the exact optimum."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from automap.arrays import Ints
from automap.gnn.simulator import Simulator

MOST = 50_000
"""Placements, feasible or not, up to which a problem is enumerated: some seconds of simulations."""


def count(simulator: Simulator) -> int:
    """Number of placements, feasible or not."""
    return math.prod([len(simulator.room)] * int((simulator.pinned < 0).sum()))


def feasible(simulator: Simulator) -> Iterator[Ints]:
    """[tasks] each feasible placement."""
    tasks = np.flatnonzero(simulator.pinned < 0)
    place, room = simulator.pinned.copy(), simulator.room.astype(float)
    fixed = simulator.pinned >= 0
    np.subtract.at(room, simulator.pinned[fixed], simulator.demands[fixed])

    def rest(depth: int) -> Iterator[Ints]:
        if depth == len(tasks):
            yield place.copy()
            return
        task = tasks[depth]
        for machine in range(len(room)):
            if (room[machine] >= simulator.demands[task] - 1e-9).all():
                place[task] = machine
                room[machine] -= simulator.demands[task]
                yield from rest(depth + 1)
                room[machine] += simulator.demands[task]

    return rest(0)


def enumerate_placements(simulator: Simulator) -> tuple[Ints, float, int]:
    """The fastest placement.

    Returns:
        [tasks] the placement, its makespan in seconds, and the number of placements that were simulated. Without a
        feasible placement the makespan is infinite.
    """
    best, best_s, simulated = simulator.pinned, np.inf, 0
    rows = list(feasible(simulator))
    for first in range(0, len(rows), 4096):
        chunk = rows[first : first + 4096]
        found = simulator.makespans(chunk)
        simulated += len(chunk)
        if found.min() < best_s:
            best, best_s = chunk[int(found.argmin())], float(found.min())
    return best, best_s, simulated

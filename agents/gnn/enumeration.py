"""Every feasible placement of a small problem: the exact optimum."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from agents.gnn.metropolis import ShareLeft
from agents.gnn.packing import free_room, movable
from automap.arrays import Ints
from automap.gnn.simulator import Simulator

MOST = 50_000
"""Placements, feasible or not, up to which a problem is enumerated (assumed)."""
TRANSFERS_A_SECOND = 1e6
"""Transfers that are simulated in a second (measured on one core: 0.5 to 2 million)."""
CHUNK_S = 0.1
"""Seconds between two looks at the budget (assumed)."""


class Enumerated(NamedTuple):
    """The fastest placement among those that were simulated."""

    place: Ints
    """[tasks] machine of each task."""
    makespan_s: float
    """Infinite where no placement is feasible."""
    simulated: int
    is_all: bool
    """Whether every feasible placement was simulated."""


def count(simulator: Simulator) -> int:
    """Number of placements, feasible or not."""
    return math.prod([len(simulator.room)] * len(movable(simulator)))


def simulation_s(simulator: Simulator) -> float:
    """About how many seconds the simulation of one placement takes."""
    return max(1, simulator.arrays.bytes.size) / TRANSFERS_A_SECOND


def feasible(simulator: Simulator) -> Iterator[Ints]:
    """[tasks] each feasible placement."""
    tasks, room, place = movable(simulator), free_room(simulator), simulator.pinned.copy()
    depth = 0
    while depth >= 0:
        if depth == len(tasks):
            yield place.copy()
            depth -= 1
            continue
        task = tasks[depth]
        demand, before = simulator.demands[task], place[task]
        if before >= 0:
            room[before] += demand
        behind = np.flatnonzero((room[before + 1 :] >= demand - 1e-9).all(axis=1))
        place[task] = before + 1 + behind[0] if len(behind) else -1
        if len(behind):
            room[place[task]] -= demand
        depth += 1 if len(behind) else -1


def enumerate_placements(simulator: Simulator, *, share_left: ShareLeft = lambda simulated, best_s: 1.0) -> Enumerated:
    """The fastest placement.

    Args:
        simulator: the problem, with its volumes.
        share_left: what is left of the budget; it ends the enumeration at 0.
    """
    best, best_s, simulated = simulator.pinned, math.inf, 0
    rows = feasible(simulator)
    size = int(np.clip(CHUNK_S / simulation_s(simulator), 1, 4096))
    while chunk := list(itertools.islice(rows, size)):
        if simulated and share_left(simulated, best_s) <= 0.0:
            return Enumerated(best, best_s, simulated, False)
        found = simulator.makespans(chunk)
        simulated += len(chunk)
        if found.min() < best_s:
            best, best_s = chunk[int(found.argmin())], float(found.min())
    return Enumerated(best, best_s, simulated, True)

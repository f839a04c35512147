"""Metropolis search over feasible placements with common random numbers, as the exploratory placement of 2204.11224.

A proposal with the makespan T' in place of T is accepted with a chance of min(1, (T / T') ^ (1 / temperature)), which
falls over a round; the search goes on from the best placement in the next round. Proposals favour machines that a task
exchanges flows with, so the stationary distribution is not exactly exp(-T / temperature).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from automap.arrays import Floats, Ints
from automap.gnn.kernels.moves import EVENNESS, WalkArrays, walk_on
from automap.gnn.simulator import Simulator

HOT = 0.05
"""Temperature at the beginning of a round: the logarithm of the ratio of makespans that is accepted with a chance of 1
in e (assumed: good placements differ by per cents)."""
COLD = 0.001
"""The temperature at the end of a round (assumed)."""

ShareLeft = Callable[[int, float], float]
"""(number of simulations, best makespan so far in seconds) -> share of the budget that is left."""
UNSEEN = 100
"""Proposals that count as one simulation: most are refused for their loads or for want of room, in a microsecond."""


def begin_walk(simulator: Simulator, place: Ints, value_s: float) -> WalkArrays:
    """A search that stands at a feasible placement, whose value is `value_s` seconds; `place` is [tasks]."""
    arrays, iterations = simulator.arrays, simulator.iterations
    used_by_flow = np.arange(iterations)[:, None] < iterations - arrays.lag[None, :]
    volume = np.where(used_by_flow, arrays.bytes, 0.0).sum(axis=0)
    load_s = np.zeros((len(simulator.room), 2))
    source, target = place[arrays.source], place[arrays.target]
    far = source != target
    np.add.at(load_s[:, 0], source[far], (volume / arrays.rate_out[source])[far])
    np.add.at(load_s[:, 1], target[far], (volume / arrays.rate_in[target])[far])
    group = np.arange(len(place))
    for sampler in range(len(place)):
        group[sampler] = next(iter(arrays.fed[arrays.fed_begin[sampler] : arrays.fed_begin[sampler + 1]]), sampler)
    movable = np.flatnonzero(simulator.pinned < 0)
    members = movable[np.argsort(group[movable], kind="stable")]
    room = simulator.room.astype(float)
    np.subtract.at(room, place, simulator.demands)
    return WalkArrays(
        place=place.copy(),
        best=place.copy(),
        movable=movable,
        demands=simulator.demands.astype(float),
        room=room,
        volume=volume,
        load_s=load_s,
        value_s=np.array([value_s, value_s]),
        group=group,
        member_begin=np.searchsorted(group[members], np.arange(len(place) + 1)),
        members=members,
        moved=np.zeros((2 * len(place), 2), dtype=np.int64),
        counts=np.zeros(2, dtype=np.int64),
    )


def cooling(proposals: int, rounds: int) -> Floats:
    """[proposals] temperatures: each round falls from hot to cold, each begins half as hot as the one before."""
    at = np.linspace(0.0, rounds, proposals, endpoint=False)
    hot = HOT * 0.5 ** np.floor(at)
    found: Floats = np.maximum(hot * (COLD / HOT) ** (at % 1.0), COLD / 4.0)
    return found


def search_by_loads(simulator: Simulator, place: Ints, proposals: int, rng: np.random.Generator) -> Ints:
    """Searches for a placement with small loads of the busiest interfaces, without simulations.

    Args:
        simulator: the problem, with its volumes.
        place: [tasks] the feasible placement where the search begins.
        proposals: how many changes are tried.
        rng: draws the changes, and which of them are accepted.

    Returns:
        [tasks] the best placement.
    """
    walk = begin_walk(simulator, place, 0.0)
    walk.value_s[:] = walk.load_s.max() + EVENNESS * walk.load_s.sum() / len(walk.load_s)
    if len(walk.movable):
        walk_on(simulator.arrays, walk, rng.random((proposals, 5)), cooling(proposals, 2), False)
    return walk.best


def search_metropolis(
    simulator: Simulator, place: Ints, rng: np.random.Generator, *, share_left: ShareLeft, step: int = 32
) -> tuple[Ints, float, int]:
    """Searches from a feasible placement until the budget is spent.

    Args:
        simulator: the problem, with its volumes.
        place: [tasks] where the search begins.
        rng: where randomness comes from.
        share_left: what is left of the budget; it ends the search at 0.
        step: proposals between two looks at the budget, at first.

    Returns:
        [tasks] the best placement, its makespan in seconds, and the number of simulations that were counted.
    """
    walk = begin_walk(simulator, place, float(simulator.makespans([place])[0]))
    size, proposals, done = step, 0, 0
    left = share_left(0, float(walk.value_s[1]))
    while len(walk.movable) and left > 0.0:
        temperatures = np.full(size, max(HOT * (COLD / HOT) ** (1.0 - left), COLD))
        walk_on(simulator.arrays, walk, rng.random((size, 5)), temperatures, True)
        proposals += size
        # Where all is refused without a simulation, a budget in simulations ends all the same.
        done = int(walk.counts[0]) + proposals // UNSEEN
        before, left = left, max(0.0, share_left(done, float(walk.value_s[1])))
        # Chunks are a hundredth of the budget, so that the temperature falls smoothly.
        size = int(np.clip(size * 0.01 / max(before - left, 1e-4), max(1, size // 2), size * 2))
        size = min(size, 1 << 16)
        if before >= 0.5 > left:
            walk = begin_walk(simulator, walk.best, float(walk.value_s[1]))._replace(counts=walk.counts)
    return walk.best, float(walk.value_s[1]), done

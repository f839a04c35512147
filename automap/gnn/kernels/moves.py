"""A Metropolis search over feasible placements: moves and swaps of tasks, accepted by simulated makespans.

All placements are simulated with the same volumes (common random numbers). The time that a machine must send or receive
is a lower bound on the makespan. A proposal whose lower bound is too slow for acceptance is rejected without a
simulation, which would give the same decision.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import boolean, float64, int64, void

from automap.gnn.kernels.bounds import critical_ranks
from automap.gnn.kernels.records import GNN
from automap.gnn.kernels.simulation import PRIORITY, simulate
from automap.jit import borrowing, kernel
from automap.price.kernels.array_types import Floats, Floats2, Ints, Ints2, tuple_type


class WalkArrays(NamedTuple):
    """The state of a search."""

    place: Ints
    """[tasks] present machine of each task."""
    best: Ints
    """[tasks] the best placement so far."""
    movable: Ints
    """[...] tasks that may be moved."""
    demands: Floats2
    """[tasks, resources] demands of the tasks."""
    room: Floats2
    """[machines, resources] free resources of the machines."""
    volume: Floats
    """[flows] bytes that each sends in all iterations."""
    load_s: Floats2
    """[machines, 2] seconds that each must send and receive at least."""
    value_s: Floats
    """[2] value of the present placement and of the best one, seconds."""
    group: Ints
    """[tasks] group of each task: a worker and the samplers whose first worker it is."""
    member_begin: Ints
    """[tasks + 1] where the movable members of a group begin in `members`."""
    members: Ints
    """[...] movable tasks by group."""
    moved: Ints2
    """[2 tasks, 2] task and former machine of each step of the present proposal."""
    counts: Ints
    """[2] number of simulations, and of steps of the present proposal."""


WALK = tuple_type(WalkArrays)
EVENNESS = 0.1
"""Weight of the mean load beside the largest one if loads are used in place of the makespan (assumed). It
distinguishes placements with the same load of the busiest machine."""


@borrowing(void(GNN, WALK, int64, int64), inner=True)
def _move(gnn, walk, task, machine):
    """Moves a task, and updates the free resources and the loads."""
    before = walk.place[task]
    for side in range(2):
        begin = gnn.in_begin if side == 0 else gnn.out_begin
        flows = gnn.in_flows if side == 0 else gnn.out_flows
        for number in range(begin[task], begin[task + 1]):
            flow = flows[number]
            other = walk.place[gnn.source[flow] if side == 0 else gnn.target[flow]]
            volume = walk.volume[flow]
            for sign, at in ((-1.0, before), (1.0, machine)):
                if at != other:
                    source, target = (other, at) if side == 0 else (at, other)
                    walk.load_s[source, 0] += sign * volume / gnn.rate_out[source]
                    walk.load_s[target, 1] += sign * volume / gnn.rate_in[target]
    for resource in range(walk.demands.shape[1]):
        walk.room[before, resource] += walk.demands[task, resource]
        walk.room[machine, resource] -= walk.demands[task, resource]
    walk.place[task] = machine


@borrowing(boolean(WALK, int64), inner=True)
def _holds(walk, machine):
    least = 0.0
    for resource in range(walk.demands.shape[1]):
        least = min(least, walk.room[machine, resource])
    return least >= -1e-9


@borrowing(void(GNN, WALK, int64, int64, boolean), inner=True)
def _bring(gnn, walk, task, machine, as_group):
    """Moves a task, or all tasks of its group on the same machine, and records their former machine."""
    before = walk.place[task]
    group = walk.group[task]
    first, last = (walk.member_begin[group], walk.member_begin[group + 1]) if as_group else (0, 1)
    for number in range(first, last):
        member = walk.members[number] if as_group else task
        if walk.place[member] == before:
            walk.moved[walk.counts[1], 0], walk.moved[walk.counts[1], 1] = member, before
            walk.counts[1] += 1
            _move(gnn, walk, member, machine)


@borrowing(void(GNN, WALK), inner=True)
def _take_back(gnn, walk):
    while walk.counts[1] > 0:
        walk.counts[1] -= 1
        _move(gnn, walk, walk.moved[walk.counts[1], 0], walk.moved[walk.counts[1], 1])


@borrowing(boolean(GNN, WALK, float64[::1]), inner=True)
def _propose(gnn, walk, drawn):
    """Changes the placement; returns whether it is a new placement that fits.

    A proposal moves a task or a group to a random machine, or to one with a task that it exchanges flows with. In most
    proposals, a task or group of that machine moves the other way: the first one that fits, beginning at a random one.
    """
    as_group, is_beside, is_swap = drawn[0] >= 0.6, (drawn[0] * 5.0) % 1.0 < 0.6, (drawn[0] * 25.0) % 1.0 < 0.7
    first = walk.movable[int64(drawn[1] * len(walk.movable))]
    before = walk.place[first]
    machine = _beside(gnn, walk, first, drawn[2]) if is_beside else int64(drawn[2] * len(walk.room))
    if machine == before:
        return False
    walk.counts[1] = 0
    _bring(gnn, walk, first, machine, as_group)
    if not is_swap and _holds(walk, machine):
        return True
    alone, at = walk.counts[1], int64(drawn[3] * len(walk.movable))
    for number in range(len(walk.movable)):
        other = walk.movable[(at + number) % len(walk.movable)]
        if walk.place[other] == machine and walk.group[other] != walk.group[first]:
            _bring(gnn, walk, other, before, as_group)
            if _holds(walk, machine) and _holds(walk, before):
                return True
            while walk.counts[1] > alone:
                walk.counts[1] -= 1
                _move(gnn, walk, walk.moved[walk.counts[1], 0], walk.moved[walk.counts[1], 1])
    _take_back(gnn, walk)
    return False


@borrowing(int64(GNN, WALK, int64, float64), inner=True)
def _beside(gnn, walk, task, drawn):
    """The machine of a task that exchanges a flow with `task`, or of the task itself if none does."""
    into = gnn.in_begin[task + 1] - gnn.in_begin[task]
    number = int64(drawn * (into + gnn.out_begin[task + 1] - gnn.out_begin[task]))
    if number < into:
        return walk.place[gnn.source[gnn.in_flows[gnn.in_begin[task] + number]]]
    number += gnn.out_begin[task] - into
    return walk.place[gnn.target[gnn.out_flows[number]]] if number < gnn.out_begin[task + 1] else walk.place[task]


@borrowing(float64(WALK, boolean), inner=True)
def _load_s(walk, is_even):
    longest = total = 0.0
    for machine in range(len(walk.load_s)):
        longest = max(longest, walk.load_s[machine, 0], walk.load_s[machine, 1])
        total += walk.load_s[machine, 0] + walk.load_s[machine, 1]
    return longest + EVENNESS * total / len(walk.load_s) if is_even else longest


@kernel(void(GNN, WALK, float64[:, ::1], float64[::1], boolean))
def walk_on(gnn, walk, draws, temperatures, simulated):
    """Proposes changes of a placement, one for each row of random numbers.

    Args:
        gnn: the problem.
        walk: state of the search; changed.
        draws: [proposals, 5] uniform random numbers.
        temperatures: [proposals] logarithm of the ratio of values that is accepted with probability 1 / e.
        simulated: whether makespans are simulated; otherwise the loads of the interfaces replace them.
    """
    rank, log, end_s = np.empty(len(gnn.source), np.int64), np.empty((0, 5)), np.empty(len(gnn.time_s))
    for step in range(len(draws)):
        if not _propose(gnn, walk, draws[step]):
            continue
        limit_s = walk.value_s[0] * math.exp(-temperatures[step] * math.log(max(draws[step, 4], 1e-12)))
        found_s = _load_s(walk, not simulated)
        if simulated and found_s * (1.0 - 1e-9) <= limit_s:
            critical_ranks(gnn, walk.place, rank)
            simulate(gnn, walk.place, rank, PRIORITY, log, end_s)
            found_s = end_s[-1]
            walk.counts[0] += 1
        if found_s > limit_s:
            _take_back(gnn, walk)
            continue
        walk.value_s[0] = found_s
        if found_s < walk.value_s[1]:
            walk.value_s[1] = found_s
            walk.best[:] = walk.place

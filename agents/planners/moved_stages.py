"""Moves of units and devices from stage to stage of a staged plan, as long as the step gets shorter.

The exact price decides whether a move is kept. Plans may lie outside the plan space. Units: seconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from agents.incumbent import Incumbent
from agents.planners.chunk_moves import moves_of, none_is_empty
from agents.planners.stage_table import FEW_DEVICES
from agents.planners.staged_plan import StagedPlan, fastest_staged, lower_staged

MOST_MOVES = 12
"""Largest number of moves in one plan (assumed)."""
SLOWEST = 2
"""Number of stages, the slowest ones, that a move may relieve (assumed)."""
PARTS = 16
"""Parts of a large cluster, of which one moves from stage to stage (assumed)."""
FARTHEST = 8
"""Stages from one that gets a unit or a device to the one that gives it, at most (assumed)."""


def moved(incumbent: Incumbent, plan: StagedPlan) -> StagedPlan:
    """A plan of which a unit, some devices, or both have moved from one stage to another, as long as that gains.

    Devices move one by one, on more than `FEW_DEVICES` by the host or in sixteenths of the cluster. Moves are tried
    that leave one of the slowest stages fewer units or more devices.
    """
    space = incumbent.space
    samples = space.problem.training.global_batch // plan.num_micro_batches
    host = math.gcd(*(one.num_devices for one in space.problem.cluster.hosts))
    # On large clusters parts of hosts are no step.
    steps = (
        [1]
        if space.meshes.devices <= FEW_DEVICES
        else sorted({host, max(space.meshes.devices // PARTS // host * host, host)})
    )
    for _ in range(MOST_MOVES):
        ranks = space.evaluator.evaluate(lower_staged(space, plan)).ranks
        slowest = np.argsort(ranks["bubble_s"] - ranks["end_s"], kind="stable")[:SLOWEST]
        moves = moves_of(len(plan.stages) - 1, FARTHEST)
        # By how much stages get longer, [n, stages].
        longer = np.diff(np.pad(moves, ((0, 0), (1, 1))), axis=1)[:, slowest]
        moves = moves[(longer != 0).any(axis=1)]
        longer = longer[(longer != 0).any(axis=1)]
        ends = np.array([stage.end for stage in plan.stages[:-1]]) + moves
        counts = np.cumsum([len(stage.devices) for stage in plan.stages])
        has_units = none_is_empty(ends, space.num_units) & (longer < 0).any(axis=1)
        others = [_with_ends(plan, to) for to in ends[has_units].tolist()]
        for step in steps:
            places = counts[:-1] + step * moves
            has_devices = none_is_empty(places, int(counts[-1])) & (longer > 0).any(axis=1)
            others += [_with_counts(plan, to) for to in places[has_devices].tolist()]
            both = none_is_empty(ends, space.num_units) & none_is_empty(places, int(counts[-1]))
            pairs = zip(ends[both].tolist(), places[both].tolist(), strict=True)
            others += [_with_counts(_with_ends(plan, to), at) for to, at in pairs]
        others = [other for other in others if _is_possible(other, samples)]
        best, *_ = [*fastest_staged(incumbent, [plan, *others], 1), plan]
        if best is plan or incumbent.finished:
            break
        plan = best
    return plan


def _with_ends(plan: StagedPlan, ends: Sequence[int]) -> StagedPlan:
    """A plan with other ends of all stages but the last; a unit that joins a stage does as the stage's last one did."""
    stages, begins = [], (0, *ends)
    for begin, end, stage in zip(begins, (*ends, plan.stages[-1].end), plan.stages, strict=True):
        recompute, count = stage.recompute, end - begin
        if not isinstance(recompute, str):
            recompute = (*recompute, *recompute[-1:] * count)[:count]
        stages.append(replace(stage, end=end, recompute=recompute))
    return replace(plan, stages=tuple(stages))


def _with_counts(plan: StagedPlan, ends: Sequence[int]) -> StagedPlan:
    """A plan whose stages take other numbers of devices of the same order, which end at these places."""
    order = [device for stage in plan.stages for device in stage.devices]
    places = itertools.pairwise((0, *ends, len(order)))
    stages = [
        replace(stage, devices=tuple(order[begin:end])) for stage, (begin, end) in zip(plan.stages, places, strict=True)
    ]
    return replace(plan, stages=tuple(stages))


def _is_possible(plan: StagedPlan, samples: int) -> bool:
    """Whether all stages have whole inner axes and a sample for each replica."""
    sizes = [(len(stage.devices), stage.tp) for stage in plan.stages]
    return all(devices % tp == 0 and devices // tp <= samples for devices, tp in sizes)

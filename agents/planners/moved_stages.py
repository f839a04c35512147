"""A local search that moves units and devices from stage to stage of a staged plan as long as the step gets shorter.

All moves are priced exactly. The plans may lie outside the plan space. Units: seconds.
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
"""Largest number of moves that are made (assumed)."""
SLOWEST = 2
"""Only moves are tried that give less work or more devices to one of so many slowest stages (assumed)."""
PARTS = 16
"""On a large cluster, one of so many equal parts of its devices moves at a time (assumed)."""
FARTHEST = 8
"""Largest distance, in stages, between the two stages of a move (assumed)."""


def moved(incumbent: Incumbent, plan: StagedPlan) -> StagedPlan:
    """Moves a unit, some devices, or both from one stage to another, as long as that makes the plan faster.

    On up to `FEW_DEVICES` devices one device moves at a time; on more, those of a host, or 1 / `PARTS` of the cluster.

    Args:
        incumbent: prices the plans, and says when the budget has ended.
        plan: the plan to begin with.

    Returns:
        The best plan found.
    """
    space = incumbent.space
    samples = space.problem.training.global_batch // plan.num_micro_batches
    host = math.gcd(*(one.num_devices for one in space.problem.cluster.hosts))
    # On large clusters only whole hosts move.
    steps = (
        [1]
        if space.meshes.devices <= FEW_DEVICES
        else sorted({host, max(space.meshes.devices // PARTS // host * host, host)})
    )
    for _ in range(MOST_MOVES):
        ranks = space.evaluator.evaluate(lower_staged(space, plan)).ranks
        slowest = np.argsort(ranks["bubble_s"] - ranks["end_s"], kind="stable")[:SLOWEST]
        moves = moves_of(len(plan.stages) - 1, FARTHEST)
        # [n, slowest stages] by how many units, or devices, each of them gets larger.
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
    """A plan with other ends of all stages but the last.

    A unit that joins a stage has the recompute mode of the unit that was the last one of this stage.
    """
    stages, begins = [], (0, *ends)
    for begin, end, stage in zip(begins, (*ends, plan.stages[-1].end), plan.stages, strict=True):
        recompute, count = stage.recompute, end - begin
        if not isinstance(recompute, str):
            recompute = (*recompute, *recompute[-1:] * count)[:count]
        stages.append(replace(stage, end=end, recompute=recompute))
    return replace(plan, stages=tuple(stages))


def _with_counts(plan: StagedPlan, ends: Sequence[int]) -> StagedPlan:
    """A plan whose stages divide its devices, in their order, at other places.

    Args:
        plan: the plan.
        ends: [stages - 1] place after the last device of each stage but the last one.
    """
    order = [device for stage in plan.stages for device in stage.devices]
    places = itertools.pairwise((0, *ends, len(order)))
    stages = [
        replace(stage, devices=tuple(order[begin:end])) for stage, (begin, end) in zip(plan.stages, places, strict=True)
    ]
    return replace(plan, stages=tuple(stages))


def _is_possible(plan: StagedPlan, samples: int) -> bool:
    """Whether the devices of every stage are a multiple of its inner axis, and each replica has a sample."""
    sizes = [(len(stage.devices), stage.tp) for stage in plan.stages]
    return all(devices % tp == 0 and devices // tp <= samples for devices, tp in sizes)

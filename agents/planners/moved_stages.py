"""A local search that moves units and devices from stage to stage of a staged plan as long as the step gets shorter.

All moves are priced exactly. The plans may lie outside the plan space. Units: seconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from agents.incumbent import Incumbent
from agents.planners.chunk_moves import moves_of, none_is_empty
from agents.planners.stage_strategies import Strategy
from agents.planners.staged_plan import StageChoice, StagedPlan, data_parallel, fastest_staged, lower_staged
from agents.planners.submeshes import FEW_DEVICES
from automap.arrays import Ints
from automap.space.space import PlanSpace

SLOWEST = 2
"""Number of stages, the slowest ones first, that a move may relieve (assumed)."""
PARTS = 16
"""On a large cluster, one of so many equal parts of its devices moves at a time (assumed)."""
FARTHEST = 8
"""Largest distance, in stages, between the two stages of a move (assumed)."""


def moved(incumbent: Incumbent, plan: StagedPlan, *, everywhere: bool = False) -> StagedPlan:
    """Moves a unit, some devices, or both from one stage to another, as long as that makes the plan faster.

    Every move leaves one of the slowest stages fewer units or more devices.

    Args:
        incumbent: prices the plans, and says when the budget has ended.
        plan: the plan to begin with, without virtual stages.
        everywhere: whether, if no such move gains, moves that relieve other stages are tried too, the slower stages
            first.

    Returns:
        The best plan found.
    """
    space, at = incumbent.space, 0
    while at < len(plan.stages):
        ranks = space.evaluator.evaluate(lower_staged(space, plan)).ranks
        slowest = np.argsort(ranks["bubble_s"] - ranks["end_s"], kind="stable")[at : at + SLOWEST]
        best, *_ = [*fastest_staged(incumbent, [plan, *_relieved(incumbent, plan, slowest)], 1), plan]
        if incumbent.finished or (best is plan and not everywhere):
            return best
        at = at + SLOWEST if best is plan else 0
        plan = best
    return plan


def _relieved(incumbent: Incumbent, plan: StagedPlan, stages: Ints) -> list[StagedPlan]:
    """Plans in which one of some stages has a unit less, more devices, or both.

    A stage gets as many devices as its fullest replica needs to have a sample less, or one of the numbers of `_steps`.
    """
    space = incumbent.space
    samples = space.problem.training.global_batch // plan.num_micro_batches
    moves = moves_of(len(plan.stages) - 1, FARTHEST)
    # [moves, stages] by how many units, or steps of devices, each stage gets larger.
    longer = np.diff(np.pad(moves, ((0, 0), (1, 1))), axis=1)
    moves, longer = (of[(longer[:, stages] != 0).any(axis=1)] for of in (moves, longer))
    is_shorter, is_wider = ((sign * longer[:, stages] > 0).any(axis=1) for sign in (-1, 1))
    taken = np.array([_for_a_sample_less(stage, samples) for stage in plan.stages])[longer.argmax(axis=1)]
    ends = np.array([stage.end for stage in plan.stages[:-1]]) + moves
    counts = np.cumsum([len(stage.devices) for stage in plan.stages])
    has_units = none_is_empty(ends, space.num_units)
    found = [_with_ends(plan, to) for to in ends[has_units & is_shorter].tolist()]
    for step in [taken, *(np.full(len(moves), fixed) for fixed in _steps(space))]:
        places = counts[:-1] + step[:, None] * moves
        has_devices = (step > 0) & none_is_empty(places, int(counts[-1]))
        found += [_with_counts(plan, to) for to in places[has_devices & is_wider].tolist()]
        both = has_units & has_devices
        pairs = zip(ends[both].tolist(), places[both].tolist(), strict=True)
        found += [_with_counts(_with_ends(plan, to), at) for to, at in pairs]
    strategies = {id(one.signatures): _strategy(space, one) for one in plan.stages}
    legal = (_shared(other, samples, strategies) for other in found)
    return list({tuple((s.end, s.devices) for s in other.stages): other for other in legal if other}.values())


def _strategy(space: PlanSpace, stage: StageChoice) -> Strategy:
    """The strategy of a stage."""
    if stage.signatures is None:
        return Strategy(tp=1, signatures=data_parallel(space.evaluator, len(space.axes)))
    return Strategy.of(space, stage.tp, stage.signatures)


def _shared(plan: StagedPlan, samples: int, strategies: Mapping[int, Strategy]) -> StagedPlan | None:
    """A plan whose stages can all share the samples of a micro-batch: a stage whose two axes split the batch, which no
    longer divides over them, has one axis instead. None where a stage cannot share them.

    Args:
        plan: a plan.
        samples: samples of a micro-batch.
        strategies: the strategy of each stage, by the identity of its signatures.
    """
    stages = []
    for stage in plan.stages:
        strategy = strategies[id(stage.signatures)]
        if strategy.fits(len(stage.devices), samples):
            stages.append(stage)
        elif strategy.splits_batch and len(stage.devices) <= samples:
            stages.append(replace(stage, tp=1, signatures=None))
        else:
            return None
    return replace(plan, stages=tuple(stages))


def _steps(space: PlanSpace) -> list[int]:
    """Numbers of devices that move at a time, whatever the samples: one, or on more than `FEW_DEVICES` whole hosts."""
    devices = space.meshes.devices
    if devices <= FEW_DEVICES:
        return [1]
    host = math.gcd(*(one.num_devices for one in space.problem.cluster.hosts))
    return sorted({host, max(devices // PARTS // host * host, host)})


def _for_a_sample_less(stage: StageChoice, samples: int) -> int:
    """How many devices more a stage needs for its fullest replica to have a sample less; 0 if it has only one."""
    replicas = len(stage.devices) // stage.tp
    fewer = -(-samples // replicas) - 1
    return (-(-samples // fewer) - replicas) * stage.tp if fewer else 0


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

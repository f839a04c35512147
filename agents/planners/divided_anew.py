"""Pipelines divided anew: the best pipelines so far, with stages of any numbers of devices, after Piper and SPP.

In the plan space only short pipelines have unlike stages, and templates have like ones alone. Where a pipeline is about
as fast as the best plan, Piper's dynamic program divides units and devices among its stages again, with its
micro-batches and its ZeRO stage, with its inner axis or without one (`agents.planners.piper`). The fastest partitions
are priced under each schedule of the space; and where the trainer runs any order of actions, the fastest of all in the
orders of SPP's list scheduling (`agents.planners.spp`). What is found is kept where it is the best plan, also if it
lies outside the space. Units: seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from agents.incumbent import Incumbent
from agents.planners.galvatron import layered
from agents.planners.pipeline_cuts import shifts
from agents.planners.piper import of_setting
from agents.planners.spp import listed
from agents.planners.stage_table import megatron_strategies
from agents.planners.staged_plan import StagedPlan, fastest_staged, price_staged
from agents.sampling.expert import Grid
from automap.schedule import SPLIT_KINDS
from automap.space.shape import Shape
from automap.space.space import PlanSpace

NEAR = 1.1
"""A pipeline is divided anew if it takes at most so many times the step time of the best plan (assumed)."""
MOST_DEVICES, MOST_UNITS = 64, 100
"""Largest cluster and model: the time of the program grows with the square of both."""
SETTINGS = 2
"""Number of pairs of micro-batches and ZeRO stage with which units and devices are divided anew."""
LAYERED = 8
"""Number of pipelines whose layers choose their recomputation anew."""
LISTED = 1
"""Number of partitions whose micro-batches are listed."""
MOVED, MOST_MOVES = 2, 6
"""Number of plans, the fastest ones, whose stages become longer and shorter, and how often at most."""
MOST_PASSES = 2_000
"""Largest number of forward passes that are listed: it takes a tenth of a second."""
LEAST_EVALUATIONS, LEAST_S = 500, 5.0
"""Budget that must be left: it takes a few tenths of a second."""
SHARE = 0.1
"""Share of what is left of the budget at most."""


def divide_anew(incumbent: Incumbent, grid: Grid) -> None:
    """Divides the best pipelines anew.

    Args:
        incumbent: takes the plans, credited to `piper`, those with listed orders to `spp`.
        grid: plans with their prices.
    """
    space, left, left_s = incumbent.space, incumbent.left, incumbent.left_s
    is_short = (left is not None and left < LEAST_EVALUATIONS) or (left_s is not None and left_s < LEAST_S)
    is_large = space.meshes.devices > MOST_DEVICES or space.num_units > MOST_UNITS
    # Outside the space a plan stands for synchronous training only.
    if is_short or is_large or space.problem.training.sync_modes != ("synchronous",):
        return
    near = _near(incumbent, grid)
    if not near:
        return
    ways = [way for way in megatron_strategies(space) if way.tp in (1, near[0].shape.tp)]
    with incumbent.share(
        evaluations=None if left is None else int(SHARE * left), seconds=None if left_s is None else SHARE * left_s
    ):
        tried: list[StagedPlan] = []
        incumbent.searcher = "galvatron"
        for plan in _layered(space, near):
            price_staged(incumbent, [plan])
            tried.append(plan)
            if incumbent.finished:
                return
        incumbent.searcher = "piper"
        found = []
        for count, zero in list(dict.fromkeys((shape.num_micro_batches, zero) for shape, zero in near))[:SETTINGS]:
            if not incumbent.finished:
                found += of_setting(incumbent, count, zero, ways)
        plans = [replace(plan, schedule=kind) for plan in found for kind in _kinds(space)]
        if not incumbent.finished:
            price_staged(incumbent, plans)
        tried += plans
        incumbent.searcher = "spp"
        for plan in fastest_staged(incumbent, found, LISTED) if space.problem.any_order else ():
            is_short = 1 < len(plan.stages) <= MOST_PASSES // plan.num_micro_batches
            if is_short and not incumbent.finished:
                orders = list(listed(space, plan))
                price_staged(incumbent, orders)
                tried += orders
        incumbent.searcher = "piper"
        for plan in fastest_staged(incumbent, tried, MOVED):
            if not incumbent.finished:
                price_staged(incumbent, [_moved(incumbent, plan)])


def _moved(incumbent: Incumbent, plan: StagedPlan) -> StagedPlan:
    """A plan whose stages have become longer and shorter by a unit each, as long as that gains."""
    for _ in range(MOST_MOVES):
        ends = np.array([stage.end for stage in plan.stages[:-1]])
        others = [_with_ends(plan, moved) for moved in shifts(ends, incumbent.space.num_units).tolist()]
        best, *_ = fastest_staged(incumbent, [plan, *others], 1)
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


def _kinds(space: PlanSpace) -> list[str]:
    """Schedules of the space that do not take backward passes apart, which the space searches itself."""
    return [kind for kind in space.schedules if kind not in SPLIT_KINDS]


class _Near(NamedTuple):
    """A pipeline near the best plan."""

    shape: Shape
    zero: int
    """ZeRO stage."""


def _near(incumbent: Incumbent, grid: Grid) -> list[_Near]:
    """The distinct shapes and ZeRO stages of pipelines near the best plan, the fastest first."""
    space = incumbent.space
    near = np.flatnonzero((grid.prices[:, 1] <= 0.0) & (grid.prices[:, 0] <= NEAR * incumbent.least_s))
    found = []
    for row in near[np.argsort(grid.prices[near, 0], kind="stable")].tolist():
        plan = grid.values[row].tolist()
        shape = space.shape(plan)
        if shape.pp > 1 and shape.middle == 1:
            found.append(_Near(shape, plan[space.first.zero]))
    return list(dict.fromkeys(found))


def _layered(space: PlanSpace, near: Sequence[_Near]) -> Iterator[StagedPlan]:
    """Galvatron's plans of pipelines."""
    plain = [(shape, zero) for shape, zero in near if shape.virtual == 1]
    for shape, zero in plain[:LAYERED]:
        plan = layered(space, shape, zero)
        if plan is not None:
            yield plan

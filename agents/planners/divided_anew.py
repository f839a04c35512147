"""Pipelines divided anew: the best pipelines so far, with stages of any numbers of devices, after Piper.

In the plan space only short pipelines have unlike stages, and templates have like ones alone. Where a pipeline is about
as fast as the best plan, Piper's dynamic program divides units and devices among its stages again, with its
micro-batches, its ZeRO stage and its inner axes (`agents.planners.piper`). What it finds is kept where it is the best
plan, also if it lies outside the space. Units: seconds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from agents.incumbent import Incumbent
from agents.planners.piper import plan_setting
from agents.planners.stage_table import megatron_strategies
from agents.sampling.expert import Grid

NEAR = 1.1
"""A pipeline is divided anew if it takes at most so many times the step time of the best plan (assumed)."""
MOST_DEVICES, MOST_UNITS = 64, 100
"""Largest cluster and model: the time of the program grows with the square of both."""
LEAST_EVALUATIONS, LEAST_S = 1_000, 5.0
"""Budget that must be left: it takes a few tenths of a second."""
SHARE = 0.1
"""Share of what is left of the budget at most."""


def divide_anew(incumbent: Incumbent, grid: Grid) -> None:
    """Divides the best pipelines anew.

    Args:
        incumbent: takes the plans, credited to `piper`.
        grid: plans with their prices.
    """
    space, left, left_s = incumbent.space, incumbent.left, incumbent.left_s
    is_short = (left is not None and left < LEAST_EVALUATIONS) or (left_s is not None and left_s < LEAST_S)
    is_large = space.meshes.devices > MOST_DEVICES or space.num_units > MOST_UNITS
    # Outside the space a plan stands for synchronous training only.
    if is_short or is_large or space.problem.training.sync_modes != ("synchronous",):
        return
    fastest = _fastest(incumbent, grid)
    if fastest is None:
        return
    incumbent.searcher = "piper"
    ways = [way for way in megatron_strategies(space) if way.tp in fastest.sizes]
    with incumbent.share(
        evaluations=None if left is None else int(SHARE * left), seconds=None if left_s is None else SHARE * left_s
    ):
        plan_setting(incumbent, fastest.num_micro_batches, fastest.zero, ways)


class _Fastest(NamedTuple):
    """What the fastest pipelines have."""

    num_micro_batches: int
    zero: int
    """ZeRO stage."""
    sizes: set[int]
    """Sizes of the inner axes of all pipelines near the best plan that have these."""


def _fastest(incumbent: Incumbent, grid: Grid) -> _Fastest | None:
    """The setting of the fastest pipeline near the best plan, if there is one."""
    space, found = incumbent.space, None
    near = np.flatnonzero((grid.prices[:, 1] <= 0.0) & (grid.prices[:, 0] <= NEAR * incumbent.least_s))
    for row in near[np.argsort(grid.prices[near, 0], kind="stable")].tolist():
        plan = grid.values[row].tolist()
        shape, zero = space.shape(plan), plan[space.first.zero]
        if shape.pp > 1 and shape.middle == 1:
            found = found or _Fastest(shape.num_micro_batches, zero, set())
            if (shape.num_micro_batches, zero) == found[:2]:
                found.sizes.add(shape.tp)
    return found

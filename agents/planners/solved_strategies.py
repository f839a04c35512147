"""Strategies of stages whose signatures were solved in the plan space, for pipelines that are divided outside of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agents.planners.stage_strategies import Strategy
from agents.sampling.expert import Grid
from automap.space.space import PlanSpace, Values


def solved_strategies(space: PlanSpace, grid: Grid) -> list[tuple[int, Strategy]]:
    """The best plan of a grid with each number of micro-batches and each size of the inner axis, the best first: its
    number of micro-batches and its strategy.

    Args:
        space: the plan space.
        grid: plans with their prices.
    """
    best: dict[tuple[int, int], Values] = {}
    for row in np.lexsort((grid.prices[:, 0], grid.prices[:, 1] > 0.0)).tolist():
        plan = grid.values[row].tolist()
        shape = space.shape(plan)
        if shape.tp > 1 and shape.middle == shape.virtual == 1:
            best.setdefault((shape.num_micro_batches, shape.tp), plan)
    return [(count, Strategy.of(space, tp, space.signatures(plan))) for (count, tp), plan in best.items()]


def with_solved(
    strategies: Sequence[Strategy], solved: Sequence[tuple[int, Strategy]], num_micro_batches: int
) -> list[Strategy]:
    """Adds strategies of `solved_strategies` to others: those that were solved for a number of micro-batches, and the
    best one of each size of the inner axis, since signatures that are good for one number are mostly good for others.

    Args:
        strategies: come first; a strategy that is like one of them is not added.
        solved: result of `solved_strategies`.
        num_micro_batches: the number of micro-batches.
    """
    of_each_tp: dict[int, Strategy] = {}
    for _, strategy in solved:
        of_each_tp.setdefault(strategy.tp, strategy)
    found = list(strategies)
    for one in [*(one for count, one in solved if count == num_micro_batches), *of_each_tp.values()]:
        if not any(map(one.is_like, found)):
            found.append(one)
    return found

"""Opening: the best templates are worked out before anything learns or anneals.

A template shards all models by one pattern and cuts them evenly, without virtual stages. In a fraction of a second much
of what it misses is found:

1. Around the best template of each mesh all single changes of the decisions before the signatures are priced: cuts,
   virtual stages, micro-batches, batch shares, recomputation, ZeRO.
2. Elimination solves the skeletons of the best plans so far, each mesh in turn, see `agents.planners.elimination`.

The plans found are known to the network's proposals (`agents.learning.proposals`) as templates are, and annealing
begins from them. The budget is charged for them.
"""

from __future__ import annotations

import math

import numpy as np

from agents.incumbent import Incumbent
from agents.planners.elimination import propose
from agents.planners.skeletons import SkeletonSearch, run_skeletons
from agents.sampling.expert import Grid
from automap.bounds.known_plans import worth_s
from automap.space.space import Ints, PlanSpace

SECONDS, SHARE = 0.5, 0.25
"""Seconds that it takes at most, but for a solve that is under way, unless the budget is in evaluations alone; and its
share of a budget at most."""
FEWEST_SOLVES = 2
"""Number of solves that are granted to the smallest budget in evaluations."""
LOOKED_AROUND = 0.5
"""Share of this that the changes of templates take at most; elimination has the rest."""
MESHES = 32
"""Number of meshes around whose best templates is looked, at most."""
KEPT = 64
"""Number of skeletons whose best plan is kept, at most."""


def work_out(incumbent: Incumbent, grid: Grid) -> Grid:
    """Works out the best templates.

    Args:
        incumbent: takes the plans, credited to `elimination`.
        grid: the templates with their prices.

    Returns:
        The best plans of the skeletons that were worked out.
    """
    incumbent.searcher = "elimination"
    left, left_s = incumbent.left, incumbent.left_s
    most, most_s = None if left is None else int(SHARE * left), None if left_s is None else SHARE * left_s
    if left is None:
        most_s = min(SECONDS, math.inf if most_s is None else most_s)
    with incumbent.share(evaluations=most, seconds=most_s):
        search = SkeletonSearch(incumbent, propose, FEWEST_SOLVES)
        with incumbent.share(
            evaluations=None if most is None else int(LOOKED_AROUND * most),
            seconds=None if most_s is None else LOOKED_AROUND * most_s,
        ):
            for row in _best_of_meshes(incumbent.space, grid)[:MESHES]:
                if incumbent.finished:
                    break
                values, (seconds, overflow) = grid.values[row], grid.prices[row].tolist()
                search.look_around(tuple(values.tolist()), seconds, overflow)
        ranked = [values for _, values in sorted(search.best.values())]
        run_skeletons(search, ranked)
    found = [values for _, values in sorted(search.best.values())[:KEPT]]
    values = np.array(found, dtype=np.int64).reshape(len(found), grid.values.shape[1])
    return Grid(values, incumbent.space.price(values))


def _best_of_meshes(space: PlanSpace, grid: Grid) -> Ints:
    """Numbers of the best template of each mesh and number of stages, the best first; those that do not fit last."""
    fitting = grid.prices[grid.prices[:, 1] <= 0.0, 0]
    worth = worth_s(grid.prices, float(fitting.min(initial=grid.prices[:, 0].min())))
    order = np.argsort(worth, kind="stable")
    _, first = np.unique(grid.values[order, : space.first.micro_batches], axis=0, return_index=True)
    ranked: Ints = order[np.sort(first)]
    return ranked

"""Gives each pipeline rank of a plan as little recomputation as it needs to fit into memory.

The memory of a rank does not depend on what other ranks recompute, and less recomputation is never slower. So for given
other decisions the best level of each rank is found by bisection, for all ranks at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agents.incumbent import Incumbent
from agents.planners.promising_templates import promises
from agents.sampling.expert import Grid
from automap.arrays import Floats, Ints, Mask
from automap.space.space import PlanSpace, Values

MOST_TEMPLATES = 48
"""Number of templates that are made to fit, the most promising ones first (assumed)."""
MADE_TO_FIT = 16
"""Number of other plans, the fastest ones, that are made to fit (assumed)."""


def recompute_less(space: PlanSpace, values: Values) -> list[Values]:
    """Finds the lightest recomputation with which a plan fits. All other decisions stay.

    Returns:
        The plan whose ranks each have the lightest level that fits, and the plan whose ranks all have the same level,
        the lightest that fits; one plan where both are the same. The list is empty where the plan fits with no common
        level.
    """
    begin, pp = space.first.recompute, space.shape(values).pp
    allowed = space.legal_on_ranks(values)
    common = np.flatnonzero(allowed.all(axis=0)).tolist()
    uniform = _with_levels(space, values, [[level] * pp for level in common])
    fits = np.flatnonzero(_fits(space, uniform))
    if not len(fits):
        return []
    base = uniform[fits[0]]
    if pp == 1 or space.limits.one_mode or fits[0] == 0:
        return [tuple(base.tolist())]
    # Bisection: the lightest level of a rank that fits is between `low` and `high`, as indices into its `lighter`.
    lighter = [np.flatnonzero(mine[: base[begin] + 1]) for mine in allowed]
    low, high = np.zeros(pp, dtype=np.int64), np.array([len(mine) - 1 for mine in lighter])
    while (low < high).any():
        middle = (low + high) // 2
        tried = np.repeat(base[None], pp, axis=0)
        for rank in range(pp):
            tried[rank, begin + rank] = lighter[rank][middle[rank]]
        fit = _fits(space, tried)
        high = np.where(fit, middle, high)
        low = np.where(fit, low, np.minimum(middle + 1, high))
    best = _with_levels(space, values, [[int(mine[at]) for mine, at in zip(lighter, high.tolist(), strict=True)]])
    return [tuple(best[0].tolist()), tuple(base.tolist())]


def made_to_fit(space: PlanSpace, plans: Ints, steps_s: Floats) -> Ints:
    """[m, slots] the `MADE_TO_FIT` fastest of some plans, with as little recomputation as they need to fit.

    Args:
        space: the plan space.
        plans: [n, slots] the plans, which need not fit.
        steps_s: [n] their step times in seconds.
    """
    fastest = plans[steps_s.argsort(kind="stable")[:MADE_TO_FIT]].tolist()
    found = [plan for values in fastest for plan in recompute_less(space, tuple(values))]
    return np.array(found, dtype=np.int64).reshape(len(found), plans.shape[1])


def _with_levels(space: PlanSpace, values: Values, levels: Sequence[Sequence[int]]) -> Ints:
    """[n, slots] a plan with other levels of recomputation: n lists of one level for each pipeline rank."""
    found = np.repeat(np.array([values], dtype=np.int64), len(levels), axis=0)
    begin = space.first.recompute
    found[:, begin : begin + len(levels[0])] = levels
    return found


def _fits(space: PlanSpace, plans: Ints) -> Mask:
    """[n] whether plans, [n, slots], fit into memory."""
    fits: Mask = space.price(plans)[:, 1] <= 0.0
    return fits


def lightened_templates(incumbent: Incumbent, grid: Grid) -> Grid:
    """Templates that do not fit without recomputation, with as little recomputation as they need to fit.

    Args:
        incumbent: takes the plans, credited to `expert`.
        grid: the templates with their prices.
    """
    space, found = incumbent.space, list[Values]()
    for row in _promising(space, grid, incumbent.best_s)[:MOST_TEMPLATES]:
        if incumbent.finished:
            break
        found += recompute_less(space, tuple(grid.values[row].tolist()))
    rows = np.array(list(dict.fromkeys(found)), dtype=np.int64).reshape(-1, len(space.slots))
    rows = rows[: incumbent.left]
    return Grid(rows, incumbent.price(rows))


def _promising(space: PlanSpace, grid: Grid, best_s: float) -> Ints:
    """Rows of the templates that do not fit without recomputation and that would be faster than `best_s` if they did;
    those with the shortest estimated step time first (`promises`)."""
    found = promises(space, grid)
    seconds, overflow = grid.prices[found.light].T
    may = (overflow > 0.0) & (seconds < best_s) & (found.light != found.heavy)
    ranked: Ints = found.light[may][np.argsort(found.seconds[may], kind="stable")]
    return ranked

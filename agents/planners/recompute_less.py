"""Plans that recompute no more than it takes to fit: the lightest level of recomputation of each pipeline rank.

The memory of a rank does not depend on what other ranks recompute, and less recomputation is never slower. So the best
levels of a plan whose other decisions are given are found rank by rank, with as many prices as a bisection takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agents.incumbent import Incumbent
from agents.planners.promising import promises
from agents.sampling.expert import Grid
from automap.arrays import Floats, Ints, Mask
from automap.space.space import PlanSpace, Values

MOST_TEMPLATES = 48
"""Number of templates that are made to fit, the most promising ones first."""
MADE_TO_FIT = 16
"""Number of other plans, the fastest ones, that are made to fit (assumed)."""


def recompute_less(space: PlanSpace, values: Values) -> list[Values]:
    """The plan with the lightest level on each rank that fits, and the one with the lightest level for all ranks.

    There are none where no level for all ranks makes the plan fit. The signatures are kept.
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
    # On each rank the lightest level that fits is at most `high`, and no level that is lighter than `low` fits.
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
    """[m, slots] the fastest of plans that do not fit, with as little recomputation as it takes.

    Args:
        space: the plan space.
        plans: [n, slots] the plans.
        steps_s: [n] their step times in seconds.
    """
    fastest = plans[steps_s.argsort(kind="stable")[:MADE_TO_FIT]].tolist()
    found = [plan for values in fastest for plan in recompute_less(space, tuple(values))]
    return np.array(found, dtype=np.int64).reshape(len(found), plans.shape[1])


def _with_levels(space: PlanSpace, values: Values, levels: Sequence[Sequence[int]]) -> Ints:
    """[n, slots] a plan with other levels on its ranks."""
    found = np.repeat(np.array([values], dtype=np.int64), len(levels), axis=0)
    begin = space.first.recompute
    found[:, begin : begin + len(levels[0])] = levels
    return found


def _fits(space: PlanSpace, plans: Ints) -> Mask:
    fits: Mask = space.price(plans)[:, 1] <= 0.0
    return fits


def lightened_templates(incumbent: Incumbent, grid: Grid) -> Grid:
    """Templates that do not fit as they are, with as little recomputation as it takes.

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
    """Rows of templates without recomputation that do not fit and that might be the best plan if they did, best
    first."""
    found = promises(space, grid)
    seconds, overflow = grid.prices[found.light].T
    may = (overflow > 0.0) & (seconds < best_s) & (found.light != found.heavy)
    ranked: Ints = found.light[may][np.argsort(found.seconds[may], kind="stable")]
    return ranked

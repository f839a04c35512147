"""Exhaustive: every plan of a small space, except where a lower bound says that none is better than the best so far.

Branch and bound, depth first, `WIDTH` of the most promising partial plans at a time: their continuations are bounded,
and at the end priced, in one compiled call. The optimum is exact up to the rounding of the bounds.
"""

from __future__ import annotations

import numpy as np

from agents.incumbent import Incumbent
from agents.searcher import SearchResult, SearchTask
from automap.bounds.enumeration import Beginnings, Enumeration
from automap.errors import ProblemError

MAX_DECADES = 7.0
"""log10 of the largest number of plans that is accepted (assumed). Branch and bound visits a small part of them."""
WIDTH = 256
"""Partial plans that are continued at a time (assumed): few of them find good plans early, many share the overhead of a
call."""
GROWTH = 4
"""Continuations of each partial plan before they are bounded again (assumed): a bound costs as much time as a price."""


def search_exhaustive(task: SearchTask) -> SearchResult:
    """The optimum of the space, proven unless the budget ends first; see `Searcher`.

    Raises:
        ProblemError: the space has more than 10^7 plans.
    """
    incumbent = Incumbent.begin(task, "exhaustive")
    decades = incumbent.space.decades
    if decades > MAX_DECADES:
        raise ProblemError(
            f"the space has 10^{decades:.1f} plans, more than 10^{MAX_DECADES:.0f}",
            field="searcher",
            value="exhaustive",
            repair="Fix more decisions with hints.fix, or use another searcher.",
        )
    incumbent.price_start(task)
    proven = run_exhaustive(incumbent)
    return incumbent.result(seed=task.seed, proven=proven)


def run_exhaustive(incumbent: Incumbent, *, max_nodes: int | None = None) -> bool:
    """Branch and bound, beginning with the best plan of `incumbent` as upper bound.

    Args:
        incumbent: prices the plans and says when to stop.
        max_nodes: number of partial plans bounded and plans priced after which the search gives up; None = no limit.

    Returns:
        Whether every plan was priced, or is proven to be no faster than the best one or not to fit.
    """
    enumeration = Enumeration(incumbent.space)
    nodes = 0
    nearest: Beginnings | None = None
    pending = [enumeration.root()]
    while pending and not incumbent.finished and (max_nodes is None or nodes < max_nodes):
        block = pending.pop()
        block = block.take(block.bounds[:, 0] < incumbent.best_s)
        if len(block) > WIDTH:
            pending.append(block.take(slice(WIDTH, None)))
            block = block.take(slice(WIDTH))
        if not len(block):
            continue
        size = len(block)
        while not enumeration.is_done(block) and len(block) < GROWTH * size:
            block = enumeration.extend(block)
        nodes += len(block)
        if enumeration.is_done(block):
            left = _price(block, incumbent)
            pending += [left] if len(left) else []
            continue
        block = enumeration.bounded(block)
        worst = int(block.bounds[:, 1].argmin())
        if nearest is None or block.bounds[worst, 1] < nearest.bounds[0, 1]:
            nearest = block.take(slice(worst, worst + 1))
        block = block.take((block.bounds[:, 0] < incumbent.best_s) & (block.bounds[:, 1] <= 0.0))
        pending.append(block.take(np.argsort(block.bounds[:, 0], kind="stable")))
    if incumbent.best is None and incumbent.nearest is None and nearest is not None and not incumbent.finished:
        _price(_smallest(enumeration, nearest), incumbent)
    return not pending


def _price(block: Beginnings, incumbent: Incumbent) -> Beginnings:
    """Prices complete plans, as many as the budget allows, and returns the others."""
    count = len(block) if incumbent.left is None else min(len(block), incumbent.left)
    incumbent.price(block.values[:count])
    return block.take(slice(count, None))


def _smallest(enumeration: Enumeration, block: Beginnings) -> Beginnings:
    """One completion, with every decision in favour of memory: the plan to name where nothing fits."""
    while not enumeration.is_done(block):
        block = enumeration.bounded(enumeration.extend(block))
        best = int(block.bounds[:, 1].argmin())
        block = block.take(slice(best, best + 1))
    return block

"""Exhaustive: every plan of a small space, cut where an admissible bound cannot beat the best so far.

Depth first, the most promising beginnings first, `WIDTH` of them at a time: their continuations are bounded, and in the
end priced, in one compiled call. The optimum is exact up to the rounding of bounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agents.incumbent import Incumbent
from agents.searcher import Budget, OnProgress, SearchResult, ShouldStop
from automap.bounds.enumeration import Beginnings, Enumeration
from automap.errors import ProblemError
from automap.plan import Plan
from automap.problem import Problem
from automap.space.space import PlanSpace

MAX_DECADES = 7.0
"""Larger spaces are refused; branch and bound visits a small part of them."""
WIDTH = 256
"""Beginnings that are continued at a time: few find good plans early, many share the work around a compiled call."""
GROWTH = 4
"""Continuations of each before they are bounded again: a bound costs as much as a price."""


def search_exhaustive(
    problem: Problem,
    budget: Budget,
    *,
    seed: int,
    on_progress: OnProgress,
    should_stop: ShouldStop,
    start: Sequence[Plan] = (),
) -> SearchResult:
    """The optimum of the space, proven unless the budget ends first; see `Searcher`.

    Raises:
        ProblemError: the space has more than 10^7 plans.
    """
    space = PlanSpace(problem)
    if space.decades > MAX_DECADES:
        raise ProblemError(
            f"the space has 10^{space.decades:.1f} plans, more than 10^{MAX_DECADES:.0f}",
            field="searcher",
            value="exhaustive",
            repair="Fix more decisions with hints.fix, or use another searcher.",
        )
    incumbent = Incumbent(space, budget, searcher="exhaustive", on_progress=on_progress, should_stop=should_stop)
    for plan in start:
        values = space.encode(plan)
        if values is not None:
            incumbent.price([values])
    proven = run_exhaustive(space, incumbent)
    return incumbent.result(seed=seed, proven=proven)


def run_exhaustive(space: PlanSpace, incumbent: Incumbent, *, max_nodes: int | None = None) -> bool:
    """Branch and bound below the best of `incumbent`, which it feeds.

    Args:
        space: of the problem.
        incumbent: prices, and says when to stop.
        max_nodes: beginnings bounded and plans priced before it gives up; None = as many as it takes.

    Returns:
        whether every plan was priced or is proven to be no faster than the best, or not to fit.
    """
    enumeration = Enumeration(space)
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
    """Prices complete plans, as many as the budget allows; the others."""
    count = len(block)
    if incumbent.left is not None:
        count = min(count, incumbent.left)
    incumbent.price([tuple(row) for row in block.values[:count].tolist()])
    return block.take(slice(count, None))


def _smallest(enumeration: Enumeration, some: Beginnings) -> Beginnings:
    """One completion, every decision in favour of memory: what comes nearest where nothing fits."""
    while not enumeration.is_done(some):
        some = enumeration.bounded(enumeration.extend(some))
        best = int(some.bounds[:, 1].argmin())
        some = some.take(slice(best, best + 1))
    return some

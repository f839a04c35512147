"""Exhaustive: every plan of a small space, depth first, cut where an admissible bound cannot beat the best so far."""

from __future__ import annotations

from collections.abc import Sequence

from agents.incumbent import Incumbent
from agents.searcher import Budget, OnProgress, SearchResult, ShouldStop
from automap.errors import ProblemError
from automap.plan import Plan
from automap.prefix import BoundTable, walk
from automap.problem import Problem
from automap.space import PlanSpace, Values

MAX_DECADES = 7.0
"""Larger spaces are refused; branch and bound visits a small part of them."""


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
    table = BoundTable(space)
    pending: list[Values] = [()]
    while pending and not incumbent.finished:
        prefix = walk(space, table, pending.pop())
        if prefix.done:
            incumbent.offer(tuple(prefix.values), prefix.bound.time_s, prefix.bound.overflow)
            continue
        branches = [
            (float(seconds), (*prefix.values, int(value)))
            for value, (seconds, over) in zip(prefix.legal(), prefix.bounds(), strict=True)
            if seconds < incumbent.best_s and (over <= 0.0 or incumbent.best is None)
        ]
        # The most promising branch is visited first: it lies last on the stack.
        pending += [values for _, values in sorted(branches, reverse=True)]
    return incumbent.result(seed=seed, proven=not pending)

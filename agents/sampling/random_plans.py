"""Random: plans drawn by uniform choices among the legal values of each decision; the yardstick of a learner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agents.incumbent import Incumbent
from agents.searcher import Budget, OnProgress, SearchResult, ShouldStop
from automap.plan import Plan
from automap.problem import Problem
from automap.space.space import PlanSpace

DRAWN = 64
"""Plans that are drawn and priced at a time."""


def search_random(
    problem: Problem,
    budget: Budget,
    *,
    seed: int,
    on_progress: OnProgress,
    should_stop: ShouldStop,
    start: Sequence[Plan] = (),
) -> SearchResult:
    """The best of as many random plans as the budget allows; see `Searcher`."""
    space = PlanSpace(problem)
    incumbent = Incumbent(space, budget, searcher="random", on_progress=on_progress, should_stop=should_stop)
    rng = np.random.default_rng(seed)
    for plan in start:
        values = space.encode(plan)
        if values is not None:
            incumbent.price([values])
    while not incumbent.finished:
        count = DRAWN if budget.evaluations is None else min(DRAWN, budget.evaluations - incumbent.evaluations)
        incumbent.price([tuple(values) for values in space.random_batch(rng, count).tolist()])
    return incumbent.result(seed=seed)

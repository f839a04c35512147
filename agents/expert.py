"""Expert: prices every template of the tuned grid and returns the fastest that fits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from agents.incumbent import Incumbent
from agents.searcher import Budget, OnProgress, SearchResult, ShouldStop
from automap.plan import Plan
from automap.problem import Problem
from automap.space import PlanSpace, Values
from automap.templates import templates

PRICED = 256
"""Templates that are priced at a time."""


def grid(space: PlanSpace, incumbent: Incumbent, *, keep: int = 16) -> tuple[dict[str, float | None], list[Values]]:
    """Prices the whole grid: every search is measured against it. At most half of a budget is charged for it.

    Args:
        space: of the problem.
        incumbent: counts and keeps the best.
        keep: how many plans to return.

    Returns:
        step times of the baselines (`dp` = pure data parallelism, `expert` = best template; None if none fits), and
        the best feasible templates, fastest first.
    """
    best_data_parallel = best = float("inf")
    ranked: list[tuple[float, Values]] = []
    listed = templates(space)
    while some := list(itertools.islice(listed, PRICED)):
        prices = incumbent.price([values for _, values in some]).tolist()
        for (shape, values), (seconds, overflow) in zip(some, prices, strict=True):
            if overflow <= 0.0:
                ranked.append((seconds, values))
                best = min(best, seconds)
                if shape.dp == space.problem.cluster.num_devices:
                    best_data_parallel = min(best_data_parallel, seconds)
        if incumbent.stopped:
            break
    if incumbent.budget.evaluations is not None:
        incumbent.charged = min(incumbent.charged, incumbent.budget.evaluations // 2)
    ranked.sort()
    baselines = {"dp": best_data_parallel, "expert": best}
    return {k: None if v == float("inf") else v for k, v in baselines.items()}, [v for _, v in ranked[:keep]]


def search_expert(
    problem: Problem,
    budget: Budget,
    *,
    seed: int,
    on_progress: OnProgress,
    should_stop: ShouldStop,
    start: Sequence[Plan] = (),
) -> SearchResult:
    """The best expert template; see `Searcher`."""
    space = PlanSpace(problem)
    incumbent = Incumbent(space, budget, searcher="expert", on_progress=on_progress, should_stop=should_stop)
    baselines, _ = grid(space, incumbent)
    return incumbent.result(seed=seed, baselines=baselines)

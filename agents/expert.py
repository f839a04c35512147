"""Expert: prices every template of the tuned grid and returns the fastest that fits."""

from __future__ import annotations

from collections.abc import Sequence

from agents.incumbent import Incumbent
from agents.searcher import Budget, OnProgress, SearchResult, ShouldStop
from automap.plan import Plan
from automap.problem import Problem
from automap.space import PlanSpace, Values
from automap.templates import templates


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
    for shape, values in templates(space):
        outcome = incumbent.price(values)
        if outcome.fits:
            ranked.append((outcome.step_time_s, values))
            best = min(best, outcome.step_time_s)
            if shape.dp == space.problem.cluster.num_devices:
                best_data_parallel = min(best_data_parallel, outcome.step_time_s)
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

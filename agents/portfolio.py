"""Portfolio: the template grid first, then a DQN that starts from the best templates; the best of both wins.

The plan says who found it: `dqn` only if the DQN improved on every template.
"""

from __future__ import annotations

from collections.abc import Sequence

from agents.expert import grid
from agents.incumbent import Incumbent
from agents.searcher import Budget, OnProgress, SearchResult, ShouldStop
from automap.plan import Plan
from automap.problem import Problem
from automap.space import PlanSpace


def search_portfolio(
    problem: Problem,
    budget: Budget,
    *,
    seed: int,
    on_progress: OnProgress,
    should_stop: ShouldStop,
    start: Sequence[Plan] = (),
) -> SearchResult:
    """The best of templates, `start` and a DQN that learns from them; see `Searcher`."""
    from agents.dqn import run_dqn

    space = PlanSpace(problem)
    incumbent = Incumbent(space, budget, searcher="expert", on_progress=on_progress, should_stop=should_stop)
    baselines, known = grid(space, incumbent)
    best: dict[str, float | None] = {"expert": baselines["expert"]}
    given = [values for values in map(space.encode, start) if values is not None]
    found_by = "expert"
    for values in given:
        before = incumbent.best_s
        incumbent.price([values])
        found_by = "start" if incumbent.best_s < before else found_by
    if not incumbent.finished:
        before = incumbent.best_s
        incumbent.searcher = "dqn"
        incumbent.watch()
        run_dqn(space, incumbent, seed=seed, reference_s=baselines["expert"], demonstrations=[*given, *known][:16])
        found_by = "dqn" if incumbent.best_s < before else found_by
        best["dqn"] = None if incumbent.own_best_s == float("inf") else incumbent.own_best_s
    return incumbent.result(seed=seed, found_by=found_by, searchers=best, baselines=baselines)

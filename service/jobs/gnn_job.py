"""A job of the kind `gnn`: a placement of distributed GNN training. The worker runs it in place of `run_job`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from automap.errors import ProblemError
from service.jobs.run_job import JobRequest

if TYPE_CHECKING:
    from agents.searcher import Budget, OnProgress, ShouldStop
    from automap.gnn.plan import GnnPlan
    from automap.gnn.problem import GnnProblem


def check_gnn(request: JobRequest) -> tuple[GnnProblem, Budget]:
    """The problem and the budget of a request.

    Raises:
        ProblemError: one of them, or the searcher, is not what it may be.
    """
    from agents.gnn.search import check_searcher
    from agents.searcher import Budget
    from automap.gnn.problem import GnnProblem

    if len(request.searchers) != 1:
        repair = "Give one searcher."
        raise ProblemError("not one searcher", field="searcher", value=list(request.searchers), repair=repair)
    check_searcher(request.searchers[0])
    return GnnProblem.from_json(request.gnn), Budget.parse(request.budget)


def run_gnn(request: JobRequest, *, on_progress: OnProgress, should_stop: ShouldStop) -> GnnPlan:
    """The plan of a request.

    Args:
        request: a request with a problem of distributed GNN training.
        on_progress: called often.
        should_stop: called often; once it returns true, the best plan so far is returned.

    Raises:
        UserError: the request, or that nothing fits.
    """
    from agents.gnn.search import search
    from agents.searcher import Progress

    problem, budget = check_gnn(request)
    searcher, begin = request.searchers[0], time.perf_counter()

    def tell(fraction: float, evaluations: int, best_s: float) -> None:
        seconds = time.perf_counter() - begin
        on_progress(
            Progress(
                searcher=searcher,
                evaluations=evaluations,
                seconds=seconds,
                best_step_time_s=best_s,
                lower_bound_s=0.0,
                fraction=fraction,
            )
        )

    return search(problem, budget, seed=request.seed, searcher=searcher, on_progress=tell, should_stop=should_stop)

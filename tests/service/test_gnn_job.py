"""Jobs that search for plans of distributed GNN training, without a service."""

from __future__ import annotations

import time

from agents.searcher import Progress
from automap.gnn.made_up import Shape, make_problem
from service.jobs.gnn_job import run_gnn
from service.jobs.run_job import JobRequest


def test_what_is_told_on_the_way_ends_at_the_plan() -> None:
    problem = make_problem(Shape(machines=3, workers=2, samplers=1))
    request = JobRequest(cluster=None, training={}, gnn=problem.to_json(), budget="20", searchers=("metropolis",))
    told: list[Progress] = []
    began = time.perf_counter()
    run_gnn(request, on_progress=told.append, should_stop=lambda: False)
    took_s = time.perf_counter() - began
    seconds, done = [one.seconds for one in told], [one.evaluations for one in told]
    assert told and seconds == sorted(seconds) and seconds[-1] <= took_s
    assert done == sorted(done) and done[-1] <= 20
    best = [one.best_step_time_s for one in told]
    assert best == sorted(best, reverse=True) and best[-1] > 0.0

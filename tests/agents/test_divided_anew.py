"""Pipelines divided anew: unlike stages in long pipelines, which the plan space does not have."""

from collections import Counter

import pytest

from agents import Budget
from agents.incumbent import Incumbent
from agents.planners.divided_anew import LEAST_EVALUATIONS, divide_anew
from agents.planners.opening import work_out
from agents.sampling.expert import price_grid
from automap.cluster import parse_cluster
from automap.plan import Plan
from automap.price.estimate import price
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.verify import Verifier
from ir import zoo

MODEL = "bert:layers=8,hidden=1024,heads=16,seq_len=128,vocab_size=8192"
"""Ten units, too few for a stage on each of eleven devices."""


def opened(evaluations=4_000, **training):
    """The incumbent and its plans before pipelines are divided anew."""
    cluster = parse_cluster("11x1xV100@10Gbit")
    space = PlanSpace(Problem.build(zoo.build(MODEL), cluster, {"global_batch": 128, **training}))
    incumbent = Incumbent(space, Budget(evaluations=evaluations), searcher="expert")
    grid = price_grid(incumbent)
    return incumbent, grid.joined(work_out(incumbent, grid).plans())


def test_a_long_pipeline_of_unlike_stages_is_the_best_plan():
    incumbent, grid = opened()
    before_s, charged = incumbent.best_s, incumbent.charged
    left = incumbent.left
    divide_anew(incumbent, grid)
    assert incumbent.charged - charged <= 0.1 * left
    result = incumbent.result(seed=0)
    plan, problem = result.plan, incumbent.space.problem
    assert result.step_time_s < 0.995 * before_s == 0.995 * incumbent.best_s
    assert plan.search.found_by == "piper"
    assert plan.search.searchers["piper"] == result.step_time_s
    assert "spp" not in plan.search.searchers
    sizes = Counter(dict(stage.mesh).get("dp", 1) for stage in plan.stages)
    assert len(plan.stages) > 4 and len(sizes) > 1
    assert not Verifier(problem).violations(plan)
    again = price(problem, Plan.from_json(plan.to_json()))
    assert again.step_time_s == pytest.approx(result.step_time_s, rel=1e-9)
    # Behind it come the best plans of the space.
    first, *others = result.unlike(3)
    assert first == plan and len(others) == 2
    assert others[0].estimate.step_time_s == incumbent.best_s
    assert all(one.search.found_by != "piper" for one in others)


@pytest.mark.parametrize(
    "changes", [{"evaluations": LEAST_EVALUATIONS // 2}, {"sync_modes": ("synchronous", "local_sgd")}]
)
def test_small_budgets_and_other_sync_modes_go_without(changes):
    incumbent, grid = opened(**changes)
    before = incumbent.evaluations
    divide_anew(incumbent, grid)
    assert incumbent.evaluations == before and incumbent.outside is None
    assert "piper" not in incumbent.reached


def test_orders_are_listed_where_the_trainer_runs_them():
    incumbent, grid = opened(trainer="automap")
    divide_anew(incumbent, grid)
    assert incumbent.reached["spp"] < 1.05 * incumbent.reached["piper"]

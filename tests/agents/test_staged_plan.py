"""What planners of the literature propose, priced in the plan space and outside."""

import pytest

from agents import Budget
from agents.incumbent import Incumbent
from agents.planners.staged_plan import StageChoice, StagedPlan, lower_staged, search_staged
from agents.searcher import SearchTask
from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.schedule import write_order
from automap.space.space import PlanSpace
from automap.verify import verify

CLUSTER = "4xV100"


@pytest.fixture
def problem(mlp):
    return Problem.build(mlp((512, 2048, 256, 2048, 512)), parse_cluster(CLUSTER), {"global_batch": 64})


def staged(units, sizes=(3, 1), order=(), schedule="1f1b"):
    devices = [tuple(range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(len(sizes))]
    ends = [1, *range(units - len(sizes) + 2, units + 1)]
    stages = tuple(StageChoice(end=end, devices=mine) for end, mine in zip(ends, devices, strict=True))
    return StagedPlan(stages=stages, num_micro_batches=8, schedule=schedule, order=order)


def test_stages_of_the_space_are_one_of_its_plans(problem):
    space = PlanSpace(problem)
    lowered = lower_staged(space, staged(space.num_units))
    incumbent = Incumbent(space, Budget.parse(10), searcher="spp")
    seconds, overflow = incumbent.offer(lowered)
    assert overflow <= 0.0
    assert incumbent.outside is None
    assert incumbent.best is not None
    assert incumbent.best_s == seconds == space.evaluator.evaluate(lowered).step_time_s
    assert space.stage_devices(incumbent.best) == (3, 1)


def test_an_explicit_order_stands_outside_and_may_win(problem):
    task = SearchTask(problem=problem, budget=Budget.parse(10))
    units = PlanSpace(problem).num_units
    slow = staged(units, schedule="explicit", order=write_order("gpipe", 2, 2, 8))
    fast = staged(units, schedule="explicit", order=write_order("1f1b", 2, 2, 8))
    found = search_staged(task, "spp", lambda incumbent: [slow, fast])
    assert found.plan.schedule.kind == "explicit"
    assert found.record.found_by == "spp"
    assert found.step_time_s == found.record.searchers["spp"] == found.improvements[-1][2]
    assert verify(problem, found.plan) == ()
    assert found.plainest(found.step_time_s).plan.schedule.kind == "explicit"


def test_a_plan_of_the_space_wins_over_a_slower_one_outside(problem):
    task = SearchTask(problem=problem, budget=Budget.parse(10))
    units = PlanSpace(problem).num_units
    outside = staged(units, sizes=(1, 1), schedule="explicit", order=write_order("gpipe", 2, 2, 8))
    inside = StagedPlan(stages=(StageChoice(end=units, devices=(0, 1, 2, 3)),), num_micro_batches=1)
    found = search_staged(task, "spp", lambda incumbent: [outside, inside])
    assert found.plan.schedule.kind == "1f1b"
    assert found.evaluations == 2


def test_hints_hold_outside_the_space_too(mlp):
    graph = mlp((512, 2048, 256, 2048, 512))
    bound = Problem.build(graph, parse_cluster(CLUSTER), {"global_batch": 64}, {"fix": {"pp": 4}})
    space = PlanSpace(bound)
    incumbent = Incumbent(space, Budget.parse(10), searcher="spp")
    incumbent.offer(lower_staged(space, staged(space.num_units)))
    assert incumbent.best is None
    assert incumbent.outside is None

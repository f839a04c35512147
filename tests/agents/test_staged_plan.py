"""What planners of the literature propose, priced in the plan space and outside."""

import itertools

import pytest

from agents import Budget
from agents.incumbent import Incumbent
from agents.planners.device_partition import Partition, StageOf
from agents.planners.stage_strategies import Strategy
from agents.planners.stage_table import StageTable
from agents.planners.staged_plan import StageChoice, StagedPlan, data_parallel, lower_staged, search_staged
from agents.searcher import SearchTask
from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.schedule import write_order
from automap.space.space import PlanSpace
from automap.verify import verify
from ir import zoo

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


@pytest.mark.parametrize("cluster", ["4x1xV100@10Gbit", "8xA100"])
@pytest.mark.parametrize("trainer", ["generic", "torchtitan", "megatron-core"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_planners_know_what_hides_reductions(cluster, trainer, zero):
    """One stage of replicas waits for its gradients, and for the gathers of ZeRO behind its optimizer, as long as in
    the price: links fast and slow, overlap in part."""
    training = {"global_batch": 32, "trainer": trainer}
    space = PlanSpace(Problem.build(zoo.build("vgg19"), parse_cluster(cluster), training))
    devices = tuple(range(space.meshes.devices))
    for count in (1, 4):
        whole = StageChoice(end=space.num_units, devices=devices)
        lowered = lower_staged(space, StagedPlan(stages=(whole,), num_micro_batches=count, zero=zero))
        (rank,) = space.evaluator.evaluate(lowered).ranks
        strategy = Strategy(tp=1, signatures=data_parallel(space.evaluator, len(space.axes)))
        costs = StageTable(space, devices, count, [strategy], zero=zero).spans(0, len(devices), strategy)
        assert costs.reduce_s[0, space.num_units] == pytest.approx(float(rank["sync_s"]), rel=1e-12)


@pytest.mark.parametrize("trainer", ["generic", "oneflow", "deepspeed"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_planners_know_how_long_a_stage_is_held(trainer, size):
    """The seconds of a stage are those of its rank in the price. Stages of one device send inside and between hosts, by
    links of unlike rates, those of four across hosts; exchanges go both ways at once, some of it hidden."""
    training = {"global_batch": 32, "trainer": trainer}
    space = PlanSpace(Problem.build(zoo.build("vgg19"), parse_cluster("2x6xV100@10Gbit"), training))
    strategy = Strategy(tp=1, signatures=data_parallel(space.evaluator, len(space.axes)))
    table, count = StageTable(space, tuple(range(12)), 8, [strategy], zero=1), 12 // size
    ends = [space.num_units * (number + 1) // count for number in range(count)]
    stages = [StageOf(first, last, size * n, size) for n, (first, last) in enumerate(itertools.pairwise((0, *ends)))]
    lowered = lower_staged(space, table.staged(Partition(0.0, tuple(stages))))
    for number, (stage, rank) in enumerate(zip(stages, space.evaluator.evaluate(lowered).ranks, strict=True)):
        of_price = rank["compute_s"] + rank["comm_s"].sum() + rank["exchange_s"] + rank["sync_s"]
        found = table.seconds(count - number, stage.place, stage.devices)[stage.first, stage.last]
        assert 8 * found == pytest.approx(float(of_price), rel=1e-12)


def test_plans_outside_are_left_out_whose_memory_is_counted_otherwise(problem, monkeypatch):
    """Memory is counted again where a search ends: then the next best plan that passes is returned."""
    incumbent = Incumbent(PlanSpace(problem), Budget.parse(10), searcher="spp")
    space, order = incumbent.space, write_order("1f1b", 2, 2, 8)
    plans = [staged(space.num_units, sizes, order, "explicit") for sizes in ((1, 3), (2, 2), (3, 1))]
    lowered = [lower_staged(space, plan) for plan in plans]
    lowered.sort(key=lambda one: -space.evaluator.evaluate(one).step_time_s)
    *_, slower_s, faster_s = (incumbent.offer(one)[0] for one in lowered)
    assert faster_s < slower_s
    monkeypatch.setattr(incumbent, "verifier", Picky(incumbent.verifier, incumbent.outside.plan.stages))
    result = incumbent.result(seed=0)
    assert result.step_time_s == incumbent.result(seed=0).step_time_s == slower_s
    assert verify(problem, result.plan) == ()


class Picky:
    """A verifier that refuses the memory of plans with some stages."""

    def __init__(self, verifier, stages):
        self.verifier, self.stages = verifier, stages

    def violations(self, plan, *, memory=True):
        if memory and plan.stages == self.stages:
            return ("counted otherwise",)
        return self.verifier.violations(plan, memory=memory)

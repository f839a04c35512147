"""SPP: partitions against brute force, list scheduling against its bound, and plans on networks of any kind."""

import itertools
import json

import numpy as np
import pytest

from agents import Budget, search
from agents.planners.device_partition import partitions
from agents.planners.list_schedule import Stages, list_schedule
from agents.planners.pair_links import PairLinks
from agents.planners.span_costs import SpanCosts
from agents.planners.spp import recursive_order
from agents.planners.stage_strategies import megatron_strategies
from agents.planners.stage_table import StageTable
from agents.planners.staged_plan import StageChoice, StagedPlan, data_parallel, lower_staged
from agents.planners.tied_spans import TiedUnits
from agents.planners.unit_profile import UnitsInOrder
from automap.cluster import parse_cluster
from automap.plan import Plan
from automap.price.estimate import price
from automap.price.evaluator import by_type
from automap.price.kernels.stage_records import Stage
from automap.price.lowered_plan import RECOMPUTE_MODES
from automap.problem import Problem
from automap.schedule import read_order, write_order
from automap.space.space import PlanSpace
from ir import zoo
from ir.factors import BROADCAST, PARTIAL

CUBE_MESH = ("X112 2SSS", "1X21 S2SS", "12X2 SS1S", "212X SSS1", "2SSS X112", "S2SS 1X21", "SS1S 12X2", "SSS1 212X")
"""Links between the eight V100s of a server: one NVLink, two, or the system's bus (DLPerf, report of 2020)."""


def on_matrix(bandwidth_GBps):  # noqa: N803
    document = parse_cluster(f"{len(bandwidth_GBps)}xV100-16GB").to_json()
    return parse_cluster({**document, "bandwidth_GBps": np.asarray(bandwidth_GBps).tolist()})


def test_the_slowest_link_of_every_stage_is_that_of_brute_force(mlp):
    """Measured links differ in both directions; a single device has none."""
    rng = np.random.default_rng(0)
    rates = rng.uniform(1.0, 50.0, (9, 9))
    np.fill_diagonal(rates, 0.0)
    space = PlanSpace(Problem.build(mlp([64, 64, 64, 64]), on_matrix(rates), {"global_batch": 36}))
    order = tuple(rng.permutation(9).tolist())
    table = StageTable(space, order, 1, megatron_strategies(space))
    matrix = PairLinks(space.problem.cluster).matrix()
    for size in range(1, 10):
        for place in range(10 - size):
            pairs = itertools.permutations(order[place : place + size], 2)
            least = min((matrix[pair] for pair in pairs), default=np.inf)
            assert table.least_rate(place, size) == least


def cube_mesh():
    rate = {"X": 0.0, "1": 25.0, "2": 50.0, "S": 9.0}
    return on_matrix([[rate[c] for c in row.replace(" ", "")] for row in CUBE_MESH])


@pytest.mark.parametrize("step", [None, 2])
def test_partitions_are_brute_force(step):
    """Stages and channels of random costs that depend on everything they may depend on; some spans do not fit."""
    rng = np.random.default_rng(0)
    solved = 0
    for _ in range(40):
        layers, devices = (int(n) for n in rng.integers(1, (7, 6)))
        times, links = {}, {}

        def seconds(behind, place, size, times=times, layers=layers):
            if (behind, place, size) not in times:
                ends = np.concatenate([[0.0], np.cumsum(rng.random(layers))]) / size
                span = ends[None, :] - ends[:, None] + 0.1 * rng.random()
                span[np.tril_indices(layers + 1)] = np.inf
                span[rng.random(span.shape) < 0.1] = np.inf
                times[behind, place, size] = span
            return times[behind, place, size]

        def channel(*key, links=links, layers=layers):
            return links.setdefault(key, rng.random(layers + 1))

        found = {len(p.stages): p for p in partitions(layers, devices, range(1, 9), seconds, channel, 9, step=step)}
        for count in range(1, min(layers, devices) + 1):
            plans = []
            for cuts in itertools.combinations(range(1, layers), count - 1):
                for shares in itertools.combinations(range(step or 1, devices, step or 1), count - 1):
                    plans.append(((0, *cuts, layers), (0, *shares, devices)))
            loads = [load(plan, seconds, channel) for plan in plans]
            if min(loads, default=np.inf) == np.inf:
                assert count not in found
                continue
            solved += 1
            stages = found[count].stages
            mine = (0, *(s.last for s in stages)), (0, *(s.place + s.devices for s in stages))
            assert found[count].load_s == min(loads) == load(mine, seconds, channel)
    assert solved > (60 if step is None else 30)


def load(plan, seconds, channel):
    at, on = plan
    size, count = np.diff(on).tolist(), len(on) - 1
    loads = [seconds(count - n, on[n], size[n])[at[n], at[n + 1]] for n in range(count)]
    return max(loads + [channel(on[n], size[n], size[n + 1])[at[n + 1]] for n in range(count - 1)])


def random_stages(rng, *, reduces):
    count = int(rng.integers(1, 7))
    forward_s, onward_s = rng.exponential(1.0, count), rng.exponential(rng.choice([0.1, 1.0]), count - 1)
    return Stages(
        forward_s=forward_s,
        backward_s=forward_s * rng.uniform(1.0, 3.0, count),
        onward_s=onward_s,
        back_s=onward_s,
        reduce_s=rng.exponential(5.0, count) * reduces,
    )


@pytest.mark.parametrize("reduces", [False, True])
def test_list_scheduling_keeps_its_bound(reduces):
    """At most 1 + (4 S - 4) / M times the work of the busiest resource, and the longest reduction; 200 instances here,
    10,000 in `benchmarks/spp_bound.py`."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        stages, micro_batches = random_stages(rng, reduces=reduces), int(2 ** rng.integers(0, 6))
        count = len(stages.forward_s)
        listed = list_schedule(stages, micro_batches)
        factor = 1.0 + (4 * count - 4) / micro_batches
        assert listed.seconds <= factor * micro_batches * stages.load_s * (1 + 1e-9) + stages.reduce_s.max()
        assert listed.seconds >= stages.lower_bound_s(micro_batches) * (1 - 1e-9)
        read_order(listed.order, count, count, micro_batches)


def test_registers_hold_back_fast_ranks():
    """With as many registers as ranks follow it is 1F1B, with one a micro-batch at a time; no rank holds more."""
    rng = np.random.default_rng(2)
    for _ in range(20):
        stages = random_stages(rng, reduces=False)
        count, micro_batches = len(stages.forward_s), 8
        registers = rng.integers(1, 5, count).tolist()
        listed = list_schedule(stages, micro_batches, registers)
        assert all(most <= allowed for most, allowed in zip(listed.alive, registers, strict=True))
        alone = stages.forward_s.sum() + stages.backward_s.sum() + stages.onward_s.sum() + stages.back_s.sum()
        assert list_schedule(stages, micro_batches, [1] * count).seconds == pytest.approx(micro_batches * alone)
    even = Stages(
        forward_s=np.ones(4), backward_s=np.full(4, 2.0), onward_s=np.zeros(3), back_s=np.zeros(3), reduce_s=np.zeros(4)
    )
    assert list_schedule(even, 8, [4, 3, 2, 1]).order == write_order("1f1b", 4, 4, 8)


def test_order_keeps_fast_links_together(mlp):
    space = PlanSpace(Problem.build(mlp(), cube_mesh(), {"global_batch": 16}))
    order = recursive_order(space)
    quads = {frozenset(order[:4]), frozenset(order[4:])}
    assert quads == {frozenset(range(4)), frozenset(range(4, 8))}


GPT = "gpt:layers=2,hidden=256,heads=4,seq_len=128,vocab_size=4096"


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("model", ["mlp", GPT])
def test_span_costs_are_those_of_the_price(mlp, model, zero):
    """State, reduction and update of a stage are those of the span that it holds. GPT reads its embedding twice."""
    graph = mlp((512, 2048, 1024, 512)) if model == "mlp" else zoo.build(model)
    space = PlanSpace(Problem.build(graph, parse_cluster("4xA100"), {"global_batch": 4096}))
    whole = StagedPlan(stages=(StageChoice(end=space.num_units, devices=(0, 1, 2, 3)),), num_micro_batches=1, zero=zero)
    lowered = lower_staged(space, whole)
    (row,) = space.evaluator.evaluate(lowered).ranks
    chosen = data_parallel(space.evaluator, 2)
    units, tied = UnitsInOrder.of(space.evaluator, chosen), TiedUnits(space.evaluator, chosen)
    costs = SpanCosts(space, units, tied, lowered.layout.stages[0], 4096.0, zero)
    span, step_s = (0, space.num_units), float(space.evaluator.settings(zero).step_s)
    assert costs.reduce_s[span] == pytest.approx(float(row.sync_s))
    assert costs.after_s[span] - costs.reduce_s[span] == pytest.approx(float(row.optimizer_s) + step_s)
    state = float(row.parameter_bytes + row.gradient_bytes + row.optimizer_bytes)
    assert costs.state_bytes[span] == pytest.approx(state)


def test_units_are_priced_together_as_each_by_itself():
    """Every recompute mode, behind the placement that the unit before sends, with tensor parallelism under ZeRO. The
    embedding sends partial sums, which the first layer adds up."""
    graph = zoo.build("llama:layers=2,hidden=256,heads=4,seq_len=128,vocab_size=4096")
    space = PlanSpace(Problem.build(graph, parse_cluster("4xA100"), {"global_batch": 64}))
    evaluator, units = space.evaluator, space.linkage.blocks.units
    chosen = next(strategy.signatures for strategy in megatron_strategies(space) if strategy.tp == 2)
    (layout,) = evaluator.layout_of([((0, 1, 2, 3), (2, 2))]).stages
    stage = Stage(layout.axes, layout.links, layout.hardware, np.array([True, False]), 16.0)
    found = UnitsInOrder.of(evaluator, chosen).costs(stage)
    incoming, sends_sums = np.full(2, BROADCAST), False
    for number, unit in enumerate(units):
        for row, mode in enumerate(RECOMPUTE_MODES):
            segment = evaluator.segment(number, by_type(evaluator, chosen), evaluator.masks(unit.type)[mode])
            assert found[row, number].tobytes() == evaluator.unit_cost(segment, incoming, stage).tobytes()
        incoming = evaluator.crossing_placement(segment)
        sends_sums |= PARTIAL in incoming.tolist()
    assert sends_sums and found["forward_comm_s"].any()
    assert (found["zero_parameters"] < found["parameters"]).any()


def random_network():
    rates = np.random.default_rng(0).uniform(0.2, 20.0, (6, 6))
    return on_matrix(np.minimum(rates, rates.T))


@pytest.mark.parametrize("cluster", [cube_mesh(), random_network()], ids=["cube mesh", "random"])
def test_plans_on_a_network_are_verified(gpt, cluster):
    """Verified, and of the same price when read back."""
    problem = Problem.build(gpt(layers=6, hidden=64), cluster, {"global_batch": 24})
    found = search(problem, Budget.parse(60), searcher="spp")
    assert found.plan.search.searchers["spp"] == found.step_time_s
    again = Plan.from_json(json.loads(json.dumps(found.plan.to_json())))
    assert price(problem, again) == found.plan.estimate


@pytest.mark.parametrize("tiled", [False, True])
def test_channels_without_time_and_tiles_are_special_cases_of_channels_and_stages(tiled):
    """Stages that begin at no multiple of their size take for ever; channels take no time."""
    layers, devices = 9, 12
    rng = np.random.default_rng(0)
    work, speed = rng.uniform(0.5, 2.0, layers), rng.uniform(0.5, 1.0, (devices, devices + 1))

    def seconds(behind, place, size):
        found = np.full((layers + 1, layers + 1), np.inf)
        for first, last in itertools.combinations(range(layers + 1), 2):
            found[first, last] = work[first:last].sum() / (size * speed[place, size]) + 0.01 * behind
        return found

    def of_tiles(behind, place, size):
        return np.full((layers + 1, layers + 1), np.inf) if tiled and place % size else seconds(behind, place, size)

    def nothing(place, size, following):
        return np.zeros(layers + 1)

    sizes = [1, 2, 3, 4, 6, 12]
    found = list(partitions(layers, devices, sizes, seconds, None, devices, tiled=tiled))
    assert found == list(partitions(layers, devices, sizes, of_tiles, nothing, devices))
    assert len(found) == layers

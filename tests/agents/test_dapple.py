"""DAPPLE's planner against a simulation of its pipelines and against brute force."""

import itertools
import math

import numpy as np
import pytest

from agents import Budget, search
from agents.planners.dapple import DappleSearch, layers_of
from agents.planners.dapple_devices import Places
from agents.planners.dapple_formulas import Layers, latency, placements
from agents.planners.kernels.dapple import latency_s
from agents.planners.staged_plan import StageChoice, StagedPlan, lower_staged
from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.space.space import PlanSpace


class Wires:
    """Links with one rate inside hosts and another between them."""

    def reduce_s(self, counts):
        replicas = sum(counts)
        return 2.0 * (replicas - 1) / replicas * (1.0 if sum(map(bool, counts)) > 1 else 0.1)

    def send_s(self, senders, receivers):
        is_local = all(a * sum(receivers) == b * sum(senders) for a, b in zip(senders, receivers, strict=True))
        return (0.01 if is_local else 0.3) / max(sum(senders), sum(receivers))


def by_rule(forward, backward, reduce, count):
    """The equations of section 4.1 for one pipeline, word by word."""
    pivot = len(forward) - 1
    for s in range(len(forward) - 2, -1, -1):
        between = sum(forward[a] + backward[a] for a in range(s + 1, pivot))
        if (count - 1) * (forward[s] + backward[s]) > (count - 1) * (forward[pivot] + backward[pivot]) + between:
            pivot = s
    ends = [
        reduce[s] + (sum(backward[s : pivot + 1]) if s <= pivot else -sum(backward[pivot : s + 1]))
        for s in range(len(forward))
    ]
    return sum(forward[: pivot + 1]) + (count - 1) * (forward[pivot] + backward[pivot]) + max(ends)


def test_latency_is_that_of_the_paper():
    rng = np.random.default_rng(0)
    for stages in (1, 2, 5, 9):
        forward, backward, reduce = rng.random((3, stages, 50)) ** 2
        found = latency([*forward], [*backward], [*reduce], 6.0)
        expected = [by_rule(forward[:, i], backward[:, i], reduce[:, i], 6.0) for i in range(50)]
        assert found == pytest.approx(expected, rel=1e-12)
        for i in range(50):
            parts = np.zeros((5, stages + 1))
            parts[:3, :stages] = forward[:, i], backward[:, i], reduce[:, i]
            parts[3:, 1:] = np.cumsum(parts[:2, :stages], axis=1)
            assert latency_s(parts, stages - 1, 6.0) == found[i]


def test_equal_stages_take_as_long_as_1f1b():
    """Without communication: (M + S - 1) passes forward and backward."""
    ones = [np.ones(1)] * 4
    assert latency(ones, [2.0 * one for one in ones], [np.zeros(1)] * 4, 10.0)[0] == 13 * 3.0


def test_the_three_policies():
    fresh = placements((4, 4, 4), (4, 4, 4), 6)
    assert fresh == [(4, 2, 0), (2, 2, 2)]
    used = placements((2, 4, 2), (4, 4, 4), 4)
    # Fresh first, append first (and, of used hosts alone, scatter first).
    assert used == [(0, 4, 0), (2, 0, 2)]
    assert placements((1, 3), (4, 4), 4) == [(1, 3)]
    assert placements((3, 3), (4, 4), 2) == [(2, 0), (1, 1)]
    for free in itertools.product(range(5), repeat=3):
        for wanted in range(1, sum(free) + 1):
            for counts in placements(free, (4, 4, 4), wanted):
                assert sum(counts) == wanted
                assert all(0 <= mine <= there for mine, there in zip(counts, free, strict=True))


def made_up(seed, units=5, devices=4):
    """Layers whose replicas share 4 samples."""
    rng = np.random.default_rng(seed)
    shares = [0, *(math.ceil(4 / r) / 4 for r in range(1, devices + 1))]

    def summed(of_units):
        return np.concatenate([[0.0], np.cumsum(of_units)])

    forward, backward, saved = rng.random((3, units)) + 0.1
    weights = rng.random(units) ** 3
    return Layers(
        num_micro_batches=6.0,
        most_replicas=devices,
        forward_s=np.array([summed(share * forward) for share in shares]),
        backward_s=np.array([summed(share * backward) for share in shares]),
        crossing_bytes=np.concatenate([[0.0], rng.random(units)]),
        gradient_bytes=summed(weights),
        state_bytes=summed(weights),
        saved_bytes=summed(saved),
    )


def every_plan(layers, sizes, units):
    """(latency, memory of each stage) of all plans whose stages are placed by the three policies."""
    network = Wires()

    def extend(stages, begin, free):
        total = sum(free)
        for counts in [free, *(c for n in range(1, total) for c in placements(free, sizes, n))]:
            left = tuple(a - b for a, b in zip(free, counts, strict=True))
            ends = [units] if not sum(left) else range(begin + 1, units)
            for end in ends:
                longer = [*stages, (begin, end, counts)]
                if end == units:
                    yield longer
                else:
                    yield from extend(longer, end, left)

    for stages in extend([], 0, sizes):
        forward, backward, reduce, memory = [], [], [], []
        for number, (begin, end, counts) in enumerate(stages):
            r = sum(counts)
            if number:
                sent = network.send_s(stages[number - 1][2], counts) * layers.crossing_bytes[begin]
                forward, backward, reduce = [*forward, sent], [*backward, sent], [*reduce, 0.0]
            forward.append(layers.forward_s[r, end] - layers.forward_s[r, begin])
            backward.append(layers.backward_s[r, end] - layers.backward_s[r, begin])
            weights = layers.gradient_bytes[end] - layers.gradient_bytes[begin]
            whole = network.reduce_s(counts) * weights
            reduce.append(whole)
            kept = min(len(stages) - number, layers.num_micro_batches)
            memory.append(weights + kept * (layers.saved_bytes[end] - layers.saved_bytes[begin]) / r)
        if len(stages) > 1:
            yield by_rule(forward, backward, reduce, layers.num_micro_batches), max(memory)


@pytest.mark.parametrize("memory", [math.inf, 2.0])
@pytest.mark.parametrize("sizes", [(2, 2), (1, 1, 1, 1)])
def test_search_is_near_the_best_of_all_plans(sizes, memory):
    """Only the best plan of each state is extended, so the search may miss the optimum, but not by much."""
    ratios = []
    for seed in range(6):
        layers = made_up(seed)
        plans = [seconds for seconds, used in every_plan(layers, sizes, 5) if used <= memory]
        search = DappleSearch(layers, Places(Wires(), sizes), memory_bytes=memory)
        found = [plan.seconds for stages, plan in search.run().items() if stages > 1]
        assert bool(found) == bool(plans)
        ratios += [min(found) / min(plans)] if found else []
    assert len(ratios) >= 4
    assert min(ratios) >= 1.0 - 1e-12
    assert sorted(ratios)[len(ratios) // 2] <= 1.0 + 1e-12
    assert max(ratios) < 1.1


def test_data_parallelism_hides_what_the_last_backward_pass_covers():
    """One stage: gradients are sent from back to front while the pass goes on, worked out one layer after the other."""
    layers = made_up(7)
    search = DappleSearch(layers, Places(Wires(), (2, 2)), memory_bytes=math.inf)
    plan = search.run()[1]
    weights, spent = np.diff(layers.gradient_bytes), np.diff(layers.backward_s[4])
    clock = sent = 0.0
    for layer in range(4, -1, -1):
        clock += spent[layer]
        sent = max(sent, clock) + Wires().reduce_s((2, 2)) * weights[layer]
    busy = (layers.forward_s[4, -1] + layers.backward_s[4, -1]) * 6.0
    assert plan.seconds == pytest.approx(busy + max(0.0, sent - clock), rel=1e-12)


@pytest.mark.parametrize("cluster", ["4x1xV100@10Gbit", "2x2xV100@25Gbit"])
def test_a_plan_by_its_name(mlp, cluster):
    problem = Problem.build(mlp((512, 4096, 256, 2048, 512)), parse_cluster(cluster), {"global_batch": 64})
    found = search(problem, Budget.parse(60), searcher="dapple")
    assert found.record.found_by == "dapple"
    best = search(problem, Budget.parse(60), searcher="expert").step_time_s
    assert 0.5 * best < found.step_time_s < 2.0 * best


def test_layers_shared_sample_by_sample(mlp):
    """Five samples on two replicas are three."""
    problem = Problem.build(mlp((64, 4096, 64)), parse_cluster("4xV100"), {"global_batch": 20})
    space = PlanSpace(problem)
    layers = layers_of(space, 4, "none")
    assert layers.most_replicas == 4
    assert layers.forward_s[3, -1] == layers.forward_s[4, -1]
    whole, single = layers_of(space, 4, "none"), layers_of(space, 20, "none")
    assert whole.forward_s[1, -1] > single.forward_s[1, -1]
    assert whole.gradient_bytes[-1] == single.gradient_bytes[-1]


def test_a_longer_warm_up_hides_slow_exchanges(mlp):
    """Table 3 of the paper: policy PB over PA is 1.0 where exchanges are short, more where they are long."""
    ratios = []
    for cluster in ("4xA100-80GB", "4x1xV100@10Gbit"):
        training = {"global_batch": 256, "trainer": "automap"}
        space = PlanSpace(Problem.build(mlp((2048,) * 9), parse_cluster(cluster), training))
        stages = tuple(StageChoice(end=space.num_units * (i + 1) // 4, devices=(i,)) for i in range(4))
        plans = [StagedPlan(stages=stages, num_micro_batches=16, schedule=kind) for kind in ("1f1b", "eager-1f1b")]
        found = [space.evaluator.evaluate(lower_staged(space, plan)) for plan in plans]
        ratios.append(found[0].step_time_s / found[1].step_time_s)
        assert found[1].ranks["activation_bytes"][0] > found[0].ranks["activation_bytes"][0]
    assert ratios[0] == pytest.approx(1.0, abs=0.1)
    assert ratios[1] > max(1.01, ratios[0])

"""The 0-1 program against brute force and elimination."""

import itertools

import numpy as np
import pytest

from agents import Budget, search
from agents.planners.elimination import minimum, solve
from agents.planners.ilp import program
from automap.cluster import parse_cluster
from automap.cost_graph.graph import CostGraph
from automap.cost_graph.sensitivities import sensitivities
from automap.cost_graph.weighted_graph import Scalars
from automap.problem import Problem
from automap.space.space import PlanSpace
from ir import zoo


def random_graph(rng, sizes, factors):
    tables = tuple((nodes, rng.random([sizes[n] for n in nodes])) for nodes in factors)
    return Scalars(constant=0.0, nodes=tuple(rng.random(n) for n in sizes), factors=tables)


def every(graph):
    return itertools.product(*(range(len(c)) for c in graph.nodes))


SIZES, FACTORS = (3, 4, 3, 2, 3), [(0, 1), (1, 2), (0, 1, 2), (2, 3), (3, 4), (0, 4)]


def test_without_limits_it_is_brute_force():
    rng = np.random.default_rng(0)
    for _ in range(15):
        graph = random_graph(rng, SIZES, FACTORS)
        assert graph.value(program(graph, [], [])) == pytest.approx(min(map(graph.value, every(graph))), abs=1e-6)


def test_with_limits_it_is_brute_force_over_what_fits():
    """Two ranks, limits that the fastest assignment breaks; memory has tables that time has not."""
    rng = np.random.default_rng(1)
    bound = 0
    for _ in range(15):
        graph = random_graph(rng, SIZES, FACTORS)
        memory = [random_graph(rng, SIZES, [(0, 1), (1, 3)]) for _ in range(2)]
        limits = [float(np.quantile([m.value(p) for p in every(m)], 0.1)) for m in memory]
        fitting = [p for p in every(graph) if all(m.value(p) <= x for m, x in zip(memory, limits, strict=True))]
        best = min(map(graph.value, fitting), default=None)
        found = program(graph, memory, limits)
        if best is None:
            assert found is None
            continue
        assert found in fitting
        assert graph.value(found) == pytest.approx(best, abs=1e-6)
        for known in (best, 1.1 * best):
            assert graph.value(program(graph, memory, limits, known)) == pytest.approx(best, abs=1e-6)
        bound += best > min(map(graph.value, every(graph))) + 1e-6
    assert bound > 5


def make(graph, cluster, batch, fix=None, **more):
    hints = {"fix": fix or {}, **more}
    training = {"global_batch": batch, "memory_confidence": 0.5}
    return PlanSpace(Problem.build(graph, parse_cluster(cluster), training, hints))


def any_graph(rng):
    """Nodes of unlike sizes, tables of two and of three of them, in half of the graphs with many equal sums."""
    count = int(rng.integers(2, 9))
    sizes = [int(size) for size in rng.integers(1, 5, count)]
    nodes = [tuple(sorted(rng.choice(count, int(rng.integers(2, min(count, 3) + 1)), replace=False).tolist()))
             for _ in range(int(rng.integers(1, 2 * count)))]  # fmt: skip
    draw = rng.random if rng.random() < 0.5 else lambda shape: rng.integers(0, 3, shape).astype(float)
    tables = tuple((some, draw([sizes[n] for n in some])) for some in dict.fromkeys(nodes))
    return Scalars(constant=float(rng.random()), nodes=tuple(draw(size) for size in sizes), factors=tables)


def test_elimination_is_the_program_wherever_it_is_exact(monkeypatch):
    """Where it is not, because no table may be larger than a few entries, it is never below the program."""
    rng = np.random.default_rng(2)
    exact, above = 0, 0
    for number in range(80):
        monkeypatch.setattr("agents.planners.elimination.LARGEST_TABLE", 1 << 21 if number % 2 else 12)
        graph = any_graph(rng)
        picked, is_proven = minimum(graph, [0] * len(graph.nodes))
        by_program = graph.value(program(graph, [], []))
        exact += is_proven
        assert is_proven or not number % 2
        if is_proven:
            assert graph.value(picked) == pytest.approx(by_program, abs=1e-5)
        else:
            assert graph.value(picked) >= by_program - 1e-5
            above += graph.value(picked) > by_program + 1e-5
    assert 45 < exact < 80
    assert above > 0


SMALL = "layers=2,hidden=32,heads=2,seq_len=16,vocab_size=64"
MODELS = {
    "gpt": (f"gpt:{SMALL}", "2xA100", {}, 6),
    "gpt in two stages of two hosts": (f"gpt:{SMALL}", "2x2xV100@10Gbit", {"pp": 2, "num_micro_batches": 4}, 2),
    "bert": (f"bert:{SMALL}", "2xA100", {}, 6),
    "mixture of experts": (f"moe:{SMALL},kv_heads=2,ffn=64,experts=4", "2xA100", {}, 6),
}
"""Model, cluster, what is fixed, number of skeletons."""


@pytest.mark.parametrize("name", MODELS)
def test_skeletons_of_models_agree_with_elimination(name):
    """Skeletons of random plans, at the sensitivities of these plans."""
    model, cluster, fix, count = MODELS[name]
    s = make(zoo.build(model), cluster, 8, fix)
    values = set()
    for plan in map(tuple, s.random_batch(np.random.default_rng(0), count).tolist()):
        graph = CostGraph(s, plan[: s.first.signature])
        start = graph.picked(plan)
        at = sensitivities(graph.units, graph.chosen(start))
        scalars = graph.weighted(at.time).scalars([np.arange(len(node.values)) for node in graph.nodes])
        by_elimination, is_proven = solve(graph, at.time, start)
        assert is_proven
        assert scalars.value(program(scalars, [], [])) == pytest.approx(scalars.value(by_elimination), rel=1e-5)
        values.add(scalars.value(by_elimination))
    assert len(values) > count // 2


def run(searcher, space, evaluations, *, seed=0):
    return search(space.problem, Budget(evaluations=evaluations), searcher=searcher, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("short", [0, 60_000_000])
def test_the_search_is_as_good_as_elimination_and_the_same_again(gpt, short):
    """This holds too with less memory than the fastest plan needs beside what the trainer reserves."""
    reserve = {"memory_reserve_bytes": 15 * 2**30 - short} if short else {}
    s = make(gpt(layers=4, hidden=256, vocab=4096), "2x2xV100@10Gbit", 32, **reserve)
    found, again = run("ilp", s, 300), run("ilp", s, 300, seed=1)
    other = run("elimination", s, 300)
    assert found.plan.stages == again.plan.stages
    assert found.evaluations == again.evaluations
    assert found.plan.estimate.step_time_s <= 1.02 * other.plan.estimate.step_time_s
    assert found.plan.search.found_by == "ilp"

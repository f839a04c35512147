"""Elimination against brute force."""

import itertools

import numpy as np
import pytest

from agents import Budget, search
from agents.planners.elimination import least, solve
from automap.cluster import parse_cluster
from automap.cost_graph.graph import CostGraph, Scalars
from automap.cost_graph.message_passing import candidates
from automap.cost_graph.sensitivities import sensitivities
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.space.templates import templates


def random_graph(rng, sizes, factors):
    tables = tuple((nodes, rng.normal(size=[sizes[n] for n in nodes])) for nodes in factors)
    return Scalars(constant=float(rng.normal()), nodes=tuple(rng.normal(size=n) for n in sizes), factors=tables)


def brute(scalars):
    return min(map(scalars.value, itertools.product(*(range(len(c)) for c in scalars.nodes))))


GRAPHS = {
    "chain": ((3, 4, 2, 5), [(0, 1), (1, 2), (2, 3)]),
    "ring, as of a repeated block": ((3, 2, 4, 3), [(0, 1), (1, 2), (2, 3), (0, 3)]),
    "tree and a lonely node": ((2, 3, 2, 3, 4), [(0, 1), (0, 2), (0, 3)]),
    "three readers": ((3, 3, 3, 3), [(0, 1), (0, 1, 2), (0, 2, 3), (1, 3), (2, 3)]),
    "complete": ((2, 3, 2, 3, 2), list(itertools.combinations(range(5), 2))),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_elimination_is_brute_force(name):
    rng = np.random.default_rng(0)
    for _ in range(20):
        graph = random_graph(rng, *GRAPHS[name])
        picked, is_proven = least(graph, [0] * len(graph.nodes))
        assert is_proven
        assert graph.value(picked) == pytest.approx(brute(graph), abs=1e-12)


def test_message_passing_keeps_an_optimum_and_its_bound_holds():
    rng = np.random.default_rng(1)
    gone = 0
    for _ in range(50):
        graph = random_graph(rng, (4, 5, 4, 3), [(0, 1), (1, 2, 3), (0, 3)])
        left, best, bound = candidates(graph, (0, 0, 0, 0))
        gone += sum(len(c) for c in graph.nodes) - sum(map(len, left))
        optimum = brute(graph)
        assert bound <= optimum + 1e-9
        assert all(v in keep for v, keep in zip(best, left, strict=True))
        kept = min(map(graph.value, itertools.product(*(keep.tolist() for keep in left))))
        assert kept == pytest.approx(optimum, abs=1e-12)
    assert gone > 300


def test_what_is_too_large_is_held_and_freed_in_turn(monkeypatch):
    rng = np.random.default_rng(2)
    monkeypatch.setattr("agents.planners.elimination.LARGEST_TABLE", 30)
    monkeypatch.setattr("agents.planners.elimination.HELD_PASSES", 20)
    proven = []
    for _ in range(20):
        graph = random_graph(rng, (4,) * 5, list(itertools.combinations(range(5), 2)))
        start = [0] * 5
        picked, is_proven = least(graph, start)
        proven.append(is_proven)
        assert not is_proven or graph.value(picked) == pytest.approx(brute(graph), abs=1e-9)
        assert graph.value(picked) <= graph.value(start) + 1e-12
        for n, v in itertools.product(range(5), range(4)):
            assert graph.value(picked) <= graph.value([*picked[:n], v, *picked[n + 1 :]]) + 1e-9
    assert not all(proven)


def make(graph, cluster, batch, fix=None, **more):
    hints = {"fix": fix or {}, **more}
    training = {"global_batch": batch, "memory_confidence": 0.5}
    return PlanSpace(Problem.build(graph, parse_cluster(cluster), training, hints))


@pytest.mark.parametrize("mesh", ["2xV100", "2x2xV100@10Gbit"])
def test_a_skeleton_is_solved_exactly(mlp, mesh):
    """The least of the graph over all signatures of a skeleton, and how far it is from the least exact price."""
    s = make(mlp((256, 1024, 256)), mesh, 8, {"pp": 1, "num_micro_batches": 1})
    skeletons = {v[: s.first.signature] for v in map(tuple, s.random_batch(np.random.default_rng(0), 200).tolist())}
    for skeleton in sorted(skeletons)[:6]:
        graph = CostGraph(s, skeleton)
        start = tuple(0 for _ in graph.nodes)
        at = sensitivities(graph.units, graph.chosen(start))
        scalars = graph.scalars(at.time)
        assert np.prod([float(len(node.values)) for node in graph.nodes]) < 20_000
        picked, _ = solve(graph, at.time, start)
        assert scalars.value(picked) == pytest.approx(brute(scalars), rel=1e-12)


def brute_force(space):
    """Least price of all plans that fit."""
    plans, pending = [], [()]
    while pending:
        prefix = pending.pop()
        if len(prefix) == len(space.slots):
            plans.append(prefix)
        else:
            pending += [(*prefix, int(v)) for v in np.flatnonzero(space.legal(prefix))]
    prices = space.price(np.array(plans))
    return prices[prices[:, 1] <= 0.0, 0].min()


def run(space, evaluations, *, seed=0, searcher="elimination"):
    return search(space.problem, Budget(evaluations=evaluations), searcher=searcher, seed=seed)


@pytest.mark.parametrize(
    ("widths", "cluster", "more"),
    [
        ((64, 4096, 64), "2xV100", {}),
        ((512, 512, 512), "2x1xV100@10Gbit", {}),
        # Beside what the trainer reserves, less memory than both layers take with their state: 8.4 MB.
        ((512, 512, 512), "2x1xV100@10Gbit", {"memory_reserve_bytes": 15 * 2**30 - 7_000_000}),
    ],
)
def test_the_search_finds_the_optimum_of_small_spaces(mlp, widths, cluster, more):
    s = make(mlp(widths), cluster, 8, {"num_micro_batches": 1}, **more)
    assert run(s, 2000).plan.estimate.step_time_s == pytest.approx(brute_force(s), rel=1e-12)


@pytest.mark.slow
def test_never_worse_than_a_template_and_the_same_again(gpt):
    s = make(gpt(layers=4), "2x2xV100@10Gbit", 32)
    first, second = run(s, 1500), run(s, 1500, seed=1)
    prices = s.price(np.array([values for _, values in templates(s)]))
    assert first.plan.estimate.step_time_s <= prices[prices[:, 1] <= 0.0, 0].min()
    assert first.plan.stages == second.plan.stages
    assert first.evaluations == second.evaluations
    assert first.plan.search.found_by == "elimination"

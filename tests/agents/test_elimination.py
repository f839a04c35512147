"""Elimination against brute force."""

import itertools

import numpy as np
import pytest
from small_clusters import cluster_with

from agents import Budget, search
from agents.incumbent import Incumbent
from agents.planners import elimination
from agents.planners.elimination import minimum, propose, solve
from agents.planners.promising_templates import promising_meshes
from agents.planners.skeletons import SkeletonSearch
from agents.sampling.expert import grid_of
from automap.cluster import parse_cluster
from automap.cost_graph.graph import CostGraph
from automap.cost_graph.message_passing import bounds_of_parts, candidates
from automap.cost_graph.sensitivities import sensitivities
from automap.cost_graph.weighted_graph import GraphBuilder, JointClasses, Scalars
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.space.templates import templates
from ir import zoo


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
        picked, is_proven = minimum(graph, [0] * len(graph.nodes))
        assert is_proven
        assert graph.value(picked) == pytest.approx(brute(graph), abs=1e-12)


def classed_graph(rng, sizes, around):
    """A weighted graph with costs of one to three places over classes of values, and the cost of every assignment.

    The costs of an assignment are looked up by themselves, not through the graph.
    """
    costs = [rng.normal(size=n) for n in sizes]
    builder, entries = GraphBuilder([some.copy() for some in costs], JointClasses()), []
    for nodes in around:
        ways, requests = int(rng.integers(1, 4)), int(rng.integers(2, 5))
        table = rng.random((ways, requests)) if len(nodes) > 1 else rng.normal(size=ways)
        codes = tuple(rng.integers(0, requests if place else ways, sizes[n]) for place, n in enumerate(nodes))
        # A tensor that its maker reads itself is charged there, and taken off where another reader wants the same.
        is_charged = len(nodes) == 3 and nodes[0] == nodes[2]
        builder.add(nodes, codes, table, is_charged=is_charged)
        entries.append((nodes, codes, table, is_charged))

    def cost(picked):
        total = 1.5 + sum(float(some[v]) for some, v in zip(costs, picked, strict=True))
        for nodes, codes, table, is_charged in entries:
            at = [code[picked[n]] for n, code in zip(nodes, codes, strict=True)]
            entry = float(table[at[0], at[-1]] if len(at) > 1 else table[at[0]])
            total += entry * (float(at[1] != at[2]) - is_charged) if len(at) == 3 else entry
        return total

    assignments = list(itertools.product(*map(range, sizes)))
    return builder.graph(1.5), {picked: cost(picked) for picked in assignments}


AROUND = [(0,), (0, 1), (1, 0), (2, 2), (1, 2), (3, 0, 2), (0, 1, 3), (1, 1, 2), (2, 0, 0), (3, 1, 3), (2, 3)]
"""Nodes of the costs of `classed_graph`: pairs both ways round, and nodes that occur twice."""


def every(graph):
    """A weighted graph over all values."""
    return graph.scalars([np.arange(len(costs)) for costs in graph.nodes])


def test_a_weighted_graph_adds_up_what_was_put_in():
    rng = np.random.default_rng(3)
    for _ in range(20):
        graph, expected = classed_graph(rng, (3, 4, 2, 3), AROUND)
        left = [np.sort(rng.choice(len(costs), 2, replace=False)) for costs in graph.nodes]
        whole, some = every(graph), graph.scalars(left)
        for picked, cost in expected.items():
            assert whole.value(picked) == pytest.approx(cost, abs=1e-12)
        for few in itertools.product(range(2), repeat=4):
            picked = tuple(int(keep[v]) for keep, v in zip(left, few, strict=True))
            assert some.value(few) == pytest.approx(expected[picked], abs=1e-12)


def test_message_passing_keeps_an_optimum_and_its_bound_holds():
    rng = np.random.default_rng(1)
    gone = 0
    for _ in range(50):
        graph, expected = classed_graph(rng, (4, 5, 4, 3), AROUND)
        left, best, bound = candidates(graph, (0, 0, 0, 0))
        gone += sum(len(c) for c in graph.nodes) - sum(map(len, left))
        optimum = min(expected.values())
        assert bound <= optimum + 1e-9
        assert all(v in keep for v, keep in zip(best, left, strict=True))
        kept = min(expected[picked] for picked in itertools.product(*(keep.tolist() for keep in left)))
        assert kept == pytest.approx(optimum, abs=1e-12)
    assert gone > 400


def test_message_passing_leaves_out_what_costs_more_than_what_is_known():
    """Every value of which an assignment costs less than what is known stays."""
    rng = np.random.default_rng(4)
    gone = 0
    for _ in range(50):
        graph, expected = classed_graph(rng, (4, 5, 4, 3), AROUND)
        known = float(np.quantile(list(expected.values()), 0.05))
        left, _, bound = candidates(graph, (0, 0, 0, 0), known)
        gone += sum(len(c) for c in graph.nodes) - sum(map(len, left))
        assert bound <= known + 1e-9
        for picked, cost in expected.items():
            assert cost > known or all(v in keep for v, keep in zip(picked, left, strict=True))
    assert gone > 100


def test_bounds_of_parts_are_below_the_best_of_each():
    rng = np.random.default_rng(5)
    close = 0
    for _ in range(30):
        graph, expected = classed_graph(rng, (3, 4, 3, 4), [(0, 1), (1, 0), (2, 3), (3, 3), (2, 3)])
        found, _ = bounds_of_parts(graph, (0, 0, 1, 1))
        assert len(found) == 2
        gap = min(expected.values()) - graph.constant - found.sum()
        assert gap >= -1e-9
        close += gap < 1e-9
    # Pairs are trees, on which message passing is exact.
    assert close > 25


def test_what_is_too_large_is_held_and_freed_in_turn(monkeypatch):
    rng = np.random.default_rng(2)
    monkeypatch.setattr("agents.planners.elimination.LARGEST_TABLE", 30)
    monkeypatch.setattr("agents.planners.elimination.HELD_PASSES", 20)
    proven = []
    for _ in range(20):
        graph = random_graph(rng, (4,) * 5, list(itertools.combinations(range(5), 2)))
        start = [0] * 5
        picked, is_proven = minimum(graph, start)
        proven.append(is_proven)
        assert not is_proven or graph.value(picked) == pytest.approx(brute(graph), abs=1e-9)
        assert graph.value(picked) <= graph.value(start) + 1e-12
        for n, v in itertools.product(range(5), range(4)):
            assert graph.value(picked) <= graph.value([*picked[:n], v, *picked[n + 1 :]]) + 1e-9
    assert not all(proven)


def test_all_tables_of_a_solve_are_bounded(monkeypatch):
    """A lattice that would need large tables is solved with small ones, and near its best."""
    rng, side = np.random.default_rng(3), 5
    near = [(n, n + 1) for n in range(side * side) if (n + 1) % side]
    near += [(n, n + side) for n in range(side * (side - 1))]
    graph = random_graph(rng, (3,) * side * side, near)
    start = [0] * side * side
    best, is_proven = minimum(graph, start)
    assert is_proven
    made = []
    solve_in_order = elimination.eliminate
    monkeypatch.setattr(elimination, "eliminate", lambda *args: made.append(args[2]) or solve_in_order(*args))
    monkeypatch.setattr(elimination, "MOST_ENTRIES", 2_000)
    monkeypatch.setattr(elimination, "MOST_ENTRIES_IN_ALL", 20_000)
    picked, is_proven = minimum(graph, start)
    assert not is_proven and len(made) > 2
    assert all(order.entries <= 2_000 for order in made[:1]) and sum(order.entries for order in made) <= 20_000
    assert graph.value(picked) < 0.5 * graph.value(start) + 0.5 * graph.value(best)


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
        scalars = every(graph.weighted(at.time))
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


def test_plans_between_two_prices_of_memory_fill_it(monkeypatch):
    """Small devices: from one price of memory to the next many nodes change at once, and leave memory empty."""
    cluster = cluster_with(1.92, "8xV100-16GB")
    graph = zoo.build("gpt:layers=8,hidden=1024,heads=16,seq_len=512,vocab_size=32000")
    space = PlanSpace(Problem.build(graph, cluster, {"global_batch": 32}))
    gains = []
    for row in map(tuple, promising_meshes(space, grid_of(space))[:8].tolist()):
        best_s = []
        for share in (0.0, 0.1):
            monkeypatch.setattr(elimination, "BETWEEN", share)
            search = SkeletonSearch(Incumbent(space, Budget(evaluations=10_000), searcher="elimination"), propose)
            search.solve(row, rounds=1)
            best_s.append(search.incumbent.best_s)
        if best_s[0] < float("inf"):
            gains.append(best_s[0] / best_s[1])
    assert min(gains) >= 1.0 and max(gains) > 1.1

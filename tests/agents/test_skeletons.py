"""Skeletons: the neighbours of a plan that are tried are legal, and polished plans are the best of their kind."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from small_clusters import cluster_with

from agents import Budget
from agents.incumbent import Incumbent
from agents.learning.problems import generate
from agents.planners import descents, recompute_less, skeletons
from agents.planners.descents import descend
from agents.planners.elimination import propose
from agents.planners.linearization import ROUNDS_TO_FIT, Candidate, leads_on
from agents.planners.neighbouring_skeletons import with_other_shares
from agents.planners.promising_templates import promising_meshes
from agents.planners.skeletons import SkeletonSearch
from agents.sampling.expert import grid_of
from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.space.space import PlanSpace
from ir import zoo


@pytest.mark.parametrize(
    ("cluster", "hints"),
    [
        ("2x2xV100@10Gbit", {}),
        ("2xV100-16GB+2xP100-16GB", {}),
        ("4xA100", {"fix": {"pp": 2}}),
        ("4xA100", {"constraints": [{"scope": "h.1.*", "stage": 1}]}),
        ("4xA100", {"constraints": [{"scope": "h.0.*", "recompute": True}], "fix": {"pp": 2}}),
    ],
)
def test_neighbours_are_plans_of_the_space(gpt, cluster, hints):
    space = PlanSpace(Problem.build(gpt(layers=4), parse_cluster(cluster), {"global_batch": 8}, hints))
    search = SkeletonSearch(Incumbent(space, Budget(evaluations=100), searcher="elimination"), propose)
    count = 0
    for row in space.random_batch(np.random.default_rng(0), 12).tolist():
        for plan in map(tuple, search.neighbours(tuple(row)).tolist()):
            assert space.repair(plan) == plan
            assert plan[: space.first.signature] != tuple(row[: space.first.signature])
            count += 1
    assert count > 50


def rows_of(space, tp):
    """Values and prices of the templates whose inner axis has `tp` ranks, which may split anything."""
    grid = grid_of(space)
    mine = [index for index, row in enumerate(grid.values.tolist()) if space.shape(row).tp == tp]
    return grid.values[mine], grid.prices[mine]


def test_shares_are_tried_with_the_numbers_of_micro_batches_that_they_divide():
    """On 8 A100 and 8 V100 the best shares on two axes that both split the batch need other micro-batches."""
    cluster = parse_cluster("8xA100+8xV100-32GB@50Gbit")
    space = PlanSpace(Problem.build(zoo.build("resnet50"), cluster, {"global_batch": 768}, {"fix": {"pp": 1}}))
    values, prices = rows_of(space, tp=8)
    best = tuple(values[prices[:, 0].argmin()].tolist())
    others = with_other_shares(space, best)
    assert len(set(others)) == len(others) and best not in others
    assert all(space.repair(plan) == plan for plan in others)
    fastest = min(others, key=lambda plan: space.price(np.array([plan]))[0, 0])
    at, shares = space.first.micro_batches, space.first.shares
    assert space.price(np.array([fastest]))[0, 0] < 0.97 * prices[:, 0].min()
    assert fastest[at] != best[at] and fastest[shares] != best[shares]


def test_what_does_not_fit_is_cut_anew():
    """A mixture of experts whose stages are nearly full: all signatures overflow on even stages of this mesh."""
    problem = generate(100_130).problem
    ((name, device),) = problem.cluster.devices.items()
    less = replace(problem.cluster, devices={name: replace(device, memory_GiB=0.993 * device.memory_GiB)})
    # A trainer that keeps the scores of attention.
    training = replace(problem.training, trainer="automap")
    space = PlanSpace(replace(problem, cluster=less, training=training))
    values, prices = grid_of(space)
    mesh = [
        i for i, row in enumerate(values.tolist()) if (lambda s: (s.pp, s.tp, s.middle))(space.shape(row)) == (14, 2, 4)
    ]
    near = tuple(values[min(mesh, key=lambda i: prices[i, 1])].tolist())
    search = SkeletonSearch(Incumbent(space, Budget(evaluations=4_000), searcher="elimination"), propose)
    search.solve(near, rounds=1)
    assert search.incumbent.best is None and search.incumbent.least_overflow < 0.05
    descend(search, near)
    first, best = space.first, search.incumbent.best
    assert best is not None and best[first.cut : first.recompute] != near[first.cut : first.recompute]
    assert search.incumbent.best_s < prices[prices[:, 1] <= 0.0, 0].min() / 3


def test_no_two_changes_of_signatures_improve_a_polished_plan(monkeypatch):
    """All pairs of changes are tried here; with single changes alone the plan would be 1 % slower at least."""
    model = zoo.build("gpt:layers=2,hidden=256,heads=4,seq_len=64,vocab_size=50304")
    space = PlanSpace(Problem.build(model, parse_cluster("8xA100"), {"global_batch": 64}))
    templates, prices = grid_of(space)
    reached = {}
    for paired in (0, 10_000):
        monkeypatch.setattr(skeletons, "PAIRED", paired)
        # The best template of four replicas in pairs that share tensors.
        values = next(
            values
            for values in map(tuple, templates[prices[:, 0].argsort()].tolist())
            if (space.shape(values).pp, space.shape(values).tp, space.shape(values).dp) == (1, 2, 4)
        )
        search = SkeletonSearch(Incumbent(space, Budget(), searcher="elimination"), propose)
        search.begin_with(np.array([values]))
        search._polish(values)
        (_, reached[paired]), plan = search.best[values[: space.first.signature]]
    assert reached[10_000] < 0.99 * reached[0]
    graph = search._graph(plan[: space.first.signature])
    picked = graph.picked(plan)
    moves = [(n, v) for n, node in enumerate(graph.nodes) for v in range(len(node.values)) if v != picked[n]]
    pairs = [pair for pair in itertools.combinations(moves, 2) if pair[0][0] != pair[1][0]]
    seconds, overflow = space.price(graph.moved(picked, [*([move] for move in moves), *pairs])).T
    assert (seconds[overflow <= 0.0] >= reached[10_000]).all()


def test_changes_that_nearly_fit_are_made_to_fit(monkeypatch):
    """One rank of this pipeline must recompute more where a group's tensors are whole, which is faster all the same."""
    model = zoo.build("gpt:layers=8,hidden=512,heads=8,seq_len=512,vocab_size=32000")
    cluster = cluster_with(2.4, "2x4xV100-16GB@25Gbit")
    space = PlanSpace(Problem.build(model, cluster, {"global_batch": 64}, {"fix": {"pp": 2}}))
    values, prices = rows_of(space, tp=4)
    fitting = np.flatnonzero(prices[:, 1] <= 0.0)
    rows = fitting[prices[fitting, 0].argsort()]
    reached = {}
    for made_to_fit in (0, 16):
        monkeypatch.setattr(recompute_less, "MADE_TO_FIT", made_to_fit)
        for row in rows.tolist():
            search = SkeletonSearch(Incumbent(space, Budget(), searcher="elimination"), propose)
            search.begin_with(values[[row]])
            search._polish(tuple(values[row].tolist()))
            reached[row, made_to_fit] = search.incumbent.best_s
    gains = [reached[row, 0] / reached[row, 16] for row in rows.tolist()]
    assert min(gains) >= 1.0 and max(gains) > 1.05


def test_a_skeleton_is_solved_again_at_a_plan_that_is_much_better(monkeypatch):
    """Templates of a small BERT over a slow network say little of where the best signatures of their meshes wait."""
    graph = zoo.build("bert:layers=4,hidden=1024,heads=16,ffn=4096,seq_len=128,vocab_size=32000")
    space = PlanSpace(Problem.build(graph, parse_cluster("2x4xV100-16GB@25Gbit"), {"global_batch": 64}))
    rows = promising_meshes(space, grid_of(space))[:12].tolist()

    def reached():
        """Step times that skeletons of promising templates lead to, each in a search of its own."""
        searches = [SkeletonSearch(Incumbent(space, Budget(), searcher="elimination"), propose) for _ in rows]
        plans = [descend(search, tuple(row)) for search, row in zip(searches, rows, strict=True)]
        return space.price(np.array(plans))[:, 0]

    again = reached()
    monkeypatch.setattr(descents, "leads_on", lambda found, given, best_s: False)
    once = reached()
    assert (again <= once).all() and (again < 0.8 * once).any()


def test_another_solve_may_gain_more_where_the_given_plan_was_bad():
    assert leads_on((False, 1.0), (False, 1.2), best_s=1.0) and leads_on((False, 1.0), (True, 0.1), best_s=1.0)
    # What does not fit, gained little, or is far from the best plan is left.
    assert not leads_on((True, 0.1), (True, 0.5), best_s=1.0)
    assert not leads_on((False, 1.0), (False, 1.01), best_s=1.0)
    assert not leads_on((False, 2.0), (False, 3.0), best_s=1.0)


def test_a_skeleton_is_solved_further_until_a_plan_fits():
    """A mixture of experts: memory is fullest at another moment in what the first solve finds than where it is made."""
    problem = generate(100_342).problem
    ((name, device),) = problem.cluster.devices.items()
    # A little less memory than was generated: the given plan nearly fits.
    less = replace(problem.cluster, devices={name: replace(device, memory_GiB=device.memory_GiB - 0.4)})
    space = PlanSpace(replace(problem, cluster=less))
    values, prices = grid_of(space)
    nearly = [tuple(values[i].tolist()) for i in np.flatnonzero((prices[:, 1] > 0.0) & (prices[:, 1] < 0.1))]
    given = next(
        row
        for row in nearly
        if (lambda s: (s.pp, s.tp, s.middle, s.num_micro_batches))(space.shape(row)) == (1, 4, 1, 1)
    )
    solves = []

    def counted(point):
        solves.append(propose(point))
        return solves[-1]

    search = SkeletonSearch(Incumbent(space, Budget(), searcher="elimination"), counted)
    search.solve(given, rounds=1)
    is_over, found_s = search.best[given[: space.first.signature]][0]
    assert all(one.overflow > 0.2 for one in solves[0]) and not is_over
    assert found_s < 0.6 * prices[prices[:, 1] <= 0.0, 0].min()
    # None of the plans of a skeleton that overflow is worth more solves where all are slower than the best one.
    further = len(solves)
    slower = max(nearly, key=lambda row: space.price(np.array([row]))[0, 0])
    search.solve(slower, rounds=1)
    assert len(solves) == further + 1 and min(one.seconds for one in solves[-1]) > found_s


def scripted(outcomes):
    """A search of skeletons whose solves end at these plans: one outcome a solve, each (seconds, overflow) of plans
    with signatures that no other has. Also the plan whose skeleton is solved, its step time, and the solves so far."""
    space = PlanSpace(Problem.build(zoo.build("gpt2"), parse_cluster("2x2xV100@10Gbit"), {"global_batch": 16}))
    row = next(row for row in map(tuple, grid_of(space).values.tolist()) if space.shape(row).tp == 4)
    solves = []

    def propose_next(point):
        nodes = [n for n, node in enumerate(point.graph.nodes) if len(node.values) > 1]
        begin = sum(map(len, solves))
        found = []
        for number, (seconds, overflow) in enumerate(outcomes[len(solves)]):
            picked = list(point.picked)
            changed = nodes[(begin + number) % len(nodes)]
            picked[changed] = (picked[changed] + 1) % len(point.graph.nodes[changed].values)
            found.append(Candidate(picked=tuple(picked), seconds=seconds, overflow=overflow))
        solves.append([(point.graph.values(one.picked), one) for one in found])
        return found

    search = SkeletonSearch(Incumbent(space, Budget(), searcher="elimination"), propose_next)
    return search, row, float(space.price(np.array([row]))[0, 0]), solves


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize(("share", "goes_on"), [(0.8, True), (0.95, False)])
def test_a_solve_goes_on_while_its_plans_do_not_fit_and_may_be_the_best(share, goes_on, fits):
    """This holds too if a slower plan of the skeleton fits."""
    outcomes = [[(1.0, 0.3)] for _ in range(8)]
    search, row, given_s, solves = scripted(outcomes)
    outcomes[:] = [[(share * given_s, 0.3)] for _ in outcomes]
    search.incumbent.best_s = 0.9 * given_s
    if fits:
        search.best[row[: search.space.first.signature]] = ((False, given_s), row)
    search.solve(row, rounds=2)
    assert len(solves) == (2 + ROUNDS_TO_FIT if goes_on else 2)


def test_a_solve_ends_where_a_plan_of_it_fits():
    outcomes = [[(1.0, 0.3)] for _ in range(8)]
    search, row, given_s, solves = scripted(outcomes)
    outcomes[:2] = [[(0.8 * given_s, 0.3)], [(0.85 * given_s, -0.1)]]
    search.incumbent.best_s = 0.9 * given_s
    search.best[row[: search.space.first.signature]] = ((False, given_s), row)
    assert search.solve(row, rounds=1) == [] and len(solves) == 2
    assert search.best[row[: search.space.first.signature]][0] == (False, 0.85 * given_s)


@pytest.mark.parametrize(
    ("slower", "overflow", "best", "solved"),
    [
        (1.4, -0.1, 1.0, 2),
        # The plan found is only a little slower; or it does not fit; or the given plan is far from the best one.
        (1.04, -0.1, 1.0, 1),
        (1.4, 0.1, 0.9, 1),
        (1.4, -0.1, 0.7, 1),
    ],
)
def test_a_skeleton_is_solved_again_at_a_plan_that_is_much_slower(slower, overflow, best, solved):
    """Once: the second solve finds a plan that is slower again."""
    outcomes = [[(1.0, 0.3)] for _ in range(8)]
    search, row, given_s, solves = scripted(outcomes)
    outcomes[:] = [[(slower * given_s, overflow)] for _ in outcomes]
    search.incumbent.best_s = best * given_s
    search.solve(row, rounds=1)
    assert len(solves) == solved


def test_where_a_solve_is_misled_the_next_one_finds_a_faster_plan():
    """A decoder with experts on 512 devices: the step gets longer at first, and then shorter than it was."""
    space = PlanSpace(generate(100_078).problem)
    values, prices = grid_of(space)
    shape = (32, 4, 4, 1152)
    rows = [
        row
        for row in np.flatnonzero(prices[:, 1] <= 0.0).tolist()
        if (lambda s: (s.pp, s.tp, s.middle, s.num_micro_batches))(space.shape(tuple(values[row].tolist()))) == shape
    ]
    given = min(rows, key=lambda row: prices[row, 0])
    search = SkeletonSearch(Incumbent(space, Budget(), searcher="elimination"), propose)
    search.keep(tuple(values[given].tolist()), (False, float(prices[given, 0])))
    search.incumbent.price(values[[given]])
    search.solve(tuple(values[given].tolist()), rounds=1)
    assert search.incumbent.best_s < 0.95 * prices[given, 0]


@pytest.mark.parametrize("fits", [True, False])
def test_a_solve_tells_of_its_fastest_plans_that_do_not_fit(fits):
    """Where one of the skeleton fits, the fastest of all and the fastest that nearly fits; else this one alone. None
    that is slower than what fits."""
    outcomes = [[(0.5, 0.9), (0.6, 0.19), (0.7, 0.01), (0.4, 0.95), (1.2, 0.1), (1.0, -0.1 if fits else 0.21)]]
    search, row, _, solves = scripted(outcomes)
    search.incumbent.best_s = 0.1  # No second solve: none of these plans may be the best.
    beyond = search.solve(row, rounds=1)
    ((_, nearly, _, fastest, *_),) = [[plan for plan, _ in found] for found in solves]
    assert beyond == ([fastest, nearly] if fits else [nearly])

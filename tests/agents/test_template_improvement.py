"""Template improvement: the first phase of a portfolio search, and the refinement of the best plans."""

import itertools

import numpy as np
import pytest

from agents import Budget, search
from agents.incumbent import Incumbent
from agents.planners import skeleton_turns
from agents.planners.chunk_moves import best_cuts
from agents.planners.descents import descend
from agents.planners.elimination import propose
from agents.planners.skeleton_turns import run_skeletons
from agents.planners.skeletons import SkeletonSearch
from agents.planners.template_improvement import (
    OTHER_CUTS,
    REFINED_LEAST,
    REFINED_SHARE,
    SHARE,
    _solve_other_cuts,
    improve_templates,
    ranked_in_turn,
    refine,
)
from agents.sampling.expert import price_grid
from agents.sampling.mcmc import best_of_meshes
from automap.bounds import known_plans
from automap.bounds.known_plans import KnownPlans
from automap.bounds.priced_templates import priced_templates
from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.space.space import PlanSpace
from ir import zoo

EVALUATIONS = 4_000


def opened(model, cluster, batch, evaluations=EVALUATIONS):
    """The incumbent, the templates and what was worked out, in a budget of evaluations, which no clock ends."""
    space = PlanSpace(Problem.build(zoo.build(model), parse_cluster(cluster), {"global_batch": batch}))
    incumbent = Incumbent(space, Budget(evaluations=evaluations), searcher="expert")
    grid = price_grid(incumbent, charged=False)
    return incumbent, grid, improve_templates(incumbent, grid).plans()


@pytest.mark.parametrize("cluster", ["2x4xV100@25Gbit", "4xV100-16GB+4xP100-16GB"])
def test_worked_out_plans_are_legal_and_priced(cluster):
    incumbent, grid, found = opened("vgg19", cluster, 256)
    space = incumbent.space
    assert all(space.repair(row) == tuple(row) for row in found.values.tolist())
    np.testing.assert_array_equal(space.price(found.values), found.prices)
    skeletons = {row.tobytes() for row in found.values[:, : space.first.signature]}
    assert len(skeletons) == len(found.values)
    best = found.prices[found.prices[:, 1] <= 0.0, 0].min()
    assert best < 0.95 * grid.prices[grid.prices[:, 1] <= 0.0, 0].min()
    assert incumbent.best_s == best and incumbent.best_by == "elimination"
    assert incumbent.charged <= SHARE * EVALUATIONS


def test_it_finds_what_templates_lack():
    """Fully connected layers that are split over the data axis, as annealing finds in far more plans."""
    incumbent, grid, _ = opened("vgg19", "16x1xV100-16GB@10Gbit", 1024)
    long = search(incumbent.space.problem, Budget.parse(20_000), searcher="mcmc", seed=0).plan.estimate.step_time_s
    assert grid.prices[grid.prices[:, 1] <= 0.0, 0].min() > 1.5 * long
    assert incumbent.best_s < 1.06 * long


def test_pipelines_gain_virtual_stages_and_cuts():
    incumbent, grid, _ = opened("gpt2-xl", "16x1xV100-16GB@10Gbit", 128)
    space = incumbent.space
    assert incumbent.best_s < 0.9 * grid.prices[grid.prices[:, 1] <= 0.0, 0].min()
    shape, first = space.shape(incumbent.best), space.first
    assert shape.virtual > 1 and any(incumbent.best[first.cut : first.recompute])


def test_improving_templates_repeats_in_a_budget_in_evaluations():
    first, second = (opened("gpt2", "2x4xA100", 64, 600)[2] for _ in range(2))
    np.testing.assert_array_equal(first.values, second.values)


def test_refining_finds_better_cuts_and_repeats():
    """Pipelines with virtual stages, of whose numbers some were tried before."""
    found = []
    for _ in range(2):
        space = PlanSpace(
            Problem.build(zoo.build("bert-large"), parse_cluster("8x2xV100-16GB@10Gbit"), {"global_batch": 128})
        )
        incumbent = Incumbent(space, Budget(evaluations=EVALUATIONS), searcher="expert")
        grid = price_grid(incumbent, charged=False)
        skeletons = improve_templates(incumbent, grid)
        before_s, charged, left = incumbent.best_s, incumbent.charged, incumbent.left
        refined = refine(skeletons, best_of_meshes(space, grid.values, grid.prices))
        assert incumbent.charged - charged <= REFINED_SHARE * left
        assert incumbent.best_s < 0.98 * before_s and incumbent.best_by == "elimination"
        best, *_ = skeletons.best_of_kinds()
        assert best == incumbent.best and skeletons.is_near(best) and skeletons.is_refined(best, polishes=True)
        numbers = skeletons.best_of_kinds(each_number=True)
        kinds = {(skeletons.mesh(values[: space.first.signature]), space.shape(values).virtual) for values in numbers}
        assert numbers[0] == best and len(kinds) == len(numbers) > len(skeletons.best_of_kinds())
        assert all(space.repair(row) == tuple(row) for row in refined.values.tolist())
        found.append(refined.values)
    np.testing.assert_array_equal(*found)


def test_the_best_plan_is_solved_with_other_cuts():
    """A cut is taken that is bad with the signatures at hand, and the best with its own."""
    space = PlanSpace(Problem.build(zoo.build("vgg19"), parse_cluster("4x2xV100@10Gbit"), {"global_batch": 64}))
    incumbent = Incumbent(space, Budget(), searcher="elimination")
    values, prices = priced_templates(space)
    straight = [row for row, plan in enumerate(values) if (s := space.shape(plan)).pp == 2 and s.tp == s.virtual == 1]
    best = min(straight, key=lambda row: (prices[row, 1] > 0.0, prices[row, 0]))
    search = SkeletonSearch(incumbent, propose)
    descend(search, tuple(values[best].tolist()))
    first, before, before_s = space.first.signature, incumbent.best, incumbent.best_s
    _solve_other_cuts(search)
    assert {plan[:first] for plan in best_cuts(space, before, OTHER_CUTS)} <= set(search.best)
    assert incumbent.best_s < 0.95 * before_s


def test_small_budgets_are_not_spent_on_refining():
    space = PlanSpace(Problem.build(zoo.build("gpt2"), parse_cluster("1x4xV100"), {"global_batch": 64}))
    incumbent = Incumbent(space, Budget(evaluations=REFINED_LEAST), searcher="expert")
    grid = price_grid(incumbent, charged=False)
    skeletons = improve_templates(incumbent, grid)
    kept = skeletons.plans()
    charged = incumbent.charged
    assert charged
    np.testing.assert_array_equal(refine(skeletons, grid.values).values, kept.values)
    assert incumbent.charged == charged


def test_joint_signatures_are_those_that_are_legal_one_after_another(gpt):
    problem = Problem.build(gpt(layers=2), parse_cluster("2x4xV100@10Gbit"), {"global_batch": 8})
    space, rng = PlanSpace(problem), np.random.default_rng(0)
    num_axes = len(space.axes)
    for skeleton in space.random_batch(rng, 5)[:, : space.first.signature].tolist():
        for group in range(len(space.group_rows)):
            slot = space.first.signature + group * num_axes
            before = [*skeleton, *[0] * (slot - len(skeleton))]
            sizes = [space.slots[slot + axis].num_values for axis in range(num_axes)]
            legal = [
                joint
                for joint in itertools.product(*map(range, sizes))
                if all(space.legal([*before, *joint[:axis]])[joint[axis]] for axis in range(num_axes))
            ]
            assert [tuple(row) for row in space.legal_signatures(skeleton, group).tolist()] == legal


def test_of_many_plans_the_best_of_each_mesh_are_known(monkeypatch):
    monkeypatch.setattr(known_plans, "FIRST", 100)
    incumbent, grid, _ = opened("gpt2", "2x4xA100", 64, 100)
    space = incumbent.space
    known = KnownPlans(space, grid.values, grid.prices, 1, 64, 1.0)
    count = int(known.arrays.num_known[0])
    assert count == 100 < len(grid.values)

    def best_of_meshes(values, prices):
        found = {}
        for row, price in zip(values.tolist(), prices.tolist(), strict=True):
            mesh = tuple(row[: space.first.schedule])
            if price[1] <= 0.0:
                found[mesh] = min(price[0], found.get(mesh, np.inf))
        return found

    kept = best_of_meshes(known.arrays.values[:count], known.arrays.prices[:count])
    assert kept == best_of_meshes(grid.values, grid.prices)


def test_meshes_with_a_middle_axis_are_solved_behind_the_others(monkeypatch):
    """They come last among the meshes that are solved once, except for the first mesh: they take several times as
    long."""
    model = zoo.build("moe:layers=2,hidden=64,heads=4,ffn=64,experts=4,seq_len=32,vocab_size=128")
    space = PlanSpace(Problem.build(model, parse_cluster("2x4xA100"), {"global_batch": 16}))
    incumbent = Incumbent(space, Budget(evaluations=EVALUATIONS), searcher="elimination")
    plans = [tuple(row) for row in price_grid(incumbent).values.tolist()]
    parted = [[one for one in plans if (space.shape(one).middle > 1) == is_parted] for is_parted in (True, False)]
    # In turn, so that both are among the first.
    start = list(itertools.chain(*zip(*parted, strict=False)))
    solved = []
    monkeypatch.setattr(skeleton_turns, "descend", lambda search, values: solved.append(values))
    monkeypatch.setattr(SkeletonSearch, "finished", property(lambda self: len(solved) == 8))
    run_skeletons(SkeletonSearch(incumbent, propose), start, 8)
    middles = [space.shape(values).middle > 1 for values in solved]
    assert middles[0] and 0 < sum(middles[1:]) < 7 and middles[1:] == sorted(middles[1:])


@pytest.mark.parametrize(("least", "second"), [(-0.1, 1), (0.09, 2)])
def test_every_other_turn_is_of_a_plan_that_may_be_made_to_fit(least, second):
    """It overflows by 0.2 at most or, if none fits, by at most 0.2 more than the plan that overflows least."""
    prices = np.array([(9.0, least), (3.0, 0.19), (1.0, 0.27), (0.5, 0.3), (8.0, 0.1)])
    ranked = ranked_in_turn(prices).tolist()
    assert ranked[:2] == [0, second] and sorted(ranked) == [0, 1, 2, 3, 4]
    assert ranked_in_turn(prices[:0]).tolist() == []

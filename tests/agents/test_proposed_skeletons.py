"""Proposed skeletons: what the network decides, what is solved, and who is credited."""

import numpy as np
import pytest
from long_cases import long_but

from agents import Budget
from agents.incumbent import Incumbent
from agents.learning import proposed_skeletons
from agents.learning.checkpoint import read_network
from agents.learning.problems import generate
from agents.learning.proposals import NETWORK, Proposals
from agents.learning.proposed_skeletons import propose_and_solve, solve_further
from agents.planners.descents import descend
from agents.planners.elimination import propose
from agents.planners.promising_templates import FITTING, promising_meshes, split_axes
from agents.planners.skeletons import SkeletonSearch
from agents.planners.submeshes import has_few_pipelines
from agents.planners.template_improvement import REFINED_LEAST, improve_templates
from agents.sampling.expert import grid_of, price_grid
from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.space.space import PlanSpace
from ir import zoo


def proposed(model, cluster, batch, evaluations=8_000):
    """The incumbent, the step time before, and the plans proposed, in a budget of evaluations, which no clock ends."""
    space = PlanSpace(Problem.build(zoo.build(model), parse_cluster(cluster), {"global_batch": batch}))
    incumbent = Incumbent(space, Budget(evaluations=evaluations), searcher="expert")
    grid = price_grid(incumbent, charged=False)
    opened = improve_templates(incumbent, grid)
    before_s = incumbent.best_s
    return incumbent, before_s, propose_and_solve(opened, grid, read_network(NETWORK), seed=0), opened


@pytest.mark.parametrize(
    ("model", "cluster", "batch"),
    long_but(
        [("vgg19", "4xV100-16GB+4xP100-16GB", 256)],
        [("gpt2-xl", "2x8xV100-16GB@25Gbit", 128), ("vgg19", "4xV100-16GB+4xP100-16GB", 256)],
    ),
)
def test_plans_are_legal_and_no_worse_than_the_opening(model, cluster, batch):
    incumbent, before_s, plans, opened = proposed(model, cluster, batch)
    space = incumbent.space
    assert incumbent.best_s <= before_s
    for values in [*plans, *map(tuple, opened.plans().values.tolist()), incumbent.best]:
        assert space.repair(values) == values
    prices = space.price(np.array(plans))
    assert (prices[:, 1] <= 0.0).all() and (np.diff(prices[:, 0]) <= 0.0).all()
    assert incumbent.best_s == space.price(np.array([incumbent.best]))[0, 0]
    assert incumbent.reached["dqn"] is not None


@pytest.mark.slow
def test_solving_what_is_proposed_pays():
    """Where few templates were improved, the skeletons of the network are solved and lead to a better plan."""
    incumbent, before_s, _, _ = proposed("bert-large", "8x2xV100-16GB@10Gbit", 128, 6_000)
    assert incumbent.best_s < 0.99 * before_s


@pytest.mark.slow
def test_proposals_of_a_budget_in_evaluations_repeat():
    first, second = (proposed("gpt2", "2x4xA100", 64, 600) for _ in range(2))
    assert first[2] == second[2] and first[0].best_s == second[0].best_s and first[0].charged == second[0].charged


def test_only_skeletons_are_decided_before_whole_plans(monkeypatch):
    decided = []

    class Noted(Proposals):
        def __init__(self, incumbent, episodes, *others, **named):
            decided.append(np.flatnonzero(episodes.partial_plans.episodes.asked.any(axis=0)))
            super().__init__(incumbent, episodes, *others, **named)

        def go_on(self, most):
            return []

    monkeypatch.setattr(proposed_skeletons, "Proposals", Noted)
    incumbent, _, plans, _ = proposed("gpt2", "2x4xA100", 64)
    first = incumbent.space.first.signature
    skeletons, whole = decided
    assert plans == []
    assert len(skeletons) and skeletons.max() < first <= whole.max()
    assert set(skeletons) == {slot for slot in whole if slot < first}
    assert incumbent.first_proposal is None


@pytest.mark.slow
def test_the_first_skeleton_is_solved_before_others_are_decided(monkeypatch):
    reached, known = [], []

    class Noted(Proposals):
        def go_on(self, most):
            incumbent = self._incumbent
            reached.append(incumbent.first_proposal)
            arrays = self.episodes.known.arrays
            known.append(arrays.values[: int(arrays.num_known[0])].copy())
            return super().go_on(most)

    monkeypatch.setattr(proposed_skeletons, "Proposals", Noted)
    incumbent, _, _, _ = proposed("gpt2-xl", "2x8xV100-16GB@25Gbit", 128, 2_000)
    assert reached[0] is None and reached[1] == incumbent.first_proposal != None  # noqa: E711
    # What the first skeleton leads to is known to the second call; it is no slower than the plan that was decided.
    kept = set(map(tuple, known[0].tolist()))
    new = [row for row in known[1].tolist() if tuple(row) not in kept]
    assert new
    prices = incumbent.space.price(np.array(new))
    assert incumbent.first_proposal[0] <= prices[prices[:, 1] <= 0.0, 0].min()


def test_there_is_a_first_plan_where_time_ends_before_all_is_decided(monkeypatch):
    """A plan that was decided in part has looked at whole ones on its way."""

    class Short(Proposals):
        def go_on(self, most):
            if not self.episodes.num_decisions[0]:
                self._step()
            return []

    monkeypatch.setattr(proposed_skeletons, "Proposals", Short)
    incumbent, _, _, _ = proposed("gpt2", "2x4xA100", 64)
    assert incumbent.first_proposal is not None
    assert incumbent.first_proposal[0] >= incumbent.best_s


def test_axes_that_no_solved_skeleton_splits_are_tried_first():
    space = PlanSpace(Problem.build(zoo.build("gpt2"), parse_cluster("2x4xA100"), {"global_batch": 64}))
    incumbent = Incumbent(space, Budget(evaluations=4_000), searcher="expert")
    grid = price_grid(incumbent, charged=False)
    search = SkeletonSearch(incumbent, propose)
    best = grid.values[grid.prices[:, 0].argsort()[0]]
    descend(search, tuple(best.tolist()))
    (solved,) = search.split
    promising = promising_meshes(space, grid)
    proposed_skeletons._solve_unlike(search, promising)
    (new,) = search.split - {solved}
    first = next(values for values in map(tuple, promising.tolist()) if split_axes(space, values) != solved)
    assert new == split_axes(space, first)
    # Templates that are slow anyway are left alone.
    search.split, incumbent.best_s = {solved}, 1e-9
    proposed_skeletons._solve_unlike(search, promising)
    assert search.split == {solved}


def test_a_first_plan_is_noted_where_no_time_is_left_to_solve_it(monkeypatch):
    solved = []
    monkeypatch.setattr(SkeletonSearch, "finished", property(lambda search: True))
    monkeypatch.setattr(proposed_skeletons, "descend", lambda *given: solved.append(given))
    incumbent, _, _, _ = proposed("gpt2", "2x4xA100", 64)
    assert not solved and incumbent.first_proposal is not None


@pytest.mark.slow
def test_further_skeletons_are_new_ones_and_small_budgets_are_left_alone():
    space = PlanSpace(Problem.build(zoo.build("gpt2-xl"), parse_cluster("2x8xV100-16GB@25Gbit"), {"global_batch": 128}))
    for evaluations, goes_on in ((REFINED_LEAST - 1, False), (8_000, True)):
        incumbent = Incumbent(space, Budget(evaluations=evaluations), searcher="expert")
        grid = price_grid(incumbent, charged=False)
        search = SkeletonSearch(incumbent, propose)
        search.begin_with(grid.values[grid.prices[:, 0].argsort()[:4]])
        taken = search.taken = {values[: space.first.signature] for values in search.best}
        before, begun = set(taken), incumbent.charged
        solve_further(search, grid)
        assert (search.taken > before) is goes_on and before <= search.taken
        # A solve that is under way is finished.
        assert incumbent.charged - begun <= (0.2 * evaluations if goes_on else 0)


def test_every_other_proposal_has_a_shape_of_its_own():
    space = PlanSpace(Problem.build(zoo.build("gpt2"), parse_cluster("2x4xA100"), {"global_batch": 64}))
    search = SkeletonSearch(Incumbent(space, Budget(), searcher="elimination"), propose)
    first = space.first
    grid = grid_of(space)
    shapes = list(dict.fromkeys(tuple(row[: first.schedule].tolist()) for row in grid.values))[:3]
    # Three plans of the first shape, then two of the second, then one of the third.
    plans = []
    for shape, count in zip(shapes, (3, 2, 1), strict=True):
        rows = [tuple(row.tolist()) for row in grid.values if tuple(row[: first.schedule].tolist()) == shape]
        plans += list({row[: first.signature]: row for row in rows}.values())[:count]
    assert len(plans) == 6
    order = []
    for values in proposed_skeletons._in_turn(search, plans):
        order.append(plans.index(values))
        search.taken.add(values[: first.signature])
    assert order == [0, 3, 1, 5, 2, 4]
    # A plan that a descent has ended with leads nowhere.
    search.taken.clear()
    search.ended.update(plans[:5])
    assert next(proposed_skeletons._in_turn(search, plans)) == plans[5]


def promised_s(grid):
    """[n] step times of templates, those longer that do not fit."""
    return grid.prices[:, 0] * (1.0 + FITTING * np.maximum(grid.prices[:, 1], 0.0))


def test_the_template_of_the_best_plan_is_solved_too():
    """A descent from another template of the same shape has found the best plan."""
    space = PlanSpace(Problem.build(zoo.build("gpt2"), parse_cluster("2x4xA100"), {"global_batch": 64}))
    incumbent = Incumbent(space, Budget(evaluations=4_000), searcher="expert")
    grid = price_grid(incumbent, charged=False)
    search, first = SkeletonSearch(incumbent, propose), space.first
    descend(search, tuple(grid.values[np.argsort(promised_s(grid))[1]].tolist()))
    best = incumbent.best
    alike = [
        n
        for n, row in enumerate(grid.values.tolist())
        if tuple(row[: first.schedule]) == best[: first.schedule] and row[first.zero] == best[first.zero]
    ]
    template = tuple(grid.values[min(alike, key=promised_s(grid).__getitem__)].tolist())
    assert len(alike) > 1 and template not in search.begun
    proposed_skeletons._solve(search, 1, [], templates=grid)
    assert template in search.begun
    begun = set(search.begun)
    if incumbent.best[: first.schedule] == best[: first.schedule]:
        proposed_skeletons._solve(search, 1, [], templates=grid)
        assert search.begun == begun


def test_descents_begin_near_the_best_plan_or_with_a_new_shape():
    space = PlanSpace(Problem.build(zoo.build("gpt2"), parse_cluster("2x4xA100"), {"global_batch": 64}))
    incumbent = Incumbent(space, Budget(), searcher="expert")
    grid = price_grid(incumbent)
    search = SkeletonSearch(incumbent, propose)
    near = promised_s(grid) <= proposed_skeletons.REACH * incumbent.best_s
    assert (proposed_skeletons._within_reach(search, grid) == near).all()
    rows = list(map(tuple, grid.values.tolist()))
    shapes = [row[: space.first.schedule] for row in rows]
    begun = {shapes[0]}
    kept = [row for n, row in enumerate(rows) if near[n] or (shapes[n] not in begun and shapes[n] not in shapes[:n])]
    assert 0 < len(kept) < len(rows) and not near[[row in kept for row in rows]].all()
    assert proposed_skeletons._near_or_new(search, rows, begun) == kept


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("seed", [100_296, 100_111])
def test_pipelines_have_unlike_stages_where_few_numbers_divide_the_devices_or_the_batch(seed, monkeypatch):
    """On 311 devices the space has pipelines of 29 stages of 11 devices, or of all devices; a batch of 867 has 3, 17 or
    51 micro-batches."""
    incumbent, *_ = odd_problem(seed)
    assert incumbent.least_s == incumbent.reached["piper"] < 0.95 * incumbent.best_s
    stages = incumbent.outside.plan.stages
    assert len({len(stage.devices) for stage in stages}) > 1
    monkeypatch.setattr(proposed_skeletons, "has_few_pipelines", lambda space: False)
    before, *_ = odd_problem(seed)
    assert before.outside is None and incumbent.best_s == before.best_s


@pytest.mark.parametrize("batch, is_few", [(256, False), (638, False), (867, True), (4685, True)])
def test_few_numbers_divide_a_batch_where_they_are_far_apart(batch, is_few, mlp):
    """638 = 2 * 11 * 29 has 8 divisors, half of which are twice the one before, or less."""
    for devices, is_large in ((16, False), (64, True)):
        cluster = parse_cluster(f"{devices // 8}x8xV100")
        space = PlanSpace(Problem.build(mlp((512, 512)), cluster, {"global_batch": batch}))
        assert has_few_pipelines(space) == (is_few and is_large)


def odd_problem(seed):
    """What is found in a budget of evaluations, which no clock ends."""
    incumbent = Incumbent(PlanSpace(generate(seed).problem), Budget(evaluations=700), searcher="expert")
    grid = price_grid(incumbent, charged=False)
    return incumbent, propose_and_solve(improve_templates(incumbent, grid), grid, read_network(NETWORK), seed=0)

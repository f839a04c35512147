"""Solved proposals: what the search of a pretrained DQN does before it learns."""

from collections import Counter

import numpy as np
import pytest

from agents import Budget
from agents.incumbent import Incumbent
from agents.learning import solved_proposals
from agents.learning.checkpoint import read_network
from agents.learning.mesh_plans import MeshPlans
from agents.learning.network import ProposalNetwork
from agents.learning.proposals import NETWORK
from agents.learning.solved_proposals import SolvedProposals, expected_of_meshes
from agents.learning.solved_skeletons import SolvedSkeletons
from agents.sampling.expert import grid_of
from automap.bounds.known_plans import worth_s
from envs.decision import REWARD_SCALE, Episodes
from envs.hybrid import HybridDecisions
from envs.kernels import ACTION_FEATURES, STATE_FEATURES


@pytest.fixture
def s(gpt, space):
    return space(gpt(layers=4), "2x2xA100", 16)


def begun(space, budget=None):
    """An incumbent, its episodes, and proposals that begin with the templates."""
    incumbent = Incumbent(space, budget or Budget(), searcher="dqn")
    episodes = Episodes(HybridDecisions(space), 4, incumbent.table, known=grid_of(space))
    skeletons = SolvedSkeletons(incumbent)
    return incumbent, episodes, SolvedProposals(incumbent, episodes, set(), read_network(NETWORK), skeletons)


def test_every_mesh_keeps_the_fastest_plan_that_it_was_given(s):
    episodes = Episodes(HybridDecisions(s), 1)
    meshes = MeshPlans(episodes, Incumbent(s, Budget(), searcher="dqn").table)
    given = s.random_batch(np.random.default_rng(0), 200)
    worth = worth_s(s.price(given), episodes.reference_s)
    fastest = dict(zip((tuple(row[: meshes.num_slots]) for row in meshes.values.tolist()), meshes.worth_s, strict=True))
    for values, worth_of_it in zip(map(tuple, given.tolist()), worth.tolist(), strict=True):
        is_faster = worth_of_it < fastest[values[: meshes.num_slots]]
        assert (meshes.add(values, worth_of_it) is not None) == is_faster
        fastest[values[: meshes.num_slots]] = min(fastest[values[: meshes.num_slots]], worth_of_it)
    assert meshes.worth_s.tolist() == list(fastest.values())
    assert meshes.worth_s == pytest.approx(worth_s(s.price(meshes.values), episodes.reference_s))


def test_the_decisions_of_a_plan_are_tried_on_all_meshes(s):
    incumbent, episodes, _ = begun(s)
    meshes, plan = MeshPlans(episodes, incumbent.table), tuple(s.random_batch(np.random.default_rng(1), 1)[0].tolist())
    before = meshes.worth_s.copy()
    tried = [s.repair([*row[: meshes.num_slots], *plan[meshes.num_slots :]]) for row in meshes.values.tolist()]
    assert meshes.spread(plan) == len(before)
    of_tried = worth_s(s.price(np.array(tried)), episodes.reference_s)
    assert meshes.worth_s == pytest.approx(np.minimum(before, of_tried))


def adds(value):
    """A network that adds the same value to what all completions reach."""
    weights = np.zeros((1, STATE_FEATURES + ACTION_FEATURES), np.float32)
    return ProposalNetwork({"q_net.0.weight": weights, "q_net.0.bias": np.array([value], np.float32)})


def test_without_training_a_mesh_is_expected_to_be_worth_its_best_known_plan(s):
    grid = grid_of(s)
    incumbent = Incumbent(s, Budget(), searcher="dqn")
    episodes = Episodes(HybridDecisions(s), 4, incumbent.table, known=grid)
    meshes = MeshPlans(episodes, incumbent.table)
    heads = {row[: meshes.num_slots] for row in map(tuple, grid.values.tolist())}
    numbers = [n for n, row in enumerate(map(tuple, meshes.values.tolist())) if row[: meshes.num_slots] in heads]
    plans = [tuple(row) for row in meshes.values[numbers].tolist()]
    assert len(plans) > 2 * episodes.count
    expected_s = expected_of_meshes(episodes, adds(0.0), plans, meshes.num_slots)
    # The completions of the next decision are the best known plan of the mesh, or single changes of it that gain.
    assert (np.array(expected_s) <= meshes.worth_s[numbers] * (1.0 + 1e-6)).all()
    assert (np.array(expected_s) >= meshes.bound_s[numbers] * (1.0 - 1e-6)).all()
    # What the network adds to the ratings shortens the expected step times; the order of the meshes stays.
    shorter_s = expected_of_meshes(episodes, adds(REWARD_SCALE * np.log(2.0)), plans[::-1], meshes.num_slots)
    assert shorter_s[::-1] == pytest.approx(np.array(expected_s) / 2.0, rel=1e-5)


def test_no_plan_counts_twice_and_every_plan_that_is_solved_counts(s, monkeypatch):
    """The count is that of the distinct plans that were decided, and of those that descents priced beyond them."""
    incumbent, _, proposals = begun(s)
    counted, begins = Counter(), []
    add, solve = incumbent.add, SolvedSkeletons.solve

    def spy(values, *price):
        counted[values] += 1
        add(values, *price)

    def solved(skeletons, values):
        begins.append(values)
        assert counted[values] == 1, "the plan from which a descent begins counts before it"
        before = incumbent.evaluations
        monkeypatch.setattr(incumbent, "add", add)
        found = solve(skeletons, values)
        monkeypatch.setattr(incumbent, "add", spy)
        assert incumbent.evaluations > before
        return found

    monkeypatch.setattr(incumbent, "add", spy)
    monkeypatch.setattr(SolvedSkeletons, "solve", solved)
    proposals.go_on(4)
    assert len(begins) == len(set(begins)) == 4
    assert max(counted.values()) == 1
    assert len({s.shape(values) for values in counted}) > 4


def test_solved_proposals_find_better_plans_than_templates_and_end_with_the_budget(s):
    grid = grid_of(s)
    template_s = grid.prices[grid.prices[:, 1] <= 0.0, 0].min()
    steps = []
    for most in (1, 5, 20, None):
        incumbent, _, proposals = begun(s, Budget(evaluations=most))
        proposals.go_on(8)
        assert most is None or incumbent.evaluations <= most
        steps.append(incumbent.best_s)
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < template_s


def test_the_network_says_which_mesh_is_visited_next(s, monkeypatch):
    """Of the meshes that were not visited, the next one has the least step time that the network expects."""
    _, _, proposals = begun(s)
    decide, rounds = proposals._decide, []

    def expected(episodes, network, plans, num_slots):
        rounds.append((plans, expected_of_meshes(episodes, network, plans, num_slots)))
        return rounds[-1][1]

    def decided(lead, *, by_network):
        if lead is not None:
            plans, seconds = rounds[-1]
            assert lead == plans[int(np.argmin(seconds))]
        return decide(lead, by_network=by_network)

    monkeypatch.setattr(solved_proposals, "expected_of_meshes", expected)
    monkeypatch.setattr(proposals, "_decide", decided)
    for _ in range(3):
        proposals._visit()
    visited = [plans[int(np.argmin(seconds))] for plans, seconds in rounds]
    assert len(rounds) == 3
    assert len({s.shape(values) for values in visited}) == 3

"""The search tree of a DQN."""

import numpy as np
import pytest

from agents import Budget, search
from agents.incumbent import Incumbent
from agents.learning.dqn import run_dqn
from agents.learning.hyperparameters import Hyperparameters
from agents.learning.search_tree import SearchTree
from agents.learning.solved_skeletons import SolvedSkeletons
from agents.sampling.expert import grid_of
from automap.space.space import PlanSpace
from envs.decision import Episodes
from envs.hybrid import HybridDecisions


@pytest.fixture
def small(gpt, space):
    """Two stages of one device: some hundred ways to cut, recompute and split the batch."""
    return space(gpt(layers=3), "1x2xV100", 8, pp=2, zero=0).problem


def random_walks(space, best_s, count=1):
    """Plans of episodes side by side whose open actions are drawn, until nothing is open."""
    episodes = Episodes(HybridDecisions(space), count)
    tree, rng, found = SearchTree(episodes, best_s), np.random.default_rng(0), []
    while not tree.is_exhausted:
        actions = np.zeros(count, dtype=np.int64)
        for number, mask in enumerate(episodes.observe()["action_mask"]):
            actions[number] = rng.choice(tree.open_actions(number, np.flatnonzero(mask)))
            tree.take(number, int(actions[number]))
        _, done = episodes.step(actions)
        for number in np.flatnonzero(done):
            found.append(episodes.finished(int(number)).values)
            tree.finish(int(number))
        episodes.begin(done)
    return found


@pytest.mark.parametrize("count", [1, 4])
def test_every_plan_is_met_where_no_bound_closes_anything(small, count):
    space = PlanSpace(small)
    found = random_walks(space, lambda: np.inf, count)
    assert len(set(found)) == round(10**space.decades)
    assert (len(found) > len(set(found))) == (count > 1)  # side by side two may come to one plan


@pytest.mark.slow
def test_a_dqn_that_ends_by_itself_has_found_the_optimum(small, monkeypatch):
    optimum = search(small, Budget(evaluations=100_000), searcher="exhaustive")
    assert optimum.proven
    space = PlanSpace(small)
    incumbent = Incumbent(space, Budget(evaluations=10**6), searcher="dqn")
    priced = []
    add = incumbent.add
    incumbent.add = lambda values, seconds, over: (priced.append(values), add(values, seconds, over))[1]
    solves = SolvedSkeletons.solve

    def solve(skeletons, values):
        """Solves a skeleton. What this prices on the way may come again."""
        count = len(priced)
        found = solves(skeletons, values)
        del priced[count:]
        return found

    monkeypatch.setattr(SolvedSkeletons, "solve", solve)
    run_dqn(incumbent, seed=0, templates=grid_of(space), parameters=Hyperparameters(num_envs=4), proposals=5)
    assert incumbent.best_s == pytest.approx(optimum.plan.estimate.step_time_s, rel=1e-12)
    assert len(priced) == len(set(priced)) < round(10**space.decades)

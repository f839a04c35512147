"""The tree of what a DQN has explored."""

import numpy as np
import pytest

from agents import Budget, search
from agents.dqn import Hyperparameters, run_dqn
from agents.explored import Explored
from agents.incumbent import Incumbent
from automap.space import PlanSpace
from envs.decision import Episodes
from envs.hybrid import HybridDecisions


@pytest.fixture
def small(gpt, space):
    """Two stages of one device: some hundred ways to cut, recompute and split the batch."""
    return space(gpt(layers=6), "1x2xV100", 16, pp=2, zero=0).problem


def random_walks(space, best_s):
    """Plans of one episode after another whose open actions are drawn, until nothing is open; and the tree."""
    episodes = Episodes(HybridDecisions(space), 1)
    tree, rng, found = Explored(episodes, best_s), np.random.default_rng(0), []
    while not tree.is_exhausted:
        done = np.array([False])
        while not done[0]:
            legal = np.flatnonzero(episodes.observe()["action_mask"][0])
            action = int(rng.choice(tree.open_actions(0, legal)))
            tree.take(0, action)
            _, done = episodes.step(np.array([action]))
        found.append(episodes.finished(0))
        tree.finish(0)
        episodes.begin(done)
    return found


def test_every_plan_is_met_once_where_no_bound_closes_anything(small):
    space = PlanSpace(small)
    found = random_walks(space, lambda: np.inf)
    plans = {ended.values for ended in found}
    assert len(plans) == len(found)
    assert len(plans) == round(10**space.decades)


@pytest.mark.slow
def test_a_dqn_that_ends_by_itself_has_found_the_optimum(small):
    optimum = search(small, Budget(evaluations=100_000), searcher="exhaustive")
    assert optimum.proven
    space = PlanSpace(small)
    incumbent = Incumbent(
        space, Budget(evaluations=10**6), searcher="dqn", on_progress=lambda p: None, should_stop=lambda: False
    )
    priced = []
    offer = incumbent.offer
    incumbent.offer = lambda values, seconds, over: (priced.append(values), offer(values, seconds, over))[1]
    run_dqn(space, incumbent, seed=0, reference_s=None, parameters=Hyperparameters(num_envs=1))
    assert incumbent.best_s == pytest.approx(optimum.plan.estimate.step_time_s, rel=1e-12)
    assert len(priced) == len(set(priced)) < round(10**space.decades)

"""The DQN learns: a network is better off with its updates than without them, and the one that is shipped has learnt.

Completions, leads and the tree alone find good plans, so that a search may hide a network that learns nothing.
"""

from dataclasses import replace

import numpy as np
import pytest

from agents.incumbent import Incumbent
from agents.learning.dqn import Watch, new_agent
from agents.learning.hyperparameters import Hyperparameters
from agents.learning.network import ProposalNetwork
from agents.learning.plan_vec_env import PlanVecEnv
from agents.learning.proposals import propose
from agents.learning.search_tree import SearchTree
from agents.sampling.expert import grid_of
from agents.searcher import Budget
from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.space.space import PlanSpace
from envs.decision import Episodes
from envs.hybrid import HybridDecisions
from envs.kernels import ACTION_FEATURES, STATE_FEATURES
from ir import zoo

LEARNING = Hyperparameters()


def space_of(model, cluster, batch):
    return PlanSpace(Problem.build(zoo.build(model), parse_cluster(cluster), {"global_batch": batch}))


def network_of(agent):
    """The network of an agent, as it proposes plans."""
    return ProposalNetwork({name: value.numpy() for name, value in agent.q_net.state_dict().items()})


def untrained():
    """A network that adds nothing to the completions."""
    sizes = [STATE_FEATURES + ACTION_FEATURES, 1]
    return ProposalNetwork(
        {"q_net.0.weight": np.zeros(sizes[::-1], np.float32), "q_net.0.bias": np.zeros(1, np.float32)}
    )


def proposed(space, network, plans, *, seed=0):
    """Step time of the best of so many proposals, in seconds."""
    incumbent = Incumbent(space, Budget(), searcher="dqn")
    episodes = Episodes(HybridDecisions(space), 8, incumbent.table, templates=grid_of(space))
    tree = SearchTree(episodes, lambda: incumbent.best_s)
    propose(incumbent, episodes, tree, network, seed=seed, most=plans)
    return incumbent.best_s


def learnt(space, parameters, plans, *, seed):
    """The network of a search that begins with an untrained one and prices so many plans."""
    incumbent = Incumbent(space, Budget(evaluations=plans), searcher="dqn")
    episodes = Episodes(HybridDecisions(space), parameters.num_envs, incumbent.table)
    tree = SearchTree(episodes, lambda: incumbent.best_s)
    agent = new_agent(PlanVecEnv([episodes]), parameters, seed, tree=tree)
    agent.learn(total_timesteps=10**12, callback=Watch(incumbent, []), log_interval=10**12)
    return network_of(agent)


@pytest.mark.slow
@pytest.mark.parametrize(("parameters", "least"), [(LEARNING, 1.05), (replace(LEARNING, learning_rate=0.0), 1.0)])
def test_the_first_plan_becomes_better_by_learning(parameters, least):
    """On VGG-19 over a slow network several fully connected layers must change together."""
    space = space_of("vgg19", "16x1xV100-16GB@10Gbit", 1024)
    after = proposed(space, learnt(space, parameters, 400, seed=0), 1)
    ratio = proposed(space, untrained(), 1) / after
    assert ratio > least if least > 1.0 else ratio == 1.0

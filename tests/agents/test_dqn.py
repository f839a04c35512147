"""The DQN's parts: replay, targets, checkpoints, and the pretrained network."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete

from agents import Budget, search
from agents.incumbent import Incumbent
from agents.learning.card import CARD, card
from agents.learning.checkpoint import ABOUT, TENSORS, read_checkpoint, read_network, write_checkpoint
from agents.learning.dqn import FIRST_PLANS, FORBIDDEN, PROPOSED_SHARE, TURNS, new_agent, run_dqn
from agents.learning.exploration import Guide
from agents.learning.hyperparameters import Hyperparameters
from agents.learning.plan_vec_env import PlanVecEnv
from agents.learning.proposals import NETWORK, PROPOSALS, propose
from agents.learning.replay import PlanReplay
from agents.learning.search_tree import SearchTree
from agents.learning.solved_proposals import SolvedProposals
from agents.learning.solved_skeletons import SolvedSkeletons
from agents.sampling.expert import grid_of
from automap.cluster import parse_cluster
from automap.errors import ProblemError
from automap.problem import Problem
from envs.decision import COMPLETION, REWARD_SCALE, Episodes, observation_space
from envs.hybrid import HybridDecisions
from envs.replication import ReplicationDecisions

SMALL = Hyperparameters(num_envs=4, hidden=(16,))


@pytest.fixture
def s(gpt, space):
    return space(gpt(), "2x2xA100", 8)


def agent_of(space, parameters=SMALL, seed=0):
    env = PlanVecEnv([Episodes(HybridDecisions(space), parameters.num_envs)])
    return new_agent(env, parameters, seed), env


def incumbent_of(space, evaluations):
    return Incumbent(space, Budget(evaluations=evaluations), searcher="dqn")


def collected(agent, env, steps):
    """Lets an agent step through an environment and remember what it sees; returns the finished plans."""
    observation, finished = env.reset(), []
    for _ in range(steps):
        actions = agent.act(observation)
        env.step_async(actions)
        following, rewards, done, infos = env.step_wait()
        agent.replay_buffer.add(observation, following, actions, rewards, done, infos)
        finished += [info["finished"] for info in infos if "finished" in info]
        observation = following
    return finished


def test_an_untrained_network_follows_the_best_completion(s):
    agent, env = agent_of(s)
    observation = env.reset()
    with torch.no_grad():
        q = agent.q_net({k: torch.as_tensor(v) for k, v in observation.items()}).numpy()
    assert (q[observation["action_mask"] == 0] == FORBIDDEN).all()
    known = env.episodes[0].known.arrays
    legal = env.episodes[0].partial_plans.episodes.legal[0]
    assert (
        agent.act(observation)[0] == legal[known.worth[0, : env.episodes[0].partial_plans.episodes.offered[0]].argmin()]
    )


def test_an_episode_is_rewarded_as_what_is_said_of_its_end(s):
    """The reward is the difference of the logarithms."""

    def episode(share):
        env = PlanVecEnv([Episodes(HybridDecisions(s), 1)])
        env.reset()
        env.worth_s, total, done = lambda number, finished: share * finished.worth_s, 0.0, [False]
        while not done[0]:
            env.step_async(env.episodes[0].partial_plans.episodes.legal[:, 0])
            _, rewards, done, infos = env.step_wait()
            total += rewards[0]
        return total, infos[0]["finished"]

    plain, ended = episode(1.0)
    assert plain == pytest.approx(-REWARD_SCALE * ended.log_gap, rel=1e-5)
    assert episode(0.5)[0] - plain == pytest.approx(REWARD_SCALE * np.log(2.0), rel=1e-5)


def test_an_untrained_network_ends_no_worse_than_the_best_template(s):
    agent, env = agent_of(s)
    best = grid_of(s).prices
    finished = collected(agent, env, 200)
    assert finished[0].overflow <= 0.0
    assert finished[0].step_time_s <= best[best[:, 1] <= 0.0, 0].min()


def test_targets_are_no_less_than_what_was_reached_or_is_at_hand(s):
    agent, env = agent_of(s)
    agent.guides = [Guide(random=0.3)] * env.num_envs
    collected(agent, env, 100)
    batch = agent.replay_buffer.draw(64)
    targets = agent.targets(batch)
    assert (targets >= batch.returns - 1e-5).all()
    assert (targets >= -REWARD_SCALE * batch.actions[:, COMPLETION] - 1e-5).all()


def test_the_replay_gives_back_what_it_was_shown():
    """Two episodes of made-up observations, of which the replay has room for the later one."""
    rng = np.random.default_rng(0)
    box = observation_space()
    replay = PlanReplay(6, box, Discrete(10), "cpu", 1, seed=0)
    shown = []
    for length in (4, 5):
        for step in range(length):
            seen = rng.random((1, *box["observation"].shape)).astype(np.float32)
            mask = np.zeros((1, *box["action_mask"].shape), dtype=np.int8)
            mask[0, [1, 4, 9]] = 1
            observation = {"observation": seen, "action_mask": mask}
            done, reward = np.array([step == length - 1]), np.array([float(len(shown))])
            replay.add(observation, {}, np.array([4]), reward, done, [{}])
            shown.append(seen[0])
    assert replay.size() == 6
    batch = replay.draw(200)
    later = shown[3:]
    assert {float(reward) for reward in batch.rewards} == set(map(float, range(3, 9)))
    for reward, state, whole in zip(batch.rewards, batch.states, batch.returns, strict=True):
        number = int(reward)
        assert np.array_equal(state.numpy(), later[number - 3][: len(state)])
        assert whole == (3.0 if number == 3 else sum(range(number, 9)))
    # The last decision of an episode is followed by none, every other one by its three legal actions.
    counts = torch.bincount(batch.following, minlength=200)
    assert all(count == (0 if reward in (3.0, 8.0) else 3) for count, reward in zip(counts, batch.rewards, strict=True))


def test_checkpoints_restore_every_number(s, tmp_path):
    one, _ = agent_of(s, seed=0)
    other, env = agent_of(s, seed=1)
    write_checkpoint(one, SMALL, tmp_path, {})
    read_checkpoint(other, SMALL, tmp_path)
    observation = {k: torch.as_tensor(v) for k, v in env.reset().items()}
    assert torch.equal(one.q_net(observation), other.q_net(observation))


@pytest.mark.parametrize("damage", ["missing", "tensors", "json", "schema", "network"])
def test_bad_checkpoints_are_refused(s, tmp_path, damage):
    agent, _ = agent_of(s)
    parameters = SMALL
    write_checkpoint(agent, parameters, tmp_path, {})
    if damage == "missing":
        (tmp_path / ABOUT).unlink()
    elif damage == "tensors":
        (tmp_path / TENSORS).write_bytes(b"\x80\x04pickle")
    elif damage == "json":
        (tmp_path / ABOUT).write_text("{")
    elif damage == "schema":
        (tmp_path / ABOUT).write_text((tmp_path / ABOUT).read_text().replace("automap.agent/2", "automap.agent/0"))
    else:
        parameters = replace(SMALL, hidden=(32,))
        agent, _ = agent_of(s, parameters)
    with pytest.raises(ProblemError) as caught:
        read_checkpoint(agent, parameters, tmp_path)
    assert caught.value.field == "checkpoint"


def test_the_shipped_network_says_how_it_was_made():
    about = json.loads((NETWORK / ABOUT).read_text())
    assert about["command"][:2] == ["automap", "train-agent"]
    assert about["hyperparameters"]["hidden"] == list(Hyperparameters().hidden)
    assert sum(file.stat().st_size for file in NETWORK.iterdir()) < 2e6
    # `automap train-agent` writes the card beside the network: whoever ships another one ships its card.
    assert (NETWORK / CARD).read_text() == card(about)


def test_the_network_rates_alike_with_and_without_torch(s):
    agent, env = agent_of(s, Hyperparameters())
    read_checkpoint(agent, Hyperparameters(), NETWORK)
    observation = env.reset()
    with torch.no_grad():
        q = agent.q_net({k: torch.as_tensor(v) for k, v in observation.items()}).numpy()
    assert read_network(NETWORK).rate(observation) == pytest.approx(q, rel=1e-4, abs=1e-4)


@pytest.mark.slow
def test_the_pretrained_network_proposes_plans_at_once(light_graph):
    p = Problem.build(light_graph("vgg19"), parse_cluster("2x8xV100-16GB@10Gbit"), {"global_batch": 512})
    found = search(p, Budget.parse(64), searcher="dqn", seed=0).plan
    assert found.search.searchers["dqn"] < found.search.baselines["expert"]


@pytest.mark.slow
def test_a_network_proposes_whole_plans_where_no_skeletons_are_solved(s, monkeypatch):
    asked = []

    def spy(*arguments, most, **more):
        asked.append(most)
        return propose(*arguments, most=most, **more)

    monkeypatch.setattr("agents.learning.dqn.propose", spy)
    incumbent, small = incumbent_of(s, 80), Hyperparameters(num_envs=4)
    run_dqn(incumbent, seed=0, templates=grid_of(s), parameters=small, decisions=ReplicationDecisions)
    assert asked == [PROPOSALS]
    assert incumbent.first_proposal is not None


@pytest.mark.parametrize("evaluations", [40, 400])
def test_a_network_has_skeletons_solved_before_the_search_learns(s, monkeypatch, evaluations):
    proposes, begun = SolvedProposals.go_on, []

    def go_on(proposals, turns):
        before = incumbent.evaluations
        proposes(proposals, turns)
        begun.append((turns, before, incumbent.evaluations))

    monkeypatch.setattr(SolvedProposals, "go_on", go_on)
    incumbent = incumbent_of(s, evaluations)
    run_dqn(incumbent, seed=0, templates=grid_of(s), parameters=Hyperparameters(num_envs=4))
    ((turns, before, after),) = begun
    assert (turns, before) == (TURNS, 0)
    assert 1 < after <= PROPOSED_SHARE * evaluations
    assert incumbent.first_proposal is not None


def test_a_search_from_scratch_learns_with_few_plans_before_it_solves_skeletons(s, monkeypatch):
    solved: list[tuple[int, ...]] = []
    before: list[int] = []
    incumbent = incumbent_of(s, 100)

    def solve(skeletons, values):
        solved.append(values[: s.first.signature])
        before.append(incumbent.evaluations)
        return solves(skeletons, values)

    solves = SolvedSkeletons.solve
    monkeypatch.setattr(SolvedSkeletons, "solve", solve)
    run_dqn(incumbent, seed=0, templates=grid_of(s), parameters=Hyperparameters(num_envs=4), network=None)
    # All four episodes may end at once.
    assert FIRST_PLANS <= before[0] <= FIRST_PLANS + 4
    assert len(set(solved)) > 1
    assert incumbent.evaluations <= 100


def test_an_episode_is_led_as_far_as_the_plan_is_open(s):
    episodes = Episodes(HybridDecisions(s), 1)
    tree, env = SearchTree(episodes, lambda: np.inf), PlanVecEnv([episodes])
    agent = new_agent(env, replace(SMALL, num_envs=1), 0, tree=tree)
    wanted = s.random_batch(np.random.default_rng(3), 1)[0]
    agent.guides[0] = Guide(forced=wanted)
    met: set[tuple[int, ...]] = set()
    for _ in range(3):
        observation, done = env.reset(), [False]
        while not done[0]:
            env.step_async(agent.act(observation))
            observation, _, done, infos = env.step_wait()
        tree.finish(0)
        # What is closed behind a known plan is decided by the network.
        found = infos[0]["finished"].values
        assert found not in met
        met.add(found)
    head = s.first.schedule
    assert all(values[:head] == tuple(wanted[:head].tolist()) for values in met)


def test_the_worst_of_the_most_frequent_shape_is_given_up(s):
    """A shape that is rare among the plans that were found keeps its best plan, however slow it is."""
    known = Episodes(HybridDecisions(s), 1).known
    rng = np.random.default_rng(0)
    rare, *rest = sorted({s.shape(values) for values in s.random_batch(rng, 200).tolist()}, key=str)
    plans = {tuple(values) for values in s.random_batch(rng, 4000).tolist()}
    only = next(values for values in plans if s.shape(values) == rare)
    known.add(only, (1e6, 0.0))
    for number, values in enumerate(values for values in plans if s.shape(values) in rest):
        known.add(values, (1.0 + number, 0.0))
    count = int(known.arrays.num_known[0])
    assert count == len(known.arrays.order)
    assert (known.arrays.values[:count] == np.array(only)).all(axis=1).any()

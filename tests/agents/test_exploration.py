"""Exploration: visits of meshes and revisions of plans."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from agents import Budget
from agents.incumbent import Incumbent
from agents.learning.dqn import Watch, new_agent
from agents.learning.exploration import ASSUMED_GAIN, PATIENCE, MeshBandit
from agents.learning.hyperparameters import Hyperparameters
from agents.learning.plan_vec_env import PlanVecEnv
from agents.learning.solved_skeletons import SolvedSkeletons
from automap.bounds.partial_plans import BoundTable
from envs.decision import REWARD_SCALE, Episodes
from envs.hybrid import HybridDecisions
from envs.sharding import ShardingDecisions

SMALL = Hyperparameters(num_envs=4, hidden=(16,))


@pytest.fixture
def s(gpt, space):
    return space(gpt(layers=4), "2x2xA100", 16)


def meshes_of(space, decisions=HybridDecisions, revisions=0.0):
    table = BoundTable(space)
    return MeshBandit(Episodes(decisions(space), 1, table), table, revisions)


def mesh(space, plan):
    return space.shape(plan.tolist())


def test_promising_meshes_are_visited_and_beaten_ones_are_not(s):
    bounds = dict(zip(s.shapes, BoundTable(s).shape_bounds, strict=True))
    known = Episodes(HybridDecisions(s), 1).known.arrays
    count = int(known.num_known[0])
    prices = dict(zip(map(tuple, known.values[:count].tolist()), known.prices[:count].tolist(), strict=True))
    fitting = {values: seconds for values, (seconds, overflow) in prices.items() if overflow <= 0.0}
    near_s = math.exp(0.9 * ASSUMED_GAIN) * min(fitting.values())
    promising = {s.shape(values) for values, seconds in fitting.items() if seconds <= near_s}
    meshes, rng = meshes_of(s), np.random.default_rng(0)
    visited = {mesh(s, meshes.guide(rng, np.inf).taught) for _ in range(40 * len(s.shapes))}
    assert len(promising) > 1
    assert promising <= visited
    best_s = float(np.median([bounds[shape][0] for shape in visited]))
    meshes = meshes_of(s)
    again = {mesh(s, meshes.guide(rng, best_s).taught) for _ in range(40 * len(s.shapes))}
    assert again
    assert all(bounds[shape][0] < best_s for shape in again)


def test_a_mesh_that_brought_something_is_visited_again_at_once(s):
    meshes, rng = meshes_of(s), np.random.default_rng(0)
    for _ in range(20):
        last = meshes.guide(rng, np.inf)
    counts = Counter(mesh(s, meshes.guide(rng, np.inf).taught) for _ in range(50))
    rare = next(shape for shape in s.shapes if not counts[shape])
    plan = next(plan for plan in s.random_batch(rng, 5000) if mesh(s, plan) == rare)
    meshes.add(tuple(plan.tolist()), 0.9 * float(s.price(last.taught[None])[0, 0]) / 10)
    found = meshes.guide(rng, np.inf)
    assert np.array_equal(found.taught, plan)
    assert found.noise == found.trust == 0.0  # the first time, completions are followed


def test_no_mesh_is_left_out_for_good(s):
    """Where visits bring nothing, other meshes have their turn, also those whose known plans are several times as
    slow."""
    meshes, rng = meshes_of(s), np.random.default_rng(0)
    best_s, worst_s = math.inf, 0.0
    for _ in range(int(3 * PATIENCE)):
        taught_s = float(s.price(meshes.guide(rng, np.inf).taught[None])[0, 0])
        best_s, worst_s = min(best_s, taught_s), max(worst_s, taught_s)
    assert worst_s > math.exp(ASSUMED_GAIN) * best_s


def test_visits_that_decide_a_skeleton_are_worth_what_solving_it_leads_to(s):
    """After the first visit their signatures are not decided. The plan found is known to later episodes."""
    incumbent = Incumbent(s, Budget(evaluations=10**6), searcher="dqn")
    episodes = Episodes(HybridDecisions(s), 1, incumbent.table)
    env, skeletons = PlanVecEnv([episodes]), SolvedSkeletons(incumbent)
    agent = new_agent(env, replace(SMALL, num_envs=1), 0)
    watch = Watch(incumbent, agent, skeletons)
    observation, solved, rewards = env.reset(), 0, 0.0
    while solved < 12:
        guide, done, decided = agent.guides[0], [False], []
        rewards = 0.0
        while not done[0]:
            decided.append(env.slots()[0])
            env.step_async(agent.act(observation))
            observation, reward, done, infos = env.step_wait()
            rewards += float(reward[0])
        values = infos[0]["finished"].values
        led_to = skeletons.led_to(values)
        assert (led_to is not None) >= guide.is_solved
        if not guide.is_solved:
            continue
        solved += 1
        assert guide.window is None or max(decided) < s.first.signature
        seconds, overflow = s.price(np.array([led_to]))[0].tolist()
        worth = min(seconds, infos[0]["finished"].worth_s) if overflow <= 0.0 else infos[0]["finished"].worth_s
        assert rewards == pytest.approx(-REWARD_SCALE * math.log(worth / episodes.first_bound_s), abs=1e-3)
        assert incumbent.best_s <= worth
        known = episodes.known.arrays
        assert (known.values[: int(known.num_known[0])] == np.array(led_to)).all(axis=1).any()
        head = led_to[: watch.meshes.num_slots]
        assert any(best[: len(head)] == head for best in watch.meshes.best(10**6))


def test_who_decides_signatures_alone_stays_in_the_mesh(s):
    meshes, rng = meshes_of(s, ShardingDecisions, 0.5), np.random.default_rng(0)
    assert len({mesh(s, meshes.guide(rng, best_s).taught) for best_s in [np.inf] * 50 + [0.0] * 5}) == 1


def test_revisions_change_a_part_of_a_plan(s):
    parameters = replace(SMALL, revisions=1.0, num_envs=1)
    incumbent = Incumbent(s, Budget(evaluations=10**6), searcher="dqn")
    episodes = Episodes(HybridDecisions(s), 1, incumbent.table)
    env = PlanVecEnv([episodes])
    agent = new_agent(env, parameters, 0)
    Watch(incumbent, agent)
    observation, revisions = env.reset(), 0
    for _ in range(40):
        guide, decided, done = agent.guides[0], [], [False]
        while not done[0]:
            decided.append(env.slots()[0])
            taken = agent.act(observation)
            has_choice = observation["action_mask"][0].sum() > 1
            if len(decided) == 1 and guide.is_revision and guide.base is None and has_choice:
                assert taken[0] != guide.taught[decided[0]]
            env.step_async(taken)
            observation, _, done, infos = env.step_wait()
        if guide.is_revision:
            values = np.array(infos[0]["finished"].values)
            first, behind = guide.window
            if decided[0] < first:  # without a choice there, all is decided
                continue
            assert decided[-1] < behind
            revisions += 1
            base = guide.taught if guide.base is None else guide.base
            assert np.array_equal(values[: decided[0]], base[: decided[0]])
            assert s.repair(values.tolist()) == tuple(values.tolist())
    assert revisions > 10

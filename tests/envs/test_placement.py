"""The placement environment keeps gymnasium's contract, and its rewards add up to the simulated time."""

import math

import gymnasium.error
import gymnasium.utils.env_checker
import numpy as np
import pytest

from agents.gnn.dqn import search_dqn
from agents.gnn.enumeration import enumerate_placements
from automap.errors import ProblemError
from automap.gnn.made_up import Shape, make_problem
from automap.gnn.simulator import Simulator
from envs.decision import REWARD_SCALE
from envs.placement import PlacementEnv


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_checker_accepts():
    env = PlacementEnv(make_problem(Shape(machines=4)))
    gymnasium.utils.env_checker.check_env(env, skip_render_check=True)


def test_a_step_after_the_end_is_refused():
    env = PlacementEnv(make_problem(Shape(machines=4)))
    _, done = env.reset(), False
    while not done:
        _, _, done, _, _ = env.step(0)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(0)


@pytest.mark.parametrize("seed", range(3))
def test_rewards_add_up_and_bounds_hold(seed):
    simulator = Simulator(make_problem(Shape(machines=5, spread=0.0), seed), iterations=8, seed=0)
    env, rng = PlacementEnv(simulator), np.random.default_rng(seed)
    for _ in range(10):
        observation, _ = env.reset()
        first_s, total, done, info = env.bound_s, 0.0, False, {}
        while not done:
            legal = np.flatnonzero(observation["action_mask"])
            before_s, behind = env.bound_s, env._behind[1].copy()
            machine = int(rng.choice(legal))
            observation, reward, done, _, info = env.step(machine)
            assert env.bound_s == pytest.approx(max(before_s, behind[machine]))
            total += reward
        if not math.isfinite(info["iteration_s"]):
            continue
        assert simulator.fits(info["place"])
        assert total == pytest.approx(-REWARD_SCALE * math.log(info["iteration_s"] / first_s))
        # Loads are those of one iteration; the last parameters are not sent.
        assert env.bound_s * 7 <= simulator.makespans([info["place"]])[0]
        assert env._loads.max() * 8 * (1 + 1e-9) >= simulator.bounds(info["place"])[1:].max()


@pytest.mark.slow
def test_the_dqn_finds_the_optimum_of_a_small_problem():
    simulator = Simulator(make_problem(Shape(machines=3, workers=2, samplers=1, nic_Gbps=10), 2), iterations=4, seed=0)
    _, best_s, *_ = enumerate_placements(simulator)
    start = np.array(max(_some(simulator), key=lambda place: simulator.makespans([place])[0]))
    place, found_s, episodes = search_dqn(
        simulator, start, np.random.default_rng(0), share_left=lambda done, best_s: 1.0 - done / 60
    )
    assert episodes == 60 and simulator.makespans([place])[0] == pytest.approx(found_s)
    assert found_s == pytest.approx(best_s)


def _some(simulator):
    from agents.gnn.enumeration import feasible

    return list(feasible(simulator))[:50]


def test_too_many_machines_are_refused():
    with pytest.raises(ProblemError, match="Use metropolis"):
        PlacementEnv(make_problem(Shape(machines=65, workers=2)))

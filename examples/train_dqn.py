"""An agent of stable-baselines3, as it comes, plans a model in AutoMAP's environment.

    python examples/train_dqn.py [decisions]

The environment is a gymnasium environment like any other: where the mask of actions forbids a decision, the nearest
legal one is taken, so the agent need not know of masks. At the end it prints the step time of the plan that the agent
decides on, beside that of the best template.
"""

import sys

import gymnasium
import stable_baselines3

import envs  # noqa: F401  # registers the environments
from automap.cluster import parse_cluster
from automap.problem import Problem
from ir import zoo


def main(decisions: int = 5_000) -> None:
    """Trains the agent and lets it decide a plan.

    Args:
        decisions: number of decisions to learn from.
    """
    problem = Problem.build(zoo.build("vgg19"), parse_cluster("2x4xV100@25Gbit"), {"global_batch": 256})
    env = gymnasium.make("automap/Hybrid-v0", problem=problem)
    agent = stable_baselines3.DQN("MultiInputPolicy", env, gamma=1.0, buffer_size=20_000, seed=0)
    agent.learn(total_timesteps=decisions)

    observation, _ = env.reset(seed=0)
    done = False
    while not done:
        action, _ = agent.predict(observation, deterministic=True)
        observation, _, done, _, info = env.step(action)
    found = info["finished"]
    template_s = env.unwrapped.episodes.reference_s
    fits = "fits" if found.overflow <= 0.0 else "does not fit"
    print(f"decided: {1e3 * found.step_time_s:.1f} ms a step, {fits}; best template: {1e3 * template_s:.1f} ms")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

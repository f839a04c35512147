"""Measures what each ingredient of the DQN is worth: the DQN as it is, without each of them, and with others added.

    python benchmarks/dqn_ablation.py [--evaluations 1000] [--seeds 2] [--problems 26-67] [--variants NAME,NAME]

Each variant searches enumerable problems of `benchmarks/problems.py`, each with every seed. By default these are
pipeline and hybrid problems: on sharding problems some ten plans suffice, whatever is left out. A run ends as soon as
it has reached the known optimum, which only saves time. Prints for each variant the share of runs that end within 1 %
of the optimum and on it, and the median of the evaluations to either (runs that never get there count as infinitely
many). A run in which nothing fits counts as a gap of 100 %.
"""

import argparse
import math
import statistics
from dataclasses import replace

import numpy as np
import problems
import torch
from searchers import chosen

from agents.incumbent import Incumbent
from agents.learning.checkpoint import read_checkpoint
from agents.learning.dqn import MaskedDQN, Watch, new_agent
from agents.learning.hyperparameters import Hyperparameters
from agents.learning.plan_vec_env import PlanVecEnv
from agents.learning.proposals import NETWORK
from agents.learning.search_tree import SearchTree
from agents.searcher import Budget
from automap.space.space import PlanSpace
from envs.decision import REWARD_SCALE, Episodes
from envs.hybrid import HybridDecisions
from envs.kernels import ACTION_FEATURES, STATE_FEATURES, action_feature

NEAR, EXACT = 0.01, 1e-9


class RewardAtTheEnd(Episodes):
    """A DQN that is rewarded with the price alone, at the end of an episode."""

    def step(self, actions):
        rewards, done = super().step(actions)
        rewards[:] = 0.0
        for number in np.flatnonzero(done):
            rewards[number] = -REWARD_SCALE * self.finished(int(number)).log_gap
        return rewards, done


class WithoutReturns(MaskedDQN):
    """Targets may lie below what the episode really reached."""

    def targets(self, batch):
        return super().targets(batch._replace(returns=torch.full_like(batch.returns, -math.inf)))


class BlindToCompletions(MaskedDQN):
    """The network's input does not know what completions reach; its output is still added to it."""

    COLUMNS = tuple(map(action_feature, ("loss", "headroom", "completed_overflow", "is_followed")))

    def act(self, observation):
        seen = observation["observation"].copy()
        for column in self.COLUMNS:
            seen[:, STATE_FEATURES + column :: ACTION_FEATURES] = 0.0
        return super().act({**observation, "observation": seen})

    def targets(self, batch):
        for actions in (batch.actions, batch.next_actions):
            actions[:, self.COLUMNS] = 0.0
        return super().targets(batch)


PLAIN = Hyperparameters()
WITHOUT_TREE = "without tree"
"""In this variant, plans may come twice, and decisions may be taken although their bound says that they cannot win."""
WITH_NETWORK = "begins with the network"
"""This variant begins with the network that comes with the package."""
VARIANTS: dict[str, tuple[type[MaskedDQN], type[Episodes], Hyperparameters]] = {
    "from scratch": (MaskedDQN, Episodes, PLAIN),
    WITH_NETWORK: (MaskedDQN, Episodes, PLAIN),
    "visits alone": (MaskedDQN, Episodes, replace(PLAIN, revisions=0.0)),
    "nine revisions of ten": (MaskedDQN, Episodes, replace(PLAIN, revisions=0.9)),
    "good plans are not shown": (MaskedDQN, Episodes, replace(PLAIN, taught_weight=0.0)),
    "no learning at all": (MaskedDQN, Episodes, replace(PLAIN, learning_rate=0.0)),
    "neither revisions nor learning": (MaskedDQN, Episodes, replace(PLAIN, revisions=0.0, learning_rate=0.0)),
    "reward at the end only": (MaskedDQN, RewardAtTheEnd, PLAIN),
    "blind to completions": (BlindToCompletions, Episodes, PLAIN),
    "targets below what was reached": (WithoutReturns, Episodes, PLAIN),
    WITHOUT_TREE: (MaskedDQN, Episodes, PLAIN),
    "four times the updates": (MaskedDQN, Episodes, replace(PLAIN, updates_per_step=4)),
}


def run(space: PlanSpace, variant: str, evaluations: int, seed: int, optimum_s: float) -> Incumbent:
    """One search."""
    agent_class, episodes_class, parameters = VARIANTS[variant]
    found: list[Incumbent] = []

    def enough() -> bool:
        return bool(found) and found[0].best_s <= (1.0 + EXACT) * optimum_s

    incumbent = Incumbent(space, Budget(evaluations=evaluations), searcher="dqn", should_stop=enough)
    found.append(incumbent)
    episodes = episodes_class(HybridDecisions(space), parameters.num_envs)
    tree = None if variant == WITHOUT_TREE else SearchTree(episodes, lambda: incumbent.best_s)
    agent = new_agent(PlanVecEnv([episodes]), parameters, seed, agent_class, tree)
    if variant == WITH_NETWORK:
        read_checkpoint(agent, parameters, NETWORK)
    agent.learn(total_timesteps=10**12, callback=Watch(incumbent, agent), log_interval=10**12)
    return incumbent


def main() -> None:
    """Prints one line for each variant."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--evaluations", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--problems", default="26-67", help="numbers, as of benchmarks/searchers.py")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    given = parser.parse_args()
    cases = [
        (PlanSpace(problems.problem_of(case)), problems.optimum(case)["step_time_s"])
        for case in chosen(given.problems, ("sharding", "pipeline", "hybrid"))
    ]
    print(f"{len(cases)} problems, {given.seeds} seeds, {given.evaluations} evaluations")
    for variant in given.variants.split(","):
        gaps, near, exact = [], [], []
        for space, optimum_s in cases:
            for seed in range(given.seeds):
                found = run(space, variant, given.evaluations, seed, optimum_s)
                gaps.append(1.0 if found.best is None else found.best_s / optimum_s - 1.0)
                near.append(_plans_to(found, (1.0 + NEAR) * optimum_s))
                exact.append(_plans_to(found, (1.0 + EXACT) * optimum_s))
        print(
            f"{variant:32} within 1 % {100 * np.mean(np.isfinite(near)):4.0f} %   "
            f"exact {100 * np.mean(np.isfinite(exact)):4.0f} %   median to 1 % {statistics.median(near):6.0f}   "
            f"to the optimum {statistics.median(exact):6.0f}   mean gap {100 * np.mean(gaps):6.2f} %",
            flush=True,
        )


def _plans_to(incumbent: Incumbent, step_time_s: float) -> float:
    """Evaluations until a plan was as fast; infinite where none was."""
    return next((float(count) for count, _, reached in incumbent.improvements if reached <= step_time_s), math.inf)


if __name__ == "__main__":
    main()

"""Measures what each ingredient of the DQN is worth: the DQN as it is, without each of them, and with others added.

    python benchmarks/dqn_ablation.py [--evaluations 1000] [--seeds 2] [--problems 26-67] [--variants NAME,NAME]

Enumerable problems of `benchmarks/problems.py`, each with every seed; by default pipeline and hybrid problems: on
sharding problems some ten plans suffice, whatever is left out. A run ends where it has reached the known optimum, which
only saves time. Prints for each variant the share of runs that end within 1 % of the optimum and on it, and the median
of the evaluations to either (runs that never get there count as infinitely many). A run in which nothing fits counts as
a gap of 100 %.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import problems
import torch
from searchers import chosen

from agents.incumbent import Incumbent
from agents.learning.dqn import MaskedDQN, Watch, new_agent
from agents.learning.hyperparameters import Hyperparameters
from agents.learning.plan_vec_env import PlanVecEnv
from agents.learning.search_tree import SearchTree
from agents.searcher import Budget
from automap.space.space import PlanSpace
from envs.decision import GROWTH, REWARD_SCALE, Episodes
from envs.hybrid import HybridDecisions
from envs.kernels import ACTION_FEATURES, STATE_FEATURES

NEAR, EXACT = 0.01, 1e-9


class RewardAtTheEnd(Episodes):
    """A DQN that is rewarded with the price alone, at the end of an episode."""

    def step(self, actions):
        rewards, done = super().step(actions)
        rewards[:] = 0.0
        for number in np.flatnonzero(done):
            rewards[number] = -REWARD_SCALE * self.finished(int(number)).log_gap
        return rewards, done


class WithoutFloor(MaskedDQN):
    """A DQN whose targets may be lower than the return that was really obtained."""

    def targets(self, batch):
        return super().targets(batch._replace(floors=torch.full_like(batch.floors, -math.inf)))


class WithCeiling(MaskedDQN):
    """A DQN whose targets are limited to what the lower bound allows: no further loss."""

    def targets(self, batch):
        seen = batch.observations["observation"][:, STATE_FEATURES:]
        growth = seen.gather(1, ACTION_FEATURES * batch.actions + GROWTH)
        return torch.minimum(super().targets(batch), -REWARD_SCALE * growth)


class BlindToBounds(MaskedDQN):
    """A DQN whose input and output leave out by how much an action raises the bound."""

    def act(self, observation):
        return super().act(self._blind(observation))

    def targets(self, batch):
        return super().targets(batch._replace(next_observations=self._blind(batch.next_observations)))

    @staticmethod
    def _blind(observation):
        seen = observation["observation"]
        seen = seen.clone() if isinstance(seen, torch.Tensor) else seen.copy()
        seen[:, STATE_FEATURES + GROWTH :: ACTION_FEATURES] = 0.0
        return {**observation, "observation": seen}


PLAIN = Hyperparameters()
WITHOUT_TREE = "without tree"
"""Hyperparameters with which plans may repeat, and decisions are allowed whose bound proves that they cannot win."""
VARIANTS: dict[str, tuple[type[MaskedDQN], type[Episodes], Callable[[int], Hyperparameters]]] = {
    "all of it": (MaskedDQN, Episodes, lambda plans: PLAIN),
    "without leads": (MaskedDQN, Episodes, lambda plans: replace(PLAIN, led_share=0.0)),
    "led always": (MaskedDQN, Episodes, lambda plans: replace(PLAIN, led_share=1.0)),
    "no learning at all": (MaskedDQN, Episodes, lambda plans: replace(PLAIN, learning_rate=0.0)),
    "neither leads nor learning": (
        MaskedDQN,
        Episodes,
        lambda plans: replace(PLAIN, led_share=0.0, learning_rate=0.0),
    ),
    "reward at the end only": (MaskedDQN, RewardAtTheEnd, lambda plans: PLAIN),
    "blind to bounds": (BlindToBounds, Episodes, lambda plans: PLAIN),
    "without floor": (WithoutFloor, Episodes, lambda plans: PLAIN),
    "with a ceiling": (WithCeiling, Episodes, lambda plans: PLAIN),
    "without elite": (MaskedDQN, Episodes, lambda plans: replace(PLAIN, elite_share=0.0)),
    WITHOUT_TREE: (MaskedDQN, Episodes, lambda plans: PLAIN),
    "without signs": (MaskedDQN, Episodes, lambda plans: replace(PLAIN, num_signs=0)),
    "one cycle for the budget": (MaskedDQN, Episodes, lambda plans: replace(PLAIN, cycle_plans=plans)),
    "one random decision": (MaskedDQN, Episodes, lambda plans: replace(PLAIN, explored_last=1.0)),
    "two updates a step": (MaskedDQN, Episodes, lambda plans: replace(PLAIN, updates_per_step=2)),
}


def run(space: PlanSpace, variant: str, evaluations: int, seed: int, optimum_s: float) -> Incumbent:
    """Runs one search."""
    agent_class, episodes_class, parameters_of = VARIANTS[variant]
    parameters, budget = parameters_of(evaluations), Budget(evaluations=evaluations)
    found: list[Incumbent] = []

    def enough() -> bool:
        return bool(found) and found[0].best_s <= (1.0 + EXACT) * optimum_s

    incumbent = Incumbent(space, budget, searcher="dqn", should_stop=enough)
    found.append(incumbent)
    episodes = episodes_class(HybridDecisions(space), parameters.num_envs)
    tree = None if variant == WITHOUT_TREE else SearchTree(episodes, lambda: incumbent.best_s)
    agent = new_agent(PlanVecEnv([episodes], parameters.num_signs), parameters, seed, agent_class, tree)
    agent.learn(total_timesteps=10**12, callback=Watch(incumbent), log_interval=10**12)
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
            f"{variant:26} within 1 % {100 * np.mean(np.isfinite(near)):4.0f} %   "
            f"exact {100 * np.mean(np.isfinite(exact)):4.0f} %   median to 1 % {statistics.median(near):6.0f}   "
            f"to the optimum {statistics.median(exact):6.0f}   mean gap {100 * np.mean(gaps):6.2f} %",
            flush=True,
        )


def _plans_to(incumbent: Incumbent, step_time_s: float) -> float:
    """Evaluations until a plan was as fast; infinite where none was."""
    return next((float(count) for count, _, reached in incumbent.improvements if reached <= step_time_s), math.inf)


if __name__ == "__main__":
    main()

"""The masked DQN places the tasks of distributed GNN training: the network and policy of the search for plans.

What `agents.learning.dqn` adds to stable-baselines3 for plans holds here too: masks in the observation, ratings that
begin with what is known (here the growth of the bound after an action), double Q-learning, and episodes of two kinds.
Most episodes follow the best placement so far and decide some tasks again; the others decide all of it, with noise of a
random strength.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.buffers import DictReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger

from agents.gnn.metropolis import ShareLeft
from agents.learning.hyperparameters import Hyperparameters
from agents.learning.network import FORBIDDEN
from agents.learning.q_network import MaskedPolicy, Sizes
from automap.arrays import Ints
from automap.gnn.simulator import Simulator
from envs.decision import Observation
from envs.placement import PlacementEnv

REVISIONS = 0.8
"""Share of the episodes that decide only some tasks of the best placement again (chosen by hand)."""
MOST_REVISED = 6
"""Most tasks that such an episode decides (assumed)."""
NOISE = 0.02, 3.0
"""Least and largest scale of the Gumbel noise on ratings (assumed); an episode draws its own, evenly in logarithms."""


class PlacementDQN(DQN):
    """stable-baselines3's DQN with masked exploration around the best placement.

    Attributes:
        best: [tasks] the best placement so far.
        best_s: its time of an iteration, seconds.
    """

    def __init__(self, env: PlacementEnv, best: Ints, best_s: float, seed: int) -> None:
        self.placement, self.best, self.best_s = env, best, best_s
        self.rng = np.random.default_rng(seed)
        self.free: set[int] = set()
        self.noise = 0.0
        parameters = Hyperparameters()
        super().__init__(
            MaskedPolicy,
            env,
            learning_rate=parameters.learning_rate,
            buffer_size=parameters.buffer_size,
            learning_starts=parameters.learning_starts,
            batch_size=parameters.batch_size,
            gamma=1.0,
            train_freq=16,
            gradient_steps=1,
            target_update_interval=parameters.target_update,
            replay_buffer_class=DictReplayBuffer,
            policy_kwargs={
                "net_arch": list(parameters.hidden),
                "features_extractor_class": Sizes,
                "dropout": 0.0,
                "optimizer_class": torch.optim.AdamW,
            },
            seed=seed,
            device="cpu",
        )

    def begin_episode(self) -> None:
        """Draws what the next episode decides, and how noisily."""
        order = self.placement.order
        count = int(self.rng.integers(1, MOST_REVISED + 1)) if self.rng.random() < REVISIONS else len(order)
        self.free = set(self.rng.choice(order, min(count, len(order)), replace=False).tolist())
        self.noise = float(np.exp(self.rng.uniform(*np.log(NOISE))))

    def _sample_action(
        self, learning_starts: int, action_noise: Any = None, n_envs: int = 1
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        observation = self._last_obs
        assert isinstance(observation, dict)
        action = np.array([self.act(observation)])
        return action, action

    def act(self, observation: Observation) -> int:
        """A machine for the task at hand."""
        env = self.placement
        if env.number == 0:
            self.begin_episode()
        task, legal = env.order[env.number], np.flatnonzero(observation["action_mask"][0])
        if task not in self.free and self.best[task] in legal:
            return int(self.best[task])
        with torch.no_grad():
            rated = self.q_net({k: torch.as_tensor(v) for k, v in observation.items()}).numpy()[0, legal]
        return int(legal[(rated + self.noise * self.rng.gumbel(size=len(legal))).argmax()])

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Takes optimizer steps of the Huber loss on double Q-learning's targets, of legal actions alone."""
        for _ in range(gradient_steps):
            batch: Any = self.replay_buffer.sample(batch_size)  # type: ignore[union-attr]
            with torch.no_grad():
                chosen = self.q_net(batch.next_observations).argmax(dim=1, keepdim=True)
                following = self.q_net_target(batch.next_observations).gather(1, chosen)
                target = batch.rewards + (1.0 - batch.dones) * following
            rated = self.q_net(batch.observations).gather(1, batch.actions.long())
            # Where the mask forbade an action the environment took another one; there is nothing to learn of it.
            known = rated > float(FORBIDDEN) / 2.0
            loss = torch.nn.functional.smooth_l1_loss(rated[known], target[known])
            self.policy.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.q_net.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()
        self._n_updates += gradient_steps


class _Watch(BaseCallback):
    """Keeps the best placement and ends the search."""

    def __init__(self, agent: PlacementDQN, env: PlacementEnv, share_left: ShareLeft) -> None:
        super().__init__()
        self.agent, self.env, self.share_left, self.simulated = agent, env, share_left, 0

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            found = info.get("iteration_s")
            if found is None:
                continue
            self.simulated += 1
            if found < self.agent.best_s:
                self.agent.best_s, self.agent.best = found, info["place"]
        # Within an episode too: of many tasks it takes seconds.
        return self.share_left(self.simulated, self.agent.best_s * self.env.simulator.iterations) > 0.0


def search_dqn(
    simulator: Simulator, place: Ints, rng: np.random.Generator, *, share_left: ShareLeft
) -> tuple[Ints, float, int]:
    """Searches with an untrained network until the budget is spent; see `agents.gnn.metropolis.search_metropolis`."""
    torch.set_num_threads(1)
    env = PlacementEnv(simulator)
    begin_s = float(simulator.makespans([place])[0]) / simulator.iterations
    agent = PlacementDQN(env, place, begin_s, int(rng.integers(1 << 30)))
    agent.set_logger(Logger(folder=None, output_formats=[]))
    watch = _Watch(agent, env, share_left)
    agent.learn(total_timesteps=10**9, callback=watch, log_interval=10**9)
    return agent.best, agent.best_s * simulator.iterations, watch.simulated

"""Replay: the transitions from which a DQN learns, with the returns of finished episodes.

The episodes of the best plans are kept apart. All arrays of transitions are [decisions, ...].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from stable_baselines3.common.buffers import DictReplayBuffer

from automap.space.space import Values
from envs.decision import Finished, Observation


class Batch(NamedTuple):
    """A sample of the replay: one row for each transition."""

    observations: dict[str, torch.Tensor]
    actions: torch.Tensor
    next_observations: dict[str, torch.Tensor]
    rewards: torch.Tensor
    dones: torch.Tensor
    floors: torch.Tensor
    """[batch, 1] return that was obtained from this decision on; -inf while the episode goes on."""


@dataclass(frozen=True, kw_only=True)
class _Episode:
    finished: Finished
    rows: dict[str, npt.NDArray[Any]]


class PlanReplay(DictReplayBuffer):
    """A replay that fills in returns when an episode ends, and keeps the best distinct episodes.

    Attributes:
        floors: [buffer, episodes] return that was obtained from each decision on, a lower bound on its Q value.
    """

    def __init__(self, *args: Any, elite_plans: int, elite_share: float, seed: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.floors = np.full((self.buffer_size, self.n_envs), -np.inf, dtype=np.float32)
        self.elite_plans = elite_plans
        self.elite_share = elite_share
        self.rng = np.random.default_rng(seed)
        self._open: list[list[int]] = [[] for _ in range(self.n_envs)]
        self._elite: list[_Episode] = []
        self._stacked: dict[str, npt.NDArray[Any]] = {}

    def add(  # type: ignore[override]  # DictReplayBuffer narrows its parent's parameters in the same way
        self,
        obs: Observation,
        next_obs: Observation,
        action: npt.NDArray[Any],
        reward: npt.NDArray[Any],
        done: npt.NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        """Adds one step of every episode."""
        at = self.pos
        self.floors[at] = -np.inf
        super().add(obs, next_obs, action, reward, done, infos)
        for e in range(self.n_envs):
            self._open[e].append(at)
            if done[e]:
                self._close(e, infos[e]["finished"])

    def _close(self, env: int, finished: Finished) -> None:
        steps, self._open[env] = self._open[env], []
        self.floors[steps, env] = self.rewards[steps, env][::-1].cumsum()[::-1]
        self.remember(finished, self._transitions(steps, env))

    def _transitions(self, rows: Any, envs: Any) -> dict[str, npt.NDArray[Any]]:
        """Transitions of the replay at some rows of some episodes, one array for each field."""
        parts = {f"obs.{k}": v[rows, envs] for k, v in self.observations.items()}
        parts |= {f"next.{k}": v[rows, envs] for k, v in self.next_observations.items()}
        fields = {"actions": self.actions, "rewards": self.rewards, "dones": self.dones, "floors": self.floors}
        return parts | {name: values[rows, envs] for name, values in fields.items()}

    def remember(self, finished: Finished, rows: dict[str, npt.NDArray[Any]]) -> None:
        """Keeps an episode if it is among the best distinct ones.

        Args:
            finished: the plan and its worth.
            rows: its transitions, one array for each field.
        """
        if any(e.finished.values == finished.values for e in self._elite):
            return
        if len(self._elite) == self.elite_plans and finished.worth_s >= self._elite[-1].finished.worth_s:
            return
        self._elite.append(_Episode(finished=finished, rows={k: v.copy() for k, v in rows.items()}))
        self._elite.sort(key=lambda e: e.finished.worth_s)
        del self._elite[self.elite_plans :]
        self._stacked = {k: np.concatenate([e.rows[k] for e in self._elite]) for k in rows}

    @property
    def elite(self) -> list[Values]:
        """Values of the best distinct plans, the best first."""
        return [episode.finished.values for episode in self._elite]

    def sample_plans(self, batch_size: int) -> Batch:
        """A batch: `elite_share` of it from the best episodes, the rest drawn uniformly from all."""
        num_elite = int(batch_size * self.elite_share) if self._elite else 0
        count = batch_size - num_elite
        rows = self.rng.integers(0, self.buffer_size if self.full else self.pos, count)
        envs = self.rng.integers(0, self.n_envs, count)
        parts = self._transitions(rows, envs)
        if num_elite:
            chosen = self.rng.integers(0, len(self._stacked["rewards"]), num_elite)
            parts = {k: np.concatenate([v, self._stacked[k][chosen]]) for k, v in parts.items()}
        tensors = {k: torch.as_tensor(v) for k, v in parts.items()}
        return Batch(
            observations={k: tensors[f"obs.{k}"] for k in self.observations},
            actions=tensors["actions"].long(),
            next_observations={k: tensors[f"next.{k}"] for k in self.next_observations},
            rewards=tensors["rewards"].reshape(-1, 1),
            dones=tensors["dones"].reshape(-1, 1).float(),
            floors=tensors["floors"].reshape(-1, 1),
        )

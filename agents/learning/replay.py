"""Replay: the decisions of finished episodes from which a DQN learns.

Only legal actions are kept, so that a decision takes some hundred bytes. Decisions and actions are kept in two rings;
the oldest go first. A decision is followed by the next one of its episode.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from stable_baselines3.common.buffers import BaseBuffer

from agents.learning.network import Floats32, legal_rows
from envs.decision import Observation
from envs.kernels import ACTION_FEATURES, STATE_FEATURES

ROWS_A_DECISION = 8
"""Number of legal actions for which there is room, for each decision; assumed. With more, fewer decisions are kept."""


class Batch(NamedTuple):
    """Decisions drawn from the replay."""

    states: torch.Tensor
    """[batch, STATE_FEATURES] state before each decision."""
    actions: torch.Tensor
    """[batch, ACTION_FEATURES] action that was taken."""
    rewards: torch.Tensor
    """[batch] reward of the decision."""
    returns: torch.Tensor
    """[batch] sum of the rewards from the decision to the end of its episode."""
    following: torch.Tensor
    """[m] numbers of the decisions, in this batch, that another one follows: once for each legal action there."""
    next_states: torch.Tensor
    """[m, STATE_FEATURES] state of the following decision."""
    next_actions: torch.Tensor
    """[m, ACTION_FEATURES] each legal action there."""
    taught: torch.Tensor
    """[k] numbers of the decisions, in this batch, for which a teacher showed an action: once for each legal action."""
    taught_actions: torch.Tensor
    """[k, ACTION_FEATURES] each legal action there."""
    is_shown: torch.Tensor
    """[k] whether it is the one that was shown."""


@dataclass
class _Episode:
    """An episode that goes on."""

    states: list[Floats32] = field(default_factory=list)
    actions: list[Floats32] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    shown: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


class PlanReplay(BaseBuffer):
    """A replay of finished episodes.

    Attributes:
        shown: [episodes] action that a teacher would take in the step that is added next, or -1.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: Any,
        action_space: Any,
        device: str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        *,
        seed: int,
    ) -> None:
        """Makes an empty replay of `buffer_size` decisions; the other arguments are those of stable-baselines3."""
        super().__init__(buffer_size, observation_space, action_space, device, n_envs)
        self.rng = np.random.default_rng(seed)
        self._states = np.zeros((buffer_size, STATE_FEATURES), dtype=np.float32)
        self._numbers = np.zeros((buffer_size, 4), dtype=np.int64)
        """Of each decision: number of its first action, how many there are, which was taken, which was shown or -1."""
        self._rewards = np.zeros((buffer_size, 2), dtype=np.float32)
        """Of each decision: reward, and sum of the rewards to the end of the episode."""
        self._is_last = np.zeros(buffer_size, dtype=np.bool_)
        self._actions = np.zeros((buffer_size * ROWS_A_DECISION, ACTION_FEATURES), dtype=np.float32)
        # Decisions and actions are numbered from the first one on; these are kept.
        self._oldest, self._next, self._next_action = 0, 0, 0
        self._open = [_Episode() for _ in range(n_envs)]
        self.shown = np.full(n_envs, -1, dtype=np.int64)

    def add(
        self,
        obs: Observation,
        next_obs: Observation,
        action: npt.NDArray[Any],
        reward: npt.NDArray[Any],
        done: npt.NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        """Adds one step of every episode; what an episode has seen joins the replay when it ends."""
        rows, actions, features = legal_rows(obs)
        begins = np.searchsorted(rows, np.arange(self.n_envs + 1))
        for number, episode in enumerate(self._open):
            part = slice(begins[number], begins[number + 1])
            episode.states.append(obs["observation"][number, :STATE_FEATURES].copy())
            episode.actions.append(features[part])
            episode.chosen.append(int(np.searchsorted(actions[part], action[number])))
            # -1 is not an action.
            found = np.flatnonzero(actions[part] == self.shown[number]).tolist()
            episode.shown.append(found[0] if found else -1)
            episode.rewards.append(float(reward[number]))
            if done[number]:
                self._close(episode)
                self._open[number] = _Episode()

    def forget(self) -> None:
        """Forgets everything, such as what has become wrong."""
        self._oldest = self._next
        self.forget_open(range(self.n_envs))

    def forget_open(self, numbers: range) -> None:
        """Forgets what episodes that will not be finished have seen."""
        for number in numbers:
            self._open[number] = _Episode()

    def _close(self, episode: _Episode) -> None:
        returns = np.cumsum(np.array(episode.rewards)[::-1])[::-1]
        for step, (state, actions) in enumerate(zip(episode.states, episode.actions, strict=True)):
            room = len(self._actions)
            while self._next - self._oldest == self.buffer_size or (
                self._oldest < self._next
                and self._next_action + len(actions) - self._numbers[self._oldest % self.buffer_size, 0] > room
            ):
                self._oldest += 1
            at = self._next % self.buffer_size
            self._states[at] = state
            self._numbers[at] = self._next_action, len(actions), episode.chosen[step], episode.shown[step]
            self._rewards[at] = episode.rewards[step], returns[step]
            self._is_last[at] = step == len(episode.states) - 1
            self._actions[np.arange(self._next_action, self._next_action + len(actions)) % room] = actions
            self._next += 1
            self._next_action += len(actions)

    def size(self) -> int:
        """Number of decisions that can be drawn."""
        return self._next - self._oldest

    def draw(self, count: int) -> Batch:
        """Draws `count` decisions uniformly, with repetition."""
        numbers = self.rng.integers(self._oldest, self._next, count)
        at, room = numbers % self.buffer_size, len(self._actions)
        first, _, chosen, shown = self._numbers[at].T
        has_next = np.flatnonzero(~self._is_last[at])
        after = (numbers[has_next] + 1) % self.buffer_size
        following, next_rows = self._all_actions(after)
        taught = np.flatnonzero(shown >= 0)
        choosing, rows = self._all_actions(at[taught])
        rewards, returns = self._rewards[at].T
        return Batch(
            states=torch.from_numpy(self._states[at]),
            actions=torch.from_numpy(self._actions[(first + chosen) % room]),
            rewards=torch.from_numpy(rewards.copy()),
            returns=torch.from_numpy(returns.copy()),
            following=torch.from_numpy(has_next[following]),
            next_states=torch.from_numpy(self._states[after[following]]),
            next_actions=torch.from_numpy(self._actions[next_rows % room]),
            taught=torch.from_numpy(taught[choosing]),
            taught_actions=torch.from_numpy(self._actions[rows % room]),
            is_shown=torch.from_numpy(rows == (first + shown)[taught[choosing]]),
        )

    def _all_actions(self, at: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """[m] which of the decisions `at`, and [m] number of the action, for each legal action of each decision."""
        begins, counts, *_ = self._numbers[at].T
        decisions = np.repeat(np.arange(len(at)), counts)
        inside = np.arange(len(decisions)) - np.repeat(np.cumsum(counts) - counts, counts)
        return decisions, begins[decisions] + inside

    def _get_samples(self, batch_inds: Any, env: Any = None) -> Any:
        raise NotImplementedError("decisions are drawn with `draw`")

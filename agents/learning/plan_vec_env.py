"""PlanVecEnv: episodes of one or several problems side by side, as stable-baselines3 steps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

from envs.decision import MAX_ACTIONS, Episodes, Observation, observation_space

Actions = npt.NDArray[np.int64]


class PlanVecEnv(VecEnv):
    """Episodes of one or several problems, side by side.

    It adds to the observation what tells the states of one problem apart: the slot to decide, and the decisions so far
    as a sum of fixed random signs, one vector for each (slot, value).

    Attributes:
        signs: [slots + 1, MAX_ACTIONS, signs] these vectors.
    """

    def __init__(self, episodes: Sequence[Episodes], num_signs: int) -> None:
        """Begins all plans.

        Args:
            episodes: the episodes of each problem.
            num_signs: length of the vectors; 0 for a network that serves several problems and learns nothing by heart.
        """
        self.episodes = episodes
        slots = max(len(some.space.slots) for some in episodes)
        space = observation_space()
        space["slot"] = spaces.Box(0, slots, (1,), np.float32)
        space["history"] = spaces.Box(-np.inf, np.inf, (num_signs,), np.float32)
        shape = (slots + 1, MAX_ACTIONS, num_signs)
        self.signs = np.random.default_rng(0).choice(np.array([-1.0, 1.0], np.float32), shape)
        counts = [some.count for some in episodes]
        self._parts = [slice(last - count, last) for count, last in zip(counts, np.cumsum(counts), strict=True)]
        self._history = np.zeros((sum(counts), num_signs), dtype=np.float32)
        self._actions = np.zeros(sum(counts), dtype=np.int64)
        super().__init__(sum(counts), space, spaces.Discrete(MAX_ACTIONS))

    def observe(self) -> Observation:
        """The observations of all episodes, [episodes, ...]."""
        seen = [some.observe() for some in self.episodes]
        found = {name: np.concatenate([part[name] for part in seen]) for name in seen[0]}
        return {**found, "slot": self._slots()[:, None].astype(np.float32), "history": self._history.copy()}

    def _slots(self) -> Actions:
        found: Actions = np.concatenate([some.partial_plans.episodes.position for some in self.episodes])
        return found

    def reset(self) -> Observation:
        """Begins all plans."""
        self._history[:] = 0.0
        for some in self.episodes:
            some.begin(np.ones(some.count, dtype=np.bool_))
        return self.observe()

    def step_async(self, actions: npt.NDArray[Any]) -> None:
        """Keeps the actions, [episodes], for `step_wait`."""
        self._actions = np.asarray(actions, dtype=np.int64)

    def step_wait(self) -> tuple[Observation, npt.NDArray[Any], npt.NDArray[Any], list[dict[str, Any]]]:
        """Steps all episodes; where a plan is complete, the next one begins in its place."""
        self._history += self.signs[self._slots(), self._actions]
        taken = [some.step(self._actions[part]) for some, part in zip(self.episodes, self._parts, strict=True)]
        rewards = np.concatenate([reward for reward, _ in taken]).astype(np.float32)
        done = np.concatenate([ended for _, ended in taken])
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if done.any():
            self._history[done] = 0.0
            last = self.observe()
            for some, part, (_, ended) in zip(self.episodes, self._parts, taken, strict=True):
                for e in np.flatnonzero(ended):
                    row = part.start + int(e)
                    infos[row]["finished"] = some.finished(int(e))
                    infos[row]["terminal_observation"] = {name: rows[row] for name, rows in last.items()}
                if ended.any():
                    some.begin(ended)
        return self.observe(), rewards, done, infos

    def close(self) -> None:
        """Nothing to close."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """An attribute of each environment; all are one object here."""
        return [getattr(self, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """See `get_attr`."""
        setattr(self, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """See `get_attr`."""
        return [getattr(self, method_name)(*args, **kwargs)]

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """Nothing is wrapped."""
        return [False] * self.num_envs

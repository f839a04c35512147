"""PlanVecEnv: episodes of one or several problems side by side, as stable-baselines3 steps them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

from envs.decision import MAX_ACTIONS, REWARD_SCALE, Episodes, Finished, Observation, observation_space

Actions = npt.NDArray[np.int64]


class PlanVecEnv(VecEnv):
    """Episodes of one or several problems, side by side.

    Attributes:
        episodes: the episodes of each problem. They may be replaced by as many of another problem where all of them
            have just begun.
        worth_s: called with the number of an episode that has ended and its outcome; returns the step time in
            seconds as which it is rewarded, that of its plan unless told otherwise.
        on_end: called with the number of an episode that has ended, before the next one begins in its place; `keep`
            unless told otherwise.
    """

    def __init__(self, episodes: Sequence[Episodes]) -> None:
        """Takes episodes at their beginning."""
        self.episodes = list(episodes)
        counts = [some.count for some in episodes]
        self.parts = [slice(last - count, last) for count, last in zip(counts, np.cumsum(counts).tolist(), strict=True)]
        self.worth_s: Callable[[int, Finished], float] = lambda number, finished: finished.worth_s
        self.on_end: Callable[[int], None] = self.keep
        self._actions = np.zeros(sum(counts), dtype=np.int64)
        super().__init__(sum(counts), observation_space(), spaces.Discrete(MAX_ACTIONS))

    def place(self, number: int) -> tuple[Episodes, int]:
        """The episodes of a problem to which an episode belongs, and its number among them."""
        part = next(i for i, part in enumerate(self.parts) if number < part.stop)
        return self.episodes[part], number - self.parts[part].start

    def slots(self) -> list[int]:
        """[episodes] number of the slot that each episode decides."""
        return [int(slot) for some in self.episodes for slot in some.partial_plans.episodes.position]

    def observe(self) -> Observation:
        """The observations of all episodes, [episodes, ...]."""
        seen = [some.observe() for some in self.episodes]
        return {name: np.concatenate([part[name] for part in seen]) for name in seen[0]}

    def reset(self) -> Observation:
        """Begins all plans."""
        for some in self.episodes:
            some.begin(np.ones(some.count, dtype=np.bool_))
        return self.observe()

    def step_async(self, actions: npt.NDArray[Any]) -> None:
        """Keeps the actions, [episodes], for `step_wait`."""
        self._actions = np.asarray(actions, dtype=np.int64)

    def step_wait(self) -> tuple[Observation, npt.NDArray[Any], npt.NDArray[Any], list[dict[str, Any]]]:
        """Steps all episodes; where a plan is complete, the next one begins in its place."""
        taken = [some.step(self._actions[part]) for some, part in zip(self.episodes, self.parts, strict=True)]
        rewards = np.concatenate([reward for reward, _ in taken]).astype(np.float32)
        done = np.concatenate([ended for _, ended in taken])
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if done.any():
            last = self.observe()
            for some, part, (_, ended) in zip(self.episodes, self.parts, taken, strict=True):
                for e in np.flatnonzero(ended).tolist():
                    row, finished = part.start + e, some.finished(e)
                    rewards[row] += REWARD_SCALE * math.log(finished.worth_s / self.worth_s(row, finished))
                    infos[row]["finished"] = finished
                    infos[row]["terminal_observation"] = {name: rows[row] for name, rows in last.items()}
                    self.on_end(row)
                if ended.any():
                    some.begin(ended)
        return self.observe(), rewards, done, infos

    def keep(self, number: int) -> None:
        """Makes what an episode has found known to those that begin later."""
        some, at = self.place(number)
        ended = some.finished(at)
        some.known.add(ended.values, (ended.step_time_s, ended.overflow))
        found = some.best_completion(at)
        if found is not None:
            some.known.add(found[0], (found[1], 0.0))

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

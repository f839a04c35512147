"""Pretraining: one network learns to plan on many generated problems, shown to it one group after another.

A few problems are learnt side by side. Each stays for some plans, then another problem takes its place. Most episodes
decide a skeleton alone; elimination solves it, and the plan that it leads to is the reward (`solved_skeletons`). So the
network learns what elimination cannot know: which skeletons are worth a solve. The others decide a whole plan.

Some episodes are led to the best plan that is known, a teacher's (`agents.learning.teacher`) or one that was found in
learning; what they find stays unknown to the others. The others are shown what that plan decides, as long as their
decisions agree with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

from agents.learning.checkpoint import read_checkpoint, write_checkpoint
from agents.learning.dqn import MaskedDQN, new_agent
from agents.learning.hyperparameters import Hyperparameters
from agents.learning.leads import Guide
from agents.learning.lessons import Lesson
from agents.learning.plan_vec_env import PlanVecEnv
from agents.learning.proposals import LEAST_NOISE, MOST_NOISE
from envs.decision import REWARD_SCALE, Episodes
from envs.hybrid import HybridDecisions

PARAMETERS = Hyperparameters(
    num_envs=8,
    learning_rate=1e-3,
    batch_size=512,
    buffer_size=600_000,
    learning_starts=5_000,
    target_update=4_000,
    train_every=1,
    updates_per_step=2,
    dropout=0.2,
    taught_weight=10.0,
)
"""Hyperparameters of the training; of these the network only keeps its sizes."""
SIDE_BY_SIDE = 16
"""Number of problems that are learnt at a time."""
PLANS = 32
"""Number of plans for which a problem stays. What was seen of many problems teaches more than many plans of one, but
building a problem takes as long as some dozen plans."""
SKELETONS = 0.75
"""Share of the episodes that decide a skeleton alone, which is then solved; the others decide a whole plan."""
LED, EXPLORING = 0.3, 0.2
"""Shares of the episodes that are led to the best known plan, and of those that take random decisions."""
EXPLORED = 2.0
"""Number of random decisions in these, in the mean."""
SAVE_EVERY = 50
"""Number of problems between two checkpoints."""
RATE_AT_END = 0.1
"""Learning rate at the end over that at the beginning; it falls linearly."""


class _Course(BaseCallback):
    """Leads the episodes, replaces problems, and ends the training when its time or the problems are over."""

    def __init__(
        self,
        lessons: Iterator[Lesson],
        parameters: Hyperparameters,
        seconds: float,
        on_visit: Callable[[int, float], None],
    ) -> None:
        super().__init__()
        self._lessons, self._parameters, self._seconds, self._on_visit = lessons, parameters, seconds, on_visit
        self.resumed_s, self._began = 0.0, time.monotonic()
        self._current: list[Lesson] = []
        self._left: list[int] = []
        self._is_skeleton = [False] * (SIDE_BY_SIDE * parameters.num_envs)
        self._is_over = False
        self.visits = 0

    @property
    def seconds(self) -> float:
        """Seconds of training so far, those before an interruption included."""
        return self.resumed_s + time.monotonic() - self._began

    def episodes(self) -> Episodes:
        """The episodes of the next problem."""
        lesson = next(self._lessons)
        self._current.append(lesson)
        self._left.append(PLANS)
        return self._begun(lesson)

    def _begun(self, lesson: Lesson) -> Episodes:
        return Episodes(HybridDecisions(lesson.space), self._parameters.num_envs, known=lesson.known)

    def _on_training_start(self) -> None:
        self._agent.plan_env.on_end = self._end
        for number in range(len(self._current)):
            self._begin_all(number)
        self._agent._last_obs = self._agent.plan_env.observe()

    @property
    def _agent(self) -> MaskedDQN:
        assert isinstance(self.model, MaskedDQN)
        return self.model

    def _on_rollout_start(self) -> None:
        fraction = min(1.0, self.seconds / self._seconds)
        for group in self._agent.policy.optimizer.param_groups:
            group["lr"] = self._parameters.learning_rate * (1.0 - (1.0 - RATE_AT_END) * fraction)
        is_new = False
        for number, left in enumerate(self._left):
            if left > 0:
                continue
            lesson = next(self._lessons, None)
            if lesson is None:
                self._is_over = True
                break
            self._current[number], self._left[number] = lesson, PLANS
            self._agent.plan_env.episodes[number] = self._begun(lesson)
            self._begin_all(number)
            is_new = True
            self.visits += 1
            self._on_visit(self.visits, self.seconds)
        if is_new:
            self._agent._last_obs = self._agent.plan_env.observe()

    def _on_step(self) -> bool:
        return not self._is_over and self.seconds < self._seconds

    def _begin_all(self, number: int) -> None:
        """Begins the episodes of a problem."""
        env = self._agent.plan_env
        part, episodes = env.parts[number], env.episodes[number]
        self._agent.replay_buffer.forget_open(range(part.start, part.stop))
        for episode in range(part.start, part.stop):
            self._guide(episode)
        episodes.begin(np.ones(episodes.count, dtype=np.bool_))

    def _end(self, episode: int) -> float:
        """Takes what an episode has found, before the next one begins in its place.

        Returns:
            What is added to its reward: how much better than its own plan the one is that its skeleton leads to.
        """
        lesson, guide, env = self._lesson(episode), self._agent.guides[episode], self._agent.plan_env
        self._left[episode // self._parameters.num_envs] -= 1
        if guide.lead is None:
            env.keep(episode)
        more = 0.0
        if self._is_skeleton[episode]:
            episodes, at = env.place(episode)
            ended = episodes.finished(at)
            found = lesson.solve(ended.values)
            more = REWARD_SCALE * math.log(ended.worth_s / found.worth_s(episodes.reference_s))
            if guide.lead is None:
                episodes.known.add(found.values, (found.step_time_s, found.overflow))
        self._guide(episode)
        return more

    def _guide(self, episode: int) -> None:
        """Decides what the next episode decides, how it is led, and how it explores."""
        agent, lesson = self._agent, self._lesson(episode)
        episodes, at = agent.plan_env.place(episode)
        is_skeleton = self._is_skeleton[episode] = bool(agent.rng.random() < SKELETONS)
        decided = lesson.space.first.signature if is_skeleton else len(lesson.space.slots)
        episodes.confine(at, None, (0, decided))
        taught = None if lesson.taught.values is None else np.array(lesson.taught.values, dtype=np.int64)
        lead, random, noise = None, 0.0, 0.0
        draw = agent.rng.random()
        if draw < LED:
            lead = taught
        elif draw < LED + EXPLORING:
            random = EXPLORED / decided
        else:
            noise = float(np.exp(agent.rng.uniform(*np.log((LEAST_NOISE, MOST_NOISE)))))
        agent.guides[episode] = Guide(lead=lead, taught=taught, random=random, noise=noise)

    def _lesson(self, episode: int) -> Lesson:
        return self._current[episode // self._parameters.num_envs]


def train_agent(
    folder: Path,
    lessons: Iterator[Lesson],
    *,
    seconds: float,
    seed: int,
    on_visit: Callable[[int, float, MaskedDQN], None],
    about: Mapping[str, Any],
    parameters: Hyperparameters = PARAMETERS,
) -> MaskedDQN:
    """Trains a network, writes its checkpoint and returns the agent.

    Args:
        folder: folder of the checkpoint, which is written every now and then; a training that was interrupted goes on.
        lessons: problems to learn on; the training ends with them.
        seconds: duration of the training.
        seed: seed of network, replay and exploration.
        on_visit: called when a problem is replaced, with the number of problems so far, the seconds so far, and the
            agent.
        about: entries of the checkpoint's JSON document, read whenever it is written.
        parameters: hyperparameters.
    """
    visits = 0
    learnt: list[MaskedDQN] = []

    def visited(count: int, at_s: float) -> None:
        on_visit(visits + count, at_s, learnt[0])
        if count % SAVE_EVERY == 0:
            write_checkpoint(learnt[0], parameters, folder, {**about, "seconds": at_s, "problems": visits + count})

    course = _Course(lessons, parameters, seconds, visited)
    env = PlanVecEnv([course.episodes() for _ in range(SIDE_BY_SIDE)])
    agent = new_agent(env, parameters, seed)
    learnt.append(agent)
    if (folder / "agent.json").exists():
        written = read_checkpoint(agent, parameters, folder)
        course.resumed_s, visits = float(written["seconds"]), int(written["problems"])
    agent.learn(total_timesteps=10**12, callback=course, log_interval=10**12)
    done = {**about, "seconds": course.seconds, "problems": visits + course.visits}
    write_checkpoint(agent, parameters, folder, done)
    return agent

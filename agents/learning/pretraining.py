"""Pretraining: one network learns to plan on many generated problems, a few of them side by side at a time.

Each problem stays for a few plans; then another one takes its place. Half of the episodes follow the best plan that a
teacher knows (`agents.learning.teacher`); what they find is not made known to the other episodes. The other episodes
decide by themselves, and the network is shown what the teacher would decide as long as their shape is that of the
teacher.

On most problems only skeletons are decided, the decisions before the first signature, as the network does in a search
(`agents.learning.proposed_skeletons`). Elimination then solves the signatures, and the reward of the episode is that of
the plan found. If this plan is faster than the teacher's, it becomes the teacher's plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

from agents.incumbent import Incumbent
from agents.learning.checkpoint import read_checkpoint, write_checkpoint
from agents.learning.dqn import MaskedDQN, new_agent
from agents.learning.exploration import Guide
from agents.learning.hyperparameters import Hyperparameters
from agents.learning.lessons import Lesson
from agents.learning.plan_vec_env import PlanVecEnv
from agents.learning.solved_skeletons import SolvedSkeletons
from agents.searcher import Budget
from automap.bounds.known_plans import worth_s
from envs.decision import Episodes, Finished
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
"""Number of problems that are learnt at a time (assumed)."""
WHOLE = 0.125
"""Share of the visits in which whole plans are decided: they take ten times as many decisions (assumed)."""
PLANS = 8
"""Number of plans for which a problem stays. Building it takes longer than these plans, but what was seen of many
problems teaches more than many plans of one."""
LED = 0.5
"""Share of the episodes that are led to the teacher's plan (assumed)."""
EXPLORING = 0.25
"""Share of the episodes that take random decisions (assumed)."""
EXPLORED = 2.0
"""Number of random decisions in these, in the mean (assumed)."""
SAVE_EVERY = 50
"""Number of problems between two checkpoints (assumed)."""
RATE_AT_END = 0.1
"""Learning rate at the end over that at the beginning (assumed); it falls linearly."""


class _Visit:
    """A problem while it is learnt on.

    Attributes:
        episodes: its episodes.
        left: number of plans for which it stays.
        best: the best plan that is known to the teacher, or None.
    """

    def __init__(self, lesson: Lesson, count: int, *, whole: bool) -> None:
        """Begins `count` episodes, which decide whole plans or skeletons alone."""
        space = lesson.space
        incumbent = Incumbent(space, Budget(), searcher="elimination")
        self.episodes = Episodes(HybridDecisions(space), count, incumbent.table, known=lesson.known)
        self.left = PLANS
        incumbent.price(lesson.known.values)
        best_s = math.inf if lesson.best is None else float(space.price(np.array([lesson.best]))[0, 0])
        self.best = lesson.best if best_s <= incumbent.best_s else incumbent.best
        self._space, self._skeletons = space, None if whole else SolvedSkeletons(incumbent)
        if not whole:
            for episode in range(count):
                self.episodes.confine(episode, None, (0, space.first.signature))
            self.episodes.begin(np.ones(count, dtype=np.bool_))

    def worth_s(self, finished: Finished) -> float:
        """Step time as which an episode is rewarded: where it decided a skeleton, what solving this leads to."""
        if self._skeletons is None:
            return finished.worth_s
        values, first = finished.values, self._space.first.signature
        plans = [values, self._skeletons.solve(values)]
        if self.best is not None and self.best[:first] == values[:first]:
            plans.append(self.best)
        worth = worth_s(self._space.price(np.array(plans)), self.episodes.reference_s)
        return float(worth.min())

    def keep(self, finished: Finished) -> None:
        """Makes what the skeleton of an episode has led to known to the others, and to the teacher if it is faster."""
        solved = None if self._skeletons is None else self._skeletons.led_to(finished.values)
        if solved is None:
            return
        seconds, overflow = self._space.price(np.array([solved]))[0].tolist()
        self.episodes.known.add(solved, (seconds, overflow))
        if overflow <= 0.0 and (self.best is None or seconds < self._space.price(np.array([self.best]))[0, 0]):
            self.best = solved


class _Course(BaseCallback):
    """Leads the episodes, replaces problems, and ends the training when its time or the problems are over."""

    def __init__(
        self,
        lessons: Iterator[Lesson],
        parameters: Hyperparameters,
        seconds: float,
        on_visit: Callable[[int, float], None],
        whole: float,
    ) -> None:
        super().__init__()
        self._lessons, self._parameters, self._seconds, self._on_visit = lessons, parameters, seconds, on_visit
        self._whole, self._rng = whole, np.random.default_rng(0)
        self.resumed_s, self._began = 0.0, time.monotonic()
        self.problems = [self._begun(next(lessons)) for _ in range(SIDE_BY_SIDE)]
        self._is_over = False
        self.visits = 0

    @property
    def seconds(self) -> float:
        """Seconds of training so far, those before an interruption included."""
        return self.resumed_s + time.monotonic() - self._began

    def _begun(self, lesson: Lesson) -> _Visit:
        return _Visit(lesson, self._parameters.num_envs, whole=bool(self._rng.random() < self._whole))

    def _problem(self, episode: int) -> _Visit:
        """The problem to which an episode belongs."""
        return self.problems[episode // self._parameters.num_envs]

    def _on_training_start(self) -> None:
        agent: Any = self.model
        agent.plan_env.on_end = self._keep
        agent.plan_env.worth_s = lambda episode, finished: self._problem(episode).worth_s(finished)
        for episode in range(agent.plan_env.num_envs):
            self._begin(agent, episode, 60)

    def _on_rollout_start(self) -> None:
        agent: Any = self.model
        env: PlanVecEnv = agent.plan_env
        fraction = min(1.0, self.seconds / self._seconds)
        for group in agent.policy.optimizer.param_groups:
            group["lr"] = self._parameters.learning_rate * (1.0 - (1.0 - RATE_AT_END) * fraction)
        is_new = False
        for number, problem in enumerate(self.problems):
            if problem.left > 0:
                continue
            lesson = next(self._lessons, None)
            if lesson is None:
                self._is_over = True
                break
            self.problems[number] = self._begun(lesson)
            env.episodes[number] = self.problems[number].episodes
            part = env.parts[number]
            agent.replay_buffer.forget_open(range(part.start, part.stop))
            for episode in range(part.start, part.stop):
                self._begin(agent, episode, 60)
            is_new = True
            self.visits += 1
            self._on_visit(self.visits, self.seconds)
        if is_new:
            agent._last_obs = env.observe()

    def _on_step(self) -> bool:
        agent: Any = self.model
        for number, info in enumerate(self.locals["infos"]):
            if "finished" in info:
                self._problem(number).left -= 1
                self._begin(agent, number, info["finished"].num_decisions)
        return not self._is_over and self.seconds < self._seconds

    def _keep(self, number: int) -> None:
        """Keeps what an episode has found without being led."""
        agent: Any = self.model
        if agent.guides[number].forced is None:
            agent.plan_env.keep(number)
            some, at = agent.plan_env.place(number)
            self._problem(number).keep(some.finished(at))

    def _begin(self, agent: MaskedDQN, episode: int, num_decisions: int) -> None:
        """Decides how an episode that begins is led, or explores."""
        best, draw = self._problem(episode).best, agent.rng.random()
        taught = None if best is None else np.array(best, dtype=np.int64)
        explored = EXPLORED / max(1, num_decisions) if draw > 1.0 - EXPLORING else 0.0
        agent.guides[episode] = Guide(forced=taught if draw < LED else None, taught=taught, random=explored)


def train_agent(
    folder: Path,
    lessons: Iterator[Lesson],
    *,
    seconds: float,
    seed: int,
    on_visit: Callable[[int, float, MaskedDQN], None],
    about: Mapping[str, Any],
    parameters: Hyperparameters = PARAMETERS,
    whole: float = WHOLE,
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
        whole: share of the visits in which whole plans are decided, not skeletons alone.
    """
    visits = 0
    learnt: list[MaskedDQN] = []

    def visited(count: int, at_s: float) -> None:
        on_visit(visits + count, at_s, learnt[0])
        if count % SAVE_EVERY == 0:
            write_checkpoint(learnt[0], parameters, folder, {**about, "seconds": at_s, "problems": visits + count})

    course = _Course(lessons, parameters, seconds, visited, whole)
    env = PlanVecEnv([problem.episodes for problem in course.problems])
    agent = new_agent(env, parameters, seed)
    learnt.append(agent)
    if (folder / "agent.json").exists():
        written = read_checkpoint(agent, parameters, folder)
        course.resumed_s, visits = float(written["seconds"]), int(written["problems"])
    agent.learn(total_timesteps=10**12, callback=course, log_interval=10**12)
    done = {**about, "seconds": course.seconds, "problems": visits + course.visits}
    write_checkpoint(agent, parameters, folder, done)
    return agent

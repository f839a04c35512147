"""The masked DQN, top to bottom: network, replay, learner, search.

stable-baselines3's DQN, made for plan search (`benchmarks/dqn_ablation.py` says what each part is worth):

- The action mask lies in the observation, so acting and the target maximum see legal values only.
- The immediate reward of a decision is known before it is taken (the growth of the lower bound), so the network adds
  to it only what is lost later: Q(s, a) = -scale * growth(s, a) + f(s, a). An untrained network is greedy on the bound.
- Targets are clipped from below by the return really obtained: an episode is deterministic, so it is reachable.
- A quarter of every batch comes from the best distinct plans found so far.
- Half of the episodes are led to a plan near one of the best; the network decides where that is no longer open. It
  learns most about decisions that differ little from good ones (Go-Explore, arXiv 1901.10995, explores from there too).
- The exploration of the others comes in cycles and is measured in decisions an episode, half of them drawn by the
  bound.
- The tree of what has been explored (`agents/learning/search_tree.py`) keeps the search from plans that it knows, and
from those whose bound says that they cannot win.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.dqn.policies import DQNPolicy, QNetwork

from agents.incumbent import Incumbent
from agents.learning.plan_vec_env import PlanVecEnv
from agents.learning.replay import Batch, PlanReplay
from agents.learning.search_tree import SearchTree
from agents.searcher import Budget, OnProgress, SearchResult, ShouldStop
from automap.plan import Plan
from automap.problem import Problem
from automap.space.space import Ints, PlanSpace, Values
from envs.decision import GROWTH, MAX_ACTIONS, REWARD_SCALE, Decisions, Episodes, Observation
from envs.hybrid import HybridDecisions
from envs.observing import ACTION_FEATURES, STATE_FEATURES

FORBIDDEN = -1e9
"""Q of a masked action."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hyperparameters:
    """Everything that can be tuned, with its reason."""

    num_envs: int = 16
    """Acting is batched."""
    hidden: tuple[int, ...] = (64, 64)
    """Of the layers."""
    num_signs: int = 64
    """That tell the decisions of one problem apart (`PlanVecEnv`)."""
    learning_rate: float = 5e-4
    batch_size: int = 64
    """Decisions of one update."""
    updates_per_step: int = 4
    """Of all environments together: one update for 4 decisions. One for 8 takes half the time of learning and some more
    plans (`benchmarks/dqn_ablation.py`, two updates a step)."""
    buffer_size: int = 30_000
    """Decisions; some thousand plans."""
    learning_starts: int = 200
    """Decisions: a few plans."""
    target_update: int = 400
    """Decisions between two copies into the target network."""
    elite_plans: int = 16
    elite_share: float = 0.25
    """Of a batch, from the best distinct plans."""
    led_share: float = 0.5
    """Of the episodes, led to a neighbour of one of the best plans: bounds say little until all stages are cut, and a
    plan that is good but for one end of a stage is hardly met by decisions drawn one by one from the first one on."""
    cycle_plans: int = 400
    """Plans of one exploration cycle: the schedule does not depend on the budget, so the search is anytime."""
    explored_first: float = 0.3
    """Share of random decisions at the start of a cycle."""
    explored_last: float = 2.0
    """Random decisions an episode in the second half of a cycle (`benchmarks/dqn_ablation.py`, one random decision)."""


class MaskedQNetwork(QNetwork):
    """Q values of legal actions; `FORBIDDEN` for the others.

    One network rates every action by the state it leads to: the state's features, the action's, and the decisions so
    far with the action among them. The known loss, the growth of the bound, is added to what it says.
    """

    def __init__(self, *args: Any, signs: npt.NDArray[Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("signs", torch.as_tensor(signs), persistent=False)
        last = self.q_net[-1]
        assert isinstance(last, torch.nn.Linear)
        # An untrained network is greedy on the bound.
        torch.nn.init.zeros_(last.weight)
        torch.nn.init.zeros_(last.bias)

    def forward(self, obs: Any) -> torch.Tensor:
        """[batch, actions]"""
        mask = obs["action_mask"] > 0.5
        rows, actions = mask.nonzero(as_tuple=True)
        q = torch.full(mask.shape, FORBIDDEN)
        rated: torch.Tensor = q.index_put((rows, actions), self.rate(obs, rows, actions))
        return rated

    def rate(self, obs: Any, rows: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """[n] Q of action `actions[i]` in the state of row `rows[i]`."""
        seen = obs["observation"]
        known = seen[:, STATE_FEATURES:].reshape(len(seen), MAX_ACTIONS, ACTION_FEATURES)[rows, actions]
        # Another index than the buffer's own type would copy the table.
        signs: Any = self.signs
        after = obs["history"][rows] + signs[obs["slot"][rows, 0].long(), actions]
        later: torch.Tensor = self.q_net(torch.cat([seen[rows, :STATE_FEATURES], known, after / 8.0], dim=1))
        rated: torch.Tensor = later[:, 0] - REWARD_SCALE * known[:, GROWTH]
        return rated


class _Sizes(torch.nn.Module):
    """Says how many numbers the network takes of one action."""

    def __init__(self, observation_space: spaces.Dict) -> None:
        super().__init__()
        shape = observation_space["history"].shape
        assert shape is not None
        self.features_dim = STATE_FEATURES + ACTION_FEATURES + shape[0]


class MaskedPolicy(DQNPolicy):
    """DQNPolicy over `MaskedQNetwork`."""

    def __init__(self, *args: Any, signs: npt.NDArray[Any], **kwargs: Any) -> None:
        self.signs = signs
        super().__init__(*args, **kwargs)

    def make_q_net(self) -> QNetwork:
        """One network; SB3 asks twice, for the online and the target one."""
        arguments = self._update_features_extractor(self.net_args, features_extractor=None)
        arguments["action_space"] = spaces.Discrete(1)
        return MaskedQNetwork(**arguments, signs=self.signs).to(self.device)


class MaskedDQN(DQN):
    """SB3's DQN with masked exploration and clipped targets."""

    replay_buffer: PlanReplay

    def __init__(
        self, env: PlanVecEnv, parameters: Hyperparameters, seed: int, explored: SearchTree | None = None
    ) -> None:
        self.parameters = parameters
        self.tree = explored
        self.rng = np.random.default_rng(seed)
        self.explored = parameters.explored_first
        self.leads: list[Ints | None] = [None] * env.num_envs
        super().__init__(
            MaskedPolicy,
            env,
            learning_rate=parameters.learning_rate,
            buffer_size=parameters.buffer_size,
            learning_starts=parameters.learning_starts,
            batch_size=parameters.batch_size,
            gamma=1.0,
            train_freq=1,
            gradient_steps=parameters.updates_per_step,
            target_update_interval=parameters.target_update,
            replay_buffer_class=PlanReplay,
            replay_buffer_kwargs={
                "elite_plans": parameters.elite_plans,
                "elite_share": parameters.elite_share,
                "seed": seed,
            },
            policy_kwargs={
                "net_arch": list(parameters.hidden),
                "features_extractor_class": _Sizes,
                "signs": env.signs,
                "optimizer_kwargs": {"fused": True},
            },
            seed=seed,
            device="cpu",
        )

    def _sample_action(
        self, learning_starts: int, action_noise: Any = None, n_envs: int = 1
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        observation = self._last_obs
        assert isinstance(observation, dict)
        actions = self.act(observation)
        return actions, actions

    def act(self, observation: Observation) -> npt.NDArray[Any]:
        """One open action an environment."""
        with torch.no_grad():
            q = self.q_net({k: torch.as_tensor(v) for k, v in observation.items()}).numpy()
        actions = np.empty(len(q), dtype=np.int64)
        for e in range(len(actions)):
            legal = np.flatnonzero(observation["action_mask"][e])
            if self.tree is not None:
                legal = self.tree.open_actions(e, legal)
            lead = self.leads[e]
            slot = int(observation["slot"][e, 0])
            if lead is not None and lead[slot] in legal:
                actions[e] = lead[slot]
            elif lead is None and self.rng.random() < self.explored:
                actions[e] = self._drawn(observation["observation"][e], legal)
            else:
                actions[e] = legal[q[e, legal].argmax()]
            if self.tree is not None:
                self.tree.take(e, int(actions[e]))
        return actions

    def _drawn(self, seen: npt.NDArray[Any], legal: Ints) -> int:
        """A random action; half of the time those whose bound grows less are likelier."""
        weights = np.ones(len(legal))
        if self.rng.random() < 0.5:
            growth = seen[STATE_FEATURES:].reshape(MAX_ACTIONS, ACTION_FEATURES)[legal, GROWTH]
            weights = np.exp(-REWARD_SCALE * (growth - growth.min()).astype(np.float64))
        return int(self.rng.choice(legal, p=weights / weights.sum()))

    def lead(self, number: int, space: PlanSpace) -> None:
        """Says where an episode that begins is led: to a neighbour of one of the best plans, or nowhere."""
        best = np.array(self.replay_buffer.elite, dtype=np.int64)
        self.leads[number] = None
        if len(best) and self.rng.random() < self.parameters.led_share:
            # The better a plan is, the likelier it is taken.
            near = best[[int(len(best) * self.rng.random() ** 2)]]
            self.leads[number] = space.neighbours(self.rng, near, best)[0]

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Huber steps on clipped one-step targets."""
        # The target network stands still meanwhile: one call rates the next states of all batches.
        batch = self.replay_buffer.sample_plans(gradient_steps * batch_size)
        with torch.no_grad():
            target = self.targets(batch)
        network: Any = self.q_net
        for rows in torch.randperm(len(target)).reshape(gradient_steps, batch_size):
            q = network.rate(batch.observations, rows, batch.actions[rows, 0]).reshape(-1, 1)
            loss = torch.nn.functional.smooth_l1_loss(q, target[rows])
            self.policy.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.q_net.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()
        self._n_updates += gradient_steps

    def targets(self, batch: Batch) -> torch.Tensor:
        """[batch, 1] reward and best continuation, no less than the return really obtained."""
        following = self.q_net_target(batch.next_observations).max(dim=1, keepdim=True).values
        return torch.maximum(batch.rewards + (1.0 - batch.dones) * following, batch.floors)

    def demonstrate(self, env: PlanVecEnv, plans: Iterable[Values]) -> None:
        """Walks known plans through `env`, of one episode, and keeps them as elite episodes; nothing is priced anew.

        Of a plan that the environment does not offer, the nearest one that it does.
        """
        for values in plans:
            observation = env.reset()
            rows: dict[str, list[Any]] = {}
            done = False
            while not done:
                action = np.array([min(values[int(observation["slot"][0, 0])], MAX_ACTIONS - 1)])
                env.step_async(action)
                following, rewards, ended, infos = env.step_wait()
                done = bool(ended[0])
                after = {k: v[None] for k, v in infos[0]["terminal_observation"].items()} if done else following
                step: dict[str, Any] = {f"obs.{k}": v[0] for k, v in observation.items()}
                step |= {f"next.{k}": v[0] for k, v in after.items()}
                step |= {"actions": action, "rewards": rewards[0], "dones": np.float32(done)}
                for k, v in step.items():
                    rows.setdefault(k, []).append(v)
                observation = following
            arrays = {k: np.asarray(v) for k, v in rows.items()}
            arrays["floors"] = arrays["rewards"][::-1].cumsum()[::-1].astype(np.float32)
            self.replay_buffer.remember(infos[0]["finished"], arrays)


class Watch(BaseCallback):
    """Hands finished plans to the incumbent, moves the exploration schedule, ends the search."""

    def __init__(self, incumbent: Incumbent) -> None:
        super().__init__()
        self.incumbent = incumbent
        self.priced: set[Values] = set()
        self.plans = 0
        self.decisions = 0

    def _on_step(self) -> bool:
        agent = self.model
        assert isinstance(agent, MaskedDQN)
        for number, info in enumerate(self.locals["infos"]):
            if "finished" in info and not self.incumbent.finished:
                ended = info["finished"]
                # Of episodes side by side two may come to one plan.
                if ended.values not in self.priced:
                    self.priced.add(ended.values)
                    self.incumbent.offer(ended.values, ended.step_time_s, ended.overflow)
                    self.plans += 1
                    self.decisions = ended.num_decisions
                if agent.tree is not None:
                    agent.tree.finish(number)
                agent.lead(number, self.incumbent.space)
        parameters = agent.parameters
        phase = min(1.0, 2.0 * (self.plans % parameters.cycle_plans) / parameters.cycle_plans)
        last = min(parameters.explored_first, parameters.explored_last / max(1, self.decisions))
        agent.explored = parameters.explored_first + phase * (last - parameters.explored_first)
        return not (self.incumbent.finished or (agent.tree is not None and agent.tree.is_exhausted))


def run_dqn(
    space: PlanSpace,
    incumbent: Incumbent,
    *,
    seed: int,
    reference_s: float | None,
    demonstrations: Sequence[Values] = (),
    parameters: Hyperparameters | None = None,
    decisions: Decisions | None = None,
    checkpoint: Path | None = None,
) -> None:
    """Searches with one DQN until the incumbent's budget ends.

    Args:
        space: of the problem.
        incumbent: takes every plan.
        seed: of network, replay and exploration.
        reference_s: step time of a good plan, seconds, against which infeasible ones are rated.
        demonstrations: plans to learn from; they are not credited to the DQN.
        parameters: hyperparameters.
        decisions: what is asked; None = those of `HybridEnv`.
        checkpoint: folder that the search goes on from, if it is there, and that is written at the end; see
            `agents.learning.checkpoint`.

    Raises:
        ProblemError: the checkpoint is damaged or of another network.
    """
    parameters = parameters or Hyperparameters()

    def environment(count: int) -> PlanVecEnv:
        asked = decisions or HybridDecisions(space)
        return PlanVecEnv([Episodes(asked, count, incumbent.table, reference_s=reference_s)], parameters.num_signs)

    env = environment(parameters.num_envs)
    explored = SearchTree(env.episodes[0], lambda: incumbent.best_s)
    agent = new_agent(env, parameters, seed, explored=explored)
    watch = Watch(incumbent)
    known = list(demonstrations)
    if checkpoint is not None and checkpoint.exists():
        from agents.learning.checkpoint import read_checkpoint

        about = read_checkpoint(agent, checkpoint)
        watch.plans = about["plans"]
        elite = [tuple(values) for values in about["elite"]]
        incumbent.price(elite)
        known += elite
    agent.demonstrate(environment(1), takewhile(lambda _: not incumbent.finished, known))
    agent.learn(total_timesteps=10**12, callback=watch, log_interval=10**12)
    if checkpoint is not None:
        from agents.learning.checkpoint import write_checkpoint

        about = {"plans": watch.plans, "elite": [list(v) for v in agent.replay_buffer.elite], "seed": seed}
        write_checkpoint(agent, checkpoint, about)


def new_agent(
    env: PlanVecEnv,
    parameters: Hyperparameters,
    seed: int,
    kind: type[MaskedDQN] = MaskedDQN,
    explored: SearchTree | None = None,
) -> MaskedDQN:
    """An untrained agent, on one thread; without `explored` it may come back to plans that it knows."""
    torch.set_num_threads(1)
    agent = kind(env, parameters, seed, explored)
    # Without a logger of its own SB3 leaves a folder behind for every search.
    agent.set_logger(Logger(folder=None, output_formats=[]))
    return agent


def search_dqn(
    problem: Problem,
    budget: Budget,
    *,
    seed: int,
    on_progress: OnProgress,
    should_stop: ShouldStop,
    start: Sequence[Plan] = (),
    checkpoint: Path | None = None,
) -> SearchResult:
    """The best plan of one DQN; with `start=()` it learns from its own plans only. See `Searcher`.

    Args:
        problem..start: see `agents.searcher.search`.
        checkpoint: see `run_dqn`.
    """
    space = PlanSpace(problem)
    incumbent = Incumbent(space, budget, searcher="dqn", on_progress=on_progress, should_stop=should_stop)
    known = [values for values in map(space.encode, start) if values is not None]
    for values in known:
        incumbent.price([values])
    run_dqn(space, incumbent, seed=seed, reference_s=None, demonstrations=known, checkpoint=checkpoint)
    return incumbent.result(seed=seed)

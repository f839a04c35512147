"""The masked DQN: network, learner and search, top to bottom.

It is stable-baselines3's DQN, adapted to the search for plans (`benchmarks/dqn_ablation.py` measures what each part is
worth):

- The action mask is part of the observation, so that acting and the maximum of the targets consider legal values only.
- The immediate reward of a decision is known before the decision is taken (the growth of the lower bound), so the
  network adds only what is lost later: Q(s, a) = -scale * growth(s, a) + f(s, a). An untrained network is greedy on the
  bound.
- Targets are clipped from below by the return that was obtained: an episode is deterministic, so it can be reached.
- A quarter of every batch comes from the best distinct plans found so far.
- Half of the episodes are led to a plan near one of the best ones; the network decides where that plan is no longer
  open. It learns most about decisions that differ little from good ones (as in Go-Explore, arXiv 1901.10995).
- The exploration of the other episodes comes in cycles and is measured in random decisions an episode; half of these
  are drawn by the bound.
- The tree of what has been explored (`agents.learning.search_tree`) keeps the search from plans that are known already,
  and from plans whose bound says that they cannot be the best.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from agents.learning.checkpoint import read_checkpoint, write_checkpoint
from agents.learning.hyperparameters import Hyperparameters
from agents.learning.plan_vec_env import PlanVecEnv
from agents.learning.replay import Batch, PlanReplay
from agents.learning.search_tree import SearchTree
from agents.searcher import SearchResult, SearchTask
from automap.space.space import Ints, PlanSpace, Values
from envs.decision import GROWTH, MAX_ACTIONS, REWARD_SCALE, Decisions, Episodes, Observation
from envs.hybrid import HybridDecisions
from envs.kernels import ACTION_FEATURES, STATE_FEATURES

FORBIDDEN = -1e9
"""Q value of a masked action."""


class MaskedQNetwork(QNetwork):
    """Q values of legal actions; `FORBIDDEN` for the others.

    One network rates every action by the state to which it leads: the features of the state, those of the action, and
    the decisions so far with the action among them. The known loss, the growth of the bound, is added to its output.
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
        """[batch, actions] Q values; `obs` holds tensors [batch, ...]."""
        mask = obs["action_mask"] > 0.5
        rows, actions = mask.nonzero(as_tuple=True)
        q = torch.full(mask.shape, FORBIDDEN)
        rated: torch.Tensor = q.index_put((rows, actions), self.rate(obs, rows, actions))
        return rated

    def rate(self, obs: Any, rows: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """[n] Q value of action `actions[i]` in the state of row `rows[i]`."""
        seen = obs["observation"]
        known = seen[:, STATE_FEATURES:].reshape(len(seen), MAX_ACTIONS, ACTION_FEATURES)[rows, actions]
        signs: Any = self.signs
        after = obs["history"][rows] + signs[obs["slot"][rows, 0].long(), actions]
        later: torch.Tensor = self.q_net(torch.cat([seen[rows, :STATE_FEATURES], known, after / 8.0], dim=1))
        rated: torch.Tensor = later[:, 0] - REWARD_SCALE * known[:, GROWTH]
        return rated


class _Sizes(torch.nn.Module):
    """Tells stable-baselines3 the number of inputs of the network."""

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
        """A network; it is called twice, for the online and for the target network."""
        arguments = self._update_features_extractor(self.net_args, features_extractor=None)
        arguments["action_space"] = spaces.Discrete(1)
        return MaskedQNetwork(**arguments, signs=self.signs).to(self.device)


class MaskedDQN(DQN):
    """stable-baselines3's DQN with masked exploration and clipped targets.

    Attributes:
        parameters: the hyperparameters.
        tree: what has been explored; None = plans may be met again.
        exploration: probability of a random decision in an episode that is not led.
        leads: [episodes] plan to which each episode is led, or None.
    """

    replay_buffer: PlanReplay

    def __init__(self, env: PlanVecEnv, parameters: Hyperparameters, seed: int, tree: SearchTree | None = None) -> None:
        self.parameters = parameters
        self.tree = tree
        self.rng = np.random.default_rng(seed)
        self.exploration = parameters.explored_first
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
        """[episodes] an open action of each episode."""
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
            elif lead is None and self.rng.random() < self.exploration:
                actions[e] = self._random_action(observation["observation"][e], legal)
            else:
                actions[e] = legal[q[e, legal].argmax()]
            if self.tree is not None:
                self.tree.take(e, int(actions[e]))
        return actions

    def _random_action(self, seen: npt.NDArray[Any], legal: Ints) -> int:
        """A random action; half of the time, actions whose bound grows less are likelier."""
        weights = np.ones(len(legal))
        if self.rng.random() < 0.5:
            growth = seen[STATE_FEATURES:].reshape(MAX_ACTIONS, ACTION_FEATURES)[legal, GROWTH]
            weights = np.exp(-REWARD_SCALE * (growth - growth.min()).astype(np.float64))
        return int(self.rng.choice(legal, p=weights / weights.sum()))

    def lead(self, number: int, space: PlanSpace) -> None:
        """Decides whether an episode that begins is led, and to which neighbour of one of the best plans."""
        best = np.array(self.replay_buffer.elite, dtype=np.int64)
        self.leads[number] = None
        if len(best) and self.rng.random() < self.parameters.led_share:
            # The better a plan is, the likelier it is taken.
            near = best[[int(len(best) * self.rng.random() ** 2)]]
            self.leads[number] = space.neighbours(self.rng, near, best)[0]

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Takes optimizer steps of the Huber loss on clipped one-step targets."""
        # The target network does not change meanwhile, so that one call rates the next states of all batches.
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
        """Takes the decisions of known plans in `env` and keeps the episodes as elite ones; nothing is priced again.

        Where the environment does not offer a plan, the nearest plan that it offers is taken.

        Args:
            env: an environment of one episode.
            plans: values of the plans.
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
    """Hands finished plans to the incumbent, moves the exploration schedule, and ends the search."""

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
                # Two episodes side by side may come to one plan.
                if ended.values not in self.priced:
                    self.priced.add(ended.values)
                    self.incumbent.add(ended.values, ended.step_time_s, ended.overflow)
                    self.plans += 1
                    self.decisions = ended.num_decisions
                if agent.tree is not None:
                    agent.tree.finish(number)
                agent.lead(number, self.incumbent.space)
        parameters = agent.parameters
        phase = min(1.0, 2.0 * (self.plans % parameters.cycle_plans) / parameters.cycle_plans)
        last = min(parameters.explored_first, parameters.explored_last / max(1, self.decisions))
        agent.exploration = parameters.explored_first + phase * (last - parameters.explored_first)
        return not (self.incumbent.finished or (agent.tree is not None and agent.tree.is_exhausted))


def new_agent(
    env: PlanVecEnv,
    parameters: Hyperparameters,
    seed: int,
    kind: type[MaskedDQN] = MaskedDQN,
    tree: SearchTree | None = None,
) -> MaskedDQN:
    """An untrained agent that uses one thread; without `tree` it may meet plans again that it knows."""
    torch.set_num_threads(1)
    agent = kind(env, parameters, seed, tree)
    # Without a logger of its own, stable-baselines3 leaves a folder behind for every search.
    agent.set_logger(Logger(folder=None, output_formats=[]))
    return agent


def run_dqn(
    incumbent: Incumbent,
    *,
    seed: int,
    reference_s: float | None = None,
    demonstrations: Sequence[Values] = (),
    parameters: Hyperparameters | None = None,
    decisions: Decisions | None = None,
    checkpoint: Path | None = None,
) -> None:
    """Searches with one DQN until the incumbent's budget ends.

    Args:
        incumbent: takes every plan that is found.
        seed: seed of network, replay and exploration.
        reference_s: step time of a good plan, in seconds, against which infeasible plans are rated; None = unknown.
        demonstrations: plans to learn from; they are not credited to the DQN.
        parameters: hyperparameters; None = the default ones.
        decisions: which slots the agent decides; None = those of `HybridEnv`.
        checkpoint: folder from which the search goes on, if it exists, and which is written at the end; see
            `agents.learning.checkpoint`.

    Raises:
        ProblemError: the checkpoint is damaged or of another network.
    """
    parameters = parameters or Hyperparameters()
    asked = decisions or HybridDecisions(incumbent.space)

    def environment(count: int) -> PlanVecEnv:
        return PlanVecEnv([Episodes(asked, count, incumbent.table, reference_s=reference_s)], parameters.num_signs)

    env = environment(parameters.num_envs)
    tree = SearchTree(env.episodes[0], lambda: incumbent.best_s)
    agent = new_agent(env, parameters, seed, tree=tree)
    watch = Watch(incumbent)
    known = list(demonstrations)
    if checkpoint is not None and checkpoint.exists():
        about = read_checkpoint(agent, parameters, checkpoint)
        watch.plans = about["plans"]
        elite = [tuple(values) for values in about["elite"]]
        incumbent.price(elite)
        known += elite
    agent.demonstrate(environment(1), takewhile(lambda _: not incumbent.finished, known))
    agent.learn(total_timesteps=10**12, callback=watch, log_interval=10**12)
    if checkpoint is not None:
        about = {"plans": watch.plans, "elite": [list(v) for v in agent.replay_buffer.elite], "seed": seed}
        write_checkpoint(agent, parameters, checkpoint, about)


def search_dqn(task: SearchTask, checkpoint: Path | None = None) -> SearchResult:
    """The best plan of one DQN, which learns from the plans given and from its own; see `Searcher`.

    Args:
        task: what is searched.
        checkpoint: see `run_dqn`.
    """
    incumbent = Incumbent.begin(task, "dqn")
    given = incumbent.price_start(task)
    run_dqn(incumbent, seed=task.seed, demonstrations=given, checkpoint=checkpoint)
    return incumbent.result(seed=task.seed)

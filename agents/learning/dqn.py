"""The masked DQN: network, learner and search, top to bottom.

It is stable-baselines3's DQN, adapted to the search for plans (`benchmarks/dqn_ablation.py` measures what each part is
worth):

- The action mask is part of the observation, so that acting and the maximum of the targets consider legal values only.
- For every legal value there is a *completion*: a complete plan with this value whose other decisions follow a known
  plan, and its price (`automap.bounds.known_plans`). The return of the completion can certainly be reached, so the
  network only predicts how much more is possible: Q(s, a) = -scale * completion(s, a) + f(s, a). With an untrained
  network, an episode follows the best known plan and changes single decisions that improve it.
- A target is at least the return of the completion, and at least the return that the episode really reached.
- Episodes visit all promising meshes, or begin with a good plan and decide a part of it again
  (`agents.learning.exploration`; as in Go-Explore, arXiv 1901.10995). The network is shown the decisions of the best
  plan of the mesh.
- Elimination solves the skeletons of some visits, and the reward is that of the plan found, as in the network's
  training (`agents.learning.solved_skeletons`).
- A tree of what has been explored (`agents.learning.search_tree`) excludes plans that are known already, and plans that
  by their lower bound cannot be the best.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger

from agents.incumbent import Incumbent
from agents.learning.checkpoint import read_checkpoint
from agents.learning.exploration import Guide, MeshBandit
from agents.learning.hyperparameters import Hyperparameters
from agents.learning.network import FORBIDDEN, Floats32
from agents.learning.plan_vec_env import PlanVecEnv
from agents.learning.proposals import NETWORK, PROPOSALS, propose, readable
from agents.learning.q_network import MaskedPolicy, MaskedQNetwork, Sizes
from agents.learning.replay import Batch, PlanReplay
from agents.learning.search_tree import SearchTree
from agents.learning.solved_proposals import SolvedProposals
from agents.learning.solved_skeletons import SolvedSkeletons
from agents.sampling.expert import Grid, price_grid
from agents.searcher import SearchResult, SearchTask
from automap.bounds.known_plans import worth_s
from automap.space.space import Ints, PlanSpace, Values
from envs.decision import COMPLETION, LOSS, MAX_ACTIONS, REWARD_SCALE, Decisions, Episodes, Finished, Observation
from envs.hybrid import HybridDecisions
from envs.kernels import ACTION_FEATURES, STATE_FEATURES

FIRST_PLANS, FIRST_SHARE = 8, 0.125
"""Largest number of plans, and share of a budget, for which a search from scratch learns before skeletons are solved:
one plan for each of the episodes that run at the same time. Episodes that follow completions sometimes come near the
best plan with so few plans. On ten problems of `benchmarks/dqn_alone.py`, 32 plans led no further problem there."""
TURNS = 8
"""Largest number of turns of `agents.learning.solved_proposals` before a search with a network learns (assumed)."""
PROPOSED_SHARE, PROPOSED_SHARE_S = 0.5, 0.125
"""Largest shares of a budget, in evaluations and in seconds, for these turns (assumed)."""
REVISION_NOISE = 0.4, 4.5
"""Least and largest scale of the Gumbel noise with which the first decision of a revision is drawn."""


class MaskedDQN(DQN):
    """stable-baselines3's DQN with masked exploration, and targets that are at least the return that can be reached.

    Attributes:
        parameters: the hyperparameters.
        tree: what has been explored; None = plans may be met again.
        guides: [episodes] how each episode is guided.
    """

    replay_buffer: PlanReplay  # type: ignore[assignment]  # it keeps decisions in a form of its own

    def __init__(self, env: PlanVecEnv, parameters: Hyperparameters, seed: int, tree: SearchTree | None = None) -> None:
        self.parameters = parameters
        self.tree = tree
        self.rng = np.random.default_rng(seed)
        self.guides = [Guide()] * env.num_envs
        self.plan_env = env
        super().__init__(
            MaskedPolicy,
            env,
            learning_rate=parameters.learning_rate,
            buffer_size=parameters.buffer_size,
            learning_starts=parameters.learning_starts,
            batch_size=parameters.batch_size,
            gamma=1.0,
            train_freq=parameters.train_every,
            gradient_steps=parameters.updates_per_step,
            target_update_interval=parameters.target_update,
            replay_buffer_class=PlanReplay,  # type: ignore[arg-type]
            replay_buffer_kwargs={"seed": seed},
            policy_kwargs={
                "net_arch": list(parameters.hidden),
                "features_extractor_class": Sizes,
                "dropout": parameters.dropout,
                "optimizer_class": torch.optim.AdamW,
                "optimizer_kwargs": {"fused": True, "weight_decay": parameters.weight_decay},
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
        """[episodes] an action of each episode that is legal and, if possible, open in the search tree."""
        with torch.no_grad():
            q = self.q_net({k: torch.as_tensor(v) for k, v in observation.items()}).numpy()
        seen = observation["observation"][:, STATE_FEATURES:].reshape(len(q), MAX_ACTIONS, ACTION_FEATURES)
        actions = np.empty(len(q), dtype=np.int64)
        for e, slot in enumerate(self.plan_env.slots()):
            guide, legal = self.guides[e], np.flatnonzero(observation["action_mask"][e])
            self.replay_buffer.shown[e] = self._shown(e, slot)
            tree = None if guide.window is not None else self.tree
            if tree is not None:
                legal = tree.open_actions(e, legal)
            if guide.forced is not None and guide.forced[slot] in legal:
                actions[e] = guide.forced[slot]
            elif self.rng.random() < guide.random:
                actions[e] = self._random_action(seen[e, legal], legal)
            else:
                actions[e] = self._rated_best(e, slot, legal, q[e, legal], -REWARD_SCALE * seen[e, legal, COMPLETION])
            if tree is not None:
                tree.take(e, int(actions[e]))
        return actions

    def _rated_best(self, number: int, slot: int, legal: Ints, q: Floats32, completion: Floats32) -> int:
        """The legal action that is rated best, with the noise of the episode.

        Args:
            number: number of the episode.
            slot: slot that it decides.
            legal: [n] actions.
            q: [n] their Q values.
            completion: [n] the part of the Q values that comes from completions.
        """
        guide, noise = self.guides[number], self.guides[number].noise
        rated = completion + guide.trust * (q - completion)
        episodes, at = self.plan_env.place(number)
        if guide.is_revision and guide.base is None and guide.taught is not None and episodes.num_decisions[at] == 0:
            noise = float(np.exp(self.rng.uniform(*np.log(REVISION_NOISE))))
            # The first decision of a revision must differ from the plan, unless this is the only value that fits.
            rated = np.where(legal == guide.taught[slot], FORBIDDEN, rated)
        if noise > 0.0:
            rated = rated + noise * self.rng.gumbel(size=len(legal))
        return int(legal[rated.argmax()])

    def _shown(self, number: int, slot: int) -> int:
        """The teacher's action at a slot; -1 where there is none, or where the episode has left the teacher's plan."""
        plan = self.guides[number].taught
        if plan is None or slot < self.guides[number].shown_from:
            return -1
        episodes, at = self.plan_env.place(number)
        head = min(slot, episodes.space.first.signature)
        is_near = np.array_equal(episodes.partial_plans.episodes.values[at, :head], plan[:head])
        return int(plan[slot]) if is_near else -1

    def _random_action(self, features: npt.NDArray[Any], legal: Ints) -> int:
        """A random action. In half of the cases, actions with better completions are more likely."""
        weights = np.ones(len(legal))
        if self.rng.random() < 0.5:
            weights = np.exp(-features[:, LOSS].astype(np.float64))
        return int(self.rng.choice(legal, p=weights / weights.sum()))

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Takes optimizer steps of the Huber loss on clipped one-step targets."""
        if self.replay_buffer.size() < batch_size:
            return
        self.policy.set_training_mode(True)
        network: Any = self.q_net
        for _ in range(gradient_steps):
            batch = self.replay_buffer.draw(batch_size)
            with torch.no_grad():
                target = self.targets(batch)
            loss = torch.nn.functional.smooth_l1_loss(network.rate(batch.states, batch.actions), target)
            if len(batch.taught):
                loss = loss + self.parameters.taught_weight * taught_loss(network, batch)
            self.policy.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.q_net.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()
        self.policy.set_training_mode(False)
        self._n_updates += gradient_steps

    def targets(self, batch: Batch) -> torch.Tensor:
        """[batch] reward plus the value of the best next action; at least the return of the episode and of the
        completion.

        The online network chooses the next action and the target network rates it (double Q-learning, arXiv
        1509.06461), because the maximum of uncertain ratings would be too high.
        """
        online, copy = self.q_net, self.q_net_target
        at_hand = torch.maximum(batch.returns, -REWARD_SCALE * batch.actions[:, COMPLETION])
        assert isinstance(online, MaskedQNetwork) and isinstance(copy, MaskedQNetwork)
        rated = online.rate(batch.next_states, batch.next_actions)
        nothing = torch.full_like(batch.rewards, -torch.inf)
        best = nothing.scatter_reduce(0, batch.following, rated, "amax")
        chosen = rated >= best[batch.following]
        again = copy.rate(batch.next_states[chosen], batch.next_actions[chosen])
        best = nothing.scatter_reduce(0, batch.following[chosen], again, "amax")
        # The last decision of an episode has no next action.
        target = batch.rewards + torch.where(best == -torch.inf, 0.0, best)
        return torch.maximum(target, at_hand)


def taught_loss(network: MaskedQNetwork, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy of the actions that a teacher showed, with probabilities softmax(Q) over the legal actions.

    DQfD (arXiv 1704.03732) has a margin in its place. A margin only requires that the teacher's action is rated best.
    With the cross-entropy, differences of ratings also express how sure they are; exploration with noise depends on
    this.
    """
    rated = network.rate(batch.states[batch.taught], batch.taught_actions)
    floor = torch.full_like(batch.rewards, -torch.inf)
    best = floor.scatter_reduce(0, batch.taught, rated.detach(), "amax")[batch.taught]
    total = torch.zeros_like(batch.rewards).scatter_add(0, batch.taught, torch.exp(rated - best))
    losses = torch.log(total[batch.taught]) + best - rated
    return losses[batch.is_shown].mean()


def new_agent(
    env: PlanVecEnv,
    parameters: Hyperparameters,
    seed: int,
    kind: type[MaskedDQN] = MaskedDQN,
    tree: SearchTree | None = None,
) -> MaskedDQN:
    """An untrained agent that uses one thread; without `tree` it may decide the same plan more than once."""
    torch.set_num_threads(1)
    agent = kind(env, parameters, seed, tree)
    # Without a logger of its own, stable-baselines3 leaves a folder behind for every search.
    agent.set_logger(Logger(folder=None, output_formats=[]))
    return agent


class Watch(BaseCallback):
    """Hands finished plans to the incumbent, guides the next episodes, and ends the search."""

    def __init__(self, incumbent: Incumbent, agent: MaskedDQN, skeletons: SolvedSkeletons | None = None) -> None:
        """Prepares the first episodes of an agent, which has one problem.

        Args:
            incumbent: takes every plan.
            agent: the agent.
            skeletons: solves the skeletons of some visits; None = none are solved.
        """
        super().__init__()
        self.incumbent, self._agent = incumbent, agent
        self._env = agent.plan_env
        (self._episodes,) = self._env.episodes
        solves = skeletons is not None
        self.meshes = MeshBandit(self._episodes, incumbent.table, agent.parameters.revisions, solves=solves)
        known = self._episodes.known.arrays
        self._priced: set[Values] = set() if agent.tree is None else agent.tree.priced
        self._priced.update(map(tuple, known.values[: int(known.num_known[0])].tolist()))
        if skeletons is not None:
            self._env.worth_s = functools.partial(self._solved_s, skeletons)
        self._env.on_end = self._on_end
        for number in range(self._env.num_envs):
            self._guide(number)

    def _solved_s(self, skeletons: SolvedSkeletons, number: int, finished: Finished) -> float:
        """Step time by which an episode is rewarded: that of its plan, or that of its skeleton's solution if faster."""
        if not self._agent.guides[number].is_solved or self.incumbent.finished:
            return finished.worth_s
        values = skeletons.solve(finished.values)
        price = self._episodes.space.price(np.array([values]))
        solved_s = float(worth_s(price, self._episodes.reference_s)[0])
        self._episodes.known.add(values, tuple(price[0].tolist()))
        self.meshes.add(values, solved_s)
        return min(solved_s, finished.worth_s)

    def _on_end(self, number: int) -> None:
        """Records what an episode has found, before the next one begins in its place."""
        self._env.keep(number)
        ended, found = self._episodes.finished(number), self._episodes.best_completion(number)
        if not self.incumbent.finished:
            self.meshes.add(ended.values, ended.worth_s)
            # Revisions, and episodes that run at the same time, may end with the same plan.
            if ended.values not in self._priced:
                self._priced.add(ended.values)
                self.incumbent.add(ended.values, ended.step_time_s, ended.overflow)
            if found is not None:
                self.meshes.add(*found)
                self.incumbent.add_from(self.incumbent.searcher, *found, 0.0)
        if self._agent.tree is not None and self._agent.guides[number].window is None:
            self._agent.tree.finish(number)
        self._guide(number)

    def _guide(self, number: int) -> None:
        guide = self._agent.guides[number] = self.next_guide()
        decides_skeleton = guide.is_solved and guide.window is not None
        base = None if decides_skeleton else guide.taught if guide.base is None else guide.base
        self._episodes.confine(number, None if base is None else tuple(base.tolist()), guide.window)

    def next_guide(self) -> Guide:
        """How the next episode is guided."""
        tree = self._agent.tree
        return self.meshes.guide(self._agent.rng, self.incumbent.best_s if tree is None else tree.best_s())

    def _on_step(self) -> bool:
        tree = self._agent.tree
        return not (self.incumbent.finished or (tree is not None and tree.is_exhausted))


def _rows(space: PlanSpace, plans: Sequence[Values]) -> Ints:
    return np.array(plans, dtype=np.int64).reshape(len(plans), len(space.slots))


def run_dqn(
    incumbent: Incumbent,
    *,
    seed: int,
    templates: Grid,
    start: Sequence[Values] = (),
    parameters: Hyperparameters | None = None,
    decisions: Callable[[PlanSpace], Decisions] = HybridDecisions,
    network: Path | None = NETWORK,
    proposals: int = PROPOSALS,
) -> None:
    """Searches with one DQN until the incumbent's budget ends.

    Args:
        incumbent: takes every plan that is found.
        seed: seed of network, replay and exploration.
        templates: templates of the space with their prices.
        start: further plans that are known at first; they are not credited to the DQN.
        parameters: hyperparameters; None = the default ones.
        decisions: which slots the agent decides.
        network: folder of the network with which the search begins, and which proposes the first plans; None = an
            untrained one. If the folder cannot be read, there is a warning, and an untrained one is used.
        proposals: number of plans that the network proposes. If the agent decides the whole plan, skeletons of
            proposals are solved instead (`agents.learning.solved_proposals`); without a network, the search learns for
            a while without solving skeletons. 0 = nothing is proposed, and skeletons are solved from the beginning.
    """
    parameters, space = parameters or Hyperparameters(), incumbent.space
    episodes = Episodes(decisions(space), parameters.num_envs, incumbent.table, known=templates)
    for values, (seconds, overflow) in zip(start, space.price(_rows(space, start)).tolist(), strict=True):
        episodes.known.add(values, (seconds, overflow))
    tree = SearchTree(episodes, lambda: incumbent.best_s)
    rates = None if network is None else readable(network)
    network = network if rates is not None else None
    solves = decisions is HybridDecisions
    skeletons = SolvedSkeletons(incumbent) if solves else None
    if proposals and skeletons is not None:
        with _first_share(incumbent, learns=rates is None):
            if rates is None:
                _learn(incumbent, episodes, tree, seed, parameters, network)
            elif not incumbent.finished:
                SolvedProposals(incumbent, episodes, tree.priced, rates, skeletons).go_on(TURNS)
        _begin_anew(episodes, tree)
    elif proposals and rates is not None:
        propose(incumbent, episodes, tree, rates, seed=seed, most=proposals)
    _learn(incumbent, episodes, tree, seed, parameters, network, skeletons)
    incumbent.look_aheads += int(episodes.known.arrays.priced[0])


def _first_share(incumbent: Incumbent, *, learns: bool) -> AbstractContextManager[None]:
    """Limits an incumbent to the part of its budget before skeletons of visits are solved.

    Args:
        incumbent: the incumbent.
        learns: whether the search learns in this part, from scratch; otherwise its network proposes plans.
    """
    left, left_s = incumbent.left, incumbent.left_s
    if learns:
        evaluations = FIRST_PLANS if left is None else min(FIRST_PLANS, int(FIRST_SHARE * left))
        return incumbent.share(evaluations=evaluations, seconds=None if left_s is None else FIRST_SHARE * left_s)
    return incumbent.share(
        evaluations=None if left is None else int(PROPOSED_SHARE * left),
        seconds=None if left_s is None else PROPOSED_SHARE_S * left_s,
    )


def _begin_anew(episodes: Episodes, tree: SearchTree) -> None:
    """Begins all episodes, each of which decides a whole plan."""
    for number in range(episodes.count):
        episodes.confine(number, None)
    episodes.begin(np.ones(episodes.count, dtype=np.bool_))
    tree.begin()


def _learn(
    incumbent: Incumbent,
    episodes: Episodes,
    tree: SearchTree,
    seed: int,
    parameters: Hyperparameters,
    network: Path | None,
    skeletons: SolvedSkeletons | None = None,
) -> None:
    """Searches by learning until the incumbent's budget ends or nothing is left to explore, see `run_dqn`.

    Args:
        incumbent, seed, parameters, network: see `run_dqn`.
        episodes: episodes of the problem.
        tree: what the episodes have explored.
        skeletons: solves the skeletons of some visits; None = none are solved.
    """
    if incumbent.finished or tree.is_exhausted:
        return
    tree.begin()
    agent = new_agent(PlanVecEnv([episodes]), parameters, seed, tree=tree)
    if network is not None:
        read_checkpoint(agent, parameters, network)
    agent.learn(total_timesteps=10**12, callback=Watch(incumbent, agent, skeletons), log_interval=10**12)


def search_dqn(task: SearchTask) -> SearchResult:
    """The best plan of the DQN, which begins with the pretrained network and goes on learning; see `Searcher`."""
    return _search(task, "dqn", NETWORK)


def search_from_scratch(task: SearchTask) -> SearchResult:
    """The best plan of a DQN that has learnt nothing before, a yardstick for the pretrained one; see `Searcher`."""
    return _search(task, "dqn-from-scratch", None)


def _search(task: SearchTask, name: str, network: Path | None) -> SearchResult:
    incumbent = Incumbent.begin(task, "expert")
    templates = price_grid(incumbent, charged=False)
    given = incumbent.price_start(task)
    incumbent.searcher = name
    run_dqn(incumbent, seed=task.seed, templates=templates, start=given, network=network)
    return incumbent.result(seed=task.seed)

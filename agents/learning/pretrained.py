"""Pretrained: plans sampled from a network that was trained on other problems, priced, the best kept. No training.

The network comes with the package (`agents/learning/pretrained_network`, made by `automap train-agent`). It has seen
neither the
model nor the cluster: it rates decisions by their bounds and by what they mean. Noise on its ratings makes the plans
differ, most of it on the few decisions about the mesh, on which all others depend and about which it errs most. No plan
is proposed twice, nor one whose bound says that it cannot win. Worth it where evaluations are few and dear.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from agents.incumbent import Incumbent
from agents.learning.checkpoint import read_checkpoint
from agents.learning.dqn import Hyperparameters, MaskedDQN, new_agent
from agents.learning.plan_vec_env import PlanVecEnv
from agents.learning.search_tree import SearchTree
from agents.searcher import Budget, OnProgress, SearchResult, ShouldStop
from automap.plan import Plan
from automap.problem import Problem
from automap.space.space import PlanSpace
from envs.decision import Episodes
from envs.hybrid import HybridDecisions

NETWORK = Path(__file__).parent / "pretrained_network"
PARAMETERS = Hyperparameters(
    num_envs=8,
    num_signs=0,
    hidden=(128, 128),
    batch_size=256,
    buffer_size=120_000,
    target_update=1600,
    elite_share=0.0,
)
"""Of the network: it knows nothing by heart, and the best plans of one problem say nothing about another. Replay and
target are larger and slower than for one problem."""
NOISE, MESH_NOISE = 0.1, 4.0
"""Scales of the Gumbel noise on ratings, which are `REWARD_SCALE` times logs of step times: 1 and 40 per cent. On eight
unseen problems (64 plans, two seeds) an earlier network had a mean gap of 47 % with 0.3 on all decisions, of 87 % with
1, and of 15 % so."""
MESH_KINDS = frozenset(("pp", "tp", "middle", "micro_batches"))
"""Slots of the latter."""
SAMPLED = 8
"""Plans at a time; the next ones know what these cost."""


def run_pretrained(space: PlanSpace, incumbent: Incumbent, *, seed: int, network: Path = NETWORK) -> None:
    """Samples plans until the incumbent's budget ends.

    Args:
        space: of the problem.
        incumbent: takes every plan.
        seed: of the noise.
        network: folder of the checkpoint.

    Raises:
        ProblemError: the checkpoint is damaged or of another network.
    """
    env = PlanVecEnv([Episodes(HybridDecisions(space), SAMPLED, incumbent.table)], PARAMETERS.num_signs)
    agent = new_agent(env, PARAMETERS, seed)
    read_checkpoint(agent, network)
    rng = np.random.default_rng(seed)
    noise = np.array([MESH_NOISE if slot.kind in MESH_KINDS else NOISE for slot in space.slots])
    explored = SearchTree(env.episodes[0], lambda: incumbent.best_s)
    observation = env.reset()
    while not (incumbent.finished or explored.is_exhausted):
        env.step_async(sample(agent, observation, rng, noise, explored))
        observation, _, _, infos = env.step_wait()
        for number, info in enumerate(infos):
            if "finished" in info and not incumbent.finished:
                ended = info["finished"]
                incumbent.offer(ended.values, ended.step_time_s, ended.overflow)
                explored.finish(number)


def sample(
    agent: MaskedDQN,
    observation: dict[str, np.ndarray],
    rng: np.random.Generator,
    noise: np.ndarray,
    explored: SearchTree,
) -> np.ndarray:
    """[episodes] the open action of each that is rated best under the noise of its slot."""
    with torch.no_grad():
        q = agent.q_net({name: torch.as_tensor(value) for name, value in observation.items()}).numpy()
    q = q + noise[observation["slot"].astype(np.int64)] * rng.gumbel(size=q.shape)
    actions = np.empty(len(q), dtype=np.int64)
    for number, mask in enumerate(observation["action_mask"]):
        legal = explored.open_actions(number, np.flatnonzero(mask))
        actions[number] = legal[q[number, legal].argmax()]
        explored.take(number, int(actions[number]))
    return actions


def search_pretrained(
    problem: Problem,
    budget: Budget,
    *,
    seed: int,
    on_progress: OnProgress,
    should_stop: ShouldStop,
    start: Sequence[Plan] = (),
) -> SearchResult:
    """The best of the plans that the pretrained network proposes; see `Searcher`."""
    space = PlanSpace(problem)
    incumbent = Incumbent(space, budget, searcher="dqn-pretrained", on_progress=on_progress, should_stop=should_stop)
    for values in map(space.encode, start):
        if values is not None:
            incumbent.price([values])
    run_pretrained(space, incumbent, seed=seed)
    return incumbent.result(seed=seed)

"""Pretrained: plans sampled from a network that was trained on other problems, without further training.

The network comes with the package (`agents/learning/pretrained_network`, made by `automap train-agent`). It was trained
on neither the model nor the cluster: it rates decisions by their bounds and by what they mean. Noise on its ratings
makes the plans differ, most of it on the few decisions about the mesh, on which all others depend and about which it
errs most. No plan is proposed twice, nor one whose bound says that it cannot be the best. This is worth it where
evaluations are few and expensive.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from agents.incumbent import Incumbent
from agents.learning.checkpoint import read_checkpoint
from agents.learning.dqn import MaskedDQN, new_agent
from agents.learning.hyperparameters import Hyperparameters
from agents.learning.plan_vec_env import PlanVecEnv
from agents.learning.search_tree import SearchTree
from agents.searcher import SearchResult, SearchTask
from envs.decision import Episodes
from envs.hybrid import HybridDecisions

NETWORK = Path(__file__).parent / "pretrained_network"
"""Folder of the checkpoint that comes with the package."""
PARAMETERS = Hyperparameters(
    num_envs=8,
    num_signs=0,
    hidden=(128, 128),
    batch_size=256,
    buffer_size=120_000,
    target_update=1600,
    elite_share=0.0,
)
"""Hyperparameters of the network. It learns nothing by heart, since the best plans of one problem say nothing about
another; replay and target are larger and slower than for one problem."""
NOISE, MESH_NOISE = 0.1, 4.0
"""Scales of the Gumbel noise on ratings of all decisions and of those about the mesh. Ratings are `REWARD_SCALE` times
logarithms of step times, so the scales are 1 and 40 per cent of a step time. On eight unseen problems (64 plans, two
seeds) an earlier network had a mean gap of 15 % with these scales, of 47 % with 0.3 and of 87 % with 1 on all
decisions."""
MESH_KINDS = frozenset(("pp", "tp", "middle", "micro_batches"))
"""Kinds of slots that decide the mesh."""
SAMPLED = 8
"""Number of plans side by side; the next ones are bounded by what these cost."""


def run_pretrained(incumbent: Incumbent, *, seed: int, network: Path = NETWORK) -> None:
    """Samples plans until the incumbent's budget ends.

    Args:
        incumbent: takes every plan that is found.
        seed: seed of the noise.
        network: folder of the checkpoint.

    Raises:
        ProblemError: the checkpoint is damaged or of another network.
    """
    space = incumbent.space
    env = PlanVecEnv([Episodes(HybridDecisions(space), SAMPLED, incumbent.table)], PARAMETERS.num_signs)
    agent = new_agent(env, PARAMETERS, seed)
    read_checkpoint(agent, PARAMETERS, network)
    rng = np.random.default_rng(seed)
    noise = np.array([MESH_NOISE if slot.kind in MESH_KINDS else NOISE for slot in space.slots])
    tree = SearchTree(env.episodes[0], lambda: incumbent.best_s)
    observation = env.reset()
    while not (incumbent.finished or tree.is_exhausted):
        env.step_async(sample(agent, observation, rng, noise, tree))
        observation, _, _, infos = env.step_wait()
        for number, info in enumerate(infos):
            if "finished" in info and not incumbent.finished:
                ended = info["finished"]
                incumbent.add(ended.values, ended.step_time_s, ended.overflow)
                tree.finish(number)


def sample(
    agent: MaskedDQN,
    observation: dict[str, np.ndarray],
    rng: np.random.Generator,
    noise: np.ndarray,
    tree: SearchTree,
) -> np.ndarray:
    """[episodes] the open action of each episode that is rated best, with noise of the scale `noise[slot]`."""
    with torch.no_grad():
        q = agent.q_net({name: torch.as_tensor(value) for name, value in observation.items()}).numpy()
    q = q + noise[observation["slot"].astype(np.int64)] * rng.gumbel(size=q.shape)
    actions = np.empty(len(q), dtype=np.int64)
    for number, mask in enumerate(observation["action_mask"]):
        legal = tree.open_actions(number, np.flatnonzero(mask))
        actions[number] = legal[q[number, legal].argmax()]
        tree.take(number, int(actions[number]))
    return actions


def search_pretrained(task: SearchTask) -> SearchResult:
    """The best of the plans that the pretrained network proposes; see `Searcher`."""
    incumbent = Incumbent.begin(task, "dqn-pretrained")
    incumbent.price_start(task)
    run_pretrained(incumbent, seed=task.seed)
    return incumbent.result(seed=task.seed)

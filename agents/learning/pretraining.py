"""Pretraining: one network learns to plan a family of problems, so that it can propose plans for others at once.

The family consists of small and real models of the zoo on clusters of unlike sizes and links. Episodes of all problems
run side by side. The observation has the same size for every model and cluster, so that one network serves all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

from agents.learning.checkpoint import write_checkpoint
from agents.learning.dqn import MaskedDQN, new_agent
from agents.learning.plan_vec_env import PlanVecEnv
from agents.learning.pretrained import PARAMETERS
from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.space.space import PlanSpace
from envs.decision import Episodes
from envs.hybrid import HybridDecisions
from ir import zoo

SMALL = "layers=4,hidden=1024,heads=16,seq_len=512,vocab_size=8192"
FAMILY: tuple[tuple[str, str, int], ...] = (
    (f"gpt:{SMALL}", "1x4xV100", 32),
    (f"gpt:{SMALL}", "2x2xV100@10Gbit", 16),
    ("gpt:layers=8,hidden=2048,heads=16,seq_len=1024,vocab_size=32000", "2x4xA100", 64),
    ("gpt:layers=16,hidden=1536,heads=16,seq_len=2048,vocab_size=51200", "1x8xV100-16GB", 32),
    ("gpt:layers=24,hidden=2304,heads=24,seq_len=2048,vocab_size=51200", "4x8xV100@100Gbit", 128),
    (f"llama:{SMALL}", "1x8xA100", 32),
    ("llama:layers=12,hidden=2048,heads=16,seq_len=2048,vocab_size=32000", "2x4xA100@100Gbit", 64),
    ("llama:layers=24,hidden=4096,heads=32,seq_len=2048,vocab_size=32000", "4x8xA100-80GB", 256),
    (f"bert:{SMALL}", "2x4xV100@25Gbit", 64),
    ("bert-base", "4x1xV100@10Gbit", 64),
    ("bert:layers=16,hidden=1024,heads=16,seq_len=512,vocab_size=30522", "16x1xV100@25Gbit", 128),
    (f"t5:{SMALL}", "2x4xV100@25Gbit", 32),
    ("t5-small", "1x8xA100", 64),
    ("vit-b", "2x2xV100@25Gbit", 64),
    ("vit:layers=8,hidden=768,heads=12", "1x8xV100", 128),
    (f"moe:{SMALL},kv_heads=16,ffn=2048,experts=8", "1x8xA100", 32),
    ("moe:layers=8,hidden=2048,heads=16,kv_heads=8,ffn=4096,experts=8,seq_len=1024,vocab_size=32000", "4x8xA100", 128),
    ("resnet:blocks=2-2-2-2,image_size=224", "4x1xV100@10Gbit", 128),
    ("resnet:blocks=3-4-6-3,image_size=224", "1x8xV100-16GB", 256),
    ("vgg16", "2x4xV100@25Gbit", 128),
    ("vgg:convolutions=1-1-2-2-2,image_size=224", "8x1xV100@10Gbit", 256),
    ("gpt:layers=32,hidden=4096,heads=32,seq_len=2048,vocab_size=51200", "8x8xA100-80GB", 512),
    ("llama:layers=40,hidden=5120,heads=40,seq_len=2048,vocab_size=32000", "2x8xA100-80GB@200Gbit", 64),
    ("bert:layers=12,hidden=1024,heads=16,seq_len=512,vocab_size=30522", "2x8xV100@10Gbit", 128),
    ("t5:layers=12,hidden=1024,heads=16,seq_len=512,vocab_size=32128", "2x8xA100", 128),
    ("vit:layers=24,hidden=1024,heads=16", "2x8xV100-16GB@25Gbit", 512),
    (
        "moe:layers=16,hidden=4096,heads=32,kv_heads=8,ffn=14336,experts=8,seq_len=2048,vocab_size=32000",
        "8x8xA100-80GB",
        256,
    ),
    ("resnet:blocks=3-4-23-3,image_size=224", "2x8xV100@25Gbit", 512),
)
"""(model of the zoo, cluster, global batch) of each problem."""
EPISODES = 5
"""Number of episodes of each problem, side by side."""
EXPLORED_FIRST, EXPLORED_LAST = 0.5, 0.05
"""Share of random decisions at the start, and after three quarters of the training; it falls linearly between."""


def train_agent(
    folder: Path, *, plans: int, seed: int, on_progress: Callable[[int, float], None], command: Sequence[str]
) -> None:
    """Trains a network and writes its checkpoint.

    Args:
        folder: folder of the checkpoint.
        plans: number of plans to decide, over all problems.
        seed: seed of network, replay and exploration.
        on_progress: called with the number of plans so far, and the mean of log(step time / lower bound) over the last
            1,000 plans.
        command: command line of the training, noted in the checkpoint.
    """
    episodes = []
    for spec, cluster, global_batch in FAMILY:
        problem = Problem.build(zoo.build(spec), parse_cluster(cluster), {"global_batch": global_batch})
        episodes.append(Episodes(HybridDecisions(PlanSpace(problem)), EPISODES))
    env = PlanVecEnv(episodes, PARAMETERS.num_signs)
    agent = new_agent(env, PARAMETERS, seed)
    agent.learn(total_timesteps=10**12, callback=_Schedule(plans, on_progress), log_interval=10**12)
    about = {"command": list(command), "seed": seed, "plans": plans, "problems": [list(one) for one in FAMILY]}
    write_checkpoint(agent, PARAMETERS, folder, about, only_network=True)


class _Schedule(BaseCallback):
    """Counts plans, lowers the exploration, and ends the training."""

    def __init__(self, plans: int, on_progress: Callable[[int, float], None]) -> None:
        super().__init__()
        self.limit, self.plans = plans, 0
        self._on_progress = on_progress
        self._gaps: list[float] = []

    def _on_step(self) -> bool:
        agent: Any = self.model
        assert isinstance(agent, MaskedDQN)
        for info in self.locals["infos"]:
            if "finished" in info:
                self.plans += 1
                self._gaps.append(info["finished"].log_gap)
                if self.plans % 1000 == 0:
                    self._on_progress(self.plans, float(np.mean(self._gaps[-1000:])))
        phase = min(1.0, self.plans / (0.75 * self.limit))
        agent.exploration = EXPLORED_FIRST + phase * (EXPLORED_LAST - EXPLORED_FIRST)
        return self.plans < self.limit

"""Decisions a second on one core without the network: every environment on real models and enumerable problems.

    python benchmarks/decision_speed.py [SECONDS] [--problems WORD] [--warm-up 1] [--network]

Many episodes run side by side and take random legal actions, or with `--network` those of the pretrained network, whose
own time is not counted. Random plans have little in common, whereas most parts of the network's plans have been priced
before. A decision is one step of one episode with its reward, the bounds of all its legal values, and the observation
of an agent; slots with one legal value are not counted. Time is processor time. Prints one line a problem and
environment: decisions a second, microseconds of a decision in stepping and in observing, legal values a decision, and
the mean return of an episode.
"""

import argparse
import time

import numpy as np
from problems import CASES, problem_of

from agents.learning.checkpoint import read_network
from agents.learning.network import ProposalNetwork
from agents.learning.proposals import NETWORK
from automap.bounds.partial_plans import BoundTable
from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.space.templates import templates
from envs.decision import Decisions, Episodes
from envs.hybrid import HybridDecisions
from envs.pipeline import PipelineDecisions
from envs.replication import ReplicationDecisions
from envs.sharding import ShardingDecisions
from ir import zoo

EPISODES = 256
"""Number of episodes that run side by side."""
WARM_UP_S = 1.0
"""Seconds of stepping before the measurement."""
REAL = (
    ("gpt2", "1x8xA100-80GB", 64),
    ("bert-large", "2x8xV100-16GB@25Gbit", 128),
    ("gpt2-xl", "8x8xH100-80GB", 512),
    ("resnet50", "2x4xV100@25Gbit", 256),
    ("mixtral-8x7b", "4x8xA100-80GB", 256),
)
"""Model of the zoo, cluster, global batch."""
ENUMERABLE = (2, 34, 50)
"""Numbers of `benchmarks.problems.CASES`, one of each kind."""


def decisions_of(kind: str, space: PlanSpace) -> Decisions:
    """The decisions of an environment; the sharding environment has the shape of the fastest template on two axes."""
    if kind == "sharding":
        known = [values for shape, values in templates(space) if shape.tp > 1] or [v for _, v in templates(space)]
        prices = space.price(np.array(known))
        best = known[int(np.lexsort((prices[:, 0], prices[:, 1] > 0.0))[0])]
        return ShardingDecisions(space, best[: space.first.signature])
    return {"hybrid": HybridDecisions, "pipeline": PipelineDecisions, "replication": ReplicationDecisions}[kind](space)


def measure(
    decisions: Decisions, table: BoundTable, seconds: float, warm_up_s: float, network: ProposalNetwork | None
) -> str:
    """Measures one environment on one problem, with random actions or those of a network; returns the line to print."""
    episodes = Episodes(decisions, EPISODES, table)
    observation = episodes.observe()
    rng, rows = np.random.default_rng(0), np.arange(EPISODES)
    spent, taken, offered, returns = np.zeros(2), 0, 0, [0, 0.0]
    totals = np.zeros(EPISODES)
    began, warm = time.process_time(), False
    while True:
        start = time.process_time()
        if not warm and start - began > warm_up_s:
            warm, began, spent, taken, offered = True, start, np.zeros(2), 0, 0
        elif warm and start - began > seconds:
            break
        plans = episodes.partial_plans.episodes
        offered += int(plans.offered.sum())
        if network is None:
            actions = plans.legal[rows, (rng.random(EPISODES) * plans.offered).astype(np.int64)]
        else:
            rated = network.rate(observation)
            actions = (rated + rng.gumbel(size=rated.shape)).argmax(axis=1)
        drawn = time.process_time()
        rewards, done = episodes.step(actions)
        if done.any():
            episodes.begin(done)
        stepped = time.process_time()
        observation = episodes.observe()
        seen = time.process_time()
        spent += stepped - drawn, seen - stepped
        taken += EPISODES
        totals += rewards
        returns[0] += int(done.sum())
        returns[1] += float(totals[done].sum())
        totals[done] = 0.0
    step_us, observe_us = 1e6 * spent / taken
    return (
        f"{taken / spent.sum():8.0f} decisions/s: {step_us:6.2f} us stepping, {observe_us:5.2f} us observing, "
        f"{offered / taken:4.1f} legal values, mean return {returns[1] / max(1, returns[0]):8.3f}"
    )


def main() -> None:
    """Measures every environment on every problem."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("seconds", nargs="?", type=float, default=2.0, help="processor time for each line")
    parser.add_argument("--problems", default="", help="measure only problems with this word in their name")
    parser.add_argument("--warm-up", type=float, default=WARM_UP_S, help="seconds before each measurement")
    parser.add_argument("--network", action="store_true", help="actions of the pretrained network, with Gumbel noise")
    asked = parser.parse_args()
    network = read_network(NETWORK) if asked.network else None
    problems = []
    for model, cluster, batch in REAL:
        problem = Problem.build(zoo.build(model), parse_cluster(cluster), {"global_batch": batch}, {})
        problems += [(f"{model} on {cluster}", problem, ("sharding", "replication", "pipeline", "hybrid"))]
    for number in ENUMERABLE:
        problems += [(CASES[number].name, problem_of(CASES[number]), (CASES[number].kind,))]
    for name, problem, kinds in problems:
        if asked.problems not in name:
            continue
        space = PlanSpace(problem)
        table = BoundTable(space)
        for kind in kinds:
            line = measure(decisions_of(kind, space), table, asked.seconds, asked.warm_up, network)
            print(f"{name[:58]:58} {kind:11} {line}", flush=True)


if __name__ == "__main__":
    main()

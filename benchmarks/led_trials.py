"""Trials that the DQN leads beside trials of the best plans by their estimates, on made-up hosts that contradict the
price.

    python benchmarks/led_trials.py [--trials 12] [--evaluations 1900] [--only WORD] [--host WORD]

A host is a problem with other constants, or with a factor on some plans; a trial is a call of its price. For each
problem and host it prints how much slower the best of 3, 6 and 12 trials is than the best plan of the host. It does so
for two kinds of trials: those of a list of the best plans that are unlike each other, as trials were before the DQN led
them, and those of the plans that the DQN proposes. The best plan of a host is the fastest of all plans that were tried
and that portfolios found which know the host.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from agents import Budget, search
from agents.learning.trials import Proposal, lead_trials
from agents.results.diverse_top_k import MOST
from automap.cluster import parse_cluster
from automap.plan import Plan
from automap.price.estimate import annotate
from automap.price.evaluator import Evaluator
from automap.price.plan_reader import lower_plan
from automap.problem import Problem
from automap.runtime.trial.calibration import calibrated
from automap.search_record import Calibration
from ir import zoo

PROBLEMS: tuple[tuple[str, str, int], ...] = (
    ("gpt2", "8xV100-16GB", 64),
    ("bert-large", "2x4xV100-16GB@25Gbit", 128),
    ("vgg19", "2x4xV100@25Gbit", 256),
    ("vit-h", "2x4xA100-80GB@100Gbit", 256),
)
COUNTS = (3, 6, 12)
"""Numbers of trials that are compared."""
NOISE = 0.05
"""Standard deviation of repeated runs of one plan, as a share."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """How a made-up host differs from what the price says."""

    communication: float = 1.0
    """Factor on the time of collectives and sends."""
    pipeline: float = 1.0
    """Factor on the step time of plans with more than one stage."""
    recompute: float = 1.0
    """Factor on the step time of plans that recompute, or shard optimizer states."""


HOSTS = {
    "as predicted": Host(),
    "collectives x3": Host(communication=3.0),
    "collectives /3": Host(communication=1.0 / 3.0),
    "pipelines x1.5": Host(pipeline=1.5),
    "recomputing and ZeRO x1.5": Host(recompute=1.5),
}


class Result(NamedTuple):
    """Measured step times in the order of the trials, in seconds."""

    listed: list[float]
    """Of the best plans by their estimates."""
    led: list[float]
    """Of the plans that the DQN proposed."""
    best_s: float
    """Step time of the best plan of the host."""


def truth(problem: Problem, host: Host) -> Callable[[Plan], float]:
    """The step time of a plan on a host, without noise."""
    changed = Calibration(num_trials=1, factor=1.0, spread=1.0, compute=1.0, communication=host.communication)
    evaluator = Evaluator(replace(problem, cluster=calibrated(problem.cluster, changed)))

    def step_s(plan: Plan) -> float:
        priced = annotate(plan, lower_plan(plan, evaluator), evaluator)
        assert priced.estimate is not None
        slower = host.pipeline if len({stage.devices for stage in plan.stages}) > 1 else 1.0
        if any(stage.recompute or stage.zero.stage for stage in plan.stages):
            slower *= host.recompute
        return slower * priced.estimate.step_time_s

    return step_s


def run(problem: Problem, host: Host, trials: int, evaluations: int) -> Result:
    """Both kinds of trials of one problem on one host."""
    step_s, budget = truth(problem, host), Budget(evaluations=evaluations)
    plans = search(problem, budget, seed=0).unlike(MOST)
    rng = np.random.default_rng(0)
    led: list[float] = []
    exact: list[float] = []

    def measured(plan: Plan) -> float:
        exact.append(step_s(plan))
        return exact[-1] * math.exp(NOISE * rng.normal())

    listed = [measured(plan) for plan in plans[:trials]]
    listed = _chosen(listed, exact)
    exact.clear()

    def tried(proposal: Proposal) -> float:
        led.append(measured(proposal.plan))
        return led[-1]

    lead_trials(problem, plans, tried, most=trials, round_s=60.0)
    led = _chosen(led, exact)
    return Result(listed, led, min(*listed, *led, _best_known(problem, host, budget, step_s)))


def _chosen(measured: list[float], exact: list[float]) -> list[float]:
    """Exact step time of the plan that leaves after each number of trials: the one that was measured fastest."""
    return [exact[int(np.argmin(measured[: count + 1]))] for count in range(len(measured))]


def _best_known(problem: Problem, host: Host, budget: Budget, step_s: Callable[[Plan], float]) -> float:
    """Step time of the best plan that portfolios find which know the host."""
    changed = Calibration(num_trials=1, factor=1.0, spread=1.0, compute=1.0, communication=host.communication)
    known = replace(problem, cluster=calibrated(problem.cluster, changed))
    found = [*search(known, budget, seed=1).unlike(MOST)]
    for fix in ({"pp": 1}, {"recompute": "none", "zero": 0}):
        if host != Host(communication=host.communication):
            limited = Problem.build(problem.graph, known.cluster, _training(problem), {"fix": fix})
            found += search(limited, budget, seed=1).unlike(MOST)
    return min(step_s(plan) for plan in found)


def _training(problem: Problem) -> dict[str, object]:
    return {"global_batch": problem.training.global_batch}


def main() -> None:
    """Prints a line for each problem and host, and the means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=max(COUNTS))
    parser.add_argument("--evaluations", type=int, default=1900)
    parser.add_argument("--only", default="", help="only problems whose name contains this")
    parser.add_argument("--host", default="", help="only hosts whose name contains this")
    options = parser.parse_args()
    counts = [count for count in COUNTS if count <= options.trials] or [options.trials]
    heads = "".join(f"{count:>9d}{'':8s}" for count in counts)
    print(
        f"how much slower than the best plan of the host, after so many trials (list, led)\n{'':50s}{heads}  runs   s"
    )
    hosts = {name: host for name, host in HOSTS.items() if options.host in name}
    rows: dict[str, list[list[float]]] = {name: [] for name in hosts}
    for model, cluster, batch in PROBLEMS:
        problem = Problem.build(zoo.build(model), parse_cluster(cluster), {"global_batch": batch})
        if options.only not in model:
            continue
        for name, host in hosts.items():
            began = time.monotonic()
            found = run(problem, host, options.trials, options.evaluations)
            gaps = [
                times[min(count, len(times)) - 1] / found.best_s - 1.0
                for count in counts
                for times in (found.listed, found.led)
            ]
            rows[name].append(gaps)
            print(
                _line(f"{model} {cluster}, {name}", gaps),
                f"{len(found.led):5d}{time.monotonic() - began:4.0f}",
                flush=True,
            )
    for name, gaps_of in rows.items():
        print(_line(f"mean, {name}", [statistics.fmean(column) for column in zip(*gaps_of, strict=True)]))
    every = [gaps for gaps_of in rows.values() for gaps in gaps_of]
    print(_line("mean", [statistics.fmean(column) for column in zip(*every, strict=True)]))


def _line(name: str, gaps: list[float]) -> str:
    return f"{name:50s}" + "".join(f"{gap:8.1%}" + (" " if number % 2 else "") for number, gap in enumerate(gaps))


if __name__ == "__main__":
    main()

"""Predicted against measured steps and memory of many plans of one model on this host, and what three trials correct.

First the host is profiled, then every plan is priced. Then all plans are run in the same two processes and take turns,
so that whatever else the host does slows all of them alike. Of each plan the median step counts, as in the profile and
in a trial. The script prints for each plan both times, both peaks of memory, and how far the middle half of its steps
is apart. It also prints the rank correlation of the times, the error on the other plans after a calibration by trials
of three plans, and the share of the cores that other processes had while the host was profiled and while the plans ran.

    python benchmarks/order_of_runs.py [--cluster FILE] [--model MODEL] [--rounds N]
"""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from automap.cluster import Cluster, parse_cluster
from automap.plan import Estimate, Plan
from automap.price.estimate import annotate
from automap.price.evaluator import Evaluator
from automap.price.plan_writer import to_plan
from automap.problem import Problem
from automap.runtime.executor.runner import Runner
from automap.runtime.launch.launcher import Limits, launch
from automap.runtime.mesh_groups import meet
from automap.runtime.profiler.busy_host import Meter, shares
from automap.runtime.profiler.measure_host import profile_host
from automap.runtime.trial.calibration import calibrate, calibrated
from automap.runtime.trial.peak_memory import PeakMemory
from automap.runtime.trial.rank import Clock
from automap.space.stated_strategy import Strategy, hand_made
from ir import zoo

MODEL = "gpt:layers=4,hidden=256,heads=4,seq_len=128,vocab_size=1024"
BATCH = 16
PLANS = {
    "dp2": Strategy(micro_batch=8),
    "dp2, 4 micro-batches": Strategy(micro_batch=2),
    "dp2, ZeRO 1": Strategy(micro_batch=8, zero=1),
    "dp2, ZeRO 2, 2 micro-batches": Strategy(micro_batch=4, zero=2),
    "dp2, ZeRO 3": Strategy(micro_batch=8, zero=3),
    "dp2, ZeRO 3, 4 micro-batches": Strategy(micro_batch=2, zero=3),
    "dp2, recompute, 2 micro-batches": Strategy(micro_batch=4, recompute="full"),
    "tp2": Strategy(tp=2, micro_batch=16),
    "tp2, 4 micro-batches": Strategy(tp=2, micro_batch=4),
    "tp2, sequence split": Strategy(tp=2, micro_batch=16, sequence_parallel=True),
    "tp2, sequence split, 4 micro-batches": Strategy(tp=2, micro_batch=4, sequence_parallel=True),
    "pp2, 1 micro-batch": Strategy(pp=2, micro_batch=16),
    "pp2, 1F1B of 4": Strategy(pp=2, micro_batch=4),
    "pp2, 1F1B of 16": Strategy(pp=2, micro_batch=1),
    "pp2, GPipe of 8": Strategy(pp=2, micro_batch=2, schedule="gpipe"),
    "pp2, zero-bubble of 8": Strategy(pp=2, micro_batch=2, schedule="zb1p"),
    "pp2, recompute, 1F1B of 8": Strategy(pp=2, micro_batch=2, recompute="full"),
}
TRIED = ("dp2", "tp2", "pp2, 1F1B of 4")
"""The plans whose trials calibrate the others: one of each mesh, as in the trials of a search."""
RANK = "order_of_runs:run_rank"
LIMITS = Limits(time_s=900.0)
PROFILE_S = 90.0
WARM_UP = 2
MIB = 1 << 20


def build(model: str, cluster: Cluster) -> Problem:
    """The problem."""
    training = {"global_batch": BATCH, "precision": "fp32", "trainer": "automap"}
    return Problem.build(zoo.build(model), cluster, training)


def priced(model: str, cluster: Cluster) -> list[tuple[Plan, Estimate]]:
    """All plans with their estimates."""
    evaluator = Evaluator(build(model, cluster))
    found = []
    for strategy in PLANS.values():
        lowered = hand_made(evaluator, strategy)
        plan = annotate(to_plan(lowered, evaluator), lowered, evaluator)
        assert plan.estimate is not None
        found.append((plan, plan.estimate))
    return found


def run_rank(folder: Path, rank: int, num_ranks: int, argument: Mapping[str, Any]) -> dict[str, Any]:
    """One rank: {times: [plans][rounds] seconds of the slowest rank, peaks: [plans] bytes, host: see `Meter`}."""
    torch.set_num_threads(1)
    meet(folder, rank, num_ranks, torch.device("cpu"), limit_s=120.0)
    problem = build(argument["model"], parse_cluster(argument["cluster"]))
    device = torch.device("cpu")
    peaks, clocks = [], []
    for document in argument["plans"]:
        with PeakMemory() as others:
            pass
        runner = Runner(problem, Plan.from_json(document), rank, 0, device)
        for _ in range(WARM_UP):
            runner.step()
        with PeakMemory() as memory:
            runner.step()
        peaks.append(memory.peak - others.peak)
        clocks.append(Clock(runner.step, device))
    times: list[list[float]] = [[] for _ in clocks]
    meter = Meter()
    for _ in range(argument["rounds"]):
        for clock, mine in zip(clocks, times, strict=True):
            mine.append(clock.measure())
    return {"times": times, "peaks": peaks, "host": meter.read()}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", help="a measured cluster file; else the host is profiled now")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    cluster = parse_cluster(options.cluster) if options.cluster else profile_host(time_limit_s=PROFILE_S).cluster
    assert cluster is not None
    plans = priced(options.model, cluster)
    argument = {
        "model": options.model,
        "cluster": cluster.to_json(),
        "plans": [replace(plan, why=(), estimate=None).to_json() for plan, _ in plans],
        "rounds": options.rounds,
    }
    done = launch(RANK, argument, 2, LIMITS)
    if done.outcome != "ok":
        raise SystemExit(f"{done.outcome}: {done.message}")
    times = done.results[0]["times"]
    peaks = [max(result["peaks"][number] for result in done.results) for number in range(len(plans))]
    print(f"{datetime.date.today()}: {options.model}, a batch of {BATCH}, 2 processes, {options.rounds} rounds")
    print(f"{os.cpu_count()} cores; while the plans ran, {taken_by(done.results)}")
    for line in cluster.warnings:
        print(line)
    show(options.model, cluster, [estimate for _, estimate in plans], times, peaks)


def taken_by(results: Sequence[Mapping[str, Any]]) -> str:
    """The share of the cores that other processes used while the ranks worked."""
    others, stolen = shares([result["host"] for result in results])
    return f"other processes had {others:.0%} of the time of the cores and the hypervisor {stolen:.0%}"


def show(
    model: str,
    cluster: Cluster,
    estimates: Sequence[Estimate],
    times: Sequence[Sequence[float]],
    peaks: Sequence[float],
) -> None:
    """Prints the table and the figures that follow from it."""
    names, measured = list(PLANS), np.median(times, axis=1)
    found = calibrate([(estimates[names.index(name)], float(measured[names.index(name)])) for name in TRIED])
    assert found is not None
    again = np.array([estimate.step_time_s for _, estimate in priced(model, calibrated(cluster, found))])
    predicted = np.array([estimate.step_time_s for estimate in estimates])
    held = np.array([max(device.total for device in estimate.memory_bytes) for estimate in estimates])
    print(f"{'':37s}{'step, ms':>31s}{'':9s}{'peak, MiB':>20s}")
    middle = np.subtract(*np.percentile(times, [75, 25], axis=1))
    print(f"{'plan':37s}{'predicted':>10s}{'measured':>9s}{'middle':>8s}{'ratio':>6s}{'calibrated':>11s}", end="")
    print(f"{'predicted':>11s}{'measured':>9s}{'ratio':>6s}")
    for i, name in enumerate(names):
        print(f"{name:37s}{1e3 * predicted[i]:10.0f}{1e3 * measured[i]:9.0f}{1e3 * middle[i]:8.0f}", end="")
        print(f"{predicted[i] / measured[i]:6.2f}{again[i] / measured[i]:11.2f}", end="")
        print(f"{held[i] / MIB:11.1f}{peaks[i] / MIB:9.1f}{held[i] / peaks[i]:6.2f}")
    others = [i for i, name in enumerate(names) if name not in TRIED]
    rank, rank_again = (spearmanr(mine, measured)[0] for mine in (predicted, again))
    print(f"Spearman of the steps: {rank:.3f}; calibrated {rank_again:.3f}")
    print(f"mean absolute error of the steps: {np.mean(np.abs(predicted / measured - 1.0)):.1%}")
    print(
        f"after trials of {', '.join(TRIED)} (computing takes {found.compute:.2f} times as long as predicted, "
        f"communicating {found.communication:.2f}): {np.mean(np.abs(again / measured - 1.0)[others]):.1%} on the others"
    )
    off = np.abs(held / np.array(peaks) - 1.0)
    print(f"memory: mean absolute error {np.mean(off):.1%}, largest {np.max(off):.1%}")


if __name__ == "__main__":
    main()

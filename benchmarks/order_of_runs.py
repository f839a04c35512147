"""Predicted against measured steps and memory of many plans of one model on this host, and what three trials correct.

The host is profiled, then every plan is priced, then all plans are run in the same two processes, taking turns, so that
whatever else the host does slows all of them alike. Printed are both times of each plan, both peaks of memory, the rank
correlation, and the errors behind a calibration by trials of the plans of three numbers, on the others.

    python benchmarks/order_of_runs.py [--cluster FILE] [--model MODEL] [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scipy.stats import spearmanr

from automap.cluster import Cluster, parse_cluster
from automap.hand_made import Strategy, hand_made
from automap.plan import Plan
from automap.plan_writing import to_plan
from automap.price.estimate import annotate
from automap.price.evaluator import Evaluator
from automap.problem import Problem
from automap.runtime.launch import Limits, launch
from automap.runtime.memory import PeakMemory
from automap.runtime.profiler import profile_host
from automap.runtime.runner import Runner
from automap.runtime.trial_rank import Clock
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
RANK = "order_of_runs:run_rank"
LIMITS = Limits(time_s=600.0)
MIB = 1 << 20


def build(model: str, cluster: Cluster) -> Problem:
    """The problem."""
    training = {"global_batch": BATCH, "precision": "fp32", "trainer": "automap"}
    return Problem.build(zoo.build(model), cluster, training)


def priced(problem: Problem) -> dict[str, Plan]:
    """All plans with their estimates."""
    evaluator = Evaluator(problem)
    found = {}
    for name, strategy in PLANS.items():
        choice = hand_made(evaluator, strategy)
        found[name] = annotate(to_plan(choice, evaluator), choice, evaluator)
    return found


def run_rank(folder: Path, rank: int, num_ranks: int, argument: Mapping[str, Any]) -> dict[str, Any]:
    """One rank: {times: [plans][rounds] seconds of the slowest rank, peaks: [plans] bytes of this rank}."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60)
    )
    problem = build(argument["model"], parse_cluster(argument["cluster"]))
    device = torch.device("cpu")
    peaks, clocks = [], []
    for document in argument["plans"]:
        with PeakMemory() as others:
            pass
        runner = Runner(problem, Plan.from_json(document), rank, 0, device)
        for _ in range(2):
            runner.step()
        with PeakMemory() as memory:
            runner.step()
        peaks.append(memory.peak - others.peak)
        clocks.append(Clock(runner.step, device))
    begun = time.monotonic()
    times: list[list[float]] = [[] for _ in clocks]
    for _ in range(argument["rounds"]):
        for clock, mine in zip(clocks, times, strict=True):
            before = waited_s()
            wall = clock.measure()
            delay = torch.tensor(waited_s() - before, dtype=torch.float64)
            dist.all_reduce(delay, dist.ReduceOp.MAX)
            mine.append(wall - float(delay))
    return {"times": times, "peaks": peaks, "seconds": time.monotonic() - begun}


def waited_s() -> float:
    """For how long this process was ready to run and waited for a core, until now."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) * 1e-9


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", help="a measured cluster file; else the host is profiled now")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    cluster = parse_cluster(options.cluster) if options.cluster else profile_host(time_limit_s=60.0).cluster
    assert cluster is not None
    problem = build(options.model, cluster)
    plans = priced(problem)
    argument = {
        "model": options.model,
        "cluster": cluster.to_json(),
        "plans": [replace(plan, why=(), estimate=None).to_json() for plan in plans.values()],
        "rounds": options.rounds,
    }
    done = launch(RANK, argument, 2, LIMITS)
    assert done.outcome == "ok", done.message
    table = []
    for number, (name, plan) in enumerate(plans.items()):
        times = done.results[0]["times"][number]
        estimate = plan.estimate
        assert estimate is not None
        table.append((name, estimate.step_time_s, min(times), statistics.median(times)))
        b = estimate.breakdown_s
        parts = " ".join(f"{k[:9]} {1e3 * v:.0f}" for k, v in {**b, **b["exposed_communication"]}.items() if isinstance(v, float))
        memory = max(d.total for d in estimate.memory_bytes) / MIB
        seen = max(result["peaks"][number] for result in done.results) / MIB
        print(f"{name:38s}{1e3 * table[-1][1]:8.0f}{1e3 * table[-1][2]:8.0f}{1e3 * table[-1][3]:8.0f} {table[-1][1] / table[-1][2]:6.2f}  {memory:7.1f}{seen:7.1f}{memory / seen:6.2f}  {parts}")
    print(spearmanr([t[1] for t in table], [t[2] for t in table])[0], done.results[0]["seconds"])


if __name__ == "__main__":
    main()

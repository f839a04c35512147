"""Where a data-parallel step of the runtime goes, in processor time, beside what the price says.

    python benchmarks/step_parts.py [--cluster FILE] [--model MODEL] [--batch N] [--rounds N]

The host is profiled unless a measured cluster file is named. Then two processes take turns at plans of two replicas
under ZeRO 0 to 3. Printed are what is priced, and of the slower rank the medians: the processor time of its own thread
in the forward and backward passes, in the reductions after them, and in the optimizer; the processor time of the whole
process, which counts the threads of the communication library too; and the wall time. Processor time depends little on
what else the host does, wall time much.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from order_of_runs import LIMITS, MODEL, PROFILE_S, WARM_UP, taken_by

from automap.cluster import Cluster, parse_cluster
from automap.plan import Plan
from automap.price.estimate import annotate
from automap.price.evaluator import Evaluator
from automap.price.plan_writer import to_plan
from automap.problem import Problem
from automap.runtime.executor.runner import Runner
from automap.runtime.launch.launcher import launch
from automap.runtime.mesh_groups import meet
from automap.runtime.profiler.busy_host import Meter
from automap.runtime.profiler.measure_host import profile_host
from automap.space.stated_strategy import Strategy, hand_made
from ir import zoo

RANK = "step_parts:run_rank"
PARTS = ("passes", "reduce", "optimizer", "process", "wall")


def build(model: str, batch: int, cluster: Cluster) -> Problem:
    """The problem."""
    training = {"global_batch": batch, "precision": "fp32", "trainer": "automap"}
    return Problem.build(zoo.build(model), cluster, training)


class Parts:
    """A runner that measures the parts of its steps."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.marks = runner, [0.0]
        (executor,) = runner.executors.values()
        self._finish = executor.finish
        executor.finish = self._reduce

    def _reduce(self) -> None:
        self.marks.append(time.thread_time())
        self._finish()

    def step(self) -> list[float]:
        """Runs one step; the seconds of each of its `PARTS`."""
        dist.barrier()
        wall, process, self.marks = time.perf_counter(), time.process_time(), [time.thread_time()]
        runner = self.runner
        runner.pipeline.step(runner._data)
        self.marks.append(time.thread_time())
        runner._optimizer.step()
        self.marks.append(time.thread_time())
        runner.pipeline.refresh()
        return [*np.diff(self.marks).tolist(), time.process_time() - process, time.perf_counter() - wall]


def run_rank(folder: Path, rank: int, num_ranks: int, argument: Mapping[str, Any]) -> dict[str, Any]:
    """One rank: {parts: [plans][rounds][PARTS] seconds, host: see `Meter`}."""
    torch.set_num_threads(1)
    meet(folder, rank, num_ranks, torch.device("cpu"), limit_s=120.0)
    problem = build(argument["model"], argument["batch"], parse_cluster(argument["cluster"]))
    runners = [Parts(Runner(problem, Plan.from_json(p), rank, 0, torch.device("cpu"))) for p in argument["plans"]]
    for runner in runners:
        for _ in range(WARM_UP):
            runner.step()
    meter = Meter()
    rounds = [[runner.step() for runner in runners] for _ in range(argument["rounds"])]
    return {"parts": np.array(rounds).swapaxes(0, 1).tolist(), "host": meter.read()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cluster", help="a measured cluster file; else the host is profiled now")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    cluster = parse_cluster(given.cluster) if given.cluster else profile_host(time_limit_s=PROFILE_S).cluster
    assert cluster is not None
    evaluator = Evaluator(build(given.model, given.batch, cluster))
    plans = []
    for zero in range(4):
        lowered = hand_made(evaluator, Strategy(micro_batch=given.batch // 2, zero=zero))
        plans.append(annotate(to_plan(lowered, evaluator), lowered, evaluator))
    argument = {
        "model": given.model,
        "batch": given.batch,
        "cluster": cluster.to_json(),
        "plans": [replace(plan, why=(), estimate=None).to_json() for plan in plans],
        "rounds": given.rounds,
    }
    done = launch(RANK, argument, 2, LIMITS)
    if done.outcome != "ok":
        raise SystemExit(f"{done.outcome}: {done.message}")
    print(f"{datetime.date.today()}: {given.model}, a batch of {given.batch}, 2 processes, {given.rounds} rounds")
    print(f"while the plans ran, {taken_by(done.results)}")
    for line in cluster.warnings:
        print(line)
    print(f"{'':8s}{'priced, ms':>40s}{'   measured, ms':s}")
    print(f"{'':8s}{'compute':>10s}{'exchange':>10s}{'optimizer':>10s}{'step':>10s}", end="   ")
    print("".join(f"{name:>10s}" for name in PARTS))
    medians = np.median([result["parts"] for result in done.results], axis=2).max(axis=0)
    for zero, (plan, took) in enumerate(zip(plans, medians.tolist(), strict=True)):
        assert plan.estimate is not None
        parts = plan.estimate.breakdown_s
        exchanged = sum(parts["exposed_communication"].values())
        priced = (parts["compute"], exchanged, parts["optimizer"], plan.estimate.step_time_s)
        print(
            f"ZeRO {zero}  {''.join(f'{1e3 * s:10.1f}' for s in priced)}   {''.join(f'{1e3 * s:10.1f}' for s in took)}"
        )


if __name__ == "__main__":
    main()

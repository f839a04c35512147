"""One rank of a trial: builds its part of the plan, warms up, and measures steps. Units: seconds, bytes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from automap.cluster import parse_cluster
from automap.errors import ProblemError
from automap.hints import Hints
from automap.plan import Plan
from automap.problem import Problem, Training
from automap.records import from_json
from automap.runtime.clock import slowest, time_together
from automap.runtime.executor.runner import Runner
from automap.runtime.mesh_groups import meet
from automap.runtime.trial.peak_memory import PeakMemory
from ir.serialize import graph_from_json

GROUP = 4
"""The number of steps of a warm-up that are compared with as many before (assumed, as are the others)."""
STEADY = 0.1
"""The relative difference of the medians of two groups at which steps are steady."""
WARM_UP_SHARE = 0.4
"""The share of the time limit after which a warm-up ends in any case."""
MAX_GROUPS = 12
"""The number of groups after which a warm-up ends in any case."""


def run_rank(folder: Path, rank: int, num_ranks: int, argument: Mapping[str, Any]) -> dict[str, Any]:
    """Runs one rank of a trial, see `automap.runtime.trial.trial`.

    Raises:
        UserError: the plan cannot be executed exactly.
    """
    started = time.monotonic()
    torch.set_num_threads(1)
    device = _device(rank, num_ranks)
    meet(folder, rank, num_ranks, device, limit_s=argument["time_s"])
    plan = Plan.from_json(argument["plan"])
    runner = Runner(_problem(argument), plan, rank, argument["seed"], device)
    # Where replicas are averaged every few steps, whole rounds are measured; each step of a round counts alike.
    clock, period = Clock(runner.round, device), runner.period
    warm_up = clock.warm_up(until=started + WARM_UP_SHARE * argument["time_s"]) * period
    rounds = [clock.measure() for _ in range(math.ceil(argument["steps"] / period))]
    times = [seconds / period for seconds in rounds for _ in range(period)]
    peak = _peak_memory(runner.round, device)
    runner.finish()
    return {
        "step_time_s": statistics.median(times),
        "step_times_s": times,
        "num_warm_up_steps": warm_up,
        "peak_memory_bytes": peak,
        "losses": runner.losses,
    }


def _device(rank: int, num_ranks: int) -> torch.device:
    """A GPU each if there are enough, else the CPU."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= num_ranks:
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)
    return torch.device("cpu")


def _problem(argument: Mapping[str, Any]) -> Problem:
    graph = replace(graph_from_json(argument["graph"]), sha256=argument["sha256"])
    training = from_json(Training, argument["training"], path="training", error=ProblemError)
    # The graph contains its loss and the user's costs already; hints matter to a search alone.
    return Problem(graph=graph, cluster=parse_cluster(argument["cluster"]), training=training, hints=Hints())


class Clock:
    """Times steps that all ranks take together, with the same result on all ranks."""

    def __init__(self, step: Callable[[], None], device: torch.device) -> None:
        """Takes a step, and the device on which it runs."""
        self._step, self._device = step, device

    def measure(self) -> float:
        """Takes one step; returns its time."""
        return time_together(self._step, self._device)

    def warm_up(self, until: float) -> int:
        """Takes steps until their times are steady; returns how many.

        Args:
            until: the time of `time.monotonic` at which the warm-up ends in any case.
        """
        before: float | None = None
        groups = 0
        while groups < MAX_GROUPS:
            groups += 1
            times = [self.measure() for _ in range(GROUP)]
            now = statistics.median(times)
            is_steady = before is not None and abs(now - before) <= STEADY * before
            # Clocks of ranks differ: the latest decides for all.
            if is_steady or slowest(time.monotonic() - until, self._device) > 0:
                break
            before = now
        return groups * GROUP


def _peak_memory(step: Callable[[], None], device: torch.device) -> int:
    """The peak memory of one more step, bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    with PeakMemory() as memory:
        step()
    return memory.peak

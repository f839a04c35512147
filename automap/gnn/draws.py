"""A problem with the volumes and times of some iterations, drawn from its profile, as arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from automap.arrays import Floats, Ints
from automap.gnn.kernels.records import GnnArrays
from automap.gnn.problem import Amount, GnnProblem

GBPS = 1e9 / 8
"""Bytes a second in a Gbit/s."""


def draw(problem: GnnProblem, iterations: int, rng: np.random.Generator) -> GnnArrays:
    """Draws volumes and times of some iterations.

    Quantities with a trace take their values from the same consecutive iterations of the trace, from a random one on,
    so that their correlation is kept. All other quantities are drawn independently from lognormal distributions.

    Args:
        problem: the problem.
        iterations: number of iterations.
        rng: random numbers.
    """
    flows, tasks = problem.flows, problem.tasks
    first = int(rng.integers(1 << 30))
    volumes = _values([flow.bytes for flow in flows], iterations, first, rng)
    times = _values([task.time_s for task in tasks], iterations, first, rng)
    numbers = {task.name: number for number, task in enumerate(tasks)}
    source = np.array([numbers[flow.source] for flow in flows], dtype=np.int64)
    target = np.array([numbers[flow.target] for flow in flows], dtype=np.int64)
    is_server = np.array([task.role == "server" for task in tasks], dtype=bool)
    fed: list[list[int]] = [[] for _ in tasks]
    for flow in flows:
        if tasks[numbers[flow.source]].role == "sampler":
            fed[numbers[flow.source]].append(numbers[flow.target])
    out_begin, out_flows = _by(source, len(tasks))
    in_begin, in_flows = _by(target, len(tasks))
    # A group (coflow) consists of all flows from one server, or of all flows into any other task.
    groups = np.where(is_server[source], len(tasks) + source, target) if len(flows) else source
    return GnnArrays(
        rate_out=np.array([machine.nic_out_Gbps * GBPS for machine in problem.machines]),
        rate_in=np.array([machine.nic_in_Gbps * GBPS for machine in problem.machines]),
        order=np.array(problem.order(), dtype=np.int64),
        is_store=np.array([task.role == "store" for task in tasks], dtype=np.int64),
        source=source,
        target=target,
        lag=np.array(problem.lags(), dtype=np.int64),
        coflow=groups,
        out_begin=out_begin,
        out_flows=out_flows,
        in_begin=in_begin,
        in_flows=in_flows,
        fed_begin=np.cumsum([0, *map(len, fed)], dtype=np.int64),
        fed=np.array([worker for workers in fed for worker in workers], dtype=np.int64),
        mean_bytes=np.array([flow.bytes.average for flow in flows]),
        mean_time_s=np.array([task.time_s.average for task in tasks]),
        bytes=volumes,
        time_s=times,
        prefetch=problem.prefetch,
    )


def _values(amounts: Sequence[Amount], iterations: int, first: int, rng: np.random.Generator) -> Floats:
    """[iterations, amounts] values."""
    mean = np.array([amount.average for amount in amounts])
    # A lognormal variable of mean 1 and standard deviation s is exp(normal(-v / 2, v)), v = log(1 + s^2).
    variance = np.log1p(np.array([amount.spread for amount in amounts]) ** 2)
    found: Floats = mean * np.exp(rng.normal(size=(iterations, len(amounts))) * np.sqrt(variance) - variance / 2.0)
    for number, amount in enumerate(amounts):
        if amount.trace is not None:
            found[:, number] = np.array(amount.trace)[np.arange(first, first + iterations) % len(amount.trace)]
    return found


def _by(ends: Ints, num_tasks: int) -> tuple[Ints, Ints]:
    """The flows sorted by the task at one of their ends.

    Args:
        ends: [flows] task at that end.
        num_tasks: number of tasks.

    Returns:
        [tasks + 1] where the flows of each task begin in the sorted list; [flows] their numbers in that list.
    """
    begin = np.searchsorted(np.sort(ends), np.arange(num_tasks + 1)).astype(np.int64)
    return begin, np.argsort(ends, kind="stable").astype(np.int64)

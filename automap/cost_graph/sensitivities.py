"""Sensitivities: derivatives of step time and memory with respect to each column of each unit cost, at a plan.

The step ends with the slowest rank; hosts, overlap and the schedule are no sums over units. Planners that need sums
take the sensitivities at a plan, solve, price exactly, and begin again at the plan that they have found.
Units: seconds, bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from automap.cost_graph.unit_rows import UnitRows
from automap.price.kernels.collectives import KIND_COUNT
from automap.price.kernels.columns import (
    C_BACKWARD,
    C_BACKWARD_COMM,
    C_BACKWARD_HOST,
    C_BACKWARD_WAITS,
    C_BOUNDARY,
    C_FORWARD,
    C_FORWARD_COMM,
    C_FORWARD_HOST,
    C_FORWARD_WAITS,
    C_GATHER,
    C_INPUT,
    C_INPUT_HOST,
    C_LAUNCHED,
    C_LIVE,
    C_PARAMETERS,
    C_RECOMPUTE,
    C_RECOMPUTE_COMM,
    C_REDUCE,
    C_SAVED,
    C_SCATTER,
    C_WEIGHT,
    C_WEIGHT_HOST,
    C_WORKSPACE,
    C_ZERO,
    H_HOST_BACKWARD,
    H_HOST_COLLECTIVE_S,
    H_HOST_S,
    H_OVERLAP_EXPONENT,
)
from automap.price.kernels.step import R_CAPACITY, R_END, R_PARAMETERS

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SECONDS = (C_FORWARD, C_BACKWARD, C_RECOMPUTE, C_INPUT, C_WEIGHT)
BYTES = (C_SAVED, C_LIVE, C_WORKSPACE, C_BOUNDARY)
ELEMENTS = (C_PARAMETERS, C_ZERO)
STEP = 1e-4
"""Of a difference, as a share of the step or of a device's memory."""
SHARPNESS = 16.0
"""Exponent of the norm over ranks that stands for the slowest: one that is nearly as slow counts too."""


@dataclass(frozen=True, kw_only=True)
class Sensitivities:
    """Of one plan."""

    time: Floats
    """[rows, C_COUNT] seconds."""
    memory: Floats
    """[ranks, rows, C_COUNT] bytes."""
    used: Floats
    """[ranks] bytes of the plan."""
    capacity: Floats
    """[ranks] bytes."""


def sensitivities(units: UnitRows, chosen: Ints) -> Sensitivities:
    """Sensitivities at signatures `chosen`, [operator rows, axes]."""
    evaluator, lowered = units.evaluator, units.lowered
    costs, tied = units.costs(chosen), units.tied(chosen)

    def measure(trial: Floats) -> tuple[float, Floats, Floats]:
        ranks = units.outcome(trial, tied, exact=False).ranks
        ends = ranks[:, R_END]
        slowest = float(ends.max())
        smooth = slowest * float((ends / slowest) ** SHARPNESS @ np.ones(len(ends))) ** (1.0 / SHARPNESS)
        return smooth, ranks[:, R_PARAMETERS:R_CAPACITY].sum(axis=1), ranks[:, R_CAPACITY]

    step_s, used, capacity = measure(costs)
    time = np.zeros_like(costs)
    memory = np.zeros((len(used), *costs.shape))
    num_axes = len(lowered.zero_axes)
    reduced = [c + a for a in range(num_axes) for c in (C_REDUCE, C_GATHER, C_SCATTER)]
    room = float(capacity.max())
    for column in (*SECONDS, *BYTES, *ELEMENTS, *reduced):
        size = STEP * (step_s / lowered.num_micro_batches if column in SECONDS else room)
        size = size if column in (*SECONDS, *BYTES) else size / 16.0
        for row in range(len(costs)):
            trial = costs.copy()
            trial[row, column] += size
            after_s, after, _ = measure(trial)
            time[row, column] = (after_s - step_s) / size
            memory[:, row, column] = (after - used) / size
    for kind in range(KIND_COUNT):
        time[:, C_FORWARD_COMM + kind] = evaluator.exposed[kind] * time[:, C_FORWARD]
        time[:, C_BACKWARD_COMM + kind] = evaluator.exposed[kind] * time[:, C_RECOMPUTE]
        time[:, C_RECOMPUTE_COMM + kind] = time[:, C_BACKWARD_COMM + kind]
    _share_with_hosts(units, costs, time)
    return Sensitivities(time=time, memory=memory, used=used, capacity=capacity)


def _share_with_hosts(units: UnitRows, costs: Floats, time: Floats) -> None:
    """Turns slopes of passes into slopes of what the device and what its host has to do in them.

    Both together take t = (device^p + host^p)^(1/p), see `automap.price.kernels.host_overhead`.
    """
    exposed = units.evaluator.exposed
    comm = np.arange(KIND_COUNT)
    for number, row in enumerate(units.rows):
        hardware = units.lowered.layout.stages[row.rank].hardware
        power = hardware[H_OVERLAP_EXPONENT]
        of = costs[number]
        again = of[C_RECOMPUTE_COMM + comm] @ exposed + of[C_BACKWARD_COMM + comm] @ exposed + of[C_RECOMPUTE]
        passes = (
            (
                C_FORWARD_HOST,
                of[C_FORWARD] + of[C_FORWARD_COMM + comm] @ exposed,
                [C_FORWARD, *(C_FORWARD_COMM + comm)],
            ),
            (
                C_BACKWARD_HOST,
                of[C_BACKWARD] + again,
                [C_BACKWARD, C_RECOMPUTE, *(C_BACKWARD_COMM + comm), *(C_RECOMPUTE_COMM + comm)],
            ),
            (C_INPUT_HOST, of[C_INPUT] + again, [C_INPUT]),
            (C_WEIGHT_HOST, of[C_WEIGHT], [C_WEIGHT]),
        )
        for wait, device_s, columns in passes:
            both_s = device_s + of[wait]
            if both_s <= 0.0:
                continue
            share = (device_s / both_s) ** (power - 1.0)
            hosts = max(0.0, 1.0 - (device_s / both_s) ** power) ** ((power - 1.0) / power)
            worth = time[number, columns[0]] * hosts
            time[number, columns] *= share
            if wait == C_FORWARD_HOST:
                time[number, C_LAUNCHED] += worth * hardware[H_HOST_S]
                time[number, C_FORWARD_WAITS] += worth * hardware[H_HOST_COLLECTIVE_S]
            elif wait == C_BACKWARD_HOST:
                time[number, C_LAUNCHED] += worth * hardware[H_HOST_S] * hardware[H_HOST_BACKWARD]
                time[number, C_BACKWARD_WAITS] += worth * hardware[H_HOST_COLLECTIVE_S]

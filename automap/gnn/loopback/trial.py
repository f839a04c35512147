"""A trial of a plan: its flows are sent between "machines" on this host, at reduced rates that the host can reach."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from automap.arrays import Ints
from automap.errors import ProblemError
from automap.gnn.draws import GBPS
from automap.gnn.kernels.records import GnnArrays
from automap.gnn.loopback.controller import hosts
from automap.gnn.plan import GnnPlan
from automap.gnn.problem import GnnProblem
from automap.gnn.simulator import Simulator

FASTEST = 30e6
"""Bytes a second of the fastest interface: four machines then load a core of a Xeon by about a fifth."""
SLOWEST = 1e4
"""Least bytes a second of an interface, so that rounding to whole bytes does not change volumes much (assumed)."""
LEAST_S, MOST_S = 0.4, 10.0
"""Least and most seconds of an iteration (assumed): long compared with the milliseconds that processes need to wake up,
and short enough to wait for."""
MOST_MACHINES = 16
"""Largest number of machines of a trial, each of which is a process (assumed: with more, processes would wait for a
processor core)."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a trial, in seconds of the problem."""

    simulated_s: float
    """Seconds of an iteration, simulated on the volumes of the trial."""
    measured_s: float
    """The same, measured."""
    iterations: int
    slowed: float
    """Seconds of the trial over seconds of the problem; below 1 the trial was faster."""


def try_plan(problem: GnnProblem, plan: GnnPlan, *, iterations: int, seed: int = 0, by_kernel: bool = False) -> Trial:
    """Runs a plan with real bytes.

    Volumes and rates are divided by one factor, and volumes and times are scaled by another one, which keeps all
    ratios.

    Args:
        problem: the problem that the plan is for.
        plan: a plan.
        iterations: number of iterations.
        seed: seed of the volumes.
        by_kernel: see `automap.gnn.loopback.controller.hosts`.

    Raises:
        ProblemError: there are too many machines, their interfaces are too unlike, or this host has no namespaces.
        PlanError: the plan is for another problem.
    """
    if len(problem.machines) > MOST_MACHINES:
        repair = f"Try plans of up to {MOST_MACHINES} machines on one host."
        raise ProblemError("too many", field="problem.machines", value=len(problem.machines), repair=repair)
    simulator = Simulator(problem, iterations=iterations, seed=seed)
    place, ranks, arrays = plan.places(simulator), plan.ranks(problem), simulator.arrays
    simulated_s = simulator.run(place, plan.schedule, ranks).iteration_s
    smaller = _scale(problem, arrays, place)
    slowed = float(np.clip(simulated_s, LEAST_S, MOST_S)) / simulated_s if simulated_s > 0.0 else 1.0
    own = arrays._replace(
        rate_out=arrays.rate_out * smaller,
        rate_in=arrays.rate_in * smaller,
        bytes=arrays.bytes * smaller * slowed,
        time_s=arrays.time_s * slowed,
    )
    with hosts(own._replace(bytes=own.bytes[:1], time_s=own.time_s[:1]), by_kernel=by_kernel) as machines:
        machines.run(place, ranks, plan.schedule)  # the first run warms up
        machines.arrays = own
        measured_s = machines.run(place, ranks, plan.schedule) / slowed / iterations
    return Trial(simulated_s, measured_s, iterations, slowed)


def _scale(problem: GnnProblem, arrays: GnnArrays, place: Ints) -> float:
    """Factor by which all rates are divided, so that the fastest used interface has `FASTEST` bytes a second.

    Raises:
        ProblemError: the slowest used interface would then have less than `SLOWEST`.
    """
    ends = place[arrays.source], place[arrays.target]
    is_used = (ends[0] != ends[1]) & (arrays.bytes > 0.0).any(axis=0)
    if not is_used.any():
        return 1.0
    rates = np.array([arrays.rate_out[ends[0][is_used]], arrays.rate_in[ends[1][is_used]]])
    found = min(1.0, FASTEST / float(rates.max()))
    side, at = np.unravel_index(int(rates.argmin()), rates.shape)
    if rates[side, at] * found < SLOWEST:
        number = int(ends[side][is_used][at])
        name = ("nic_out_Gbps", "nic_in_Gbps")[side]
        most = SLOWEST / found / GBPS
        raise ProblemError(
            "too slow compared with the other machines",
            field=f"problem.machines[{number}].{name}",
            value=getattr(problem.machines[number], name),
            repair=f"A trial makes all rates smaller by one factor: give {most:.3g} or more.",
        )
    return found

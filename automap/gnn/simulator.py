"""The Python interface of the simulator: makespan, bounds, the order of flows, and their rates over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from automap.arrays import Floats, Ints
from automap.errors import ProblemError, one_of
from automap.gnn.draws import draw
from automap.gnn.kernels import bounds, simulation
from automap.gnn.problem import BOUNDS, RESOURCES, GnnProblem

POLICIES = simulation.POLICIES


@dataclass(frozen=True, slots=True)
class Stretch:
    """An interval of time in which a flow had one rate."""

    begin_s: float
    end_s: float
    flow: int
    iteration: int
    rate: float
    """Bytes a second."""


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a simulation."""

    end_s: Floats
    """[iterations] when the last task ended each iteration."""
    stretches: tuple[Stretch, ...]
    """Every flow's rates over time, if they were asked for."""

    @property
    def makespan_s(self) -> float:
        """When all iterations had ended."""
        return float(self.end_s[-1])

    @property
    def iteration_s(self) -> float:
        """Makespan over the number of iterations."""
        return self.makespan_s / len(self.end_s)


class Simulator:
    """A problem with the volumes of some iterations: the same ones for every placement (common random numbers)."""

    def __init__(self, problem: GnnProblem, *, iterations: int, seed: int) -> None:
        self.problem = problem
        self.arrays = draw(problem, iterations, np.random.default_rng(seed))
        self.iterations = iterations
        self.demands = np.array([[getattr(task, name) for name in RESOURCES] for task in problem.tasks])
        """[tasks, resources]"""
        self.room = np.array([[getattr(machine, name) for name in RESOURCES] for machine in problem.machines])
        """[machines, resources]"""
        names = {machine.name: number for number, machine in enumerate(problem.machines)}
        self.pinned = np.array([-1 if t.machine is None else names[t.machine] for t in problem.tasks], dtype=np.int64)
        """[tasks] machine that a task must run on, or -1."""

    def ranks(self, place: Ints) -> Ints:
        """[flows] the order `priority` of a placement, the most urgent 0; `place`, [tasks], is the machine of each
        task."""
        found = np.empty(len(self.arrays.source), dtype=np.int64)
        bounds.critical_ranks(self.arrays, place, found)
        return found

    def run(self, place: Ints, policy: str = "priority", ranks: Ints | None = None, *, log: int = 0) -> Run:
        """Simulates a placement.

        Args:
            place: [tasks] machine of each task.
            policy: one of `POLICIES`.
            ranks: [flows] order of the flows; None = `ranks(place)`. Only `priority` uses it.
            log: largest number of stretches that are stored.

        Raises:
            ProblemError: there is no such policy.
        """
        if policy not in POLICIES:
            raise ProblemError("unknown", field="schedule", value=policy, repair=one_of(POLICIES, policy))
        found, end_s = np.zeros((log, 5)), np.empty(self.iterations)
        order = self.ranks(place) if ranks is None else ranks
        rows = simulation.simulate(self.arrays, place, order, POLICIES.index(policy), found, end_s)
        stretches = (
            Stretch(begin_s, stop_s, int(flow), int(iteration), rate)
            for begin_s, stop_s, flow, iteration, rate in found[:rows].tolist()
        )
        return Run(end_s, tuple(stretches))

    def makespans(self, places: Sequence[Ints] | Ints, policy: str = "priority") -> Floats:
        """[placements] makespan of each placement, in seconds; `places` is [placements, tasks]."""
        found = np.empty(len(places))
        rows = np.ascontiguousarray(places, dtype=np.int64).reshape(len(places), len(self.problem.tasks))
        simulation.simulate_many(self.arrays, rows, POLICIES.index(policy), found)
        return found

    def bounds(self, place: Ints) -> Floats:
        """[3] lower bounds on the makespan of a placement under any order of service, see `BOUNDS`; seconds."""
        found = np.empty(len(BOUNDS))
        bounds.lower_bounds(self.arrays, place, found)
        return found

    def fits(self, place: Ints) -> bool:
        """Whether every machine has the resources of its tasks, and pinned tasks are on their machines."""
        used = np.zeros_like(self.room)
        np.add.at(used, place, self.demands)
        is_there = (self.pinned < 0) | (self.pinned == place)
        return bool((used <= self.room + 1e-9).all() and is_there.all())

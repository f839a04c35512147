"""PlacementEnv: the tasks of distributed GNN training are placed one after the other; an action is a machine.

Observations have the form of `envs.decision`: features of the task at hand, then features of every machine, and a mask
of the machines with room. The reward of a step is minus the growth of a lower bound on the time of an iteration (of its
logarithm, times `REWARD_SCALE`); the last step goes from the bound to the simulated time. The bound is the largest load
of an interface by flows between placed tasks, and at least the longest compute time of a task.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.error import ResetNeeded

from automap.arrays import Floats, Ints
from automap.errors import ProblemError
from automap.gnn.problem import GnnProblem
from automap.gnn.simulator import Simulator
from envs.decision import COMPLETION, MAX_ACTIONS, OBSERVED, REWARD_SCALE, Observation, observation_space
from envs.kernels import ACTION_FEATURES, LIMIT, STATE_FEATURES

STUCK = 3.0
"""Logarithm of the ratio of times by which a placement that leaves a task without room is worse than its bound
(assumed: far more than feasible placements differ by)."""
ROLES = ("worker", "sampler", "server", "store")


class PlacementEnv(gymnasium.Env[Observation, np.int64]):
    """Places the tasks that are not pinned: each worker, then its samplers, then the parameter servers.

    Where the mask forbids an action, the next machine with room is taken, so that any sampled action is harmless.

    Attributes:
        order: [...] the tasks in the order in which they are placed.
        place: [tasks] machine of each task, or -1.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(self, problem: GnnProblem | Simulator) -> None:
        """Builds an environment.

        Args:
            problem: a problem, of which 8 iterations are drawn with the seed 0, or a simulator with volumes of its own.

        Raises:
            ProblemError: there are more machines than actions, or nothing to place.
        """
        self.simulator = problem if isinstance(problem, Simulator) else Simulator(problem, iterations=8, seed=0)
        arrays, tasks = self.simulator.arrays, self.simulator.problem.tasks
        if len(self.simulator.room) > MAX_ACTIONS:
            repair = f"Use metropolis for more than {MAX_ACTIONS} machines."
            value = f"{len(self.simulator.room)} machines"
            raise ProblemError("too many actions", field="problem.machines", value=value, repair=repair)
        worker_of = {
            sampler: int(arrays.fed[arrays.fed_begin[sampler]])
            for sampler in range(len(tasks))
            if arrays.fed_begin[sampler] < arrays.fed_begin[sampler + 1]
        }
        free = np.flatnonzero(self.simulator.pinned < 0).tolist()
        self.order = sorted(
            free, key=lambda t: (tasks[t].role == "server", worker_of.get(t, t), ROLES.index(tasks[t].role), t)
        )
        if not self.order:
            repair = "Leave the machine of some task out."
            raise ProblemError("nothing to place", field="problem.tasks", value="all pinned", repair=repair)
        self._volume = arrays.mean_bytes
        self._scale_s = max(float(arrays.mean_time_s.max()), 1e-9)
        self.bound_s: float = self._scale_s
        self._size = self.simulator.room.max(axis=0) + 1e-12
        self.observation_space: spaces.Space[Any] = observation_space()
        self.action_space = spaces.Discrete(MAX_ACTIONS)
        self._begin()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begins a placement."""
        super().reset(seed=seed, options=options)
        self._begin()
        return self._observe(), {}

    def step(self, action: np.int64 | int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Places one task.

        Returns:
            Observation, reward, whether the episode has ended, False, and at the end {"iteration_s": the simulated
            time of an iteration, infinite where a task found no room, "place": [tasks] the placement}.

        Raises:
            ResetNeeded: no machine has room for the task at hand, or the episode has ended.
        """
        if not self._free.any():
            raise ResetNeeded("no task can be placed any more; call reset() before the next step()")
        machine = int(action)
        while not self._free[machine % len(self._free)]:
            machine += 1
        machine %= len(self._free)
        before = self.bound_s
        self._put(self.order[self.number], machine, self._loads)
        self.bound_s = max(self.bound_s, float(self._loads.max()))
        self.number += 1
        self._look()
        if self.number == len(self.order):
            found = float(self.simulator.makespans([self.place])[0]) / self.simulator.iterations
            told = {"iteration_s": found, "place": self.place.copy()}
            return self._observe(), -REWARD_SCALE * math.log(max(found, 1e-9) / before), True, False, told
        if not self._free.any():
            reward = -REWARD_SCALE * (math.log(self.bound_s / before) + STUCK)
            return self._observe(), reward, True, False, {"iteration_s": math.inf, "place": self.place.copy()}
        return self._observe(), -REWARD_SCALE * math.log(self.bound_s / before), False, False, {}

    def _begin(self) -> None:
        self.place: Ints = self.simulator.pinned.copy()
        self.room: Floats = self.simulator.room.astype(float)
        pinned = np.flatnonzero(self.place >= 0)
        np.subtract.at(self.room, self.place[pinned], self.simulator.demands[pinned])
        self.number, self._loads = 0, np.zeros((2, len(self.room)))
        self.bound_s = self._scale_s
        self._look()

    def _look(self) -> None:
        """Finds out which machines have room for the next task, and the bounds after them."""
        machines = len(self.room)
        self._free = np.zeros(machines, dtype=bool)
        self._behind, self._near = np.zeros((2, machines)), np.zeros(machines)
        if self.number == len(self.order):
            return
        task = self.order[self.number]
        self._free = (self.room >= self.simulator.demands[task] - 1e-9).all(axis=1)
        sent, received = self._exchanged(task)
        arrays = self.simulator.arrays
        # Were the task nowhere near, others would receive and send all of this.
        others = self._loads + np.stack([received / arrays.rate_out, sent / arrays.rate_in])
        rows = np.arange(machines)
        for machine in np.flatnonzero(self._free):
            own = self._loads[:, machine].copy()
            own[0] += (sent.sum() - sent[machine]) / arrays.rate_out[machine]
            own[1] += (received.sum() - received[machine]) / arrays.rate_in[machine]
            away = others[:, rows != machine].max() if machines > 1 else 0.0
            self._behind[:, machine] = own.max(), max(own.max(), away)
        self._near = (sent + received) / max(float((sent + received).sum()), 1.0)

    def _exchanged(self, task: int) -> tuple[Floats, Floats]:
        """[machines] bytes that a task sends to and receives from what has been placed on each machine."""
        arrays, found = self.simulator.arrays, []
        for begin, flows, ends in (
            (arrays.out_begin, arrays.out_flows, arrays.target),
            (arrays.in_begin, arrays.in_flows, arrays.source),
        ):
            own = flows[begin[task] : begin[task + 1]]
            others = self.place[ends[own]]
            there = np.zeros(len(self.room))
            np.add.at(there, others[others >= 0], self._volume[own][others >= 0])
            found.append(there)
        return found[0], found[1]

    def _put(self, task: int, machine: int, loads: Floats) -> None:
        arrays = self.simulator.arrays
        sent, received = self._exchanged(task)
        sent[machine] = received[machine] = 0.0
        loads[0, machine] += sent.sum() / arrays.rate_out[machine]
        loads[1, machine] += received.sum() / arrays.rate_in[machine]
        loads[0] += received / arrays.rate_out
        loads[1] += sent / arrays.rate_in
        self.place[task] = machine
        self.room[machine] -= self.simulator.demands[task]

    def _observe(self) -> Observation:
        seen = np.zeros(OBSERVED, dtype=np.float32)
        mask = np.zeros(MAX_ACTIONS, dtype=np.int8)
        machines = len(self.room)
        if self.number == len(self.order) or not self._free.any():
            return {"observation": seen, "action_mask": np.ones(MAX_ACTIONS, dtype=np.int8)}
        task = self.order[self.number]
        mask[:machines] = self._free
        demand = self.simulator.demands[task] / self._size
        seen[ROLES.index(self.simulator.problem.tasks[task].role)] = 1.0
        seen[4:8] = self.number / len(self.order), *demand
        seen[8:10] = math.log(self.bound_s / self._scale_s), math.log2(machines) / 4.0
        actions = np.zeros((machines, ACTION_FEATURES), dtype=np.float32)
        growth = np.log(np.maximum(self._behind[1], self.bound_s) / self.bound_s)
        actions[:, COMPLETION] = growth
        actions[:, :COMPLETION] = np.stack([self._behind[0], self._behind[1]], axis=1) / self.bound_s
        actions[:, COMPLETION + 1] = self._near
        actions[:, COMPLETION + 2] = self._demand_pull(task)
        actions[:, COMPLETION + 3 : COMPLETION + 6] = (self.room - self.simulator.demands[task]) / self._size
        seen[STATE_FEATURES : STATE_FEATURES + actions.size] = np.clip(actions, -LIMIT, LIMIT).ravel()
        return {"observation": np.clip(seen, -LIMIT, LIMIT), "action_mask": mask}

    def _demand_pull(self, task: int) -> npt.NDArray[np.float64]:
        """[machines] share of what the samplers of a worker read that lies on each machine; 0 for other tasks."""
        arrays, found = self.simulator.arrays, np.zeros(len(self.room))
        for flow in arrays.in_flows[arrays.in_begin[task] : arrays.in_begin[task + 1]]:
            sampler = arrays.source[flow]
            for read in arrays.in_flows[arrays.in_begin[sampler] : arrays.in_begin[sampler + 1]]:
                if arrays.is_store[arrays.source[read]]:
                    found[self.place[arrays.source[read]]] += self._volume[read]
        return found / max(float(found.sum()), 1.0)

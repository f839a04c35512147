"""Placements by simple rules: at random, beside each other, packed, and packed by flows.

Each rule orders the tasks and ranks the machines for the next one; `placed` keeps to the room of the machines, and
starts again in a random order where a task finds none. Where no order leaves room for all, an integer program does.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from agents.gnn.packing import free_room, movable, packed_tasks
from automap.arrays import Floats, Ints
from automap.gnn.simulator import Simulator

Rate = Callable[[int, Ints, Floats], Floats]
"""(task, [tasks] machine or -1, [machines, resources] room) -> [machines] how good each machine is for the task."""
TRIES = 20
"""Orders that are tried until every task finds room (assumed)."""


def placed(
    simulator: Simulator, order: Ints, rate: Rate, rng: np.random.Generator, limit_s: float | None = None
) -> Ints:
    """Places one task after the other on the machine that is rated best among those with room.

    Args:
        simulator: the problem.
        order: [...] the tasks that are not pinned.
        rate: rates machines.
        rng: for other orders where this one leaves a task without room.
        limit_s: see `packed_tasks`.

    Returns:
        [tasks] machine of each task.

    Raises:
        NothingFits: there is no placement with room for all tasks, or none was found.
    """
    demands = simulator.demands
    scale = simulator.room.sum(axis=0) + 1e-12
    for attempt in range(TRIES):
        place, room = simulator.pinned.copy(), free_room(simulator)
        for task in order.tolist():
            free = (room >= demands[task] - 1e-9).all(axis=1)
            if not free.any():
                break
            place[task] = int(np.where(free, rate(task, place, room), -np.inf).argmax())
            room[place[task]] -= demands[task]
        else:
            return place
        # Large tasks first, because they have the fewest places; the order is randomised more with each attempt.
        size = (demands[order] / scale).max(axis=1)
        order = order[np.argsort(-size * np.exp(rng.normal(size=len(order)) * min(attempt, 3) / 3.0), kind="stable")]
    return packed_tasks(simulator, limit_s)


def place_randomly(simulator: Simulator, rng: np.random.Generator) -> Ints:
    """[tasks] every task on a random machine with room."""
    order = rng.permutation(movable(simulator))
    return placed(simulator, order, lambda task, place, room: rng.random(len(room)), rng)


def read_from(simulator: Simulator) -> Floats:
    """[tasks, machines] bytes that the samplers of each worker read from the stores of each machine; 0 for others."""
    arrays = simulator.arrays
    found = np.zeros((len(simulator.pinned), len(simulator.room)))
    for flow in np.flatnonzero(arrays.is_store[arrays.source]).tolist():
        sampler = arrays.target[flow]
        workers = arrays.fed[arrays.fed_begin[sampler] : arrays.fed_begin[sampler + 1]]
        found[workers, simulator.pinned[arrays.source[flow]]] += arrays.mean_bytes[flow]
    return found


def place_together(simulator: Simulator, rng: np.random.Generator) -> Ints:
    """[tasks] a placement as DistDGL makes it: workers beside the store that they read most, samplers beside workers.

    A worker for which there is no GPU goes where most GPUs are free; a sampler for which there are no cores, and a
    parameter server, goes where most cores are free.
    """
    roles = [task.role for task in simulator.problem.tasks]
    tasks = movable(simulator)
    order = np.array(sorted(tasks.tolist(), key=lambda t: ("worker", "sampler", "server", "store").index(roles[t])))
    arrays, read = simulator.arrays, read_from(simulator)

    def rate(task: int, place: Ints, room: Floats) -> Floats:
        gpus, cpus = room[:, 0], room[:, 1]
        found = cpus / (1.0 + cpus.max()) + (gpus if roles[task] == "worker" else 0.0)
        if roles[task] == "worker" and read[task].any():
            found[read[task].argmax()] += 1e6
        if roles[task] == "sampler":
            for worker in arrays.fed[arrays.fed_begin[task] : arrays.fed_begin[task + 1]]:
                found[place[worker]] += 10.0 * (place[worker] >= 0)
        return np.asarray(found)

    return placed(simulator, order, rate, rng)


def place_gathered(simulator: Simulator, machine: int, rng: np.random.Generator) -> Ints:
    """[tasks] as many tasks as possible on one machine, those that exchange the most bytes first; the others go where
    the most room is left."""
    tasks, arrays = movable(simulator), simulator.arrays
    volume = np.zeros(len(simulator.pinned))
    np.add.at(volume, arrays.source, arrays.mean_bytes)
    np.add.at(volume, arrays.target, arrays.mean_bytes)
    scale = simulator.room.max(axis=0) + 1e-12

    def rate(task: int, place: Ints, room: Floats) -> Floats:
        found: Floats = (room / scale).sum(axis=1)
        found[machine] = np.inf
        return found

    return placed(simulator, tasks[np.argsort(-volume[tasks], kind="stable")], rate, rng)


def place_packed(simulator: Simulator, rng: np.random.Generator) -> Ints:
    """[tasks] large tasks first, each on the machine that it leaves the least room on (best-fit decreasing)."""
    scale = simulator.room.max(axis=0) + 1e-12
    tasks = movable(simulator)
    order = tasks[np.argsort(-(simulator.demands[tasks] / scale).sum(axis=1), kind="stable")]
    return placed(simulator, order, lambda task, place, room: -(room / scale).sum(axis=1), rng)


def place_by_flows(simulator: Simulator, rng: np.random.Generator, limit_s: float | None = None) -> Ints:
    """[tasks] each task on the machine that it exchanges the most bytes with: the start of the search.

    A worker is followed by its samplers, so that these find room beside it; workers with large mini-batches are first.
    `limit_s`: see `packed_tasks`.
    """
    arrays, roles = simulator.arrays, [task.role for task in simulator.problem.tasks]
    volume = np.zeros(len(roles))
    np.add.at(volume, arrays.target, arrays.mean_bytes)
    followers: dict[int, list[int]] = {}
    for sampler in range(len(roles)):
        for worker in arrays.fed[arrays.fed_begin[sampler] : arrays.fed_begin[sampler + 1]][:1].tolist():
            followers.setdefault(worker, []).append(sampler)
    workers = sorted((t for t in range(len(roles)) if roles[t] == "worker"), key=lambda t: -volume[t])
    wanted = [task for worker in workers for task in (worker, *followers.get(worker, ()))]
    known = set(wanted)
    wanted += [task for task in range(len(roles)) if task not in known]
    order = np.array([task for task in wanted if simulator.pinned[task] < 0], dtype=np.int64)
    # What the samplers of a worker read draws the worker to the store, since they will stand beside it.
    pull = read_from(simulator)

    def rate(task: int, place: Ints, room: Floats) -> Floats:
        found = pull[task].copy()
        for begin, flows, ends in (
            (arrays.in_begin, arrays.in_flows, arrays.source),
            (arrays.out_begin, arrays.out_flows, arrays.target),
        ):
            own = flows[begin[task] : begin[task + 1]]
            others = place[ends[own]]
            np.add.at(found, others[others >= 0], arrays.mean_bytes[own][others >= 0])
        for follower in followers.get(task, ()):
            # Where its samplers do not fit either, half of what draws it there is lost.
            found[(room[:, 1] < simulator.demands[[task, follower], 1].sum())] *= 0.5
        return np.asarray(found + 1e-6 * room[:, 1])

    return placed(simulator, order, rate, rng, limit_s)


BASELINES = {"random": place_randomly, "co-location": place_together, "greedy packing": place_packed}
"""Rules that a search is compared with."""

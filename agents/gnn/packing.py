"""A placement with room for all tasks, where simple rules find none: an integer program over kinds of tasks.

Tasks with the same demands are of one kind. They can change places without any effect on the room of the machines, so
the program has one variable for each kind and machine: the number of such tasks there. HiGHS solves it.
"""

from __future__ import annotations

import weakref

import numpy as np

from automap.arrays import Floats, Ints
from automap.errors import NothingFits
from automap.gnn.problem import RESOURCES
from automap.gnn.simulator import Simulator

NODES = 1000
"""Largest number of nodes of the branch and bound, where the budget is not a time (assumed: 16 machines that three
unlike tasks each fill exactly take up to 900 nodes)."""
SECONDS = 20.0
"""The longest that such a branch and bound takes (assumed: the one of these machines takes 4 s)."""
NO_SOLUTION = 2
"""Status of a program that has no solution, see `scipy.optimize.milp`."""


def movable(simulator: Simulator) -> Ints:
    """[...] tasks that are not pinned."""
    return np.flatnonzero(simulator.pinned < 0)


def free_room(simulator: Simulator) -> Floats:
    """[machines, resources] what the pinned tasks leave of the machines."""
    room, pinned = simulator.room.astype(float), np.flatnonzero(simulator.pinned >= 0)
    np.subtract.at(room, simulator.pinned[pinned], simulator.demands[pinned])
    return room


def nothing_fits(simulator: Simulator, *, is_certain: bool) -> NothingFits:
    """The error for tasks that find no room, to be raised by the caller; it names what is short.

    Args:
        simulator: the problem.
        is_certain: whether there is no placement with room for all tasks; otherwise none was found.
    """
    demanded, there = simulator.demands.sum(axis=0), simulator.room.sum(axis=0)
    filled = demanded / (there + 1e-12)
    named = np.flatnonzero(demanded > there + 1e-9) if (demanded > there + 1e-9).any() else [int(filled.argmax())]
    why = (
        "none leaves room for all tasks" if is_certain else "there may be one, but the tasks fill the machines closely"
    )
    return NothingFits(
        "no placement has room for all tasks" if is_certain else "no placement was found",
        field="problem.tasks",
        value=", ".join(f"{demanded[at]:g} {RESOURCES[at]} demanded, {there[at]:g} there" for at in named),
        repair=f"Add a machine, or demand less: of the ways to spread them, {why}."
        if is_certain
        else f"Add a machine, demand less, or give a longer budget: {why}.",
    )


_known: weakref.WeakKeyDictionary[Simulator, Ints] = weakref.WeakKeyDictionary()
"""The placements that have been found."""


def packed_tasks(simulator: Simulator, limit_s: float | None = None) -> Ints:
    """[tasks] a placement with room for all tasks; it is kept for the next rule that needs it.

    Args:
        simulator: the problem.
        limit_s: most seconds that it may take; None = `SECONDS` and `NODES`, so that two runs give the same.

    Raises:
        NothingFits: there is none, or none was found in time.
    """
    if simulator not in _known:
        _known[simulator] = _packed(simulator, limit_s)
    return _known[simulator].copy()


def _packed(simulator: Simulator, limit_s: float | None) -> Ints:
    """See `packed_tasks`."""
    tasks, place = movable(simulator), simulator.pinned.copy()
    kinds, kind = np.unique(simulator.demands[tasks], axis=0, return_inverse=True)
    for number, counts in enumerate(_counts(simulator, kinds, np.bincount(kind), limit_s)):
        place[tasks[kind == number]] = np.repeat(np.arange(len(counts)), counts)
    if not simulator.fits(place):  # a solution holds within HiGHS's tolerance of 1e-6
        raise nothing_fits(simulator, is_certain=False)
    return place


def _counts(simulator: Simulator, kinds: Floats, number: Ints, limit_s: float | None) -> Ints:
    """[kinds, machines] how many tasks of each kind stand on each machine.

    Args:
        simulator: the problem.
        kinds: [kinds, resources] what a task of each kind demands.
        number: [kinds] how many tasks there are of each.
        limit_s: see `packed_tasks`.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # slow to import, and seldom needed
    from scipy.sparse import coo_array

    machines, resources = simulator.room.shape
    kind, machine = np.divmod(np.arange(len(kinds) * machines), machines)
    every = np.arange(len(kind))
    each = coo_array((np.ones(len(kind)), (kind, every)), shape=(len(kinds), len(kind))).tocsr()
    scale = simulator.room.max(axis=0) + 1e-12
    rows = machine[:, None] * resources + np.arange(resources)
    shares = (kinds / scale)[kind]
    filled = coo_array(
        (shares.ravel(), (rows.ravel(), np.repeat(every, resources))), shape=(machines * resources, len(kind))
    ).tocsr()
    found = milp(
        np.zeros(len(kind)),
        integrality=np.ones(len(kind)),
        bounds=Bounds(0.0, np.inf),
        constraints=[
            LinearConstraint(each, number, number),
            LinearConstraint(filled, -np.inf, (free_room(simulator) / scale).ravel() + 1e-9),
        ],
        options={"node_limit": NODES, "time_limit": SECONDS} if limit_s is None else {"time_limit": limit_s},
    )
    if found.x is None:
        raise nothing_fits(simulator, is_certain=found.status == NO_SOLUTION)
    counts: Ints = found.x.round().astype(np.int64).reshape(len(kinds), machines)
    return counts

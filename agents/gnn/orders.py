"""The order of flows for one placement: first the order by critical path, then changes of it that gain.

The schedule of the paper (arXiv 2204.11224) decides while a training runs, by a rule, which flow of an iteration is the
most urgent. Here this is decided before the training, by simulations on the volumes of the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from agents.gnn.metropolis import ShareLeft
from automap.arrays import Ints
from automap.gnn.kernels.orders import improve_order
from automap.gnn.plan import Schedule
from automap.gnn.simulator import Simulator

MOST = 4000
"""Most simulations (assumed): later ones change little on made-up problems."""
CHUNK = 16
"""Most simulations between two looks at the budget (assumed)."""


def search_order(
    simulator: Simulator, place: Ints, rng: np.random.Generator, *, share_left: ShareLeft, chunk: int = CHUNK
) -> tuple[Ints, int]:
    """Improves the order by critical path until the budget is spent.

    Args:
        simulator: the problem, with its volumes.
        place: [tasks] machine of each task.
        rng: where randomness comes from.
        share_left: what is left of the budget.
        chunk: simulations between two looks at it.

    Returns:
        [flows] the order, the most urgent 0, and the number of simulations.
    """
    ranks, done = simulator.ranks(place), 0
    value_s = np.array([simulator.run(place, ranks=ranks).makespan_s])
    while len(ranks) and done < MOST and share_left(done, float(value_s[0])) > 0.0:
        improve_order(simulator.arrays, place, ranks, rng.random((chunk, 3)), value_s)
        done += chunk
    return ranks, done


class Judged(NamedTuple):
    """A placement with the schedule that suits it best on volumes that the search has not seen."""

    seconds: float
    """Of all judges together."""
    schedule: Schedule
    ranks: Ints
    """[flows] the order of `priority`, the most urgent 0."""


def judges_of(simulator: Simulator, seed: int, number: int) -> list[Simulator]:
    """Draws of volumes by which placements and schedules are chosen: neither those of the search nor of the estimate.

    Args:
        simulator: the problem as the search saw it.
        seed: seed of the search.
        number: how many.
    """
    return [
        Simulator(simulator.problem, iterations=simulator.iterations, seed=seed + 1_000_000 + judge)
        for judge in range(number)
    ]


def choose_schedule(
    simulator: Simulator, judges: Sequence[Simulator], place: Ints, ranks: Ints, schedules: Sequence[Schedule]
) -> Judged:
    """Chooses the schedule for a placement.

    A searched order may suit the volumes of the search too well, and where interfaces are idle most of the time, or
    one machine sends to all others, a simple schedule may do as well.

    Args:
        simulator: the problem as the search saw it.
        judges: see `judges_of`.
        place: [tasks] machine of each task.
        ranks: [flows] the order that was searched.
        schedules: those beside `priority`; of equal ones the first is taken.
    """
    choices: list[tuple[Schedule, Ints]] = [("priority", ranks), ("priority", simulator.ranks(place))]
    choices += [(schedule, ranks) for schedule in schedules]
    seconds = [sum(judge.run(place, schedule, order).makespan_s for judge in judges) for schedule, order in choices]
    best = int(np.argmin(seconds))
    return Judged(seconds[best], *choices[best])

"""The order of flows for one placement: from the critical path on, changed where that makes it faster.

The paper's schedule is online; what it decides by rule, that is which of the flows of one iteration is the most urgent,
is decided here ahead, by simulations on the volumes of the search.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from automap.arrays import Ints
from automap.gnn.kernels.orders import improve_order
from automap.gnn.simulator import Simulator

MOST = 4000
"""Most simulations (assumed): later ones change little on made-up problems."""
CHUNK = 16
"""Simulations between two looks at the budget."""


def search_order(
    simulator: Simulator, place: Ints, rng: np.random.Generator, *, share_left: Callable[[int], float]
) -> tuple[Ints, int]:
    """Improves the order by critical path until the budget is spent.

    Args:
        simulator: the problem, with its volumes.
        place: [tasks] machine of each task.
        rng: where randomness comes from.
        share_left: share of the budget that is left after a number of simulations.

    Returns:
        [flows] the order, the most urgent 0, and the number of simulations.
    """
    ranks, done = simulator.ranks(place), 0
    value_s = np.array([simulator.run(place, ranks=ranks).makespan_s])
    while len(ranks) and done < MOST and share_left(done) > 0.0:
        improve_order(simulator.arrays, place, ranks, rng.random((CHUNK, 3)), value_s)
        done += CHUNK
    return ranks, done

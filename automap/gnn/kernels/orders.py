"""Better orders of the flows of one placement, by local search over simulated makespans."""

from __future__ import annotations

import numpy as np
from numba import float64, int64, void

from automap.gnn.kernels.records import GNN
from automap.gnn.kernels.simulation import PRIORITY, simulate
from automap.jit import kernel


@kernel(void(GNN, int64[::1], int64[::1], float64[:, ::1], float64[::1]))
def improve_order(gnn, place, rank, draws, value_s):
    """Moves flows to other places of the order, one proposal for each row of random numbers; keeps moves that are no
    slower.

    Args:
        gnn: the problem.
        place: [tasks] machine of each task.
        rank: [flows] the order, the most urgent 0; changed.
        draws: [proposals, 3] uniform random numbers.
        value_s: [1] makespan under the order, seconds; changed.
    """
    flows = len(rank)
    tried, key = np.empty(flows, np.int64), np.empty(flows)
    log, end_s = np.empty((0, 5)), np.empty(len(gnn.time_s))
    for step in range(len(draws)):
        kind, chosen, where = draws[step]
        key[:] = rank
        flow, at = int64(chosen * flows), where * (flows + 1) - 0.75
        if kind < 0.5:
            key[flow] = at
        else:
            # All flows into one task, in their present order.
            task = gnn.target[flow]
            for number in range(gnn.in_begin[task], gnn.in_begin[task + 1]):
                key[gnn.in_flows[number]] = at + 0.5 * rank[gnn.in_flows[number]] / flows
        order = np.argsort(key, kind="mergesort")
        for number in range(flows):
            tried[order[number]] = number
        simulate(gnn, place, tried, PRIORITY, log, end_s)
        if end_s[-1] <= value_s[0]:
            value_s[0] = end_s[-1]
            rank[:] = tried

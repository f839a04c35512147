"""Lower bounds on the makespan of a placement, and the order of flows by their critical path."""

from __future__ import annotations

import numpy as np
from numba import float64, int64, void

from automap.gnn.kernels.records import GNN
from automap.jit import borrowing, kernel


@borrowing(float64(GNN, int64[::1], int64, float64), inner=True)
def _wire_s(gnn, place, flow, volume):
    """Seconds of a transfer that uses both interfaces alone."""
    source, target = place[gnn.source[flow]], place[gnn.target[flow]]
    return 0.0 if source == target else volume / min(gnn.rate_out[source], gnn.rate_in[target])


@kernel(void(GNN, int64[::1], int64[::1]))
def critical_ranks(gnn, place, rank):
    """Writes the order of flows within an iteration: first the one with the longest path to the iteration's end.

    Args:
        gnn: the problem.
        place: [tasks] machine of each task.
        rank: [flows] written, the most urgent 0.
    """
    rest, way = np.zeros(len(gnn.order)), np.empty(len(gnn.source))
    for number in range(len(gnn.order) - 1, -1, -1):
        task = gnn.order[number]
        for at in range(gnn.out_begin[task], gnn.out_begin[task + 1]):
            flow = gnn.out_flows[at]
            if gnn.lag[flow] == 0:
                rest[task] = max(rest[task], _wire_s(gnn, place, flow, gnn.mean_bytes[flow]) + rest[gnn.target[flow]])
        rest[task] += gnn.mean_time_s[task]
    for flow in range(len(gnn.source)):
        way[flow] = -_wire_s(gnn, place, flow, gnn.mean_bytes[flow]) - rest[gnn.target[flow]]
    order = np.argsort(way, kind="mergesort")
    for number in range(len(order)):
        rank[order[number]] = number


@kernel(void(GNN, int64[::1], float64[::1]))
def lower_bounds(gnn, place, bounds_s):
    """Writes three lower bounds on the makespan.

    Args:
        gnn: the problem.
        place: [tasks] machine of each task.
        bounds_s: [3] seconds, written: the critical path if every transfer uses both interfaces alone; the longest time
            that a machine must send; the longest time that a machine must receive.
    """
    bounds_s[0] = _critical_path_s(gnn, place)
    sent, received = np.zeros(len(gnn.rate_out)), np.zeros(len(gnn.rate_in))
    for flow in range(len(gnn.source)):
        source, target = place[gnn.source[flow]], place[gnn.target[flow]]
        if source != target:
            for iteration in range(len(gnn.bytes) - gnn.lag[flow]):
                sent[source] += gnn.bytes[iteration, flow]
                received[target] += gnn.bytes[iteration, flow]
    bounds_s[1], bounds_s[2] = np.max(sent / gnn.rate_out), np.max(received / gnn.rate_in)


@kernel(float64(GNN, int64[::1]), inner=True)
def _critical_path_s(gnn, place):
    iterations = len(gnn.time_s)
    end = np.zeros((iterations, len(gnn.order)))
    arrival = np.zeros((iterations, len(gnn.source)))
    longest = 0.0
    for n in range(iterations):
        for task in gnn.order:
            if gnn.is_store[task]:
                continue
            begin = end[n - 1, task] if n > 0 else 0.0
            if n > gnn.prefetch:
                for number in range(gnn.fed_begin[task], gnn.fed_begin[task + 1]):
                    begin = max(begin, end[n - 1 - gnn.prefetch, gnn.fed[number]])
            start = begin
            for number in range(gnn.in_begin[task], gnn.in_begin[task + 1]):
                flow = gnn.in_flows[number]
                sent = n - gnn.lag[flow]
                if sent < 0:
                    continue
                source = gnn.source[flow]
                at = begin if gnn.is_store[source] else end[sent, source]
                if sent > 0:
                    at = max(at, arrival[sent - 1, flow])
                arrival[sent, flow] = at + _wire_s(gnn, place, flow, gnn.bytes[sent, flow])
                start = max(start, arrival[sent, flow])
            end[n, task] = start + gnn.time_s[n, task]
            longest = max(longest, end[n, task])
    return longest

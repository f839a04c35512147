"""The simulation of a placement: event by event, exact in the model.

A task runs its iterations one after the other, each as soon as everything that it needs has arrived; its resources are
its own. A sampler asks the stores for the next mini-batch when it has ended the one before and is no more than
`prefetch` mini-batches ahead of its workers. Between tasks on one machine a flow takes no time; any other shares the
interfaces of both ends. Transfers of one flow arrive in order, as in one connection.
"""

from __future__ import annotations

import math

import numpy as np
from numba import float64, int64, void

from automap.gnn.kernels.bounds import critical_ranks
from automap.gnn.kernels.records import GNN
from automap.gnn.kernels.service import serve_by_key, serve_fairly, serve_shortest
from automap.gnn.kernels.state import STATE, insert_flow, new_state, pop_running, push_running, remove_flow
from automap.jit import borrowing, kernel

POLICIES = ("priority", "fifo", "fair", "srpt", "coflow")
"""Orders of service. priority: the earliest iteration first, then the flow with the longest rest of its iteration;
fifo: as released; fair: max-min fair shares; srpt: fewest bytes left first; coflow: flows that wait for each other in
one group, the group with the least time at its narrowest interface first (as in Varys, SIGCOMM 2014)."""
PRIORITY, FIFO, FAIR, SRPT, COFLOW = range(len(POLICIES))


@borrowing(float64(GNN, int64[::1], STATE, int64, int64), inner=True)
def _coflow_s(gnn, place, state, flow, iteration):
    """Seconds that the group of a flow takes at its narrowest interface, alone."""
    group = gnn.coflow[flow]
    if state.coflow_of[group] == iteration:
        return state.coflow_key[group]
    task = gnn.target[flow] if group < len(gnn.order) else gnn.source[flow]
    begin, flows = (gnn.in_begin, gnn.in_flows) if group < len(gnn.order) else (gnn.out_begin, gnn.out_flows)
    far = total = 0.0
    for number in range(begin[task], begin[task + 1]):
        other = flows[number]
        source, target = place[gnn.source[other]], place[gnn.target[other]]
        if source != target and gnn.coflow[other] == group:
            total += gnn.bytes[iteration, other]
            rate = gnn.rate_out[source] if group < len(gnn.order) else gnn.rate_in[target]
            far = max(far, gnn.bytes[iteration, other] / rate)
    here = gnn.rate_in[place[task]] if group < len(gnn.order) else gnn.rate_out[place[task]]
    state.coflow_of[group], state.coflow_key[group] = iteration, max(far, total / here)
    return state.coflow_key[group]


@borrowing(void(GNN, STATE, int64), inner=True, forceinline=True)
def _try_start(gnn, state, task):
    iteration = state.done[task]
    is_waiting = state.begun[task] <= iteration or state.missing[task] > 0
    if iteration < len(gnn.time_s) and not is_waiting and state.is_running[task] == 0:
        state.is_running[task] = 1
        push_running(state, state.moment[0].now + gnn.time_s[iteration, task], task)


@borrowing(void(GNN, STATE, int64), inner=True, forceinline=True)
def _arrive(gnn, state, flow):
    task = gnn.target[flow]
    state.sent[flow] += 1
    if state.sent[flow] + gnn.lag[flow] == state.done[task] + 1:
        state.missing[task] -= 1
        _try_start(gnn, state, task)


@borrowing(void(GNN, int64[::1], int64[::1], int64, STATE, int64), inner=True, forceinline=True)
def _activate(gnn, place, rank, policy, state, flow):
    """Begins the next transfers of a flow: all that take no time, and the first that takes some."""
    while state.sent[flow] < state.released[flow]:
        iteration = state.sent[flow]
        volume = gnn.bytes[iteration, flow]
        if place[gnn.source[flow]] != place[gnn.target[flow]] and volume > 0.0:
            state.left[flow] = volume
            state.moment[0].released += 1
            key = float64(state.moment[0].released)
            if policy == PRIORITY:
                key = float64((iteration + gnn.lag[flow]) * len(gnn.source) + rank[flow])
            elif policy == SRPT:
                key = volume
            elif policy == COFLOW:
                key = _coflow_s(gnn, place, state, flow, iteration)
            insert_flow(state, flow, key)
            if policy == FAIR:
                state.moment[0].dirty = -math.inf
            return
        _arrive(gnn, state, flow)


@borrowing(void(GNN, int64[::1], int64[::1], int64, STATE, int64), inner=True)
def _release(gnn, place, rank, policy, state, flow):
    state.released[flow] += 1
    if state.released[flow] == state.sent[flow] + 1:
        _activate(gnn, place, rank, policy, state, flow)


@borrowing(void(GNN, int64[::1], int64[::1], int64, STATE, int64), inner=True)
def _try_begin(gnn, place, rank, policy, state, task):
    """Lets a task begin its next iteration if it may: a sampler asks the stores then."""
    iteration = state.done[task]
    if iteration >= len(gnn.time_s) or state.begun[task] > iteration:
        return
    for number in range(gnn.fed_begin[task], gnn.fed_begin[task + 1]):
        if state.done[gnn.fed[number]] < iteration - gnn.prefetch:
            return
    state.begun[task] = iteration + 1
    for number in range(gnn.in_begin[task], gnn.in_begin[task + 1]):
        flow = gnn.in_flows[number]
        if gnn.is_store[gnn.source[flow]]:
            _release(gnn, place, rank, policy, state, flow)
    _try_start(gnn, state, task)


@borrowing(void(GNN, int64[::1], int64[::1], int64, STATE, int64), inner=True)
def _complete(gnn, place, rank, policy, state, task):
    """A task has ended an iteration."""
    iteration = state.done[task]
    state.end_s[iteration] = state.moment[0].now
    state.done[task], state.is_running[task] = iteration + 1, 0
    for number in range(gnn.in_begin[task], gnn.in_begin[task + 1]):
        flow = gnn.in_flows[number]
        state.missing[task] += state.sent[flow] + gnn.lag[flow] < iteration + 2
    for number in range(gnn.out_begin[task], gnn.out_begin[task + 1]):
        flow = gnn.out_flows[number]
        # What no iteration uses is not sent.
        if iteration + gnn.lag[flow] < len(gnn.time_s):
            _release(gnn, place, rank, policy, state, flow)
    _try_begin(gnn, place, rank, policy, state, task)
    for number in range(gnn.in_begin[task], gnn.in_begin[task + 1]):
        source = gnn.source[gnn.in_flows[number]]
        if gnn.fed_begin[source] < gnn.fed_begin[source + 1]:
            _try_begin(gnn, place, rank, policy, state, source)


@borrowing(void(STATE, float64), inner=True)
def _write_log(state, until_s):
    moment = state.moment[0]
    for number in range(moment.served):
        if moment.logged == len(state.log):
            return
        row, flow = state.log[moment.logged], state.served[number]
        row[0], row[1], row[2] = moment.now, until_s, flow
        row[3], row[4] = state.sent[flow], state.rate[flow]
        moment.logged += 1


@kernel(int64(GNN, int64[::1], int64[::1], int64, float64[:, ::1], float64[::1]))
def simulate(gnn, place, rank, policy, log, end_s):
    """Simulates the iterations whose volumes are drawn.

    Args:
        gnn: the problem.
        place: [tasks] machine of each task.
        rank: [flows] place of each flow in the order `priority`, the most urgent 0.
        policy: number of the order of service in `POLICIES`.
        log: see `State.log`.
        end_s: [iterations] written: when the last task ended each, the last of them is the makespan.

    Returns:
        The number of rows that were written to the log.
    """
    state = new_state(gnn, place, log)
    moment, served = state.moment[0], state.served
    for task in gnn.order:
        if not gnn.is_store[task]:
            _try_begin(gnn, place, rank, policy, state, task)
    while True:
        if moment.dirty < math.inf:
            if policy == FAIR:
                serve_fairly(gnn, state)
            elif policy == SRPT:
                serve_shortest(gnn, state)
            else:
                serve_by_key(gnn, state)
        now, first = math.inf, -1
        for number in range(moment.served):
            if state.arrival_s[served[number]] < now:
                now, first = state.arrival_s[served[number]], number
        if moment.running > 0 and state.heap_s[0] <= now:
            now, first = state.heap_s[0], -1
        if now == math.inf:
            break
        if len(log) > 0:
            _write_log(state, now)
        moment.now = now
        if policy == SRPT:
            moment.dirty = -math.inf  # what is served grows shorter, so that the order may change at any event
        if first < 0:
            _complete(gnn, place, rank, policy, state, pop_running(state))
            continue
        flow = served[first]
        remove_flow(gnn, state, first)
        _arrive(gnn, state, flow)
        _activate(gnn, place, rank, policy, state, flow)
    end_s[:] = state.end_s
    return moment.logged


@kernel(void(GNN, int64[:, ::1], int64, float64[::1]))
def simulate_many(gnn, places, policy, makespan_s):
    """Simulates placements, flows by the critical path of each placement.

    Args:
        gnn: the problem.
        places: [placements, tasks] machine of each task.
        policy: see `simulate`.
        makespan_s: [placements] written.
    """
    rank, log, end_s = np.empty(len(gnn.source), np.int64), np.empty((0, 5)), np.empty(len(gnn.time_s))
    for number in range(len(places)):
        critical_ranks(gnn, places[number], rank)
        simulate(gnn, places[number], rank, policy, log, end_s)
        makespan_s[number] = end_s[-1]

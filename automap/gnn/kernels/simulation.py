"""The simulation of a placement, event by event.

A task runs its iterations one after the other, each as soon as everything that it needs has arrived; it shares its
resources with no other task. A sampler asks the stores for the next mini-batch when it has ended the one before and is
at most `prefetch` mini-batches ahead of its workers. A flow between tasks on one machine takes no time; any other flow
shares the interfaces of both machines with other flows. Transfers of one flow arrive in order, as in one connection.
"""

from __future__ import annotations

import math

import numpy as np
from numba import float64, int64, void

from automap.gnn.kernels.bounds import critical_ranks
from automap.gnn.kernels.fair_shares import join_shares, leave_shares, share_fairly
from automap.gnn.kernels.records import GNN
from automap.gnn.kernels.service import end_service, queue_flow, serve_by_key
from automap.gnn.kernels.state import STATE, add_event, new_state, take_event
from automap.jit import borrowing, kernel

POLICIES = ("priority", "fifo", "fair", "srpt", "coflow")
"""Orders of service. priority: the earliest iteration first, then the flow with the longest path to the end of its
iteration; fifo: in the order in which flows begin; fair: max-min fair shares; srpt: fewest bytes left first; coflow:
flows in groups (`GnnArrays.coflow`), the group with the least time at its narrowest interface first (as in Varys,
SIGCOMM 2014). Of equal flows, the first one in the problem is served first."""
PRIORITY, FIFO, FAIR, SRPT, COFLOW = range(len(POLICIES))
"""Numbers of these orders in kernels."""


@borrowing(float64(GNN, int64[::1], STATE, int64, int64), inner=True)
def _coflow_s(gnn, place, state, flow, iteration):
    """Seconds of the group of a flow at its narrowest interface, if no other flows use it."""
    group = gnn.coflow[flow]
    if state.coflow_of[group] == iteration:
        return state.coflow_key[group]
    comes_together = group < len(gnn.order)
    task = gnn.target[flow] if comes_together else gnn.source[flow]
    begin, flows = (gnn.in_begin, gnn.in_flows) if comes_together else (gnn.out_begin, gnn.out_flows)
    ends, rates = (gnn.source, gnn.rate_out) if comes_together else (gnn.target, gnn.rate_in)
    for at in range(begin[task], begin[task + 1]):
        state.coflow_load[place[ends[flows[at]]]] = 0.0
    longest_s = total = 0.0
    for at in range(begin[task], begin[task + 1]):
        other, machine = flows[at], place[ends[flows[at]]]
        if machine != place[task] and gnn.coflow[other] == group:
            total += gnn.bytes[iteration, other]
            state.coflow_load[machine] += gnn.bytes[iteration, other]
            longest_s = max(longest_s, state.coflow_load[machine] / rates[machine])
    own = gnn.rate_in[place[task]] if comes_together else gnn.rate_out[place[task]]
    state.coflow_of[group], state.coflow_key[group] = iteration, max(longest_s, total / own)
    return state.coflow_key[group]


@borrowing(void(GNN, STATE, int64), inner=True, forceinline=True)
def _try_start(gnn, state, number):
    task = state.tasks[number]
    if task.begun > task.done and task.missing == 0 and task.is_running == 0:
        task.is_running = 1
        add_event(state, state.moment[0].now + gnn.time_s[task.done, number], number)


@borrowing(void(GNN, STATE, int64), inner=True, forceinline=True)
def _arrive(gnn, state, flow):
    row, target = state.flows[flow], gnn.target[flow]
    row.sent += 1
    if row.sent + gnn.lag[flow] == state.tasks[target].done + 1:
        state.tasks[target].missing -= 1
        _try_start(gnn, state, target)


@borrowing(void(GNN, int64[::1], int64[::1], int64, STATE, int64), inner=True)
def _begin_transfers(gnn, place, rank, policy, state, flow):
    """Begins the next transfers of a flow: all that take no time, and the first one that takes some."""
    row = state.flows[flow]
    while row.sent < row.released:
        iteration = row.sent
        volume = gnn.bytes[iteration, flow]
        if place[gnn.source[flow]] == place[gnn.target[flow]] or volume <= 0.0:
            _arrive(gnn, state, flow)
            continue
        if policy == FAIR:
            row.left = volume
            join_shares(state, flow)
            return
        key = state.moment[0].now
        if policy == PRIORITY:
            key = float64((iteration + gnn.lag[flow]) * len(gnn.source) + rank[flow])
        elif policy == SRPT:
            key = volume
        elif policy == COFLOW:
            key = _coflow_s(gnn, place, state, flow, iteration)
        queue_flow(state, flow, key, volume)
        return


@borrowing(void(GNN, int64[::1], int64[::1], int64, STATE, int64), inner=True)
def _release(gnn, place, rank, policy, state, flow):
    row = state.flows[flow]
    row.released += 1
    if row.released == row.sent + 1:
        _begin_transfers(gnn, place, rank, policy, state, flow)


@borrowing(void(GNN, int64[::1], int64[::1], int64, STATE, int64), inner=True)
def _try_begin(gnn, place, rank, policy, state, number):
    """Lets a task begin its next iteration if it may: a sampler asks the stores then."""
    task = state.tasks[number]
    if task.done >= len(gnn.time_s) or task.begun > task.done:
        return
    for at in range(gnn.fed_begin[number], gnn.fed_begin[number + 1]):
        if state.tasks[gnn.fed[at]].done < task.done - gnn.prefetch:
            return
    task.begun = task.done + 1
    for at in range(gnn.in_begin[number], gnn.in_begin[number + 1]):
        flow = gnn.in_flows[at]
        if gnn.is_store[gnn.source[flow]]:
            _release(gnn, place, rank, policy, state, flow)
    _try_start(gnn, state, number)


@borrowing(void(GNN, int64[::1], int64[::1], int64, STATE, int64), inner=True)
def _complete(gnn, place, rank, policy, state, number):
    """Handles the end of an iteration of a task."""
    task = state.tasks[number]
    iteration = task.done
    state.end_s[iteration] = state.moment[0].now
    task.done, task.is_running = iteration + 1, 0
    for at in range(gnn.in_begin[number], gnn.in_begin[number + 1]):
        flow = gnn.in_flows[at]
        task.missing += state.flows[flow].sent + gnn.lag[flow] < iteration + 2
    for at in range(gnn.out_begin[number], gnn.out_begin[number + 1]):
        flow = gnn.out_flows[at]
        # A flow is not sent if the iteration that would use it is not simulated.
        if iteration + gnn.lag[flow] < len(gnn.time_s):
            _release(gnn, place, rank, policy, state, flow)
    _try_begin(gnn, place, rank, policy, state, number)
    for at in range(gnn.in_begin[number], gnn.in_begin[number + 1]):
        source = gnn.source[gnn.in_flows[at]]
        if gnn.fed_begin[source] < gnn.fed_begin[source + 1]:
            _try_begin(gnn, place, rank, policy, state, source)


@borrowing(void(STATE, float64, int64, float64), inner=True)
def _write_row(state, until_s, flow, rate):
    moment = state.moment[0]
    if moment.logged < len(state.log):
        row = state.log[moment.logged]
        row[0], row[1], row[2], row[3], row[4] = moment.now, until_s, flow, state.flows[flow].sent, rate
        moment.logged += 1


@borrowing(void(STATE, int64, float64), inner=True)
def _write_log(state, policy, until_s):
    if policy == FAIR:
        for at in range(state.moment[0].active):
            _write_row(state, until_s, state.active[at], state.active_rate[at])
        return
    for flow in range(len(state.flows)):
        if state.flows[flow].rate > 0.0:
            _write_row(state, until_s, flow, state.flows[flow].rate)


@borrowing(void(GNN, int64[::1], int64[::1], int64, float64[:, ::1], STATE), inner=True)
def _simulate(gnn, place, rank, policy, log, state):
    moment, tasks = state.moment[0], len(gnn.order)
    for task in gnn.order:
        if not gnn.is_store[task]:
            _try_begin(gnn, place, rank, policy, state, task)
    while True:
        if policy != FAIR:
            serve_by_key(state)
        elif moment.is_changed:
            share_fairly(state)
        now = min(moment.arrival_s, state.event_s[0] if moment.events > 0 else math.inf)
        if now == math.inf:
            break
        if len(log) > 0:
            _write_log(state, policy, now)
        moment.now = now
        if moment.arrival_s == now:
            flow = state.active[moment.arriving]
            leave_shares(state, moment.arriving)
        else:
            what = state.event[0]
            take_event(state, what)
            if what < tasks:
                _complete(gnn, place, rank, policy, state, what)
                continue
            flow = what - tasks
            end_service(state, flow)
        _arrive(gnn, state, flow)
        _begin_transfers(gnn, place, rank, policy, state, flow)


@kernel(int64(GNN, int64[::1], int64[::1], int64, float64[:, ::1], float64[::1]), apart=True)
def simulate(gnn, place, rank, policy, log, end_s):
    """Simulates the iterations whose volumes are drawn.

    Args:
        gnn: the problem.
        place: [tasks] machine of each task.
        rank: [flows] place of each flow in the order `priority`, the most urgent 0.
        policy: number of the order of service in `POLICIES`.
        log: see `State.log`.
        end_s: [iterations] written: when the last task ended each iteration; the last number is the makespan.

    Returns:
        The number of rows that were written to the log.
    """
    state = new_state(gnn, place, policy == SRPT, log)
    _simulate(gnn, place, rank, policy, log, state)
    end_s[:] = state.end_s
    return state.moment[0].logged


@kernel(void(GNN, int64[:, ::1], int64, float64[::1]))
def simulate_many(gnn, places, policy, makespan_s):
    """Simulates placements, each with the order of flows by its critical path.

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

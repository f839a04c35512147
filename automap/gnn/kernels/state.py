"""What a simulation knows at a moment, and the queues that it keeps. Units: seconds, bytes, bytes a second."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
from numba import float64, int64, void

from automap.gnn.kernels.records import GNN
from automap.jit import borrowing, kernel
from automap.price.kernels.array_types import Floats, Floats2, Ints, Rows, dtype_of, rows_type, tuple_type


@dataclass(frozen=True, slots=True)
class Moment:
    """The numbers of a simulation that are no arrays."""

    now: float
    dirty: float
    """Key from which on rates have to be found anew; infinite = rates hold."""
    active: int
    """Number of flows that are released and not yet arrived."""
    served: int
    """Number of those that have a rate."""
    running: int
    """Number of tasks that compute."""
    released: int
    """Number of flows released so far."""
    logged: int
    """Number of rows of the log."""
    open_out: int
    """Number of machines with active flows and a free rate at the sending side."""
    open_in: int
    """The same of the receiving side."""


MOMENT = dtype_of(Moment)
BITS = 10
"""Bits of a machine's number in `State.code`: `MAX_MACHINES` of `automap.gnn.problem` is 2^10."""


class State(NamedTuple):
    """A simulation at a moment. Of a flow at most one transfer is active; later ones wait, as in one connection."""

    moment: Annotated[Rows, rows_type(MOMENT)]
    """[1] the moment."""
    near: Ints
    """[flows] machine that each leaves."""
    far: Ints
    """[flows] machine that each enters."""
    code: Ints
    """[flows] number of a flow, machine that it enters and machine that it leaves in one number, the last in the lowest
    bits: active flows are passed over by the hundred, and most without a look at anything else."""
    done: Ints
    """[tasks] iterations that each has ended."""
    begun: Ints
    """[tasks] iterations that each was allowed to begin."""
    missing: Ints
    """[tasks] flows that its next iteration still waits for."""
    is_running: Ints
    """[tasks] 1 while it computes."""
    heap_s: Floats
    """[tasks] when running tasks end, a heap."""
    heap: Ints
    """[tasks] the running tasks, in the order of `heap_s`."""
    end_s: Floats
    """[iterations] when the last task ended each."""
    released: Ints
    """[flows] transfers that were released."""
    sent: Ints
    """[flows] transfers that have arrived."""
    left: Floats
    """[flows] bytes that were left at the time `since`."""
    since: Floats
    """[flows] see `left`."""
    rate: Floats
    """[flows] present rate."""
    arrival_s: Floats
    """[flows] when it arrives at the present rate."""
    key: Floats
    """[flows] place of an active flow in the order of service."""
    order: Ints
    """[flows] codes of the active flows by key."""
    served: Ints
    """[flows] flows that have a rate, by key."""
    out_left: Floats
    """[machines] rate that is free at the sending side."""
    in_left: Floats
    """[machines] rate that is free at the receiving side."""
    out_full: Floats
    """[machines] key of the flow that took the last of the sending side, or infinity."""
    in_full: Floats
    """[machines] the same of the receiving side."""
    out_active: Ints
    """[machines] active flows that leave it."""
    in_active: Ints
    """[machines] active flows that enter it."""
    out_served: Ints
    """[machines] served flows that leave it."""
    in_served: Ints
    """[machines] served flows that enter it."""
    coflow_key: Floats
    """[groups] seconds of the narrowest interface of a group."""
    coflow_of: Ints
    """[groups] iteration that `coflow_key` is of."""
    log: Floats2
    """[rows, 5] begin, end, flow, iteration and rate of each stretch of constant rates; no rows = no log."""


STATE = tuple_type(State)


@kernel(STATE(GNN, int64[::1], float64[:, ::1]), inner=True)
def new_state(gnn, place, log):
    """The state before the first event."""
    tasks, flows, machines = len(gnn.order), len(gnn.source), len(gnn.rate_out)
    state = State(
        np.zeros(1, MOMENT),
        place[gnn.source],
        place[gnn.target],
        (np.arange(flows) << 2 * BITS) + (place[gnn.target] << BITS) + place[gnn.source],
        np.zeros(tasks, np.int64),
        np.zeros(tasks, np.int64),
        np.zeros(tasks, np.int64),
        np.zeros(tasks, np.int64),
        np.zeros(tasks),
        np.zeros(tasks, np.int64),
        np.zeros(len(gnn.time_s)),
        np.zeros(flows, np.int64),
        np.zeros(flows, np.int64),
        np.zeros(flows),
        np.zeros(flows),
        np.zeros(flows),
        np.zeros(flows),
        np.zeros(flows),
        np.zeros(flows, np.int64),
        np.zeros(flows, np.int64),
        gnn.rate_out.copy(),
        gnn.rate_in.copy(),
        np.full(machines, math.inf),
        np.full(machines, math.inf),
        np.zeros(machines, np.int64),
        np.zeros(machines, np.int64),
        np.zeros(machines, np.int64),
        np.zeros(machines, np.int64),
        np.zeros(2 * tasks),
        np.full(2 * tasks, -1),
        log,
    )
    state.moment[0].dirty = math.inf
    for flow in range(flows):
        state.missing[gnn.target[flow]] += gnn.lag[flow] == 0
    return state


@borrowing(void(STATE, float64, int64), inner=True, forceinline=True)
def push_running(state, end_s, task):
    """Adds a running task to the heap."""
    moment, heap_s, heap = state.moment[0], state.heap_s, state.heap
    at = moment.running
    moment.running += 1
    while at > 0 and heap_s[(at - 1) // 2] > end_s:
        heap_s[at], heap[at] = heap_s[(at - 1) // 2], heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap_s[at], heap[at] = end_s, task


@borrowing(int64(STATE), inner=True, forceinline=True)
def pop_running(state):
    """Takes the running task that ends first from the heap."""
    moment, heap_s, heap = state.moment[0], state.heap_s, state.heap
    found = heap[0]
    moment.running -= 1
    count = moment.running
    end_s, task = heap_s[count], heap[count]
    at = 0
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and heap_s[child + 1] < heap_s[child]:
            child += 1
        if heap_s[child] >= end_s:
            break
        heap_s[at], heap[at] = heap_s[child], heap[child]
        at = child
    heap_s[at], heap[at] = end_s, task
    return found


@borrowing(int64(STATE, float64), inner=True, forceinline=True)
def first_from(state, key):
    """Place of the first active flow whose key is no less than `key`."""
    low, high = 0, state.moment[0].active
    while low < high:
        middle = (low + high) // 2
        if state.key[state.order[middle] >> 2 * BITS] < key:
            low = middle + 1
        else:
            high = middle
    return low


@borrowing(void(STATE, int64, float64), inner=True, forceinline=True)
def insert_flow(state, flow, key):
    """Makes a flow active."""
    moment, order = state.moment[0], state.order
    at = first_from(state, key)
    for later in range(moment.active, at, -1):
        order[later] = order[later - 1]
    order[at] = state.code[flow]
    state.key[flow], state.rate[flow], state.since[flow] = key, 0.0, moment.now
    moment.active += 1
    source, target = state.near[flow], state.far[flow]
    moment.open_out += state.out_active[source] == 0 and state.out_left[source] > 0.0
    moment.open_in += state.in_active[target] == 0 and state.in_left[target] > 0.0
    state.out_active[source] += 1
    state.in_active[target] += 1
    # A flow that meets an interface which more urgent ones fill changes no rate.
    if not (state.out_full[source] < key or state.in_full[target] < key):
        moment.dirty = min(moment.dirty, key)


@borrowing(void(GNN, STATE, int64), inner=True, forceinline=True)
def give_back(gnn, state, flow):
    """Gives the rate of a flow back to the interfaces at both ends, exactly where no other flow is served there."""
    moment, source, target = state.moment[0], state.near[flow], state.far[flow]
    moment.open_out += state.out_left[source] <= 0.0
    moment.open_in += state.in_left[target] <= 0.0
    state.out_served[source] -= 1
    state.in_served[target] -= 1
    state.out_left[source] += state.rate[flow]
    state.in_left[target] += state.rate[flow]
    if state.out_served[source] == 0:
        state.out_left[source] = gnn.rate_out[source]
    if state.in_served[target] == 0:
        state.in_left[target] = gnn.rate_in[target]
    if state.out_full[source] >= state.key[flow]:
        state.out_full[source] = math.inf
    if state.in_full[target] >= state.key[flow]:
        state.in_full[target] = math.inf


@borrowing(void(GNN, STATE, int64), inner=True, forceinline=True)
def remove_flow(gnn, state, number):
    """Ends the service of the flow that is `number` among the served ones."""
    moment, order, served = state.moment[0], state.order, state.served
    flow = served[number]
    at = first_from(state, state.key[flow])
    while order[at] != state.code[flow]:
        at += 1
    moment.active -= 1
    for later in range(at, moment.active):
        order[later] = order[later + 1]
    moment.served -= 1
    for later in range(number, moment.served):
        served[later] = served[later + 1]
    give_back(gnn, state, flow)
    source, target = state.near[flow], state.far[flow]
    state.out_active[source] -= 1
    state.in_active[target] -= 1
    moment.open_out -= state.out_active[source] == 0
    moment.open_in -= state.in_active[target] == 0
    moment.dirty = min(moment.dirty, state.key[flow])

"""The state of a simulation, and the heap of its events. Units: seconds, bytes, bytes a second."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
from numba import float64, int64, void

from automap.gnn.kernels.records import GNN
from automap.jit import borrowing, kernel
from automap.price.kernels.array_types import Floats, Floats2, Ints, Rows, dtype_of, rows_type, tuple_type

UNKNOWN, NONE = -2, -1
"""Values of `Interface.next`. UNKNOWN: the flow must be searched for; NONE: there is none. `NONE` also means no flow in
other fields."""
CALM, BEGUN, CLEARED = range(3)
"""Values of `Interface.mark`. CALM: rates are valid; BEGUN: they must be computed again from the mark on; CLEARED: they
must be computed again, and the flows that were served from the mark on have freed their rates."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The scalars of a simulation."""

    now: float
    events: int
    """Number of events in the heap."""
    marked: int
    """Number of interfaces whose rates must be computed again."""
    shared: int
    """Number of interfaces that serve two flows or more."""
    shrinks: int
    """1 where the key of a flow is its number of remaining bytes, which falls while it is served."""
    active: int
    """Number of flows that share fairly."""
    is_changed: int
    """1 where fair shares must be computed again."""
    settled_s: float
    """When fair shares were computed last."""
    arrival_s: float
    """When the first of the active flows ends; infinite if none is active."""
    arriving: int
    """Place of this flow in `State.active`."""
    logged: int
    """Number of rows of the log."""


@dataclass(frozen=True, slots=True)
class FlowState:
    """A flow. At most one of its transfers is being sent; later ones wait, as in one connection."""

    key: float
    """Place of its transfer in the order of service; among equal keys the flow with the smaller number is first."""
    left: float
    """Bytes that were left at the time `since`."""
    since: float
    rate: float
    """Present rate; 0 while it waits."""
    near: int
    """Interface of the sender: the number of its machine."""
    far: int
    """Interface of the receiver: the number of machines plus the number of its machine."""
    sent: int
    """Transfers that have arrived."""
    released: int
    """Transfers that were released."""


@dataclass(frozen=True, slots=True)
class TaskState:
    """A task."""

    done: int
    """Iterations that it has ended."""
    begun: int
    """Number of iterations that it may have begun."""
    missing: int
    """Flows that its next iteration still waits for."""
    is_running: int
    """1 while it computes."""


@dataclass(frozen=True, slots=True)
class Interface:
    """One direction of a machine's network interface, with the flows that wait for it and those that it serves."""

    rate: float
    """Rate of the interface."""
    free: float
    """Rate that no flow uses."""
    full: int
    """Flow that got the last free rate, or `NONE`."""
    begin: int
    """Where its part of `State.queue` begins; its flows are those from `head` to `tail`, by key."""
    end: int
    head: int
    tail: int
    first: int
    """Where its part of `State.serving` begins: the flows that have a rate, by key."""
    served: int
    """Number of these."""
    mark: int
    """See `CALM`."""
    key: float
    """Rates of flows from this key and number on must be computed again."""
    number: int
    next: int
    """The first waiting flow from the mark on for which its other interface has free rate, see `UNKNOWN`."""


MOMENT, FLOW, TASK, INTERFACE = map(dtype_of, (Moment, FlowState, TaskState, Interface))


class State(NamedTuple):
    """The state of a simulation."""

    moment: Annotated[Rows, rows_type(MOMENT)]
    """[1] see `Moment`."""
    flows: Annotated[Rows, rows_type(FLOW)]
    """[flows] see `FlowState`."""
    tasks: Annotated[Rows, rows_type(TASK)]
    """[tasks] see `TaskState`."""
    interfaces: Annotated[Rows, rows_type(INTERFACE)]
    """[2 machines] sending sides, then receiving sides."""
    queue: Ints
    """[...] flows of each interface, waiting or served."""
    queue_key: Floats
    """[...] keys of these flows; of served flows, the keys at the beginning of their service."""
    serving: Ints
    """[...] flows that each interface serves; for fair shares, places in `active` of the flows that it serves."""
    marked: Ints
    """[2 machines] interfaces whose rates must be computed again."""
    event_s: Floats
    """[...] times of the next events, as a heap."""
    event: Ints
    """[...] the event at each time: the end of a task, given by its number; or the end of a transfer, given by the
    number of tasks plus that of the flow."""
    event_at: Ints
    """[tasks + flows] place of each event in the heap."""
    end_s: Floats
    """[iterations] when the last task ended each iteration."""
    coflow_key: Floats
    """[groups] seconds of a group at its narrowest interface."""
    coflow_of: Ints
    """[groups] iteration for which `coflow_key` was computed."""
    coflow_load: Floats
    """[machines] bytes of one group."""
    active: Ints
    """[flows] the active flows under fair shares, in any order."""
    active_left: Floats
    """[flows] remaining bytes of the active flows at the time `Moment.settled_s`."""
    active_rate: Floats
    """[flows] rates of the active flows."""
    active_near: Ints
    """[flows] interfaces of their senders."""
    active_far: Ints
    """[flows] interfaces of their receivers."""
    log: Floats2
    """[rows, 5] begin, end, flow, iteration and rate of each stretch of constant rates; no rows = no log."""


STATE = tuple_type(State)


@kernel(STATE(GNN, int64[::1], int64, float64[:, ::1]), inner=True)
def new_state(gnn, place, shrinks, log):
    """The state before the first event."""
    tasks, flows, machines = len(gnn.order), len(gnn.source), len(gnn.rate_out)
    counts = np.zeros(2 * machines, np.int64)
    for flow in range(flows):
        source, target = place[gnn.source[flow]], place[gnn.target[flow]]
        if source != target:
            counts[source] += 1
            counts[machines + target] += 1
    total = counts.sum()
    state = State(
        np.zeros(1, MOMENT),
        np.zeros(flows, FLOW),
        np.zeros(tasks, TASK),
        np.zeros(2 * machines, INTERFACE),
        np.empty(2 * total, np.int64),
        np.empty(2 * total),
        np.empty(total, np.int64),
        np.empty(2 * machines, np.int64),
        np.empty(tasks + flows),
        np.empty(tasks + flows, np.int64),
        np.empty(tasks + flows, np.int64),
        np.zeros(len(gnn.time_s)),
        np.zeros(2 * tasks),
        np.full(2 * tasks, -1),
        np.empty(machines),
        np.empty(flows, np.int64),
        np.empty(flows),
        np.empty(flows),
        np.empty(flows, np.int64),
        np.empty(flows, np.int64),
        log,
    )
    state.moment[0].shrinks, state.moment[0].arrival_s = shrinks, math.inf
    first = 0
    for number in range(2 * machines):
        interface = state.interfaces[number]
        interface.rate = gnn.rate_out[number] if number < machines else gnn.rate_in[number - machines]
        interface.free, interface.full, interface.next = interface.rate, NONE, UNKNOWN
        # Twice the needed space, so that a queue seldom has to be moved back to the beginning of its part.
        interface.first, interface.begin, interface.end = first, 2 * first, 2 * (first + counts[number])
        interface.head = interface.tail = interface.begin
        first += counts[number]
    for flow in range(flows):
        row = state.flows[flow]
        row.near, row.far = place[gnn.source[flow]], machines + place[gnn.target[flow]]
        state.tasks[gnn.target[flow]].missing += gnn.lag[flow] == 0
    return state


@borrowing(void(STATE, int64, float64, int64), inner=True, forceinline=True)
def _rise(state, at, moment_s, what):
    """Moves an event from place `at` in the heap up to its right place."""
    event_s, event, event_at = state.event_s, state.event, state.event_at
    while at > 0 and event_s[(at - 1) >> 1] > moment_s:
        above = (at - 1) >> 1
        event_s[at], event[at] = event_s[above], event[above]
        event_at[event[at]] = at
        at = above
    event_s[at], event[at], event_at[what] = moment_s, what, at


@borrowing(void(STATE, float64, int64), inner=True)
def add_event(state, moment_s, what):
    """Adds an event to the heap."""
    moment = state.moment[0]
    moment.events += 1
    _rise(state, moment.events - 1, moment_s, what)


@borrowing(void(STATE, int64), inner=True)
def take_event(state, what):
    """Removes an event from the heap."""
    moment, event_s, event, event_at = state.moment[0], state.event_s, state.event, state.event_at
    moment.events -= 1
    count, at = moment.events, event_at[what]
    moment_s, last = event_s[count], event[count]
    if last == what:
        return
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and event_s[child + 1] < event_s[child]:
            child += 1
        if event_s[child] >= moment_s:
            break
        event_s[at], event[at] = event_s[child], event[child]
        event_at[event[at]] = at
        at = child
    _rise(state, at, moment_s, last)

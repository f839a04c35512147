"""Max-min fair shares: the narrowest interface is divided evenly among its flows, then the next narrowest.

Whenever a flow begins or ends, nearly all rates change, so all are computed again. `State.active` has the active flows
without gaps for that.
"""

from __future__ import annotations

import math

import numpy as np
from numba import float64, int64, void

from automap.gnn.kernels.state import NONE, STATE
from automap.jit import borrowing, kernel


@borrowing(void(STATE, int64, int64), inner=True, forceinline=True)
def _leave(state, number, at):
    """Removes the flow at `at` in `active` from the flows of an interface."""
    interface, serving = state.interfaces[number], state.serving
    interface.served -= 1
    place = interface.first
    while serving[place] != at:
        place += 1
    serving[place] = serving[interface.first + interface.served]


@borrowing(void(STATE, int64, int64), inner=True, forceinline=True)
def _join(state, number, at):
    interface = state.interfaces[number]
    state.serving[interface.first + interface.served] = at
    interface.served += 1


@borrowing(void(STATE, int64), inner=True)
def join_shares(state, flow):
    """Adds a transfer to the active flows, at the interfaces of both of its ends."""
    moment, row = state.moment[0], state.flows[flow]
    at = moment.active
    moment.active, moment.is_changed = at + 1, 1
    state.active[at], state.active_left[at], state.active_rate[at] = flow, row.left, 0.0
    state.active_near[at], state.active_far[at] = row.near, row.far
    _join(state, row.near, at)
    _join(state, row.far, at)


@borrowing(void(STATE, int64), inner=True)
def leave_shares(state, at):
    """Removes the flow at `at` from `active`; the last active flow is moved to its place."""
    moment, near, far = state.moment[0], state.active_near, state.active_far
    moment.active, moment.is_changed = moment.active - 1, 1
    last = moment.active
    _leave(state, near[at], at)
    _leave(state, far[at], at)
    if last == at:
        return
    _leave(state, near[last], last)
    _leave(state, far[last], last)
    near[at], far[at] = near[last], far[last]
    state.active[at], state.active_left[at] = state.active[last], state.active_left[last]
    state.active_rate[at] = state.active_rate[last]
    _join(state, near[at], at)
    _join(state, far[at], at)


@borrowing(void(STATE), inner=True, forceinline=True)
def _settle(state):
    """Subtracts the bytes that all flows have sent since the last change of rates."""
    moment, left, rate = state.moment[0], state.active_left, state.active_rate
    passed_s = moment.now - moment.settled_s
    for at in range(moment.active):
        left[at] = max(0.0, left[at] - rate[at] * passed_s)
        rate[at] = 0.0
    moment.settled_s = moment.now


@kernel(int64(float64[::1]), inner=True)
def _least(values):
    """Index of the least of some positive numbers."""
    # Positive floats are ordered as their bits are as integers, and processors compare many integers at once.
    bits = values.view(np.int64)
    least = bits[0]
    for number in range(len(bits)):
        least = min(least, bits[number])
    found = 0
    while bits[found] != least:
        found += 1
    return found


@kernel(void(STATE), inner=True)
def share_fairly(state):
    """Computes the rates of all active flows, and which of them ends first."""
    _settle(state)
    moment, interfaces, rate = state.moment[0], state.interfaces, state.active_rate
    near, far = state.active_near, state.active_far
    sides, missing = len(interfaces), moment.active
    free, share, count = np.empty(sides), np.full(sides, math.inf), np.empty(sides, np.int64)
    for number in range(sides):
        free[number], count[number] = interfaces[number].rate, interfaces[number].served
        if count[number] > 0:
            share[number] = free[number] / count[number]
    while missing > 0:
        found = _least(share)
        least = share[found]
        first = interfaces[found].first
        for place in range(first, first + interfaces[found].served):
            at = state.serving[place]
            if rate[at] == 0.0:
                rate[at] = least
                other = near[at] + far[at] - found
                count[other] -= 1
                # Shares must not fall from one interface to the next because of rounding.
                free[other] = max(free[other] - least, least * count[other])
                share[other] = free[other] / count[other] if count[other] > 0 else math.inf
        missing -= count[found]
        share[found] = math.inf
    moment.is_changed, moment.arrival_s, moment.arriving = 0, math.inf, NONE
    for at in range(moment.active):
        arrival_s = moment.now + state.active_left[at] / rate[at]
        if arrival_s < moment.arrival_s:
            moment.arrival_s, moment.arriving = arrival_s, at

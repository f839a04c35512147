"""Max-min fair shares: the narrowest interface is shared evenly among its flows, then the next.

Nearly all rates change whenever a flow comes or arrives, so they are found from nothing; flows are kept close together
for it, in `State.active`.
"""

from __future__ import annotations

import math

import numpy as np
from numba import int64, void

from automap.gnn.kernels.state import NONE, STATE
from automap.jit import borrowing, kernel


@borrowing(void(STATE, int64, int64), inner=True, forceinline=True)
def _leave(state, number, at):
    """Takes the flow at `at` in `active` from those of an interface."""
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
    """Lets a transfer share in the interfaces at its two ends."""
    moment, row = state.moment[0], state.flows[flow]
    at = moment.active
    moment.active, moment.is_changed = at + 1, 1
    state.active[at], state.active_left[at], state.active_rate[at] = flow, row.left, 0.0
    state.active_near[at], state.active_far[at] = row.near, row.far
    _join(state, row.near, at)
    _join(state, row.far, at)


@borrowing(void(STATE, int64), inner=True)
def leave_shares(state, at):
    """Ends the sharing of the flow at `at` in `active`; the last one takes its place there."""
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
    """Takes note of what all flows have sent since rates changed last."""
    moment, left, rate = state.moment[0], state.active_left, state.active_rate
    passed_s = moment.now - moment.settled_s
    for at in range(moment.active):
        left[at] = max(0.0, left[at] - rate[at] * passed_s)
        rate[at] = 0.0
    moment.settled_s = moment.now


@kernel(void(STATE), inner=True)
def share_fairly(state):
    """Finds the rates of all flows, and which of them arrives first."""
    _settle(state)
    moment, interfaces, rate = state.moment[0], state.interfaces, state.active_rate
    near, far = state.active_near, state.active_far
    sides, opened, missing = len(interfaces), 0, moment.active
    free, share = np.empty(sides), np.empty(sides)
    count, narrow = np.empty(sides, np.int64), np.empty(sides, np.int64)
    for number in range(sides):
        interface = interfaces[number]
        free[number], count[number] = interface.rate, interface.served
        if interface.served > 0:
            share[number] = interface.rate / interface.served
            narrow[opened] = number
            opened += 1
    while missing > 0:
        least, found, at = math.inf, 0, 0
        while at < opened:
            number = narrow[at]
            if count[number] == 0:
                opened -= 1
                narrow[at] = narrow[opened]
                continue
            if share[number] < least:
                least, found = share[number], number
            at += 1
        first = interfaces[found].first
        for place in range(first, first + interfaces[found].served):
            at = state.serving[place]
            if rate[at] == 0.0:
                rate[at] = least
                other = near[at] + far[at] - found
                count[other] -= 1
                if count[other] > 0:
                    # Shares only grow; rounding must not make them fall.
                    free[other] = max(free[other] - least, least * count[other])
                    share[other] = free[other] / count[other]
        missing -= count[found]
        count[found] = 0
    moment.is_changed, moment.arrival_s, moment.arriving = 0, math.inf, NONE
    for at in range(moment.active):
        arrival_s = moment.now + state.active_left[at] / rate[at]
        if arrival_s < moment.arrival_s:
            moment.arrival_s, moment.arriving = arrival_s, at

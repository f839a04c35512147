"""Which flows are served at which rate: strict priority with filling, and max-min fair shares.

Strict priority serves flows in the order of their keys; each takes all that is left at both its ends, so that a less
urgent flow fills what more urgent ones leave.
"""

from __future__ import annotations

import math

from numba import float64, int64, void

from automap.gnn.kernels.records import GNN
from automap.gnn.kernels.state import BITS, STATE, first_from, give_back
from automap.jit import borrowing, kernel

EMPTY = 1e-9
"""Share of an interface's rate below which nothing is left of it: differences of rounding."""


@borrowing(void(STATE, int64), inner=True, forceinline=True)
def _settle(state, flow):
    """Takes note of what a flow has sent until now, and ends its rate."""
    now = state.moment[0].now
    state.left[flow] = max(0.0, state.left[flow] - state.rate[flow] * (now - state.since[flow]))
    state.since[flow], state.rate[flow] = now, 0.0


@borrowing(void(STATE, int64, float64), inner=True, forceinline=True)
def _serve(state, flow, rate):
    moment = state.moment[0]
    state.rate[flow] = rate
    state.arrival_s[flow] = moment.now + state.left[flow] / rate
    state.served[moment.served] = flow
    moment.served += 1


@borrowing(float64(float64, float64, float64), inner=True, forceinline=True)
def _less(left, rate, of):
    """What is left of a rate after `rate` was taken; nothing where only rounding is left."""
    return 0.0 if left - rate <= EMPTY * of else left - rate


@borrowing(void(GNN, STATE), inner=True, forceinline=True)
def serve_by_key(gnn, state):
    """Finds the rates of all flows whose key is no less than `dirty`; the others keep theirs."""
    moment, key, order = state.moment[0], state.key, state.order
    out_left, in_left = state.out_left, state.in_left
    while moment.served > 0 and key[state.served[moment.served - 1]] >= moment.dirty:
        moment.served -= 1
        flow = state.served[moment.served]
        give_back(gnn, state, flow)
        _settle(state, flow)
    open_out, open_in = moment.open_out, moment.open_in
    for number in range(first_from(state, moment.dirty), moment.active):
        if open_out == 0 or open_in == 0:
            break
        code = order[number]
        source = code & ((1 << BITS) - 1)
        if out_left[source] <= 0.0:
            continue
        target = (code >> BITS) & ((1 << BITS) - 1)
        rate = min(out_left[source], in_left[target])
        if rate <= 0.0:
            continue
        flow = code >> 2 * BITS
        out_left[source] = _less(out_left[source], rate, gnn.rate_out[source])
        in_left[target] = _less(in_left[target], rate, gnn.rate_in[target])
        if out_left[source] == 0.0:
            state.out_full[source] = key[flow]
            open_out -= 1
        if in_left[target] == 0.0:
            state.in_full[target] = key[flow]
            open_in -= 1
        state.out_served[source] += 1
        state.in_served[target] += 1
        state.since[flow] = moment.now
        _serve(state, flow, rate)
    moment.open_out, moment.open_in = open_out, open_in
    moment.dirty = math.inf


@borrowing(void(GNN, STATE), inner=True)
def serve_shortest(gnn, state):
    """Serves the flows with the fewest bytes left first."""
    order, key = state.order, state.key
    for number in range(state.moment[0].served):
        give_back(gnn, state, state.served[number])
    state.moment[0].served = 0
    for number in range(state.moment[0].active):
        flow = order[number] >> 2 * BITS
        _settle(state, flow)
        key[flow] = state.left[flow]
        at = number
        while at > 0 and key[order[at - 1] >> 2 * BITS] > key[flow]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = state.code[flow]
    state.moment[0].dirty = -math.inf
    serve_by_key(gnn, state)


@kernel(void(GNN, STATE), inner=True)
def serve_fairly(gnn, state):
    """Gives all flows max-min fair rates: the narrowest interface is shared evenly, then the next."""
    moment, machines = state.moment[0], len(gnn.rate_out)
    for number in range(moment.active):
        _settle(state, state.order[number] >> 2 * BITS)
    out_left, in_left = gnn.rate_out.copy(), gnn.rate_in.copy()
    out_count, in_count = state.out_active.copy(), state.in_active.copy()
    moment.served = 0
    while moment.served < moment.active:
        share, narrowest = math.inf, 0
        for machine in range(machines):
            if out_count[machine] > 0 and out_left[machine] / out_count[machine] < share:
                share, narrowest = out_left[machine] / out_count[machine], machine
            if in_count[machine] > 0 and in_left[machine] / in_count[machine] < share:
                share, narrowest = in_left[machine] / in_count[machine], machines + machine
        for number in range(moment.active):
            flow = state.order[number] >> 2 * BITS
            source, target = state.near[flow], state.far[flow]
            if state.rate[flow] == 0.0 and narrowest in (source, machines + target):
                out_left[source] = max(out_left[source] - share, EMPTY * gnn.rate_out[source])
                in_left[target] = max(in_left[target] - share, EMPTY * gnn.rate_in[target])
                out_count[source] -= 1
                in_count[target] -= 1
                _serve(state, flow, share)
    moment.dirty = math.inf

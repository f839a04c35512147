"""Strict priority: the rates of flows that are served in the order of their keys.

Each flow gets all the rate that more urgent flows leave free at both of its interfaces. Rates are computed again only
where something has changed: at the interfaces of a flow that has begun, has ended or gets another rate, and there only
for less urgent flows. The result equals that of computing all rates again, since the rate of a flow depends only on
more urgent ones at its two interfaces.
"""

from __future__ import annotations

from numba import boolean, float64, int64, void

from automap.gnn.kernels.state import BEGUN, CALM, CLEARED, NONE, STATE, UNKNOWN, add_event, take_event
from automap.jit import borrowing

EMPTY = 1e-9
"""Share of an interface's rate below which its free rate counts as 0, because of rounding."""


@borrowing(boolean(float64, int64, float64, int64), inner=True, forceinline=True)
def _is_before(key, flow, other_key, other):
    return key < other_key or (key == other_key and flow < other)


@borrowing(float64(STATE, int64), inner=True, forceinline=True)
def _left(state, flow):
    """Bytes of a flow that have not been sent yet."""
    row = state.flows[flow]
    return max(0.0, row.left - row.rate * (state.moment[0].now - row.since))


@borrowing(float64(STATE, int64), inner=True, forceinline=True)
def _key(state, flow):
    """The key of a flow now."""
    row = state.flows[flow]
    return _left(state, flow) if state.moment[0].shrinks and row.rate > 0.0 else row.key


# -- queues -----------------------------------------------------------------------------------------------------------


@borrowing(void(STATE, int64, int64), inner=True)
def _enqueue(state, number, flow):
    """Adds a flow to the queue of an interface."""
    interface, key, queue, keys = state.interfaces[number], state.flows[flow].key, state.queue, state.queue_key
    head, tail = interface.head, interface.tail
    if head > interface.begin and (head == tail or _is_before(key, flow, keys[head], queue[head])):
        interface.head = head - 1
        queue[head - 1], keys[head - 1] = flow, key
        return
    if tail == interface.end:
        shift = head - interface.begin
        for at in range(head, tail):
            queue[at - shift], keys[at - shift] = queue[at], keys[at]
        head, tail = head - shift, tail - shift
    at = tail
    while at > head and _is_before(key, flow, keys[at - 1], queue[at - 1]):
        queue[at], keys[at] = queue[at - 1], keys[at - 1]
        at -= 1
    queue[at], keys[at] = flow, key
    interface.head, interface.tail = head, tail + 1


@borrowing(void(STATE, int64, int64), inner=True)
def _dequeue(state, number, flow):
    """Removes a flow from the queue of an interface."""
    interface, queue, keys = state.interfaces[number], state.queue, state.queue_key
    head = at = interface.head
    while queue[at] != flow:
        at += 1
    # Urgent flows leave first, so there is less to move in front of it than behind.
    while at > head:
        queue[at], keys[at] = queue[at - 1], keys[at - 1]
        at -= 1
    interface.head = head + 1


# -- rates ------------------------------------------------------------------------------------------------------------


@borrowing(void(STATE, int64, int64, float64), inner=True, forceinline=True)
def _give(state, number, flow, rate):
    """Gives a part of the rate of an interface to a flow."""
    interface = state.interfaces[number]
    state.serving[interface.first + interface.served] = flow
    interface.served += 1
    state.moment[0].shared += interface.served == 2
    interface.free -= rate
    if interface.free <= EMPTY * interface.rate:
        interface.free, interface.full = 0.0, flow


@borrowing(void(STATE, int64, int64), inner=True, forceinline=True)
def _give_back(state, number, flow):
    """Removes a flow from those that an interface serves, and frees its rate."""
    interface, serving = state.interfaces[number], state.serving
    interface.served -= 1
    first, last = interface.first, interface.first + interface.served
    state.moment[0].shared -= interface.served == 1
    interface.free, interface.full = interface.rate, NONE
    is_behind = False
    for at in range(first, last):
        is_behind = is_behind or serving[at] == flow
        if is_behind:
            serving[at] = serving[at + 1]
        interface.free -= state.flows[serving[at]].rate
    if interface.free <= EMPTY * interface.rate:
        interface.free = 0.0


@borrowing(void(STATE, int64, float64, int64), inner=True)
def _mark(state, number, key, flow):
    """Marks an interface, so that its rates are computed again from a flow with this key on."""
    interface, moment = state.interfaces[number], state.moment[0]
    if interface.mark == CALM:
        state.marked[moment.marked] = number
        moment.marked += 1
    elif not _is_before(key, flow, interface.key, interface.number):
        return
    interface.mark, interface.key, interface.number, interface.next = BEGUN, key, flow, UNKNOWN


@borrowing(boolean(STATE, int64, float64, int64), inner=True, forceinline=True)
def _leaves_some(state, number, key, flow):
    """Whether more urgent flows leave some rate of an interface for a flow."""
    interface = state.interfaces[number]
    if interface.full < 0:
        return interface.free > 0.0
    return not _is_before(_key(state, interface.full), interface.full, key, flow)


@borrowing(boolean(STATE, int64, float64, int64), inner=True)
def _clear(state, number, from_key, from_flow):
    """Ends the service of the flows of an interface from a key on: they wait again.

    The interfaces at their other ends are marked.

    Returns:
        Whether there were any such flows.
    """
    interface, shrinks = state.interfaces[number], state.moment[0].shrinks
    at, count = interface.served - 1, interface.served
    while at >= 0:
        flow = state.serving[interface.first + at]
        key, row = _key(state, flow), state.flows[flow]
        if not _is_before(key, flow, from_key, from_flow):
            take_event(state, len(state.tasks) + flow)
            row.left = _left(state, flow)
            row.rate = 0.0
            _give_back(state, row.near, flow)
            _give_back(state, row.far, flow)
            if shrinks:
                _dequeue(state, row.near, flow)
                _dequeue(state, row.far, flow)
                row.key = key
                _enqueue(state, row.near, flow)
                _enqueue(state, row.far, flow)
            _mark(state, row.near + row.far - number, key, flow)
        elif not shrinks:
            break
        at -= 1
    return interface.served < count


@borrowing(void(STATE, int64), inner=True)
def _find_next(state, number):
    """Finds the first flow, from the mark of an interface on, for which both of its interfaces have free rate."""
    interface, queue, keys = state.interfaces[number], state.queue, state.queue_key
    low, high = interface.head, interface.tail
    while low < high:
        middle = (low + high) >> 1
        if _is_before(keys[middle], queue[middle], interface.key, interface.number):
            low = middle + 1
        else:
            high = middle
    for at in range(low, interface.tail):
        flow = queue[at]
        row = state.flows[flow]
        if row.rate == 0.0 and _leaves_some(state, row.near + row.far - number, keys[at], flow):
            interface.key, interface.number, interface.next = keys[at], flow, flow
            return
    interface.next = NONE


@borrowing(void(STATE, int64), inner=True)
def _serve(state, number):
    """Serves the next flow of an interface, if it still waits and no less urgent flow has its rate."""
    interface, moment = state.interfaces[number], state.moment[0]
    flow, key = interface.next, interface.key
    row = state.flows[flow]
    other = row.near + row.far - number
    interface.next = UNKNOWN
    if row.rate > 0.0 or not _leaves_some(state, other, key, flow):
        return
    there = state.interfaces[other]
    is_cleared = there.served > 0 and _clear(state, other, key, flow)
    rate = min(interface.free, there.free)
    row.rate, row.since = rate, moment.now
    _give(state, number, flow, rate)
    _give(state, other, flow, rate)
    add_event(state, moment.now + row.left / rate, len(state.tasks) + flow)
    if is_cleared and there.free > 0.0:
        _mark(state, other, key, flow)


@borrowing(boolean(STATE, int64, int64), inner=True, forceinline=True)
def _is_more_urgent(state, number, other):
    """Whether the next flow of an interface is more urgent than that of another interface."""
    first, second = state.interfaces[number], state.interfaces[other]
    return _is_before(first.key, first.number, second.key, second.number)


@borrowing(void(STATE), inner=True)
def _look_for_overtaking(state):
    """Marks interfaces where a served flow has fewer bytes left than a served flow before it.

    A waiting flow need not be compared, since it sends nothing.
    """
    for number in range(len(state.interfaces)):
        interface = state.interfaces[number]
        if interface.served < 2:
            continue
        before = state.serving[interface.first]
        longest_key = _key(state, before)
        for at in range(interface.first + 1, interface.first + interface.served):
            flow = state.serving[at]
            key = _key(state, flow)
            if _is_before(key, flow, longest_key, before):
                _mark(state, number, key, flow)
            else:
                longest_key, before = key, flow


@borrowing(void(STATE), inner=True)
def serve_by_key(state):
    """Computes the rates of all flows at marked interfaces, the most urgent first."""
    moment = state.moment[0]
    if moment.shrinks and moment.shared > 0:
        _look_for_overtaking(state)
    while moment.marked > 0:
        best, at = NONE, 0
        while at < moment.marked:
            number = state.marked[at]
            interface = state.interfaces[number]
            if interface.mark == BEGUN:
                interface.mark = CLEARED
                if interface.served > 0 and _clear(state, number, interface.key, interface.number):
                    best, at = NONE, 0
                    continue
            if interface.next == UNKNOWN and interface.free > 0.0:
                _find_next(state, number)
            if interface.free <= 0.0 or interface.next == NONE:
                interface.mark = CALM
                moment.marked -= 1
                state.marked[at] = state.marked[moment.marked]
                continue
            if best == NONE or _is_more_urgent(state, number, best):
                best = number
            at += 1
        if best != NONE:
            _serve(state, best)


@borrowing(void(STATE, int64, float64, float64), inner=True)
def queue_flow(state, flow, key, volume):
    """Adds a transfer to the queues of both of its interfaces."""
    row = state.flows[flow]
    row.key, row.left, row.rate, row.since = key, volume, 0.0, state.moment[0].now
    _enqueue(state, row.near, flow)
    _enqueue(state, row.far, flow)
    if _leaves_some(state, row.near, key, flow) and _leaves_some(state, row.far, key, flow):
        _mark(state, row.near, key, flow)


@borrowing(void(STATE, int64), inner=True)
def end_service(state, flow):
    """Ends the service of a flow whose transfer is complete."""
    row = state.flows[flow]
    key = 0.0 if state.moment[0].shrinks else row.key
    _give_back(state, row.near, flow)
    _give_back(state, row.far, flow)
    _dequeue(state, row.near, flow)
    _dequeue(state, row.far, flow)
    row.rate = row.left = 0.0
    _mark(state, row.near, key, flow)
    _mark(state, row.far, key, flow)

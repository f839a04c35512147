"""The compiled inner loop of DAPPLE's dynamic program; `agents.planners.dapple` prepares what it reads.

A *way* to add a stage names its devices and those that remain after it. To rate a partial plan, all layers after its
last stage are put into one stage on all remaining devices. Formulas are those of `agents.planners.dapple_formulas`.
Units: seconds, bytes, layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import boolean, float64, int64, void

from automap.jit import borrowing, kernel
from automap.price.kernels.array_types import Floats, Floats2, Floats3, Ints, Ints2, dtype_of, rows_type, tuple_type


class LayerTables(NamedTuple):
    """What a model costs with micro-batches of one size, see `agents.planners.dapple_formulas.Layers`."""

    forward_s: Floats2
    backward_s: Floats2
    crossing_bytes: Floats
    state_bytes: Floats
    saved_bytes: Floats
    exposed_s: Floats3
    """[kinds of reductions, layers + 1, layers + 1] entry [k, i, j]: the part of AR(P, g) that nothing hides, of a
    stage of the layers i to j - 1."""
    num_micro_batches: float
    most_replicas: int
    memory_bytes: float
    """Memory of a device."""
    limit_s: float
    """Plans that are slower are dropped."""


@dataclass(kw_only=True, slots=True)
class WayRow:
    """One stage that may be added, and the devices that remain after it."""

    number: int
    """Number of the set of its devices."""
    devices: int
    """Number of its devices."""
    left: int
    """Number of devices that remain for all layers after it."""
    state: int
    """Number of the set of the remaining devices."""
    exposed: int
    """Kind of the reduction of its gradients."""
    rest_exposed: int
    """Kind of the reduction of gradients among the remaining devices."""
    rest_send_s: float
    """Seconds to send a byte from its devices to the remaining ones."""


WAY_DTYPE = dtype_of(WayRow)


class Partials(NamedTuple):
    """Partial plans with equally many stages that leave the same devices free."""

    ends: Ints
    """[plans] layers before the end of the last stage."""
    last: Ints
    """[plans] number of the devices of the last stage, a row of `send_s`."""
    forward: Floats2
    """[plans, stages] F of the stages of computation and of communication between them."""
    backward: Floats2
    """[plans, stages] B of the same stages."""
    reduce: Floats2
    """[plans, stages] AR of the same stages."""
    state: Floats2
    """[plans, stages of computation] bytes of state of a device."""
    saved: Floats2
    """[plans, stages of computation] bytes that a micro-batch keeps on a device."""


class States(NamedTuple):
    """The best partial plan for each set of remaining devices ("state") and each end of the last stage, in layers."""

    known: Floats2
    """[states, layers] least latency so far, for any number of stages."""
    parent: Ints2
    """[states, layers] index of the partial plan to which the best one adds a stage, -1 where there is none in this
    round."""
    number: Ints2
    """[states, layers] number of the set of the devices of the added stage."""
    sent: Floats2
    """[states, layers] F and B of the communication before that stage."""


class Found(NamedTuple):
    """The best whole plan with one number of stages."""

    seconds: Floats
    """[1] its latency in seconds."""
    at: Ints
    """[3] index of the partial plan without the last two stages; number of the way of the last stage but one; and the
    end of this stage, in layers."""


LAYERS, PARTIALS, STATES, FOUND = map(tuple_type, (LayerTables, Partials, States, Found))


@borrowing(float64(float64[:, ::1], int64, float64))
def latency_s(stages, last, count):
    """L = Tw + Ts + Te of a pipeline, with the pivot stage Q of Algorithm 1.

    Args:
        stages: [5, stages + 1] F, B and AR of each stage of computation or communication, and the sums of F and of B of
            all stages before it.
        last: number of the last stage.
        count: M, micro-batches of a step.
    """
    forward, backward, reduce, done_f, done_b = stages[0], stages[1], stages[2], stages[3], stages[4]
    # Algorithm 1: the pivot is the last stage, unless an earlier one is slower by more than all between the two.
    pivot = last
    steady = (count - 1.0) * (forward[last] + backward[last])
    between = 0.0
    for s in range(last - 1, -1, -1):
        mine = (count - 1.0) * (forward[s] + backward[s])
        if mine > steady + between:
            pivot, steady, between = s, mine, 0.0
        else:
            between = between + forward[s] + backward[s]
    # Te = max over s of AR(P_s, g_s) + (s <= Q: sum of B_a from s to Q; s > Q: minus that from Q to s).
    ending = -math.inf
    for s in range(last + 1):
        own = done_b[pivot + 1] - done_b[s] if s <= pivot else done_b[pivot] - done_b[s + 1]
        ending = max(ending, reduce[s] + own)
    # Equation 1: Tw = sum of F_s up to Q, Ts = (M - 1) (F_Q + B_Q).
    return done_f[pivot + 1] + steady + ending


@borrowing(void(float64[:, ::1], int64, float64, float64, float64), inner=True)
def _put(stages, s, forward, backward, reduce):
    """Writes stage s of `latency_s`, and the sums after it."""
    stages[0, s], stages[1, s], stages[2, s] = forward, backward, reduce
    stages[3, s + 1] = stages[3, s] + forward
    stages[4, s + 1] = stages[4, s] + backward


@borrowing(boolean(LAYERS, PARTIALS, int64, int64), inner=True)
def _fits(layers, plans, row, number):
    """Whether all stages of a partial plan fit: stage i of S keeps K_i = min(S - i, M) micro-batches (section 3.2)."""
    for i in range(plans.state.shape[1]):
        kept = min(float(number - i), layers.num_micro_batches)
        if plans.state[row, i] + kept * plans.saved[row, i] > layers.memory_bytes:
            return False
    return True


@borrowing(
    void(LAYERS, PARTIALS, rows_type(WAY_DTYPE), float64[:, ::1], int64, STATES, FOUND, float64[:, ::1]), inner=True
)
def _extend(layers, plans, ways, send_s, first, states, found, stages):
    """See `extend`; `stages` is memory for the stages of one plan."""
    count, num_layers = layers.num_micro_batches, layers.crossing_bytes.shape[0] - 1
    before = plans.forward.shape[1]
    number = plans.state.shape[1] + 2
    for w in range(ways.shape[0]):
        way = ways[w]
        forward, backward = layers.forward_s[way.devices], layers.backward_s[way.devices]
        for row in range(plans.ends.shape[0]):
            begin = plans.ends[row]
            # By Algorithm 1, L >= (M - 1) (F_s + B_s) + sum of F_a + B_a of all a < s, for all s.
            filled = least = 0.0
            for s in range(before):
                _put(stages, s, plans.forward[row, s], plans.backward[row, s], plans.reduce[row, s])
                both = plans.forward[row, s] + plans.backward[row, s]
                least = max(least, (count - 1.0) * both + (filled + both) - both)
                filled += both
            mine, sent = before, 0.0
            if before > 0:
                sent = send_s[plans.last[row], w] * layers.crossing_bytes[begin]
                _put(stages, before, sent, sent, 0.0)
                mine += 1
            fits_before = _fits(layers, plans, row, number)
            for end in range(begin + 1, num_layers):
                # A lower bound: one of the later stages takes at least an even share of the remaining layers.
                spent = (forward[end] + backward[end]) - (forward[begin] + backward[begin])
                even = layers.forward_s[1, num_layers] + layers.backward_s[1, num_layers]
                even = (even - (layers.forward_s[1, end] + layers.backward_s[1, end])) / way.left
                busy = max(spent, even + spent / max(1.0, count - 1.0))
                if max(least, (count - 1.0) * busy + filled) >= layers.limit_s or not fits_before:
                    continue
                state = layers.state_bytes[end] - layers.state_bytes[begin]
                saved = (layers.saved_bytes[end] - layers.saved_bytes[begin]) / way.devices
                if state + min(2.0, count) * saved > layers.memory_bytes:
                    continue
                reduced = layers.exposed_s[way.exposed, begin, end]
                _put(stages, mine, forward[end] - forward[begin], backward[end] - backward[begin], reduced)
                onward = way.rest_send_s * layers.crossing_bytes[end]
                _put(stages, mine + 1, onward, onward, 0.0)
                reduced = layers.exposed_s[way.rest_exposed, end, num_layers]
                if way.left <= layers.most_replicas:
                    held = layers.state_bytes[num_layers] - layers.state_bytes[end]
                    held = held + (layers.saved_bytes[num_layers] - layers.saved_bytes[end]) / way.left
                    if held <= layers.memory_bytes:
                        rest_f, rest_b = layers.forward_s[way.left], layers.backward_s[way.left]
                        rest_f_s, rest_b_s = rest_f[num_layers] - rest_f[end], rest_b[num_layers] - rest_b[end]
                        _put(stages, mine + 2, rest_f_s, rest_b_s, reduced)
                        seconds = latency_s(stages, mine + 2, count)
                        if seconds < min(layers.limit_s, found.seconds[0]):
                            found.seconds[0] = seconds
                            found.at[0], found.at[1], found.at[2] = first + row, w, end
                # Partial plans are compared as if the remaining devices could share the rest evenly, samples included.
                share = 1.0 / way.left
                rest_f_s = share * (layers.forward_s[1, num_layers] - layers.forward_s[1, end])
                rest_b_s = share * (layers.backward_s[1, num_layers] - layers.backward_s[1, end])
                _put(stages, mine + 2, rest_f_s, rest_b_s, reduced)
                seconds = latency_s(stages, mine + 2, count)
                if seconds <= states.known[way.state, end] and seconds < math.inf:
                    states.known[way.state, end] = seconds
                    states.parent[way.state, end], states.number[way.state, end] = first + row, way.number
                    states.sent[way.state, end] = sent


@kernel(void(LAYERS, PARTIALS, rows_type(WAY_DTYPE), float64[:, ::1], int64, STATES, FOUND))
def extend(layers, plans, ways, send_s, first, states, found):
    """Adds one stage to partial plans in every way and keeps the best plans; of equally fast ones the last.

    Args:
        layers: the model.
        plans: partial plans that all leave the same devices free.
        ways: the stages that may be added.
        send_s: [last stages, ways] seconds to send a byte from the last stage of a plan to the added stage.
        first: index of the first of the plans in its round.
        states: the best partial plans; read and written.
        found: the best complete plan; read and written.
    """
    stages = np.zeros((5, plans.forward.shape[1] + 5))
    _extend(layers, plans, ways, send_s, first, states, found, stages)

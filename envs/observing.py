"""The compiled pass that writes what an agent sees; `envs.features` prepares what it reads."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import float32, float64, int8, int64, types, void

from automap.bounds.kernels.step_many import EPISODES
from automap.jit import borrowing, kernel
from ir.factors import PARTIAL

Floats32 = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

KINDS = (
    "pp",
    "tp",
    "middle",
    "micro_batches",
    "virtual",
    "schedule",
    "order",
    "devices",
    "cut",
    "recompute",
    "zero",
    "signature",
)
"""Of slots."""
GROUP_FEATURES = 10
CLUSTER_FEATURES = 6
STATE_FEATURES = len(KINDS) + 5 + 3 + 7 + 3 + 4 + GROUP_FEATURES + CLUSTER_FEATURES
ACTION_FEATURES = 9
"""Growth, memory (see `envs.decision`); number, share; divides work, splits the batch, splits a weight, leaves a sum,
takes its input as it comes."""
NONE, UNKNOWN = -9, -8
"""Placements of a value that is not there, and of one that nothing says."""
MAX_LOG_RATIO = 3.0
"""Bounds and prices further than a factor e^3 from the best are all equally bad."""
LIMIT = 10.0
"""Of every feature."""
NUM_KINDS = len(KINDS)

# Slots of Facts.scalars.
A_AXES, A_FIRST_CUT, A_FIRST_RECOMPUTE, A_ZERO_SLOT, A_FIRST_SIGNATURE, A_DEVICES, A_BATCH = range(7)


class Facts(NamedTuple):
    """What features of plans are read from; of one space. Placements are those of `ir.factors`, NONE and UNKNOWN."""

    scalars: Ints
    """See the A_ constants."""
    kind: Ints
    """[slots] see `KINDS`."""
    group: Ints
    """[slots] linkage group, 0 where there is none."""
    source: Ints
    """[groups] the one that makes an input of its leader, or -1."""
    degrees: Ints
    middles: Ints
    micro_batches: Ints
    virtuals: Ints
    """These four: see `SpaceArrays`."""
    wants: Ints
    """[groups, values] the placement in which the leader takes that input."""
    gives: Ints
    """[groups, values of `source`] the placement in which it is made."""
    place: Floats32
    """[slots] `Slot.index`, scaled."""
    num_values: Floats32
    """[slots]"""
    cluster: Floats32
    """[CLUSTER_FEATURES]"""
    numbers: Floats32
    """[slots, values]"""
    groups: Floats32
    """[groups, GROUP_FEATURES - 2]"""
    meaning: Floats32
    """[groups, values, 4]"""
    times: npt.NDArray[np.float64]
    """[2] lower bound on every plan, step time of a good one; seconds."""


FACTS = types.NamedTuple(
    (
        *[int64[::1]] * 8,
        *[int64[:, ::1]] * 2,
        *[float32[::1]] * 3,
        *[float32[:, ::1]] * 2,
        float32[:, :, ::1],
        float64[::1],
    ),
    Facts,
)
"""Numba's type of `Facts`."""


@kernel(void(EPISODES, FACTS, float32[:, ::1], int8[:, ::1]))
def write_features(episodes, facts, observation, mask):
    """See `Features.write`."""
    num_slots = episodes.values.shape[1]
    for episode in range(episodes.position.shape[0]):
        row, slot = observation[episode], episodes.position[episode]
        row[:] = 0.0
        mask[episode] = 1 if slot == num_slots else 0
        if slot < num_slots:
            given = _given(facts, episodes.values[episode], slot)
            _write_state(facts, episodes.values[episode], slot, episodes.bound[episode], given, row)
            count = episodes.offered[episode]
            _write_actions(
                facts,
                slot,
                episodes.bound[episode],
                given,
                episodes.legal[episode, :count],
                episodes.action_bounds[episode],
                mask[episode],
                row,
            )


@borrowing(int64(FACTS, int64[::1], int64), inner=True)
def _given(facts, value, slot):
    """The placement in which the leader's input comes on the axis of a slot, or UNKNOWN."""
    num_axes, first = facts.scalars[A_AXES], facts.scalars[A_FIRST_SIGNATURE]
    if slot < first:
        return UNKNOWN
    group = facts.group[slot]
    source = facts.source[group]
    at = first + source * num_axes + (slot - first) % num_axes
    if source < 0 or at >= slot:
        return UNKNOWN
    return facts.gives[group, value[at]]


@borrowing(void(FACTS, int64[::1], int64, float64[::1], int64, float32[::1]), inner=True)
def _write_state(facts, value, slot, bound, given, row):
    """The first STATE_FEATURES of an observation; the rest is left alone."""
    num_axes, first = facts.scalars[A_AXES], facts.scalars[A_FIRST_SIGNATURE]
    row[facts.kind[slot]] = 1.0
    at = NUM_KINDS
    row[at] = slot / value.shape[0]
    row[at + 1] = math.log(bound[0] / facts.times[0])
    row[at + 2] = bound[1]
    row[at + 3] = math.log(facts.times[1] / bound[0])
    row[at + 4] = facts.place[slot]
    at += 5
    if slot >= first:
        # Outer, inner, and where there are three the one between them.
        axis = (slot - first) % num_axes
        row[at + (0 if axis == 0 else 1 if axis == num_axes - 1 else 2)] = 1.0
    at += 3
    if slot >= facts.scalars[A_FIRST_CUT]:
        _write_shape(facts, value, row[at : at + 7])
        begin, zero_slot = facts.scalars[A_FIRST_RECOMPUTE], facts.scalars[A_ZERO_SLOT]
        decided = min(slot, zero_slot) - begin
        for rank in range(decided):
            row[at + 7 + value[begin + rank]] += float32(1.0) / float32(decided)
        if slot > zero_slot:
            row[at + 10 + value[zero_slot]] = 1.0
    at += 14
    if slot >= first:
        group = facts.group[slot]
        for i in range(facts.groups.shape[1]):
            row[at + i] = facts.groups[group, i]
        row[at + facts.groups.shape[1]] = given >= 0
        row[at + facts.groups.shape[1] + 1] = given == PARTIAL
    at += facts.groups.shape[1] + 2
    for i in range(facts.cluster.shape[0]):
        row[at + i] = facts.cluster[i]
    for i in range(STATE_FEATURES):
        row[i] = min(max(row[i], float32(-LIMIT)), float32(LIMIT))


@borrowing(void(FACTS, int64[::1], float32[::1]), inner=True)
def _write_shape(facts, value, row):
    """Pipeline ranks, inner ranks, replicas, micro-batches, samples of one, virtual stages, middle ranks; in logs."""
    num_axes = facts.scalars[A_AXES]
    ranks, inner = facts.degrees[value[0]], facts.degrees[value[1]]
    middle = facts.middles[value[2]] if num_axes == 3 else 1
    count = facts.micro_batches[value[num_axes]]
    row[0] = math.log2(ranks) / 4.0
    row[1] = math.log2(inner) / 4.0
    row[2] = math.log2(facts.scalars[A_DEVICES] // (ranks * inner * middle)) / 4.0
    row[3] = math.log2(count) / 4.0
    row[4] = math.log2(facts.scalars[A_BATCH] // count) / 4.0
    row[5] = math.log2(facts.virtuals[value[num_axes + 1]]) / 4.0
    row[6] = math.log2(middle) / 4.0


@borrowing(
    void(FACTS, int64, float64[::1], int64, int64[::1], float64[:, ::1], int8[::1], float32[::1]),
    inner=True,
)
def _write_actions(facts, slot, bound, given, legal, ahead, mask, row):
    """The features of the legal actions, and their mask; of the others nothing is written."""
    group = facts.group[slot]
    is_signature = slot >= facts.scalars[A_FIRST_SIGNATURE]
    fits = False
    for i in range(legal.shape[0]):
        fits = fits or ahead[i, 1] <= 0.0
    for i in range(legal.shape[0]):
        action = legal[i]
        at = STATE_FEATURES + action * ACTION_FEATURES
        mask[action] = not fits or ahead[i, 1] <= 0.0
        row[at] = min(math.log(max(ahead[i, 0], 1e-30) / bound[0]), MAX_LOG_RATIO)
        row[at + 1] = min(max(ahead[i, 1], -1.0), 2.0)
        row[at + 2] = facts.numbers[slot, action]
        row[at + 3] = action / facts.num_values[slot]
        if is_signature:
            for m in range(4):
                row[at + 4 + m] = facts.meaning[group, action, m]
            row[at + 8] = facts.wants[group, action] == given

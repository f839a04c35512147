"""The best known plans, and which of them agree with the decisions of each plan that is being decided; all compiled.

A decision with which no known plan agrees is ignored in this comparison. Units: seconds; memory as share of capacity
(overflow).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import float64, int64, void

from automap.bounds.kernels.corrections import CorrectionArrays
from automap.bounds.kernels.step_many import BEGIN, EPISODES, WAIT
from automap.jit import borrowing, kernel
from automap.price.kernels.array_types import Floats, Floats2, Floats3, Ints, Ints2, Mask, Mask2, tuple_type
from automap.price.kernels.hashes import SEEDS, mix
from automap.space.group_flow import GroupFlow
from automap.space.kernels.layout import LAYOUT, decide_stages, new_layout
from automap.space.kernels.records import SPACE

MISFIT = 1.0
"""Least penalty of a plan that does not fit: the logarithm of the factor by which its step time counts as longer than
that of a good plan. Assumed, as the next two; they are much larger than the differences between good plans."""
PER_OVERFLOW = 2.0
"""Further penalty for each missing share of a device's memory, 1 being the whole memory (assumed)."""
MOST_PER_OVERFLOW = 2.0
"""Largest value of this further penalty (assumed)."""


class KnownArrays(NamedTuple):
    """Known plans, and the completions that they give to the plans being decided."""

    flow: GroupFlow
    """The flow between the linkage groups of the space."""
    corrections: CorrectionArrays
    """Corrections of the price by real runs; they are part of all seconds below."""
    values: Ints2
    """[room, slots] known plans."""
    columns: Ints2
    """[slots, room] the same transposed, so that the comparison with one decision reads one row."""
    meshes: Ints2
    """[room, 2] `Layout.hashes` of each known plan."""
    hashes: Ints2
    """[room, 2] two hashes of all values of each known plan."""
    prices: Floats2
    """[room, 2] seconds and overflow of each known plan."""
    order: Ints
    """[room] numbers of the known plans, the best first."""
    num_known: Ints
    """[1] number of known plans."""
    leads: Ints
    """[episodes] number of the known plan that each plan follows first; -1: the best one."""
    agreeing: Ints2
    """[episodes, room] numbers of the known plans that agree with the decisions of each plan, the best first."""
    num_agreeing: Ints
    """[episodes] number of agreeing plans; at least one."""
    compared: Ints
    """[episodes] number of slots that have been compared."""
    is_known: Mask
    """[episodes] whether no decision was ignored; the completion of the plan is then a known plan."""
    completed: Floats3
    """[episodes, most, 2] seconds and overflow of the completion after each legal value of the slot to decide."""
    worth: Floats2
    """[episodes, most] step time of each completion with the penalty of `worth`."""
    least: Floats
    """[episodes] the least of these."""
    is_followed: Mask2
    """[episodes, most] whether each legal value is that of the best agreeing plan."""
    best_values: Ints2
    """[episodes, slots] fastest completion that fits into memory, among those seen since the plan was begun."""
    best_s: Floats
    """[episodes] its step time in seconds; infinity where none fits."""
    priced: Ints
    """[1] number of completions that have been priced, including repeated ones."""
    reference_s: float
    """Step time of a good plan, in seconds."""


KNOWN = tuple_type(KnownArrays)
"""Numba's type of `KnownArrays`."""


@borrowing(float64(float64, float64, float64), inner=True)
def worth(seconds, overflow, reference_s):
    """Step time of a plan with a penalty if it does not fit, see `MISFIT`: then it is above that of all good plans."""
    if overflow <= 0.0:
        return seconds
    penalty = MISFIT + min(PER_OVERFLOW * overflow, MOST_PER_OVERFLOW)
    return max(seconds, reference_s) * math.exp(penalty)


@kernel(void(float64[:, ::1], float64, float64[::1]))
def worth_many(prices, reference_s, out):
    """Writes the `worth` of many plans.

    Args:
        prices: [n, 2] seconds of a step and overflow of memory.
        reference_s: step time of a good plan, in seconds.
        out: [n] written.
    """
    for plan in range(out.shape[0]):
        out[plan] = worth(prices[plan, 0], prices[plan, 1], reference_s)


@borrowing(void(SPACE, int64[:, ::1], int64[:, ::1], int64[:, ::1], LAYOUT), inner=True)
def _hash_all(space, values, meshes, hashes, layout):
    for plan in range(values.shape[0]):
        decide_stages(space, values[plan], space.first.cut, layout)
        meshes[plan, 0], meshes[plan, 1] = layout.hashes[0], layout.hashes[1]
        one, two = SEEDS
        for slot in range(values.shape[1]):
            one, two = mix(one, two, values[plan, slot])
        hashes[plan, 0], hashes[plan, 1] = one, two


@kernel(void(SPACE, int64[:, ::1], int64[:, ::1], int64[:, ::1]))
def hash_plans(space, values, meshes, hashes):
    """Writes `Layout.hashes` of plans, [n, slots], into `meshes`, and two hashes of all values into `hashes`, both
    [n, 2]."""
    _hash_all(space, values, meshes, hashes, new_layout(space))


@borrowing(void(KNOWN, int64, int64, int64), inner=True)
def _agree(known, number, slot, value):
    """Keeps the agreeing plans that have a value in a slot; if none has it, keeps all."""
    agreeing, column, kept = known.agreeing[number], known.columns[slot], 0
    for i in range(known.num_agreeing[number]):
        plan = agreeing[i]
        if column[plan] == value:
            agreeing[kept] = plan
            kept += 1
    if kept == 0:
        known.is_known[number] = False
    else:
        known.num_agreeing[number] = kept


@borrowing(void(EPISODES, KNOWN, int64), inner=True)
def compare(episodes, known, number):
    """Updates the known plans that agree with a plan by the slots decided since the last call."""
    for slot in range(known.compared[number], episodes.position[number]):
        _agree(known, number, slot, episodes.values[number, slot])
    known.compared[number] = max(known.compared[number], episodes.position[number])


@borrowing(void(EPISODES, KNOWN, int64, int64[::1], int64[::1]), inner=True)
def find_best(episodes, known, number, places, best):
    """Writes, for each legal value of the slot to decide, the best agreeing plan with this value, or -1.

    Args:
        places: [values of a slot] scratch, -1 between calls.
        best: [most] written, as far as values are offered.
    """
    legal, count = episodes.legal[number], episodes.offered[number]
    column, missing = known.columns[episodes.position[number]], count
    for i in range(count):
        places[legal[i]] = i
        best[i] = -1
    for i in range(known.num_agreeing[number]):
        plan = known.agreeing[number, i]
        place = places[column[plan]]
        if place >= 0 and best[place] < 0:
            best[place] = plan
            missing -= 1
            if missing == 0:
                break
    for i in range(count):
        places[legal[i]] = -1


@borrowing(void(KNOWN, int64), inner=True)
def _follow_first(known, number):
    """Moves the plan that `leads` names to the front of the agreeing plans."""
    lead, agreeing = known.leads[number], known.agreeing[number]
    for i in range(known.num_known[0]):
        if agreeing[i] == lead:
            for j in range(i, 0, -1):
                agreeing[j] = agreeing[j - 1]
            agreeing[0] = lead
            return


@borrowing(void(EPISODES, KNOWN, int64[::1]), inner=True)
def follow_known(episodes, known, actions):
    """Prepares `step_many`: slots that are not asked will follow the best known plan that agrees with the actions.

    Args:
        episodes: `preferred` is written.
        known: the known plans.
        actions: [episodes] those that `step_many` will take.
    """
    for number in range(actions.shape[0]):
        action = actions[number]
        if action == BEGIN:
            known.num_agreeing[number] = known.num_known[0]
            for i in range(known.num_known[0]):
                known.agreeing[number, i] = known.order[i]
            _follow_first(known, number)
            known.compared[number] = 0
            known.is_known[number] = True
            known.best_s[number] = np.inf
        elif action == WAIT or episodes.position[number] == episodes.values.shape[1]:
            continue
        else:
            compare(episodes, known, number)
            slot = episodes.position[number]
            _agree(known, number, slot, episodes.legal[number, action])
            known.compared[number] = slot + 1
        followed = known.agreeing[number, 0]
        for slot in range(episodes.preferred.shape[1]):
            episodes.preferred[number, slot] = known.values[followed, slot]

"""Completions: what the best known plans make of partial plans, and what these completions cost.

`automap.bounds.kernels.step_many` says what no completion of a partial plan goes below. This module gives the other
side, a completion that is at hand: behind every legal value the best known plan that agrees with all decisions is
followed to the end. Where no known plan agrees with a decision, that decision is passed over when plans are compared.
Units: seconds; memory as share of capacity (overflow).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import boolean, float64, int64, types, void

from automap.bounds.kernels.corrections import CorrectionArrays, correction
from automap.bounds.kernels.step_many import BEGIN, EPISODES, WAIT
from automap.jit import borrowing, kernel
from automap.price.kernels.array_types import Floats, Floats2, Floats3, Ints, Ints2, Mask, Mask2, tuple_type
from automap.space.group_flow import FLOW, GroupFlow
from automap.space.kernels.draft import DRAFT, pick_all
from automap.space.kernels.layout import decide_stages
from automap.space.kernels.levels import nearest_legal
from automap.space.kernels.price_one import cost_rows, finish, price_one
from automap.space.kernels.records import COMPILED, SPACE
from automap.space.kernels.stepper import decide, is_idle, legal_values
from automap.space.kernels.workspace import WORKSPACE, new_workspace, set_rows

MISFIT, PER_OVERFLOW, MOST_PER_OVERFLOW = 1.0, 2.0, 2.0
"""Logarithm of the ratio of step times by which a plan that does not fit is worth less than a good plan, at least; how
much more for each share of a device's memory that is missing; and how much more at most. Assumed: these are far more
than good plans differ by."""


class KnownArrays(NamedTuple):
    """Known plans, and the completions that they give to the plans being decided."""

    flow: GroupFlow
    """The flow between the linkage groups of the space."""
    corrections: CorrectionArrays
    """What real runs say about the price; all seconds below are corrected by it."""
    values: Ints2
    """[room, slots] known plans."""
    prices: Floats2
    """[room, 2] seconds and overflow of each known plan."""
    order: Ints
    """[room] numbers of the known plans, the best first."""
    num_known: Ints
    """[1] number of known plans."""
    leads: Ints
    """[episodes] number of the known plan that a plan follows first of all from its beginning, or -1: the best one."""
    agreeing: Ints2
    """[episodes, room] numbers of the known plans that agree with the decisions of each plan, the best first."""
    num_agreeing: Ints
    """[episodes] how many there are; at least one."""
    compared: Ints
    """[episodes] number of slots that have been compared."""
    is_known: Mask
    """[episodes] whether no decision was passed over: the completion of the plan is then a known plan."""
    completed: Floats3
    """[episodes, most, 2] seconds and overflow of the completion behind each legal value of the slot to decide."""
    worth: Floats2
    """[episodes, most] step time as which each of them is rewarded, see `worth`."""
    least: Floats
    """[episodes] the least of `worth`."""
    is_followed: Mask2
    """[episodes, most] whether each legal value is that of the best agreeing plan."""
    best_values: Ints2
    """[episodes, slots] fastest completion that fits into memory, among those seen since the plan was begun."""
    best_s: Floats
    """[episodes] its step time in seconds; infinity where none fits."""
    priced: Ints
    """[1] number of completions that have been priced."""
    reference_s: float
    """Step time of a good plan, in seconds."""


class Goal(NamedTuple):
    """What the undecided slots of a plan follow."""

    flow: GroupFlow
    """The flow between the linkage groups of the space."""
    follows: Ints
    """[slots] a legal plan, which they follow as far as it stays legal."""
    asked: Mask
    """[slots] which slots are decided one by one."""
    decided: int
    """Number of slots that are decided."""
    goes_on: bool
    """Whether signatures go on as those before them do, see `_likewise`, where that is said."""


KNOWN, GOAL = tuple_type(KnownArrays), tuple_type(Goal)
"""Numba's types of the two."""


@borrowing(float64(float64, float64, float64), inner=True)
def worth(seconds, overflow, reference_s):
    """Step time as which a plan is rewarded: its own, or more than that of any good plan if it does not fit."""
    if overflow <= 0.0:
        return seconds
    penalty = MISFIT + min(PER_OVERFLOW * overflow, MOST_PER_OVERFLOW)
    return max(seconds, reference_s) * math.exp(penalty)


@kernel(void(float64[:, ::1], float64, float64[::1]))
def worth_many(prices, reference_s, out):
    """Step times as which plans are rewarded.

    Args:
        prices: [n, 2] seconds of a step and overflow of memory.
        reference_s: step time of a good plan, in seconds.
        out: [n] written.
    """
    for plan in range(out.shape[0]):
        out[plan] = worth(prices[plan, 0], prices[plan, 1], reference_s)


@borrowing(void(KNOWN, int64, int64, int64), inner=True)
def _agree(known, number, slot, value):
    """Keeps those of the agreeing plans that have a value in a slot; where none has, all stay."""
    agreeing, count = known.agreeing[number], 0
    for i in range(known.num_agreeing[number]):
        count += known.values[agreeing[i], slot] == value
    if count == 0:
        known.is_known[number] = False
        return
    kept = 0
    for i in range(known.num_agreeing[number]):
        if known.values[agreeing[i], slot] == value:
            agreeing[kept] = agreeing[i]
            kept += 1
    known.num_agreeing[number] = kept


@borrowing(void(EPISODES, KNOWN, int64), inner=True)
def _compare(episodes, known, number):
    """Compares the known plans with all slots that are decided."""
    for slot in range(known.compared[number], episodes.position[number]):
        _agree(known, number, slot, episodes.values[number, slot])
    known.compared[number] = max(known.compared[number], episodes.position[number])


@borrowing(void(KNOWN, int64), inner=True)
def _follow_first(known, number):
    """Puts the plan that leads before the others."""
    lead, agreeing = known.leads[number], known.agreeing[number]
    for i in range(known.num_known[0]):
        if agreeing[i] == lead:
            for j in range(i, 0, -1):
                agreeing[j] = agreeing[j - 1]
            agreeing[0] = lead
            return


@kernel(void(EPISODES, KNOWN, int64[::1]))
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
            known.agreeing[number] = known.order
            _follow_first(known, number)
            known.compared[number] = 0
            known.is_known[number] = True
            known.best_s[number] = np.inf
        elif action == WAIT or episodes.position[number] == episodes.values.shape[1]:
            continue
        else:
            _compare(episodes, known, number)
            slot = episodes.position[number]
            _agree(known, number, slot, episodes.legal[number, action])
            known.compared[number] = slot + 1
        episodes.preferred[number] = known.values[known.agreeing[number, 0]]


@borrowing(int64(COMPILED, int64[::1], int64, int64, DRAFT), inner=True)
def _settled(compiled, value, slot, wanted, draft):
    """The value that a slot has where `wanted` is preferred: that one if it is legal, else whole operators, else what
    `nearest_legal` says; as `step_many` fills in slots that are not asked."""
    space = compiled.space
    mask = draft.mask[: legal_values(compiled, value, slot, draft)]
    if slot >= space.first.signature and not (wanted < mask.shape[0] and mask[wanted]):
        wanted = space.groups[(slot - space.first.signature) // space.obeys.shape[0]].whole
    return nearest_legal(space, slot, wanted, mask)


@borrowing(int64(SPACE, FLOW, int64[::1], int64), inner=True)
def _likewise(space, flow, value, slot):
    """The value with which a signature goes on as those before it do, or -1.

    Behind a group that splits the batch, the next group of the unit splits the batch too; where a unit has one group
    only, that of the next unit. Otherwise a group takes its input as it is made, if it is made split and the group then
    divides its work. The value depends on the values before it alone: whoever takes it is offered the same plan again.

    Args:
        space: slots.
        flow: flow between linkage groups.
        value: [slots] values; those before `slot` are known.
        slot: slot of the signature.
    """
    first, num_axes = space.first.signature, space.obeys.shape[0]
    group, axis = divmod(slot - first, num_axes)
    before = group - 1
    is_near = before >= 0 and (flow.kind[before] == flow.kind[group] or flow.is_alone[before])
    if is_near and value[slot - num_axes] == flow.batch[before]:
        return flow.batch[group]
    source = flow.source[group]
    if source < 0:
        return -1
    made = flow.made[group, value[first + source * num_axes + axis]]
    if made >= 0:
        for chosen in range(space.groups[group].num_values):
            if flow.required[group, chosen] == made and flow.divides[group, chosen]:
                return chosen
    return -1


@borrowing(void(COMPILED, GOAL, DRAFT, int64[::1]), inner=True)
def _complete_skeleton(compiled, goal, draft, value):
    """Completes the slots of a plan before its signatures.

    Args:
        compiled: whose cache is read and written.
        goal: what the undecided slots follow.
        draft: its layout is overwritten.
        value: [slots] the plan; the undecided slots are written.
    """
    space = compiled.space
    for slot in range(space.first.signature):
        if slot >= space.first.cut and is_idle(space, slot, draft.layout):
            value[slot] = 0
            continue
        if slot >= goal.decided:
            value[slot] = _settled(compiled, value, slot, goal.follows[slot], draft)
        decide(space, value, slot, draft)


@borrowing(void(COMPILED, GOAL, DRAFT, int64[::1]), inner=True)
def _complete_signatures(compiled, goal, draft, value):
    """Completes the signatures of a plan.

    Args:
        compiled: whose cache is read and written.
        goal: what the undecided slots follow.
        draft: with the layout of the plan; its signatures are overwritten.
        value: [slots] the plan; the undecided slots are written.
    """
    space, first, num_axes = compiled.space, compiled.space.first, compiled.space.obeys.shape[0]
    follows, decided = goal.follows, goal.decided
    # On the same stages the signatures of a legal plan stay legal.
    is_reshaped = False
    for slot in range(first.cut):
        is_reshaped = is_reshaped or value[slot] != follows[slot]
    for group in range(max(0, (decided - first.signature) // num_axes), space.groups.shape[0]):
        begin = first.signature + group * num_axes
        is_touched = is_reshaped
        for slot in range(begin, begin + num_axes):
            if slot >= decided:
                value[slot] = follows[slot]
                if goal.goes_on and goal.asked[slot]:
                    likewise = _likewise(space, goal.flow, value, slot)
                    value[slot] = likewise if likewise >= 0 else follows[slot]
            is_touched = is_touched or value[slot] != follows[slot]
        if is_touched:
            for slot in range(begin, begin + num_axes):
                if slot >= decided:
                    value[slot] = _settled(compiled, value, slot, value[slot], draft)
                decide(space, value, slot, draft)


@borrowing(types.UniTuple(int64, 2)(KNOWN, int64, int64, int64), inner=True)
def _best_with(known, number, slot, value):
    """The best agreeing plan that has a value in a slot, and 1; the best agreeing plan, and 0, where none has it."""
    for i in range(known.num_agreeing[number]):
        found = known.agreeing[number, i]
        if known.values[found, slot] == value:
            return found, 1
    return known.agreeing[number, 0], 0


@borrowing(void(COMPILED, int64[::1], WORKSPACE), inner=True)
def _set_skeleton(compiled, value, workspace):
    """Writes what the slots of a plan, [slots], before its signatures decide."""
    decide_stages(compiled.space, value, value.shape[0], workspace.draft.layout)
    set_rows(compiled.space, value, workspace)


@borrowing(void(COMPILED, KNOWN, int64[::1], WORKSPACE, int64[:, ::1], boolean, float64[::1]), inner=True)
def _price(compiled, known, value, workspace, hashes, is_same, out):
    """Writes seconds and overflow of a complete plan, whose skeleton is set, into `out`, [2], and counts it.

    Args:
        value: [slots] the plan.
        hashes: [types, 2] those of the draft when a plan was priced last; overwritten.
        is_same: whether that plan had the same skeleton. Then only units whose signatures changed, and those behind
            them, are priced.
    """
    space, draft = compiled.space, workspace.draft
    pick_all(space, value, value.shape[0], draft)
    # With unlike shares a plan is priced as every kind of device sees it.
    if is_same and value[space.first.shares] == 0:
        for kind in range(hashes.shape[0]):
            if hashes[kind, 0] != draft.hashes[kind, 0] or hashes[kind, 1] != draft.hashes[kind, 1]:
                cost_rows(compiled, kind, workspace)
        finish(compiled, workspace, True, out)
    else:
        price_one(compiled, value, workspace, True, out)
    for kind in range(hashes.shape[0]):
        hashes[kind, 0], hashes[kind, 1] = draft.hashes[kind, 0], draft.hashes[kind, 1]
    out[0] *= correction(known.corrections, value)
    known.priced[0] += 1


@borrowing(void(KNOWN, int64, int64[::1], float64[::1]), inner=True)
def _keep(known, number, value, price):
    """Keeps a completion, [slots], with its price, [2], if it is the fastest of its plan that fits."""
    if price[1] <= 0.0 and price[0] < known.best_s[number]:
        known.best_s[number] = price[0]
        for slot in range(value.shape[0]):
            known.best_values[number, slot] = value[slot]


@kernel(void(COMPILED, EPISODES, KNOWN, int64[::1]))
def complete_many(compiled, episodes, known, actions):
    """Prices the completion behind every legal value of the slots to decide.

    Behind a signature there are two: the rest follows the known plan, or it goes on as the decisions before do
    (`_likewise`), and the better one counts: sharding often pays only for several operators together.

    Args:
        compiled: whose cache is read and written.
        episodes: the plans.
        actions: [episodes] those that `step_many` took last; where a plan waited, nothing has changed.
        known: `completed`, `worth`, `least`, `is_followed`, `best_values` and `best_s` are written.
    """
    workspace, first = new_workspace(compiled), compiled.space.first
    value, other = np.empty(episodes.values.shape[1], np.int64), np.empty(episodes.values.shape[1], np.int64)
    price, hashes = np.empty(2), np.empty_like(workspace.draft.hashes)
    for number in range(episodes.position.shape[0]):
        slot = episodes.position[number]
        if slot == value.shape[0] or actions[number] == WAIT:
            continue
        _compare(episodes, known, number)
        preferred = known.values[known.agreeing[number, 0], slot]
        known.least[number] = np.inf
        value[:slot] = episodes.values[number, :slot]
        is_same = False
        if slot >= first.signature:
            _set_skeleton(compiled, value, workspace)
        for i in range(episodes.offered[number]):
            chosen, out = episodes.legal[number, i], known.completed[number, i]
            follows, agrees = _best_with(known, number, slot, chosen)
            known.is_followed[number, i] = chosen == preferred
            value[:slot] = episodes.values[number, :slot]
            value[slot] = chosen
            plan = known.values[follows]
            # Another plan may have taken the place of one that agreed when this plan was begun.
            is_known = agrees == 1 and known.is_known[number]
            for j in range(slot):
                is_known = is_known and plan[j] == value[j]
            if is_known:
                value[slot:] = plan[slot:]
                out[0], out[1] = known.prices[follows, 0], known.prices[follows, 1]
            else:
                goal = Goal(known.flow, plan, episodes.asked[number], slot + 1, False)
                if slot < first.signature:
                    _complete_skeleton(compiled, goal, workspace.draft, value)
                _complete_signatures(compiled, goal, workspace.draft, value)
                if slot < first.signature:
                    _set_skeleton(compiled, value, workspace)
                _price(compiled, known, value, workspace, hashes, is_same, out)
                is_same = slot >= first.signature
            _keep(known, number, value, out)
            best = worth(out[0], out[1], known.reference_s)
            if slot >= first.signature:
                other[: slot + 1] = value[: slot + 1]
                goal = Goal(known.flow, plan, episodes.asked[number], slot + 1, True)
                _complete_signatures(compiled, goal, workspace.draft, other)
                is_new = False
                for j in range(slot + 1, value.shape[0]):
                    is_new = is_new or value[j] != other[j]
                if is_new:
                    _price(compiled, known, other, workspace, hashes, is_same, price)
                    is_same = True
                    _keep(known, number, other, price)
                    again = worth(price[0], price[1], known.reference_s)
                    if again < best:
                        best = again
                        out[0], out[1] = price[0], price[1]
            known.worth[number, i] = best
            known.least[number] = min(known.least[number], best)

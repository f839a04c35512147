"""Completions: each partial plan completed as in the best known plan that agrees with it, and the price of the result.

`automap.bounds.kernels.step_many` gives lower bounds of all completions of a partial plan. This module gives an upper
bound: for every legal value of the next decision, the best known plan that agrees with all decisions so far is followed
to the end. Units: seconds; memory as share of capacity (overflow).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import boolean, float64, int64, types, void

from automap.bounds.kernels.corrections import correction
from automap.bounds.kernels.cut_bounds import LOWER_BOUNDS
from automap.bounds.kernels.known_plans import KNOWN, compare, find_best, follow_known, worth
from automap.bounds.kernels.step_many import EPISODES, WAIT, step_one
from automap.jit import borrowing, kernel
from automap.price.kernels.array_types import Floats, Ints, Ints2, Mask, tuple_type
from automap.price.kernels.hashes import SEEDS, mix
from automap.space.group_flow import FLOW, GroupFlow
from automap.space.kernels.draft import DRAFT, pick
from automap.space.kernels.known_prices import recall, remember
from automap.space.kernels.layout import decide_stages
from automap.space.kernels.levels import nearest_legal
from automap.space.kernels.price_one import cost_rows, finish, price_one
from automap.space.kernels.records import COMPILED, SPACE
from automap.space.kernels.stepper import decide, is_idle, legal_values
from automap.space.kernels.workspace import Workspace, new_workspace, set_rows

NOT_ANOTHER = -1.0
"""In place of seconds: the completion by `_likewise` is the same as the one that follows the known plans."""


class Goal(NamedTuple):
    """The rule by which the undecided slots of a plan are completed."""

    flow: GroupFlow
    """The flow between the linkage groups of the space."""
    follows: Ints
    """[slots] a legal plan, whose values are taken where they are legal."""
    meshes: Ints
    """[2] `Layout.hashes` of that plan."""
    asked: Mask
    """[slots] which slots are decided one by one."""
    decided: int
    """Number of slots that are decided."""
    goes_on: bool
    """Whether signatures continue those before them where `_likewise` gives a value."""


class Scratch(NamedTuple):
    """Memory of one caller."""

    workspace: Workspace
    values: Ints2
    """[most, slots] for each legal value, the completion that follows the known plans, if it was computed."""
    is_written: Mask
    """[most] whether it was computed."""
    is_ready: Mask
    """[1] whether the draft contains the decisions of the present plan."""
    other: Ints
    """[slots] another completion."""
    price: Floats
    """[2] seconds and overflow of the other one."""
    hashes: Ints2
    """[types, 2] `Draft.hashes` of the plan that was priced last."""
    skeleton: Ints
    """[2] two hashes of the slots before the signatures."""
    has_costs: Mask
    """[1] whether the plan that was priced last has the same values in these slots."""
    places: Ints
    """[values of a slot] scratch of `find_best`."""
    best: Ints
    """[most] the result of `find_best`."""


GOAL, SCRATCH = tuple_type(Goal), tuple_type(Scratch)
"""Numba's types of the two."""


@borrowing(int64(COMPILED, int64[::1], int64, int64, DRAFT), inner=True)
def _settled(compiled, value, slot, wanted, draft):
    """The value of a slot if `wanted` is preferred: this one if it is legal, else the one that keeps operators whole,
    else that of `nearest_legal`. `step_many` fills in slots that are not asked in the same way."""
    space = compiled.space
    mask = draft.mask[: legal_values(compiled, value, slot, draft)]
    if slot >= space.first.signature and not (wanted < mask.shape[0] and mask[wanted]):
        wanted = space.groups[(slot - space.first.signature) // space.obeys.shape[0]].whole
    return nearest_legal(space, slot, wanted, mask)


@borrowing(int64(SPACE, FLOW, int64[::1], int64), inner=True)
def _likewise(space, flow, value, slot):
    """The value of a signature that continues the signatures before it, or -1 if there is none.

    If a group splits the batch, the next group of the unit splits the batch too; if the unit has only one group, that
    of the next unit does. Otherwise a group takes its input in the placement in which it is made, provided that this is
    a split and that the group then divides its work. The value depends on the values before it alone. So if it is
    chosen, the completion stays the same at the next decision.

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
        goal: the rule for undecided slots.
        draft: with the layout of all decided slots but the last one.
        value: [slots] the plan; the undecided slots are written.
    """
    space = compiled.space
    for slot in range(goal.decided - 1, space.first.signature):
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
        goal: the rule for undecided slots.
        draft: with the layout of the plan and all decided signatures but the last one; the others are overwritten.
        value: [slots] the plan; the undecided slots are written.
    """
    space, first, num_axes = compiled.space, compiled.space.first, compiled.space.obeys.shape[0]
    follows, decided = goal.follows, goal.decided
    # The signatures of a legal plan are legal in every plan with the same meshes.
    hashes = draft.layout.hashes
    is_reshaped = hashes[0] != goal.meshes[0] or hashes[1] != goal.meshes[1]
    for group in range(max(0, (decided - 1 - first.signature) // num_axes), space.groups.shape[0]):
        begin = first.signature + group * num_axes
        is_touched = is_reshaped
        for slot in range(begin, begin + num_axes):
            if slot >= decided:
                value[slot] = follows[slot]
                if goal.goes_on and goal.asked[slot]:
                    likewise = _likewise(space, goal.flow, value, slot)
                    value[slot] = likewise if likewise >= 0 else follows[slot]
            is_touched = is_touched or value[slot] != follows[slot]
        for slot in range(begin, begin + num_axes):
            if is_touched and slot >= decided:
                value[slot] = _settled(compiled, value, slot, value[slot], draft)
            pick(space, group, slot - begin, value[slot], draft)


@borrowing(void(SPACE, int64[::1], SCRATCH), inner=True)
def _set_skeleton(space, value, scratch):
    """Prepares the workspace for the slots of a plan, [slots], before its signatures; the draft has their layout."""
    one, two = SEEDS
    for slot in range(space.first.signature):
        if slot < space.first.cut or not is_idle(space, slot, scratch.workspace.draft.layout):
            one, two = mix(one, two, value[slot])
    scratch.skeleton[0], scratch.skeleton[1] = one, two
    scratch.has_costs[0] = False


@borrowing(void(COMPILED, int64[::1], SCRATCH, float64[::1]), inner=True)
def _price_anew(compiled, value, scratch, out):
    """Writes seconds and overflow of a complete plan whose skeleton is set and whose signatures are picked.

    If the plan priced last has the same skeleton, only units whose signatures changed, and the units after them, are
    priced.

    Args:
        value: [slots] the plan.
        out: [2] written.
    """
    space, workspace, hashes = compiled.space, scratch.workspace, scratch.hashes
    draft = workspace.draft
    # A plan with unlike shares is priced once for every kind of device, so nothing can be reused.
    if scratch.has_costs[0] and value[space.first.shares] == 0:
        for kind in range(hashes.shape[0]):
            if hashes[kind, 0] != draft.hashes[kind, 0] or hashes[kind, 1] != draft.hashes[kind, 1]:
                cost_rows(compiled, kind, workspace)
        finish(compiled, workspace, True, out)
    else:
        set_rows(space, value, workspace)
        price_one(compiled, value, workspace, True, out)
    scratch.has_costs[0] = True
    for kind in range(hashes.shape[0]):
        hashes[kind, 0], hashes[kind, 1] = draft.hashes[kind, 0], draft.hashes[kind, 1]


@borrowing(void(COMPILED, KNOWN, int64[::1], SCRATCH, float64[::1]), inner=True)
def _price(compiled, known, value, scratch, out):
    """Writes seconds and overflow of a complete plan, [slots], whose skeleton is set and whose signatures are picked,
    into `out`, [2].

    One or two of the completions after a decision were priced at the decision before, and are read from the cache.
    """
    draft, cache = scratch.workspace.draft, compiled.cache
    one, two = scratch.skeleton[0], scratch.skeleton[1]
    for kind in range(draft.hashes.shape[0]):
        one, two = mix(one, two, draft.hashes[kind, 0])
        one, two = mix(one, two, draft.hashes[kind, 1])
    if not recall(cache, one, two, out):
        _price_anew(compiled, value, scratch, out)
        remember(cache, one, two, out)
    out[0] *= correction(known.corrections, value)


@borrowing(boolean(int64[::1], int64[::1], int64, int64), inner=True)
def _is_alike(one, other, begin, end):
    """Whether two plans have the same values in the slots from `begin` on, before `end`."""
    slot = begin
    while slot < end and one[slot] == other[slot]:
        slot += 1
    return slot == end


@borrowing(GOAL(EPISODES, KNOWN, int64, int64, boolean), inner=True, forceinline=True)
def _goal(episodes, known, number, follows, goes_on):
    """The rule for the slots after the slot to decide.

    Args:
        follows: number of the known plan to follow; -1: the best agreeing one.
        goes_on: see `Goal`.
    """
    plan, decided = follows if follows >= 0 else known.agreeing[number, 0], episodes.position[number] + 1
    return Goal(known.flow, known.values[plan], known.meshes[plan], episodes.asked[number], decided, goes_on)


@borrowing(types.UniTuple(int64, 2)(EPISODES, KNOWN, int64, int64, int64, boolean), inner=True)
def _hashes(episodes, known, number, place, follows, goes_on):
    """Two hashes of everything on which the completion after one legal value depends; arguments as for `_write`."""
    plan = follows if follows >= 0 else known.agreeing[number, 0]
    one, two = mix(episodes.hashes[number, 0], episodes.hashes[number, 1], episodes.legal[number, place])
    one, two = mix(one, two, known.hashes[plan, 0])
    one, two = mix(one, two, known.hashes[plan, 1])
    return mix(one, two, episodes.asks[number]) if goes_on else (one, two)


@borrowing(boolean(EPISODES, KNOWN, int64, int64), inner=True)
def _is_known(episodes, known, number, follows):
    """Whether the known plan `follows`, if it is not -1, is itself the completion of the plan `number`."""
    # The agreeing plan may have been replaced by another one since this plan was begun.
    slot = episodes.position[number]
    return (
        follows >= 0 and known.is_known[number] and _is_alike(known.values[follows], episodes.values[number], 0, slot)
    )


@borrowing(void(COMPILED, EPISODES, int64, SCRATCH), inner=True)
def _prepare(compiled, episodes, number, scratch):
    """Writes the layout and the decided signatures of a plan into the draft, unless they are there."""
    space, slot, draft = compiled.space, episodes.position[number], scratch.workspace.draft
    if not scratch.is_ready[0]:
        scratch.is_ready[0] = True
        decide_stages(space, episodes.values[number], slot, draft.layout)
        if slot >= space.first.signature:
            _set_skeleton(space, episodes.values[number], scratch)
            for j in range(space.first.signature, slot):
                decide(space, episodes.values[number], j, draft)


@borrowing(void(COMPILED, EPISODES, KNOWN, int64, int64, boolean, SCRATCH), inner=True)
def _write(compiled, episodes, known, number, place, goes_on, scratch):
    """Writes the completion after one legal value: into `Scratch.other` if it continues the decisions before it
    (`_likewise`), else into `Scratch.values`. Unless it is a known plan, the draft has its skeleton and signatures
    after that.

    Args:
        number: number of the plan.
        place: index of the value among the legal ones.
        goes_on: whether it continues the decisions before it.
    """
    space, draft, slot = compiled.space, scratch.workspace.draft, episodes.position[number]
    follows, value = scratch.best[place], scratch.other if goes_on else scratch.values[place]
    for j in range(slot):
        value[j] = episodes.values[number, j]
    if not goes_on:
        scratch.is_written[place] = True
        if _is_known(episodes, known, number, follows):
            for j in range(slot, value.shape[0]):
                value[j] = known.values[follows, j]
            return
    _prepare(compiled, episodes, number, scratch)
    goal = _goal(episodes, known, number, follows, goes_on)
    value[slot] = episodes.legal[number, place]
    if slot < space.first.signature:
        _complete_skeleton(compiled, goal, draft, value)
        _set_skeleton(space, value, scratch)
    _complete_signatures(compiled, goal, draft, value)


@borrowing(void(KNOWN, int64, int64[::1], float64), inner=True)
def _keep(known, number, value, seconds):
    """Stores a completion, [slots], as the fastest one of its plan that fits."""
    known.best_s[number] = seconds
    for slot in range(value.shape[0]):
        known.best_values[number, slot] = value[slot]


@borrowing(boolean(KNOWN, int64, float64[::1]), inner=True)
def _is_best(known, number, price):
    """Whether a completion with this price, [2], fits and is faster than the best one of its plan so far."""
    return price[1] <= 0.0 and price[0] < known.best_s[number]


@borrowing(void(COMPILED, EPISODES, KNOWN, int64, int64, SCRATCH), inner=True)
def _complete(compiled, episodes, known, number, place, scratch):
    """Prices the completion that follows the known plans after one legal value, which has the index `place`."""
    follows, out, is_corrected = scratch.best[place], known.completed[number, place], known.corrections.num_tried[0] > 0
    scratch.is_written[place] = False
    if _is_known(episodes, known, number, follows):
        out[0], out[1] = known.prices[follows, 0], known.prices[follows, 1]
    else:
        known.priced[0] += 1
        one, two = _hashes(episodes, known, number, place, follows, False)
        if is_corrected or not recall(compiled.cache, one, two, out):
            _write(compiled, episodes, known, number, place, False, scratch)
            _price(compiled, known, scratch.values[place], scratch, out)
            if not is_corrected:
                remember(compiled.cache, one, two, out)
    if _is_best(known, number, out):
        if not scratch.is_written[place]:
            _write(compiled, episodes, known, number, place, False, scratch)
        _keep(known, number, scratch.values[place], out[0])


@borrowing(boolean(COMPILED, EPISODES, KNOWN, int64, int64, SCRATCH), inner=True)
def _price_likewise(compiled, episodes, known, number, place, scratch):
    """Writes the completion by `_likewise` into `Scratch.other` and its price into `Scratch.price`; returns False if it
    is the same as the one that follows the known plans. Arguments as for `_complete`."""
    value, other, slot = scratch.values[place], scratch.other, episodes.position[number]
    if not scratch.is_written[place]:
        _write(compiled, episodes, known, number, place, False, scratch)
    _write(compiled, episodes, known, number, place, True, scratch)
    if _is_alike(value, other, slot + 1, value.shape[0]):
        return False
    _price(compiled, known, other, scratch, scratch.price)
    return True


@borrowing(void(COMPILED, EPISODES, KNOWN, int64, int64, SCRATCH), inner=True)
def _go_on(compiled, episodes, known, number, place, scratch):
    """Prices the completion by `_likewise` after one legal value of a signature, if it differs from that of
    `_complete`, and stores its price if that is better. Arguments as for `_complete`."""
    follows, out, price = scratch.best[place], known.completed[number, place], scratch.price
    is_written, is_corrected = False, known.corrections.num_tried[0] > 0
    one, two = _hashes(episodes, known, number, place, follows, True)
    if is_corrected or not recall(compiled.cache, one, two, price):
        is_written = True
        if not _price_likewise(compiled, episodes, known, number, place, scratch):
            price[0] = NOT_ANOTHER
        if not is_corrected:
            remember(compiled.cache, one, two, price)
    if price[0] == NOT_ANOTHER:
        return
    known.priced[0] += 1
    if _is_best(known, number, price):
        if not is_written:
            _write(compiled, episodes, known, number, place, True, scratch)
        _keep(known, number, scratch.other, price[0])
    if worth(price[0], price[1], known.reference_s) < worth(out[0], out[1], known.reference_s):
        out[0], out[1] = price[0], price[1]


@borrowing(void(COMPILED, EPISODES, KNOWN, int64, SCRATCH), inner=True)
def _complete_one(compiled, episodes, known, number, scratch):
    """Prices the completions after every legal value of the slot to decide of one plan; see `step_and_complete`."""
    slot, worths = episodes.position[number], known.worth[number]
    compare(episodes, known, number)
    find_best(episodes, known, number, scratch.places, scratch.best)
    scratch.is_ready[0] = False
    preferred = known.values[known.agreeing[number, 0], slot]
    known.least[number] = np.inf
    for i in range(episodes.offered[number]):
        known.is_followed[number, i] = episodes.legal[number, i] == preferred
        _complete(compiled, episodes, known, number, i, scratch)
    if slot >= compiled.space.first.signature:
        # These completions are priced one after another, since consecutive ones have more units in common.
        for i in range(episodes.offered[number]):
            _go_on(compiled, episodes, known, number, i, scratch)
    for i in range(episodes.offered[number]):
        worths[i] = worth(known.completed[number, i, 0], known.completed[number, i, 1], known.reference_s)
        known.least[number] = min(known.least[number], worths[i])


@borrowing(void(COMPILED, LOWER_BOUNDS, EPISODES, KNOWN, int64[::1], SCRATCH), inner=True)
def _step_and_complete(compiled, bounds, episodes, known, actions, scratch):
    follow_known(episodes, known, actions)
    for number in range(actions.shape[0]):
        step_one(compiled, bounds, episodes, number, actions[number], scratch.workspace)
        if episodes.position[number] < episodes.values.shape[1] and actions[number] != WAIT:
            _complete_one(compiled, episodes, known, number, scratch)


@kernel(void(COMPILED, LOWER_BOUNDS, EPISODES, KNOWN, int64[::1]))
def step_and_complete(compiled, bounds, episodes, known, actions):
    """Takes one decision of every plan as `step_many` does, and prices completions after the values of the next one.

    Slots that are not asked follow the best known plan that agrees with the decisions. Each plan is decided and then
    completed before the next one, while what is known of its units is in the processor's caches.

    For a signature there are two completions: by the known plan, and by `_likewise`, which continues the decisions
    before. The better one counts, since sharding often saves time only if several operators are sharded together.

    Args:
        compiled, bounds: of the space; the cache is read and written.
        episodes: the plans; read and written.
        known: `completed`, `worth`, `least`, `is_followed`, `best_values` and `best_s` are written.
        actions: [episodes] see `step_many`.
    """
    workspace, num_slots = new_workspace(compiled), episodes.values.shape[1]
    scratch = Scratch(
        workspace=workspace,
        values=np.empty((episodes.legal.shape[1], num_slots), np.int64),
        is_written=np.empty(episodes.legal.shape[1], np.bool_),
        is_ready=np.empty(1, np.bool_),
        other=np.empty(num_slots, np.int64),
        price=np.empty(2),
        hashes=np.empty_like(workspace.draft.hashes),
        skeleton=np.empty(2, np.int64),
        has_costs=np.zeros(1, np.bool_),
        places=np.full(compiled.space.scalars.most_values, -1),
        best=np.empty(episodes.legal.shape[1], np.int64),
    )
    _step_and_complete(compiled, bounds, episodes, known, actions, scratch)

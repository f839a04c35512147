"""Completions: each partial plan completed as in the best known plan that agrees with it, and the price of the result.

`automap.bounds.kernels.step_many` gives lower bounds of all completions of a partial plan. This module gives an upper
bound: for every legal value of the next decision, the best known plan that agrees with all decisions so far is followed
to the end. Units: seconds; memory as share of capacity (overflow).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import boolean, float64, int64, types, void

from automap.bounds.kernels.completion_rules import GOAL, Goal, complete_signatures, complete_skeleton
from automap.bounds.kernels.corrections import correction
from automap.bounds.kernels.cut_bounds import LOWER_BOUNDS
from automap.bounds.kernels.known_plans import KNOWN, compare, find_best, follow_known, worth
from automap.bounds.kernels.step_many import EPISODES, WAIT, step_one
from automap.jit import borrowing, kernel
from automap.price.kernels.array_types import Floats2, Ints, Ints2, Mask, tuple_type
from automap.price.kernels.hashes import SEEDS, mix
from automap.space.kernels.known_prices import recall, remember
from automap.space.kernels.layout import decide_stages
from automap.space.kernels.price_one import cost_rows, finish, price_one
from automap.space.kernels.records import COMPILED, SPACE
from automap.space.kernels.stepper import decide, is_idle
from automap.space.kernels.workspace import Workspace, new_workspace, set_rows

NOT_PRICED = -2.0
"""In place of seconds: a completion that is not priced yet."""
NOT_ANOTHER = -1.0
"""In place of seconds: the completion by `likewise` is the same as the one that follows the known plans."""


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
    prices: Floats2
    """[most, 2] for each legal value, seconds and overflow of the other completion, if there is one."""
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


SCRATCH = tuple_type(Scratch)
"""Numba's type of `Scratch`."""


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
    (`likewise`), else into `Scratch.values`. Unless it is a known plan, the draft has its skeleton and signatures
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
        complete_skeleton(compiled, goal, draft, value)
        _set_skeleton(space, value, scratch)
    complete_signatures(compiled, goal, draft, value)


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
def _look_up(compiled, episodes, known, number, place, scratch):
    """Writes the price of the completion that follows the known plans after one legal value, which has the index
    `place`, if it is a known plan or in the cache; else NOT_PRICED in place of seconds."""
    follows, out = scratch.best[place], known.completed[number, place]
    scratch.is_written[place] = False
    out[0] = NOT_PRICED
    if _is_known(episodes, known, number, follows):
        out[0], out[1] = known.prices[follows, 0], known.prices[follows, 1]
    else:
        known.priced[0] += 1
        if known.corrections.num_tried[0] == 0:
            one, two = _hashes(episodes, known, number, place, follows, False)
            recall(compiled.cache, one, two, out)


@borrowing(void(COMPILED, EPISODES, KNOWN, int64, int64, SCRATCH), inner=True)
def _complete(compiled, episodes, known, number, place, scratch):
    """Prices the completion after one legal value, unless `_look_up` found its price, and keeps it if it is the best.
    Arguments as for `_look_up`."""
    out = known.completed[number, place]
    if out[0] == NOT_PRICED:
        _write(compiled, episodes, known, number, place, False, scratch)
        _price(compiled, known, scratch.values[place], scratch, out)
        if known.corrections.num_tried[0] == 0:
            one, two = _hashes(episodes, known, number, place, scratch.best[place], False)
            remember(compiled.cache, one, two, out)
    if _is_best(known, number, out):
        if not scratch.is_written[place]:
            _write(compiled, episodes, known, number, place, False, scratch)
        _keep(known, number, scratch.values[place], out[0])


@borrowing(boolean(COMPILED, EPISODES, KNOWN, int64, int64, SCRATCH), inner=True)
def _price_likewise(compiled, episodes, known, number, place, scratch):
    """Writes the completion by `likewise` into `Scratch.other` and its price into `Scratch.prices`; returns False if
    it is the same as the one that follows the known plans. Arguments as for `_look_up`."""
    value, other, slot = scratch.values[place], scratch.other, episodes.position[number]
    if not scratch.is_written[place]:
        _write(compiled, episodes, known, number, place, False, scratch)
    _write(compiled, episodes, known, number, place, True, scratch)
    if _is_alike(value, other, slot + 1, value.shape[0]):
        return False
    _price(compiled, known, other, scratch, scratch.prices[place])
    return True


@borrowing(void(COMPILED, EPISODES, KNOWN, int64, int64, SCRATCH), inner=True)
def _go_on(compiled, episodes, known, number, place, scratch):
    """Prices the completion by `likewise` after one legal value of a signature, if it differs from that of
    `_complete`, and stores its price if that is better. Arguments as for `_look_up`."""
    out, price, is_written = known.completed[number, place], scratch.prices[place], False
    if price[0] == NOT_PRICED:
        is_written = True
        if not _price_likewise(compiled, episodes, known, number, place, scratch):
            price[0] = NOT_ANOTHER
        if known.corrections.num_tried[0] == 0:
            one, two = _hashes(episodes, known, number, place, scratch.best[place], True)
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
    slot, worths, count = episodes.position[number], known.worth[number], episodes.offered[number]
    compare(episodes, known, number)
    find_best(episodes, known, number, scratch.places, scratch.best)
    scratch.is_ready[0] = False
    preferred = known.values[known.agreeing[number, 0], slot]
    known.least[number] = np.inf
    # All completions are looked up before one is priced, so that the processor waits for their memory at the same time.
    for i in range(count):
        known.is_followed[number, i] = episodes.legal[number, i] == preferred
        _look_up(compiled, episodes, known, number, i, scratch)
    for i in range(count):
        _complete(compiled, episodes, known, number, i, scratch)
    if slot >= compiled.space.first.signature:
        for i in range(count):
            scratch.prices[i, 0] = NOT_PRICED
            if known.corrections.num_tried[0] == 0:
                one, two = _hashes(episodes, known, number, i, scratch.best[i], True)
                recall(compiled.cache, one, two, scratch.prices[i])
        # These completions are priced one after another, since consecutive ones have more units in common.
        for i in range(count):
            _go_on(compiled, episodes, known, number, i, scratch)
    for i in range(count):
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

    For a signature there are two completions: by the known plan, and by `likewise`, which continues the decisions
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
        prices=np.empty((episodes.legal.shape[1], 2)),
        hashes=np.empty_like(workspace.draft.hashes),
        skeleton=np.empty(2, np.int64),
        has_costs=np.zeros(1, np.bool_),
        places=np.full(compiled.space.scalars.most_values, -1),
        best=np.empty(episodes.legal.shape[1], np.int64),
    )
    _step_and_complete(compiled, bounds, episodes, known, actions, scratch)

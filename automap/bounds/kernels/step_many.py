"""Many plans that are decided at the same time, each with lower bounds for every legal value of its next decision.

All bounds are admissible: no completion is faster or needs less memory. There are three kinds of bounds, by the slot
that is decided:

- *Shape*: they come from a tree over shapes. They stay the same while schedule, order and devices are decided.
- *Cuts*: they come from the least costs of units on the ranks.
- *Recomputation, ZeRO stage and signatures*: they come from the rows of `Workspace`, priced with the least cost of all
  undecided slots.

Units: seconds; memory as share of capacity (overflow).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import boolean, float64, int64, void

from automap.bounds.kernels.cut_bounds import LOWER_BOUNDS, find_least, find_rest, look_at_cut
from automap.bounds.kernels.unit_lower_bounds import pick_forced
from automap.jit import borrowing, kernel
from automap.price.kernels.array_types import Floats2, Floats3, Ints, Ints2, Mask2, tuple_type
from automap.price.kernels.hashes import SEEDS, mix
from automap.space.kernels.draft import DRAFT, pick, pick_all
from automap.space.kernels.known_prices import recall, remember
from automap.space.kernels.layout import decide_stages
from automap.space.kernels.masks import shape_node
from automap.space.kernels.price_one import cost_rows, finish, price_one
from automap.space.kernels.records import COMPILED, SPACE
from automap.space.kernels.stepper import decide, legal_values
from automap.space.kernels.workspace import WORKSPACE, new_workspace, set_rows

BEGIN, WAIT = -1, -2
"""Actions that decide nothing: begin a new plan; leave the plan as it is."""
STALE, PRICE = -1, -2
"""In place of the next value in hashes of cached bounds. STALE: no next value is decided; PRICE: all slots are."""
NOT_BOUNDED = -1.0
"""In place of seconds: a bound that is not computed yet."""
FEWEST_CUTS = 8
"""Least number of ends that are offered for a chunk, if it has so many legal ones, in pipelines of any length
(assumed)."""


class EpisodeArrays(NamedTuple):
    """Plans being decided. After its last decision, the rows of a plan stay as they are."""

    values: Ints2
    """[episodes, slots] values, decided before `position`."""
    position: Ints
    """[episodes] slot to decide; the number of slots where a plan is complete."""
    hashes: Ints2
    """[episodes, 2] two hashes of the decided values."""
    asks: Ints
    """[episodes] hash of `asked` when the plan was begun."""
    bound: Floats2
    """[episodes, 2] lower bounds on seconds and overflow of all completions; the price of a complete plan."""
    legal: Ints2
    """[episodes, most] legal values of the slot to decide, ascending."""
    offered: Ints
    """[episodes] number of these values."""
    action_bounds: Floats3
    """[episodes, most, 2] lower bounds on seconds and overflow after each legal value."""
    preferred: Ints2
    """[episodes, slots] preferred values of slots that are not asked."""
    asked: Mask2
    """[episodes, slots] whether the slot is decided by an action; all other slots take their preferred values."""
    num_cuts: int
    """Number of cuts that are offered along a pipeline. They are divided among the ends of chunks, each of which is
    offered the most even ones."""
    free_ranks: int
    """Ranks of the longest pipeline in which each rank may have any level of recomputation. In longer pipelines a rank,
    except for the last one, recomputes no more than the one before it."""


EPISODES = tuple_type(EpisodeArrays)
"""Numba's type of `EpisodeArrays`."""


@borrowing(void(float64[::1], float64, float64), inner=True)
def _tighten(bound, seconds, over):
    """Raises a bound, [2], to new seconds and overflow where these are higher."""
    bound[0] = max(bound[0], seconds)
    bound[1] = max(bound[1], over)


@borrowing(int64(COMPILED, EPISODES, int64, int64, DRAFT), inner=True)
def _offer(compiled, episodes, number, slot, draft):
    """Writes the legal values of a slot that are offered into `episodes.legal`; returns how many there are."""
    space, value, legal = compiled.space, episodes.values[number], episodes.legal[number]
    mask, num_ranks = draft.mask, draft.layout.frame[0].num_ranks
    num_values = legal_values(compiled, value, slot, draft)
    rank = slot - space.first.recompute
    if slot < space.first.zero and 0 < rank < num_ranks - 1 and episodes.free_ranks < num_ranks:
        before = value[slot - 1]
        if mask[: before + 1].any():
            mask[before + 1 : num_values] = False
    most = legal.shape[0]
    if space.first.cut <= slot < space.first.recompute:
        most = min(most, max(FEWEST_CUTS, episodes.num_cuts // draft.layout.frame[0].num_chunks))
    found = 0
    for v in range(min(most, num_values)):
        if mask[v]:
            legal[found] = v
            found += 1
    return found


@borrowing(void(COMPILED, int64[::1], int64, int64, WORKSPACE, float64[::1]), inner=True)
def _look_at_level(compiled, value, slot, level, workspace, out):
    """Writes lower bounds after a level of recomputation of a rank, over all levels of later ranks and ZeRO stages.

    Args:
        value: [slots], those before `slot` are decided; the others are scratch.
        level: the level.
        workspace: with the forced signatures, see `_prepare`.
        out: [2] seconds, overflow; written.
    """
    space, frame = compiled.space, workspace.draft.layout.frame[0]
    value[slot] = level
    value[slot + 1 : space.first.recompute + frame.num_ranks] = space.levels.shape[0] - 1
    set_rows(space, value, workspace)
    cost_rows(compiled, -1, workspace)
    seconds, over = np.inf, np.inf
    for zero in range(4):
        if space.zeros[:, zero].any() if frame.has_replicas else zero == 0:
            workspace.settings[0].zero_stage = zero
            finish(compiled, workspace, False, out)
            seconds, over = min(seconds, out[0]), min(over, out[1])
    out[0], out[1] = seconds, over


@borrowing(void(COMPILED, LOWER_BOUNDS, int64[::1], int64, WORKSPACE), inner=True)
def _prepare(compiled, bounds, value, slot, workspace):
    """Makes a workspace with the layout of a partial plan ready for `_look_behind`.

    Args:
        value: [slots], those before `slot` are decided; the others are scratch.
        slot: the slot to decide, or the number of slots.
    """
    space, frame = compiled.space, workspace.draft.layout.frame[0]
    if slot < space.first.recompute:
        find_least(space, bounds, value, workspace)
        workspace.rest[:] = 0.0
        if frame.num_chunks == frame.num_ranks:
            find_rest(bounds, workspace, slot - space.first.cut + 1)
    elif slot < space.first.zero:
        pick_forced(compiled, workspace.draft)
    elif slot == space.first.zero:
        value[slot] = 0
        set_rows(space, value, workspace)
        pick_forced(compiled, workspace.draft)
        cost_rows(compiled, -1, workspace)
    else:
        set_rows(space, value, workspace)
        pick_all(space, value, slot, workspace.draft)
        if slot < value.shape[0]:
            cost_rows(compiled, -1, workspace)


@borrowing(void(COMPILED, LOWER_BOUNDS, int64[::1], int64, int64, WORKSPACE, float64[::1]), inner=True)
def _look_behind(compiled, bounds, value, slot, chosen, workspace, out):
    """Writes lower bounds after one value of a slot; the workspace must be prepared by `_prepare`.

    Args:
        value: [slots], those before `slot` are decided; the others are scratch.
        chosen: the value of the slot.
        out: [2] seconds, overflow; written.
    """
    space = compiled.space
    if slot < space.first.recompute:
        look_at_cut(space, bounds, slot, chosen, workspace, out)
    elif slot < space.first.zero:
        _look_at_level(compiled, value, slot, chosen, workspace, out)
    elif slot == space.first.zero:
        workspace.settings[0].zero_stage = chosen
        finish(compiled, workspace, False, out)
    else:
        group, axis = divmod(slot - space.first.signature, workspace.incoming.shape[0])
        pick(space, group, axis, chosen, workspace.draft)
        cost_rows(compiled, workspace.draft.types[group], workspace)
        finish(compiled, workspace, False, out)


@borrowing(void(COMPILED, LOWER_BOUNDS, EPISODES, int64, int64, boolean, WORKSPACE), inner=True)
def _look(compiled, bounds, episodes, number, slot, is_ready, workspace):
    """Writes the bounds after each legal value of a slot into `episodes.action_bounds`.

    Args:
        number: number of the plan.
        slot: the slot.
        is_ready: whether the workspace is prepared, see `_prepare`.
    """
    space, first, value = compiled.space, compiled.space.first, episodes.values[number]
    legal, ahead, bound = episodes.legal[number], episodes.action_bounds[number], episodes.bound[number]
    count, hashes = episodes.offered[number], episodes.hashes[number]
    if slot < first.schedule:
        child = space.shape_nodes[shape_node(space, value, slot)].first_child
        for i in range(count):
            while space.shape_nodes[child].value != legal[i]:
                child += 1
            ahead[i, 0], ahead[i, 1] = bounds.nodes[child, 0], bounds.nodes[child, 1]
    elif first.cut <= slot:
        # All values are looked up before one is bounded, so that the processor waits for their memory at the same time.
        for i in range(count):
            ahead[i, 0] = NOT_BOUNDED
            one, two = mix(hashes[0], hashes[1], legal[i])
            recall(compiled.cache, one, two, ahead[i])
        for i in range(count):
            if ahead[i, 0] == NOT_BOUNDED:
                one, two = mix(hashes[0], hashes[1], legal[i])
                if not is_ready:
                    _prepare(compiled, bounds, value, slot, workspace)
                    is_ready = True
                _look_behind(compiled, bounds, value, slot, legal[i], workspace, ahead[i])
                remember(compiled.cache, one, two, ahead[i])
    else:
        # For all other kinds of decisions there is no sharper bound.
        for i in range(count):
            ahead[i, 0], ahead[i, 1] = bound[0], bound[1]
    for i in range(count):
        _tighten(ahead[i], bound[0], bound[1])


@borrowing(void(SPACE, LOWER_BOUNDS, EPISODES, int64, int64), inner=True)
def _accept(space, bounds, episodes, number, picked):
    """Decides the next slot; for a slot of the shape, also raises the bound to that of the node of the shape tree."""
    slot, hashes = episodes.position[number], episodes.hashes[number]
    episodes.values[number, slot] = picked
    episodes.position[number] = slot + 1
    hashes[0], hashes[1] = mix(hashes[0], hashes[1], picked)
    if slot < space.first.schedule:
        node = shape_node(space, episodes.values[number], slot + 1)
        _tighten(episodes.bound[number], bounds.nodes[node, 0], bounds.nodes[node, 1])


@borrowing(int64(SPACE, EPISODES, int64, int64, int64), inner=True)
def _unasked(space, episodes, number, slot, count):
    """The value of a slot that is not asked: the preferred one if it is legal, else the one that keeps operators whole
    or the nearest level of recomputation, else the first legal one."""
    legal, wanted = episodes.legal[number], episodes.preferred[number, slot]
    is_level = space.first.recompute <= slot < space.first.zero
    whole = -1
    if slot >= space.first.signature:
        whole = space.groups[(slot - space.first.signature) // space.obeys.shape[0]].whole
    found = legal[0]
    for i in range(count):
        if legal[i] == wanted:
            return legal[i]
        # Of two levels at equal distance the heavier one is taken, which comes later; see `nearest_legal`.
        if legal[i] == whole or (is_level and abs(legal[i] - wanted) <= abs(found - wanted)):
            found = legal[i]
    return found


@borrowing(boolean(SPACE, LOWER_BOUNDS, EPISODES, int64, int64), inner=True)
def _take(space, bounds, episodes, number, action):
    """Takes an action; returns whether the plan must be advanced."""
    bound = episodes.bound[number]
    if action == BEGIN:
        hashes, asked = episodes.hashes[number], episodes.asked[number]
        episodes.position[number] = 0
        one, two = SEEDS
        hashes[0], hashes[1] = one, two
        for slot in range(asked.shape[0]):
            one, two = mix(one, two, int64(asked[slot]))
        episodes.asks[number] = one ^ two
        bound[0], bound[1] = bounds.nodes[0, 0], bounds.nodes[0, 1]
    elif action == WAIT or episodes.position[number] == episodes.values.shape[1]:
        return False
    elif action >= 0:
        _accept(space, bounds, episodes, number, episodes.legal[number, action])
        ahead = episodes.action_bounds[number, action]
        bound[0], bound[1] = ahead[0], ahead[1]
    episodes.offered[number] = 0
    return True


@borrowing(void(COMPILED, LOWER_BOUNDS, EPISODES, int64, int64, WORKSPACE), inner=True)
def step_one(compiled, bounds, episodes, number, action, workspace):
    """Takes one action of `step_many` for one plan, fills in slots with one legal value and slots that are not asked,
    then bounds the values of the next slot."""
    if not _take(compiled.space, bounds, episodes, number, action):
        return
    space, value, bound = compiled.space, episodes.values[number], episodes.bound[number]
    first, hashes = space.first, episodes.hashes[number]
    begin = episodes.position[number]
    decide_stages(space, value, begin, workspace.draft.layout)
    # The legal signatures of a group depend on those of the same group on other axes alone.
    for slot in range(begin - max(0, begin - first.signature) % space.obeys.shape[0], begin):
        decide(space, value, slot, workspace.draft)
    is_ready, is_stale = False, False
    for slot in range(begin, value.shape[0] + 1):
        if slot == value.shape[0]:
            one, two = mix(hashes[0], hashes[1], PRICE)
            if not recall(compiled.cache, one, two, bound):
                _prepare(compiled, bounds, value, slot, workspace)
                price_one(compiled, value, workspace, True, bound)
                remember(compiled.cache, one, two, bound)
            return
        count = _offer(compiled, episodes, number, slot, workspace.draft)
        if count > 1 and episodes.asked[number, slot]:
            break
        picked = episodes.legal[number, 0] if count == 1 else _unasked(space, episodes, number, slot, count)
        _accept(space, bounds, episodes, number, picked)
        decide(space, value, slot, workspace.draft)
        is_stale = is_stale or slot >= first.zero
    episodes.offered[number] = count
    if slot >= first.signature and is_stale:
        one, two = mix(hashes[0], hashes[1], STALE)
        if not recall(compiled.cache, one, two, workspace.seen):
            _prepare(compiled, bounds, value, slot, workspace)
            is_ready = True
            finish(compiled, workspace, False, workspace.seen)
            remember(compiled.cache, one, two, workspace.seen)
        _tighten(bound, workspace.seen[0], workspace.seen[1])
    _look(compiled, bounds, episodes, number, slot, is_ready, workspace)


@borrowing(void(COMPILED, LOWER_BOUNDS, EPISODES, int64[::1], WORKSPACE), inner=True)
def _step_all(compiled, bounds, episodes, actions, workspace):
    for number in range(actions.shape[0]):
        step_one(compiled, bounds, episodes, number, actions[number], workspace)


@kernel(void(COMPILED, LOWER_BOUNDS, EPISODES, int64[::1]))
def step_many(compiled, bounds, episodes, actions):
    """Takes one action for every plan, fills in slots that are forced or not asked, and bounds the next decision.

    Args:
        compiled: whose cache is read and written.
        bounds: of the space.
        episodes: read and written.
        actions: [episodes] index into `episodes.legal`, or `BEGIN` or `WAIT`; a complete plan waits for `BEGIN`.
    """
    _step_all(compiled, bounds, episodes, actions, new_workspace(compiled))

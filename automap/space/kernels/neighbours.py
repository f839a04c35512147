"""Neighbours of plans, many in one compiled call: some decisions change, all others are kept where they stay legal.

A move first determines the values that it requires (`_require`). Then all slots are decided again in their order
(`_settle_plan`): each takes the required value, or else its old value, or the nearest legal value if that one is not
legal. The ends of chunks stay at the same units, even if the values for them change.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import boolean, float64, int64, uint64, void

from automap.jit import borrowing, kernel
from automap.price.kernels.array_types import Floats, Ints, Ints2, Mask, tuple_type
from automap.space.kernels.cuts import cut_number, nth_cut
from automap.space.kernels.draft import DRAFT, new_draft
from automap.space.kernels.layout import LAYOUT, Layout, cut_window, decide_stages, may_differ, new_layout
from automap.space.kernels.levels import nearest_legal
from automap.space.kernels.records import COMPILED, SPACE
from automap.space.kernels.stepper import active_slots, decide, legal_values

M_ONE, M_TWO, M_SHIFT, M_SLIDE, M_DEVICES, M_MODE, M_GROUP, M_PAIR, M_BORROW, M_BATCH, M_SHAPE = range(11)
"""Kinds of moves, by the decisions that they change. ONE, TWO: one or two slots. SHIFT: one end of a chunk. SLIDE: all
ends between two chunks, by the same number of units. DEVICES: devices move from one stage to another. MODE: the
recomputation of all ranks. GROUP: the signatures of a linkage group on all axes. PAIR: the signatures of two
neighbouring groups on one axis. BORROW: the signatures of some groups become those of another plan. BATCH:
micro-batches or virtual stages. SHAPE: the shape becomes that of another plan."""
M_COUNT = 11
"""Number of kinds of moves."""
TRIES = 8
"""Largest number of moves that are drawn until one changes the plan (assumed)."""
MOST_SHIFTED = 2
"""Largest number of units by which an end is shifted (assumed)."""
ANOTHER = 1 << 62
"""In place of a required value: a random legal value other than the present one."""


class Move(NamedTuple):
    """One move of one plan; memory of one caller."""

    state: Annotated[npt.NDArray[np.uint64], uint64[::1]]
    """[1] state of the random numbers."""
    layout: Layout
    """Layout of the plan before the move."""
    donor: Layout
    """Layout of the plan from which decisions are borrowed."""
    required: Ints
    """[slots] value that the move requires of each slot, or `ANOTHER`."""
    ends: Ints
    """[chunks] ends of chunks that the move requires."""
    is_even: Mask
    """[1] whether chunks are cut evenly instead."""


MOVE = tuple_type(Move)
"""Numba's type of `Move`."""


@borrowing(float64(uint64[::1]), inner=True)
def _number(state):
    """A number in [0, 1), by xorshift64* (arXiv 1402.6246)."""
    x = state[0]
    x ^= x >> uint64(12)
    x ^= x << uint64(25)
    x ^= x >> uint64(27)
    state[0] = x
    return float64((x * uint64(2685821657736338717)) >> uint64(11)) * (1.0 / 9007199254740992.0)


@borrowing(int64(uint64[::1], int64), inner=True)
def _below(state, count):
    """A whole number in [0, count)."""
    return int64(_number(state) * count)


@borrowing(void(int64[::1], LAYOUT), inner=True)
def _copy_ends(ends, layout):
    """Writes the ends of all chunks of a layout."""
    for chunk in range(layout.frame[0].num_chunks):
        ends[chunk] = layout.ends[chunk]


@borrowing(int64(uint64[::1], boolean[::1], int64), inner=True)
def _another(state, mask, present):
    """A random legal value other than the present one, or the present one if there is no other."""
    legal = 0
    for value in range(mask.shape[0]):
        legal += mask[value] and value != present
    if legal == 0:
        return present
    left = _below(state, legal)
    for value in range(mask.shape[0]):
        if mask[value] and value != present:
            if left == 0:
                return value
            left -= 1
    return present


@borrowing(int64(SPACE, int64[::1], LAYOUT, uint64[::1]), inner=True)
def _active(space, value, layout, state):
    """A random slot that decides something: its kind by fixed probabilities, and uniform within the kind."""
    number = _number(state)
    for kind in range(space.moved.shape[0] - 1):
        if number < space.moved[kind].until and space.first[kind] < space.first[kind + 1]:
            begin, count = active_slots(space, value, space.first[kind], layout)
            if count > 0:
                return begin + (_below(state, count) if space.moved[kind].is_numbered else 0)
    return _sharding(space, layout.most_ranks, state)


@borrowing(int64(SPACE, float64[::1], uint64[::1]), inner=True)
def _sharding(space, most_ranks, state):
    """A random signature slot on an axis of several ranks; the slot of the ZeRO stage if there is no such axis."""
    num_axes = most_ranks.shape[0]
    several = 0
    for axis in range(num_axes):
        several += most_ranks[axis] > 1.0
    if several == 0 or space.groups.shape[0] == 0:
        return space.first.zero
    left = _below(state, several)
    at = 0
    for axis in range(num_axes):
        if most_ranks[axis] > 1.0:
            if left == 0:
                at = axis
            left -= 1
    return space.first.signature + _below(state, space.groups.shape[0]) * num_axes + at


@borrowing(int64(SPACE, MOVE), inner=True)
def _drawn_steps(space, move):
    """Random steps by which a level of recomputation changes: one or two units of a chunk, up or down."""
    num_chunks, num_units = move.layout.frame[0].num_chunks, space.units.shape[0]
    a_unit = max(1, -(-space.scalars.level_steps * num_chunks // num_units))
    by = a_unit * (1 + _below(move.state, 2))
    return by if _number(move.state) < 0.5 else -by


@borrowing(void(SPACE, int64, MOVE), inner=True)
def _vary(space, slot, move):
    """Requires another value of a slot. An end of a chunk stays between its neighbours; a level often changes by few
    steps."""
    chunk, ends, first = slot - space.first.cut, move.ends, space.first
    if first.cut <= slot < first.recompute:
        start = ends[chunk - 1] if chunk > 0 else 0
        ends[chunk] = start + 1 + _below(move.state, ends[chunk + 1] - start - 1)
    elif first.recompute <= slot < first.zero and _number(move.state) < 0.5:
        move.required[slot] += _drawn_steps(space, move)
    else:
        move.required[slot] = ANOTHER


@borrowing(void(SPACE, MOVE), inner=True)
def _change_levels(space, move):
    """Requires the same mode or level on all ranks, or a little more or less recomputation on each."""
    begin, number = space.first.recompute, _number(move.state)
    by, level = _drawn_steps(space, move), _below(move.state, space.legal_levels.shape[1])
    mode = _below(move.state, space.modes.shape[0]) * space.scalars.level_steps
    for slot in range(begin, begin + move.layout.frame[0].num_ranks):
        if number < 0.3:
            move.required[slot] += by
        else:
            move.required[slot] = mode if number < 0.7 else level


@borrowing(void(SPACE, MOVE), inner=True)
def _hand_over(space, move):
    """Requires that devices move from one stage to another; the last stage has the remaining devices."""
    stages, part = move.layout.frame[0].num_ranks, space.scalars.part
    one, two = _below(move.state, stages), _below(move.state, stages)
    by = part * (1 + _below(move.state, 2))
    even = space.scalars.num_devices // stages
    for stage in range(stages - 1):
        mine = move.layout.devices[stage] + (by if stage == one else 0) - (by if stage == two else 0)
        is_unlike = 0 < mine < space.scalars.num_devices and mine != even
        move.required[space.first.devices + stage] = mine // part if is_unlike else 0


@borrowing(void(SPACE, int64[:, ::1], MOVE), inner=True)
def _change_batch(space, shapes, move):
    """Requires a shape with the same mesh that differs in micro-batches or in virtual stages."""
    count, virtual = space.first.micro_batches, space.first.virtual
    found = 0
    chosen = -1
    for row in range(shapes.shape[0]):
        alike = True
        for slot in range(count):
            alike = alike and shapes[row, slot] == move.required[slot]
        steps = abs(shapes[row, count] - move.required[count])
        turned = abs(shapes[row, virtual] - move.required[virtual])
        if alike and steps <= 2 and (steps == 0 or turned == 0) and steps + turned > 0:
            found += 1
            if _below(move.state, found) == 0:
                chosen = row
    if chosen >= 0:
        for slot in range(shapes.shape[1]):
            move.required[slot] = shapes[chosen, slot]


@borrowing(void(SPACE, int64, int64[::1], MOVE), inner=True)
def _change_group(space, kind, value, move):
    """Requires other signatures of a linkage group, on all axes, or of two neighbouring groups on one axis."""
    first, num_axes = space.first.signature, space.obeys.shape[0]
    slot = _sharding(space, move.layout.most_ranks, move.state)
    if slot < first:
        return
    group, axis = divmod(slot - first, num_axes)
    if kind == M_GROUP:
        move.required[first + group * num_axes : first + (group + 1) * num_axes] = ANOTHER
        return
    other = min(space.groups.shape[0] - 1, group + 1 + _below(move.state, 3))
    move.required[slot] = ANOTHER
    same = space.groups[group].num_values == space.groups[other].num_values
    same = same and space.groups[group].num_members == space.groups[other].num_members
    is_copied = same and _number(move.state) < 0.5
    move.required[first + other * num_axes + axis] = value[slot] if is_copied else ANOTHER


@borrowing(void(SPACE, int64[::1], int64[::1], MOVE), inner=True)
def _borrow_shape(space, value, donor, move):
    """Requires the shape and stages of a donor and, in half of the cases, also its modes, ZeRO stage and signatures."""
    first, num_axes, most_ranks = space.first, space.obeys.shape[0], move.layout.most_ranks
    old_ranks, num_ranks = move.layout.frame[0].num_ranks, move.donor.frame[0].num_ranks
    whole = _number(move.state) < 0.5
    for slot in range(first.cut):
        move.required[slot] = donor[slot]
    if move.donor.frame[0].num_chunks != move.layout.frame[0].num_chunks:
        _copy_ends(move.ends, move.donor)
    for rank in range(num_ranks):
        slot = first.recompute + rank
        move.required[slot] = donor[slot] if whole else value[first.recompute + rank * old_ranks // num_ranks]
    if whole:
        move.required[first.zero] = donor[first.zero]
    # A new axis gets the signatures of the donor, or those of another axis.
    other = _below(move.state, 2 * num_axes)
    is_donors = other >= num_axes or most_ranks[other] == 1.0
    for group in range(space.groups.shape[0]):
        at = first.signature + group * num_axes
        for axis in range(num_axes):
            if whole or (most_ranks[axis] == 1.0 and is_donors):
                move.required[at + axis] = donor[at + axis]
            elif most_ranks[axis] == 1.0:
                move.required[at + axis] = value[at + other]


@borrowing(void(SPACE, int64[::1], MOVE), inner=True)
def _borrow_groups(space, donor, move):
    """Requires the donor's signatures for a few neighbouring groups."""
    num_groups, num_axes = space.groups.shape[0], space.obeys.shape[0]
    begin = _below(move.state, num_groups)
    end = min(num_groups, begin + 1 + _below(move.state, 8))
    for group in range(begin, end):
        for axis in range(num_axes):
            slot = space.first.signature + group * num_axes + axis
            if move.donor.most_ranks[axis] > 1.0:
                move.required[slot] = donor[slot]


@borrowing(void(SPACE, int64[:, ::1], int64, int64[::1], int64[:, ::1], MOVE), inner=True)
def _require(space, shapes, kind, value, donors, move):
    """Writes the values that a move of a kind requires.

    Args:
        shapes: [shapes, slots of a shape] values of all shapes.
        kind: one of the M_ constants.
        value: [slots] of the plan, with its layout in `move.layout`.
        donors: [m, slots] plans from which decisions may be borrowed, the best first.
        move: `required`, `ends` and `is_even` are written.
    """
    frame, state = move.layout.frame[0], move.state
    for slot in range(value.shape[0]):
        move.required[slot] = value[slot]
    _copy_ends(move.ends, move.layout)
    move.is_even[0] = False
    hands_over = may_differ(space, value) and frame.num_chunks == frame.num_ranks
    if (kind in (M_SHIFT, M_SLIDE) and frame.num_chunks == 1) or (kind == M_DEVICES and not hands_over):
        kind = M_ONE
    if kind in (M_ONE, M_TWO):
        for _ in range(kind - M_ONE + 1):
            _vary(space, _active(space, value, move.layout, state), move)
    elif kind in (M_SHIFT, M_SLIDE):
        # Units move from one chunk to another, so all ends between the two move by the same number.
        one = _below(state, frame.num_chunks - 1)
        two = _below(state, frame.num_chunks - 1) if kind == M_SLIDE else one
        by = 1 + _below(state, MOST_SHIFTED)
        by = by if _number(state) < 0.5 else -by
        for chunk in range(min(one, two), max(one, two) + 1):
            move.ends[chunk] += by
    elif kind == M_DEVICES:
        _hand_over(space, move)
        move.is_even[0] = _number(state) < 0.5
    elif kind == M_MODE:
        _change_levels(space, move)
    elif kind in (M_GROUP, M_PAIR):
        _change_group(space, kind, value, move)
    elif kind == M_BATCH:
        _change_batch(space, shapes, move)
        move.is_even[0] = move.required[space.first.virtual] != value[space.first.virtual]
    elif donors.shape[0] > 0:
        # The square prefers better donors, which come first.
        u = _number(state)
        donor = donors[int64(u * u * donors.shape[0])]
        decide_stages(space, donor, donor.shape[0], move.donor)
        if kind == M_SHAPE:
            _borrow_shape(space, value, donor, move)
        else:
            _borrow_groups(space, donor, move)


@borrowing(void(COMPILED, int64[::1], int64, MOVE, DRAFT, int64[::1]), inner=True)
def _settle_slot(compiled, value, slot, move, draft, result):
    """Decides a slot: the legal value nearest to the one that the move requires."""
    num_values = legal_values(compiled, result, slot, draft)
    result[slot] = 0
    if num_values > 1:
        mask, wanted = draft.mask[:num_values], move.required[slot]
        is_drawn = wanted == ANOTHER
        result[slot] = (
            _another(move.state, mask, value[slot]) if is_drawn else nearest_legal(compiled.space, slot, wanted, mask)
        )
    decide(compiled.space, result, slot, draft)


@borrowing(void(SPACE, int64, MOVE, LAYOUT, int64[::1]), inner=True)
def _settle_cut(space, chunk, move, layout, result):
    """Decides the end of a chunk: the legal end nearest to the one that the move requires."""
    start, low, high = cut_window(space, chunk, layout)
    share = layout.shares[chunk]
    if move.is_even[0]:
        layout.ends[chunk] = nth_cut(space.weight, start, low, high, share, 0)
    else:
        layout.ends[chunk] = min(max(move.ends[chunk], low), high)
        result[space.first.cut + chunk] = cut_number(space.weight, start, low, high, share, layout.ends[chunk])


@borrowing(boolean(COMPILED, int64[::1], MOVE, DRAFT, int64[::1]), inner=True)
def _settle_plan(compiled, value, move, draft, result):
    """Writes the legal plan nearest to the values that the move requires, [slots]; returns whether it is a new plan."""
    space, first, num_axes = compiled.space, compiled.space.first, compiled.space.obeys.shape[0]
    for slot in range(first.schedule):
        result[slot] = move.required[slot]
    for slot in range(first.schedule, first.cut):
        _settle_slot(compiled, value, slot, move, draft, result)
    frame = draft.layout.frame[0]
    result[first.cut : first.signature] = 0
    for chunk in range(frame.num_chunks - 1):
        _settle_cut(space, chunk, move, draft.layout, result)
    for slot in range(first.recompute, first.recompute + frame.num_ranks):
        _settle_slot(compiled, value, slot, move, draft, result)
    _settle_slot(compiled, value, first.zero, move, draft, result)
    # Signatures stay legal if meshes and samples do not change. In another order of the devices, the same way to share
    # out samples may give other samples.
    reshaped = result[first.shares] > 0 and result[first.order] != value[first.order]
    for slot in range(first.cut):
        is_mesh = slot < first.schedule or slot >= first.devices
        reshaped = reshaped or (is_mesh and result[slot] != value[slot])
    for group in range(space.groups.shape[0]):
        begin = first.signature + group * num_axes
        touched = reshaped
        for slot in range(begin, begin + num_axes):
            touched = touched or move.required[slot] != value[slot]
        for slot in range(begin, begin + num_axes):
            if touched:
                _settle_slot(compiled, value, slot, move, draft, result)
            else:
                result[slot] = value[slot]
    changed = False
    for slot in range(value.shape[0]):
        changed = changed or result[slot] != value[slot]
    return changed


class Requests(NamedTuple):
    """Arguments of `move_many` that all plans share."""

    shapes: Ints2
    """[shapes, slots of a shape] values of all shapes."""
    chances: Floats
    """[M_COUNT] cumulated probabilities of the kinds of moves."""
    donors: Ints2
    """[m, slots] plans whose shapes and signatures may be borrowed."""


REQUESTS = tuple_type(Requests)
"""Numba's type of `Requests`."""


@borrowing(void(COMPILED, REQUESTS, int64[::1], MOVE, DRAFT, int64[::1]), inner=True)
def _move(compiled, requests, value, move, draft, result):
    """Writes one neighbour of the plan `value` to `result`."""
    decide_stages(compiled.space, value, value.shape[0], move.layout)
    for _ in range(TRIES):
        number = _number(move.state)
        kind = 0
        while kind < M_COUNT - 1 and number >= requests.chances[kind]:
            kind += 1
        _require(compiled.space, requests.shapes, kind, value, requests.donors, move)
        if _settle_plan(compiled, value, move, draft, result):
            return


@borrowing(void(COMPILED, REQUESTS, uint64[::1], int64[:, ::1], MOVE, DRAFT, int64[:, ::1]), inner=True)
def _move_all(compiled, requests, seeds, values, move, draft, out):
    for plan in range(values.shape[0]):
        move.state[0] = seeds[plan]
        _move(compiled, requests, values[plan], move, draft, out[plan])


@kernel(void(COMPILED, int64[:, ::1], float64[::1], uint64[::1], int64[:, ::1], int64[:, ::1], int64[:, ::1]))
def move_many(compiled, shapes, chances, seeds, donors, values, out):
    """One neighbour of each plan.

    Args:
        shapes: [shapes, slots of a shape] values of all shapes.
        chances: [M_COUNT] cumulated probabilities of the kinds of moves.
        seeds: [n] seeds of the random numbers, not 0.
        donors: [m, slots] plans whose shapes and signatures may be borrowed, the best first.
        values: [n, slots] legal plans.
        out: [n, slots], written.
    """
    space = compiled.space
    draft = new_draft(compiled)
    move = Move(
        state=np.empty(1, np.uint64),
        layout=new_layout(space),
        donor=new_layout(space),
        required=np.empty(values.shape[1], np.int64),
        ends=np.empty(space.windows.shape[1], np.int64),
        is_even=np.zeros(1, np.bool_),
    )
    _move_all(compiled, Requests(shapes, chances, donors), seeds, values, move, draft, out)

"""The stepper: the legal values of each slot after the decisions before it.

Sampling, neighbours and environments all use it. Slots are decided in their order: `legal_values` writes the legal
values of a slot, and `decide` records the chosen one in the draft, on which the legal values of the next slot depend.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, int64, types, void

from automap.jit import borrowing, kernel
from automap.space.kernels.draft import DRAFT, legal_signatures, pick
from automap.space.kernels.layout import (
    LAYOUT,
    cut_window,
    decide_stages,
    find_stages,
    may_differ,
    middle_of,
    set_end,
    set_layout,
)
from automap.space.kernels.levels import nearest_legal
from automap.space.kernels.masks import copy, level_mask, shape_node, share_mask, size_mask
from automap.space.kernels.records import COMPILED, SPACE


@borrowing(types.UniTuple(int64, 2)(SPACE, int64[::1], int64, LAYOUT), inner=True)
def active_slots(space, value, slot, layout):
    """The slots that decide something in a plan, among all slots of the same kind as a slot.

    Args:
        value: [slots] values; those before `slot` are decided.
        slot: the slot.
        layout: layout of the plan; it is read for slots from `cut` on.

    Returns:
        Number of the first slot of the kind, and how many slots from there on decide something. All further slots of
        the kind have the only value 0. For slots of a shape or of a signature, the slot itself counts as a kind.
    """
    first, frame = space.first, layout.frame[0]
    if slot < first.schedule or slot >= first.signature:
        return slot, 1
    num_ranks = space.ranks[value[first.pp]]
    is_plain = num_ranks > 1 and space.virtuals[value[first.virtual]] == 1
    if slot < first.order:
        return first.schedule, int64(is_plain and space.schedules.shape[0] > 1)
    if slot < first.devices:
        has_orders = num_ranks > 1 or space.scalars.orders_one == 1
        return first.order, int64(has_orders and space.usual_layouts.shape[0] > 1)
    if slot < first.shares:
        return first.devices, num_ranks - 1 if is_plain and may_differ(space, value) else 0
    if slot < first.cut:
        return first.shares, int64(space.share_ways.shape[2] > 1)
    if slot < first.recompute:
        return first.cut, frame.num_chunks - 1
    if slot < first.zero:
        return first.recompute, frame.num_ranks
    return first.zero, int64(frame.has_replicas)


@borrowing(boolean(SPACE, int64, LAYOUT), inner=True)
def is_idle(space, slot, layout):
    """Whether a slot belongs to a chunk or a rank that the pipeline of `layout` does not have; its value is then 0.

    There are slots for the longest pipeline, so most of them decide nothing in shorter ones; loops skip these.
    """
    first, frame = space.first, layout.frame[0]
    is_cut = first.cut + frame.num_chunks - 1 <= slot < first.recompute
    return is_cut or first.recompute + frame.num_ranks <= slot < first.zero


@borrowing(int64(COMPILED, int64[::1], int64, DRAFT), inner=True)
def legal_values(compiled, value, slot, draft):
    """Writes which values of a slot are legal after the values before it into `draft.mask`; at least one always is.

    Args:
        value: [slots] values; those before `slot` are decided.
        slot: the slot.
        draft: a draft in which all slots before are decided, see `decide`.

    Returns:
        Number of values of the slot in this plan, legal or not. It is 1, for the value 0, if the slot decides nothing,
        such as the slot of a stage that the pipeline does not have.
    """
    space, mask, layout = compiled.space, draft.mask, draft.layout
    first = space.first
    begin, count = active_slots(space, value, slot, layout)
    if slot - begin >= count:
        mask[0] = True
        return 1
    if slot < first.schedule:
        node = space.shape_nodes[shape_node(space, value, slot)]
        num_values = space.shape_nodes[node.first_child + node.num_children - 1].value + 1
        mask[:num_values] = False
        for child in range(node.first_child, node.first_child + node.num_children):
            mask[space.shape_nodes[child].value] = True
    elif slot < first.order:
        num_values = space.schedules.shape[0]
        mask[:num_values] = True
    elif slot < first.devices:
        num_values = space.usual_layouts.shape[0]
        mask[:num_values] = True
    elif slot < first.shares:
        num_values = space.send_rows.shape[1] - 1
        size_mask(space, value, slot - begin, mask[:num_values])
    elif slot < first.cut:
        num_values = space.share_ways.shape[2]
        find_stages(space, value, layout)
        share_mask(space, value, layout, mask[:num_values])
    elif slot < first.recompute:
        _, low, high = cut_window(space, slot - begin, layout)
        num_values = high - low + 1
        mask[:num_values] = True
    elif slot < first.zero:
        num_values = space.legal_levels.shape[1]
        level_mask(space, layout, slot - begin, mask[:num_values])
        if space.scalars.one_mode == 1 and slot > begin:
            for level in range(num_values):
                mask[level] = level == value[begin]
    elif slot < first.signature:
        num_values = space.zeros.shape[1]
        others = space.degrees[value[first.tp]] * space.middles[middle_of(space, value)]
        kind = 2 if space.ranks[value[first.pp]] > 1 else 1 if others > 1 else 0
        copy(space.zeros[kind], mask)
    else:
        group, axis = divmod(slot - first.signature, draft.picked.shape[1])
        num_values = space.groups[group].num_values
        legal_signatures(compiled, group, axis, draft, mask[:num_values])
    return num_values


@borrowing(void(SPACE, int64[::1], int64, DRAFT), inner=True)
def decide(space, value, slot, draft):
    """Records the value of a slot, `value[slot]`, in the draft; the slots before it must be decided."""
    first = space.first
    if slot == first.shares:
        set_layout(space, value, draft.layout)
    elif first.cut <= slot < first.recompute:
        set_end(space, value, slot - first.cut, draft.layout)
    elif slot >= first.signature:
        group, axis = divmod(slot - first.signature, draft.picked.shape[1])
        pick(space, group, axis, value[slot], draft)


@borrowing(int64(COMPILED, int64[::1], int64, DRAFT), apart=True)
def follow(compiled, value, count, draft):
    """Decides the first `count` slots and finds the legal values of the next one.

    Args:
        value: [slots], the first `count` of which are decided.
        draft: written: its layout and, if slot `count` is a signature, the signatures of the same linkage group.

    Returns:
        See `legal_values`; 0 after the last slot.
    """
    first, num_axes = compiled.space.first, draft.picked.shape[1]
    decide_stages(compiled.space, value, count, draft.layout)
    if count >= first.signature:
        for slot in range(count - (count - first.signature) % num_axes, count):
            decide(compiled.space, value, slot, draft)
    if count == first.signature + compiled.space.groups.shape[0] * num_axes:
        return 0
    return legal_values(compiled, value, count, draft)


@borrowing(void(COMPILED, int64, int64[::1], DRAFT), apart=True)
def repair(compiled, kept, value, draft):
    """Replaces each value that is not legal after those before it, see `nearest_legal`.

    Args:
        kept: number of first values that are known to be legal.
        value: [slots] or fewer, read and written.
    """
    for slot in range(value.shape[0]):
        if slot >= kept:
            num_values = legal_values(compiled, value, slot, draft)
            value[slot] = nearest_legal(compiled.space, slot, value[slot], draft.mask[:num_values])
        decide(compiled.space, value, slot, draft)


@borrowing(void(COMPILED, int64, int64[:, ::1], DRAFT))
def repair_many(compiled, kept, values, draft):
    """`repair` of each row of `values`, [plans, slots]."""
    for row in range(values.shape[0]):
        repair(compiled, kept, values[row], draft)


@borrowing(int64(COMPILED, int64[::1], int64, DRAFT, boolean[:, ::1], int64[:, ::1]), inner=True)
def _list_signatures(compiled, value, group, draft, masks, found):
    """`list_signatures` with scratch memory for the legal values of each axis, [axes, values]."""
    space, num_axes, num_values = compiled.space, draft.picked.shape[1], masks.shape[1]
    begin = space.first.signature + group * num_axes
    follow(compiled, value, begin, draft)
    for number in range(num_values):
        masks[0, number] = draft.mask[number]
    value[begin] = -1
    axis, count = 0, 0
    while axis >= 0:
        slot = begin + axis
        value[slot] += 1
        if value[slot] == num_values:
            axis -= 1
        elif masks[axis, value[slot]]:
            decide(space, value, slot, draft)
            if axis + 1 < num_axes:
                axis += 1
                legal_signatures(compiled, group, axis, draft, masks[axis])
                value[slot + 1] = -1
            else:
                for a in range(num_axes):
                    found[count, a] = value[begin + a]
                count += 1
    return count


@kernel(int64(COMPILED, int64[::1], int64, DRAFT, int64[:, ::1]))
def list_signatures(compiled, value, group, draft, found):
    """Lists the legal combinations of values of a linkage group's slots on all axes, in ascending order.

    Args:
        value: [slots], of which those before the signatures are decided; the group's own slots are written.
        group: number of the group.
        found: [combinations, axes] written.

    Returns:
        Number of combinations.
    """
    masks = np.empty((draft.picked.shape[1], compiled.space.groups[group].num_values), np.bool_)
    return _list_signatures(compiled, value, group, draft, masks, found)


@borrowing(void(COMPILED, int64[::1], int64, DRAFT, boolean[:, ::1]))
def legal_on_axis(compiled, value, axis, draft, found):
    """Writes which signatures of every linkage group are legal on an axis; groups do not depend on one another.

    Args:
        value: [slots] values; those before the signatures are decided, and those of signatures on the axes before.
        axis: number of the axis.
        draft: a draft, written.
        found: [groups, values], written; false after the last value of a group.
    """
    space, num_axes = compiled.space, draft.picked.shape[1]
    decide_stages(space, value, space.first.signature, draft.layout)
    for group in range(found.shape[0]):
        slot, num_values = space.first.signature + group * num_axes, space.groups[group].num_values
        for a in range(axis):
            pick(space, group, a, value[slot + a], draft)
        for number in range(num_values, found.shape[1]):
            found[group, number] = False
        legal_signatures(compiled, group, axis, draft, found[group, :num_values])


@borrowing(void(COMPILED, int64[::1], DRAFT, boolean[:, ::1]))
def legal_on_ranks(compiled, value, draft, found):
    """Writes which levels of recomputation are legal on every pipeline rank; ranks do not depend on one another.

    Args:
        value: [slots] values; those before the levels are decided.
        draft: a draft, written.
        found: [ranks, levels], written.
    """
    decide_stages(compiled.space, value, compiled.space.first.recompute, draft.layout)
    for rank in range(found.shape[0]):
        level_mask(compiled.space, draft.layout, rank, found[rank])

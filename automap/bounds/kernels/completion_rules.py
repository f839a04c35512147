"""The rule by which undecided slots of a partial plan are completed: as in another plan, where that is legal.

`automap.bounds.kernels.completions` prices the plans that result.
"""

from __future__ import annotations

from typing import NamedTuple

from numba import int64, void

from automap.jit import borrowing
from automap.price.kernels.array_types import Ints, Mask, tuple_type
from automap.space.group_flow import FLOW, GroupFlow
from automap.space.kernels.draft import DRAFT, pick
from automap.space.kernels.levels import nearest_legal
from automap.space.kernels.records import COMPILED, SPACE
from automap.space.kernels.stepper import decide, is_idle, legal_values


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
    """Whether signatures continue those before them where `likewise` gives a value."""


GOAL = tuple_type(Goal)
"""Numba's type of `Goal`."""


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
def likewise(space, flow, value, slot):
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
def complete_skeleton(compiled, goal, draft, value):
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
def complete_signatures(compiled, goal, draft, value):
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
                    continued = likewise(space, goal.flow, value, slot)
                    value[slot] = continued if continued >= 0 else follows[slot]
            is_touched = is_touched or value[slot] != follows[slot]
        for slot in range(begin, begin + num_axes):
            if is_touched and slot >= decided:
                value[slot] = _settled(compiled, value, slot, value[slot], draft)
            pick(space, group, slot - begin, value[slot], draft)

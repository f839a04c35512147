"""Draft: one plan being decided, with everything that later decisions need of the decided slots."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import boolean, int64, void

from automap.jit import borrowing, kernel
from automap.price.kernels.array_types import Ints, Ints2, Ints3, Mask, tuple_type
from automap.price.kernels.cost_records import MAX_AXES
from automap.price.kernels.hashes import mix, scramble
from automap.space.kernels.layout import Layout, new_layout
from automap.space.kernels.masks import assign, signature_mask
from automap.space.kernels.records import COMPILED, SPACE
from automap.space.kernels.unit_cache import BITS, REMEMBERED_LEGAL


class Draft(NamedTuple):
    """One plan being decided; memory of one caller."""

    layout: Layout
    mask: Mask
    """[most values of a slot] legal values of the slot of the last `legal_values`."""
    picked: Ints2
    """[groups, axes] value of each group's slots, -1 = undecided."""
    chosen: Ints2
    """[operator rows, axes] the signatures of all operators that follow from `picked`."""
    types: Ints
    """[groups] unit type of each."""
    hashes: Ints2
    """[types, 2] two hashes of the picked values in each unit type."""
    recent: Ints3
    """[groups, axes, 3] entry of `UnitCache.legal` that the last `legal_signatures` of each group and axis read or
    wrote. Plans that are decided one after another mostly have the same meshes."""


DRAFT = tuple_type(Draft)
"""Numba's type of `Draft`."""


@kernel(DRAFT(COMPILED))
def new_draft(compiled):
    """A draft in which nothing is picked."""
    space = compiled.space
    num_axes, num_groups, num_types = space.obeys.shape[0], space.groups.shape[0], space.boundary.shape[0]
    draft = Draft(
        layout=new_layout(space),
        mask=np.empty(space.scalars.most_values, np.bool_),
        picked=np.full((num_groups, num_axes), -1),
        chosen=np.full((compiled.tables.operators.shape[0], num_axes), -1),
        types=np.empty(num_groups, np.int64),
        hashes=np.zeros((num_types, 2), np.int64),
        recent=np.zeros((num_groups, num_axes, 3), np.int64),
    )
    for kind in range(num_types):
        for group in range(space.group_spans[kind], space.group_spans[kind + 1]):
            draft.types[group] = kind
    return draft


@borrowing(void(SPACE, int64, int64, int64, DRAFT), inner=True)
def pick(space, group, axis, value, draft):
    """Decides the signatures of a group on an axis; a value of -1 makes them undecided."""
    if draft.picked[group, axis] != value:
        hashes = draft.hashes[draft.types[group]]
        for known, sign in ((draft.picked[group, axis], -1), (value, 1)):
            if known >= 0:
                # The hash is a sum, so it does not depend on the order in which signatures are picked.
                word = ((group * MAX_AXES + axis) << 20) + 2 * known
                hashes[0] += sign * scramble(word)
                hashes[1] += sign * scramble(word + 1)
        draft.picked[group, axis] = value
        assign(space, group, axis, value, draft.chosen)


@borrowing(void(SPACE, int64[::1], int64, DRAFT), inner=True)
def pick_all(space, value, count, draft):
    """Picks the signatures that the first `count` slots decide; all others are undecided."""
    num_axes = space.obeys.shape[0]
    for group in range(space.groups.shape[0]):
        for axis in range(num_axes):
            slot = space.first.signature + group * num_axes + axis
            pick(space, group, axis, value[slot] if slot < count else -1, draft)


@borrowing(void(COMPILED, int64, int64, DRAFT, boolean[::1]), inner=True)
def legal_signatures(compiled, group, axis, draft, mask):
    """Writes `signature_mask` after the picked signatures on earlier axes, read from the cache if it is there.

    After the call, the signatures on this axis and on later ones are undecided.

    Args:
        group: row of `SpaceArrays.groups`.
        mask: [values], written.
    """
    space, layout, num_axes = compiled.space, draft.layout, compiled.space.obeys.shape[0]
    one, two = mix(layout.hashes[0], layout.hashes[1], group * MAX_AXES + axis)
    for a in range(axis):
        one, two = mix(one, two, draft.picked[group, a])
    one |= 1
    recent = draft.recent[group, axis]
    if mask.shape[0] > BITS or recent[0] != one or recent[1] != two:
        known = compiled.cache.legal[two & (REMEMBERED_LEGAL - 1)]
        if mask.shape[0] > BITS or known[0] != one or known[1] != two:
            num_meshes = layout.frame[0].num_meshes
            sizes, samples = layout.sizes[:num_meshes], layout.divided[:num_meshes]
            signature_mask(compiled.tables, space, group, axis, draft.chosen, sizes, samples, mask)
            # Signatures that were tried are undecided again.
            for a in range(axis, num_axes):
                pick(space, group, a, -1, draft)
                assign(space, group, a, -1, draft.chosen)
            known[0], known[1], known[2] = one, two, 0
            for value in range(min(mask.shape[0], BITS)):
                known[2] |= int64(mask[value]) << value
        recent[0], recent[1], recent[2] = known[0], known[1], known[2]
    if mask.shape[0] <= BITS:
        for value in range(mask.shape[0]):
            mask[value] = (recent[2] >> value) & 1 == 1

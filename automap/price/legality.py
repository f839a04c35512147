"""Which values of a plan space's slots are legal, compiled.

`signature_mask` is the one place that says which signatures of a linkage group may follow those on outer axes.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float64, int64, void

from automap.price.arrays import (
    G_ASSIGNMENT,
    G_COUNT,
    G_FIRST,
    G_MEMBERS,
    G_VALUES,
    G_WHOLE,
    SPACE,
)
from automap.price.compiled import borrowing, kernel
from automap.price.placements import divides
from automap.price.vectors import TABLES


@borrowing(void(TABLES, SPACE, int64, int64, int64[:, ::1], float64[::1], int64, boolean[::1]))
def signature_mask(tables, space, group, axis, chosen, sizes, samples, mask):
    """Which signatures of a linkage group are legal on a mesh axis: what divides evenly and obeys the constraints.

    Where no signature obeys, what divides is legal; an axis of one rank leaves the operators whole.

    Args:
        tables: see `Tables.arrays`.
        space: see `compile_space`.
        group: row of `space.groups`.
        axis: mesh axis.
        chosen: [operator rows, axes] signatures of the group's members on the axes before; those on `axis` and behind
            are overwritten.
        sizes: [axes] ranks of each axis.
        samples: of a micro-batch.
        mask: [values], written.
    """
    first, count = space.groups[group, G_MEMBERS], space.groups[group, G_COUNT]
    if sizes[axis] == 1.0:
        mask[:] = False
        mask[space.groups[group, G_WHOLE]] = True
        return
    for m in range(count):
        chosen[space.members[first + m], axis + 1 :] = -1
    obeying = False
    for value in range(mask.shape[0]):
        fits = True
        for m in range(count):
            row = space.members[first + m]
            chosen[row, axis] = space.assignments[space.groups[group, G_ASSIGNMENT] + value * count + m]
            fits = fits and divides(
                tables.operators,
                tables.operands,
                tables.tensors,
                tables.signatures,
                tables.places,
                row,
                chosen[row],
                sizes,
                samples,
            )
        mask[value] = fits
        obeying = obeying or (fits and space.obeys[axis, space.groups[group, G_FIRST] + value])
    if obeying:
        for value in range(mask.shape[0]):
            mask[value] = mask[value] and space.obeys[axis, space.groups[group, G_FIRST] + value]


@borrowing(void(SPACE, int64, int64, int64, int64[:, ::1]), inner=True)
def assign(space, group, axis, value, chosen):
    """Writes the signatures of a group's members on one axis."""
    count = space.groups[group, G_COUNT]
    for m in range(count):
        picked = space.assignments[space.groups[group, G_ASSIGNMENT] + value * count + m]
        chosen[space.members[space.groups[group, G_MEMBERS] + m], axis] = picked


@kernel(float64(TABLES, SPACE, int64, int64, int64[:, ::1], float64[::1], int64))
def count_signatures(tables, space, group, axis, chosen, sizes, samples):
    """In how many ways the signatures of a group may be chosen on `axis` and all behind it; see `signature_mask`."""
    mask = np.empty(space.groups[group, G_VALUES], np.bool_)
    signature_mask(tables, space, group, axis, chosen, sizes, samples, mask)
    total = 0.0
    for value in range(mask.shape[0]):
        if mask[value]:
            if axis == sizes.shape[0] - 1:
                total += 1.0
            else:
                assign(space, group, axis, value, chosen)
                total += count_signatures(tables, space, group, axis + 1, chosen, sizes, samples)
    return total


@borrowing(boolean(SPACE, int64[::1], int64, int64, int64, boolean), inner=True)
def _obeys(space, ends, num_ranks, rank, mode, wholly):
    """Whether a recompute mode obeys the constraints for recomputation on a rank, and `wholly` those against it."""
    for chunk in range(rank, ends.shape[0], num_ranks):
        for unit in range(ends[chunk - 1] if chunk > 0 else 0, ends[chunk]):
            if not space.again[unit, mode] or (wholly and not space.kept[unit, mode]):
                return False
    return True


@borrowing(void(SPACE, int64[::1], int64, int64, boolean[::1]))
def mode_mask(space, ends, num_ranks, rank, mask):
    """Which recompute modes are legal on a pipeline rank.

    Where the rank holds units that must and units that must not be recomputed, the former win; where no mode obeys,
    all are legal.

    Args:
        space: see `compile_space`.
        ends: [chunks] units before the end of each chunk.
        num_ranks: pipeline ranks.
        rank: one of them.
        mask: [modes], written.
    """
    for wholly in (True, False):
        found = False
        for mode in range(mask.shape[0]):
            mask[mode] = space.modes[mode] and _obeys(space, ends, num_ranks, rank, mode, wholly)
            found = found or mask[mode]
        if found:
            return
    for mode in range(mask.shape[0]):
        mask[mode] = space.modes[mode]

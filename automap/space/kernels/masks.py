"""Legal values: how many devices a stage may get, how samples may be shared out over unlike devices, and which levels
of recomputation and signatures are legal. `automap.space.kernels.stepper` uses these rules."""

from __future__ import annotations

import math

import numpy as np
from numba import boolean, float64, int64, void

from automap.jit import borrowing, kernel
from automap.price.kernels.placements import divides
from automap.price.kernels.records import TABLES
from automap.space.kernels.layout import LAYOUT, may_differ, middle_of
from automap.space.kernels.levels import mode_of
from automap.space.kernels.records import SPACE


@borrowing(int64(SPACE, int64[::1], int64), inner=True)
def shape_node(space, value, count):
    """Row of `SpaceArrays.shape_nodes` with the first `count` values."""
    node = 0
    for slot in range(min(count, space.first.schedule)):
        node = space.shape_nodes[node].first_child
        while space.shape_nodes[node].value != value[slot]:
            node += 1
    return node


@borrowing(void(SPACE, int64[::1], int64, boolean[::1]), inner=True)
def size_mask(space, value, stage, mask):
    """Writes whether a stage may get each number of parts of the cluster, [parts]; 0 stands for an even share."""
    first, scalars = space.first, space.scalars
    num_ranks = space.ranks[value[first.pp]]
    even = space.sizes[value[first.pp]]
    mask[:] = False
    is_one = not may_differ(space, value) or space.virtuals[value[first.virtual]] > 1
    if stage >= num_ranks - 1 or is_one or even % scalars.part != 0:
        mask[0] = True
        return
    share = even // scalars.part
    left = scalars.num_devices // scalars.part
    for earlier in range(stage):
        mine = value[first.devices + earlier]
        left -= mine if mine > 0 else share
    ways = space.fills[value[first.tp], middle_of(space, value), value[first.micro_batches]]
    for parts in range(1, left):
        if ways[1, parts] and ways[num_ranks - 1 - stage, left - parts]:
            mask[0 if parts == share else parts] = True


@borrowing(void(SPACE, int64[::1], LAYOUT, boolean[::1]), inner=True)
def share_mask(space, value, layout, mask):
    """Writes whether each way to share out the samples of a micro-batch, [values], differs from all ways before it.

    `layout` must have the devices of the stages, see `find_stages`.
    """
    count = value[space.first.micro_batches]
    several = False
    for way in range(mask.shape[0]):
        mask[way] = True
        for other in range(way):
            same = True
            for rank in range(space.ranks[value[space.first.pp]]):
                number = space.mixed[layout.rows[rank]]
                if number >= 0:
                    same = same and space.share_ways[number, count, way] == space.share_ways[number, count, other]
            mask[way] = mask[way] and not same
        several = several or (way > 0 and mask[way])
    if several and space.scalars.proportional == 1:
        mask[0] = False


@borrowing(void(boolean[::1], boolean[::1]), inner=True)
def copy(source, mask):
    """Copies a mask."""
    for value in range(source.shape[0]):
        mask[value] = source[value]


@borrowing(boolean(SPACE, LAYOUT, int64, int64, boolean), inner=True, forceinline=True)
def _obeys(space, layout, rank, level, wholly):
    """Whether a level obeys the constraints on a rank that demand recomputation and, if `wholly`, those that forbid
    it."""
    frame, ends = layout.frame[0], layout.ends
    for chunk in range(rank, frame.num_chunks, frame.num_ranks):
        start = ends[chunk - 1] if chunk > 0 else 0
        for unit in range(start, ends[chunk]):
            mode = mode_of(space, level, unit - start, ends[chunk] - start)
            if not space.again[unit, mode] or (wholly and not space.kept[unit, mode]):
                return False
    return True


@borrowing(void(SPACE, LAYOUT, int64, boolean[::1]), inner=True)
def level_mask(space, layout, rank, mask):
    """Writes which levels of recomputation are legal on a pipeline rank, [levels].

    If no level obeys all constraints, those that demand recomputation count and those that forbid it do not. If no
    level obeys these either, all levels are legal.
    """
    legal = space.legal_levels[layout.frame[0].num_chunks]
    if space.scalars.binds_modes == 0:
        copy(legal, mask)
        return
    for wholly in (True, False):
        found = False
        for level in range(mask.shape[0]):
            mask[level] = legal[level] and _obeys(space, layout, rank, level, wholly)
            found = found or mask[level]
        if found:
            return
    copy(legal, mask)


@borrowing(void(TABLES, SPACE, int64, int64, int64[:, ::1], float64[:, ::1], int64[::1], boolean[::1]))
def signature_mask(tables, space, group, axis, chosen, sizes, samples, mask):
    """Writes which signatures of a linkage group are legal on a mesh axis: those that divide and obey the constraints.

    If no signature obeys the constraints, all that divide are legal. On an axis of one rank the operators are whole.
    All stages have the same signatures, so a legal one must divide on the meshes of all stages.

    Args:
        group: row of `space.groups`.
        chosen: [operator rows, axes] signatures of the group's members on the axes before; those on `axis` and after
            are overwritten.
        sizes: [meshes, axes] ranks of each axis.
        samples: [meshes] samples of a micro-batch that must divide evenly.
        mask: [values], written.
    """
    about = space.groups[group]
    is_one = True
    for mesh in range(sizes.shape[0]):
        is_one = is_one and sizes[mesh, axis] == 1.0
    if is_one:
        mask[:] = False
        mask[about.whole] = True
        return
    for m in range(about.num_members):
        chosen[space.members[about.first_member + m], axis + 1 :] = -1
    obeying = False
    for value in range(mask.shape[0]):
        fits = True
        for m in range(about.num_members):
            row = space.members[about.first_member + m]
            chosen[row, axis] = space.assignments[about.first_assignment + value * about.num_members + m]
            for mesh in range(sizes.shape[0]):
                fits = fits and divides(tables, row, chosen[row], sizes[mesh], samples[mesh])
        mask[value] = fits
        obeying = obeying or (fits and space.obeys[axis, about.first_value + value])
    if obeying:
        for value in range(mask.shape[0]):
            mask[value] = mask[value] and space.obeys[axis, about.first_value + value]


@borrowing(void(SPACE, int64, int64, int64, int64[:, ::1]), inner=True)
def assign(space, group, axis, value, chosen):
    """Writes the signatures of a group's members on one axis; a value of -1 leaves them undecided."""
    about = space.groups[group]
    at = about.first_assignment + value * about.num_members
    for m in range(about.num_members):
        chosen[space.members[about.first_member + m], axis] = space.assignments[at + m] if value >= 0 else -1


@kernel(float64(TABLES, SPACE, int64, int64, int64[:, ::1], float64[:, ::1], int64[::1]), inner=True)
def count_signatures(tables, space, group, axis, chosen, sizes, samples):
    """Number of ways to choose the signatures of a group on `axis` and on all later axes, see `signature_mask`."""
    mask = np.empty(space.groups[group].num_values, np.bool_)
    signature_mask(tables, space, group, axis, chosen, sizes, samples, mask)
    total = 0.0
    for value in range(mask.shape[0]):
        if mask[value]:
            if axis == sizes.shape[1] - 1:
                total += 1.0
            else:
                assign(space, group, axis, value, chosen)
                total += count_signatures(tables, space, group, axis + 1, chosen, sizes, samples)
    return total


@kernel(float64(TABLES, SPACE, float64[::1], float64[:, ::1], int64[::1]))
def count_decades(tables, space, times, sizes, samples):
    """log10 of the number of ways to choose the signatures of all groups, each `times` [groups] over; see
    `signature_mask`."""
    chosen = np.full((tables.operators.shape[0], sizes.shape[1]), -1)
    total = 0.0
    for group in range(times.shape[0]):
        if times[group] > 0.0:
            total += times[group] * math.log10(count_signatures(tables, space, group, 0, chosen, sizes, samples))
    return total

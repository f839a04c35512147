"""Which values of a plan space's slots are legal, compiled.

`signature_mask` is the one place that says which signatures of a linkage group may follow those on outer axes, and
`size_mask` the one that says how many devices a stage may get.
"""

from __future__ import annotations

import math

import numpy as np
from numba import boolean, float64, int64, void

from automap.jit import borrowing, kernel
from automap.price.kernels.placements import divides
from automap.price.kernels.records import TABLES
from automap.space.compile import (
    G_ASSIGNMENT,
    G_COUNT,
    G_FIRST,
    G_MEMBERS,
    G_VALUES,
    G_WHOLE,
    N_BATCH,
    N_DEVICES,
    N_LONGEST,
    N_PART,
    N_PROPORTIONAL,
    N_SHARES_SLOT,
    SPACE,
)


@borrowing(void(SPACE, int64[::1], int64, boolean[::1]))
def size_mask(space, value, stage, mask):
    """How many parts of the cluster a stage may get; 0 stands for an even share.

    Args:
        space: see `compile_space`.
        value: those of the slots before.
        stage: of the pipeline.
        mask: [parts], written.
    """
    num_axes = space.obeys.shape[0]
    num_ranks = space.degrees[value[0]]
    even = space.scalars[N_DEVICES] // num_ranks
    mask[:] = False
    is_long = num_ranks > space.scalars[N_LONGEST] or space.virtuals[value[num_axes + 1]] > 1
    if stage >= num_ranks - 1 or is_long or even % space.scalars[N_PART] != 0:
        mask[0] = True
        return
    share = even // space.scalars[N_PART]
    left = space.scalars[N_DEVICES] // space.scalars[N_PART]
    for earlier in range(stage):
        mine = value[num_axes + 4 + earlier]
        left -= mine if mine > 0 else share
    ways = space.fills[value[1], value[2] if num_axes == 3 else 0, value[num_axes]]
    for parts in range(1, left):
        if ways[1, parts] and ways[num_ranks - 1 - stage, left - parts]:
            mask[0 if parts == share else parts] = True


@borrowing(boolean(SPACE, int64[::1], int64[::1]), inner=True)
def share_devices(space, value, devices):
    """Writes how many devices each stage has, [stages]; returns whether all have as many."""
    num_axes = space.obeys.shape[0]
    num_ranks = space.degrees[value[0]]
    even = space.scalars[N_DEVICES] // num_ranks
    left = space.scalars[N_DEVICES]
    alike = True
    for stage in range(num_ranks):
        devices[stage] = even
        slot = num_axes + 4 + stage
        if stage == num_ranks - 1:
            devices[stage] = left
        elif slot < space.scalars[N_SHARES_SLOT] and value[slot] > 0:
            devices[stage] = value[slot] * space.scalars[N_PART]
            alike = False
        left -= devices[stage]
    return alike


@borrowing(int64(SPACE, int64[::1], int64), inner=True)
def sharing(space, value, row):
    """Number of a distinct stage among those of several kinds if its ranks have unlike shares, or -1."""
    shares = value[space.scalars[N_SHARES_SLOT]]
    number = space.mixed[row]
    if shares == 0 or number < 0:
        return -1
    return number if space.share_ways[number, value[space.obeys.shape[0]], shares] > 0 else -1


@borrowing(int64(SPACE, int64[::1], int64, int64, boolean), inner=True)
def share_of(space, value, number, kind, largest):
    """Samples of a micro-batch for a rank of a kind, the largest share or the smallest; see `sharing`."""
    total = space.kind_samples[number, value[space.obeys.shape[0]], value[space.scalars[N_SHARES_SLOT]], kind]
    each = space.kind_ranks[number, kind] * space.quanta[number]
    return (-(-total // each) if largest else total // each) * space.quanta[number]


@borrowing(void(SPACE, int64[::1], int64, int64[::1], boolean[::1]))
def share_mask(space, value, num_ranks, rows, mask):
    """How the samples of a micro-batch may be shared out: the ways that differ somewhere.

    Args:
        space: see `compile_space`.
        value: those of the slots before.
        num_ranks: pipeline ranks.
        rows: [ranks] of each among the distinct stages.
        mask: [values], written.
    """
    count = value[space.obeys.shape[0]]
    several = False
    for way in range(mask.shape[0]):
        mask[way] = True
        for other in range(way):
            same = True
            for rank in range(num_ranks):
                number = space.mixed[rows[rank]]
                if number >= 0:
                    same = same and space.share_ways[number, count, way] == space.share_ways[number, count, other]
            mask[way] = mask[way] and not same
        several = several or (way > 0 and mask[way])
    if several and space.scalars[N_PROPORTIONAL] == 1:
        mask[0] = False


@borrowing(int64(float64[:, ::1], int64[::1], int64, int64, int64, int64, int64), inner=True)
def _add_mesh(sizes, samples, count, outer, middle, inner, share):
    """Adds a mesh unless it is there; returns how many there are."""
    for mesh in range(count):
        if sizes[mesh, 0] == outer and samples[mesh] == share * outer:
            return count
    sizes[count, 1] = middle
    sizes[count, sizes.shape[1] - 1] = inner
    sizes[count, 0] = outer
    samples[count] = share * outer
    return count + 1


@borrowing(int64(SPACE, int64[::1], boolean, int64[::1], int64[::1], float64[:, ::1], int64[::1]), inner=True)
def unlike_meshes(space, value, alike, devices, rows, sizes, samples):
    """Writes the meshes that stages have, each with the samples of a micro-batch that must divide over it.

    Args:
        space: see `compile_space`.
        value: those of the slots before the first cut.
        alike: whether all stages have as many devices.
        devices: [stages] of each.
        rows: [stages] of each among the distinct stages.
        sizes: [meshes, axes], written.
        samples: [meshes] the share of one rank times the ranks, written.

    Returns:
        How many were written: one where all stages and ranks are alike.
    """
    num_axes = sizes.shape[1]
    batch = space.scalars[N_BATCH] // space.micro_batches[value[num_axes]]
    middle = space.middles[value[2]] if num_axes == 3 else 1
    inner = space.degrees[value[1]]
    count = 0
    shared = value[space.scalars[N_SHARES_SLOT]] > 0
    for stage in range(1 if alike and not shared else space.degrees[value[0]]):
        outer = devices[stage] // inner // middle
        number = sharing(space, value, rows[stage])
        if number < 0:
            count = _add_mesh(sizes, samples, count, outer, middle, inner, -(-batch // outer))
        else:
            for kind in range(space.kind_rows.shape[1]):
                for largest in (True, False):
                    share = share_of(space, value, number, kind, largest)
                    count = _add_mesh(sizes, samples, count, outer, middle, inner, share)
    return count


@borrowing(void(TABLES, SPACE, int64, int64, int64[:, ::1], float64[:, ::1], int64[::1], boolean[::1]))
def signature_mask(tables, space, group, axis, chosen, sizes, samples, mask):
    """Which signatures of a linkage group are legal on a mesh axis: what divides evenly and obeys the constraints.

    Where no signature obeys, what divides is legal; an axis of one rank leaves the operators whole. Stages share their
    signatures: what is legal is legal on the meshes of all.

    Args:
        tables: see `Tables.arrays`.
        space: see `compile_space`.
        group: row of `space.groups`.
        axis: mesh axis.
        chosen: [operator rows, axes] signatures of the group's members on the axes before; those on `axis` and behind
            are overwritten.
        sizes: [meshes, axes] ranks of each axis.
        samples: [meshes] of a micro-batch.
        mask: [values], written.
    """
    first, count = space.groups[group, G_MEMBERS], space.groups[group, G_COUNT]
    is_one = True
    for mesh in range(sizes.shape[0]):
        is_one = is_one and sizes[mesh, axis] == 1.0
    if is_one:
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
            for mesh in range(sizes.shape[0]):
                fits = fits and divides(tables, row, chosen[row], sizes[mesh], samples[mesh])
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


@kernel(float64(TABLES, SPACE, int64, int64, int64[:, ::1], float64[:, ::1], int64[::1]), inner=True)
def count_signatures(tables, space, group, axis, chosen, sizes, samples):
    """In how many ways the signatures of a group may be chosen on `axis` and all behind it; see `signature_mask`."""
    mask = np.empty(space.groups[group, G_VALUES], np.bool_)
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

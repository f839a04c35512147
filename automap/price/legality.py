"""Which values of a plan space's slots are legal, compiled, and plans drawn at random among them.

`signature_mask` is the one place that says which signatures of a linkage group may follow those on outer axes.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float64, int64, njit, void

from automap.price.arrays import (
    G_ASSIGNMENT,
    G_COUNT,
    G_FIRST,
    G_MEMBERS,
    G_VALUES,
    G_WHOLE,
    N_BATCH,
    N_DEVICES,
    N_FIRST_CUT,
    N_FIRST_RECOMPUTE,
    N_FIRST_SIGNATURE,
    N_ZERO_SLOT,
    SPACE,
)
from automap.price.placements import divides
from automap.price.vectors import TABLES


@njit(int64(float64[::1], int64, int64, int64, int64, int64), cache=True)
def nth_cut(weight, start, low, high, chunks_left, number):
    """The end in [low, high] that is `number`-th nearest to an even share of what is left behind unit `start`.

    Of two that are equally near the left one comes first.
    """
    target = weight[start] + (weight[weight.shape[0] - 1] - weight[start]) / chunks_left
    right = low + np.searchsorted(weight[low : high + 1], target)
    left = right - 1
    found = low
    for _ in range(number + 1):
        if left >= low and (right > high or abs(weight[left] - target) <= abs(weight[right] - target)):
            found = left
            left -= 1
        else:
            found = right
            right += 1
    return found


@njit(void(TABLES, SPACE, int64, int64, int64[:, ::1], float64[::1], int64, boolean[::1]), cache=True)
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


@njit(void(SPACE, int64, int64, int64, int64[:, ::1]), cache=True)
def assign(space, group, axis, value, chosen):
    """Writes the signatures of a group's members on one axis."""
    count = space.groups[group, G_COUNT]
    for m in range(count):
        picked = space.assignments[space.groups[group, G_ASSIGNMENT] + value * count + m]
        chosen[space.members[space.groups[group, G_MEMBERS] + m], axis] = picked


@njit(float64(TABLES, SPACE, int64, int64, int64[:, ::1], float64[::1], int64), cache=True)
def count_signatures(tables, space, group, axis, chosen, sizes, samples):
    """In how many ways the signatures of a group may be chosen on `axis` and all behind it; see `signature_mask`."""
    mask = np.empty(space.groups[group, G_VALUES], np.bool_)
    signature_mask(tables, space, group, axis, chosen, sizes, samples, mask)
    if axis == sizes.shape[0] - 1:
        return float64(mask.sum())
    total = 0.0
    for value in range(mask.shape[0]):
        if mask[value]:
            assign(space, group, axis, value, chosen)
            total += count_signatures(tables, space, group, axis + 1, chosen, sizes, samples)
    return total


@njit(void(SPACE, int64[::1], int64, int64, boolean[::1]), cache=True)
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
    again = space.modes.copy()
    both = space.modes.copy()
    for chunk in range(rank, ends.shape[0], num_ranks):
        for unit in range(ends[chunk - 1] if chunk > 0 else 0, ends[chunk]):
            for mode in range(mask.shape[0]):
                again[mode] = again[mode] and space.again[unit, mode]
                both[mode] = both[mode] and space.again[unit, mode] and space.kept[unit, mode]
    if both.any():
        mask[:] = both
    elif again.any():
        mask[:] = again
    else:
        mask[:] = space.modes


@njit(int64(boolean[::1], float64), cache=True)
def _pick(mask, number):
    """The true entry of `mask` that `number`, in [0, 1), points at."""
    left = int64(number * mask.sum())
    for value in range(mask.shape[0]):
        if mask[value]:
            if left == 0:
                return value
            left -= 1
    return -1


@njit(void(TABLES, SPACE, float64[:, ::1], int64[:, ::1]), cache=True)
def draw_many(tables, space, numbers, values):
    """Completes plans whose shapes are decided by uniform choices among the legal values of each slot.

    Args:
        tables: see `Tables.arrays`.
        space: see `compile_space`.
        numbers: [n, slots] in [0, 1): what each choice goes by.
        values: [n, slots], those of the shape given, the others written.
    """
    num_units = space.units.shape[0]
    num_axes = space.obeys.shape[0]
    first_recompute, zero_slot = space.scalars[N_FIRST_RECOMPUTE], space.scalars[N_ZERO_SLOT]
    chosen = np.empty((tables.operators.shape[0], num_axes), np.int64)
    sizes = np.empty(num_axes)
    mask = np.empty(space.modes.shape[0], np.bool_)
    for plan in range(values.shape[0]):
        value, number = values[plan], numbers[plan]
        num_ranks = space.degrees[value[0]]
        middle = space.middles[value[2]] if num_axes == 3 else 1
        samples = space.scalars[N_BATCH] // space.micro_batches[value[num_axes]]
        num_chunks = num_ranks * space.virtuals[value[num_axes + 1]]
        sizes[1] = middle
        sizes[num_axes - 1] = space.degrees[value[1]]
        sizes[0] = space.scalars[N_DEVICES] // num_ranks // middle // space.degrees[value[1]]

        ends = np.full(num_chunks, num_units)
        start = 0
        for slot in range(space.scalars[N_FIRST_CUT], first_recompute):
            chunk = slot - space.scalars[N_FIRST_CUT]
            value[slot] = 0
            if chunk < num_chunks - 1:
                low, high = space.windows[num_chunks, chunk]
                low = max(low, start + 1)
                value[slot] = int64(number[slot] * (high - low + 1))
                start = nth_cut(space.weight, start, low, high, num_chunks - chunk, value[slot])
                ends[chunk] = start
        for slot in range(first_recompute, zero_slot):
            value[slot] = 0
            if slot - first_recompute < num_ranks:
                mode_mask(space, ends, num_ranks, slot - first_recompute, mask)
                value[slot] = _pick(mask, number[slot])
        value[zero_slot] = 0
        if sizes[0] * middle > 1.0:
            value[zero_slot] = _pick(space.zeros, number[zero_slot])
        for group in range(space.groups.shape[0]):
            legal = np.empty(space.groups[group, G_VALUES], np.bool_)
            for axis in range(num_axes):
                slot = space.scalars[N_FIRST_SIGNATURE] + group * num_axes + axis
                signature_mask(tables, space, group, axis, chosen, sizes, samples, legal)
                value[slot] = _pick(legal, number[slot])
                assign(space, group, axis, value[slot], chosen)

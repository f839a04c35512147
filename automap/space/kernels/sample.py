"""Plans of a space drawn at random, many in one compiled call."""

from __future__ import annotations

import numpy as np
from numba import boolean, float64, int64, void

from automap.jit import borrowing, kernel
from automap.price.kernels.records import TABLES
from automap.space.compile import (
    G_VALUES,
    N_FIRST_CUT,
    N_FIRST_RECOMPUTE,
    N_FIRST_SIGNATURE,
    N_MOST_MESHES,
    N_ORDERS_ONE,
    N_SHARES_SLOT,
    N_ZERO_SLOT,
    SPACE,
)
from automap.space.kernels.cuts import cut_shares, nth_cut
from automap.space.kernels.masks import assign, mode_mask, share_mask, signature_mask, size_mask, unlike_meshes
from automap.space.kernels.workspace import find_stages, look_from


@borrowing(int64(boolean[::1], float64), inner=True)
def _pick(mask, number):
    """The true entry of `mask` that `number`, in [0, 1), points at."""
    legal = 0
    for value in range(mask.shape[0]):
        legal += mask[value]
    left = int64(number * legal)
    for value in range(mask.shape[0]):
        if mask[value]:
            if left == 0:
                return value
            left -= 1
    return -1


@kernel(void(TABLES, SPACE, float64[:, ::1], int64[:, ::1]))
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
    meshes = space.scalars[N_MOST_MESHES]
    sizes, samples = np.empty((meshes, num_axes)), np.empty(meshes, np.int64)
    most = space.windows.shape[1]
    devices, rows, boundaries = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    stages, of_ranks = np.empty(most, np.int64), np.empty(most, np.int64)
    mask = np.empty(space.modes.shape[0], np.bool_)
    parts = np.empty(space.send_rows.shape[1] - 1, np.bool_)
    ways = np.empty(space.share_ways.shape[2], np.bool_)
    for plan in range(values.shape[0]):
        value, number = values[plan], numbers[plan]
        num_ranks = space.degrees[value[0]]
        virtual = space.virtuals[value[num_axes + 1]]
        num_chunks = num_ranks * virtual
        schedule = num_axes + 2
        value[schedule] = 0
        if num_ranks > 1 and virtual == 1:
            value[schedule] = int64(number[schedule] * space.kinds.shape[0])
        order = schedule + 1
        value[order] = 0
        if num_ranks > 1 or space.scalars[N_ORDERS_ONE] == 1:
            value[order] = int64(number[order] * space.layouts.shape[0])
        shares = space.scalars[N_SHARES_SLOT]
        for slot in range(order + 1, shares):
            size_mask(space, value, slot - order - 1, parts)
            value[slot] = _pick(parts, number[slot])
        alike = find_stages(space, value, devices, rows, boundaries)
        share_mask(space, value, num_ranks, rows, ways)
        value[shares] = _pick(ways, number[shares])
        num_meshes = unlike_meshes(space, value, alike, devices, rows, sizes, samples)

        ends = np.full(num_chunks, num_units)
        speeds = np.empty(num_chunks)
        look_from(space, value, 0, devices, rows, stages, of_ranks)
        cut_shares(space, stages, num_ranks, speeds)
        start = 0
        for slot in range(space.scalars[N_FIRST_CUT], first_recompute):
            chunk = slot - space.scalars[N_FIRST_CUT]
            value[slot] = 0
            if chunk < num_chunks - 1:
                low, high = space.windows[num_chunks, chunk]
                low = max(low, start + 1)
                value[slot] = int64(number[slot] * (high - low + 1))
                start = nth_cut(space.weight, start, low, high, speeds[chunk], value[slot])
                ends[chunk] = start
        for slot in range(first_recompute, zero_slot):
            value[slot] = 0
            if slot - first_recompute < num_ranks:
                mode_mask(space, ends, num_ranks, slot - first_recompute, mask)
                value[slot] = _pick(mask, number[slot])
        value[zero_slot] = 0
        replicas = sizes[0, 0] if num_axes == 2 else sizes[0, 0] * sizes[0, 1]
        if num_meshes > 1 or replicas > 1.0:
            value[zero_slot] = _pick(space.zeros, number[zero_slot])
        for group in range(space.groups.shape[0]):
            legal = np.empty(space.groups[group, G_VALUES], np.bool_)
            for axis in range(num_axes):
                slot = space.scalars[N_FIRST_SIGNATURE] + group * num_axes + axis
                signature_mask(tables, space, group, axis, chosen, sizes[:num_meshes], samples[:num_meshes], legal)
                value[slot] = _pick(legal, number[slot])
                assign(space, group, axis, value[slot], chosen)

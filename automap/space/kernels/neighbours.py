"""Neighbours of plans, many in one compiled call: some decisions changed, all others kept as far as they stay legal.

Ends of chunks are kept where they are, whatever becomes of the values that state them.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float64, int64, uint64, void

from automap.jit import borrowing, kernel
from automap.price.kernels.records import TABLES
from automap.space.compile import (
    G_COUNT,
    G_VALUES,
    N_DEVICES,
    N_FIRST_CUT,
    N_FIRST_RECOMPUTE,
    N_FIRST_SIGNATURE,
    N_LONGEST,
    N_MOST_MESHES,
    N_ORDERS_ONE,
    N_PART,
    N_SHARES_SLOT,
    N_ZERO_SLOT,
    SPACE,
)
from automap.space.kernels.cuts import cut_number, cut_shares, nth_cut
from automap.space.kernels.masks import assign, mode_mask, share_mask, signature_mask, size_mask, unlike_meshes
from automap.space.kernels.workspace import find_stages, look_from

# Kinds of moves.
M_ONE, M_TWO, M_SHIFT, M_SLIDE, M_DEVICES, M_MODE, M_GROUP, M_PAIR, M_BORROW, M_BATCH, M_SHAPE = range(11)
M_COUNT = 11
# What is read of a plan's shape.
S_RANKS, S_CHUNKS, S_MESHES, S_REPLICAS = range(4)
S_COUNT = 4
TRIES = 8
"""A move that changes nothing is drawn again so often."""
MOST_SHIFTED = 2
"""Units that a shifted end moves at most."""
KEEP = 1 << 62
"""In place of a value: another than the present one, drawn."""


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


@borrowing(
    void(
        SPACE,
        int64[::1],
        int64[::1],
        int64[::1],
        int64[:, ::1],
        float64[:, ::1],
        int64[::1],
        float64[::1],
        float64[::1],
    ),
    inner=True,
)
def _read(space, value, shape, devices, scratch, sizes, samples, most, shares):
    """Reads where the stages of a plan stand.

    Args:
        space: see `compile_space`.
        value: [slots], those before the first cut.
        shape: see the S_ constants, written.
        devices: [stages] of each, written.
        scratch: [4, stages].
        sizes: [meshes, axes] ranks of each mesh axis, see `unlike_meshes`; written.
        samples: [meshes] of a micro-batch, written.
        most: [axes] ranks of each axis on the stage that has most, written.
        shares: [chunks] see `cut_shares`, written.
    """
    num_axes = sizes.shape[1]
    ranks = space.degrees[value[0]]
    rows, boundaries, stages, of_ranks = scratch[0], scratch[1], scratch[2], scratch[3]
    alike = find_stages(space, value, devices, rows, boundaries)
    count = unlike_meshes(space, value, alike, devices, rows, sizes, samples)
    look_from(space, value, 0, devices, rows, stages, of_ranks)
    shape[S_RANKS] = ranks
    shape[S_CHUNKS] = ranks * space.virtuals[value[num_axes + 1]]
    shape[S_MESHES] = count
    cut_shares(space, stages, ranks, shares[: shape[S_CHUNKS]])
    for axis in range(num_axes):
        most[axis] = 1.0
        for mesh in range(count):
            most[axis] = max(most[axis], sizes[mesh, axis])
    replicas = sizes[0, 0] if num_axes == 2 else sizes[0, 0] * sizes[0, 1]
    shape[S_REPLICAS] = 2 if count > 1 or replicas > 1.0 else 1


@borrowing(void(SPACE, int64[::1], int64, float64[::1], int64[::1]), inner=True)
def _read_ends(space, value, num_chunks, shares, ends):
    """Writes where the chunks end."""
    start = 0
    for chunk in range(num_chunks - 1):
        low, high = space.windows[num_chunks, chunk]
        picked = value[space.scalars[N_FIRST_CUT] + chunk]
        start = nth_cut(space.weight, start, max(low, start + 1), high, shares[chunk], picked)
        ends[chunk] = start
    ends[num_chunks - 1] = space.units.shape[0]


@borrowing(int64(uint64[::1], boolean[::1], int64, int64), inner=True)
def _settle(state, mask, wanted, present):
    """`wanted` if it is legal, else the first legal value; `KEEP` stands for any other than `present`."""
    if wanted != KEEP:
        if mask[wanted]:
            return wanted
        for value in range(mask.shape[0]):
            if mask[value]:
                return value
        return -1
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


@borrowing(int64(SPACE, int64[::1], int64[::1], float64[::1], uint64[::1]), inner=True)
def _active(space, value, shape, most, state):
    """A slot that decides something: kinds in fixed shares, uniform within a kind."""
    num_axes = most.shape[0]
    number = _number(state)
    ranks = shape[S_RANKS]
    plain = ranks > 1 and space.virtuals[value[num_axes + 1]] == 1
    if number < 0.04 and plain and space.kinds.shape[0] > 1:
        return num_axes + 2
    if number < 0.08 and space.layouts.shape[0] > 1 and (ranks > 1 or space.scalars[N_ORDERS_ONE] == 1):
        return num_axes + 3
    if number < 0.14 and plain and ranks <= space.scalars[N_LONGEST]:
        return num_axes + 4 + _below(state, ranks - 1)
    if number < 0.20 and space.share_ways.shape[2] > 1:
        return space.scalars[N_SHARES_SLOT]
    if number < 0.28 and shape[S_CHUNKS] > 1:
        return space.scalars[N_FIRST_CUT] + _below(state, shape[S_CHUNKS] - 1)
    if number < 0.40:
        return space.scalars[N_FIRST_RECOMPUTE] + _below(state, ranks)
    if number < 0.45 and shape[S_REPLICAS] > 1:
        return space.scalars[N_ZERO_SLOT]
    return _sharding(space, most, state)


@borrowing(int64(SPACE, float64[::1], uint64[::1]), inner=True)
def _sharding(space, most, state):
    """A signature slot on an axis of several ranks; the ZeRO stage where there is none."""
    num_axes = most.shape[0]
    several = 0
    for axis in range(num_axes):
        several += most[axis] > 1.0
    if several == 0 or space.groups.shape[0] == 0:
        return space.scalars[N_ZERO_SLOT]
    left = _below(state, several)
    at = 0
    for axis in range(num_axes):
        if most[axis] > 1.0:
            if left == 0:
                at = axis
            left -= 1
    return space.scalars[N_FIRST_SIGNATURE] + _below(state, space.groups.shape[0]) * num_axes + at


@borrowing(void(SPACE, int64, int64[::1], int64[::1], uint64[::1]), inner=True)
def _vary(space, slot, wanted, ends, state):
    """Asks for another value of a slot; an end of a chunk stays between its neighbours."""
    chunk = slot - space.scalars[N_FIRST_CUT]
    if chunk < 0 or slot >= space.scalars[N_FIRST_RECOMPUTE]:
        wanted[slot] = KEEP
    else:
        start = ends[chunk - 1] if chunk > 0 else 0
        ends[chunk] = start + 1 + _below(state, ends[chunk + 1] - start - 1)


@borrowing(void(SPACE, int64, int64[::1], int64[::1], uint64[::1]), inner=True)
def _hand_over(space, num_axes, devices, wanted, state):
    """Takes devices from one stage for another; the last one has what is left."""
    stages = space.degrees[wanted[0]]
    part = space.scalars[N_PART]
    one, two = _below(state, stages), _below(state, stages)
    by = part * (1 + _below(state, 2))
    even = space.scalars[N_DEVICES] // stages
    for stage in range(stages - 1):
        mine = devices[stage] + (by if stage == one else 0) - (by if stage == two else 0)
        wanted[num_axes + 4 + stage] = mine // part if 0 < mine < space.scalars[N_DEVICES] and mine != even else 0


@borrowing(void(SPACE, int64[:, ::1], int64[::1], int64, uint64[::1]), inner=True)
def _batch(space, shapes, wanted, num_axes, state):
    """Writes a shape with the same mesh that differs in micro-batches or in virtual stages."""
    at = num_axes
    found = 0
    chosen = -1
    for row in range(shapes.shape[0]):
        alike = True
        for slot in range(at):
            alike = alike and shapes[row, slot] == wanted[slot]
        steps = abs(shapes[row, at] - wanted[at])
        turned = abs(shapes[row, at + 1] - wanted[at + 1])
        if alike and steps <= 2 and (steps == 0 or turned == 0) and steps + turned > 0:
            found += 1
            if _below(state, found) == 0:
                chosen = row
    if chosen >= 0:
        for slot in range(shapes.shape[1]):
            wanted[slot] = shapes[chosen, slot]


@kernel(void(TABLES, SPACE, int64[:, ::1], float64[::1], uint64[::1], int64[:, ::1], int64[:, ::1], int64[:, ::1]))
def move_many(tables, space, shapes, chances, seeds, donors, values, out):
    """One neighbour of each plan.

    Args:
        tables: see `Tables.arrays`.
        space: see `compile_space`.
        shapes: [shapes, first slot behind them] values of all shapes.
        chances: [M_COUNT] cumulated probabilities of the kinds of moves.
        seeds: [n] of the random numbers, not 0.
        donors: [m, slots] plans whose shapes and signatures may be borrowed, the best first.
        values: [n, slots].
        out: [n, slots], written.
    """
    num_axes = space.obeys.shape[0]
    num_groups = space.groups.shape[0]
    first_cut, first_recompute = space.scalars[N_FIRST_CUT], space.scalars[N_FIRST_RECOMPUTE]
    zero_slot, first_signature = space.scalars[N_ZERO_SLOT], space.scalars[N_FIRST_SIGNATURE]
    most_chunks = space.windows.shape[1]
    meshes = space.scalars[N_MOST_MESHES]
    chosen = np.empty((tables.operators.shape[0], num_axes), np.int64)
    old, new = np.empty(S_COUNT, np.int64), np.empty(S_COUNT, np.int64)
    old_devices, devices = np.empty(most_chunks, np.int64), np.empty(most_chunks, np.int64)
    scratch = np.empty((4, most_chunks), np.int64)
    sizes, samples = np.empty((meshes, num_axes)), np.empty(meshes, np.int64)
    old_most, most = np.empty(num_axes), np.empty(num_axes)
    shares = np.empty(most_chunks)
    old_ends, ends = np.empty(most_chunks, np.int64), np.empty(most_chunks, np.int64)
    wanted = np.empty(values.shape[1], np.int64)
    mode = np.empty(space.modes.shape[0], np.bool_)
    every_kind = np.ones(space.kinds.shape[0], np.bool_)
    every_order = np.ones(space.layouts.shape[0], np.bool_)
    parts = np.empty(space.send_rows.shape[1] - 1, np.bool_)
    ways = np.empty(space.share_ways.shape[2], np.bool_)
    shares_slot = space.scalars[N_SHARES_SLOT]
    state = np.empty(1, np.uint64)
    bound = False
    for unit in range(space.kept.shape[0]):
        for m in range(space.kept.shape[1]):
            bound = bound or not space.kept[unit, m] or not space.again[unit, m]
    for plan in range(values.shape[0]):
        value, result = values[plan], out[plan]
        state[0] = seeds[plan]
        _read(space, value, old, old_devices, scratch, sizes, samples, old_most, shares)
        _read_ends(space, value, old[S_CHUNKS], shares, old_ends)
        for _ in range(TRIES):
            num_chunks, num_ranks = old[S_CHUNKS], old[S_RANKS]
            for slot in range(value.shape[0]):
                wanted[slot] = value[slot]
            for chunk in range(num_chunks):
                ends[chunk] = old_ends[chunk]
            number = _number(state)
            kind = 0
            while kind < M_COUNT - 1 and number >= chances[kind]:
                kind += 1
            evenly = False
            differ = 1 < num_ranks <= space.scalars[N_LONGEST] and num_chunks == num_ranks
            if (kind in (M_SHIFT, M_SLIDE) and num_chunks == 1) or (kind == M_DEVICES and not differ):
                kind = M_ONE
            if kind in (M_ONE, M_TWO):
                for _ in range(kind - M_ONE + 1):
                    _vary(space, _active(space, value, old, old_most, state), wanted, ends, state)
            elif kind in (M_SHIFT, M_SLIDE):
                # Units go from one chunk to another; all ends between them move alike.
                one = _below(state, num_chunks - 1)
                two = _below(state, num_chunks - 1) if kind == M_SLIDE else one
                by = 1 + _below(state, MOST_SHIFTED)
                by = by if _number(state) < 0.5 else -by
                for chunk in range(min(one, two), max(one, two) + 1):
                    ends[chunk] += by
            elif kind == M_DEVICES:
                _hand_over(space, num_axes, old_devices, wanted, state)
                evenly = _number(state) < 0.5
            elif kind == M_MODE:
                picked = _below(state, space.modes.shape[0])
                for rank in range(num_ranks):
                    wanted[first_recompute + rank] = picked
            elif kind in (M_GROUP, M_PAIR):
                slot = _sharding(space, old_most, state)
                if slot >= first_signature:
                    group = (slot - first_signature) // num_axes
                    if kind == M_GROUP:
                        for axis in range(num_axes):
                            wanted[first_signature + group * num_axes + axis] = KEEP
                    else:
                        other = min(num_groups - 1, group + 1 + _below(state, 3))
                        axis = (slot - first_signature) % num_axes
                        wanted[slot] = KEEP
                        at = first_signature + other * num_axes + axis
                        same = space.groups[group, G_VALUES] == space.groups[other, G_VALUES]
                        same = same and space.groups[group, G_COUNT] == space.groups[other, G_COUNT]
                        wanted[at] = value[slot] if same and _number(state) < 0.5 else KEEP
            elif kind == M_BATCH:
                _batch(space, shapes, wanted, num_axes, state)
                evenly = wanted[num_axes + 1] != value[num_axes + 1]
            elif donors.shape[0] > 0:
                u = _number(state)
                donor = donors[int64(u * u * donors.shape[0])]
                _read(space, donor, new, devices, scratch, sizes, samples, most, shares)
                if kind == M_SHAPE:
                    whole = _number(state) < 0.5
                    for slot in range(first_cut):
                        wanted[slot] = donor[slot]
                    if new[S_CHUNKS] != num_chunks:
                        _read_ends(space, donor, new[S_CHUNKS], shares, ends)
                    for rank in range(new[S_RANKS]):
                        wanted[first_recompute + rank] = value[first_recompute + rank * num_ranks // new[S_RANKS]]
                        if whole:
                            wanted[first_recompute + rank] = donor[first_recompute + rank]
                    if whole:
                        wanted[zero_slot] = donor[zero_slot]
                    # An axis that was not there does what the donor, or another axis, does.
                    other = _below(state, 2 * num_axes)
                    for group in range(num_groups):
                        at = first_signature + group * num_axes
                        for axis in range(num_axes):
                            if whole or (old_most[axis] == 1.0 and (other >= num_axes or old_most[other] == 1.0)):
                                wanted[at + axis] = donor[at + axis]
                            elif old_most[axis] == 1.0:
                                wanted[at + axis] = value[at + other]
                else:
                    first = _below(state, num_groups)
                    last = min(num_groups, first + 1 + _below(state, 8))
                    for group in range(first, last):
                        for axis in range(num_axes):
                            slot = first_signature + group * num_axes + axis
                            if most[axis] > 1.0:
                                wanted[slot] = donor[slot]

            reshaped = False
            for slot in range(num_axes + 2):
                result[slot] = wanted[slot]
                reshaped = reshaped or wanted[slot] != value[slot]
            plain = space.degrees[result[0]] > 1 and space.virtuals[result[num_axes + 1]] == 1
            slot = num_axes + 2
            result[slot] = _settle(state, every_kind, wanted[slot], value[slot]) if plain else 0
            slot = num_axes + 3
            result[slot] = 0
            if space.degrees[result[0]] > 1 or space.scalars[N_ORDERS_ONE] == 1:
                result[slot] = _settle(state, every_order, wanted[slot], value[slot])
            for slot in range(num_axes + 4, shares_slot):
                result[slot] = value[slot]
                if reshaped or wanted[slot] != value[slot]:
                    size_mask(space, result, slot - num_axes - 4, parts)
                    result[slot] = _settle(state, parts, wanted[slot], value[slot])
                    reshaped = reshaped or result[slot] != value[slot]
            result[shares_slot] = 0
            if ways.shape[0] > 1:
                find_stages(space, result, devices, scratch[0], scratch[1])
                share_mask(space, result, space.degrees[result[0]], scratch[0], ways)
                result[shares_slot] = _settle(state, ways, wanted[shares_slot], value[shares_slot])
                reshaped = reshaped or result[shares_slot] != value[shares_slot]
                # In another order of the devices the same way may be other samples.
                reshaped = reshaped or (result[shares_slot] > 0 and result[num_axes + 3] != value[num_axes + 3])
            _read(space, result, new, devices, scratch, sizes, samples, most, shares)
            num_chunks, num_ranks, num_meshes = new[S_CHUNKS], new[S_RANKS], new[S_MESHES]
            start = 0
            for chunk in range(first_recompute - first_cut):
                slot = first_cut + chunk
                result[slot] = 0
                if chunk < num_chunks - 1:
                    low, high = space.windows[num_chunks, chunk]
                    low = max(low, start + 1)
                    if evenly:
                        ends[chunk] = nth_cut(space.weight, start, low, high, shares[chunk], 0)
                    else:
                        ends[chunk] = min(max(ends[chunk], low), high)
                        result[slot] = cut_number(space.weight, start, low, high, shares[chunk], ends[chunk])
                    start = ends[chunk]
            ends[num_chunks - 1] = space.units.shape[0]
            for rank in range(zero_slot - first_recompute):
                slot = first_recompute + rank
                result[slot] = 0
                if rank < num_ranks:
                    if bound:
                        mode_mask(space, ends[:num_chunks], num_ranks, rank, mode)
                        result[slot] = _settle(state, mode, wanted[slot], value[slot])
                    else:
                        result[slot] = _settle(state, space.modes, wanted[slot], value[slot])
            result[zero_slot] = 0
            if new[S_REPLICAS] > 1:
                result[zero_slot] = _settle(state, space.zeros, wanted[zero_slot], value[zero_slot])
            for group in range(num_groups):
                slot = first_signature + group * num_axes
                touched = reshaped
                for axis in range(num_axes):
                    touched = touched or wanted[slot + axis] != value[slot + axis]
                    result[slot + axis] = value[slot + axis]
                if touched:
                    legal = np.empty(space.groups[group, G_VALUES], np.bool_)
                    for axis in range(num_axes):
                        signature_mask(
                            tables, space, group, axis, chosen, sizes[:num_meshes], samples[:num_meshes], legal
                        )
                        result[slot + axis] = _settle(state, legal, wanted[slot + axis], value[slot + axis])
                        assign(space, group, axis, result[slot + axis], chosen)
            changed = False
            for slot in range(value.shape[0]):
                changed = changed or result[slot] != value[slot]
            if changed:
                break

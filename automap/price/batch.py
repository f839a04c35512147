"""Many plans of one space at once: values of the space's slots in, seconds and overflow out, all compiled.

The arithmetic is that of `unit_cost` and `combine`, in the same order as in `Evaluator.evaluate`: the results are
identical floats.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float64, int64, void

from automap.order import A_COUNT, INTERLEAVED
from automap.price.ahead import outgoing
from automap.price.arrays import (
    G_ASSIGNMENT,
    G_COUNT,
    G_MEMBERS,
    I_FIRST,
    I_ONE,
    I_ONE_ROW,
    I_ONE_SLOT,
    I_OTHER,
    I_OTHER_ROW,
    I_OTHER_SLOT,
    I_USER_ROW,
    I_USER_SLOT,
    N_BATCH,
    N_DEVICES,
    N_FIRST_CUT,
    N_FIRST_RECOMPUTE,
    N_FIRST_SIGNATURE,
    N_KIND,
    N_ZERO_SLOT,
    SPACE,
    Y_FIRST,
    Y_UNIFORM,
)
from automap.price.combine import P_COUNT, P_ZERO, R_COUNT, combine, overflow, step_time_s
from automap.price.communication import L_COUNT
from automap.price.compiled import borrowing, kernel
from automap.price.sharded import new_sharded
from automap.price.tables import OP_SIGNATURES, S_PLACES
from automap.price.unit import shard_unit, unit_cost
from automap.price.vectors import C_COUNT, MAX_AXES, TABLES
from ir.factors import BROADCAST, PARTIAL

# What tells rows of unit costs apart within one plan.
K_TYPE, K_MODE, K_RANK, K_BEFORE, K_OPENS, K_INCOMING = range(6)
K_COUNT = K_INCOMING + MAX_AXES


@borrowing(int64(float64[::1], int64, int64, int64, int64, int64), inner=True)
def nth_cut(weight, start, low, high, chunks_left, number):
    """The end in [low, high] that is `number`-th nearest to an even share of what is left behind unit `start`.

    Of two that are equally near the left one comes first.
    """
    target = weight[start] + (weight[weight.shape[0] - 1] - weight[start]) / chunks_left
    right = low
    after = high + 1
    while right < after:
        middle = (right + after) // 2
        if weight[middle] < target:
            right = middle + 1
        else:
            after = middle
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


@borrowing(void(TABLES, int64, int64, int64[:, ::1], float64[::1], boolean[::1], float64[::1]), inner=True)
def _split(tables, row, slot, chosen, axes, zero_axes, result):
    """Over how many ranks a parameter is split where operator `row` reads it, and over how many more ZeRO shards it."""
    result[0] = 1.0
    result[1] = 1.0
    for a in range(axes.shape[0]):
        at = tables.signatures[tables.operators[row, OP_SIGNATURES] + chosen[row, a], S_PLACES] + slot
        if tables.places[at, 0] >= 0:
            result[0] *= axes[a]
        elif zero_axes[a] and tables.places[at, 0] == BROADCAST:
            result[1] *= axes[a]


@kernel(void(TABLES, SPACE, int64[:, ::1], float64[:, ::1]))
def price_many(tables, space, values, out):
    """Seconds and overflow of complete plans.

    Args:
        tables: see `Tables.arrays`.
        space: see `compile_space`.
        values: [n, slots].
        out: [n, 2] seconds of a step; largest share of its memory by which a device overflows. Written.
    """
    num_units = space.units.shape[0]
    num_axes = space.axes.shape[1]
    num_rows = tables.operators.shape[0]
    chosen = np.empty((num_rows, num_axes), np.int64)
    costs = np.empty((num_units, C_COUNT))
    keys = np.empty((num_units, K_COUNT), np.int64)
    covered = np.empty(num_units, np.bool_)
    laid = np.empty(space.boundary.shape[0], np.int64)
    sharded = new_sharded(tables, num_axes)
    zero_axes = np.zeros(num_axes, np.bool_)
    parts = np.empty((num_units, 3), np.int64)
    whole = np.empty(num_units, np.bool_)
    home = np.empty(num_units, np.int64)
    incoming = np.empty(num_axes, np.int64)
    tied = np.empty((space.tied.shape[0], 5 + num_axes))
    ways = np.empty(2)
    records = np.empty((0, L_COUNT))
    cursor = np.zeros(1, np.int64)
    settings = np.empty(P_COUNT)
    for c in range(P_COUNT):
        settings[c] = space.settings[c]
    program = np.empty((0, A_COUNT), np.int64)
    for plan in range(values.shape[0]):
        value = values[plan]
        num_ranks = space.degrees[value[0]]
        inner = space.degrees[value[1]]
        place = value[2] if num_axes == 3 else 0
        middle = space.middles[place]
        count = space.micro_batches[value[num_axes]]
        virtual = space.virtuals[value[num_axes + 1]]
        num_chunks = num_ranks * virtual
        outer = space.scalars[N_DEVICES] // num_ranks // inner // middle
        samples = float64(space.scalars[N_BATCH] // count)
        begin = space.layouts[value[0], value[1], place, Y_FIRST]
        uniform = space.layouts[value[0], value[1], place, Y_UNIFORM] == 1
        zero_axes[0] = outer > 1
        if num_axes == 3:
            zero_axes[1] = middle > 1
        settings[P_ZERO] = value[space.scalars[N_ZERO_SLOT]]
        for g in range(space.groups.shape[0]):
            members = space.groups[g, G_COUNT]
            for a in range(num_axes):
                picked = value[space.scalars[N_FIRST_SIGNATURE] + g * num_axes + a]
                at = space.groups[g, G_ASSIGNMENT] + picked * members
                for m in range(members):
                    chosen[space.members[space.groups[g, G_MEMBERS] + m], a] = space.assignments[at + m]

        for t in range(laid.shape[0]):
            laid[t] = -1
        known = 0
        num_parts = 0
        before = -1
        unit = 0
        for chunk in range(num_chunks):
            rank = chunk % num_ranks
            mode = value[space.scalars[N_FIRST_RECOMPUTE] + rank]
            end = num_units
            if chunk < num_chunks - 1:
                low, high = space.windows[num_chunks, chunk]
                picked = value[space.scalars[N_FIRST_CUT] + chunk]
                end = nth_cut(space.weight, unit, max(low, unit + 1), high, num_chunks - chunk, picked)
            opens = 1 if chunk > 0 or unit == 0 else 0
            while unit < end:
                kind = space.units[unit]
                home[unit] = rank
                row = -1
                where = 0 if uniform else rank
                for k in range(known):
                    if (
                        keys[k, K_TYPE] == kind
                        and keys[k, K_BEFORE] == before
                        and keys[k, K_OPENS] == opens
                        and keys[k, K_MODE] == mode
                        and keys[k, K_RANK] == where
                    ):
                        row = k
                        break
                if row < 0:
                    row = known
                    known += 1
                    keys[row, K_TYPE] = kind
                    keys[row, K_BEFORE] = before
                    keys[row, K_OPENS] = opens
                    keys[row, K_MODE] = mode
                    keys[row, K_RANK] = where
                    outgoing(tables, space.makers, before, opens == 1, chosen, incoming)
                    for a in range(num_axes):
                        keys[row, K_INCOMING + a] = incoming[a]
                    # Behind another unit, but in the same surroundings: the cost is known.
                    same = -1
                    for k in range(row):
                        if keys[k, K_TYPE] == kind and keys[k, K_MODE] == mode and keys[k, K_RANK] == where:
                            alike = True
                            for a in range(num_axes):
                                alike = alike and keys[k, K_INCOMING + a] == incoming[a]
                            if alike:
                                same = k
                                break
                    if same >= 0:
                        covered[row] = covered[same]
                        for c in range(C_COUNT):
                            costs[row, c] = costs[same, c]
                    else:
                        first, last = space.spans[kind], space.spans[kind + 1]
                        at = begin + rank
                        if laid[kind] != where:
                            laid[kind] = where
                            shard_unit(
                                tables,
                                first,
                                last,
                                chosen[first:last],
                                space.axes[at],
                                space.links[at],
                                zero_axes,
                                space.hardware[at],
                                samples,
                                records,
                                cursor,
                                sharded,
                            )
                        covered[row] = unit_cost(
                            tables,
                            first,
                            last,
                            chosen[first:last],
                            space.masks[mode, first:last],
                            incoming,
                            space.axes[at],
                            space.links[at],
                            space.hardware[at],
                            samples,
                            space.boundary[kind],
                            records,
                            cursor,
                            sharded,
                            costs[row],
                        )
                if opens == 0 and parts[num_parts - 1, 1] == row:
                    parts[num_parts - 1, 2] += 1
                else:
                    parts[num_parts, 0] = chunk
                    parts[num_parts, 1] = row
                    parts[num_parts, 2] = 1
                    whole[num_parts] = covered[row]
                    num_parts += 1
                before = kind
                opens = 0
                unit += 1

        for t in range(space.tied.shape[0]):
            one = home[space.tied[t, I_ONE]]
            other = home[space.tied[t, I_OTHER]]
            for earlier in range(space.tied[t, I_FIRST], t):
                if home[space.tied[earlier, I_OTHER]] == other:
                    one = other
            tied[t, 0] = one
            tied[t, 1] = other
            _split(
                tables,
                space.tied[t, I_ONE_ROW],
                space.tied[t, I_ONE_SLOT],
                chosen,
                space.axes[begin + one],
                zero_axes,
                ways,
            )
            tied[t, 2] = space.tied_elements[t] / ways[0]
            _split(
                tables,
                space.tied[t, I_OTHER_ROW],
                space.tied[t, I_OTHER_SLOT],
                chosen,
                space.axes[begin + other],
                zero_axes,
                ways,
            )
            tied[t, 3] = space.tied_elements[t] / ways[0]
            tied[t, 4] = space.tied_elements[t] / ways[0] / ways[1]
            user = space.tied[t, I_USER_ROW]
            part = 1.0
            for a in range(num_axes - 1, -1, -1):
                at = tables.signatures[tables.operators[user, OP_SIGNATURES] + chosen[user, a], S_PLACES]
                at += space.tied[t, I_USER_SLOT]
                is_sum = tables.places[at, 0] == BROADCAST and tables.places[at, 1] == PARTIAL
                tied[t, 5 + a] = 0.0
                if is_sum and space.axes[begin + other, a] > 1.0:
                    tied[t, 5 + a] = part
                    part /= space.axes[begin + other, a]

        stop = begin + num_ranks
        result = np.empty((num_ranks, R_COUNT))
        combine(
            costs[:known],
            parts[:num_parts],
            whole[:num_parts],
            INTERLEAVED if virtual > 1 else space.scalars[N_KIND],
            program,
            num_ranks,
            count,
            space.axes[begin:stop],
            space.links[begin:stop],
            space.hardware[begin:stop],
            zero_axes,
            space.send_latency_s[begin:stop],
            space.send_bytes_per_s[begin:stop],
            space.capacity[begin:stop],
            tied,
            settings,
            True,
            result,
        )
        out[plan, 0] = step_time_s(result)
        out[plan, 1] = overflow(result)

"""Desk: one plan of a space being priced, from values of the slots to seconds and overflow; all compiled.

A plan is laid out as rows of unit costs: equal units in equal surroundings share one. `set_frame` reads everything but
signatures, `pick` one signature of a linkage group, `cost_rows` prices the rows and `finish` puts the step together.
Signatures may be undecided, -1: then the costs are lower bounds. What a unit costs in its surroundings is remembered
(`Memo`), since plans that are priced one after another have most of it in common. The arithmetic is that of `unit_cost`
and `combine`, in the same order as in `Evaluator.evaluate`: the results are identical floats.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import boolean, float64, int64, types, void

from automap.order import A_COUNT, INTERLEAVED
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
    N_FIRST_CUT,
    N_FIRST_RECOMPUTE,
    N_MOST_MESHES,
    N_PART,
    N_SHARES_SLOT,
    N_ZERO_SLOT,
    SPACE,
    Y_FIRST,
    Y_UNIFORM,
)
from automap.price.combine import P_COUNT, P_ZERO, R_COUNT, combine, overflow, step_time_s
from automap.price.communication import L_COUNT, UNKNOWN, V_COUNT
from automap.price.compiled import borrowing, kernel
from automap.price.legality import share_devices, share_of, sharing, unlike_meshes
from automap.price.placements import dual
from automap.price.sharded import SHARDED
from automap.price.tables import OP_INPUTS, OP_SIGNATURES, S_PLACES
from automap.price.unit import shard_unit, unit_cost
from automap.price.vectors import C_COUNT, H_COUNT, MAX_AXES, TABLES
from ir.factors import BROADCAST, PARTIAL

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

# What tells rows of unit costs apart within one plan.
K_TYPE, K_MODE, K_RANK, K_BEFORE, K_OPENS, K_INCOMING = range(6)
K_COUNT = K_INCOMING + MAX_AXES
# Slots of Desk.frame: pipeline ranks, chunks, micro-batches, kind of the schedule; unlike meshes; whether one rank
# stands for all; rows and parts laid out; whether all ranks have as many devices.
F_RANKS, F_CHUNKS, F_COUNT_OF_BATCHES, F_KIND, F_MESHES, F_UNIFORM, F_ROWS, F_PARTS, F_ALIKE = range(9)
REMEMBERED = 1 << 14
"""Costs of units that a memo holds, 6 MB of them; a power of two."""


class Desk(NamedTuple):
    """Scratch memory of one caller."""

    frame: Ints
    """See the F_ constants."""
    devices: Ints
    """[ranks]"""
    rows: Ints
    """[ranks] row of each among the distinct stages."""
    stages: Ints
    """[ranks] the same as the kind of device sees it that is looked from, see `Choice.views`."""
    boundaries: Ints
    """[ranks] row of the boundary behind each."""
    samples: Ints
    """[ranks] of a micro-batch, with which that kind is priced."""
    divided: Ints
    """[unlike meshes] samples of a micro-batch that must divide, see `unlike_meshes`."""
    sizes: Floats
    """[unlike meshes, axes]"""
    shares: Floats
    """[chunks] see `cut_shares`."""
    picked: Ints
    """[groups, axes] value of each group's slots, -1 = undecided."""
    chosen: Ints
    """[operator rows, axes] the signatures that follow."""
    keys: Ints
    """[rows, K_COUNT]"""
    costs: Floats
    """[rows, C_COUNT]"""
    covered: Mask
    """[rows] whether the unit is recomputed as a whole."""
    parts: Ints
    """[parts, 3] see `combine`."""
    whole: Mask
    """[parts] see `combine`."""
    home: Ints
    """[units] pipeline rank."""
    laid: Ints
    """[types] for which rank `Sharded` holds the unit type, or -1."""
    incoming: Ints
    """[axes] scratch."""
    zero_axes: Mask
    """[axes] whether ZeRO shards over the axis."""
    tied: Floats
    """See `combine`."""
    ways: Floats
    """[2] scratch."""
    settings: Floats
    """[P_COUNT]"""
    ranks: Floats
    """[ranks, R_COUNT] what `finish` found, see `combine`."""
    records: Floats
    """No list of collectives is kept."""
    cursor: Ints
    """[1] rows of it written."""


class Memo(NamedTuple):
    """What units cost in surroundings that were priced before; a later one takes the place of an earlier one."""

    keys: Ints
    """[remembered, 2] two hashes of unit and surroundings; zeros where there is nothing."""
    costs: Floats
    """[remembered, C_COUNT + 1] costs, then whether the unit is recomputed as a whole."""


DESK = types.NamedTuple(
    (
        *[int64[::1]] * 7,
        float64[:, ::1],
        float64[::1],
        *[int64[:, ::1]] * 3,
        float64[:, ::1],
        boolean[::1],
        int64[:, ::1],
        boolean[::1],
        *[int64[::1]] * 3,
        boolean[::1],
        float64[:, ::1],
        *[float64[::1]] * 2,
        *[float64[:, ::1]] * 2,
        int64[::1],
    ),
    Desk,
)
"""Numba's type of `Desk`."""
MEMO = types.NamedTuple((int64[:, ::1], float64[:, ::1]), Memo)
"""Numba's type of `Memo`."""


def new_memo() -> Memo:
    """An empty memo; of one problem."""
    return Memo(np.zeros((REMEMBERED, 2), np.int64), np.empty((REMEMBERED, C_COUNT + 1)))


@kernel(DESK(TABLES, SPACE), inner=True)
def new_desk(tables, space):
    """A desk on which nothing is picked."""
    num_units = space.units.shape[0]
    num_axes = space.obeys.shape[0]
    most = space.windows.shape[1]
    meshes = space.scalars[N_MOST_MESHES]
    desk = Desk(
        np.zeros(9, np.int64),
        np.empty(most, np.int64),
        np.empty(most, np.int64),
        np.empty(most, np.int64),
        np.empty(most, np.int64),
        np.empty(most, np.int64),
        np.empty(meshes, np.int64),
        np.empty((meshes, num_axes)),
        np.empty(most),
        np.full((space.groups.shape[0], num_axes), -1),
        np.full((tables.operators.shape[0], num_axes), -1),
        np.empty((num_units, K_COUNT), np.int64),
        np.empty((num_units, C_COUNT)),
        np.empty(num_units, np.bool_),
        np.empty((num_units, 3), np.int64),
        np.empty(num_units, np.bool_),
        np.empty(num_units, np.int64),
        np.empty(space.boundary.shape[0], np.int64),
        np.empty(num_axes, np.int64),
        np.zeros(num_axes, np.bool_),
        np.zeros((space.tied.shape[0], 5 + num_axes)),
        np.empty(2),
        np.empty(P_COUNT),
        np.empty((most, R_COUNT)),
        np.empty((0, L_COUNT)),
        np.zeros(1, np.int64),
    )
    for c in range(P_COUNT):
        desk.settings[c] = space.settings[c]
    return desk


@borrowing(void(TABLES, int64[:, ::1], int64, boolean, int64[:, ::1], int64[::1]), inner=True)
def outgoing(tables, makers, unit_type, is_sent, chosen, placement):
    """Writes the placement in which a unit's crossing tensor leaves it; UNKNOWN where undecided.

    Args:
        tables: see `Tables.arrays`.
        makers: [types, 2] operator row and output slot of the crossing tensor, or -1.
        unit_type: of the unit, or -1 before the first.
        is_sent: whether it goes to another chunk; a partial tensor is reduced before that.
        chosen: [operator rows, axes].
        placement: [axes], written.
    """
    maker = makers[unit_type, 0] if unit_type >= 0 else -1
    for a in range(placement.shape[0]):
        if maker < 0:
            placement[a] = BROADCAST
        elif chosen[maker, a] < 0:
            placement[a] = UNKNOWN
        else:
            row = tables.operators[maker, OP_SIGNATURES] + chosen[maker, a]
            slot = tables.operators[maker, OP_INPUTS] + makers[unit_type, 1]
            placement[a] = tables.places[tables.signatures[row, S_PLACES] + slot, 0]
            if is_sent:
                placement[a] = dual(placement[a])


@borrowing(boolean(SPACE, int64[::1], int64[::1], int64[::1], int64[::1]))
def find_stages(space, value, devices, rows, boundaries):
    """Writes where the stages of a pipeline stand.

    Args:
        space: see `compile_space`.
        value: those of the slots that say how many devices stages have, and before.
        devices: [ranks] of each, written.
        rows: [ranks] of each among the distinct stages, written.
        boundaries: [ranks], row of the boundary behind each, written.

    Returns:
        Whether all stages have as many devices.
    """
    num_axes = space.obeys.shape[0]
    num_ranks = space.degrees[value[0]]
    place = value[2] if num_axes == 3 else 0
    order = value[num_axes + 3]
    alike = share_devices(space, value, devices)
    before = 0
    for rank in range(num_ranks):
        if alike:
            boundaries[rank] = space.layouts[order, value[0], value[1], place, Y_FIRST] + rank
            rows[rank] = space.stages[boundaries[rank]]
        else:
            mine = devices[rank] // space.scalars[N_PART]
            after = devices[(rank + 1) % num_ranks] // space.scalars[N_PART]
            rows[rank] = space.stage_rows[order, value[1], place, before, mine]
            before += mine
            boundaries[rank] = space.send_rows[order, before, mine, after]
    return alike


@borrowing(void(SPACE, int64[::1], int64, int64[::1], int64[::1], int64[::1], int64[::1]))
def look_from(space, value, kind, devices, rows, stages, samples):
    """Writes the stages as a kind of device sees them: see `Choice.views`.

    Args:
        space: see `compile_space`.
        value: those of the slots before the first cut.
        kind: number of the kind, the slowest first.
        devices: [ranks] of each.
        rows: [ranks] of each among the distinct stages.
        stages: [ranks] row with the hardware of the kind where ranks have unlike shares, written.
        samples: [ranks] of a micro-batch with which each is priced, written.
    """
    num_axes = space.obeys.shape[0]
    batch = space.scalars[N_BATCH] // space.micro_batches[value[num_axes]]
    within = space.degrees[value[1]] * (space.middles[value[2]] if num_axes == 3 else 1)
    for rank in range(space.degrees[value[0]]):
        outer = devices[rank] // within
        number = sharing(space, value, rows[rank])
        if number < 0:
            stages[rank] = rows[rank]
            samples[rank] = -(-batch // outer) * outer
        else:
            stages[rank] = space.kind_rows[number, kind]
            samples[rank] = share_of(space, value, number, kind, True) * outer


@borrowing(void(SPACE, int64[::1], int64, float64[::1]), inner=True)
def cut_shares(space, stages, num_ranks, shares):
    """Writes, of each chunk, how many times its rank's speed the ranks of it and of all chunks behind have together.

    Args:
        space: see `compile_space`.
        stages: [ranks] rows among the distinct stages, see `look_from`.
        num_ranks: pipeline ranks.
        shares: [chunks], written; where ranks are alike, how many chunks are left.
    """
    left = 0.0
    for chunk in range(shares.shape[0]):
        left += space.speed[stages[chunk % num_ranks]]
    for chunk in range(shares.shape[0]):
        mine = space.speed[stages[chunk % num_ranks]]
        shares[chunk] = left / mine
        left -= mine


@borrowing(int64(float64[::1], int64, int64, int64, float64, int64), inner=True)
def nth_cut(weight, start, low, high, share, number):
    """The end in [low, high] that is `number`-th nearest to one `share`-th of what is left behind unit `start`.

    Of two that are equally near the left one comes first.
    """
    target = weight[start] + (weight[weight.shape[0] - 1] - weight[start]) / share
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


@borrowing(void(SPACE, int64[::1], DESK), inner=True)
def set_stages(space, value, desk):
    """Lays out where the stages of a plan stand whose slots before the first cut are decided.

    Args:
        space: see `compile_space`.
        value: [slots].
        desk: `frame` but for rows and parts, `devices` to `shares`, and `zero_axes` are written.
    """
    num_axes = space.obeys.shape[0]
    frame = desk.frame
    num_ranks = space.degrees[value[0]]
    virtual = space.virtuals[value[num_axes + 1]]
    num_chunks = num_ranks * virtual
    alike = find_stages(space, value, desk.devices, desk.rows, desk.boundaries)
    num_meshes = unlike_meshes(space, value, alike, desk.devices, desk.rows, desk.sizes, desk.divided)
    look_from(space, value, 0, desk.devices, desk.rows, desk.stages, desk.samples)
    shares = desk.shares[:num_chunks]
    cut_shares(space, desk.stages, num_ranks, shares)
    uniform = 0
    if alike:
        place = value[2] if num_axes == 3 else 0
        uniform = space.layouts[value[num_axes + 3], value[0], value[1], place, Y_UNIFORM]
    frame[F_RANKS] = num_ranks
    frame[F_CHUNKS] = num_chunks
    frame[F_COUNT_OF_BATCHES] = space.micro_batches[value[num_axes]]
    frame[F_KIND] = INTERLEAVED if virtual > 1 else space.kinds[value[num_axes + 2]]
    frame[F_MESHES] = num_meshes
    frame[F_UNIFORM] = uniform
    frame[F_ALIKE] = int64(alike)
    for a in range(num_axes):
        desk.zero_axes[a] = False
        for mesh in range(num_meshes):
            desk.zero_axes[a] = desk.zero_axes[a] or (a < num_axes - 1 and desk.sizes[mesh, a] > 1.0)


@borrowing(void(SPACE, int64[::1], DESK), inner=True)
def set_frame(space, value, desk):
    """Lays out the rows of a plan whose slots before the first signature are decided.

    Args:
        space: see `compile_space`.
        value: [slots].
        desk: all but signatures and costs is written.
    """
    set_stages(space, value, desk)
    num_units = space.units.shape[0]
    frame, keys, parts = desk.frame, desk.keys, desk.parts
    num_ranks, num_chunks, uniform = frame[F_RANKS], frame[F_CHUNKS], frame[F_UNIFORM]
    desk.settings[P_ZERO] = value[space.scalars[N_ZERO_SLOT]]

    known = 0
    num_parts = 0
    before = -1
    unit = 0
    for chunk in range(num_chunks):
        rank = chunk % num_ranks
        where = 0 if uniform == 1 else rank
        mode = value[space.scalars[N_FIRST_RECOMPUTE] + rank]
        end = num_units
        if chunk < num_chunks - 1:
            low, high = space.windows[num_chunks, chunk]
            picked = value[space.scalars[N_FIRST_CUT] + chunk]
            end = nth_cut(space.weight, unit, max(low, unit + 1), high, desk.shares[chunk], picked)
        opens = 1 if chunk > 0 or unit == 0 else 0
        while unit < end:
            kind = space.units[unit]
            desk.home[unit] = rank
            row = -1
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
            if opens == 0 and parts[num_parts - 1, 1] == row:
                parts[num_parts - 1, 2] += 1
            else:
                parts[num_parts, 0] = chunk
                parts[num_parts, 1] = row
                parts[num_parts, 2] = 1
                num_parts += 1
            before = kind
            opens = 0
            unit += 1
    frame[F_ROWS] = known
    frame[F_PARTS] = num_parts


@borrowing(void(SPACE, int64, int64, int64, DESK), inner=True)
def pick(space, group, axis, value, desk):
    """Decides the signatures of a group on an axis, or takes that back with -1."""
    members = space.groups[group, G_COUNT]
    at = space.groups[group, G_ASSIGNMENT] + value * members
    desk.picked[group, axis] = value
    for m in range(members):
        signature = space.assignments[at + m] if value >= 0 else -1
        desk.chosen[space.members[space.groups[group, G_MEMBERS] + m], axis] = signature


@borrowing(types.UniTuple(int64, 2)(SPACE, DESK, int64), inner=True)
def _hashes(space, desk, row):
    """Two hashes of all that the costs of a row depend on, neither of them zero."""
    keys = desk.keys
    kind = keys[row, K_TYPE]
    one, two = int64(1469598103934665603), int64(7809847782465536322)
    num_axes = desk.incoming.shape[0]
    first, last = space.group_spans[kind], space.group_spans[kind + 1]
    count = 3 + 2 * num_axes + (last - first) * num_axes
    for i in range(count):
        if i >= 3 + 2 * num_axes:
            left = i - 3 - 2 * num_axes
            word = desk.picked[first + left // num_axes, left % num_axes]
        elif i >= 3 + num_axes:
            word = int64(desk.zero_axes[i - 3 - num_axes])
        elif i >= 3:
            word = keys[row, K_INCOMING + i - 3]
        elif i == 2:
            word = desk.samples[keys[row, K_RANK]]
        elif i == 1:
            word = desk.stages[keys[row, K_RANK]]
        else:
            word = kind * 16 + keys[row, K_MODE]
        one = (one ^ word) * int64(1099511628211)
        one ^= one >> 29
        two = (two + word) * int64(6364136223846793005) + int64(1442695040888963407)
        two ^= two >> 31
    return one | 1, two


@borrowing(void(TABLES, SPACE, MEMO, int64, DESK, SHARDED), inner=True)
def cost_rows(tables, space, memo, kind, desk, sharded):
    """Prices the rows that see a unit type.

    Args:
        tables: see `Tables.arrays`.
        space: see `compile_space`.
        memo: read and written.
        kind: unit type whose signatures changed, or -1: all rows.
        desk: `costs` and `covered` are written.
        sharded: scratch.
    """
    frame, keys, costs, covered = desk.frame, desk.keys, desk.costs, desk.covered
    num_axes = desk.incoming.shape[0]
    records, cursor = desk.records, desk.cursor
    for t in range(desk.laid.shape[0]):
        desk.laid[t] = -1
    for row in range(frame[F_ROWS]):
        if 0 <= kind != keys[row, K_TYPE] and keys[row, K_BEFORE] != kind:
            continue
        mine, mode, where = keys[row, K_TYPE], keys[row, K_MODE], keys[row, K_RANK]
        outgoing(tables, space.makers, keys[row, K_BEFORE], keys[row, K_OPENS] == 1, desk.chosen, desk.incoming)
        for a in range(num_axes):
            keys[row, K_INCOMING + a] = desk.incoming[a]
        # Behind another unit, but in the same surroundings: the cost is known.
        same = -1
        for k in range(row):
            if keys[k, K_TYPE] == mine and keys[k, K_MODE] == mode and keys[k, K_RANK] == where:
                alike = True
                for a in range(num_axes):
                    alike = alike and keys[k, K_INCOMING + a] == desk.incoming[a]
                if alike:
                    same = k
                    break
        if same >= 0:
            covered[row] = covered[same]
            for c in range(C_COUNT):
                costs[row, c] = costs[same, c]
            continue
        one, two = _hashes(space, desk, row)
        place = two & (REMEMBERED - 1)
        if memo.keys[place, 0] == one and memo.keys[place, 1] == two:
            for c in range(C_COUNT):
                costs[row, c] = memo.costs[place, c]
            covered[row] = memo.costs[place, C_COUNT] > 0.0
            continue
        first, last = space.spans[mine], space.spans[mine + 1]
        at = desk.stages[where]
        samples = float64(desk.samples[where])
        if desk.laid[mine] != where:
            desk.laid[mine] = where
            shard_unit(
                tables,
                first,
                last,
                desk.chosen[first:last],
                space.axes[at],
                space.links[at],
                desk.zero_axes,
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
            desk.chosen[first:last],
            space.masks[mode, first:last],
            desk.incoming,
            space.axes[at],
            space.links[at],
            space.hardware[at],
            samples,
            space.boundary[mine],
            records,
            cursor,
            sharded,
            costs[row],
        )
        memo.keys[place, 0] = one
        memo.keys[place, 1] = two
        for c in range(C_COUNT):
            memo.costs[place, c] = costs[row, c]
        memo.costs[place, C_COUNT] = float64(covered[row])


@borrowing(void(TABLES, int64, int64, int64[:, ::1], float64[::1], boolean[::1], float64[::1]), inner=True)
def _split(tables, row, slot, chosen, axes, zero_axes, result):
    """Over how many ranks a parameter is split where operator `row` reads it, and over how many more ZeRO shards it.

    Undecided counts as split.
    """
    result[0] = 1.0
    result[1] = 1.0
    for a in range(axes.shape[0]):
        at = tables.signatures[tables.operators[row, OP_SIGNATURES] + chosen[row, a], S_PLACES] + slot
        if chosen[row, a] < 0 or tables.places[at, 0] >= 0:
            result[0] *= axes[a]
        elif zero_axes[a] and tables.places[at, 0] == BROADCAST:
            result[1] *= axes[a]


@kernel(void(TABLES, SPACE, DESK, boolean, float64[::1]), inner=True)
def finish(tables, space, desk, exact, out):
    """The step of the priced rows.

    Args:
        tables: see `Tables.arrays`.
        space: see `compile_space`.
        desk: `tied`, `whole` and `ranks` are written.
        exact: see `combine`.
        out: [2] seconds of a step; largest share of its memory by which a device overflows. Written.
    """
    frame, tied, ways, chosen, zero_axes = desk.frame, desk.tied, desk.ways, desk.chosen, desk.zero_axes
    num_axes = desk.incoming.shape[0]
    num_ranks = frame[F_RANKS]
    axes, links = np.empty((num_ranks, num_axes)), np.empty((num_ranks, num_axes, V_COUNT))
    hardware, capacity = np.empty((num_ranks, H_COUNT)), np.empty(num_ranks)
    latency, rate = np.empty(num_ranks), np.empty(num_ranks)
    for rank in range(num_ranks):
        at, behind = desk.stages[rank], desk.boundaries[rank]
        axes[rank], links[rank] = space.axes[at], space.links[at]
        hardware[rank], capacity[rank] = space.hardware[at], space.capacity[at]
        latency[rank], rate[rank] = space.send_latency_s[behind], space.send_bytes_per_s[behind]
    for t in range(space.tied.shape[0]):
        one = desk.home[space.tied[t, I_ONE]]
        other = desk.home[space.tied[t, I_OTHER]]
        for earlier in range(space.tied[t, I_FIRST], t):
            if desk.home[space.tied[earlier, I_OTHER]] == other:
                one = other
        tied[t, 0] = one
        tied[t, 1] = other
        row, slot = space.tied[t, I_ONE_ROW], space.tied[t, I_ONE_SLOT]
        _split(tables, row, slot, chosen, axes[one], zero_axes, ways)
        tied[t, 2] = space.tied_elements[t] / ways[0]
        row, slot = space.tied[t, I_OTHER_ROW], space.tied[t, I_OTHER_SLOT]
        _split(tables, row, slot, chosen, axes[other], zero_axes, ways)
        tied[t, 3] = space.tied_elements[t] / ways[0]
        tied[t, 4] = space.tied_elements[t] / ways[0] / ways[1]
        user = space.tied[t, I_USER_ROW]
        part = 1.0
        for a in range(num_axes - 1, -1, -1):
            at = tables.signatures[tables.operators[user, OP_SIGNATURES] + chosen[user, a], S_PLACES]
            at += space.tied[t, I_USER_SLOT]
            is_sum = tables.places[at, 0] == BROADCAST and tables.places[at, 1] == PARTIAL
            tied[t, 5 + a] = 0.0
            if chosen[user, a] >= 0 and is_sum and axes[other, a] > 1.0:
                tied[t, 5 + a] = part
                part /= axes[other, a]

    for i in range(frame[F_PARTS]):
        desk.whole[i] = desk.covered[desk.parts[i, 1]]
    result = desk.ranks[:num_ranks]
    combine(
        desk.costs[: frame[F_ROWS]],
        desk.parts[: frame[F_PARTS]],
        desk.whole[: frame[F_PARTS]],
        frame[F_KIND],
        np.empty((0, A_COUNT), np.int64),
        num_ranks,
        frame[F_COUNT_OF_BATCHES],
        axes,
        links,
        hardware,
        zero_axes,
        latency,
        rate,
        capacity,
        tied,
        desk.settings,
        exact,
        result,
    )
    out[0] = step_time_s(result)
    out[1] = overflow(result)


@kernel(void(TABLES, SPACE, MEMO, int64[::1], DESK, SHARDED, boolean, float64[::1]), inner=True)
def price_laid(tables, space, memo, value, desk, sharded, exact, out):
    """Prices the rows and the step: of a plan with unlike shares as every kind of device sees it, the most of each.

    A bound looks at the slowest kind alone, which the plan takes no less than.

    Args:
        tables: see `Tables.arrays`.
        space: see `compile_space`.
        memo: read and written.
        value: [slots].
        desk: with frame and signatures.
        sharded: scratch.
        exact: see `combine`.
        out: see `finish`.
    """
    seconds, over = 0.0, -np.inf
    views = space.kind_rows.shape[1] if exact and value[space.scalars[N_SHARES_SLOT]] > 0 else 1
    for kind in range(views - 1, -1, -1):
        if views > 1:
            look_from(space, value, kind, desk.devices, desk.rows, desk.stages, desk.samples)
        cost_rows(tables, space, memo, -1, desk, sharded)
        finish(tables, space, desk, exact, out)
        seconds, over = max(seconds, out[0]), max(over, out[1])
    out[0] = seconds
    out[1] = over

"""What a plan costs that is laid out on a desk; all compiled.

`cost_rows` prices the rows and `finish` puts the step together. Where signatures are undecided the costs are lower
bounds. What a unit costs in its surroundings is remembered (`Memo`), since plans that are priced one after another have
most of it in common. The arithmetic is that of `unit_cost` and `combine`, in the same order as in `Evaluator.evaluate`:
the results are identical floats.
"""

from __future__ import annotations

import math

from numba import boolean, float64, int64, types, void

from automap.jit import borrowing
from automap.price.kernels.collectives import SUMMED, UNKNOWN
from automap.price.kernels.columns import C_COUNT, TABLES
from automap.price.kernels.step import combine, overflow, step_time_s
from automap.price.kernels.tied_parameters import (
    E_HELD,
    TIE_EXCHANGED,
    TIE_ONE,
    TIE_OTHER,
    add_read,
    begin,
    read_too,
    tie,
)
from automap.price.kernels.unit import shard_unit, unit_cost
from automap.price.kernels.unit_workspace import SHARDED
from automap.price.tables import OP_INPUTS, OP_SIGNATURES, S_PLACES
from automap.space.compile import (
    I_FIRST,
    I_ONE,
    I_ONE_READER,
    I_OTHER,
    I_OTHER_READER,
    N_SHARES_SLOT,
    SPACE,
)
from automap.space.kernels.unit_cache import MEMO, REMEMBERED, mix
from automap.space.kernels.workspace import (
    DESK,
    F_COUNT_OF_BATCHES,
    F_KIND,
    F_PARTS,
    F_RANKS,
    F_ROWS,
    K_BEFORE,
    K_INCOMING,
    K_MODE,
    K_OPENS,
    K_RANK,
    K_TYPE,
    look_from,
)
from ir.factors import BROADCAST, PARTIAL


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
            if is_sent and placement[a] == PARTIAL:
                placement[a] = SUMMED


@borrowing(types.UniTuple(int64, 2)(SPACE, DESK, int64), inner=True)
def _hashes(space, desk, row):
    """Two hashes of all that the costs of a row depend on, neither of them zero."""
    keys, kind = desk.keys, desk.keys[row, K_TYPE]
    one, two = mix(desk.hashes[kind, 0], desk.hashes[kind, 1], kind * 16 + keys[row, K_MODE])
    one, two = mix(one, two, desk.stages[keys[row, K_RANK]])
    one, two = mix(one, two, desk.samples[keys[row, K_RANK]])
    for a in range(desk.incoming.shape[0]):
        one, two = mix(one, two, keys[row, K_INCOMING + a] * 2 + int64(desk.zero_axes[a]))
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
    zero_axes = 0
    for a in range(num_axes):
        zero_axes = 2 * zero_axes + int64(desk.zero_axes[a])
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
            for c in range(costs.shape[1]):
                costs[row, c] = costs[same, c]
            continue
        one, two = _hashes(space, desk, row)
        place = two & (REMEMBERED - 1)
        if memo.keys[place, 0] == one and memo.keys[place, 1] == two:
            for c in range(costs.shape[1]):
                costs[row, c] = memo.costs[place, c]
            covered[row] = memo.costs[place, C_COUNT] > 0.0
            continue
        first, last = space.spans[mine], space.spans[mine + 1]
        at = desk.stages[where]
        samples = float64(desk.samples[where])
        laid = desk.laid[mine]
        again = laid[0] == at and laid[1] == desk.samples[where] and laid[2] == zero_axes
        laid[0], laid[1], laid[2] = at, desk.samples[where], zero_axes
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
            again,
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
        for c in range(costs.shape[1]):
            memo.costs[place, c] = costs[row, c]
        memo.costs[place, C_COUNT] = float64(covered[row])


@borrowing(void(TABLES, SPACE, DESK), inner=True)
def _tie(tables, space, desk):
    """Writes what parameters that two units read cost beside them, see `combine`."""
    alone, together, amounts, chosen = desk.alone, desk.together, desk.amounts, desk.chosen
    for t in range(space.tied.shape[0]):
        about, elements = space.tied[t], space.tied_elements[t]
        one, other = desk.home[about[I_ONE]], desk.home[about[I_OTHER]]
        first, second = about[I_ONE_READER], about[I_OTHER_READER]
        begin(together)
        uses = 0.0
        if one == other:
            uses += 1.0
            read_too(tables, first, 0, chosen, together)
        for earlier in range(about[I_FIRST], t):
            # A rank that has the parameter for an earlier unit needs it from no other.
            if desk.home[space.tied[earlier, I_OTHER]] == other:
                one = other
                uses += 1.0
                read_too(tables, space.tied[earlier, I_OTHER_READER], 0, chosen, together)
        begin(alone)
        read_too(tables, second, 0, chosen, alone)
        axes, row = space.axes[desk.stages[other]], desk.tied[t]
        row[:] = 0.0
        row[TIE_ONE], row[TIE_OTHER] = one, other
        amounts[:] = 0.0
        add_read(alone, elements, axes, desk.zero_axes, amounts[1])
        if one == other:
            add_read(together, elements, axes, desk.zero_axes, amounts[0])
            read_too(tables, second, 0, chosen, together)
            add_read(together, elements, axes, desk.zero_axes, amounts[2])
            tie(uses, amounts[0], amounts[1], amounts[2], row)
            continue
        # Each of the two ranks holds it as all its units want it.
        read_too(tables, first, 0, chosen, together)
        following = about[I_FIRST]
        while following < space.tied.shape[0] and space.tied[following, I_FIRST] == about[I_FIRST]:
            rank, reader = desk.home[space.tied[following, I_OTHER]], space.tied[following, I_OTHER_READER]
            if rank == one:
                read_too(tables, reader, 0, chosen, together)
            elif rank == other and following > t:
                read_too(tables, reader, 0, chosen, alone)
            following += 1
        amounts[1] = 0.0
        add_read(alone, elements, axes, desk.zero_axes, amounts[1])
        add_read(together, elements, space.axes[desk.stages[one]], desk.zero_axes, amounts[0])
        row[TIE_EXCHANGED] = max(amounts[0, E_HELD], amounts[1, E_HELD])


@borrowing(void(TABLES, SPACE, DESK, boolean, float64[::1]), inner=True)
def finish(tables, space, desk, exact, out):
    """The step of the priced rows.

    Args:
        tables: see `Tables.arrays`.
        space: see `compile_space`.
        desk: `tied`, `whole` and `ranks` are written.
        exact: see `combine`.
        out: [2] seconds of a step; largest share of its memory by which a device overflows. Written.
    """
    frame = desk.frame
    num_ranks = frame[F_RANKS]
    _tie(tables, space, desk)
    for i in range(frame[F_PARTS]):
        desk.whole[i] = desk.covered[desk.parts[i, 1]]
    result = desk.ranks[:num_ranks]
    combine(
        desk.costs[: frame[F_ROWS]],
        desk.parts[: frame[F_PARTS]],
        desk.whole[: frame[F_PARTS]],
        frame[F_KIND],
        desk.room.program,
        num_ranks,
        frame[F_COUNT_OF_BATCHES],
        desk.stages,
        space.axes,
        space.links,
        space.hardware,
        space.capacity,
        desk.zero_axes,
        desk.boundaries,
        space.send_latency_s,
        space.send_bytes_per_s,
        desk.tied,
        desk.settings,
        exact,
        desk.room,
        result,
    )
    out[0] = step_time_s(result)
    out[1] = overflow(result)


@borrowing(void(TABLES, SPACE, MEMO, int64[::1], DESK, SHARDED, boolean, float64[::1]), inner=True)
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
    seconds, over = 0.0, -math.inf
    views = space.kind_rows.shape[1] if exact and value[space.scalars[N_SHARES_SLOT]] > 0 else 1
    for kind in range(views - 1, -1, -1):
        if views > 1:
            look_from(space, value, kind, desk.devices, desk.rows, desk.stages, desk.samples)
        cost_rows(tables, space, memo, -1, desk, sharded)
        finish(tables, space, desk, exact, out)
        seconds, over = max(seconds, out[0]), max(over, out[1])
    out[0] = seconds
    out[1] = over

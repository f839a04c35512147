"""What the plan in a workspace costs; all compiled.

`cost_rows` prices the rows and `finish` puts the step together. Where signatures are undecided the costs are lower
bounds. What a unit costs in its surroundings is remembered (`UnitCache`), since plans that are priced one after another
have most of it in common. The arithmetic is that of `unit_cost` and `combine`, in the same order as in
`Evaluator.evaluate`: the results are identical floats.
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
from automap.price.tables import OP_INPUTS, OP_SIGNATURES, S_PLACES
from automap.space.kernels.layout import look_from
from automap.space.kernels.records import COMPILED
from automap.space.kernels.unit_cache import REMEMBERED, mix
from automap.space.kernels.workspace import WORKSPACE
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


@borrowing(types.UniTuple(int64, 2)(WORKSPACE, int64), inner=True)
def _hashes(workspace, number):
    """Two hashes of all that the costs of a row depend on, neither of them zero."""
    row, layout = workspace.rows[number], workspace.layout
    one, two = mix(workspace.hashes[row.type, 0], workspace.hashes[row.type, 1], row.type * 16 + row.mode)
    one, two = mix(one, two, layout.stages[row.rank])
    one, two = mix(one, two, layout.samples[row.rank])
    for a in range(workspace.incoming.shape[0]):
        one, two = mix(one, two, row.incoming[a] * 2 + int64(layout.zero_axes[a]))
    return one | 1, two


@borrowing(int64(WORKSPACE, int64), inner=True)
def _same_row(workspace, number):
    """An earlier row whose units are alike in all but the unit before them: its costs are known; or -1."""
    row = workspace.rows[number]
    for earlier in range(number):
        other = workspace.rows[earlier]
        if other.type == row.type and other.mode == row.mode and other.rank == row.rank:
            alike = True
            for a in range(workspace.incoming.shape[0]):
                alike = alike and other.incoming[a] == row.incoming[a]
            if alike:
                return earlier
    return -1


@borrowing(void(COMPILED, int64, WORKSPACE), inner=True)
def cost_rows(compiled, kind, workspace):
    """Prices the rows that see a unit type.

    Args:
        compiled: whose cache is read and written.
        kind: unit type whose signatures changed, or -1: all rows.
        workspace: `costs` and `covered` are written.
    """
    rows, costs, covered = workspace.rows, workspace.costs, workspace.covered
    for number in range(workspace.counts[0].num_rows):
        row = rows[number]
        if 0 <= kind != row.type and row.before != kind:
            continue
        outgoing(compiled.tables, compiled.space.makers, row.before, row.opens, workspace.chosen, workspace.incoming)
        for a in range(workspace.incoming.shape[0]):
            row.incoming[a] = workspace.incoming[a]
        same = _same_row(workspace, number)
        if same >= 0:
            covered[number] = covered[same]
            for c in range(costs.shape[1]):
                costs[number, c] = costs[same, c]
            continue
        one, two = _hashes(workspace, number)
        place = two & (REMEMBERED - 1)
        keys, known = compiled.cache.keys[place], compiled.cache.costs[place]
        if keys[0] == one and keys[1] == two:
            for c in range(costs.shape[1]):
                costs[number, c] = known[c]
            covered[number] = known[C_COUNT] > 0.0
            continue
        _cost_row(compiled, number, workspace)
        keys[0], keys[1] = one, two
        for c in range(costs.shape[1]):
            known[c] = costs[number, c]
        known[C_COUNT] = float64(covered[number])


@borrowing(void(COMPILED, int64, WORKSPACE), inner=True)
def _cost_row(compiled, number, workspace):
    """Prices one row; `Workspace.incoming` holds its incoming placement."""
    tables, space, layout = compiled.tables, compiled.space, workspace.layout
    row = workspace.rows[number]
    first, last = space.spans[row.type], space.spans[row.type + 1]
    at, samples = layout.stages[row.rank], layout.samples[row.rank]
    zero_axes = 0
    for a in range(layout.zero_axes.shape[0]):
        zero_axes = 2 * zero_axes + int64(layout.zero_axes[a])
    prepared = workspace.prepared[row.type]
    is_known = prepared[0] == at and prepared[1] == samples and prepared[2] == zero_axes
    prepared[0], prepared[1], prepared[2] = at, samples, zero_axes
    shard_unit(
        tables,
        first,
        last,
        workspace.chosen[first:last],
        space.axes[at],
        space.links[at],
        layout.zero_axes,
        space.hardware[at],
        float64(samples),
        workspace.records,
        workspace.cursor,
        is_known,
        workspace.sharded,
    )
    workspace.covered[number] = unit_cost(
        tables,
        first,
        last,
        workspace.chosen[first:last],
        space.masks[row.mode, first:last],
        workspace.incoming,
        space.axes[at],
        space.links[at],
        space.hardware[at],
        float64(samples),
        space.boundary[row.type],
        workspace.records,
        workspace.cursor,
        workspace.sharded,
        workspace.costs[number],
    )


@borrowing(void(COMPILED, WORKSPACE), inner=True)
def _tie(compiled, workspace):
    """Writes what parameters that two units read cost beside them, see `combine`."""
    tables, space, layout = compiled.tables, compiled.space, workspace.layout
    alone, together, amounts, chosen = workspace.alone, workspace.together, workspace.amounts, workspace.chosen
    for t in range(space.tied.shape[0]):
        about, elements = space.tied[t], space.tied_elements[t]
        one, other = workspace.home[about.one], workspace.home[about.other]
        begin(together)
        uses = 0.0
        if one == other:
            uses += 1.0
            read_too(tables, about.one_reader, 0, chosen, together)
        for earlier in range(about.first, t):
            # A rank that has the parameter for an earlier unit needs it from no other.
            if workspace.home[space.tied[earlier].other] == other:
                one = other
                uses += 1.0
                read_too(tables, space.tied[earlier].other_reader, 0, chosen, together)
        begin(alone)
        read_too(tables, about.other_reader, 0, chosen, alone)
        axes, row = space.axes[layout.stages[other]], workspace.tied[t]
        row[:] = 0.0
        row[TIE_ONE], row[TIE_OTHER] = one, other
        amounts[:] = 0.0
        add_read(alone, elements, axes, layout.zero_axes, amounts[1])
        if one == other:
            add_read(together, elements, axes, layout.zero_axes, amounts[0])
            read_too(tables, about.other_reader, 0, chosen, together)
            add_read(together, elements, axes, layout.zero_axes, amounts[2])
            tie(uses, amounts[0], amounts[1], amounts[2], row)
            continue
        # Each of the two ranks holds it as all its units require it.
        read_too(tables, about.one_reader, 0, chosen, together)
        following = about.first
        while following < space.tied.shape[0] and space.tied[following].first == about.first:
            rank, reader = workspace.home[space.tied[following].other], space.tied[following].other_reader
            if rank == one:
                read_too(tables, reader, 0, chosen, together)
            elif rank == other and following > t:
                read_too(tables, reader, 0, chosen, alone)
            following += 1
        amounts[1] = 0.0
        add_read(alone, elements, axes, layout.zero_axes, amounts[1])
        add_read(together, elements, space.axes[layout.stages[one]], layout.zero_axes, amounts[0])
        row[TIE_EXCHANGED] = max(amounts[0, E_HELD], amounts[1, E_HELD])


@borrowing(void(COMPILED, WORKSPACE, boolean, float64[::1]), inner=True)
def finish(compiled, workspace, exact, out):
    """The step of the priced rows.

    Args:
        compiled: tables and space.
        workspace: `tied`, `whole` and `ranks` are written.
        exact: see `combine`.
        out: [2] seconds of a step; largest share of its memory by which a device overflows. Written.
    """
    space, layout, counts = compiled.space, workspace.layout, workspace.counts[0]
    frame = layout.frame[0]
    _tie(compiled, workspace)
    for i in range(counts.num_parts):
        workspace.whole[i] = workspace.covered[workspace.parts[i, 1]]
    result = workspace.ranks[: frame.num_ranks]
    combine(
        workspace.costs[: counts.num_rows],
        workspace.parts[: counts.num_parts],
        workspace.whole[: counts.num_parts],
        frame.schedule,
        workspace.room.program,
        frame.num_ranks,
        frame.num_micro_batches,
        layout.stages,
        space.axes,
        space.links,
        space.hardware,
        space.capacity,
        layout.zero_axes,
        layout.boundaries,
        space.send_latency_s,
        space.send_bytes_per_s,
        workspace.tied,
        workspace.settings,
        exact,
        workspace.room,
        result,
    )
    out[0] = step_time_s(result)
    out[1] = overflow(result)


@borrowing(void(COMPILED, int64[::1], WORKSPACE, boolean, float64[::1]), inner=True)
def price_one(compiled, value, workspace, exact, out):
    """Prices the rows and the step: of a plan with unlike shares as every kind of device sees it, the most of each.

    A bound looks at the slowest kind alone, which the plan takes no less than.

    Args:
        compiled: whose cache is read and written.
        value: [slots].
        workspace: with layout, rows and signatures.
        exact: see `combine`.
        out: see `finish`.
    """
    space = compiled.space
    seconds, over = 0.0, -math.inf
    views = space.kind_rows.shape[1] if exact and value[space.first.shares] > 0 else 1
    for kind in range(views - 1, -1, -1):
        if views > 1:
            look_from(space, value, kind, workspace.layout)
        cost_rows(compiled, -1, workspace)
        finish(compiled, workspace, exact, out)
        seconds, over = max(seconds, out[0]), max(over, out[1])
    out[0] = seconds
    out[1] = over

"""The price of the plan in a workspace; all compiled.

`cost_rows` prices the rows, and `finish` computes the step from them. If signatures are undecided, the results are
lower bounds. Costs of rows are cached (`UnitCache`), since plans that are priced one after another have most rows in
common. The arithmetic is that of `unit_cost` and `step`, in the same order as in `Evaluator.evaluate`, so the results
are identical floats.
"""

from __future__ import annotations

import math

from numba import boolean, float64, int64, types, void

from automap.jit import borrowing
from automap.price.kernels.array_types import rows_type
from automap.price.kernels.collectives import SUMMED
from automap.price.kernels.hashes import SEEDS, mix
from automap.price.kernels.passes import add_unit, begin_passes, end_passes, write_unit, zero_s
from automap.price.kernels.placements import write_crossing
from automap.price.kernels.shard_unit import shard_unit
from automap.price.kernels.stage_records import Stage, Unit
from automap.price.kernels.step import end_step, overflow, step_time_s
from automap.price.kernels.step_records import Order, Pipeline, StageArrays
from automap.price.kernels.tied_parameters import begin, read_too, write_share, write_tie
from automap.price.kernels.unit import unit_cost
from automap.space.kernels.layout import look_from
from automap.space.kernels.records import COMPILED
from automap.space.kernels.unit_cache import REMEMBERED
from automap.space.kernels.workspace import ROW, WORKSPACE
from ir.factors import PARTIAL


@borrowing(void(COMPILED, int64, boolean, int64[:, ::1], int64[::1]), inner=True)
def outgoing(compiled, unit_type, is_sent, chosen, placement):
    """Writes the placement of the tensor that crosses out of a unit; UNKNOWN where it is undecided.

    Args:
        unit_type: type of the unit, or -1 before the first.
        is_sent: whether the tensor goes to another chunk; a partial tensor is reduced before that.
        chosen: [operator rows, axes] signatures.
        placement: [axes] written.
    """
    crossing = compiled.space.boundary[unit_type] if unit_type >= 0 else -1
    write_crossing(compiled.tables, crossing, 0, chosen, placement)
    for a in range(placement.shape[0]):
        if is_sent and placement[a] == PARTIAL:
            placement[a] = SUMMED


@borrowing(boolean(rows_type(ROW), int64, int64), inner=True)
def _is_concerned(rows, number, kind):
    """Whether the costs of a row depend on a unit type, -1 for all: it is a unit of this type, or follows one."""
    return kind < 0 or rows[number].type == kind or rows[number].before == kind


@borrowing(types.UniTuple(int64, 2)(WORKSPACE, int64), inner=True)
def _hashes(workspace, number):
    """Two hashes of everything on which the costs of a row depend, the first of which is not zero."""
    row, layout, hashes = workspace.rows[number], workspace.draft.layout, workspace.draft.hashes
    word = row.type * 16 + row.mode
    for a in range(workspace.incoming.shape[0]):
        # A placement needs few bits: it is a constant below 0 or a dim of a tensor.
        word = (word << 6) + 2 * (row.incoming[a] - SUMMED) + int64(layout.zero_axes[a])
    one, two = mix(hashes[row.type, 0], hashes[row.type, 1], word)
    one, two = mix(one, two, layout.stages[row.rank])
    one, two = mix(one, two, layout.samples[row.rank])
    return one | 1, two


@borrowing(void(COMPILED, int64, WORKSPACE), inner=True)
def _look_up(compiled, number, workspace):
    """Writes what crosses into the unit of a row, the hashes of the costs that are wanted, and whether the cache has
    them."""
    row, keys = workspace.rows[number], compiled.cache.keys
    outgoing(compiled, row.before, row.opens, workspace.draft.chosen, workspace.incoming)
    for a in range(workspace.incoming.shape[0]):
        row.incoming[a] = workspace.incoming[a]
    one, two = _hashes(workspace, number)
    workspace.wanted[number, 0], workspace.wanted[number, 1] = one, two
    place = two & (REMEMBERED - 1)
    workspace.is_cached[number] = keys[place, 0] == one and keys[place, 1] == two


@borrowing(boolean(COMPILED, int64, WORKSPACE), inner=True)
def _recall(compiled, number, workspace):
    """Writes the costs of a row if the row itself, an earlier row or the cache has them; returns whether one has."""
    keys, costs, covered, cache = workspace.keys, workspace.costs, workspace.covered, compiled.cache
    one, two = workspace.wanted[number, 0], workspace.wanted[number, 1]
    if keys[number, 0] == one and keys[number, 1] == two:
        return True
    workspace.zero_stages[number] = -1.0
    for earlier in range(number):
        if keys[earlier, 0] == one and keys[earlier, 1] == two:
            costs[number] = costs[earlier]
            covered[number] = covered[earlier]
            return True
    place = two & (REMEMBERED - 1)
    # A row that was priced after `_look_up` may have taken the place.
    if workspace.is_cached[number] and cache.keys[place, 0] == one and cache.keys[place, 1] == two:
        costs[number] = cache.costs[place]
        covered[number] = cache.covered[place]
        return True
    return False


@borrowing(void(COMPILED, int64, WORKSPACE), inner=True)
def cost_rows(compiled, kind, workspace):
    """Prices the rows whose costs depend on a unit type: its own, and those of the units after it.

    Args:
        kind: unit type whose signatures changed; -1: all rows.
        workspace: `costs` and `covered` are written.
    """
    rows, cache = workspace.rows, compiled.cache
    # All rows are looked up before one is priced, so that the processor waits for their memory at the same time.
    for number in range(workspace.counts[0].num_rows):
        if _is_concerned(rows, number, kind):
            _look_up(compiled, number, workspace)
    for number in range(workspace.counts[0].num_rows):
        if not _is_concerned(rows, number, kind):
            continue
        one, two = workspace.wanted[number, 0], workspace.wanted[number, 1]
        if not _recall(compiled, number, workspace):
            for a in range(workspace.incoming.shape[0]):
                workspace.incoming[a] = rows[number].incoming[a]
            _cost_row(compiled, number, workspace)
            place = two & (REMEMBERED - 1)
            cache.keys[place, 0], cache.keys[place, 1] = one, two
            cache.costs[place] = workspace.costs[number]
            cache.covered[place] = workspace.covered[number]
        workspace.keys[number, 0], workspace.keys[number, 1] = one, two


@borrowing(void(COMPILED, int64, WORKSPACE), inner=True)
def _cost_row(compiled, number, workspace):
    """Prices one row; `Workspace.incoming` holds its incoming placement."""
    tables, space, layout = compiled.tables, compiled.space, workspace.draft.layout
    row = workspace.rows[number]
    first, last = space.spans[row.type], space.spans[row.type + 1]
    at, samples = layout.stages[row.rank], layout.samples[row.rank]
    zero_axes = 0
    for a in range(layout.zero_axes.shape[0]):
        zero_axes = 2 * zero_axes + int64(layout.zero_axes[a])
    one, two = mix(SEEDS[0], SEEDS[1], at)
    one, two = mix(one, two, samples)
    one, two = mix(one, two, zero_axes)
    workspace.unit.surroundings[0], workspace.unit.surroundings[1] = one | 1, two
    prepared, hashes = workspace.prepared[row.type], workspace.draft.hashes[row.type]
    is_known = prepared[0] == at and prepared[1] == samples and prepared[2] == zero_axes
    is_unchanged = is_known and prepared[3] == hashes[0] and prepared[4] == hashes[1]
    prepared[0], prepared[1], prepared[2], prepared[3], prepared[4] = at, samples, zero_axes, hashes[0], hashes[1]
    unit = Unit(first, last, workspace.draft.chosen[first:last])
    stage = Stage(space.axes[at], space.links[at], space.hardware[at], layout.zero_axes, float64(samples))
    if not is_unchanged:
        shard_unit(tables, unit, stage, is_known, workspace.unit)
    incoming, crossing, num_modes = workspace.incoming, space.boundary[row.type], space.masks.shape[0]
    recomputed, cost, tried = space.masks[row.mode % num_modes, first:last], workspace.tried[:1], workspace.tried[1:]
    covered = unit_cost(tables, unit, recomputed, incoming, crossing, stage, workspace.unit, cost)
    workspace.covered[number] = covered
    if row.mode == num_modes:
        # The least of all modes: a unit is fastest without recomputation, and other modes may save fewer bytes.
        for mode in range(1, num_modes):
            if space.modes[mode]:
                again = space.masks[mode, first:last]
                unit_cost(tables, unit, again, incoming, crossing, stage, workspace.unit, tried)
                cost[0].saved_bytes = min(cost[0].saved_bytes, tried[0].saved_bytes)
    write_unit(cost[0], workspace.settings[0], workspace.costs[number])


@borrowing(boolean(COMPILED, WORKSPACE), inner=True)
def _is_tied(compiled, workspace):
    """Whether `Workspace.tied` already holds the results of `tie`; writes the new key if it does not."""
    space, layout, known = compiled.space, workspace.draft.layout, workspace.tied_key
    hashes, home = workspace.draft.hashes, workspace.home
    one, two = SEEDS
    for a in range(layout.zero_axes.shape[0]):
        one, two = mix(one, two, int64(layout.zero_axes[a]))
    for t in range(space.tied.shape[0]):
        for unit in (space.tied[t].one, space.tied[t].other):
            kind, rank = space.units[unit], home[unit]
            one, two = mix(one, two, rank)
            one, two = mix(one, two, layout.stages[rank])
            one, two = mix(one, two, hashes[kind, 0])
            one, two = mix(one, two, hashes[kind, 1])
    one |= 1
    is_known = known[0] == one and known[1] == two
    known[0], known[1] = one, two
    return is_known


@borrowing(void(COMPILED, WORKSPACE), inner=True)
def tie(compiled, workspace):
    """Writes `Workspace.tied`: the costs of parameters that two units read, beyond those of the units."""
    tables, space, layout = compiled.tables, compiled.space, workspace.draft.layout
    alone, together, shares, chosen = workspace.alone, workspace.together, workspace.tied_shares, workspace.draft.chosen
    for t in range(space.tied.shape[0]):
        about, elements, is_trained = space.tied[t], space.tied_elements[t], not space.tied_frozen[t]
        one, other = workspace.home[about.one], workspace.home[about.other]
        begin(together)
        uses = 0.0
        if one == other:
            uses += 1.0
            read_too(tables, about.one_reader, 0, chosen, together)
        for earlier in range(about.first, t):
            # If an earlier unit of this rank reads the parameter, the tie is within the rank.
            if workspace.home[space.tied[earlier].other] == other:
                one = other
                uses += 1.0
                read_too(tables, space.tied[earlier].other_reader, 0, chosen, together)
        begin(alone)
        read_too(tables, about.other_reader, 0, chosen, alone)
        row, at = workspace.tied[t], layout.stages[other]
        there = Stage(space.axes[at], space.links[at], space.hardware[at], layout.zero_axes, 1.0)
        row.rank, row.other_rank, row.first, row.exchanged = one, other, about.first, 0.0
        if one == other:
            write_share(alone, elements, is_trained, there, shares[1])
            write_share(together, elements, is_trained, there, shares[0])
            read_too(tables, about.other_reader, 0, chosen, together)
            write_share(together, elements, is_trained, there, shares[2])
            write_tie(uses, shares, row)
            continue
        # Each of the two ranks holds the parameter in the placement for all of its units.
        read_too(tables, about.one_reader, 0, chosen, together)
        following = about.first
        while following < space.tied.shape[0] and space.tied[following].first == about.first:
            rank, reader = workspace.home[space.tied[following].other], space.tied[following].other_reader
            if rank == one:
                read_too(tables, reader, 0, chosen, together)
            elif rank == other and following > t:
                read_too(tables, reader, 0, chosen, alone)
            following += 1
        at = layout.stages[one]
        here = Stage(space.axes[at], space.links[at], space.hardware[at], layout.zero_axes, 1.0)
        write_share(alone, elements, is_trained, there, shares[1])
        write_share(together, elements, is_trained, here, shares[0])
        row.exchanged = max(shares[0].parameters - shares[0].frozen, shares[1].parameters - shares[1].frozen)


@borrowing(void(COMPILED, WORKSPACE, boolean, float64[::1]), inner=True, apart=True)
def finish(compiled, workspace, exact, out):
    """Computes the step from the priced rows.

    Args:
        workspace: `tied`, `parts` and `ranks` are written.
        exact: whether the schedule is simulated; otherwise the results are lower bounds.
        out: [2] seconds of a step, and overflow; written.
    """
    space, layout, counts = compiled.space, workspace.draft.layout, workspace.counts[0]
    frame = layout.frame[0]
    if not _is_tied(compiled, workspace):
        tie(compiled, workspace)
    parts = workspace.parts[: counts.num_parts]
    for i in range(parts.shape[0]):
        parts[i].is_recomputed = int64(workspace.covered[parts[i].row])
    result = workspace.ranks[: frame.num_ranks]
    pipeline = Pipeline(
        order=Order(frame.schedule, frame.num_micro_batches, workspace.step.program),
        num_ranks=frame.num_ranks,
        num_chunks=frame.num_chunks,
        zero_axes=layout.zero_axes,
        parts=parts,
        tied=workspace.tied,
        stages=layout.stages,
        boundaries=layout.boundaries,
    )
    stages = StageArrays(
        axes=space.axes,
        links=space.links,
        hardware=space.hardware,
        capacity=space.capacity,
        send_latency_s=space.send_latency_s,
        send_bytes_per_s=space.send_bytes_per_s,
    )
    settings, costs, zero_stages = workspace.settings[0], workspace.costs, workspace.zero_stages
    begin_passes(pipeline, workspace.step, result)
    for i in range(parts.shape[0]):
        number = parts[i].row
        zero = workspace.zero_s[number]
        if zero_stages[number] != settings.zero_stage:
            rank = parts[i].chunk % frame.num_ranks
            zero[0], zero[1], zero[2], zero[3] = zero_s(costs[number], rank, pipeline, stages, settings)
            zero_stages[number] = settings.zero_stage
        add_unit(costs[number], (zero[0], zero[1], zero[2], zero[3]), i, pipeline, stages, settings, workspace.step)
    end_passes(pipeline, stages, settings, workspace.step, result)
    end_step(pipeline, stages, settings, exact, workspace.step, result)
    out[0] = step_time_s(result)
    out[1] = overflow(result)


@borrowing(void(COMPILED, int64[::1], WORKSPACE, boolean, float64[::1]), inner=True)
def price_one(compiled, value, workspace, exact, out):
    """Prices a plan: its rows and its step. A plan with unlike shares is priced in each of `LoweredPlan.views`, and the
    largest seconds and overflow count.

    For a lower bound, the view of the slowest kind suffices.

    Args:
        value: [slots].
        workspace: with layout, rows and signatures.
        exact: whether the schedule is simulated; otherwise the results are lower bounds.
        out: [2] seconds of a step, and overflow; written.
    """
    space = compiled.space
    seconds, over = 0.0, -math.inf
    views = space.kind_rows.shape[1] if exact and value[space.first.shares] > 0 else 1
    for kind in range(views - 1, -1, -1):
        if views > 1:
            look_from(space, value, kind, workspace.draft.layout)
        cost_rows(compiled, -1, workspace)
        finish(compiled, workspace, exact, out)
        seconds, over = max(seconds, out[0]), max(over, out[1])
    out[0] = seconds
    out[1] = over

"""What a plan costs that is laid out on a desk; all compiled.

`cost_rows` prices the rows and `finish` puts the step together. Where signatures are undecided the costs are lower
bounds. What a unit costs in its surroundings is remembered (`UnitCache`), since plans that are priced one after another
have most of it in common. The arithmetic is that of `unit_cost` and `step`, in the same order as in
`Evaluator.evaluate`: the results are identical floats.
"""

from __future__ import annotations

import math

from numba import boolean, float64, int64, types, void

from automap.jit import borrowing
from automap.price.kernels.collectives import SUMMED
from automap.price.kernels.placements import write_crossing
from automap.price.kernels.records import TABLES
from automap.price.kernels.shard_unit import shard_unit
from automap.price.kernels.stage_records import Stage, Unit
from automap.price.kernels.step import overflow, step, step_time_s
from automap.price.kernels.step_records import Order, Pipeline, StageArrays
from automap.price.kernels.tied_parameters import begin, read_too, write_share, write_tie
from automap.price.kernels.unit import unit_cost
from automap.price.kernels.unit_workspace import UNIT_WORKSPACE
from automap.space.compile import (
    I_FIRST,
    I_ONE,
    I_ONE_READER,
    I_OTHER,
    I_OTHER_READER,
    N_SHARES_SLOT,
    SPACE,
)
from automap.space.kernels.unit_cache import REMEMBERED, UNIT_CACHE, mix
from automap.space.kernels.workspace import (
    F_CHUNKS,
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
    WORKSPACE,
    look_from,
)
from ir.factors import PARTIAL


@borrowing(void(TABLES, SPACE, int64, boolean, int64[:, ::1], int64[::1]), inner=True)
def outgoing(tables, space, unit_type, is_sent, chosen, placement):
    """Writes the placement in which a unit's crossing tensor leaves it; UNKNOWN where undecided.

    Args:
        tables: tables of the problem.
        space: see `compile_space`.
        unit_type: type of the unit, or -1 before the first.
        is_sent: whether the tensor goes to another chunk; a partial tensor is reduced before that.
        chosen: [operator rows, axes] signatures.
        placement: [axes], written.
    """
    write_crossing(tables, space.boundary[unit_type] if unit_type >= 0 else -1, 0, chosen, placement)
    for a in range(placement.shape[0]):
        if is_sent and placement[a] == PARTIAL:
            placement[a] = SUMMED


@borrowing(types.UniTuple(int64, 2)(SPACE, WORKSPACE, int64), inner=True)
def _hashes(space, workspace, row):
    """Two hashes of all that the costs of a row depend on, neither of them zero."""
    keys, kind = workspace.keys, workspace.keys[row, K_TYPE]
    one, two = mix(workspace.hashes[kind, 0], workspace.hashes[kind, 1], kind * 16 + keys[row, K_MODE])
    one, two = mix(one, two, workspace.stages[keys[row, K_RANK]])
    one, two = mix(one, two, workspace.samples[keys[row, K_RANK]])
    for a in range(workspace.incoming.shape[0]):
        one, two = mix(one, two, keys[row, K_INCOMING + a] * 2 + int64(workspace.zero_axes[a]))
    return one | 1, two


@borrowing(void(TABLES, SPACE, UNIT_CACHE, int64, WORKSPACE, UNIT_WORKSPACE), inner=True)
def cost_rows(tables, space, cache, kind, workspace, units):
    """Prices the rows that see a unit type.

    Args:
        tables: see `Tables.arrays`.
        space: see `compile_space`.
        cache: read and written.
        kind: unit type whose signatures changed, or -1: all rows.
        workspace: `costs` and `covered` are written.
        units: scratch.
    """
    frame, keys, costs, covered = workspace.frame, workspace.keys, workspace.costs, workspace.covered
    num_axes = workspace.incoming.shape[0]
    zero_axes = 0
    for a in range(num_axes):
        zero_axes = 2 * zero_axes + int64(workspace.zero_axes[a])
    for row in range(frame[F_ROWS]):
        if 0 <= kind != keys[row, K_TYPE] and keys[row, K_BEFORE] != kind:
            continue
        mine, mode, where = keys[row, K_TYPE], keys[row, K_MODE], keys[row, K_RANK]
        outgoing(tables, space, keys[row, K_BEFORE], keys[row, K_OPENS] == 1, workspace.chosen, workspace.incoming)
        for a in range(num_axes):
            keys[row, K_INCOMING + a] = workspace.incoming[a]
        # Behind another unit, but in the same surroundings: the cost is known.
        same = -1
        for k in range(row):
            if keys[k, K_TYPE] == mine and keys[k, K_MODE] == mode and keys[k, K_RANK] == where:
                alike = True
                for a in range(num_axes):
                    alike = alike and keys[k, K_INCOMING + a] == workspace.incoming[a]
                if alike:
                    same = k
                    break
        if same >= 0:
            covered[row] = covered[same]
            costs[row] = costs[same]
            continue
        one, two = _hashes(space, workspace, row)
        place = two & (REMEMBERED - 1)
        if cache.keys[place, 0] == one and cache.keys[place, 1] == two:
            costs[row] = cache.costs[place]
            covered[row] = cache.covered[place]
            continue
        first, last = space.spans[mine], space.spans[mine + 1]
        at = workspace.stages[where]
        laid = workspace.laid[mine]
        again = laid[0] == at and laid[1] == workspace.samples[where] and laid[2] == zero_axes
        laid[0], laid[1], laid[2] = at, workspace.samples[where], zero_axes
        unit, samples = Unit(first, last, workspace.chosen[first:last]), float64(workspace.samples[where])
        stage = Stage(space.axes[at], space.links[at], space.hardware[at], workspace.zero_axes, samples)
        shard_unit(tables, unit, stage, again, units)
        recomputed, crossing = space.masks[mode, first:last], space.boundary[mine]
        covered[row] = unit_cost(
            tables, unit, recomputed, workspace.incoming, crossing, stage, units, costs[row : row + 1]
        )
        cache.keys[place, 0] = one
        cache.keys[place, 1] = two
        cache.costs[place] = costs[row]
        cache.covered[place] = covered[row]


@borrowing(void(TABLES, SPACE, WORKSPACE), inner=True)
def _tie(tables, space, workspace):
    """Writes what parameters that two units read cost beside them, see `step`."""
    alone, together, shares, chosen = workspace.alone, workspace.together, workspace.tied_shares, workspace.chosen
    for t in range(space.tied.shape[0]):
        about, elements = space.tied[t], space.tied_elements[t]
        one, other = workspace.home[about[I_ONE]], workspace.home[about[I_OTHER]]
        first, second = about[I_ONE_READER], about[I_OTHER_READER]
        begin(together)
        uses = 0.0
        if one == other:
            uses += 1.0
            read_too(tables, first, 0, chosen, together)
        for earlier in range(about[I_FIRST], t):
            # A rank that has the parameter for an earlier unit needs it from no other.
            if workspace.home[space.tied[earlier, I_OTHER]] == other:
                one = other
                uses += 1.0
                read_too(tables, space.tied[earlier, I_OTHER_READER], 0, chosen, together)
        begin(alone)
        read_too(tables, second, 0, chosen, alone)
        tie, zero_axes, at, samples = workspace.tied[t], workspace.zero_axes, workspace.stages[other], 1.0
        there = Stage(space.axes[at], space.links[at], space.hardware[at], zero_axes, samples)
        tie.rank, tie.other_rank, tie.exchanged = one, other, 0.0
        if one == other:
            write_share(alone, elements, there, shares[1])
            write_share(together, elements, there, shares[0])
            read_too(tables, second, 0, chosen, together)
            write_share(together, elements, there, shares[2])
            write_tie(uses, shares, tie)
            continue
        # Each of the two ranks holds it as all its units require it.
        read_too(tables, first, 0, chosen, together)
        following = about[I_FIRST]
        while following < space.tied.shape[0] and space.tied[following, I_FIRST] == about[I_FIRST]:
            rank, reader = workspace.home[space.tied[following, I_OTHER]], space.tied[following, I_OTHER_READER]
            if rank == one:
                read_too(tables, reader, 0, chosen, together)
            elif rank == other and following > t:
                read_too(tables, reader, 0, chosen, alone)
            following += 1
        write_share(alone, elements, there, shares[1])
        at = workspace.stages[one]
        here = Stage(space.axes[at], space.links[at], space.hardware[at], zero_axes, samples)
        write_share(together, elements, here, shares[0])
        tie.exchanged = max(shares[0].parameters, shares[1].parameters)


@borrowing(void(TABLES, SPACE, WORKSPACE, boolean, float64[::1]), inner=True)
def finish(tables, space, workspace, exact, out):
    """The step of the priced rows.

    Args:
        tables: see `Tables.arrays`.
        space: see `compile_space`.
        workspace: `tied`, `parts` and `ranks` are written.
        exact: see `step`.
        out: [2] seconds of a step; largest share of its memory by which a device overflows. Written.
    """
    frame = workspace.frame
    num_ranks = frame[F_RANKS]
    _tie(tables, space, workspace)
    parts = workspace.parts[: frame[F_PARTS]]
    for i in range(parts.shape[0]):
        parts[i].is_recomputed = int64(workspace.covered[parts[i].row])
    result = workspace.ranks[:num_ranks]
    pipeline = Pipeline(
        Order(frame[F_KIND], frame[F_COUNT_OF_BATCHES], workspace.room.program),
        num_ranks,
        frame[F_CHUNKS],
        workspace.zero_axes,
        parts,
        workspace.tied,
        workspace.stages,
        workspace.boundaries,
    )
    stages = StageArrays(
        space.axes, space.links, space.hardware, space.capacity, space.send_latency_s, space.send_bytes_per_s
    )
    costs = workspace.costs[: frame[F_ROWS]]
    step(costs, pipeline, stages, workspace.settings[0], exact, workspace.room, result)
    out[0] = step_time_s(result)
    out[1] = overflow(result)


@borrowing(void(TABLES, SPACE, UNIT_CACHE, int64[::1], WORKSPACE, UNIT_WORKSPACE, boolean, float64[::1]), inner=True)
def price_laid(tables, space, cache, value, workspace, units, exact, out):
    """Prices the rows and the step: of a plan with unlike shares as every kind of device sees it, the most of each.

    A bound looks at the slowest kind alone, which the plan takes no less than.

    Args:
        tables: see `Tables.arrays`.
        space: see `compile_space`.
        cache: read and written.
        value: [slots].
        workspace: with frame and signatures.
        units: scratch.
        exact: see `step`.
        out: see `finish`.
    """
    seconds, over = 0.0, -math.inf
    views = space.kind_rows.shape[1] if exact and value[space.scalars[N_SHARES_SLOT]] > 0 else 1
    for kind in range(views - 1, -1, -1):
        if views > 1:
            look_from(space, value, kind, workspace.devices, workspace.rows, workspace.stages, workspace.samples)
        cost_rows(tables, space, cache, -1, workspace, units)
        finish(tables, space, workspace, exact, out)
        seconds, over = max(seconds, out[0]), max(over, out[1])
    out[0] = seconds
    out[1] = over

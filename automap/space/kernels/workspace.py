"""Workspace: one plan of a space made ready for pricing, from values of the slots to rows of unit costs; all compiled.

Equal units in equal surroundings share a row. `set_rows` reads everything but signatures, `pick` one signature of a
linkage group, which may be undecided, -1. `automap.space.kernels.price_one` prices what the workspace holds.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
from numba import boolean, int64, void

from automap.jit import borrowing, kernel
from automap.price.kernels.array_types import Floats, Floats2, Ints, Ints2, Mask, Rows, rows_type, tuple_type
from automap.price.kernels.cost_records import (
    MAX_AXES,
    PART_DTYPE,
    RANK_COST_DTYPE,
    READING_DTYPE,
    SETTINGS_DTYPE,
    SHARE_DTYPE,
    TIE_DTYPE,
    UNIT_COST_DTYPE,
)
from automap.price.kernels.step_records import StepWorkspace, new_step_workspace
from automap.price.kernels.unit_workspace import UnitWorkspace, new_unit_workspace
from automap.space.kernels.layout import Layout, new_layout
from automap.space.kernels.masks import assign, signature_mask
from automap.space.kernels.records import COMPILED, SPACE
from automap.space.kernels.unit_cache import BITS, REMEMBERED, mix, scramble

COUNTS = np.dtype([("num_rows", np.int64), ("num_parts", np.int64)])
"""Rows and parts of the plan in a workspace."""
ROW = np.dtype(
    [
        ("type", np.int64),  # unit type
        ("mode", np.int64),  # recompute mode
        ("rank", np.int64),  # pipeline rank; the first one where one rank stands for all
        ("before", np.int64),  # type of the unit before, or -1
        ("opens", np.bool_),  # whether the unit opens a chunk
        ("incoming", np.int64, (MAX_AXES,)),  # placement of the tensor that crosses into the unit
    ]
)
"""Surroundings of equal units of one plan: all that their costs depend on but their signatures."""


class Workspace(NamedTuple):
    """Memory of one caller."""

    layout: Layout
    mask: Mask
    """[most values of a slot] legal values of the slot that was looked at last."""
    picked: Ints2
    """[groups, axes] value of each group's slots, -1 = undecided."""
    chosen: Ints2
    """[operator rows, axes] the signatures that follow."""
    types: Ints
    """[groups] unit type of each."""
    hashes: Ints2
    """[types, 2] two hashes of what is picked in each unit type."""
    counts: Annotated[Rows, rows_type(COUNTS)]
    """[1] see `COUNTS`."""
    rows: Annotated[Rows, rows_type(ROW)]
    """[rows] see `ROW`."""
    costs: Annotated[Rows, rows_type(UNIT_COST_DTYPE)]
    """[rows] costs of one unit of each row, see `UnitCostRow`."""
    covered: Mask
    """[rows] whether the unit is recomputed as a whole."""
    parts: Annotated[Rows, rows_type(PART_DTYPE)]
    """[parts] see `PartRow`."""
    home: Ints
    """[units] pipeline rank of each unit."""
    prepared: Ints2
    """[types, 3] distinct stage, samples of a micro-batch and axes of ZeRO for which `unit` holds the unit type, or
    -1."""
    incoming: Ints
    """[axes] scratch for a placement."""
    tied: Annotated[Rows, rows_type(TIE_DTYPE)]
    """[pairs of units that share a parameter] see `TieRow`."""
    alone: Annotated[Rows, rows_type(READING_DTYPE)]
    """[axes] scratch: how one unit reads a tied parameter."""
    together: Annotated[Rows, rows_type(READING_DTYPE)]
    """[axes] scratch: how all units of a rank read it."""
    tied_shares: Annotated[Rows, rows_type(SHARE_DTYPE)]
    """[3] scratch: what a rank has of a tied parameter for earlier units, for one more, for all."""
    step: StepWorkspace
    """Scratch of `step`."""
    unit: UnitWorkspace
    """What `shard_unit` wrote of each unit type."""
    seen: Floats
    """[2] scratch of `automap.bounds.kernels.step_many`."""
    least: Ints
    """[ranks] scratch of `automap.bounds.kernels.step_many`."""
    rest: Floats
    """[units + 1] scratch of `automap.bounds.kernels.step_many`."""
    used: Floats2
    """[4, ranks] scratch of `automap.bounds.kernels.step_many`."""
    settings: Annotated[Rows, rows_type(SETTINGS_DTYPE)]
    """[1] settings of a step, with the plan's ZeRO stage."""
    ranks: Annotated[Rows, rows_type(RANK_COST_DTYPE)]
    """[ranks] what `finish` found, see `RankCostRow`."""


WORKSPACE = tuple_type(Workspace)
"""Numba's type of `Workspace`."""


@kernel(WORKSPACE(COMPILED))
def new_workspace(compiled):
    """A workspace in which nothing is picked."""
    tables, space = compiled.tables, compiled.space
    num_units, num_axes = space.units.shape[0], space.obeys.shape[0]
    num_types, num_groups, most = space.boundary.shape[0], space.groups.shape[0], space.windows.shape[1]
    workspace = Workspace(
        layout=new_layout(space),
        mask=np.empty(space.scalars.most_values, np.bool_),
        picked=np.full((num_groups, num_axes), -1),
        chosen=np.full((tables.operators.shape[0], num_axes), -1),
        types=np.empty(num_groups, np.int64),
        hashes=np.zeros((num_types, 2), np.int64),
        counts=np.zeros(1, COUNTS),
        rows=np.empty(num_units, ROW),
        costs=np.empty(num_units, UNIT_COST_DTYPE),
        covered=np.empty(num_units, np.bool_),
        parts=np.empty(num_units, PART_DTYPE),
        home=np.empty(num_units, np.int64),
        prepared=np.full((num_types, 3), -1),
        incoming=np.empty(num_axes, np.int64),
        tied=np.zeros(space.tied.shape[0], TIE_DTYPE),
        alone=np.empty(num_axes, READING_DTYPE),
        together=np.empty(num_axes, READING_DTYPE),
        tied_shares=np.empty(3, SHARE_DTYPE),
        step=new_step_workspace(most, most),
        unit=new_unit_workspace(tables, num_axes, 0),
        seen=np.empty(2),
        least=np.empty(most, np.int64),
        rest=np.empty(num_units + 1),
        used=np.empty((4, most)),
        settings=np.empty(1, SETTINGS_DTYPE),
        ranks=np.empty(most, RANK_COST_DTYPE),
    )
    workspace.settings[0] = space.settings
    for kind in range(num_types):
        for group in range(space.group_spans[kind], space.group_spans[kind + 1]):
            workspace.types[group] = kind
    return workspace


@borrowing(void(SPACE, int64[::1], WORKSPACE), inner=True)
def set_rows(space, value, workspace):
    """Writes the rows and parts of a plan whose layout and ends of chunks are set and whose ZeRO stage is decided."""
    layout, rows, parts = workspace.layout, workspace.rows, workspace.parts
    frame, counts = layout.frame[0], workspace.counts[0]
    workspace.settings[0].zero_stage = value[space.first.zero]
    counts.num_rows, counts.num_parts = 0, 0
    before = -1
    unit = 0
    for chunk in range(frame.num_chunks):
        rank = chunk % frame.num_ranks
        where = 0 if frame.is_uniform else rank
        mode = value[space.first.recompute + rank]
        opens = True
        while unit < layout.ends[chunk]:
            kind = space.units[unit]
            workspace.home[unit] = rank
            row = _row_of(rows[: counts.num_rows], kind, mode, where, before, opens)
            if row == counts.num_rows:
                counts.num_rows += 1
                new = rows[row]
                new.type, new.mode, new.rank, new.before, new.opens = kind, mode, where, before, opens
            if not opens and parts[counts.num_parts - 1].row == row:
                parts[counts.num_parts - 1].times += 1
            else:
                part = parts[counts.num_parts]
                part.chunk, part.row, part.times = chunk, row, 1
                counts.num_parts += 1
            before = kind
            opens = False
            unit += 1


@borrowing(int64(rows_type(ROW), int64, int64, int64, int64, boolean), inner=True)
def _row_of(rows, kind, mode, rank, before, opens):
    """Number of the row with these surroundings; behind the last one where there is none."""
    for number in range(rows.shape[0]):
        row = rows[number]
        if row.type == kind and row.before == before and row.opens == opens and row.mode == mode and row.rank == rank:
            return number
    return rows.shape[0]


@borrowing(void(SPACE, int64, int64, int64, WORKSPACE), inner=True)
def pick(space, group, axis, value, workspace):
    """Decides the signatures of a group on an axis, or takes that back with -1."""
    if workspace.picked[group, axis] != value:
        hashes = workspace.hashes[workspace.types[group]]
        for known, sign in ((workspace.picked[group, axis], -1), (value, 1)):
            if known >= 0:
                # The sum does not depend on the order in which signatures are picked.
                word = ((group * MAX_AXES + axis) << 20) + 2 * known
                hashes[0] += sign * scramble(word)
                hashes[1] += sign * scramble(word + 1)
        workspace.picked[group, axis] = value
        assign(space, group, axis, value, workspace.chosen)


@borrowing(void(SPACE, int64[::1], int64, WORKSPACE), inner=True)
def pick_all(space, value, count, workspace):
    """Picks the signatures that the first `count` slots decide; all others are undecided."""
    num_axes = space.obeys.shape[0]
    for group in range(space.groups.shape[0]):
        for axis in range(num_axes):
            slot = space.first.signature + group * num_axes + axis
            pick(space, group, axis, value[slot] if slot < count else -1, workspace)


@borrowing(void(COMPILED, int64, int64, WORKSPACE, boolean[::1]), inner=True)
def legal_signatures(compiled, group, axis, workspace, mask):
    """`signature_mask` of what is picked on the axes before, through the cache.

    The axis and those behind it are left undecided.

    Args:
        compiled: whose cache is read and written.
        group: row of `SpaceArrays.groups`.
        axis: mesh axis.
        workspace: with its layout.
        mask: [values], written.
    """
    space, layout, num_axes = compiled.space, workspace.layout, workspace.incoming.shape[0]
    one, two = mix(int64(1469598103934665603), int64(7809847782465536322), group * MAX_AXES + axis)
    for a in range(axis):
        one, two = mix(one, two, workspace.picked[group, a])
    num_meshes = layout.frame[0].num_meshes
    for mesh in range(num_meshes):
        for a in range(num_axes):
            one, two = mix(one, two, int64(layout.sizes[mesh, a]))
        one, two = mix(one, two, layout.divided[mesh])
    one |= 1
    known = compiled.cache.legal[two & (REMEMBERED - 1)]
    if mask.shape[0] > BITS or known[0] != one or known[1] != two:
        sizes, samples = layout.sizes[:num_meshes], layout.divided[:num_meshes]
        signature_mask(compiled.tables, space, group, axis, workspace.chosen, sizes, samples, mask)
        # What was tried is taken back.
        for a in range(axis, num_axes):
            pick(space, group, a, -1, workspace)
            assign(space, group, a, -1, workspace.chosen)
        known[0], known[1], known[2] = one, two, 0
        for value in range(min(mask.shape[0], BITS)):
            known[2] |= int64(mask[value]) << value
    else:
        for value in range(mask.shape[0]):
            mask[value] = (known[2] >> value) & 1 == 1

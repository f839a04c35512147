"""Workspace: one plan of a space made ready for pricing, from values of the slots to rows of unit costs; all compiled.

Equal units in equal surroundings share a row. `set_rows` reads everything but signatures, `pick` one signature of a
linkage group, which may be undecided, -1. `automap.space.kernels.price_one` prices what the workspace holds.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
from numba import boolean, int64, void

from automap.jit import borrowing, kernel
from automap.price.kernels.annotated import Floats, Floats2, Ints, Ints2, Mask, Records, numba_type, rows_of
from automap.price.kernels.collectives import L_COUNT
from automap.price.kernels.columns import C_COUNT, MAX_AXES
from automap.price.kernels.step import P_ZERO, R_COUNT, ROOM, Room, new_room
from automap.price.kernels.tied_parameters import E_AXES, T_COUNT, tie_columns
from automap.price.kernels.unit_workspace import SHARDED, Sharded, new_sharded
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
    counts: Annotated[Records, rows_of(COUNTS)]
    """[1] see `COUNTS`."""
    rows: Annotated[Records, rows_of(ROW)]
    """[rows] see `ROW`."""
    costs: Floats2
    """[rows, C_COUNT] costs of one unit of each row."""
    covered: Mask
    """[rows] whether the unit is recomputed as a whole."""
    parts: Ints2
    """[parts, 3] see `combine`."""
    whole: Mask
    """[parts] see `combine`."""
    home: Ints
    """[units] pipeline rank of each unit."""
    prepared: Ints2
    """[types, 3] distinct stage, samples of a micro-batch and axes of ZeRO for which `sharded` holds the unit type, or
    -1."""
    incoming: Ints
    """[axes] scratch for a placement."""
    tied: Floats2
    """See `combine`."""
    alone: Ints2
    """[axes, T_COUNT] scratch: how one unit reads a tied parameter."""
    together: Ints2
    """[axes, T_COUNT] scratch: how all units of a rank read it."""
    amounts: Floats2
    """[3, E_AXES + 3 * axes] scratch: what a rank has of a tied parameter for earlier units, for one more, for all."""
    room: Room
    """Scratch of `combine`."""
    sharded: Sharded
    """Scratch of `shard_unit`."""
    seen: Floats
    """[2] scratch of `automap.bounds.kernels.step_many`."""
    least: Ints
    """[ranks] scratch of `automap.bounds.kernels.step_many`."""
    rest: Floats
    """[units + 1] scratch of `automap.bounds.kernels.step_many`."""
    used: Floats2
    """[4, ranks] scratch of `automap.bounds.kernels.step_many`."""
    settings: Floats
    """[P_COUNT] settings of a step, with the plan's ZeRO stage."""
    ranks: Floats2
    """[ranks, R_COUNT] what `finish` found, see `combine`."""
    records: Floats2
    """[0, L_COUNT] in place of a list of collectives: none is kept."""
    cursor: Ints
    """[1] rows of it that are written: none."""


WORKSPACE = numba_type(Workspace, room=ROOM, sharded=SHARDED)
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
        costs=np.empty((num_units, C_COUNT)),
        covered=np.empty(num_units, np.bool_),
        parts=np.empty((num_units, 3), np.int64),
        whole=np.empty(num_units, np.bool_),
        home=np.empty(num_units, np.int64),
        prepared=np.full((num_types, 3), -1),
        incoming=np.empty(num_axes, np.int64),
        tied=np.zeros((space.tied.shape[0], tie_columns(num_axes))),
        alone=np.empty((num_axes, T_COUNT), np.int64),
        together=np.empty((num_axes, T_COUNT), np.int64),
        amounts=np.empty((3, E_AXES + 3 * num_axes)),
        room=new_room(most, most, num_axes),
        sharded=new_sharded(tables, num_axes),
        seen=np.empty(2),
        least=np.empty(most, np.int64),
        rest=np.empty(num_units + 1),
        used=np.empty((4, most)),
        settings=space.settings.copy(),
        ranks=np.empty((most, R_COUNT)),
        records=np.empty((0, L_COUNT)),
        cursor=np.zeros(1, np.int64),
    )
    for kind in range(num_types):
        for group in range(space.group_spans[kind], space.group_spans[kind + 1]):
            workspace.types[group] = kind
    return workspace


@borrowing(void(SPACE, int64[::1], WORKSPACE), inner=True)
def set_rows(space, value, workspace):
    """Writes the rows and parts of a plan whose layout and ends of chunks are set and whose ZeRO stage is decided."""
    layout, rows, parts = workspace.layout, workspace.rows, workspace.parts
    frame, counts = layout.frame[0], workspace.counts[0]
    workspace.settings[P_ZERO] = value[space.first.zero]
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
            if not opens and parts[counts.num_parts - 1, 1] == row:
                parts[counts.num_parts - 1, 2] += 1
            else:
                part = parts[counts.num_parts]
                part[0], part[1], part[2] = chunk, row, 1
                counts.num_parts += 1
            before = kind
            opens = False
            unit += 1


@borrowing(int64(rows_of(ROW), int64, int64, int64, int64, boolean), inner=True)
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

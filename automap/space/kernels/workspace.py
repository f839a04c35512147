"""Desk: one plan of a space laid out for pricing, from values of the slots to rows of unit costs; all compiled.

Equal units in equal surroundings share a row. `set_frame` reads everything but signatures, `pick` one signature of a
linkage group, which may be undecided, -1. `automap.space.kernels.price_one` prices what is laid out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import boolean, float64, int64, types, void

from automap.jit import borrowing, kernel
from automap.price.kernels.array_types import Rows
from automap.price.kernels.cost_records import (
    MAX_AXES,
    PART,
    PART_DTYPE,
    RANK_COST,
    RANK_COST_DTYPE,
    READING,
    READING_DTYPE,
    SETTINGS,
    SETTINGS_DTYPE,
    SHARE,
    SHARE_DTYPE,
    TIE,
    TIE_DTYPE,
    UNIT_COST,
    UNIT_COST_DTYPE,
)
from automap.price.kernels.records import TABLES
from automap.price.kernels.step_records import STEP_WORKSPACE, StepWorkspace, new_step_workspace
from automap.schedule import INTERLEAVED
from automap.space.compile import (
    G_ASSIGNMENT,
    G_COUNT,
    G_MEMBERS,
    N_BATCH,
    N_FIRST_CUT,
    N_FIRST_RECOMPUTE,
    N_MOST_MESHES,
    N_PART,
    N_ZERO_SLOT,
    SPACE,
    Y_FIRST,
    Y_UNIFORM,
)
from automap.space.kernels.cuts import cut_shares, nth_cut
from automap.space.kernels.masks import share_devices, share_of, sharing, signature_mask, unlike_meshes
from automap.space.kernels.unit_cache import BITS, REMEMBERED, UNIT_CACHE, mix, scramble

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

# What tells rows of unit costs apart within one plan.
K_TYPE, K_MODE, K_RANK, K_BEFORE, K_OPENS, K_INCOMING = range(6)
K_COUNT = K_INCOMING + MAX_AXES
# Slots of Desk.frame: pipeline ranks, chunks, micro-batches, kind of the schedule; unlike meshes; whether one rank
# stands for all; rows and parts laid out; whether all ranks have as many devices.
F_RANKS, F_CHUNKS, F_COUNT_OF_BATCHES, F_KIND, F_MESHES, F_UNIFORM, F_ROWS, F_PARTS, F_ALIKE = range(9)


class Workspace(NamedTuple):
    """Scratch memory of one caller."""

    frame: Ints
    """See the F_ constants."""
    devices: Ints
    """[ranks]"""
    rows: Ints
    """[ranks] row of each among the distinct stages."""
    stages: Ints
    """[ranks] the same as the kind of device sees it that is looked from, see `LoweredPlan.views`."""
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
    types: Ints
    """[groups] unit type of each."""
    hashes: Ints
    """[types, 2] two hashes of what is picked in each."""
    keys: Ints
    """[rows, K_COUNT]"""
    costs: Rows
    """[rows] unit costs."""
    covered: Mask
    """[rows] whether the unit is recomputed as a whole."""
    parts: Rows
    """[parts] see `PartRow`."""
    home: Ints
    """[units] pipeline rank."""
    laid: Ints
    """[types, 3] distinct stage, samples of a micro-batch and axes of ZeRO for which the unit workspace holds the unit
    type, or -1."""
    incoming: Ints
    """[axes] scratch."""
    zero_axes: Mask
    """[axes] whether ZeRO shards over the axis."""
    tied: Rows
    """[ties] see `TieRow`."""
    alone: Rows
    """[axes] scratch: how one unit reads a tied parameter, see `ReadingRow`."""
    together: Rows
    """[axes] scratch: how all units of a rank read it."""
    tied_shares: Rows
    """[3] scratch: what a rank has of a tied parameter for earlier units, for one more, for all; see `ShareRow`."""
    room: StepWorkspace
    """Scratch of `step`."""
    rest: Floats
    """[units + 1] see `automap.bounds.kernels.step_many`."""
    used: Floats
    """[4, ranks] likewise."""
    settings: Rows
    """[1] see `SettingsRow`."""
    ranks: Rows
    """[ranks] what `finish` found, see `RankCostRow`."""


WORKSPACE = types.NamedTuple(
    (
        *[int64[::1]] * 7,
        float64[:, ::1],
        float64[::1],
        *[int64[:, ::1]] * 2,
        int64[::1],
        *[int64[:, ::1]] * 2,
        UNIT_COST[::1],
        boolean[::1],
        PART[::1],
        int64[::1],
        int64[:, ::1],
        int64[::1],
        boolean[::1],
        TIE[::1],
        *[READING[::1]] * 2,
        SHARE[::1],
        STEP_WORKSPACE,
        float64[::1],
        float64[:, ::1],
        SETTINGS[::1],
        RANK_COST[::1],
    ),
    Workspace,
)
"""Numba's type of `Workspace`."""


@kernel(WORKSPACE(TABLES, SPACE), inner=True)
def new_workspace(tables, space):
    """A desk on which nothing is picked."""
    num_units = space.units.shape[0]
    num_axes = space.obeys.shape[0]
    most = space.windows.shape[1]
    meshes = space.scalars[N_MOST_MESHES]
    workspace = Workspace(
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
        np.empty(space.groups.shape[0], np.int64),
        np.zeros((space.boundary.shape[0], 2), np.int64),
        np.empty((num_units, K_COUNT), np.int64),
        np.empty(num_units, UNIT_COST_DTYPE),
        np.empty(num_units, np.bool_),
        np.empty(num_units, PART_DTYPE),
        np.empty(num_units, np.int64),
        np.full((space.boundary.shape[0], 3), -1),
        np.empty(num_axes, np.int64),
        np.zeros(num_axes, np.bool_),
        np.zeros(space.tied.shape[0], TIE_DTYPE),
        np.empty(num_axes, READING_DTYPE),
        np.empty(num_axes, READING_DTYPE),
        np.empty(3, SHARE_DTYPE),
        new_step_workspace(most, most),
        np.empty(num_units + 1),
        np.empty((4, most)),
        np.empty(1, SETTINGS_DTYPE),
        np.empty(most, RANK_COST_DTYPE),
    )
    workspace.settings[0] = space.settings
    for kind in range(space.boundary.shape[0]):
        for group in range(space.group_spans[kind], space.group_spans[kind + 1]):
            workspace.types[group] = kind
    return workspace


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
    """Writes the stages as a kind of device sees them: see `LoweredPlan.views`.

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


@borrowing(void(SPACE, int64[::1], WORKSPACE), inner=True)
def set_stages(space, value, workspace):
    """Lays out where the stages of a plan stand whose slots before the first cut are decided.

    Args:
        space: see `compile_space`.
        value: [slots].
        workspace: `frame` but for rows and parts, `devices` to `shares`, and `zero_axes` are written.
    """
    num_axes = space.obeys.shape[0]
    frame = workspace.frame
    num_ranks = space.degrees[value[0]]
    virtual = space.virtuals[value[num_axes + 1]]
    num_chunks = num_ranks * virtual
    alike = find_stages(space, value, workspace.devices, workspace.rows, workspace.boundaries)
    num_meshes = unlike_meshes(
        space, value, alike, workspace.devices, workspace.rows, workspace.sizes, workspace.divided
    )
    look_from(space, value, 0, workspace.devices, workspace.rows, workspace.stages, workspace.samples)
    shares = workspace.shares[:num_chunks]
    cut_shares(space, workspace.stages, num_ranks, shares)
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
        workspace.zero_axes[a] = False
        for mesh in range(num_meshes):
            workspace.zero_axes[a] = workspace.zero_axes[a] or (a < num_axes - 1 and workspace.sizes[mesh, a] > 1.0)


@borrowing(void(SPACE, int64[::1], WORKSPACE), inner=True)
def set_frame(space, value, workspace):
    """Lays out the rows of a plan whose slots before the first signature are decided.

    Args:
        space: see `compile_space`.
        value: [slots].
        workspace: all but signatures and costs is written.
    """
    set_stages(space, value, workspace)
    num_units = space.units.shape[0]
    frame, keys, parts = workspace.frame, workspace.keys, workspace.parts
    num_ranks, num_chunks, uniform = frame[F_RANKS], frame[F_CHUNKS], frame[F_UNIFORM]
    workspace.settings[0].zero_stage = value[space.scalars[N_ZERO_SLOT]]

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
            end = nth_cut(space.weight, unit, max(low, unit + 1), high, workspace.shares[chunk], picked)
        opens = 1 if chunk > 0 or unit == 0 else 0
        while unit < end:
            kind = space.units[unit]
            workspace.home[unit] = rank
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
            if opens == 0 and parts[num_parts - 1].row == row:
                parts[num_parts - 1].times += 1
            else:
                parts[num_parts].chunk = chunk
                parts[num_parts].row = row
                parts[num_parts].times = 1
                num_parts += 1
            before = kind
            opens = 0
            unit += 1
    frame[F_ROWS] = known
    frame[F_PARTS] = num_parts


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
        restore(space, group, axis, workspace)


@borrowing(void(SPACE, int64, int64, WORKSPACE), inner=True)
def restore(space, group, axis, workspace):
    """Writes to `chosen` what is picked for a group on an axis."""
    members, value = space.groups[group, G_COUNT], workspace.picked[group, axis]
    at = space.groups[group, G_ASSIGNMENT] + value * members
    for m in range(members):
        signature = space.assignments[at + m] if value >= 0 else -1
        workspace.chosen[space.members[space.groups[group, G_MEMBERS] + m], axis] = signature


@borrowing(void(TABLES, SPACE, UNIT_CACHE, int64, int64, WORKSPACE, boolean[::1]), inner=True)
def remember_mask(tables, space, cache, group, axis, workspace, mask):
    """`signature_mask` of what is picked on the axes before; what it tries is taken back.

    Args:
        tables: see `Tables.arrays`.
        space: see `compile_space`.
        cache: read and written.
        group: row of `space.groups`.
        axis: mesh axis.
        workspace: the axis and those behind it are left undecided.
        mask: [values], written.
    """
    one, two = mix(int64(1469598103934665603), int64(7809847782465536322), group * MAX_AXES + axis)
    for a in range(axis):
        one, two = mix(one, two, workspace.picked[group, a])
    num_meshes, num_axes = workspace.frame[F_MESHES], workspace.incoming.shape[0]
    for mesh in range(num_meshes):
        for a in range(num_axes):
            one, two = mix(one, two, int64(workspace.sizes[mesh, a]))
        one, two = mix(one, two, workspace.divided[mesh])
    one |= 1
    place = two & (REMEMBERED - 1)
    known = cache.legal[place]
    if mask.shape[0] > BITS or known[0] != one or known[1] != two:
        sizes, samples = workspace.sizes[:num_meshes], workspace.divided[:num_meshes]
        signature_mask(tables, space, group, axis, workspace.chosen, sizes, samples, mask)
        for a in range(axis, num_axes):
            pick(space, group, a, -1, workspace)
            restore(space, group, a, workspace)
        known[0] = one
        known[1] = two
        known[2] = 0
        for value in range(min(mask.shape[0], BITS)):
            known[2] |= int64(mask[value]) << value
    else:
        for value in range(mask.shape[0]):
            mask[value] = (known[2] >> value) & 1 == 1

"""Workspace: one plan of a space prepared for pricing, with a row for each distinct unit; all compiled.

Units with equal costs share a row. `set_rows` writes the rows from all slots but the signatures; `pick` writes one
signature of a linkage group, which may be -1, undecided. `automap.space.kernels.price_one` prices the rows.
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
    UNIT_IN_STEP_DTYPE,
)
from automap.price.kernels.step_records import StepWorkspace, new_step_workspace
from automap.price.kernels.unit_workspace import UnitWorkspace, remembering_workspace
from automap.schedule import ZB1P, ZB2P
from automap.space.kernels.draft import Draft, new_draft
from automap.space.kernels.levels import mode_of
from automap.space.kernels.records import COMPILED, SPACE

COUNTS = np.dtype([("num_rows", np.int64), ("num_parts", np.int64)])
"""Rows and parts of the plan in a workspace."""
ROW = np.dtype(
    [
        ("type", np.int64),  # unit type
        ("mode", np.int64),  # recompute mode; the number of modes: whichever leaves least, see `SpaceArrays.levels`
        ("rank", np.int64),  # pipeline rank; the first one where one rank stands for all
        ("before", np.int64),  # type of the unit before, or -1
        ("opens", np.bool_),  # whether the unit opens a chunk
        ("incoming", np.int64, (MAX_AXES,)),  # placement of the tensor that crosses into the unit
    ]
)
"""A row for equal units of one plan: everything but signatures on which their costs depend."""


class Workspace(NamedTuple):
    """Memory of one caller."""

    draft: Draft
    """The plan."""
    counts: Annotated[Rows, rows_type(COUNTS)]
    """[1] see `COUNTS`."""
    rows: Annotated[Rows, rows_type(ROW)]
    """[rows] see `ROW`."""
    costs: Annotated[Rows, rows_type(UNIT_IN_STEP_DTYPE)]
    """[rows] costs of one unit of each row, see `UnitInStepRow`."""
    zero_s: Floats2
    """[rows, 4] `automap.price.kernels.passes.zero_s` of a unit of each row."""
    zero_stages: Floats
    """[rows] ZeRO stage for which `zero_s` was computed; -1 if it must be computed again."""
    keys: Ints2
    """[rows, 2] hashes of everything on which `costs` depend; zeros where there are no costs."""
    wanted: Ints2
    """[rows, 2] scratch of `cost_rows`: these hashes for the costs that are wanted."""
    is_cached: Mask
    """[rows] scratch of `cost_rows`: whether the cache has them."""
    covered: Mask
    """[rows] whether the unit is recomputed as a whole."""
    parts: Annotated[Rows, rows_type(PART_DTYPE)]
    """[parts] see `PartRow`."""
    tried: Annotated[Rows, rows_type(UNIT_COST_DTYPE)]
    """[2] scratch: costs of a unit, and those in one mode of several."""
    home: Ints
    """[units] pipeline rank of each unit."""
    prepared: Ints2
    """[types, 5] distinct stage, samples of a micro-batch and axes of ZeRO for which `unit` holds the costs of a unit
    type, or -1; and `Draft.hashes` of the signatures."""
    incoming: Ints
    """[axes] scratch for a placement."""
    tied: Annotated[Rows, rows_type(TIE_DTYPE)]
    """[pairs of units that share a parameter] see `TieRow`."""
    tied_key: Ints
    """[2] hashes of everything on which `tied` depends; zeros where it holds nothing."""
    alone: Annotated[Rows, rows_type(READING_DTYPE)]
    """[axes] scratch: the reading of a tied parameter by one unit."""
    together: Annotated[Rows, rows_type(READING_DTYPE)]
    """[axes] scratch: the reading of it by all units of a rank."""
    tied_shares: Annotated[Rows, rows_type(SHARE_DTYPE)]
    """[3] scratch: the share of a rank in a tied parameter for earlier units, for one more unit, and for all."""
    step: StepWorkspace
    """Scratch of `step`."""
    unit: UnitWorkspace
    """Results of `shard_unit` for each unit type."""
    seen: Floats
    """[2] scratch of `automap.bounds.kernels.step_many`."""
    least: Ints
    """[ranks] scratch of `automap.bounds.kernels.step_many`."""
    rest: Floats
    """[units + 1] scratch of `automap.bounds.kernels.step_many`."""
    settings: Annotated[Rows, rows_type(SETTINGS_DTYPE)]
    """[1] settings of a step, with the plan's ZeRO stage."""
    ranks: Annotated[Rows, rows_type(RANK_COST_DTYPE)]
    """[ranks] results of `finish`, see `RankCostRow`."""


WORKSPACE = tuple_type(Workspace)
"""Numba's type of `Workspace`."""


@kernel(WORKSPACE(COMPILED), apart=True)
def new_workspace(compiled):
    """A workspace whose draft has nothing picked."""
    tables, space = compiled.tables, compiled.space
    num_units, num_axes = space.units.shape[0], space.obeys.shape[0]
    num_types, most = space.boundary.shape[0], space.windows.shape[1]
    workspace = Workspace(
        draft=new_draft(compiled),
        counts=np.zeros(1, COUNTS),
        rows=np.empty(num_units, ROW),
        costs=np.empty(num_units, UNIT_IN_STEP_DTYPE),
        zero_s=np.empty((num_units, 4)),
        zero_stages=np.empty(num_units),
        keys=np.zeros((num_units, 2), np.int64),
        wanted=np.empty((num_units, 2), np.int64),
        is_cached=np.empty(num_units, np.bool_),
        covered=np.empty(num_units, np.bool_),
        parts=np.empty(num_units, PART_DTYPE),
        tried=np.empty(2, UNIT_COST_DTYPE),
        home=np.empty(num_units, np.int64),
        prepared=np.full((num_types, 5), -1),
        incoming=np.empty(num_axes, np.int64),
        tied=np.zeros(space.tied.shape[0], TIE_DTYPE),
        tied_key=np.zeros(2, np.int64),
        alone=np.empty(num_axes, READING_DTYPE),
        together=np.empty(num_axes, READING_DTYPE),
        tied_shares=np.empty(3, SHARE_DTYPE),
        step=new_step_workspace(most, most),
        unit=remembering_workspace(tables, num_axes, 0, compiled.cache.operators),
        seen=np.empty(2),
        least=np.empty(most, np.int64),
        rest=np.empty(num_units + 1),
        settings=np.empty(1, SETTINGS_DTYPE),
        ranks=np.empty(most, RANK_COST_DTYPE),
    )
    workspace.settings[0] = space.settings
    workspace.unit.apart[0] = False
    for kind in space.schedules:
        if kind in (ZB1P, ZB2P):
            workspace.unit.apart[0] = True
    return workspace


@borrowing(void(SPACE, int64[::1], WORKSPACE), inner=True)
def set_rows(space, value, workspace):
    """Writes the rows and parts of a plan whose layout and ends of chunks are set and whose ZeRO stage is decided."""
    layout, rows, parts = workspace.draft.layout, workspace.rows, workspace.parts
    frame, counts = layout.frame[0], workspace.counts[0]
    workspace.settings[0].zero_stage = value[space.first.zero]
    counts.num_rows, counts.num_parts = 0, 0
    before = -1
    unit = 0
    for chunk in range(frame.num_chunks):
        rank = chunk % frame.num_ranks
        where = 0 if frame.is_uniform else rank
        level = value[space.first.recompute + rank]
        start = unit
        opens = True
        while unit < layout.ends[chunk]:
            kind = space.units[unit]
            mode = mode_of(space, level, unit - start, layout.ends[chunk] - start)
            if space.silent[kind]:
                mode = 0
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
    """Number of the row with these fields, or the number of rows if there is none."""
    for number in range(rows.shape[0]):
        row = rows[number]
        if row.type == kind and row.before == before and row.opens == opens and row.mode == mode and row.rank == rank:
            return number
    return rows.shape[0]

"""The parts of a unit's cost: what one linkage group adds to it, and what passes between two groups.

`vary` prices a unit with one group decided at a time and all other signatures at their best. `exchange` prices what
brings one tensor from its placement to a required one, and its gradient back. `automap.cost_graph.graph` puts them
together. Units: seconds, bytes, samples.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import boolean, float64, int64, void

from automap.jit import kernel
from automap.price.kernels.array_types import Ints, Ints2, columns_of, tuple_type
from automap.price.kernels.cost_records import UNIT_COST, UNIT_COST_DTYPE
from automap.price.kernels.records import TABLES
from automap.price.kernels.resharding import convert_operand, repeat
from automap.price.kernels.shard_unit import shard_unit
from automap.price.kernels.stage_records import STAGE, UNIT
from automap.price.kernels.unit import unit_cost
from automap.price.kernels.unit_workspace import new_unit_workspace
from ir.factors import BROADCAST, PARTIAL

ALWAYS = columns_of(
    UNIT_COST_DTYPE,
    "forward_comm_s",
    "backward_comm_s",
    "forward_waits",
    "backward_waits",
    "forward_ring_s",
    "backward_ring_s",
)
"""Columns of a unit cost that a conversion always adds to."""
REPEATED = columns_of(UNIT_COST_DTYPE, "recompute_comm_s", "backward_waits", "recompute_ring_s")
"""Columns to which it adds as well where recomputation repeats it."""
COLUMNS = np.array([*ALWAYS, *REPEATED], dtype=np.int64)
"""Columns of a unit cost that `exchange` writes, those of the repetition last."""
NUM_ALWAYS = len(ALWAYS)
"""Number of columns before those of the repetition."""


class GroupValues(NamedTuple):
    """A linkage group and the joint values of its slots."""

    members: Ints
    """Operator rows of the group; empty for a unit with nothing decided."""
    assignment: Ints2
    """[values of an axis, members] signatures."""
    values: Ints2
    """[joint values, axes] rows of `assignment`."""


@kernel(void(TABLES, UNIT, STAGE, boolean[:, ::1], tuple_type(GroupValues), int64[:, ::1], int64, UNIT_COST[:, :, ::1]))
def vary(tables, unit, stage, masks, group, incoming, crossing, out):
    """Costs of the operators of one unit under every joint value of one linkage group, all others undecided.

    Args:
        unit: operators; its signatures are overwritten.
        masks: [modes, operators] what is recomputed.
        group: the group and its values.
        incoming: [ways, axes] placements of the tensor that crosses into the unit.
        crossing: operand row whose tensor crosses out of the unit, or -1.
        out: [modes, joint values, ways] written.
    """
    num_axes = stage.axes.shape[0]
    workspace = new_unit_workspace(tables, num_axes, 0)
    chosen = unit.chosen
    chosen[:] = -1
    for v in range(group.values.shape[0]):
        for m in range(group.members.shape[0]):
            for a in range(num_axes):
                chosen[group.members[m] - unit.first, a] = group.assignment[group.values[v, a], m]
        shard_unit(tables, unit, stage, v > 0, workspace)
        for mode in range(masks.shape[0]):
            for way in range(incoming.shape[0]):
                cost = out[mode, v, way : way + 1]
                unit_cost(tables, unit, masks[mode], incoming[way], crossing, stage, workspace, cost)


@kernel(void(TABLES, int64, int64[:, ::1], int64[:, :, ::1], boolean, STAGE, float64[:, :, ::1]))
def exchange(tables, row, sources, requests, is_parametric, stage, out):
    """Costs of bringing one tensor to an operand and its gradient back, for all placements of either.

    Args:
        row: operand row that reads the tensor.
        sources: [ways, axes] placements of the tensor.
        requests: [requests, 2, axes] required placements, and placements in which the gradient is handed back.
        is_parametric: whether it depends on parameters alone, so that a partial gradient stays so.
        out: [ways, requests, columns] see `COLUMNS`; written.
    """
    num_axes = stage.axes.shape[0]
    workspace = new_unit_workspace(tables, num_axes, 0)
    given = np.empty(num_axes, np.int64)
    costs = np.empty(1, UNIT_COST_DTYPE)
    numbers, sent = costs.view(np.float64), workspace.resharded[row]
    for s in range(sources.shape[0]):
        for r in range(requests.shape[0]):
            for a in range(num_axes):
                workspace.placement[row, a] = requests[r, 0, a]
                summed = is_parametric and sources[s, a] == BROADCAST and requests[r, 1, a] == PARTIAL
                given[a] = BROADCAST if summed else requests[r, 1, a]
            numbers[:] = 0.0
            moves = convert_operand(tables, row, sources[s], given, stage, workspace, sent, costs[0])
            for c in range(NUM_ALWAYS):
                out[s, r, c] = numbers[COLUMNS[c]]
            numbers[:] = 0.0
            if moves:
                repeat(sent, costs[0])
            for c in range(NUM_ALWAYS, COLUMNS.shape[0]):
                out[s, r, c] = numbers[COLUMNS[c]]

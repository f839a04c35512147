"""The parts of a unit's cost: what one linkage group adds to it, and what passes between two groups.

`vary` prices a unit with one group decided at a time and all other signatures at their best. `bring_there` prices what
brings one tensor from its placement to a required one, and `bring_back` its gradient. `automap.cost_graph.graph` puts
them together. Units: seconds, bytes, samples.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import boolean, float64, int64, void

from automap.jit import kernel
from automap.price.kernels.array_types import Ints, Ints2, columns_of, tuple_type
from automap.price.kernels.collectives import UNKNOWN
from automap.price.kernels.cost_records import UNIT_COST, UNIT_COST_DTYPE
from automap.price.kernels.records import TABLES
from automap.price.kernels.resharding import convert_operand
from automap.price.kernels.shard_unit import shard_unit
from automap.price.kernels.stage_records import STAGE, UNIT
from automap.price.kernels.unit import unit_cost
from automap.price.kernels.unit_workspace import new_unit_workspace
from ir.factors import BROADCAST, PARTIAL

THERE = np.array(columns_of(UNIT_COST_DTYPE, "forward_comm_s", "forward_waits", "forward_ring_s"))
"""Columns of a unit cost to which bringing a tensor to an operand adds."""
BACK = np.array(columns_of(UNIT_COST_DTYPE, "backward_comm_s", "backward_waits", "backward_ring_s"))
"""Columns to which bringing its gradient back adds."""
AGAIN = np.array(columns_of(UNIT_COST_DTYPE, "recompute_comm_s", "backward_waits", "recompute_ring_s"))
"""Columns to which the same adds as to `THERE`, one by one, where recomputation repeats it."""


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


@kernel(void(TABLES, int64, int64[:, ::1], int64[:, ::1], STAGE, float64[:, :, ::1]))
def bring_there(tables, row, sources, targets, stage, out):
    """Costs of bringing one tensor to an operand, for all placements of either.

    Args:
        row: operand row that reads the tensor.
        sources: [ways, axes] placements of the tensor.
        targets: [targets, axes] required placements.
        out: [ways, targets, columns] see `THERE`; written.
    """
    num_axes = stage.axes.shape[0]
    workspace = new_unit_workspace(tables, num_axes, 0)
    nothing = np.full(num_axes, UNKNOWN, np.int64)
    costs = np.empty(1, UNIT_COST_DTYPE)
    numbers, sent = costs.view(np.float64), workspace.resharded[row]
    for t in range(targets.shape[0]):
        workspace.placement[row] = targets[t]
        for s in range(sources.shape[0]):
            numbers[:] = 0.0
            convert_operand(tables, row, sources[s], nothing, stage, workspace, sent, costs[0])
            for c in range(THERE.shape[0]):
                out[s, t, c] = numbers[THERE[c]]


@kernel(void(TABLES, int64, int64[:, ::1], int64[:, ::1], boolean, STAGE, float64[:, :, ::1]))
def bring_back(tables, row, sources, gradients, is_parametric, stage, out):
    """Costs of bringing the gradient of one tensor back from an operand, for all placements of either.

    Args:
        row: operand row that reads the tensor.
        sources: [ways, axes] placements of the tensor.
        gradients: [gradients, axes] placements in which the gradient is handed back.
        is_parametric: whether it depends on parameters alone, so that a partial gradient stays so.
        out: [ways, gradients, columns] see `BACK`; written.
    """
    num_axes = stage.axes.shape[0]
    workspace = new_unit_workspace(tables, num_axes, 0)
    workspace.placement[row] = UNKNOWN
    given = np.empty(num_axes, np.int64)
    costs = np.empty(1, UNIT_COST_DTYPE)
    numbers, sent = costs.view(np.float64), workspace.resharded[row]
    for g in range(gradients.shape[0]):
        for s in range(sources.shape[0]):
            for a in range(num_axes):
                summed = is_parametric and sources[s, a] == BROADCAST and gradients[g, a] == PARTIAL
                given[a] = BROADCAST if summed else gradients[g, a]
            numbers[:] = 0.0
            convert_operand(tables, row, sources[s], given, stage, workspace, sent, costs[0])
            for c in range(BACK.shape[0]):
                out[s, g, c] = numbers[BACK[c]]

"""The parts of a unit's cost: what one linkage group adds to it, and what passes between two groups.

`vary` prices a unit with one group decided at a time and all other signatures at their best. `bring_there` prices what
brings one tensor from its placement to a required one, and `bring_back` its gradient. `automap.cost_graph.graph` puts
them together. Units: seconds, bytes, samples.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
from numba import boolean, float64, int64, void

from automap.jit import borrowing, kernel
from automap.price.kernels.array_types import Floats, Ints, Ints2, Mask2, Rows, columns_of, tuple_type
from automap.price.kernels.collectives import UNKNOWN
from automap.price.kernels.cost_records import UNIT_COST, UNIT_COST_DTYPE
from automap.price.kernels.records import TABLES
from automap.price.kernels.resharding import convert_operand
from automap.price.kernels.shard_unit import shard_unit
from automap.price.kernels.stage_records import STAGE, UNIT
from automap.price.kernels.unit import unit_cost
from automap.price.kernels.unit_workspace import UNIT_WORKSPACE, UnitWorkspace, new_unit_workspace
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


class Around(NamedTuple):
    """What a unit is priced with beside its signatures."""

    masks: Mask2
    """[modes, operators] what is recomputed."""
    incoming: Ints2
    """[ways, axes] placements of the tensor that crosses into the unit."""
    crossing: int
    """Operand row whose tensor crosses out of the unit, or -1."""


@borrowing(
    void(TABLES, UNIT, STAGE, tuple_type(GroupValues), tuple_type(Around), UNIT_COST[:, :, ::1], UNIT_WORKSPACE),
    inner=True,
)
def _vary(tables, unit, stage, group, around, out, workspace):
    num_axes, chosen = stage.axes.shape[0], unit.chosen
    for o in range(chosen.shape[0]):
        for a in range(num_axes):
            chosen[o, a] = -1
    for v in range(group.values.shape[0]):
        for m in range(group.members.shape[0]):
            for a in range(num_axes):
                chosen[group.members[m] - unit.first, a] = group.assignment[group.values[v, a], m]
        shard_unit(tables, unit, stage, v > 0, workspace)
        for mode in range(around.masks.shape[0]):
            for way in range(around.incoming.shape[0]):
                recomputed, incoming, cost = around.masks[mode], around.incoming[way], out[mode, v, way : way + 1]
                unit_cost(tables, unit, recomputed, incoming, around.crossing, stage, workspace, cost)


@kernel(void(TABLES, UNIT, STAGE, tuple_type(GroupValues), tuple_type(Around), UNIT_COST[:, :, ::1]))
def vary(tables, unit, stage, group, around, out):
    """Costs of the operators of one unit under every joint value of one linkage group, all others undecided.

    Args:
        unit: operators; its signatures are overwritten.
        group: the group and its values.
        around: recomputation, and what crosses into the unit and out of it.
        out: [modes, joint values, ways] written.
    """
    _vary(tables, unit, stage, group, around, out, new_unit_workspace(tables, stage.axes.shape[0], 0))


class Conversion(NamedTuple):
    """Memory in which one tensor is converted."""

    workspace: UnitWorkspace
    given: Ints
    """[axes] placement in which the gradient is handed back."""
    costs: Annotated[Rows, UNIT_COST[::1]]
    """[1] what the conversion costs."""
    numbers: Floats
    """The same as numbers."""


CONVERSION = tuple_type(Conversion)
"""Numba's type of `Conversion`."""


@kernel(CONVERSION(TABLES, int64), inner=True)
def _new_conversion(tables, num_axes):
    costs = np.empty(1, UNIT_COST_DTYPE)
    given = np.full(num_axes, UNKNOWN, np.int64)
    return Conversion(new_unit_workspace(tables, num_axes, 0), given, costs, costs.view(np.float64))


@borrowing(void(TABLES, int64, int64[:, ::1], int64[:, ::1], STAGE, float64[:, :, ::1], CONVERSION), inner=True)
def _bring_there(tables, row, sources, targets, stage, out, memory):
    workspace, numbers = memory.workspace, memory.numbers
    for t in range(targets.shape[0]):
        for a in range(targets.shape[1]):
            workspace.placement[row, a] = targets[t, a]
        for s in range(sources.shape[0]):
            for c in range(numbers.shape[0]):
                numbers[c] = 0.0
            sent = workspace.resharded[row]
            convert_operand(tables, row, sources[s], memory.given, stage, workspace, sent, memory.costs[0])
            for c in range(THERE.shape[0]):
                out[s, t, c] = numbers[THERE[c]]


@kernel(void(TABLES, int64, int64[:, ::1], int64[:, ::1], STAGE, float64[:, :, ::1]))
def bring_there(tables, row, sources, targets, stage, out):
    """Costs of bringing one tensor to an operand, for all placements of either.

    Args:
        row: operand row that reads the tensor.
        sources: [ways, axes] placements of the tensor.
        targets: [targets, axes] required placements.
        out: [ways, targets, columns] see `THERE`; written.
    """
    _bring_there(tables, row, sources, targets, stage, out, _new_conversion(tables, stage.axes.shape[0]))


@borrowing(
    void(TABLES, int64, int64[:, ::1], int64[:, ::1], boolean, STAGE, float64[:, :, ::1], CONVERSION), inner=True
)
def _bring_back(tables, row, sources, gradients, is_parametric, stage, out, memory):
    workspace, given, numbers = memory.workspace, memory.given, memory.numbers
    for a in range(given.shape[0]):
        workspace.placement[row, a] = UNKNOWN
    for g in range(gradients.shape[0]):
        for s in range(sources.shape[0]):
            for a in range(given.shape[0]):
                summed = is_parametric and sources[s, a] == BROADCAST and gradients[g, a] == PARTIAL
                given[a] = BROADCAST if summed else gradients[g, a]
            for c in range(numbers.shape[0]):
                numbers[c] = 0.0
            sent = workspace.resharded[row]
            convert_operand(tables, row, sources[s], given, stage, workspace, sent, memory.costs[0])
            for c in range(BACK.shape[0]):
                out[s, g, c] = numbers[BACK[c]]


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
    _bring_back(
        tables, row, sources, gradients, is_parametric, stage, out, _new_conversion(tables, stage.axes.shape[0])
    )

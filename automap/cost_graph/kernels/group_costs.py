"""The parts of a unit's cost: the cost of one linkage group, and the costs of conversions between two groups.

`vary` prices a unit with the signatures of one group decided and all others undecided. `bring_there` prices the
conversion of one tensor from its placement to a required one, and `bring_back` that of its gradient.
`automap.cost_graph.graph` combines them. Units: seconds, bytes, samples.
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
"""Columns of a unit cost to which the conversion of a tensor in the forward pass adds."""
BACK = np.array(columns_of(UNIT_COST_DTYPE, "backward_comm_s", "backward_waits", "backward_ring_s"))
"""Columns to which the conversion of its gradient adds."""
AGAIN = np.array(columns_of(UNIT_COST_DTYPE, "recompute_comm_s", "backward_waits", "recompute_ring_s"))
"""Columns to which the same numbers as to `THERE`, in this order, are added if recomputation repeats the conversion."""


class GroupValues(NamedTuple):
    """A linkage group and the joint values of its slots."""

    members: Ints
    """Operator rows of the group; empty for a unit with nothing decided."""
    assignment: Ints2
    """[values of an axis, members] signatures."""
    values: Ints2
    """[joint values, axes] rows of `assignment`."""


class Around(NamedTuple):
    """Arguments of the price of a unit beside its signatures."""

    masks: Mask2
    """[modes, operators] whether each operator is recomputed."""
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
    """Scratch memory for the price of one conversion."""

    workspace: UnitWorkspace
    given: Ints
    """[axes] gradient placement that the reader produces."""
    costs: Annotated[Rows, UNIT_COST[::1]]
    """[1] costs of the conversion."""
    numbers: Floats
    """[UNIT_COST_WIDTH] the same memory as numbers."""


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
    for target in range(targets.shape[0]):
        for axis in range(targets.shape[1]):
            workspace.placement[row, axis] = targets[target, axis]
        for source in range(sources.shape[0]):
            for column in range(numbers.shape[0]):
                numbers[column] = 0.0
            sent = workspace.resharded[row]
            convert_operand(tables, row, sources[source], memory.given, stage, workspace, sent, memory.costs[0])
            for column in range(THERE.shape[0]):
                out[source, target, column] = numbers[THERE[column]]


@kernel(void(TABLES, int64, int64[:, ::1], int64[:, ::1], STAGE, float64[:, :, ::1]))
def bring_there(tables, row, sources, targets, stage, out):
    """Writes the costs of converting one tensor for an operand, for all pairs of placements.

    Args:
        row: operand row that reads the tensor.
        sources: [ways, axes] placements of the tensor.
        targets: [targets, axes] required placements.
        stage: mesh, links, hardware and samples.
        out: [ways, targets, columns] see `THERE`; written.
    """
    _bring_there(tables, row, sources, targets, stage, out, _new_conversion(tables, stage.axes.shape[0]))


@borrowing(
    void(TABLES, int64, int64[:, ::1], int64[:, ::1], boolean, STAGE, float64[:, :, ::1], CONVERSION), inner=True
)
def _bring_back(tables, row, sources, gradients, is_parametric, stage, out, memory):
    workspace, given, numbers = memory.workspace, memory.given, memory.numbers
    for axis in range(given.shape[0]):
        workspace.placement[row, axis] = UNKNOWN
    for gradient in range(gradients.shape[0]):
        for source in range(sources.shape[0]):
            for axis in range(given.shape[0]):
                summed = is_parametric and sources[source, axis] == BROADCAST and gradients[gradient, axis] == PARTIAL
                given[axis] = BROADCAST if summed else gradients[gradient, axis]
            for column in range(numbers.shape[0]):
                numbers[column] = 0.0
            sent = workspace.resharded[row]
            convert_operand(tables, row, sources[source], given, stage, workspace, sent, memory.costs[0])
            for column in range(BACK.shape[0]):
                out[source, gradient, column] = numbers[BACK[column]]


@kernel(void(TABLES, int64, int64[:, ::1], int64[:, ::1], boolean, STAGE, float64[:, :, ::1]))
def bring_back(tables, row, sources, gradients, is_parametric, stage, out):
    """Writes the costs of converting the gradient of one tensor, for all pairs of placements.

    Args:
        row: operand row that reads the tensor.
        sources: [ways, axes] placements of the tensor.
        gradients: [gradients, axes] gradient placements that the reader may produce.
        is_parametric: whether the tensor depends on parameters alone; then a partial gradient is not reduced here.
        stage: mesh, links, hardware and samples.
        out: [ways, gradients, columns] see `BACK`; written.
    """
    _bring_back(
        tables, row, sources, gradients, is_parametric, stage, out, _new_conversion(tables, stage.axes.shape[0])
    )

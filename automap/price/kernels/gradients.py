"""Parameters of a unit: the elements that one rank holds, with and without ZeRO, and the axes over which gradients are
reduced."""

from __future__ import annotations

from numba import float64, int64, void

from automap.jit import borrowing
from automap.price.kernels.collectives import UNKNOWN
from automap.price.kernels.cost_records import UNIT_COST
from automap.price.kernels.records import TABLES, TENSOR
from automap.price.kernels.stage_records import STAGE
from automap.price.kernels.unit_workspace import UNIT_WORKSPACE
from ir.factors import BROADCAST, PARTIAL

WHOLE, SUMMED, OPEN = range(3)
"""What a gradient needs on an axis. WHOLE: no reduction. SUMMED: a sum over the ranks. OPEN: an operator that reads the
parameter is undecided, and may need either."""


@borrowing(float64(float64, int64[::1], STAGE), inner=True)
def local_elements(elements, placement, stage):
    """Elements of a tensor that one rank holds under a placement, [axes]."""
    for a in range(stage.axes.shape[0]):
        if placement[a] >= 0 or placement[a] == UNKNOWN:
            elements /= stage.axes[a]
    return elements


@borrowing(void(TENSOR, int64[::1], STAGE, UNIT_COST), inner=True)
def add_elements(tensor, placement, stage, total):
    """Adds the elements of a parameter that one rank holds, its share of them under ZeRO, and those that ZeRO gathers.

    Args:
        tensor: the parameter.
        placement: [axes] placement of the parameter.
        stage: mesh of the rank, and the axes over which ZeRO shards.
        total: `parameters`, `zero_parameters`, `gathered` and those of them that are frozen are added to.
    """
    elements = local_elements(tensor.fixed_elements, placement, stage)
    is_frozen = tensor.is_frozen == 1
    total.parameters += elements
    if is_frozen:
        total.frozen += elements
    for a in range(stage.axes.shape[0] - 1, -1, -1):
        # A parameter that is read as P is held whole: the first rank reads it, the others read zeros.
        if stage.zero_axes[a] and (placement[a] == BROADCAST or placement[a] == PARTIAL):
            total.gathered[a] += elements
            if is_frozen:
                total.gathered_frozen[a] += elements
            elements /= stage.axes[a]
    total.zero_parameters += elements
    if is_frozen:
        total.zero_frozen += elements


@borrowing(int64(TABLES, int64, int64, int64, int64, UNIT_WORKSPACE), inner=True)
def _summed(tables, row, start, stop, axis, workspace):
    """Whether the gradient of a parameter is partial on an axis, so that it must be reduced: WHOLE, SUMMED or OPEN.

    A view, or an operator on parameters alone, passes a partial gradient on from its consumers: it is added up over the
    micro-batches and reduced once. If one of several consumers gives a partial gradient, the sum of all is partial.

    Args:
        row: operand that reads the parameter.
        start: first operand row of the unit.
        stop: one past its last operand row.
        axis: the mesh axis.
        workspace: with placements; `reached` is scratch.
    """
    reached = workspace.reached
    result, reader, last = WHOLE, row, row
    reached[row] = True
    while reader <= last and result != SUMMED:
        if reached[reader]:
            reached[reader] = False
            placement = workspace.placement[reader, axis]
            is_free = tables.operators[tables.operands[reader].operator].is_free
            # A view of a split parameter has a split gradient, whatever else reads the view.
            hands_on = placement in (BROADCAST, UNKNOWN)
            if is_free == 0 and placement == UNKNOWN:
                result = OPEN
                hands_on = False
            elif is_free == 0 and placement == BROADCAST and workspace.gradient[reader, axis] == PARTIAL:
                result = SUMMED
                hands_on = False
            behind = tables.operands[reader].next_reader
            while hands_on and start <= behind < stop:
                reached[behind] = True
                last = max(last, behind)
                behind = tables.operands[behind].sibling
        reader += 1
    for left in range(reader, last + 1):
        reached[left] = False
    return result


@borrowing(void(TABLES, int64, int64, int64, STAGE, UNIT_WORKSPACE, UNIT_COST), inner=True)
def add_reduction(tables, row, start, stop, stage, workspace, total):
    """Adds a parameter's local gradient elements to every axis on which the gradient is partial.

    Without ZeRO, the last axis reduces and scatters all elements, and each axis before it the shard that a rank then
    has. With ZeRO, the axes that it shards over come first. Each of them leaves a rank with its shard, whether the
    gradient was partial on it or the same on all its ranks. The shard is then reduced over the other axes.

    Args:
        row: operand that reads the parameter.
        start: first operand row of the unit.
        stop: one past its last operand row.
        stage: mesh of the rank, and the axes over which ZeRO shards.
        workspace: with placements.
        total: `reduced` and `scattered` are added to.
    """
    axes, zero_axes, placement = stage.axes, stage.zero_axes, workspace.placement[row]
    elements = local_elements(tables.tensors[tables.operands[row].tensor].fixed_elements, placement, stage)
    shard = elements
    for a in range(axes.shape[0] - 1, -1, -1):
        summed = _summed(tables, row, start, stop, a, workspace)
        if summed == SUMMED:
            total.reduced[a] += elements
        # For a lower bound, an undecided axis scatters the elements and reduces none.
        if summed != WHOLE:
            elements /= axes[a]
        if zero_axes[a] and (placement[a] == BROADCAST or placement[a] == PARTIAL):
            if summed == SUMMED:
                total.scattered[a] += shard
            shard /= axes[a]
    for a in range(axes.shape[0] - 1, -1, -1):
        if not zero_axes[a]:
            summed = _summed(tables, row, start, stop, a, workspace)
            if summed == SUMMED:
                total.scattered[a] += shard
            if summed != WHOLE:
                shard /= axes[a]

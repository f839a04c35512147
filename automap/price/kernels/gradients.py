"""Parameters of a unit: elements of one rank, also under ZeRO, and the axes that gradients are reduced over."""

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
"""What becomes of a gradient on an axis: nothing, a sum over its ranks, or what an undecided operator makes of it."""


@borrowing(float64(float64, int64[::1], STAGE), inner=True)
def local_elements(elements, placement, stage):
    """Elements of a tensor that one rank holds under a placement, [axes]."""
    for a in range(stage.axes.shape[0]):
        if placement[a] >= 0 or placement[a] == UNKNOWN:
            elements /= stage.axes[a]
    return elements


@borrowing(void(TENSOR, int64[::1], STAGE, UNIT_COST), inner=True)
def add_elements(tensor, placement, stage, total):
    """Adds the elements of a parameter that one rank holds, its share of them under ZeRO, and what ZeRO gathers.

    Args:
        tensor: the parameter.
        placement: [axes] placement of the parameter.
    """
    elements = local_elements(tensor.fixed_elements, placement, stage)
    is_frozen = tensor.is_frozen == 1
    total.parameters += elements
    if is_frozen:
        total.frozen += elements
    for a in range(stage.axes.shape[0] - 1, -1, -1):
        # A parameter that is read as a sum is held whole: one rank takes it, the others zeros.
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
    """Whether the gradient of the parameter that a row reads is partial on an axis: WHOLE, SUMMED or OPEN.

    A view, or an operator on parameters alone, hands a partial gradient on from its consumers: it is added up over the
    micro-batches and reduced once. Where one of several consumers gives a partial gradient, their sum is partial.

    Args:
        row: operand that reads the parameter.
        start: first operand row of the unit.
        stop: one past its last operand row.
        workspace: `reached` is used.
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

    Without ZeRO the last axis reduces and scatters all of them, the ones before it what is left. With ZeRO the axes
    that it shards over come first: each leaves a rank its shard, whether a sum had to be taken or all ranks had the
    same. What is still partial on other axes is then summed over these.

    Args:
        row: operand that reads the parameter.
        start: first operand row of the unit.
        stop: one past its last operand row.
    """
    axes, zero_axes, placement = stage.axes, stage.zero_axes, workspace.placement[row]
    elements = local_elements(tables.tensors[tables.operands[row].tensor].fixed_elements, placement, stage)
    shard = elements
    for a in range(axes.shape[0] - 1, -1, -1):
        summed = _summed(tables, row, start, stop, a, workspace)
        if summed == SUMMED:
            total.reduced[a] += elements
        # An undecided axis may scatter them, but need not reduce any.
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

"""Placements of operands under signatures, the bytes that one rank holds, and whether dims divide evenly."""

from __future__ import annotations

from numba import boolean, float64, int64, void

from automap.jit import borrowing
from automap.price.kernels.collectives import UNKNOWN
from automap.price.kernels.records import TABLES, TENSOR
from automap.price.kernels.stage_records import STAGE, UNIT
from automap.price.kernels.unit_workspace import UNIT_WORKSPACE
from ir.factors import BROADCAST, LEAST_PART, PARTIAL


@borrowing(int64(int64))
def dual(placement):
    """Placement that a tensor's gradient is required in: whole where the tensor is a sum, else the same."""
    return BROADCAST if placement == PARTIAL else placement


@borrowing(float64(TENSOR, float64), inner=True)
def whole_bytes(tensor, samples):
    """Bytes of a whole tensor."""
    return (tensor.fixed_elements + tensor.elements_per_sample * samples) * tensor.element_bytes


@borrowing(float64(TENSOR, int64[::1], STAGE), inner=True)
def local_bytes(tensor, placement, stage):
    """Bytes of a tensor that one rank holds under a placement, [axes]."""
    amount = whole_bytes(tensor, stage.samples)
    for a in range(stage.axes.shape[0]):
        if placement[a] >= 0 or placement[a] == UNKNOWN:
            amount /= stage.axes[a]
    return amount


@borrowing(void(TABLES, UNIT, STAGE, UNIT_WORKSPACE), inner=True)
def place_operands(tables, unit, stage, workspace):
    """Writes `placement`, `gradient` and `held` of the operands of the operators of a unit that changed.

    Args:
        workspace: written.
    """
    placement, gradient = workspace.placement, workspace.gradient
    for op in range(unit.first, unit.last):
        if not workspace.changed[op]:
            continue
        operator = tables.operators[op]
        begin, outputs, end = operator.first_operand, operator.first_output, operator.end
        for a in range(stage.axes.shape[0]):
            signature = unit.chosen[op - unit.first, a]
            if signature < 0 or stage.axes[a] <= 1.0:
                for row in range(begin, end):
                    placement[row, a] = UNKNOWN
                    gradient[row, a] = UNKNOWN
                continue
            at = tables.signatures[operator.first_signature + signature].first_placement - begin
            for row in range(begin, outputs):
                placement[row, a] = tables.placements[at + row].placement
                gradient[row, a] = tables.placements[at + row].gradient
            for row in range(outputs, end):
                placement[row, a] = tables.placements[at + row].placement
                gradient[row, a] = dual(placement[row, a])
        for row in range(begin, end):
            workspace.held[row] = local_bytes(tables.tensors[tables.operands[row].tensor], placement[row], stage)


@borrowing(void(TABLES, int64, int64, int64[:, ::1], int64[::1]))
def write_crossing(tables, crossing, first, chosen, placement):
    """Writes the placement in which a unit's crossing tensor leaves it; UNKNOWN where it is undecided.

    Args:
        crossing: operand row whose tensor crosses out of the unit, or -1: whole then.
        first: operator row at which `chosen` begins.
        chosen: [operators, axes] signatures; -1 where they are undecided.
        placement: [axes] written.
    """
    for a in range(placement.shape[0]):
        placement[a] = BROADCAST
        if crossing >= 0:
            op = tables.operands[crossing].operator
            operator, signature = tables.operators[op], chosen[op - first, a]
            placement[a] = UNKNOWN
            if signature >= 0:
                at = tables.signatures[operator.first_signature + signature].first_placement
                placement[a] = tables.placements[at + crossing - operator.first_operand].placement


@borrowing(boolean(TABLES, int64, int64[::1], float64[::1], int64))
def divides(tables, op, chosen, axes, samples):
    """Whether the ranks can share every split dim of an operator, on all axes that are decided, see `shares_out`.

    A dim that may be shared unevenly is priced as if it were shared evenly.

    Args:
        chosen: [axes] signature of the operator on each axis; -1 where it is undecided.
        axes: [axes] ranks of each mesh axis.
        samples: samples of the micro-batch.
    """
    operator = tables.operators[op]
    for row in range(operator.first_operand, operator.end):
        tensor = tables.tensors[tables.operands[row].tensor]
        for dim in range(tensor.num_dims):
            ranks = 1
            is_uneven = tensor.batch_dim != dim
            for a in range(axes.shape[0]):
                if chosen[a] >= 0:
                    signature = tables.signatures[operator.first_signature + chosen[a]]
                    at = signature.first_placement + row - operator.first_operand
                    if tables.placements[at].placement == dim:
                        if tensor.batch_dim == dim and signature.splits_batch == 0:
                            # Samples of a batch that was lost on the way (see "its batch cannot be traced").
                            return False
                        ranks *= int64(axes[a])
                        is_uneven = is_uneven and signature.is_uneven == 1
            if ranks > 1:
                # The batch is the major factor of its dim: whole samples go to each rank.
                extent = samples if tensor.batch_dim == dim else tensor.dims[dim]
                if extent % ranks != 0 and not (is_uneven and extent >= ranks * max(LEAST_PART, ranks)):
                    return False
    return True

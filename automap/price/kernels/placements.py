"""Placements of operands under signatures, the bytes of them on one rank, and whether dims divide evenly."""

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
    """Required placement of a tensor's gradient: B where the tensor is P, else that of the tensor."""
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
    """Writes the placement of the tensor that crosses out of a unit; UNKNOWN where it is undecided.

    Args:
        crossing: operand row whose tensor crosses out of the unit; -1 if none does, B is written then.
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
    """Whether the ranks can share every split factor of an operator, on all axes that are decided, see `shares_out`.

    A factor that may be shared unevenly is priced as if it were shared evenly.

    Args:
        chosen: [axes] signature of the operator on each axis; -1 where it is undecided.
        axes: [axes] ranks of each mesh axis.
        samples: samples of the micro-batch.
    """
    first = tables.operators[op].first_signature
    for a in range(axes.shape[0]):
        if chosen[a] < 0 or tables.signatures[first + chosen[a]].divides_work == 0:
            continue
        split = tables.signatures[first + chosen[a]]
        ranks = 1
        for b in range(axes.shape[0]):
            if chosen[b] >= 0 and tables.signatures[first + chosen[b]].factor == split.factor:
                ranks *= int64(axes[b])
        if ranks > 1:
            extent = samples if split.splits_batch == 1 else split.extent
            if extent % ranks != 0 and not (split.is_uneven == 1 and extent >= ranks * max(LEAST_PART, ranks)):
                return False
    return True

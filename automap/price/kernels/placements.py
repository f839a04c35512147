"""Where operands lie: placements under signatures, the bytes of one rank, and whether dims divide evenly."""

from __future__ import annotations

from numba import boolean, float64, int64, void

from automap.jit import borrowing
from automap.price.kernels.collectives import UNKNOWN
from automap.price.kernels.columns import TABLES
from automap.price.kernels.unit_workspace import SHARDED
from automap.price.tables import (
    D_TENSOR,
    E_BYTES,
    E_FIXED,
    E_SAMPLE,
    OP_INPUTS,
    OP_OPERANDS,
    OP_OUTPUTS,
    OP_SIGNATURES,
    S_PLACES,
    T_BATCH_DIM,
    T_DIMS,
    T_NDIM,
)
from ir.factors import BROADCAST, PARTIAL


@borrowing(int64(int64), forceinline=True)
def dual(placement):
    """Placement in which the maker of a tensor wants its gradient: whole where the tensor is a sum, else alike."""
    return BROADCAST if placement == PARTIAL else placement


@borrowing(int64(int64[:, ::1], int64[:, ::1], int64[:, ::1], int64, int64, int64), inner=True)
def placement_of(operators, signatures, places, op, slot, signature):
    """Placement of operand `slot` of `op` under `signature` on one axis; UNKNOWN where undecided."""
    if signature < 0:
        return UNKNOWN
    return places[signatures[operators[op, OP_SIGNATURES] + signature, S_PLACES] + slot, 0]


@borrowing(float64(float64[:, ::1], int64, int64[::1], float64[::1], float64), forceinline=True, inner=True)
def local_bytes(sizes, tensor, placement, axes, samples):
    """Bytes of a tensor that one rank holds."""
    amount = (sizes[tensor, E_FIXED] + sizes[tensor, E_SAMPLE] * samples) * sizes[tensor, E_BYTES]
    for a in range(axes.shape[0]):
        if placement[a] >= 0 or placement[a] == UNKNOWN:
            amount /= axes[a]
    return amount


@borrowing(void(TABLES, int64, int64, int64[:, ::1], float64[::1], float64, SHARDED), inner=True)
def place_operands(tables, first, last, chosen, axes, samples, sharded):
    """Writes `lies`, `returns` and `held` of the operands of changed operators in [first, last); see `shard_unit`."""
    lies, returns = sharded.lies, sharded.returns
    for op in range(first, last):
        if not sharded.changed[op]:
            continue
        begin = tables.operators[op, OP_OPERANDS]
        outputs = begin + tables.operators[op, OP_INPUTS]
        end = outputs + tables.operators[op, OP_OUTPUTS]
        for a in range(axes.shape[0]):
            signature = chosen[op - first, a]
            if signature < 0 or axes[a] <= 1.0:
                for row in range(begin, end):
                    lies[row, a] = UNKNOWN
                    returns[row, a] = UNKNOWN
                continue
            at = tables.signatures[tables.operators[op, OP_SIGNATURES] + signature, S_PLACES] - begin
            for row in range(begin, outputs):
                lies[row, a] = tables.places[at + row, 0]
                returns[row, a] = tables.places[at + row, 1]
            for row in range(outputs, end):
                lies[row, a] = tables.places[at + row, 0]
                returns[row, a] = dual(lies[row, a])
        for row in range(begin, end):
            sharded.held[row] = local_bytes(tables.sizes, tables.operands[row, D_TENSOR], lies[row], axes, samples)


@borrowing(
    boolean(
        int64[:, ::1],
        int64[:, ::1],
        int64[:, ::1],
        int64[:, ::1],
        int64[:, ::1],
        int64,
        int64[::1],
        float64[::1],
        int64,
    )
)
def divides(operators, operands, tensors, signatures, places, op, chosen, axes, samples):
    """Whether every split dim of `op` divides evenly on all axes that are decided.

    Args:
        operators..places: see `Tables.arrays`.
        op: operator row.
        chosen: [axes] its signature on each axis; -1 = undecided.
        axes: [axes] ranks of each axis.
        samples: of the micro-batch.
    """
    begin = operators[op, OP_OPERANDS]
    for slot in range(operators[op, OP_INPUTS] + operators[op, OP_OUTPUTS]):
        tensor = operands[begin + slot, D_TENSOR]
        for dim in range(tensors[tensor, T_NDIM]):
            ranks = 1
            for a in range(axes.shape[0]):
                if placement_of(operators, signatures, places, op, slot, chosen[a]) == dim:
                    ranks *= int64(axes[a])
            if ranks > 1:
                extent = tensors[tensor, T_DIMS + dim]
                if tensors[tensor, T_BATCH_DIM] == dim:
                    # The batch is the major factor of its dim: whole samples go to each rank.
                    extent = samples
                if extent % ranks != 0:
                    return False
    return True

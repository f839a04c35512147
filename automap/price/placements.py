"""Where operands lie: placements under signatures, the bytes of one rank, and whether dims divide evenly."""

from __future__ import annotations

from numba import boolean, float64, int64, njit

from automap.price.communication import UNKNOWN
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


@njit(int64(int64[:, ::1], int64[:, ::1], int64[:, ::1], int64, int64, int64), cache=True)
def placement_of(operators, signatures, places, op, slot, signature):
    """Placement of operand `slot` of `op` under `signature` on one axis; UNKNOWN where undecided."""
    if signature < 0:
        return UNKNOWN
    return places[signatures[operators[op, OP_SIGNATURES] + signature, S_PLACES] + slot, 0]


@njit(float64(float64[:, ::1], int64[:, ::1], int64, int64[::1], float64[::1], float64), cache=True)
def local_bytes(sizes, tensors, tensor, placement, axes, samples):
    """Bytes of a tensor that one rank holds."""
    amount = (sizes[tensor, E_FIXED] + sizes[tensor, E_SAMPLE] * samples) * sizes[tensor, E_BYTES]
    for a in range(axes.shape[0]):
        if placement[a] >= 0 or placement[a] == UNKNOWN:
            amount /= axes[a]
    return amount


@njit(boolean(int64[::1], int64[::1], float64[::1]), cache=True)
def differs(source, target, axes):
    """Whether a conversion has anything to do."""
    for a in range(axes.shape[0]):
        if source[a] != target[a] and source[a] != UNKNOWN and target[a] != UNKNOWN and axes[a] > 1.0:
            return True
    return False


@njit(
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
    ),
    cache=True,
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

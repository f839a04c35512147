"""Parameters of a unit: elements of one rank, also under ZeRO, and the axes that gradients are reduced over."""

from __future__ import annotations

from numba import boolean, float64, int64, void

from automap.jit import borrowing
from automap.price.kernels.collectives import UNKNOWN
from automap.price.kernels.columns import C_GATHER, C_PARAMETERS, C_REDUCE, C_SCATTER, C_ZERO
from automap.price.tables import D_OWNER, D_READER, OP_FREE
from ir.factors import BROADCAST, PARTIAL


@borrowing(void(int64[::1], float64, boolean[::1], float64[::1], float64[::1]), inner=True)
def add_elements(lies, elements, zero_axes, axes, total):
    """Adds the elements of a parameter that one rank holds, its share of them under ZeRO, and what that gathers."""
    for a in range(axes.shape[0]):
        if lies[a] >= 0 or lies[a] == UNKNOWN:
            elements /= axes[a]
    total[C_PARAMETERS] += elements
    for a in range(axes.shape[0] - 1, -1, -1):
        # What is read as a sum lies whole: one rank takes it, the others zeros.
        if zero_axes[a] and (lies[a] == BROADCAST or lies[a] == PARTIAL):
            total[C_GATHER + a] += elements
            elements /= axes[a]
    total[C_ZERO] += elements


WHOLE, SUMMED, OPEN = range(3)
"""What becomes of a gradient on an axis: nothing, a sum over its ranks, or what an undecided operator makes of it."""


@borrowing(
    int64(int64[:, ::1], int64[:, ::1], int64[:, ::1], int64[:, ::1], int64, int64, int64, int64),
    inner=True,
)
def _summed(operators, operands, lies, returns, row, start, stop, axis):
    """Whether the gradient of the parameter that a row reads is partial on an axis: WHOLE, SUMMED or OPEN.

    A view, or an operator on parameters alone, hands a partial gradient on from its consumer: it is added up over the
    micro-batches and reduced once. Arguments as of `add_reduction`.
    """
    reader = row
    while start <= reader < stop:
        if operators[operands[reader, D_OWNER], OP_FREE] == 0:
            if lies[reader, axis] == UNKNOWN:
                return OPEN
            if lies[reader, axis] != BROADCAST:
                return WHOLE
            if returns[reader, axis] == PARTIAL:
                return SUMMED
        reader = operands[reader, D_READER]
    return WHOLE


@borrowing(
    void(
        int64[:, ::1],
        int64[:, ::1],
        int64[:, ::1],
        int64[:, ::1],
        int64,
        int64,
        int64,
        float64[::1],
        boolean[::1],
        float64,
        float64[::1],
    ),
    inner=True,
)
def add_reduction(operators, operands, lies, returns, row, start, stop, axes, zero_axes, elements, total):
    """Adds a parameter's local gradient elements to every axis on which the gradient is partial.

    Without ZeRO the last axis reduces and scatters all of them, the ones before it what is left. With ZeRO the axes
    that it shards over come first: each leaves a rank its shard, whether a sum had to be taken or all ranks had the
    same. What is still partial on other axes is then summed over these.

    Args:
        operators: see `Tables`.
        operands: see `Tables`.
        lies: see `Sharded`.
        returns: see `Sharded`.
        row: operand that reads the parameter.
        start: first operand row of the unit.
        stop: one past its last.
        axes: [axes] ranks of each mesh axis.
        zero_axes: [axes] whether ZeRO shards over the axis.
        elements: of the whole parameter.
        total: [C_COUNT], added to.
    """
    for a in range(axes.shape[0]):
        if lies[row, a] >= 0 or lies[row, a] == UNKNOWN:
            elements /= axes[a]
    shard = elements
    for a in range(axes.shape[0] - 1, -1, -1):
        summed = _summed(operators, operands, lies, returns, row, start, stop, a)
        if summed == SUMMED:
            total[C_REDUCE + a] += elements
        # An undecided axis may scatter them, but need not reduce any.
        if summed != WHOLE:
            elements /= axes[a]
        if zero_axes[a] and (lies[row, a] == BROADCAST or lies[row, a] == PARTIAL):
            if summed == SUMMED:
                total[C_SCATTER + a] += shard
            shard /= axes[a]
    for a in range(axes.shape[0] - 1, -1, -1):
        if not zero_axes[a]:
            summed = _summed(operators, operands, lies, returns, row, start, stop, a)
            if summed == SUMMED:
                total[C_SCATTER + a] += shard
            if summed != WHOLE:
                shard /= axes[a]

"""Parameters of a unit: elements of one rank, also under ZeRO, and the axes that gradients are reduced over."""

from __future__ import annotations

from numba import boolean, float64, int64, void

from automap.price.communication import UNKNOWN
from automap.price.compiled import borrowing
from automap.price.tables import D_OWNER, D_READER, OP_FREE
from automap.price.vectors import C_GATHER, C_PARAMETERS, C_REDUCE, C_ZERO
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
        float64,
        float64[::1],
    ),
    inner=True,
)
def add_reduction(operators, operands, lies, returns, row, start, stop, axes, elements, total):
    """Adds a parameter's local gradient elements to every axis on which the gradient is partial.

    The last axis reduces and scatters all of them, the ones before it what is left. A view, or an operator on
    parameters alone, hands a partial gradient on from its consumer: it is added up over the micro-batches and reduced
    once.

    Args:
        operators: see `Tables`.
        operands: see `Tables`.
        lies: see `Sharded`.
        returns: see `Sharded`.
        row: operand that reads the parameter.
        start: first operand row of the unit.
        stop: one past its last.
        axes: [axes] ranks of each mesh axis.
        elements: of the whole parameter.
        total: [C_COUNT], added to.
    """
    for a in range(axes.shape[0]):
        if lies[row, a] >= 0 or lies[row, a] == UNKNOWN:
            elements /= axes[a]
    for a in range(axes.shape[0] - 1, -1, -1):
        reader = row
        while start <= reader < stop:
            if operators[operands[reader, D_OWNER], OP_FREE] == 0:
                if lies[reader, a] == UNKNOWN:
                    # An undecided axis may scatter them, but need not reduce any.
                    elements /= axes[a]
                if lies[reader, a] != BROADCAST:
                    break
                if returns[reader, a] == PARTIAL:
                    total[C_REDUCE + a] += elements
                    elements /= axes[a]
                    break
            reader = operands[reader, D_READER]

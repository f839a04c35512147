"""What a parameter costs that several units of one rank read: it lies there once, and its gradient is reduced once.

On an axis on which all readers want it alike it lies so. Where they differ it lies whole, each takes its part, and the
gradient is made whole by a sum. A unit is priced as if it were alone with its parameters; what is priced too much, or
too little, is the difference between its readers and all of them together.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float64, int64, void

from automap.jit import borrowing
from automap.price.kernels.collectives import UNKNOWN
from automap.price.kernels.columns import TABLES
from automap.price.tables import D_OWNER, D_READER, OP_FREE, OP_OPERANDS, OP_SIGNATURES, S_PLACES, Arrays
from ir.factors import BROADCAST, PARTIAL

# How a parameter is read, [axes, T_COUNT]: its placement, whether its gradient is summed, whether a reader is open.
T_LIES, T_SUMMED, T_OPEN = range(3)
T_COUNT = 3
NOBODY = UNKNOWN - 1
"""Placement of what nobody has read so far."""
# What a rank has of it: elements, and with ZeRO; behind these for each axis, as in a unit's C_REDUCE, C_GATHER and
# C_SCATTER, elements of gradients without ZeRO, of what ZeRO gathers, and of gradients with it.
E_HELD, E_ZERO, E_AXES = range(3)
E_REDUCE, E_GATHER, E_SCATTER, E_GATHER_EACH, E_SCATTER_EACH = range(5)
"""Blocks of columns behind E_AXES; the last two are of ties alone."""
# Columns of a tie, see `combine`: ranks, elements that they exchange, what one rank has too much, and behind it for
# each axis what ZeRO gathers, and scatters, for each micro-batch more than of the units by themselves.
TIE_ONE, TIE_OTHER, TIE_EXCHANGED, TIE_HAS = range(4)


@borrowing(void(int64[:, ::1]))
def begin(reading: np.ndarray) -> None:
    """Nobody has read the parameter."""
    for a in range(reading.shape[0]):
        reading[a, T_LIES] = NOBODY
        reading[a, T_SUMMED] = 0
        reading[a, T_OPEN] = 0


@borrowing(void(TABLES, int64, int64, int64[:, ::1], int64[:, ::1]))
def read_too(tables: Arrays, reader: int, first: int, chosen: np.ndarray, reading: np.ndarray) -> None:
    """One more reader of the parameter; what is undecided wants it as the others do.

    Args:
        tables: see `Tables.arrays`.
        reader: operand row of the unit that reads it first.
        first: operator row of which `chosen` begins.
        chosen: [operators, axes] signatures, -1 = undecided.
        reading: [axes, T_COUNT] of the readers so far, written.
    """
    operators, operands = tables.operators, tables.operands
    for a in range(reading.shape[0]):
        op = operands[reader, D_OWNER]
        wanted = chosen[op - first, a]
        lies = UNKNOWN
        if wanted >= 0:
            row = operators[op, OP_SIGNATURES] + wanted
            # What is read as a sum lies whole: one rank takes it, the others zeros.
            lies = max(
                tables.places[tables.signatures[row, S_PLACES] + reader - operators[op, OP_OPERANDS], 0], BROADCAST
            )
        if reading[a, T_LIES] == NOBODY or reading[a, T_LIES] == UNKNOWN:
            reading[a, T_LIES] = lies
        elif lies != UNKNOWN and lies != reading[a, T_LIES]:
            reading[a, T_LIES] = BROADCAST
            reading[a, T_SUMMED] = 1
        # A view, or an operator on parameters alone, hands the gradient on from its own reader.
        behind = reader
        while behind >= 0:
            op = operands[behind, D_OWNER]
            if operators[op, OP_FREE] == 0:
                used = chosen[op - first, a]
                if used < 0:
                    reading[a, T_OPEN] = 1
                    break
                at = (
                    tables.signatures[operators[op, OP_SIGNATURES] + used, S_PLACES]
                    + behind
                    - operators[op, OP_OPERANDS]
                )
                if tables.places[at, 0] != BROADCAST:
                    break
                if tables.places[at, 1] == PARTIAL:
                    reading[a, T_SUMMED] = 1
                    break
            behind = operands[behind, D_READER]


@borrowing(void(int64[:, ::1], float64, float64[::1], boolean[::1], float64[::1]))
def add_read(
    reading: np.ndarray,
    elements: float,
    axes: np.ndarray,
    zero_axes: np.ndarray,
    total: np.ndarray,
) -> None:
    """Adds what a rank has of a parameter that is read so; as `add_elements` and `add_reduction` have it of one reader.

    Args:
        reading: [axes, T_COUNT]
        elements: of the whole parameter.
        axes: [axes] ranks of each mesh axis.
        zero_axes: [axes] whether ZeRO shards over it.
        total: [E_AXES + 3 * axes], added to.
    """
    num_axes = axes.shape[0]
    for a in range(num_axes):
        if reading[a, T_LIES] >= 0 or reading[a, T_LIES] == UNKNOWN:
            elements /= axes[a]
    total[E_HELD] += elements
    shard = elements
    for a in range(num_axes - 1, -1, -1):
        is_summed = axes[a] > 1.0 and reading[a, T_SUMMED] == 1
        if is_summed:
            total[E_AXES + E_REDUCE * num_axes + a] += elements
        # An undecided axis may scatter them, but need not reduce any.
        if is_summed or reading[a, T_OPEN] == 1:
            elements /= axes[a]
        if zero_axes[a] and reading[a, T_LIES] == BROADCAST:
            total[E_AXES + E_GATHER * num_axes + a] += shard
            if is_summed:
                total[E_AXES + E_SCATTER * num_axes + a] += shard
            shard /= axes[a]
    total[E_ZERO] += shard
    for a in range(num_axes - 1, -1, -1):
        if not zero_axes[a]:
            is_summed = axes[a] > 1.0 and reading[a, T_SUMMED] == 1
            if is_summed:
                total[E_AXES + E_SCATTER * num_axes + a] += shard
            if is_summed or reading[a, T_OPEN] == 1:
                shard /= axes[a]


@borrowing(int64(int64))
def tie_columns(num_axes: int) -> int:
    """Columns of a tie on a mesh of so many axes, see TIE_HAS."""
    return TIE_HAS + E_AXES + 5 * num_axes


@borrowing(void(float64, float64[::1], float64[::1], float64[::1], float64[::1]))
def tie(uses: float, before: np.ndarray, alone: np.ndarray, together: np.ndarray, row: np.ndarray) -> None:
    """Writes what a rank has too much of a parameter if each unit that reads it has it for itself.

    Under ZeRO 2 and 3 each unit gathers and scatters the parameter as it lies for all of them, however it reads it.

    Args:
        uses: units that read it before.
        before: [E_AXES + 3 * axes] what the rank has for these.
        alone: likewise for the other one.
        together: likewise for all.
        row: [tie_columns] of the tie, written but for its first TIE_HAS.
    """
    num_axes = (before.shape[0] - E_AXES) // 3
    for c in range(before.shape[0]):
        row[TIE_HAS + c] = before[c] + alone[c] - together[c]
    first = E_AXES + E_GATHER * num_axes
    for c in range(2 * num_axes):
        gathered = (uses + 1.0) * together[first + c] - uses * before[first + c] - alone[first + c]
        row[TIE_HAS + before.shape[0] + c] = max(0.0, gathered)

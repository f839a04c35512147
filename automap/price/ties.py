"""What a parameter costs that several units of one rank read: it lies there once, and its gradient is reduced once.

On an axis on which all readers want it alike it lies so. Where they differ it lies whole, each takes its part, and the
gradient is made whole by a sum. A unit is priced as if it were alone with its parameters; what is priced too much, or
too little, is the difference between its readers and all of them together.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float64, int64, void

from automap.price.communication import UNKNOWN
from automap.price.compiled import borrowing
from automap.price.tables import OP_SIGNATURES, S_PLACES, Arrays
from automap.price.vectors import TABLES
from ir.factors import BROADCAST, PARTIAL

# How a parameter is read, [axes, T_COUNT]: its placement, whether its gradient is summed, whether a reader is open.
T_LIES, T_SUMMED, T_OPEN = range(3)
T_COUNT = 3
NOBODY = UNKNOWN - 1
"""Placement of what nobody has read so far."""
# What a rank has of it: elements, with ZeRO, and behind these, for each axis, elements of gradients that are reduced.
E_HELD, E_ZERO, E_REDUCE = range(3)


@borrowing(void(int64[:, ::1]))
def begin(reading: np.ndarray) -> None:
    """Nobody has read the parameter."""
    for a in range(reading.shape[0]):
        reading[a, T_LIES] = NOBODY
        reading[a, T_SUMMED] = 0
        reading[a, T_OPEN] = 0


@borrowing(void(TABLES, int64[::1], int64, int64[:, ::1], int64[:, ::1]))
def read_too(tables: Arrays, reader: np.ndarray, first: int, chosen: np.ndarray, reading: np.ndarray) -> None:
    """One more reader of the parameter; what is undecided wants it as the others do.

    Args:
        tables: see `Tables.arrays`.
        reader: [4] operator row and slot that read it, and that compute with it or a view of it.
        first: operator row of which `chosen` begins.
        chosen: [operators, axes] signatures, -1 = undecided.
        reading: [axes, T_COUNT] of the readers so far, written.
    """
    for a in range(reading.shape[0]):
        wanted = chosen[reader[0] - first, a]
        lies = UNKNOWN
        if wanted >= 0:
            row = tables.operators[reader[0], OP_SIGNATURES] + wanted
            # What is read as a sum lies whole: one rank takes it, the others zeros.
            lies = max(tables.places[tables.signatures[row, S_PLACES] + reader[1], 0], BROADCAST)
        if reading[a, T_LIES] == NOBODY or reading[a, T_LIES] == UNKNOWN:
            reading[a, T_LIES] = lies
        elif lies != UNKNOWN and lies != reading[a, T_LIES]:
            reading[a, T_LIES] = BROADCAST
            reading[a, T_SUMMED] = 1
        used = chosen[reader[2] - first, a]
        if used < 0:
            reading[a, T_OPEN] = 1
        else:
            row = tables.operators[reader[2], OP_SIGNATURES] + used
            at = tables.signatures[row, S_PLACES] + reader[3]
            if tables.places[at, 0] == BROADCAST and tables.places[at, 1] == PARTIAL:
                reading[a, T_SUMMED] = 1


@borrowing(void(int64[:, ::1], float64, float64[::1], boolean[::1], float64, float64[::1]))
def add_read(
    reading: np.ndarray,
    elements: float,
    axes: np.ndarray,
    zero_axes: np.ndarray,
    times: float,
    total: np.ndarray,
) -> None:
    """Adds what a rank has of a parameter that is read so; as `add_elements` and `add_reduction` have it of one reader.

    Args:
        reading: [axes, T_COUNT]
        elements: of the whole parameter.
        axes: [axes] ranks of each mesh axis.
        zero_axes: [axes] whether ZeRO shards over it.
        times: 1, or -1 to take it away.
        total: [E_REDUCE + axes], added to.
    """
    for a in range(axes.shape[0]):
        if reading[a, T_LIES] >= 0 or reading[a, T_LIES] == UNKNOWN:
            elements /= axes[a]
    total[E_HELD] += times * elements
    shard = elements
    for a in range(axes.shape[0] - 1, -1, -1):
        if zero_axes[a] and reading[a, T_LIES] == BROADCAST:
            shard /= axes[a]
    total[E_ZERO] += times * shard
    for a in range(axes.shape[0] - 1, -1, -1):
        if axes[a] > 1.0 and reading[a, T_SUMMED] == 1:
            total[E_REDUCE + a] += times * elements
            elements /= axes[a]
        elif reading[a, T_OPEN] == 1:
            # An undecided axis may scatter them, but need not reduce any.
            elements /= axes[a]

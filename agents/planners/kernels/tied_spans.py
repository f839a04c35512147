"""What tied parameters cost each span of units on one stage; compiled.

A span is consecutive units of a model, "span" stands for [units + 1, units + 1], and entry [i, j] is about the units i
to j - 1. Units: elements of parameters.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import boolean, float64, int64, void

from automap.jit import borrowing, kernel
from automap.price.kernels.array_types import Floats, Ints, Mask, tuple_type
from automap.price.kernels.cost_records import READING_DTYPE, SHARE, SHARE_DTYPE
from automap.price.kernels.records import TABLES
from automap.price.kernels.stage_records import STAGE
from automap.price.kernels.tied_parameters import begin, read_too, write_share


class Readers(NamedTuple):
    """The units that read each tied parameter of a model."""

    first: Ints
    """[parameters + 1] number of the first reader of each parameter, and at last the number of readers."""
    units: Ints
    """[readers] the unit; those of a parameter stand in the order of the model."""
    rows: Ints
    """[readers] first operand row of the unit's type that reads the parameter."""
    elements: Floats
    """[parameters] elements of the whole parameter."""
    trained: Mask
    """[parameters] whether it is trained."""


READERS = tuple_type(Readers)
ALONE, TOGETHER = 0, 1
"""Rows of the memory that `tied_spans` works in: of one unit by itself, and of several units."""


@borrowing(void(SHARE, boolean, float64[::1]), inner=True)
def _write_numbers(share, zero, found):
    """Writes the fields of a share on which the costs of a span depend, in the order of `tied_spans`."""
    found[0], found[1] = share.parameters, share.zero_parameters
    found[2], found[3] = share.frozen, share.zero_frozen
    for a in range((found.shape[0] - 4) // 2):
        found[4 + 2 * a] = share.scattered[a] if zero else share.reduced[a]
        found[5 + 2 * a] = share.gathered[a] - share.gathered_frozen[a]


@kernel(void(TABLES, READERS, int64[:, ::1], STAGE, boolean, float64[:, :, ::1], float64[:, :, ::1]))
def tied_spans(tables, readers, chosen, stage, zero, excess, exchanged):
    """Finds what each span holds of tied parameters, and what the sums over its units count too much.

    Args:
        tables: tables of the model.
        readers: who reads the parameters.
        chosen: [operator rows, axes] signatures.
        stage: the stage.
        zero: whether ZeRO shards anything.
        excess: [fields, units + 1, units + 1] what the sums over the units of a span count too much, for `parameters`,
            `zero_parameters`, `frozen` and `zero_frozen`, and for each axis the gradients that are reduced and the
            trained parameters that ZeRO gathers; 0 at first; changed.
        exchanged: [parameters, units + 1, units + 1] trained elements of each parameter that a rank with the span
            holds; 0 at first; written.
    """
    size, fields, scratch = excess.shape[1], excess.shape[0], np.empty((2, excess.shape[0]))
    reading, share = np.empty((2, chosen.shape[1]), READING_DTYPE), np.empty(1, SHARE_DTYPE)[0]
    for p in range(readers.elements.shape[0]):
        elements, is_trained = readers.elements[p], readers.trained[p]
        for one in range(readers.first[p], readers.first[p + 1]):
            low = readers.units[one - 1] + 1 if one > readers.first[p] else 0
            begin(reading[TOGETHER])
            scratch[ALONE] = 0.0
            for other in range(one, readers.first[p + 1]):
                begin(reading[ALONE])
                for row in (ALONE, TOGETHER):
                    read_too(tables, readers.rows[other], 0, chosen, reading[row])
                    write_share(reading[row], elements, is_trained, stage, share)
                    _write_numbers(share, zero, scratch[TOGETHER])
                    for field in range(fields if row == ALONE else 0):
                        scratch[ALONE, field] += scratch[TOGETHER, field]
                high = readers.units[other + 1] if other + 1 < readers.first[p + 1] else size - 1
                for first in range(low, readers.units[one] + 1):
                    for last in range(readers.units[other] + 1, high + 1):
                        exchanged[p, first, last] = share.parameters - share.frozen
                        for field in range(fields if other > one else 0):
                            excess[field, first, last] += scratch[ALONE, field] - scratch[TOGETHER, field]

"""Sharded: what is known of units once their signatures are, before what they recompute and what comes in.

Units in one plan share their signatures by type and differ in what they recompute and in what crosses into them, so
`shard_unit` fills this once a type and `unit_cost` reads it for each of them. Scratch memory of one caller: rows are
those of `Tables`, so that all unit types lie side by side. Units: seconds, bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import boolean, float64, int64, types

from automap.jit import kernel
from automap.price.kernels.collectives import KIND_COUNT
from automap.price.kernels.columns import C_COUNT, TABLES

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class Sharded(NamedTuple):
    """Arrays over operators, operands and tensors; lists of a unit begin at its first operand row."""

    lies: Ints
    """[operands, axes] placement; UNKNOWN where undecided and on axes of one rank, where nothing ever moves."""
    returns: Ints
    """[operands, axes] placement in which an input's gradient is handed back, or in which an output's is wanted."""
    held: Floats
    """[operands] bytes that one rank holds."""
    stored: Floats
    """[operands] bytes of it that one rank keeps for the backward pass, of rows that it keeps."""
    own: Floats
    """[operators, C_COUNT] what each adds to its unit by its own signature."""
    joined: Floats
    """[operators, C_COUNT] what each adds by its signature and those of its neighbours."""
    priced: Ints
    """[operators, axes] the signatures with which it was priced."""
    changed: Mask
    """[operators] whether these are others now, so that `own` is written."""
    stale: Mask
    """[operators] whether `joined` is written."""
    touched: Mask
    """[tensors] by an operator that changed; false between calls."""
    undecided: Mask
    """[operators] whether a signature is undecided."""
    totals: Floats
    """[operators, C_COUNT] of a unit, in the row of its first operator: all but what `unit_cost` adds."""
    counts: Ints
    """[operators, 2] of a unit, in the row of its first operator: lengths of the lists that follow."""
    entering: Ints
    """[operands] rows of inputs that cross into a unit."""
    kept: Ints
    """[operands] rows whose tensors the backward pass may need."""
    moves: Mask
    """[operands + operators] whether a tensor is brought to the operand, or exchanged inside the operator, forward."""
    repeats_s: Floats
    """[operands + operators + 1, SENT_COUNT] seconds of it by kind of collective, host waits, and seconds round a ring;
    the last row is scratch."""
    keeps: Ints
    """[operands, axes] see `automap.price.kernels.saved_activations`."""
    noted: Floats
    """[operands] see `automap.price.kernels.saved_activations`."""
    known: Floats
    """[tensors] see `automap.price.kernels.saved_activations`; zero between calls."""
    loose: Floats
    """[tensors] see `automap.price.kernels.saved_activations`; zero between calls."""
    axes: Ints
    """[3, axes] scratch for placements."""
    dims: Floats
    """[4] scratch for the extents of a product."""
    times: Floats
    """[3] scratch for seconds forward, backward, and of the latter for weights."""


SENT_WAIT, SENT_RING = KIND_COUNT, KIND_COUNT + 1
"""Columns of `Sharded.repeats_s` behind the kinds of collectives."""
SENT_COUNT = KIND_COUNT + 2

N_ENTERING, N_KEPT = range(2)
"""Columns of `Sharded.counts`."""

SHARDED = types.NamedTuple(
    (
        int64[:, ::1],
        int64[:, ::1],
        float64[::1],
        float64[::1],
        float64[:, ::1],
        float64[:, ::1],
        int64[:, ::1],
        *[boolean[::1]] * 4,
        float64[:, ::1],
        int64[:, ::1],
        int64[::1],
        int64[::1],
        boolean[::1],
        float64[:, ::1],
        int64[:, ::1],
        float64[::1],
        float64[::1],
        float64[::1],
        int64[:, ::1],
        float64[::1],
        float64[::1],
    ),
    Sharded,
)
"""Numba's type of `Sharded`."""


@kernel(SHARDED(TABLES, int64))
def new_sharded(tables, num_axes):
    """Memory for all unit types of `tables` on meshes of `num_axes` axes."""
    operators = tables.operators.shape[0]
    operands = tables.operands.shape[0]
    tensors = tables.tensors.shape[0]
    return Sharded(
        np.empty((operands, num_axes), np.int64),
        np.empty((operands, num_axes), np.int64),
        np.empty(operands),
        np.empty(operands),
        np.empty((operators, C_COUNT)),
        np.empty((operators, C_COUNT)),
        np.empty((operators, num_axes), np.int64),
        np.empty(operators, np.bool_),
        np.empty(operators, np.bool_),
        np.zeros(tensors, np.bool_),
        np.empty(operators, np.bool_),
        np.empty((operators, C_COUNT)),
        np.empty((operators, 2), np.int64),
        np.empty(operands, np.int64),
        np.empty(operands, np.int64),
        np.empty(operands + operators, np.bool_),
        np.empty((operands + operators + 1, SENT_COUNT)),
        np.empty((operands, num_axes), np.int64),
        np.empty(operands),
        np.zeros(tensors),
        np.zeros(tensors),
        np.empty((3, num_axes), np.int64),
        np.empty(4),
        np.empty(3),
    )

"""What is known of units once their signatures are, before what they recompute and what crosses into them.

Units of one plan share their signatures by type and differ in what they recompute and in what crosses into them, so
`shard_unit` fills this once a type and `unit_cost` reads it for each of them. Scratch memory of one caller: rows are
those of the problem's tables, so that all unit types have a place of their own. Units: seconds, bytes.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
from numba import int64

from automap.jit import kernel
from automap.price.kernels.array_types import Floats, Floats2, Ints, Ints2, Mask, Rows, tuple_type
from automap.price.kernels.cost_records import (
    COLLECTIVE_DTYPE,
    RESHARDED,
    RESHARDED_DTYPE,
    UNIT_COST,
    UNIT_COST_DTYPE,
    UNIT_COST_WIDTH,
    Recorder,
)
from automap.price.kernels.records import NUM_CLASSES, TABLES


class OperatorMemory(NamedTuple):
    """What operators add to their units by their own signatures, found by two hashes of all that it depends on.

    A later entry takes the place of an earlier one. With no entries nothing is remembered.
    """

    keys: Ints2
    """[entries, 2] hashes; zeros where there is nothing. Their number is a power of two, or 0."""
    own: Annotated[Rows, UNIT_COST[::1]]
    """[entries] see `UnitWorkspace.own`."""
    inside: Annotated[Rows, RESHARDED[::1]]
    """[entries] cost of what is exchanged inside the operator, forward."""
    moves: Mask
    """[entries] whether anything is."""


OPERATOR_MEMORY = tuple_type(OperatorMemory)
"""numba's type of `OperatorMemory`."""


class UnitWorkspace(NamedTuple):
    """Arrays over operators, operands and tensors; the lists of a unit begin at its first operand row."""

    placement: Ints2
    """[operands, axes] placement; UNKNOWN where it is undecided and on axes of one rank, where nothing ever moves."""
    gradient: Ints2
    """[operands, axes] gradient placement: that in which an input's gradient leaves the operator, or that in which an
    output's gradient is required."""
    held: Floats
    """[operands] bytes that one rank holds."""
    stored: Floats
    """[operands] bytes that one rank keeps for the backward pass; of operands that it keeps."""
    own: Annotated[Rows, UNIT_COST[::1]]
    """[operators] what each adds to its unit by its own signature."""
    joined: Annotated[Rows, UNIT_COST[::1]]
    """[operators] what each adds by its signature and those of its neighbours."""
    totals: Annotated[Rows, UNIT_COST[::1]]
    """[operators] sums over a unit up to each operator: at its last one all but what `unit_cost` adds."""
    own_numbers: Floats2
    """[operators, UNIT_COST_WIDTH] the same memory as `own`."""
    joined_numbers: Floats2
    """[operators, UNIT_COST_WIDTH] the same memory as `joined`."""
    totals_numbers: Floats2
    """[operators, UNIT_COST_WIDTH] the same memory as `totals`."""
    priced: Ints2
    """[operators, axes] signatures with which each operator was priced."""
    changed: Mask
    """[operators] whether these are others now, so that `own` is written."""
    stale: Mask
    """[operators] whether `joined` is written."""
    joins: Mask
    """[operators] whether `joined` holds anything but zeros."""
    undecided: Mask
    """[operators] whether a signature is undecided."""
    num_entering: Ints
    """[operators] length of the list `entering` of a unit, at the row of its first operator."""
    num_saved: Ints
    """[operators] length of the list `saved` of a unit, at the row of its first operator."""
    entering: Ints
    """[operands] operand rows of inputs that cross into a unit."""
    saved: Ints
    """[operands] operand rows whose tensors the backward pass may need."""
    moves: Mask
    """[operands + operators] whether a tensor is brought to the operand, or exchanged inside the operator, forward."""
    resharded: Annotated[Rows, RESHARDED[::1]]
    """[operands + operators + 1] cost of that; the last row is scratch."""
    saved_placement: Ints2
    """[operands, axes] placement in which each operand is kept for the backward pass."""
    noted: Floats
    """[operands] bytes that an operand adds to what is kept, or NOT_SAVED, see `saved_activations`."""
    known: Floats
    """[tensors] bytes of the decided copies of a root; zero between calls."""
    loose: Floats
    """[tensors] most bytes of an undecided copy of a root; zero between calls."""
    reached: Mask
    """[operands] scratch for the operands that a gradient comes from; false between calls."""
    scratch: Ints2
    """[3, axes] scratch for placements."""
    extents: Floats
    """[NUM_CLASSES] scratch for the local extents of a product, by class of loop."""
    times: Floats
    """[3] scratch for seconds forward, backward, and of the latter for weights."""
    apart: Mask
    """[1] whether gradients of inputs and of weights may be computed apart, see `add_host_waits`."""
    memory: OperatorMemory
    """What was worked out before."""
    surroundings: Ints
    """[2] hashes of the axes, ZeRO axes, hardware and samples that units are priced on; zeros where they are not said,
    and nothing is remembered."""
    recorder: Recorder
    """List of the collectives that are priced."""


UNIT_WORKSPACE = tuple_type(UnitWorkspace)
"""numba's type of `UnitWorkspace`."""


@kernel(OPERATOR_MEMORY(int64))
def new_operator_memory(entries):
    """Memory for units of at most this number of operators, a power of two or 0."""
    return OperatorMemory(
        np.zeros((entries, 2), np.int64),
        np.empty(entries, UNIT_COST_DTYPE),
        np.empty(entries, RESHARDED_DTYPE),
        np.empty(entries, np.bool_),
    )


@kernel(UNIT_WORKSPACE(TABLES, int64, int64), apart=True)
def new_unit_workspace(tables, num_axes, capacity):
    """Memory for all unit types of `tables`, which remembers no operators.

    Args:
        capacity: collectives that can be written down.
    """
    return remembering_workspace(tables, num_axes, capacity, new_operator_memory(0))


@kernel(UNIT_WORKSPACE(TABLES, int64, int64, OPERATOR_MEMORY), inner=True)
def remembering_workspace(tables, num_axes, capacity, memory):
    """Memory for all unit types of `tables`, see `new_unit_workspace`.

    Args:
        memory: operators that are remembered; no collectives inside those are written down.
    """
    operators = tables.operators.shape[0]
    operands = tables.operands.shape[0]
    tensors = tables.tensors.shape[0]
    own = np.empty(operators, UNIT_COST_DTYPE)
    joined = np.empty(operators, UNIT_COST_DTYPE)
    totals = np.empty(operators, UNIT_COST_DTYPE)
    return UnitWorkspace(
        np.empty((operands, num_axes), np.int64),
        np.empty((operands, num_axes), np.int64),
        np.empty(operands),
        np.empty(operands),
        own,
        joined,
        totals,
        own.view(np.float64).reshape(operators, UNIT_COST_WIDTH),
        joined.view(np.float64).reshape(operators, UNIT_COST_WIDTH),
        totals.view(np.float64).reshape(operators, UNIT_COST_WIDTH),
        np.empty((operators, num_axes), np.int64),
        np.empty(operators, np.bool_),
        np.empty(operators, np.bool_),
        np.ones(operators, np.bool_),
        np.empty(operators, np.bool_),
        np.empty(operators, np.int64),
        np.empty(operators, np.int64),
        np.empty(operands, np.int64),
        np.empty(operands, np.int64),
        np.empty(operands + operators, np.bool_),
        np.empty(operands + operators + 1, RESHARDED_DTYPE),
        np.empty((operands, num_axes), np.int64),
        np.empty(operands),
        np.zeros(tensors),
        np.zeros(tensors),
        np.zeros(operands, np.bool_),
        np.empty((3, num_axes), np.int64),
        np.empty(NUM_CLASSES),
        np.empty(3),
        np.ones(1, np.bool_),
        memory,
        np.zeros(2, np.int64),
        Recorder(np.empty(capacity, COLLECTIVE_DTYPE), np.zeros(1, np.int64)),
    )

"""Costs of units that follow from their signatures alone, and scratch memory.

The units of one type share their signatures in a plan, but differ in recomputation and in the tensors that cross into
them. So `shard_unit` fills a `UnitWorkspace` once for each type, and `unit_cost` reads it for each unit. A workspace
belongs to one caller. Its rows are those of the tables of the problem, so every unit type has its own. Units: seconds,
bytes.
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
    """A cache of the costs of operators that depend on their own signatures alone.

    The key is two hashes of everything that the cost depends on. A new entry replaces an older one in the same place.
    """

    keys: Ints2
    """[entries, 2] hashes; zeros in an empty entry. The number of entries is a power of two, or 0 for no cache."""
    own: Annotated[Rows, UNIT_COST[::1]]
    """[entries] see `UnitWorkspace.own`."""
    inside: Annotated[Rows, RESHARDED[::1]]
    """[entries] cost of the collectives inside the operator in the forward pass."""
    moves: Mask
    """[entries] whether there are any."""


OPERATOR_MEMORY = tuple_type(OperatorMemory)
"""numba's type of `OperatorMemory`."""


class UnitWorkspace(NamedTuple):
    """Arrays over operators, operands and tensors; the lists of a unit begin at its first operand row."""

    placement: Ints2
    """[operands, axes] placement; UNKNOWN where it is undecided, and on axes of one rank, which need no collectives."""
    gradient: Ints2
    """[operands, axes] gradient placement: of an input, the one that the operator produces; of an output, the one that
    it requires."""
    held: Floats
    """[operands] bytes that one rank holds."""
    stored: Floats
    """[operands] of a saved operand: bytes that one rank saves for the backward pass."""
    own: Annotated[Rows, UNIT_COST[::1]]
    """[operators] costs of each operator that depend on its own signature alone."""
    joined: Annotated[Rows, UNIT_COST[::1]]
    """[operators] costs of each operator that depend on its signature and on those of its neighbours."""
    totals: Annotated[Rows, UNIT_COST[::1]]
    """[operators] sums of both from the first operator of the unit to each operator. The row of the last operator is
    the cost of the unit, but for the parts that `unit_cost` adds."""
    own_numbers: Floats2
    """[operators, UNIT_COST_WIDTH] the same memory as `own`."""
    joined_numbers: Floats2
    """[operators, UNIT_COST_WIDTH] the same memory as `joined`."""
    totals_numbers: Floats2
    """[operators, UNIT_COST_WIDTH] the same memory as `totals`."""
    priced: Ints2
    """[operators, axes] signatures with which each operator was priced."""
    changed: Mask
    """[operators] whether the signatures are different now, so that `own` must be written again."""
    stale: Mask
    """[operators] whether `joined` must be written again."""
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
    """[operands + operators] whether the forward pass reshards the operand, or has collectives inside the operator."""
    resharded: Annotated[Rows, RESHARDED[::1]]
    """[operands + operators + 1] cost of these; the last row is scratch."""
    saved_placement: Ints2
    """[operands, axes] placement in which each operand is saved for the backward pass."""
    noted: Floats
    """[operands] bytes that an operand adds to the saved ones, or NOT_SAVED, see `saved_activations`."""
    known: Floats
    """[tensors] bytes of the decided copies of a root, see `saved_activations`; zero between calls."""
    loose: Floats
    """[tensors] bytes of the largest undecided copy of a root; zero between calls."""
    reached: Mask
    """[operands] scratch: the operands from which a gradient comes; false between calls."""
    scratch: Ints2
    """[3, axes] scratch for placements."""
    extents: Floats
    """[NUM_CLASSES] scratch for the local extents of a product, by class of loop."""
    times: Floats
    """[3] scratch for seconds: forward, backward, and the part of the backward pass for gradients of weights."""
    apart: Mask
    """[1] whether gradients of inputs and of weights may be computed in separate passes, see `add_host_waits`."""
    memory: OperatorMemory
    """Costs of operators that were priced before."""
    surroundings: Ints
    """[2] hashes of the axes, ZeRO axes, hardware and samples on which units are priced, part of the keys of `memory`.
    While they are zeros, `memory` is not used."""
    recorder: Recorder
    """List of the collectives that are priced."""


UNIT_WORKSPACE = tuple_type(UnitWorkspace)
"""numba's type of `UnitWorkspace`."""


@kernel(OPERATOR_MEMORY(int64))
def new_operator_memory(entries):
    """An empty cache with this number of entries, a power of two or 0."""
    return OperatorMemory(
        np.zeros((entries, 2), np.int64),
        np.empty(entries, UNIT_COST_DTYPE),
        np.empty(entries, RESHARDED_DTYPE),
        np.empty(entries, np.bool_),
    )


@kernel(UNIT_WORKSPACE(TABLES, int64, int64), apart=True)
def new_unit_workspace(tables, num_axes, capacity):
    """A workspace for all unit types of `tables`, without a cache of operators.

    Args:
        tables: tables of the problem.
        num_axes: mesh axes.
        capacity: number of collectives that its recorder can list.
    """
    return remembering_workspace(tables, num_axes, capacity, new_operator_memory(0))


@kernel(UNIT_WORKSPACE(TABLES, int64, int64, OPERATOR_MEMORY), inner=True)
def remembering_workspace(tables, num_axes, capacity, memory):
    """A workspace for all unit types of `tables` with a cache of operators; arguments as for `new_unit_workspace`.

    Args:
        memory: the cache. Collectives inside operators that it contains are not recorded.
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

"""The cost of a unit taken apart: what one linkage group adds to it, and what passes between two of them.

`vary` prices a unit with one group decided at a time and all others at their best; `exchange` prices what brings one
tensor from where it lies to where it is asked for, and its gradient back. `automap.cost_graph.graph` puts them
together. Units: seconds, bytes, samples.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float64, int64, void

from automap.jit import kernel
from automap.price.kernels.collectives import KIND_COUNT, L_COUNT
from automap.price.kernels.columns import (
    C_BACKWARD_COMM,
    C_BACKWARD_RING,
    C_BACKWARD_WAITS,
    C_COUNT,
    C_FORWARD_COMM,
    C_FORWARD_RING,
    C_FORWARD_WAITS,
    C_RECOMPUTE_COMM,
    C_RECOMPUTE_RING,
    TABLES,
)
from automap.price.kernels.placements import dual
from automap.price.kernels.resharding import convert_operand, repeat
from automap.price.kernels.unit import shard_unit, unit_cost
from automap.price.kernels.unit_workspace import SENT_COUNT, new_sharded
from ir.factors import BROADCAST, PARTIAL

# Columns of what `exchange` writes: those of `unit_cost` that conversions have; the last four are added where
# recomputation repeats the conversion.
X_FORWARD_COMM, X_BACKWARD_COMM = 0, KIND_COUNT
X_FORWARD_WAITS, X_BACKWARD_WAITS, X_FORWARD_RING, X_BACKWARD_RING = range(2 * KIND_COUNT, 2 * KIND_COUNT + 4)
X_RECOMPUTE_COMM = X_BACKWARD_RING + 1
X_REPEATED_WAITS, X_RECOMPUTE_RING = X_RECOMPUTE_COMM + KIND_COUNT, X_RECOMPUTE_COMM + KIND_COUNT + 1
X_COUNT = X_RECOMPUTE_RING + 1
COLUMNS = np.array(
    [
        *range(C_FORWARD_COMM, C_FORWARD_COMM + KIND_COUNT),
        *range(C_BACKWARD_COMM, C_BACKWARD_COMM + KIND_COUNT),
        *(C_FORWARD_WAITS, C_BACKWARD_WAITS, C_FORWARD_RING, C_BACKWARD_RING),
        *range(C_RECOMPUTE_COMM, C_RECOMPUTE_COMM + KIND_COUNT),
        *(C_BACKWARD_WAITS, C_RECOMPUTE_RING),
    ],
    dtype=np.int64,
)
"""[X_COUNT] columns of `unit_cost` that they stand for."""


@kernel(
    void(
        TABLES,
        int64,
        int64,
        boolean[:, ::1],
        int64[::1],
        int64[:, ::1],
        int64[:, ::1],
        int64[:, ::1],
        float64[::1],
        float64[:, ::1],
        float64[::1],
        boolean[::1],
        float64,
        int64,
        float64[:, :, :, ::1],
    )
)
def vary(
    tables,
    first,
    last,
    masks,
    members,
    assignment,
    values,
    incoming,
    axes,
    links,
    hardware,
    zero_axes,
    samples,
    boundary_row,
    out,
):
    """Costs of operators [first, last) of one unit under every joint value of one group, all others undecided.

    Args:
        tables: see `Tables.arrays`.
        first, last, axes, links, hardware, zero_axes, samples, boundary_row: see `unit_cost`.
        masks: [modes, last - first] what is recomputed.
        members: operator rows of the group; empty for a unit with nothing decided.
        assignment: [values of an axis, members] signatures.
        values: [joint values, axes] rows of `assignment`.
        incoming: [ways, axes] placements of the tensor that crosses into the unit.
        out: [modes, joint values, ways, C_COUNT], written.
    """
    sharded = new_sharded(tables, axes.shape[0])
    records = np.empty((0, L_COUNT))
    cursor = np.zeros(1, np.int64)
    chosen = np.empty((last - first, axes.shape[0]), np.int64)
    chosen[:] = -1
    for v in range(values.shape[0]):
        for m in range(members.shape[0]):
            for a in range(axes.shape[0]):
                chosen[members[m] - first, a] = assignment[values[v, a], m]
        shard_unit(
            tables,
            first,
            last,
            chosen,
            axes,
            links,
            zero_axes,
            hardware,
            samples,
            records,
            cursor,
            v > 0,
            sharded,
        )
        for mode in range(masks.shape[0]):
            for way in range(incoming.shape[0]):
                unit_cost(
                    tables,
                    first,
                    last,
                    chosen,
                    masks[mode],
                    incoming[way],
                    axes,
                    links,
                    hardware,
                    samples,
                    boundary_row,
                    records,
                    cursor,
                    sharded,
                    out[mode, v, way],
                )


@kernel(
    void(
        TABLES,
        int64,
        int64[:, ::1],
        int64[:, :, ::1],
        boolean,
        boolean,
        float64[::1],
        float64[:, ::1],
        float64,
        float64[:, :, ::1],
    )
)
def exchange(tables, row, sources, requests, is_parametric, is_ring, axes, links, samples, out):
    """Costs of bringing one tensor to an operand and its gradient back, for all placements of either.

    Args:
        tables: see `Tables.arrays`.
        row: operand row that reads the tensor.
        sources: [ways, axes] placements of the tensor.
        requests: [requests, 2, axes] placements in which it is asked for, and in which its gradient is handed back.
        is_parametric: whether it depends on parameters alone, so that a partial gradient stays so.
        is_ring: see `convert_operand`.
        axes, links, samples: see `unit_cost`.
        out: [ways, requests, X_COUNT], written.
    """
    num_axes = axes.shape[0]
    lies = np.empty((row + 1, num_axes), np.int64)
    returns = np.empty((row + 1, num_axes), np.int64)
    given, wanted = np.empty(num_axes, np.int64), np.empty(num_axes, np.int64)
    records = np.empty((0, L_COUNT))
    cursor = np.zeros(1, np.int64)
    sent = np.empty(SENT_COUNT)
    total = np.empty(C_COUNT)
    for s in range(sources.shape[0]):
        for r in range(requests.shape[0]):
            for a in range(num_axes):
                lies[row, a] = requests[r, 0, a]
                returns[row, a] = requests[r, 1, a]
                wanted[a] = dual(sources[s, a])
                summed = is_parametric and sources[s, a] == BROADCAST and returns[row, a] == PARTIAL
                given[a] = BROADCAST if summed else returns[row, a]
            for c in range(C_COUNT):
                total[c] = 0.0
            moves = convert_operand(
                tables,
                lies,
                returns,
                0,
                row,
                row,
                sources[s],
                given,
                wanted,
                axes,
                links,
                samples,
                is_ring,
                records,
                cursor,
                sent,
                total,
            )
            for c in range(X_RECOMPUTE_COMM):
                out[s, r, c] = total[COLUMNS[c]]
            for c in range(C_COUNT):
                total[c] = 0.0
            if moves:
                repeat(sent, total)
            for c in range(X_RECOMPUTE_COMM, X_COUNT):
                out[s, r, c] = total[COLUMNS[c]]

"""Look-ahead: the bounds behind every legal value of one decision, in one compiled call.

The values differ in the signatures of one linkage group on one axis; only the rows of unit costs that see its unit
type are computed again. Units: seconds, share of memory.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float64, int64, njit, void

from automap.order import A_COUNT
from automap.price.combine import R_COUNT, combine, overflow, step_time_s
from automap.price.communication import L_COUNT, UNKNOWN
from automap.price.tables import OP_INPUTS, OP_SIGNATURES, S_PLACES
from automap.price.unit import unit_cost
from automap.price.vectors import TABLES
from ir.factors import BROADCAST, PARTIAL

# Columns of a skeleton's rows.
W_FIRST, W_LAST, W_TYPE, W_BEFORE, W_RANK, W_FIRST_OF_CHUNK, W_BOUNDARY, W_MASK = range(8)


@njit(void(TABLES, int64[:, ::1], int64, int64[:, ::1], int64[::1]), cache=True)
def outgoing(tables, makers, unit_type, chosen, placement):
    """Writes the placement in which a unit's crossing tensor leaves it; UNKNOWN where undecided.

    Args:
        tables: see `Tables.arrays`.
        makers: [types, 2] operator row and output slot of the crossing tensor, or -1.
        unit_type: of the unit, or -1 before the first.
        chosen: [operator rows, axes].
        placement: [axes], written.
    """
    maker = makers[unit_type, 0] if unit_type >= 0 else -1
    for a in range(placement.shape[0]):
        if maker < 0:
            placement[a] = BROADCAST
        elif chosen[maker, a] < 0:
            placement[a] = UNKNOWN
        else:
            row = tables.operators[maker, OP_SIGNATURES] + chosen[maker, a]
            slot = tables.operators[maker, OP_INPUTS] + makers[unit_type, 1]
            placement[a] = tables.places[tables.signatures[row, S_PLACES] + slot, 0]


@njit(
    void(
        TABLES,
        int64[:, ::1],
        int64[:, ::1],
        boolean[::1],
        int64[:, ::1],
        int64[::1],
        float64[:, ::1],
        float64[:, :, ::1],
        float64[:, ::1],
        boolean[::1],
        float64,
        float64[:, ::1],
    ),
    cache=True,
)
def row_costs(
    tables,
    makers,
    rows,
    masks,
    chosen,
    which,
    axes,
    links,
    hardware,
    zero_axes,
    samples,
    out,
):
    """Costs of the rows `which` of a skeleton under `chosen`.

    Args:
        tables: see `Tables.arrays`.
        makers: see `outgoing`.
        rows: [rows, 8] see the W_ columns.
        masks: recomputed operators of all rows, one behind the other.
        chosen: [operator rows, axes].
        which: rows to compute.
        axes, links, hardware: [ranks, ...] of the layout.
        zero_axes: [axes].
        samples: of a micro-batch.
        out: [rows, C_COUNT], the rows `which` are written.
    """
    incoming = np.empty(axes.shape[1], np.int64)
    records = np.empty((0, L_COUNT))
    cursor = np.zeros(1, np.int64)
    for i in range(which.shape[0]):
        row = which[i]
        first = rows[row, W_FIRST]
        last = rows[row, W_LAST]
        rank = rows[row, W_RANK]
        outgoing(
            tables,
            makers,
            rows[row, W_BEFORE],
            chosen,
            incoming,
        )
        if rows[row, W_FIRST_OF_CHUNK] == 1:
            # A partial tensor is never sent: it is reduced before it leaves the stage.
            for a in range(incoming.shape[0]):
                if incoming[a] == PARTIAL:
                    incoming[a] = BROADCAST
        unit_cost(
            tables,
            first,
            last,
            chosen[first:last],
            masks[rows[row, W_MASK] : rows[row, W_MASK] + last - first],
            incoming,
            axes[rank],
            links[rank],
            zero_axes,
            hardware[rank],
            samples,
            rows[row, W_BOUNDARY],
            records,
            cursor,
            out[row],
        )


@njit(
    void(
        TABLES,
        int64[:, ::1],
        int64[:, ::1],
        boolean[::1],
        int64[:, ::1],
        int64[::1],
        float64[:, ::1],
        float64[:, :, ::1],
        float64[:, ::1],
        boolean[::1],
        float64,
        int64[::1],
        int64[:, ::1],
        int64,
        float64[:, ::1],
        int64[:, ::1],
        boolean[::1],
        int64,
        int64,
        float64[::1],
        float64[::1],
        float64[::1],
        float64[:, :, ::1],
        float64[::1],
        float64[:, :, ::1],
        float64[:, ::1],
    ),
    cache=True,
)
def look_ahead(
    tables,
    makers,
    rows,
    masks,
    chosen,
    which,
    axes,
    links,
    hardware,
    zero_axes,
    samples,
    members,
    candidates,
    axis,
    before,
    parts,
    whole,
    kind,
    num_micro_batches,
    send_latency_s,
    send_bytes_per_s,
    capacity,
    tied,
    settings,
    fresh,
    bounds,
):
    """Bounds of every candidate assignment of one group on one axis.

    Args:
        tables..samples: see `row_costs`.
        members: operator rows of the group.
        candidates: [values, members] signatures.
        axis: mesh axis that is decided.
        before: [rows, C_COUNT] costs before the decision.
        parts, whole, kind, num_micro_batches, send_latency_s, send_bytes_per_s, capacity, settings: see `combine`.
        tied: [values, n, 5 + axes] see `combine`.
        fresh: [values, rows, C_COUNT] costs after each value, written.
        bounds: [values, 2] seconds and overflow, written.
    """
    trial = chosen.copy()
    program = np.empty((0, A_COUNT), np.int64)
    num_ranks = axes.shape[0]
    result = np.empty((num_ranks, R_COUNT))
    for v in range(candidates.shape[0]):
        for k in range(members.shape[0]):
            trial[members[k], axis] = candidates[v, k]
        fresh[v] = before
        row_costs(
            tables,
            makers,
            rows,
            masks,
            trial,
            which,
            axes,
            links,
            hardware,
            zero_axes,
            samples,
            fresh[v],
        )
        combine(
            fresh[v],
            parts,
            whole,
            kind,
            program,
            num_ranks,
            num_micro_batches,
            axes,
            links,
            hardware,
            zero_axes,
            send_latency_s,
            send_bytes_per_s,
            capacity,
            tied[v],
            settings,
            False,
            result,
        )
        bounds[v, 0] = step_time_s(result)
        bounds[v, 1] = overflow(result)

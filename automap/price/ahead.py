"""Look-ahead: the bounds behind every legal value of one decision, in one compiled call.

The values differ in the signatures of one linkage group on one axis; only the rows of unit costs that see its unit
type are computed again. Units: seconds, share of memory.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float64, int64, void

from automap.order import A_COUNT
from automap.price.combine import R_COUNT, combine, overflow, step_time_s
from automap.price.communication import L_COUNT
from automap.price.compiled import borrowing, kernel
from automap.price.desk import outgoing
from automap.price.sharded import SHARDED, new_sharded
from automap.price.unit import shard_unit, unit_cost
from automap.price.vectors import C_COUNT, TABLES

# Columns of a skeleton's rows.
W_FIRST, W_LAST, W_TYPE, W_BEFORE, W_RANK, W_FIRST_OF_CHUNK, W_BOUNDARY, W_MASK = range(8)


@borrowing(
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
        int64[::1],
        SHARDED,
        int64[::1],
        float64[:, ::1],
    ),
    inner=True,
)
def _row_costs(
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
    records,
    cursor,
    sharded,
    home,
    out,
):
    """Costs of the rows `which` of a skeleton under `chosen`.

    Args:
        tables..samples: see `look_ahead`.
        records, cursor: see `shard_unit`.
        sharded: scratch.
        home: [operator rows] scratch.
        out: [rows, C_COUNT], the rows `which` are written.
    """
    incoming = sharded.axes[2]
    for i in range(which.shape[0]):
        home[rows[which[i], W_FIRST]] = -1
    for i in range(which.shape[0]):
        row = which[i]
        first, last, rank = rows[row, W_FIRST], rows[row, W_LAST], rows[row, W_RANK]
        outgoing(tables, makers, rows[row, W_BEFORE], rows[row, W_FIRST_OF_CHUNK] == 1, chosen, incoming)
        if home[first] != rank:
            home[first] = rank
            shard_unit(
                tables,
                first,
                last,
                chosen[first:last],
                axes[rank],
                links[rank],
                zero_axes,
                hardware[rank],
                samples,
                records,
                cursor,
                sharded,
            )
        unit_cost(
            tables,
            first,
            last,
            chosen[first:last],
            masks[rows[row, W_MASK] : rows[row, W_MASK] + last - first],
            incoming,
            axes[rank],
            links[rank],
            hardware[rank],
            samples,
            rows[row, W_BOUNDARY],
            records,
            cursor,
            sharded,
            out[row],
        )


@kernel(
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
    )
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
        tables: see `Tables.arrays`.
        makers: see `outgoing`.
        rows: [rows, 8] see the W_ columns.
        masks: recomputed operators of all rows, one behind the other.
        chosen: [operator rows, axes] before the decision.
        which: rows to compute.
        axes, links, hardware: [ranks, ...] of the layout.
        zero_axes: [axes].
        samples: of a micro-batch.
        members: operator rows of the group.
        candidates: [values, members] signatures.
        axis: mesh axis that is decided.
        before: [rows, C_COUNT] costs before the decision.
        parts, whole, kind, num_micro_batches, send_latency_s, send_bytes_per_s, capacity, settings: see `combine`.
        tied: [values, n, 5 + axes] see `combine`.
        fresh: [values, rows, C_COUNT] costs after each value, written.
        bounds: [values, 2] seconds and overflow, written.
    """
    sharded = new_sharded(tables, axes.shape[1])
    records = np.empty((0, L_COUNT))
    cursor = np.zeros(1, np.int64)
    home = np.empty(chosen.shape[0], np.int64)
    trial = np.empty(chosen.shape, np.int64)
    for row in range(chosen.shape[0]):
        for a in range(chosen.shape[1]):
            trial[row, a] = chosen[row, a]
    program = np.empty((0, A_COUNT), np.int64)
    num_ranks = axes.shape[0]
    result = np.empty((num_ranks, R_COUNT))
    for v in range(candidates.shape[0]):
        for k in range(members.shape[0]):
            trial[members[k], axis] = candidates[v, k]
        for row in range(before.shape[0]):
            for c in range(C_COUNT):
                fresh[v, row, c] = before[row, c]
        _row_costs(
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
            records,
            cursor,
            sharded,
            home,
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

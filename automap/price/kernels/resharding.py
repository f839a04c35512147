"""Collectives that one operator calls for: of tensors on their way to it, of gradients back, and inside it.

Units: seconds, bytes.
"""

from __future__ import annotations

from numba import boolean, float64, int64, void

from automap.jit import borrowing
from automap.price.kernels.collectives import KIND_COUNT, UNKNOWN, V_WAIT, convert, spend
from automap.price.kernels.columns import (
    C_BACKWARD_COMM,
    C_BACKWARD_RING,
    C_BACKWARD_WAITS,
    C_FORWARD_COMM,
    C_FORWARD_RING,
    C_FORWARD_WAITS,
    C_RECOMPUTE_COMM,
    C_RECOMPUTE_RING,
    TABLES,
)
from automap.price.kernels.unit_workspace import SENT_COUNT, SENT_RING, SENT_WAIT
from automap.price.tables import (
    ALL_GATHER,
    D_EARLIER,
    D_TENSOR,
    E_BYTES,
    E_FIXED,
    E_SAMPLE,
    OP_OPERANDS,
    OP_SIGNATURES,
    REDUCE_SCATTER,
    S_KIND,
    T_GRAD,
)


@borrowing(boolean(int64[::1], int64[::1]), forceinline=True)
def differs(source, target):
    """Whether two placements that are decided differ on any axis."""
    found = False
    for a in range(source.shape[0]):
        found = found or (source[a] != target[a] and source[a] != UNKNOWN and target[a] != UNKNOWN)
    return found


@borrowing(boolean(int64[:, ::1], int64[:, ::1], int64[:, ::1], int64, int64), inner=True)
def _is_shared(operands, lies, returns, row, start):
    """Whether an earlier consumer of the tensor asks for the same conversion, or may turn out to ask for it.

    An earlier consumer that is wholly undecided has not been charged with it.
    """
    earlier = operands[row, D_EARLIER]
    while earlier >= start:
        same = True
        charged = False
        for a in range(lies.shape[1]):
            if lies[earlier, a] != UNKNOWN:
                charged = True
                if lies[row, a] != UNKNOWN:
                    alike = lies[earlier, a] == lies[row, a] and returns[earlier, a] == returns[row, a]
                    same = same and alike
        if same and charged:
            return True
        earlier = operands[earlier, D_EARLIER]
    return False


@borrowing(
    boolean(
        TABLES,
        int64[:, ::1],
        int64[:, ::1],
        int64,
        int64,
        int64,
        int64[::1],
        int64[::1],
        int64[::1],
        float64[::1],
        float64[:, ::1],
        float64,
        boolean,
        float64[:, ::1],
        int64[::1],
        float64[::1],
        float64[::1],
    ),
    inner=True,
)
def convert_operand(
    tables,
    lies,
    returns,
    op,
    row,
    start,
    source,
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
):
    """Adds the collectives that bring a tensor to an operand and its gradient back.

    Args:
        tables: see `Tables.arrays`.
        lies: see `Sharded`.
        returns: see `Sharded`.
        op: operator row that reads the tensor.
        row: operand row.
        start: first operand row of the unit.
        source: [axes] placement of the tensor.
        given: [axes] placement in which the operator hands the gradient back.
        wanted: [axes] placement in which the maker of the tensor wants it.
        axes: [axes] ranks of each mesh axis.
        links: [axes, V_COUNT].
        samples: of the micro-batch.
        is_ring: whether what is gathered goes round a ring while the operator works.
        records: see `automap.price.kernels.collectives.spend`.
        cursor: see `automap.price.kernels.collectives.spend`.
        sent: [SENT_COUNT] seconds forward by kind, host waits and seconds round a ring; written where something moves
            forward.
        total: [C_COUNT], added to.

    Returns:
        Whether anything moves forward.
    """
    tensor = tables.operands[row, D_TENSOR]
    moves = differs(source, lies[row])
    back = tables.tensors[tensor, T_GRAD] == 1 and differs(given, wanted)
    if not (moves or back) or _is_shared(tables.operands, lies, returns, row, start):
        return False
    sizes = tables.sizes
    data = (sizes[tensor, E_FIXED] + sizes[tensor, E_SAMPLE] * samples) * sizes[tensor, E_BYTES]
    if moves:
        for c in range(SENT_COUNT):
            sent[c] = 0.0
        sent[SENT_WAIT] = convert(data, source, lies[row], axes, links, sent, (op, tensor, 0), records, cursor)
        if is_ring:
            sent[SENT_RING] = sent[ALL_GATHER]
            sent[ALL_GATHER] = 0.0
        for kind in range(KIND_COUNT):
            total[C_FORWARD_COMM + kind] += sent[kind]
        total[C_FORWARD_WAITS] += sent[SENT_WAIT]
        total[C_FORWARD_RING] += sent[SENT_RING]
    if back:
        times = total[C_BACKWARD_COMM : C_BACKWARD_COMM + KIND_COUNT]
        scattered = times[REDUCE_SCATTER]
        wait = convert(data, given, wanted, axes, links, times, (op, tensor, 1), records, cursor)
        total[C_BACKWARD_WAITS] += wait
        if is_ring:
            # Keys and values go round again, with their gradients.
            total[C_BACKWARD_RING] += 2.0 * (times[REDUCE_SCATTER] - scattered)
            times[REDUCE_SCATTER] = scattered
    return moves


@borrowing(
    boolean(
        TABLES,
        int64,
        int64,
        int64[:, ::1],
        float64[::1],
        float64[:, ::1],
        float64,
        float64,
        float64[:, ::1],
        int64[::1],
        float64[::1],
        float64[::1],
    ),
    forceinline=True,
    inner=True,
)
def exchange_inside(tables, op, first, chosen, axes, links, divisor, samples, records, cursor, sent, total):
    """Adds the collectives inside an operator: statistics of split norms, samples of split experts and the like.

    Args:
        tables: see `Tables.arrays`.
        op: operator row.
        first: first operator row of the unit.
        chosen: see `automap.price.kernels.unit.shard_unit`.
        axes..total: see `convert_operand`.
        divisor: parts that the work of the operator is divided into.

    Returns:
        Whether anything moves forward.
    """
    moves = False
    for a in range(axes.shape[0]):
        row = tables.operators[op, OP_SIGNATURES] + chosen[op - first, a]
        if axes[a] <= 1.0 or chosen[op - first, a] < 0 or tables.signatures[row, S_KIND] < 0:
            continue
        kind = tables.signatures[row, S_KIND]
        tensor = tables.operands[tables.operators[op, OP_OPERANDS], D_TENSOR]
        sizes = tables.exchanges[row]
        # The other axes shard what is exchanged.
        shard = divisor / axes[a]
        spent = spend(
            kind, a, axes[a], links[a], (sizes[0] + sizes[1] * samples) / shard, (op, tensor, 0), records, cursor
        )
        if spent > 0.0:
            if not moves:
                for c in range(SENT_COUNT):
                    sent[c] = 0.0
            moves = True
            sent[kind] += spent
            sent[SENT_WAIT] += links[a, V_WAIT]
            total[C_FORWARD_COMM + kind] += spent
            total[C_FORWARD_WAITS] += links[a, V_WAIT]
        spent = spend(
            kind, a, axes[a], links[a], (sizes[2] + sizes[3] * samples) / shard, (op, tensor, 1), records, cursor
        )
        total[C_BACKWARD_COMM + kind] += spent
        total[C_BACKWARD_WAITS] += links[a, V_WAIT] if spent > 0.0 else 0.0
    return moves


@borrowing(void(float64[::1], float64[::1]))
def repeat(sent, total):
    """Adds collectives that recomputation repeats; see `convert_operand`."""
    for kind in range(KIND_COUNT):
        total[C_RECOMPUTE_COMM + kind] += sent[kind]
    total[C_BACKWARD_WAITS] += sent[SENT_WAIT]
    total[C_RECOMPUTE_RING] += sent[SENT_RING]

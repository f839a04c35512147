"""The cost of one unit under a sharding: the one place where shardings become seconds and bytes.

`shard_unit` adds up what follows from the signatures of a unit, `unit_cost` what follows from its surroundings: from
what crosses into it and from what is recomputed. Both also price prefixes of a plan, in which undecided signatures (-1)
are taken at their best, so that the results are lower bounds. No fast-math, no reductions that depend on a batch.
Units: seconds, bytes, samples.
"""

from __future__ import annotations

from numba import boolean, float64, int64, void

from automap.jit import borrowing
from automap.price.kernel_shapes import ATTENTION, INSIDE, PRODUCT, X_KIND, X_WEIGHT
from automap.price.kernels.collectives import KIND_COUNT, SUMMED, UNKNOWN, convert
from automap.price.kernels.columns import (
    C_BACKWARD,
    C_BACKWARD_ATTENDED,
    C_BACKWARD_COMM,
    C_BACKWARD_RING,
    C_BOUNDARY,
    C_FORWARD,
    C_FORWARD_ATTENDED,
    C_FORWARD_COMM,
    C_FORWARD_RING,
    C_FORWARD_WAITS,
    C_INPUT,
    C_LAUNCHED,
    C_LIVE,
    C_RECOMPUTE,
    C_RECOMPUTE_COMM,
    C_RECOMPUTE_RING,
    C_SAVED,
    C_TENSORS,
    C_WEIGHING,
    C_WEIGHT,
    C_WORKSPACE,
    H_KEPT,
    H_REGATHERS,
    H_RING,
    H_SCATTERED,
    TABLES,
)
from automap.price.kernels.gradients import add_elements, add_reduction
from automap.price.kernels.host_overhead import host_wait
from automap.price.kernels.measured_blocks import measured_block
from automap.price.kernels.operators import operator_s
from automap.price.kernels.placements import dual, local_bytes, place_operands
from automap.price.kernels.resharding import convert_operand, differs, exchange_inside, repeat
from automap.price.kernels.saved_activations import NOT_KEPT, note, own_part, settle
from automap.price.kernels.unit_workspace import N_ENTERING, N_KEPT, SHARDED
from automap.price.tables import (
    ALL_GATHER,
    BOUNDARY,
    CARRIED,
    D_EARLIER,
    D_MOVED,
    D_OWNER,
    D_READER,
    D_SAVED,
    D_SOURCE,
    D_TENSOR,
    E_BYTES,
    E_FIXED,
    E_SAMPLE,
    E_TENSORS,
    OP_DIVISIBLE,
    OP_FREE,
    OP_INPUTS,
    OP_OPERANDS,
    OP_OUTPUTS,
    OP_PARAMETRIC,
    OP_SIGNATURES,
    PARAMETER,
    REDUCE_SCATTER,
    S_DIVIDES,
    T_BATCH_DIM,
    T_GRAD,
    T_PRODUCER,
    T_ROLE,
    T_ROOT,
)
from ir.factors import BROADCAST, PARTIAL


@borrowing(float64(float64[::1], float64[::1]))
def _kept_share(shape, hardware):
    """Bytes that are kept of the operands of a kernel over those of the activation."""
    return hardware[H_KEPT] if shape[X_KIND] == PRODUCT and shape[X_WEIGHT] > 0.0 else 1.0


@borrowing(boolean(TABLES, int64, int64, int64[:, ::1], SHARDED), inner=True)
def _find_stale(tables, first, last, chosen, sharded):
    """Writes which operators changed their signatures, and which join others then; returns whether any changed.

    Those join others that touch a tensor which one that changed touches, or whose gradient such a one reduces.
    """
    operators, operands, changed = tables.operators, tables.operands, sharded.changed
    start, stop = operators[first, OP_OPERANDS], _end(operators, last - 1)
    found = False
    for op in range(first, last):
        changed[op] = False
        for a in range(chosen.shape[1]):
            changed[op] = changed[op] or sharded.priced[op, a] != chosen[op - first, a]
        if changed[op]:
            found = True
            for row in range(operators[op, OP_OPERANDS], _end(operators, op)):
                sharded.touched[operands[row, D_TENSOR]] = True
    if not found:
        return False
    for op in range(first, last):
        stale = changed[op]
        for row in range(operators[op, OP_OPERANDS], _end(operators, op)):
            stale = stale or sharded.touched[operands[row, D_TENSOR]]
            reader = operands[row, D_READER]
            while not stale and start <= reader < stop:
                stale = changed[operands[reader, D_OWNER]]
                reader = operands[reader, D_READER]
        sharded.stale[op] = stale
    for op in range(first, last):
        if changed[op]:
            for row in range(operators[op, OP_OPERANDS], _end(operators, op)):
                sharded.touched[operands[row, D_TENSOR]] = False
    return True


@borrowing(int64(int64[:, ::1], int64), forceinline=True, inner=True)
def _end(operators, op):
    """One past the last operand row of an operator."""
    return operators[op, OP_OPERANDS] + operators[op, OP_INPUTS] + operators[op, OP_OUTPUTS]


@borrowing(
    void(
        TABLES,
        int64,
        int64,
        int64[:, ::1],
        float64[::1],
        float64[:, ::1],
        boolean[::1],
        float64[::1],
        float64,
        float64[:, ::1],
        int64[::1],
        boolean,
        SHARDED,
    )
)
def shard_unit(tables, first, last, chosen, axes, links, zero_axes, hardware, samples, records, cursor, again, sharded):
    """What operators [first, last) of one unit cost for one micro-batch on one rank, apart from their surroundings.

    Args:
        tables: see `Tables.arrays`.
        first: first operator row.
        last: one past the last operator row.
        chosen: [last - first, axes] signature of each operator on each axis; -1 = undecided.
        axes: [axes] ranks of each mesh axis.
        links: [axes, V_COUNT] of a collective over the axis.
        zero_axes: [axes] whether ZeRO shards over the axis.
        hardware: [H_COUNT], see the H_ constants.
        samples: of the micro-batch, over all ranks of the mesh.
        records: buffer for a list of the collectives, see `automap.price.kernels.collectives.spend`; may be empty.
        cursor: [1] rows of it written.
        again: whether `sharded` holds these operators priced with the same `axes` to `samples`, so that only those are
            priced which another signature changes; nothing is written to `records` then.
        sharded: written.
    """
    operators, operands, tensors = tables.operators, tables.operands, tables.tensors
    if again:
        if not _find_stale(tables, first, last, chosen, sharded):
            return
    else:
        for op in range(first, last):
            sharded.changed[op] = sharded.stale[op] = True
        _list_rows(operators, operands, tensors, first, last, sharded)
    start, stop = operators[first, OP_OPERANDS], _end(operators, last - 1)
    place_operands(tables, first, last, chosen, axes, samples, sharded)
    for op in range(first, last):
        if sharded.stale[op]:
            _join(tables, op, start, stop, axes, links, zero_axes, hardware, samples, records, cursor, sharded)
        if sharded.changed[op]:
            for a in range(axes.shape[0]):
                sharded.priced[op, a] = chosen[op - first, a]
            _work(tables, op, first, chosen, axes, links, zero_axes, hardware, samples, records, cursor, sharded)
    total = sharded.totals[first]
    # Lengths that the compiler does not know: it makes vector instructions of such loops, and unrolls the others.
    for c in range(total.shape[0]):
        total[c] = 0.0
    workspace = 0.0
    for op in range(first, last):
        own, joined = sharded.own[op], sharded.joined[op]
        workspace = max(workspace, own[C_WORKSPACE])
        for c in range(total.shape[0]):
            total[c] += own[c] + joined[c]
    total[C_WORKSPACE] = workspace
    kept = sharded.kept[start : start + sharded.counts[first, N_KEPT]]
    for row in kept:
        sharded.noted[row] = NOT_KEPT
        if operands[row, D_SAVED] == 1:
            op = operands[row, D_OWNER]
            amount = _kept_share(tables.shapes[op], hardware) * sharded.held[row]
            for a in range(axes.shape[0]):
                sharded.keeps[row, a] = sharded.lies[row, a]
            root = tensors[operands[row, D_TENSOR], T_ROOT]
            noted, known, loose = sharded.noted, sharded.known, sharded.loose
            note(operands, start, row, root, amount, sharded.undecided[op], sharded.keeps, noted, known, loose)
    total[C_LIVE] = settle(operands, tensors, kept, sharded.known, sharded.loose)


@borrowing(void(int64[:, ::1], int64[:, ::1], int64[:, ::1], int64, int64, SHARDED), inner=True)
def _list_rows(operators, operands, tensors, first, last, sharded):
    """Lists the rows of a unit that cross into it, and those that its backward pass may need."""
    start = operators[first, OP_OPERANDS]
    num_entering, num_kept = 0, 0
    for row in range(start, _end(operators, last - 1)):
        op, role = operands[row, D_OWNER], tensors[operands[row, D_TENSOR], T_ROLE]
        if role == PARAMETER:
            continue
        enters = row < operators[op, OP_OPERANDS] + operators[op, OP_INPUTS] and role in (BOUNDARY, CARRIED)
        if enters:
            sharded.entering[start + num_entering] = row
            num_entering += 1
        if enters or operands[row, D_SAVED] == 1:
            sharded.kept[start + num_kept] = row
            num_kept += 1
    sharded.counts[first, N_ENTERING], sharded.counts[first, N_KEPT] = num_entering, num_kept


@borrowing(
    void(
        TABLES,
        int64,
        int64,
        int64[:, ::1],
        float64[::1],
        float64[:, ::1],
        boolean[::1],
        float64[::1],
        float64,
        float64[:, ::1],
        int64[::1],
        SHARDED,
    ),
    inner=True,
)
def _work(tables, op, first, chosen, axes, links, zero_axes, hardware, samples, records, cursor, sharded):
    """Writes what one operator adds to its unit by its own signature: `Sharded.own`, and what moves inside it.

    Args:
        op: operator row.
        tables..sharded: see `shard_unit`; the operands of the unit are placed.
    """
    operators, operands, tensors, lies = tables.operators, tables.operands, tables.tensors, sharded.lies
    outputs = operators[op, OP_OPERANDS] + operators[op, OP_INPUTS]
    dims, times = sharded.dims, sharded.times
    own = sharded.own[op]
    for c in range(own.shape[0]):
        own[c] = 0.0
    divisor = 1.0
    undecided = False
    for a in range(axes.shape[0]):
        if axes[a] > 1.0:
            signature = chosen[op - first, a]
            divides = operators[op, OP_DIVISIBLE]
            if signature < 0:
                undecided = True
            else:
                divides = tables.signatures[operators[op, OP_SIGNATURES] + signature, S_DIVIDES]
            if divides == 1:
                divisor *= axes[a]
    sharded.undecided[op] = undecided
    moved = 0.0
    for row in range(operators[op, OP_OPERANDS], _end(operators, op)):
        # Inside a fused kernel tensors stay in registers; what several of its operators read is read once.
        if operands[row, D_MOVED] == 1:
            moved += sharded.held[row]
            if row >= outputs:
                own[C_WORKSPACE] += sharded.held[row]
        tensor = operands[row, D_TENSOR]
        if tensors[tensor, T_ROLE] == PARAMETER and operands[row, D_EARLIER] < 0:
            add_elements(lies[row], tables.sizes[tensor, E_FIXED], zero_axes, axes, own)
            own[C_TENSORS] += tables.sizes[tensor, E_TENSORS]
    inside = operands.shape[0] + op
    sharded.moves[inside] = False
    if operators[op, OP_FREE] == 1:
        return
    kernels = operator_s(
        tables, op, first, chosen, lies, axes, divisor, undecided, moved, hardware, samples, dims, times
    )
    own[C_FORWARD] = times[0]
    own[C_BACKWARD] = times[1]
    own[C_INPUT] = times[1] - times[2]
    own[C_WEIGHT] = times[2]
    own[C_LAUNCHED] = kernels
    own[C_WEIGHING] = kernels * tables.shapes[op, X_WEIGHT]
    if tables.shapes[op, X_KIND] == ATTENTION:
        own[C_FORWARD_ATTENDED] = times[0]
        own[C_BACKWARD_ATTENDED] = times[1]
    sharded.moves[inside] = exchange_inside(
        tables, op, first, chosen, axes, links, divisor, samples, records, cursor, sharded.repeats_s[inside], own
    )


@borrowing(
    void(
        TABLES,
        int64,
        int64,
        int64,
        float64[::1],
        float64[:, ::1],
        boolean[::1],
        float64[::1],
        float64,
        float64[:, ::1],
        int64[::1],
        SHARDED,
    ),
    inner=True,
)
def _join(tables, op, start, stop, axes, links, zero_axes, hardware, samples, records, cursor, sharded):
    """Writes what one operator adds to its unit by its signature and those around it: `Sharded.joined`, what moves.

    Args:
        op: operator row.
        start: first operand row of the unit.
        stop: one past its last.
        tables..sharded: see `shard_unit`; the operands of the unit are placed.
    """
    operators, operands, tensors = tables.operators, tables.operands, tables.tensors
    lies, returns = sharded.lies, sharded.returns
    num_axes = axes.shape[0]
    is_ring = hardware[H_RING] > 0.0 and tables.shapes[op, X_KIND] in (ATTENTION, INSIDE)
    joined = sharded.joined[op]
    for c in range(joined.shape[0]):
        joined[c] = 0.0
    for row in range(operators[op, OP_OPERANDS], _end(operators, op)):
        tensor = operands[row, D_TENSOR]
        sharded.moves[row] = False
        if tensors[tensor, T_ROLE] == PARAMETER:
            if operands[row, D_EARLIER] < 0 and tensors[tensor, T_GRAD] == 1:
                elements = tables.sizes[tensor, E_FIXED]
                add_reduction(operators, operands, lies, returns, row, start, stop, axes, zero_axes, elements, joined)
            continue
        source = operands[row, D_SOURCE]
        if source >= start:
            given = returns[row]
            maker = operands[source, D_OWNER]
            if operators[maker, OP_PARAMETRIC] == 1:
                given = sharded.axes[0]
                for a in range(num_axes):
                    # What depends on parameters alone keeps its gradient partial until the end of the step.
                    summed = lies[source, a] == BROADCAST and returns[row, a] == PARTIAL
                    given[a] = BROADCAST if summed else returns[row, a]
            if differs(lies[source], lies[row]) or differs(given, returns[source]):
                sharded.moves[row] = convert_operand(
                    tables,
                    lies,
                    returns,
                    op,
                    row,
                    start,
                    lies[source],
                    given,
                    returns[source],
                    axes,
                    links,
                    samples,
                    is_ring,
                    records,
                    cursor,
                    sharded.repeats_s[row],
                    joined,
                )
        if operands[row, D_SAVED] == 1:
            share = _kept_share(tables.shapes[op], hardware)
            sharded.stored[row] = share * sharded.held[row]
            if source >= start and hardware[H_REGATHERS] > 0.0:
                own_part(lies[source], lies[row], sharded.axes[1])
                sharded.stored[row] = share * local_bytes(tables.sizes, tensor, sharded.axes[1], axes, samples)


@borrowing(void(int64[:, ::1], int64, int64[::1], int64[::1]), inner=True)
def _arrive(tensors, tensor, incoming, arrives):
    """Writes the placement in which a tensor that crosses into a unit arrives.

    A carried tensor is split by samples where the boundary is, and whole otherwise.
    """
    for a in range(incoming.shape[0]):
        arrives[a] = BROADCAST if incoming[a] == SUMMED else incoming[a]
        if tensors[tensor, T_ROLE] == CARRIED and incoming[a] not in (UNKNOWN, tensors[tensor, T_BATCH_DIM]):
            arrives[a] = BROADCAST


@borrowing(
    void(
        TABLES,
        int64,
        int64,
        int64[::1],
        float64[::1],
        float64[:, ::1],
        float64,
        float64[:, ::1],
        int64[::1],
        SHARDED,
        float64[::1],
    ),
    inner=True,
)
def _add_sum(tables, start, stop, incoming, axes, links, samples, records, cursor, sharded, total):
    """Adds the all-reduce of what was made as a sum and sent whole, as if the ranks that take it had made it.

    Args:
        tables: see `Tables.arrays`.
        start: first row of `Sharded.entering` of the unit.
        stop: one past its last.
        incoming..samples: see `unit_cost`.
        records: see `shard_unit`.
        cursor: see `shard_unit`.
        sharded: scratch.
        total: [C_COUNT], added to.
    """
    made, whole = sharded.axes[0], sharded.axes[1]
    is_sum = False
    for a in range(axes.shape[0]):
        is_sum = is_sum or incoming[a] == SUMMED
        made[a] = PARTIAL if incoming[a] == SUMMED else incoming[a]
        whole[a] = dual(made[a])
    for i in range(start, stop if is_sum else start):
        row = sharded.entering[i]
        tensor = tables.operands[row, D_TENSOR]
        if tables.tensors[tensor, T_ROLE] == BOUNDARY:
            sizes = tables.sizes[tensor]
            data = (sizes[E_FIXED] + sizes[E_SAMPLE] * samples) * sizes[E_BYTES]
            times = total[C_FORWARD_COMM : C_FORWARD_COMM + KIND_COUNT]
            tag = (tables.operands[row, D_OWNER], tensor, -1)
            total[C_FORWARD_WAITS] += convert(data, made, whole, axes, links, times, tag, records, cursor)
            return


@borrowing(
    boolean(
        TABLES,
        int64,
        int64,
        int64[:, ::1],
        boolean[::1],
        int64[::1],
        float64[::1],
        float64[:, ::1],
        float64[::1],
        float64,
        int64,
        float64[:, ::1],
        int64[::1],
        SHARDED,
        float64[::1],
    )
)
def unit_cost(
    tables,
    first,
    last,
    chosen,
    recomputed,
    incoming,
    axes,
    links,
    hardware,
    samples,
    boundary_row,
    records,
    cursor,
    sharded,
    out,
):
    """Cost of operators [first, last) of one unit for one micro-batch on one rank.

    Args:
        tables: see `Tables.arrays`.
        first: first operator row.
        last: one past the last operator row.
        chosen: see `shard_unit`.
        recomputed: [last - first] whether the operator runs again in the backward pass.
        incoming: [axes] placement of the tensor that crosses into the unit, or SUMMED.
        axes: [axes] ranks of each mesh axis.
        links: [axes, V_COUNT] of a collective over the axis.
        hardware: [H_COUNT], see the H_ constants.
        samples: of the micro-batch, over all ranks of the mesh.
        boundary_row: row of `operands` whose tensor crosses out of the unit, or -1.
        records: see `shard_unit`.
        cursor: see `shard_unit`.
        sharded: what `shard_unit` wrote of these operators.
        out: [C_COUNT] result, overwritten. Seconds, bytes, and elements for C_PARAMETERS, C_ZERO, C_REDUCE, C_GATHER.

    Returns:
        Whether the unit is recomputed as a whole.
    """
    operators, operands, tensors = tables.operators, tables.operands, tables.tensors
    lies = sharded.lies
    keeps, noted, known, loose = sharded.keeps, sharded.noted, sharded.known, sharded.loose
    start = operators[first, OP_OPERANDS]
    stop = _end(operators, last - 1)
    num_entering, num_kept = sharded.counts[first]
    for c in range(out.shape[0]):
        out[c] = sharded.totals[first, c]
    relaunched = 0.0
    attended_again = 0.0
    num_again = 0
    for k in range(last - first):
        if recomputed[k]:
            num_again += 1
            out[C_RECOMPUTE] += sharded.own[first + k, C_FORWARD]
            relaunched += sharded.own[first + k, C_LAUNCHED]
            if tables.shapes[first + k, X_KIND] == ATTENTION:
                attended_again += sharded.own[first + k, C_FORWARD]
    whole = num_again == last - first

    _add_sum(tables, start, start + num_entering, incoming, axes, links, samples, records, cursor, sharded, out)
    arrives, wanted = sharded.axes[0], sharded.axes[1]
    sent = sharded.repeats_s[sharded.repeats_s.shape[0] - 1]
    for i in range(start, start + num_entering):
        row = sharded.entering[i]
        tensor, op = operands[row, D_TENSOR], operands[row, D_OWNER]
        _arrive(tensors, tensor, incoming, arrives)
        is_ring = hardware[H_RING] > 0.0 and tables.shapes[op, X_KIND] in (ATTENTION, INSIDE)
        for a in range(axes.shape[0]):
            wanted[a] = dual(arrives[a])
        if (
            convert_operand(
                tables,
                lies,
                sharded.returns,
                op,
                row,
                start,
                arrives,
                sharded.returns[row],
                wanted,
                axes,
                links,
                samples,
                is_ring,
                records,
                cursor,
                sent,
                out,
            )
            and recomputed[op - first]
        ):
            repeat(sent, out)
        if tensors[tensor, T_ROLE] == CARRIED and operands[row, D_EARLIER] < 0:
            # It goes on to the next stage beside the boundary.
            out[C_BOUNDARY] += local_bytes(tables.sizes, tensor, arrives, axes, samples)
    if start <= boundary_row < stop:
        crossing = sharded.held[boundary_row]
        for a in range(1, axes.shape[0]):
            if hardware[H_SCATTERED] > 0.0 and lies[boundary_row, a] == BROADCAST:
                crossing /= axes[a]
        out[C_BOUNDARY] += crossing

    regathers = hardware[H_REGATHERS] > 0.0
    out[C_SAVED] = out[C_LIVE]
    if num_again > 0 or regathers:
        for op in range(first, last):
            if recomputed[op - first]:
                for row in range(operators[op, OP_OPERANDS], _end(operators, op)):
                    if sharded.moves[row] and recomputed[operands[operands[row, D_SOURCE], D_OWNER] - first]:
                        repeat(sharded.repeats_s[row], out)
                if sharded.moves[operands.shape[0] + op]:
                    repeat(sharded.repeats_s[operands.shape[0] + op], out)
        kept = sharded.kept[start : start + num_kept]
        for row in kept:
            tensor, op = operands[row, D_TENSOR], operands[row, D_OWNER]
            root = tensors[tensor, T_ROOT]
            keeper = tensors[root, T_PRODUCER]
            noted[row] = NOT_KEPT
            if whole and tensors[tensor, T_ROLE] in (BOUNDARY, CARRIED):
                # What comes in is kept as it comes.
                _arrive(tensors, tensor, incoming, arrives)
                amount = local_bytes(tables.sizes, tensor, arrives, axes, samples)
                for a in range(axes.shape[0]):
                    keeps[row, a] = arrives[a]
                note(operands, start, row, root, amount, False, keeps, noted, known, loose)
            elif operands[row, D_SAVED] == 1 and not (
                recomputed[op - first] and keeper >= first and recomputed[keeper - first]
            ):
                amount = sharded.stored[row]
                for a in range(axes.shape[0]):
                    keeps[row, a] = lies[row, a]
                if regathers and tensors[tensor, T_ROLE] in (BOUNDARY, CARRIED):
                    _arrive(tensors, tensor, incoming, arrives)
                    own_part(arrives, lies[row], keeps[row])
                    amount = local_bytes(tables.sizes, tensor, keeps[row], axes, samples)
                    amount *= _kept_share(tables.shapes[op], hardware)
                elif regathers and operands[row, D_SOURCE] >= start:
                    own_part(lies[operands[row, D_SOURCE]], lies[row], keeps[row])
                note(operands, start, row, root, amount, sharded.undecided[op], keeps, noted, known, loose)
        out[C_SAVED] = settle(operands, tensors, kept, known, loose)
    # A ring hides under the attention that it feeds, as far as that lasts.
    out[C_FORWARD_COMM + ALL_GATHER] += max(0.0, out[C_FORWARD_RING] - out[C_FORWARD_ATTENDED])
    out[C_BACKWARD_COMM + REDUCE_SCATTER] += max(0.0, out[C_BACKWARD_RING] - out[C_BACKWARD_ATTENDED])
    out[C_RECOMPUTE_COMM + ALL_GATHER] += max(0.0, out[C_RECOMPUTE_RING] - attended_again)
    if tables.blocks.shape[0] > 0 and measured_block(tables, first, last, chosen, whole, axes, samples, out):
        out[C_LAUNCHED] = out[C_WEIGHING] = relaunched = 0.0
    host_wait(relaunched, hardware, out)
    return whole

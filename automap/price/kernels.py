"""Compiled kernels: the cost of one unit under a sharding, and the pipeline schedule.

`unit_cost` is the one place where shardings become seconds and bytes; it also prices prefixes of a plan, in which
undecided signatures (-1) are taken at their best, so that its results are lower bounds. `run_schedule` times a
pipeline: every rank serves its actions in a fixed order (max-plus, hence monotone). No fast-math, no reductions that
depend on a batch. Units: seconds, bytes, samples.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float64, int64, njit, types, void

from automap.price.communication import KIND_COUNT, UNKNOWN, convert, spend
from automap.price.tables import (
    B_FIXED,
    B_KERNELS,
    B_MEASURED,
    B_SAMPLE,
    BOUNDARY,
    CARRIED,
    D_EARLIER,
    D_MOVED,
    D_OWNER,
    D_SAVED,
    D_TENSOR,
    E_BYTES,
    E_FIXED,
    E_SAMPLE,
    F_BYTES,
    F_FIXED,
    F_KERNELS,
    F_MEASURED,
    F_SAMPLE,
    OP_DIVISIBLE,
    OP_FREE,
    OP_INPUTS,
    OP_OPERANDS,
    OP_OUTPUTS,
    OP_SIGNATURES,
    PARAMETER,
    S_DIVIDES,
    S_KIND,
    S_PLACES,
    T_BACKWARD,
    T_BATCH_DIM,
    T_DIMS,
    T_FORWARD,
    T_GRAD,
    T_NDIM,
    T_PRODUCER,
    T_ROLE,
    T_ROOT,
    T_SLOT,
    Arrays,
)
from ir.factors import BROADCAST, PARTIAL

# Slots of the result of unit_cost.
C_FORWARD, C_BACKWARD, C_RECOMPUTE, C_PARAMETERS, C_ZERO, C_SAVED, C_LIVE, C_WORKSPACE, C_BOUNDARY = range(9)
C_FORWARD_COMM = 9
C_BACKWARD_COMM = C_FORWARD_COMM + KIND_COUNT
C_RECOMPUTE_COMM = C_BACKWARD_COMM + KIND_COUNT
C_REDUCE = C_RECOMPUTE_COMM + KIND_COUNT
MAX_AXES = 4
C_COUNT = C_REDUCE + MAX_AXES
"""C_REDUCE + axis: local elements of parameter gradients that are reduced over that axis once a step."""

# Slots of the hardware vector.
H_FLOPS, H_BANDWIDTH, H_LAUNCH, H_ELEMENTWISE = range(4)

TABLES = types.NamedTuple(
    (
        int64[:, ::1],
        float64[:, ::1],
        int64[:, ::1],
        int64[:, ::1],
        float64[:, ::1],
        int64[:, ::1],
        float64[:, ::1],
        int64[:, ::1],
    ),
    Arrays,
)
"""Numba's type of `Tables.arrays`."""


@njit(int64(int64[:, ::1], int64[:, ::1], int64[:, ::1], int64, int64, int64), cache=True)
def _placement(operators, signatures, places, op, slot, signature):
    """Placement of operand `slot` of `op` under `signature` on one axis; UNKNOWN where undecided."""
    if signature < 0:
        return UNKNOWN
    return places[signatures[operators[op, OP_SIGNATURES] + signature, S_PLACES] + slot, 0]


@njit(float64(float64[:, ::1], int64[:, ::1], int64, int64[::1], float64[::1], float64), cache=True)
def _local_bytes(sizes, tensors, tensor, placement, axes, samples):
    """Bytes of a tensor that one rank holds."""
    amount = (sizes[tensor, E_FIXED] + sizes[tensor, E_SAMPLE] * samples) * sizes[tensor, E_BYTES]
    for a in range(axes.shape[0]):
        if placement[a] >= 0 or placement[a] == UNKNOWN:
            amount /= axes[a]
    return amount


@njit(int64(int64[::1], float64[::1], boolean[::1], int64, int64, float64, boolean), cache=True)
def _keep(roots, amounts, loose, count, root, amount, undecided):
    """Notes a kept tensor unless the same memory is noted already; returns the new count."""
    for i in range(count):
        if roots[i] == root and loose[i] == undecided and (undecided or amounts[i] == amount):
            amounts[i] = max(amounts[i], amount)
            return count
    if count < roots.shape[0]:
        roots[count] = root
        amounts[count] = amount
        loose[count] = undecided
        count += 1
    return count


@njit(float64(int64[::1], float64[::1], boolean[::1], int64), cache=True)
def _kept_bytes(roots, amounts, loose, count):
    """Bytes of the kept tensors; an undecided one may turn out to be the same memory as a decided one."""
    total = 0.0
    for i in range(count):
        if not loose[i]:
            total += amounts[i]
    for i in range(count):
        if loose[i]:
            same = 0.0
            for j in range(count):
                if roots[j] == roots[i] and not loose[j]:
                    same += amounts[j]
            total += max(0.0, amounts[i] - same)
    return total


@njit(
    void(
        int64[:, ::1],
        int64[:, ::1],
        int64[:, ::1],
        int64[:, ::1],
        int64[:, ::1],
        int64,
        int64,
        int64[:, ::1],
        int64,
        int64,
        float64[::1],
        float64,
        float64[::1],
    ),
    cache=True,
)
def _reduce_axes(operators, operands, tensors, signatures, places, op, slot, chosen, first, last, axes, elements, out):
    """Adds a parameter's local gradient elements to every axis on which the gradient is partial.

    A parameter view hands the question on to its consumer.
    """
    reader, place = op, slot
    while operators[reader, OP_FREE] == 1:
        made = operands[operators[reader, OP_OPERANDS] + operators[reader, OP_INPUTS], D_TENSOR]
        found = -1
        for other in range(reader + 1, last):
            for s in range(operators[other, OP_INPUTS]):
                if found < 0 and operands[operators[other, OP_OPERANDS] + s, D_TENSOR] == made:
                    found = other
                    place = s
        if found < 0:
            return
        reader = found
    for a in range(axes.shape[0]):
        if axes[a] > 1.0 and chosen[reader - first, a] >= 0:
            at = signatures[operators[reader, OP_SIGNATURES] + chosen[reader - first, a], S_PLACES] + place
            if places[at, 0] == BROADCAST and places[at, 1] == PARTIAL:
                out[C_REDUCE + a] += elements


@njit(boolean(int64[::1], int64[::1], float64[::1]), cache=True)
def _differs(source, target, axes):
    """Whether a conversion has anything to do."""
    for a in range(axes.shape[0]):
        if source[a] != target[a] and source[a] != UNKNOWN and target[a] != UNKNOWN and axes[a] > 1.0:
            return True
    return False


@njit(
    void(
        TABLES,
        int64,
        int64,
        int64[:, ::1],
        boolean[::1],
        int64[::1],
        float64[::1],
        float64[::1],
        float64[::1],
        boolean[::1],
        float64[::1],
        float64,
        int64,
        float64[:, ::1],
        int64[::1],
        float64[::1],
    ),
    cache=True,
)
def unit_cost(
    tables,
    first,
    last,
    chosen,
    recomputed,
    incoming,
    axes,
    latency_s,
    bytes_per_s,
    zero_axes,
    hardware,
    samples,
    boundary_row,
    records,
    cursor,
    out,
):
    """Cost of operators [first, last) of one unit for one micro-batch on one rank.

    Args:
        tables: see `Tables.arrays`.
        first: first operator row.
        last: one past the last operator row.
        chosen: [last - first, axes] signature of each operator on each axis; -1 = undecided.
        recomputed: [last - first] whether the operator runs again in the backward pass.
        incoming: [axes] placement of the tensor that crosses into the unit.
        axes: [axes] ranks of each mesh axis.
        latency_s: [axes] of a collective over the axis.
        bytes_per_s: [axes] of a collective over the axis.
        zero_axes: [axes] whether ZeRO shards over the axis.
        hardware: FLOP/s, bytes/s, seconds a kernel, share of elementwise traffic.
        samples: of the micro-batch, over all ranks of the mesh.
        boundary_row: row of `operands` whose tensor crosses out of the unit, or -1.
        records: buffer for a list of the collectives, see `automap.price.communication.spend`; may be empty.
        cursor: [1] rows of it written.
        out: [C_COUNT] result, overwritten. Seconds, bytes, and elements for C_PARAMETERS, C_ZERO and C_REDUCE.
    """
    operators, costs, operands, tensors, sizes, signatures, exchanges, places = tables
    num_axes = axes.shape[0]
    out[:] = 0.0
    source = np.empty(num_axes, np.int64)
    target = np.empty(num_axes, np.int64)
    wanted = np.empty(num_axes, np.int64)
    given = np.empty(num_axes, np.int64)
    arrives = np.empty(num_axes, np.int64)
    rows = np.empty(num_axes, np.int64)
    comm = np.zeros(KIND_COUNT)
    tag = np.zeros(3, np.int64)
    whole = True
    for k in range(last - first):
        if not recomputed[k]:
            whole = False
    saved_root = np.empty(2 * (operands.shape[0] if last == first else last - first) * 8 + 64, np.int64)
    saved_size = np.empty(saved_root.shape[0])
    live_root = np.empty(saved_root.shape[0], np.int64)
    live_size = np.empty(saved_root.shape[0])
    saved_loose = np.empty(saved_root.shape[0], np.bool_)
    live_loose = np.empty(saved_root.shape[0], np.bool_)
    num_saved = 0
    num_live = 0

    for op in range(first, last):
        k = op - first
        begin = operators[op, OP_OPERANDS]
        num_inputs = operators[op, OP_INPUTS]
        count = num_inputs + operators[op, OP_OUTPUTS]
        free = operators[op, OP_FREE] == 1
        divisor = 1.0
        undecided = False
        for a in range(num_axes):
            rows[a] = -1
            if chosen[k, a] < 0:
                undecided = True
                if operators[op, OP_DIVISIBLE] == 1:
                    divisor *= axes[a]
            else:
                rows[a] = signatures[operators[op, OP_SIGNATURES] + chosen[k, a], S_PLACES]
                if signatures[operators[op, OP_SIGNATURES] + chosen[k, a], S_DIVIDES] == 1:
                    divisor *= axes[a]

        moved = 0.0
        produced = 0.0
        for slot in range(count):
            row = begin + slot
            tensor = operands[row, D_TENSOR]
            is_output = slot >= num_inputs
            for a in range(num_axes):
                target[a] = places[rows[a] + slot, 0] if rows[a] >= 0 else UNKNOWN
            local = _local_bytes(sizes, tensors, tensor, target, axes, samples)
            # Inside a fused kernel tensors stay in registers; what several of its operators read is read once.
            if operands[row, D_MOVED] == 1:
                moved += local
                if is_output:
                    produced += local
            role = tensors[tensor, T_ROLE]
            earlier = operands[row, D_EARLIER]
            producer = tensors[tensor, T_PRODUCER]
            makes_free = producer >= 0 and operators[producer, OP_FREE] == 1

            if role == PARAMETER and earlier < 0:
                elements = sizes[tensor, E_FIXED]
                for a in range(num_axes):
                    if target[a] >= 0 or target[a] == UNKNOWN:
                        elements /= axes[a]
                sharded = elements
                for a in range(num_axes):
                    if zero_axes[a] and target[a] == BROADCAST:
                        sharded /= axes[a]
                out[C_PARAMETERS] += elements
                out[C_ZERO] += sharded
                if tensors[tensor, T_GRAD] == 1:
                    _reduce_axes(
                        operators,
                        operands,
                        tensors,
                        signatures,
                        places,
                        op,
                        slot,
                        chosen,
                        first,
                        last,
                        axes,
                        elements,
                        out,
                    )

            is_boundary = role in (BOUNDARY, CARRIED)
            if is_boundary:
                for a in range(num_axes):
                    arrives[a] = incoming[a]
                    # A carried tensor is split by samples where the boundary is, and whole otherwise.
                    if role == CARRIED and incoming[a] not in (UNKNOWN, tensors[tensor, T_BATCH_DIM]):
                        arrives[a] = BROADCAST
            if not is_output and (is_boundary or (producer >= first and not makes_free)):
                for a in range(num_axes):
                    if is_boundary:
                        source[a] = arrives[a]
                    else:
                        source[a] = _placement(
                            operators,
                            signatures,
                            places,
                            producer,
                            operators[producer, OP_INPUTS] + tensors[tensor, T_SLOT],
                            chosen[producer - first, a],
                        )
                    given[a] = places[rows[a] + slot, 1] if rows[a] >= 0 else UNKNOWN
                # A conversion that an earlier consumer of the tensor asks for, or may turn out to ask for, is shared;
                # an earlier consumer that is wholly undecided has not been charged with it.
                shared = False
                while earlier >= 0 and not shared and operands[earlier, D_OWNER] >= first:
                    other = operands[earlier, D_OWNER]
                    place = earlier - operators[other, OP_OPERANDS]
                    same = True
                    charged = False
                    for a in range(num_axes):
                        signature = chosen[other - first, a]
                        if signature >= 0 and axes[a] > 1.0:
                            charged = True
                        if signature >= 0 and chosen[k, a] >= 0:
                            at = signatures[operators[other, OP_SIGNATURES] + signature, S_PLACES] + place
                            same = same and places[at, 0] == target[a] and places[at, 1] == given[a]
                    shared = same and charged
                    earlier = operands[earlier, D_EARLIER]
                for a in range(num_axes):
                    wanted[a] = BROADCAST if source[a] == PARTIAL else source[a]
                moves = not shared and _differs(source, target, axes)
                back = not shared and tensors[tensor, T_GRAD] == 1 and _differs(given, wanted, axes)
                if moves or back:
                    data = (sizes[tensor, E_FIXED] + sizes[tensor, E_SAMPLE] * samples) * sizes[tensor, E_BYTES]
                    tag[0] = op
                    tag[1] = tensor
                if moves:
                    comm[:] = 0.0
                    tag[2] = 0
                    convert(data, source, target, axes, latency_s, bytes_per_s, comm, tag, records, cursor)
                    again = recomputed[k] and (is_boundary or recomputed[producer - first])
                    for kind in range(KIND_COUNT):
                        out[C_FORWARD_COMM + kind] += comm[kind]
                        if again:
                            out[C_RECOMPUTE_COMM + kind] += comm[kind]
                if back:
                    comm[:] = 0.0
                    tag[2] = 1
                    convert(data, given, wanted, axes, latency_s, bytes_per_s, comm, tag, records, cursor)
                    for kind in range(KIND_COUNT):
                        out[C_BACKWARD_COMM + kind] += comm[kind]

            if operands[row, D_SAVED] == 1 and role != PARAMETER and not makes_free:
                root = tensors[tensor, T_ROOT]
                keeper = tensors[root, T_PRODUCER]
                amount = local
                inside = recomputed[k] and keeper >= first and recomputed[keeper - first]
                if is_boundary and whole:
                    amount = _local_bytes(sizes, tensors, tensor, arrives, axes, samples)
                num_live = _keep(live_root, live_size, live_loose, num_live, root, local, undecided)
                if not inside:
                    num_saved = _keep(saved_root, saved_size, saved_loose, num_saved, root, amount, undecided)
            if is_boundary and whole and not is_output:
                amount = _local_bytes(sizes, tensors, tensor, arrives, axes, samples)
                num_saved = _keep(saved_root, saved_size, saved_loose, num_saved, tensor, amount, False)
            if row == boundary_row:
                out[C_BOUNDARY] += local
            if role == CARRIED and operands[row, D_EARLIER] < 0:
                # It goes on to the next stage beside the boundary.
                out[C_BOUNDARY] += _local_bytes(sizes, tensors, tensor, arrives, axes, samples)

        out[C_WORKSPACE] = max(out[C_WORKSPACE], produced)
        if free:
            continue

        # Roofline: the slower of arithmetic and memory traffic, plus the gap a kernel adds.
        flops = costs[op, F_FIXED] + costs[op, F_SAMPLE] * samples
        traffic = hardware[H_ELEMENTWISE] if flops == 0.0 else 1.0
        if costs[op, F_BYTES] >= 0.0:
            moved = costs[op, F_BYTES] * samples / divisor
        forward_bytes = moved * costs[op, T_FORWARD] * traffic
        forward = max(flops / divisor / hardware[H_FLOPS], forward_bytes / hardware[H_BANDWIDTH])
        if forward > 0.0:
            forward += hardware[H_LAUNCH] * costs[op, F_KERNELS]
        back_flops = costs[op, B_FIXED] + costs[op, B_SAMPLE] * samples
        back_bytes = moved * costs[op, T_BACKWARD] * traffic
        backward = max(back_flops / divisor / hardware[H_FLOPS], back_bytes / hardware[H_BANDWIDTH])
        if backward > 0.0:
            backward += hardware[H_LAUNCH] * costs[op, B_KERNELS]
        if costs[op, F_MEASURED] >= 0.0:
            forward = costs[op, F_MEASURED] * samples / divisor
            backward = costs[op, B_MEASURED] * samples / divisor
        out[C_FORWARD] += forward
        out[C_BACKWARD] += backward
        if recomputed[k]:
            out[C_RECOMPUTE] += forward

        for a in range(num_axes):
            if chosen[k, a] >= 0:
                row = operators[op, OP_SIGNATURES] + chosen[k, a]
                kind = signatures[row, S_KIND]
                if kind >= 0:
                    # The other axes shard what is exchanged.
                    shard = divisor / axes[a]
                    data = (exchanges[row, 0] + exchanges[row, 1] * samples) / shard
                    tag[0] = op
                    tag[1] = operands[begin, D_TENSOR]
                    tag[2] = 0
                    spent = spend(kind, a, axes[a], latency_s[a], bytes_per_s[a], data, tag, records, cursor)
                    out[C_FORWARD_COMM + kind] += spent
                    if recomputed[k]:
                        out[C_RECOMPUTE_COMM + kind] += spent
                    data = (exchanges[row, 2] + exchanges[row, 3] * samples) / shard
                    tag[2] = 1
                    out[C_BACKWARD_COMM + kind] += spend(
                        kind, a, axes[a], latency_s[a], bytes_per_s[a], data, tag, records, cursor
                    )

    out[C_SAVED] = _kept_bytes(saved_root, saved_size, saved_loose, num_saved)
    out[C_LIVE] = _kept_bytes(live_root, live_size, live_loose, num_live)


@njit(
    boolean(
        int64[:, ::1],
        int64[:, ::1],
        int64[:, ::1],
        int64[:, ::1],
        int64[:, ::1],
        int64,
        int64[::1],
        float64[::1],
        int64,
    ),
    cache=True,
)
def divides(operators, operands, tensors, signatures, places, op, chosen, axes, samples):
    """Whether every split dim of `op` divides evenly on all axes that are decided.

    Args:
        operators..places: see `Tables.arrays`.
        op: operator row.
        chosen: [axes] its signature on each axis; -1 = undecided.
        axes: [axes] ranks of each axis.
        samples: of the micro-batch.
    """
    begin = operators[op, OP_OPERANDS]
    for slot in range(operators[op, OP_INPUTS] + operators[op, OP_OUTPUTS]):
        tensor = operands[begin + slot, D_TENSOR]
        for dim in range(tensors[tensor, T_NDIM]):
            ranks = 1
            for a in range(axes.shape[0]):
                if _placement(operators, signatures, places, op, slot, chosen[a]) == dim:
                    ranks *= int64(axes[a])
            if ranks > 1:
                extent = tensors[tensor, T_DIMS + dim]
                if tensors[tensor, T_BATCH_DIM] == dim:
                    # The batch is the major factor of its dim: whole samples go to each rank.
                    extent = samples
                if extent % ranks != 0:
                    return False
    return True

"""The cost of one unit under a sharding: the one place where shardings become seconds and bytes.

It also prices prefixes of a plan, in which undecided signatures (-1) are taken at their best, so that its results are
lower bounds. No fast-math, no reductions that depend on a batch. Units: seconds, bytes, samples.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float64, int64, njit, void

from automap.price.communication import KIND_COUNT, UNKNOWN, convert, spend
from automap.price.gemm import G_FLOPS
from automap.price.gradients import reduce_axes
from automap.price.host import host_wait
from automap.price.kept import keep, kept_bytes
from automap.price.measured import measured_block
from automap.price.operators import attention_kernel_s, least_s, product_s, refused
from automap.price.placements import differs, local_bytes, placement_of
from automap.price.shapes import (
    ATTENTION,
    BATCH,
    INSIDE,
    MEASURED,
    MEMORY,
    PRODUCT,
    ROOFLINE,
    X_BATCH,
    X_HEADS,
    X_KIND,
    X_LOSS,
    X_ROUTED,
    X_SAMPLED,
    X_WEIGHT,
)
from automap.price.tables import (
    ALL_GATHER,
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
    OP_PARAMETRIC,
    OP_SIGNATURES,
    PARAMETER,
    REDUCE_SCATTER,
    S_CLASS,
    S_DIVIDES,
    S_KIND,
    S_PLACES,
    T_BACKWARD,
    T_BATCH_DIM,
    T_FORWARD,
    T_GRAD,
    T_PRODUCER,
    T_ROLE,
    T_ROOT,
    T_SLOT,
)
from automap.price.vectors import (
    C_BACKWARD,
    C_BACKWARD_COMM,
    C_BOUNDARY,
    C_FORWARD,
    C_FORWARD_COMM,
    C_GATHER,
    C_INPUT,
    C_LIVE,
    C_PARAMETERS,
    C_RECOMPUTE,
    C_RECOMPUTE_COMM,
    C_SAVED,
    C_WEIGHT,
    C_WORKSPACE,
    C_ZERO,
    H_BANDWIDTH,
    H_ELEMENTWISE,
    H_FALLBACK,
    H_GEMM,
    H_KERNEL_S,
    H_LOSS,
    H_QUANTISE_KERNELS,
    H_REGATHERS,
    H_RING,
    H_ROUTING,
    H_ROUTING_KERNELS,
    H_SCATTERED,
    H_WAIT_EXPONENT,
    TABLES,
)
from ir.factors import BROADCAST, PARTIAL

WAITED_FOR = 7.0
"""Ranks of which one may be late: those of a host beside one's own; larger groups were not seen to wait longer."""


@njit(
    void(
        TABLES,
        int64,
        int64,
        int64[:, ::1],
        boolean[::1],
        int64[::1],
        float64[::1],
        float64[:, ::1],
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
    links,
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
        links: [axes, V_COUNT] of a collective over the axis.
        zero_axes: [axes] whether ZeRO shards over the axis.
        hardware: [H_COUNT], see the H_ constants.
        samples: of the micro-batch, over all ranks of the mesh.
        boundary_row: row of `operands` whose tensor crosses out of the unit, or -1.
        records: buffer for a list of the collectives, see `automap.price.communication.spend`; may be empty.
        cursor: [1] rows of it written.
        out: [C_COUNT] result, overwritten. Seconds, bytes, and elements for C_PARAMETERS, C_ZERO, C_REDUCE
            and C_GATHER.
    """
    operators, costs, operands, tensors, sizes, signatures, exchanges, places, shapes, _ = tables
    num_axes = axes.shape[0]
    out[:] = 0.0
    source = np.empty(num_axes, np.int64)
    target = np.empty(num_axes, np.int64)
    wanted = np.empty(num_axes, np.int64)
    given = np.empty(num_axes, np.int64)
    arrives = np.empty(num_axes, np.int64)
    rows = np.empty(num_axes, np.int64)
    comm = np.zeros(KIND_COUNT)
    dims = np.empty(4)
    times = np.empty(3)
    launched = 0.0
    relaunched = 0.0
    weighing = 0.0
    waits = np.zeros(3)
    ring = np.zeros(3)
    attended = np.zeros(3)
    growth = np.empty(num_axes)
    for a in range(num_axes):
        growth[a] = min(max(0.0, axes[a] - 1.0), WAITED_FOR) ** hardware[H_WAIT_EXPONENT]
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
            local = local_bytes(sizes, tensors, tensor, target, axes, samples)
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
                for a in range(num_axes - 1, -1, -1):
                    if zero_axes[a] and target[a] == BROADCAST:
                        out[C_GATHER + a] += sharded
                        sharded /= axes[a]
                out[C_PARAMETERS] += elements
                out[C_ZERO] += sharded
                if tensors[tensor, T_GRAD] == 1:
                    reduce_axes(
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

            has_source = False
            is_boundary = role in (BOUNDARY, CARRIED)
            if is_boundary:
                for a in range(num_axes):
                    arrives[a] = incoming[a]
                    # A carried tensor is split by samples where the boundary is, and whole otherwise.
                    if role == CARRIED and incoming[a] not in (UNKNOWN, tensors[tensor, T_BATCH_DIM]):
                        arrives[a] = BROADCAST
            if not is_output and (is_boundary or (producer >= first and not makes_free)):
                has_source = True
                for a in range(num_axes):
                    if is_boundary:
                        source[a] = arrives[a]
                    else:
                        source[a] = placement_of(
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
                    passes_on = producer >= first and operators[producer, OP_PARAMETRIC] == 1
                    if passes_on and source[a] == BROADCAST and given[a] == PARTIAL:
                        # What depends on parameters alone keeps its gradient partial until the end of the step.
                        given[a] = BROADCAST
                moves = not shared and differs(source, target, axes)
                back = not shared and tensors[tensor, T_GRAD] == 1 and differs(given, wanted, axes)
                if moves or back:
                    data = (sizes[tensor, E_FIXED] + sizes[tensor, E_SAMPLE] * samples) * sizes[tensor, E_BYTES]
                    tag[0] = op
                    tag[1] = tensor
                rings = hardware[H_RING] > 0.0 and shapes[op, X_KIND] in (ATTENTION, INSIDE)
                if moves:
                    comm[:] = 0.0
                    tag[2] = 0
                    wait = convert(data, source, target, axes, growth, links, comm, tag, records, cursor)
                    waits[0] += wait
                    again = recomputed[k] and (is_boundary or recomputed[producer - first])
                    if rings:
                        ring[0] += comm[ALL_GATHER]
                        ring[2] += comm[ALL_GATHER] if again else 0.0
                        comm[ALL_GATHER] = 0.0
                    for kind in range(KIND_COUNT):
                        out[C_FORWARD_COMM + kind] += comm[kind]
                        if again:
                            out[C_RECOMPUTE_COMM + kind] += comm[kind]
                    if again:
                        waits[2] += wait
                if back:
                    comm[:] = 0.0
                    tag[2] = 1
                    waits[1] += convert(data, given, wanted, axes, growth, links, comm, tag, records, cursor)
                    if rings:
                        # Keys and values go round again, with their gradients.
                        ring[1] += 2.0 * comm[REDUCE_SCATTER]
                        comm[REDUCE_SCATTER] = 0.0
                    for kind in range(KIND_COUNT):
                        out[C_BACKWARD_COMM + kind] += comm[kind]

            if operands[row, D_SAVED] == 1 and role != PARAMETER and not makes_free:
                root = tensors[tensor, T_ROOT]
                keeper = tensors[root, T_PRODUCER]
                amount = local
                if has_source and hardware[H_REGATHERS] > 0.0:
                    for a in range(num_axes):
                        is_gathered = target[a] == BROADCAST and (source[a] >= 0 or source[a] == UNKNOWN)
                        wanted[a] = source[a] if is_gathered else target[a]
                    amount = local_bytes(sizes, tensors, tensor, wanted, axes, samples)
                inside = recomputed[k] and keeper >= first and recomputed[keeper - first]
                if is_boundary and whole:
                    amount = local_bytes(sizes, tensors, tensor, arrives, axes, samples)
                num_live = keep(live_root, live_size, live_loose, num_live, root, local, undecided)
                if not inside:
                    num_saved = keep(saved_root, saved_size, saved_loose, num_saved, root, amount, undecided)
            if is_boundary and whole and not is_output:
                amount = local_bytes(sizes, tensors, tensor, arrives, axes, samples)
                num_saved = keep(saved_root, saved_size, saved_loose, num_saved, tensor, amount, False)
            if row == boundary_row:
                sent = local
                for a in range(1, num_axes):
                    if hardware[H_SCATTERED] > 0.0 and target[a] == BROADCAST:
                        sent /= axes[a]
                out[C_BOUNDARY] += sent
            if role == CARRIED and operands[row, D_EARLIER] < 0:
                # It goes on to the next stage beside the boundary.
                out[C_BOUNDARY] += local_bytes(sizes, tensors, tensor, arrives, axes, samples)

        out[C_WORKSPACE] = max(out[C_WORKSPACE], produced)
        if free:
            continue

        shape = shapes[op]
        kernel = shape[X_KIND]
        kernels = costs[op, F_KERNELS]
        if costs[op, F_BYTES] >= 0.0:
            moved = costs[op, F_BYTES] * samples / divisor
        forward = 0.0
        backward = 0.0
        weight = 0.0
        if kernel == MEASURED:
            forward = costs[op, F_MEASURED] * samples / divisor
            backward = costs[op, B_MEASURED] * samples / divisor
            weight = backward * shape[X_WEIGHT]
        elif kernel in (MEMORY, ROOFLINE):
            passes = 1.0
            if kernel == MEMORY:
                passes = hardware[H_ELEMENTWISE] * (hardware[H_LOSS] if shape[X_LOSS] > 0.0 else 1.0)
                if shape[X_ROUTED] > 0.0:
                    passes *= hardware[H_ROUTING]
                    kernels += hardware[H_ROUTING_KERNELS]
            forward = moved * costs[op, T_FORWARD] * passes / hardware[H_BANDWIDTH]
            backward = moved * costs[op, T_BACKWARD] * passes / hardware[H_BANDWIDTH]
            if kernel == ROOFLINE:
                rate = hardware[H_GEMM + G_FLOPS] * divisor
                forward = max(forward, (costs[op, F_FIXED] + costs[op, F_SAMPLE] * samples) / rate)
                backward = max(backward, (costs[op, B_FIXED] + costs[op, B_SAMPLE] * samples) / rate)
            if forward == 0.0 and backward == 0.0:
                kernels = 0.0
            if forward > 0.0:
                forward += hardware[H_KERNEL_S] * costs[op, F_KERNELS]
            if backward > 0.0:
                backward += hardware[H_KERNEL_S] * costs[op, B_KERNELS]
            weight = backward * shape[X_WEIGHT]
            if shape[X_HEADS] >= 0.0 and not undecided:
                kernels += hardware[H_FALLBACK] * refused(
                    tensors,
                    operators,
                    signatures,
                    places,
                    operands,
                    op,
                    int64(shape[X_HEADS]),
                    chosen[k],
                    axes,
                    samples,
                )
        elif kernel != INSIDE:
            for c in range(4):
                dims[c] = shape[X_BATCH + c]
            if shape[X_SAMPLED] >= 0.0:
                dims[int64(shape[X_SAMPLED])] *= samples
            if undecided:
                least_s(shape, dims, divisor, hardware, times)
            else:
                for a in range(num_axes):
                    split = signatures[operators[op, OP_SIGNATURES] + chosen[k, a], S_CLASS]
                    if split >= 0:
                        dims[split] /= axes[a]
                if kernel == ATTENTION:
                    attention_kernel_s(shape, dims, hardware, times)
                else:
                    product_s(shape, dims, hardware, times)
                    if kernel == PRODUCT:
                        kernels *= dims[BATCH]
            forward = times[0]
            backward = times[1]
            weight = times[2]
            if kernel == ATTENTION:
                attended[0] += forward
                attended[1] += backward
                attended[2] += forward if recomputed[k] else 0.0
            elif kernel == PRODUCT:
                kernels *= 1.0 + hardware[H_QUANTISE_KERNELS]
        launched += kernels
        weighing += kernels * shape[X_WEIGHT]
        if recomputed[k]:
            relaunched += kernels
        out[C_FORWARD] += forward
        out[C_BACKWARD] += backward
        out[C_INPUT] += backward - weight
        out[C_WEIGHT] += weight
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
                    spent = spend(kind, a, axes[a], links[a], data, tag, records, cursor)
                    out[C_FORWARD_COMM + kind] += spent
                    waits[0] += growth[a] if spent > 0.0 else 0.0
                    if recomputed[k]:
                        out[C_RECOMPUTE_COMM + kind] += spent
                        waits[2] += growth[a] if spent > 0.0 else 0.0
                    data = (exchanges[row, 2] + exchanges[row, 3] * samples) / shard
                    tag[2] = 1
                    spent = spend(kind, a, axes[a], links[a], data, tag, records, cursor)
                    out[C_BACKWARD_COMM + kind] += spent
                    waits[1] += growth[a] if spent > 0.0 else 0.0

    # A ring hides under the attention that it feeds, as far as that lasts.
    out[C_FORWARD_COMM + ALL_GATHER] += max(0.0, ring[0] - attended[0])
    out[C_BACKWARD_COMM + REDUCE_SCATTER] += max(0.0, ring[1] - attended[1])
    out[C_RECOMPUTE_COMM + ALL_GATHER] += max(0.0, ring[2] - attended[2])
    if tables.blocks.shape[0] > 0 and measured_block(tables, first, last, chosen, whole, axes, samples, out):
        launched = relaunched = weighing = 0.0
    host_wait(launched, relaunched, weighing, waits, hardware, out)
    out[C_SAVED] = kept_bytes(saved_root, saved_size, saved_loose, num_saved)
    out[C_LIVE] = kept_bytes(live_root, live_size, live_loose, num_live)

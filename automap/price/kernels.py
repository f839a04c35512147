"""Compiled kernels: the cost of one unit under a sharding, and the pipeline schedule.

`unit_cost` is the one place where shardings become seconds and bytes; it also prices prefixes of a plan, in which
undecided signatures (-1) are taken at their best, so that its results are lower bounds. `run_schedule` times a
pipeline: every rank serves its actions in a fixed order (max-plus, hence monotone). No fast-math, no reductions that
depend on a batch. Units: seconds, bytes, samples.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float64, int64, njit, types, void

from automap.price.attention import A_BACKWARD, A_COUNT, A_FLOOR_S, A_FLOPS, A_HEAD, REFERENCE_HEAD, attention_s
from automap.price.communication import KIND_COUNT, UNKNOWN, convert, spend
from automap.price.gemm import G_COUNT, G_FLOOR_S, G_FLOPS, gemm_s
from automap.price.shapes import (
    ATTENTION,
    BATCH,
    BATCHED_PRODUCT,
    INSIDE,
    MEASURED,
    MEMORY,
    ROOFLINE,
    X_BATCH,
    X_CAUSAL,
    X_HEADS,
    X_KIND,
    X_LEFT_GRADIENT,
    X_LOSS,
    X_RIGHT_GRADIENT,
    X_SAMPLED,
    X_SHARE,
    K,
    M,
    N,
)
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
    OP_PARAMETRIC,
    OP_SIGNATURES,
    PARAMETER,
    S_CLASS,
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
C_FORWARD_HOST = C_REDUCE + MAX_AXES
C_BACKWARD_HOST = C_FORWARD_HOST + 1
C_GATHER = C_BACKWARD_HOST + 1
C_COUNT = C_GATHER + MAX_AXES
"""C_REDUCE + axis: local elements of parameter gradients that are reduced over that axis once a step; C_GATHER + axis:
those of parameters that ZeRO gathers over it. Where several axes take part, the inner ones come first, and an outer one
carries what a rank is left with behind them. C_FORWARD_HOST, C_BACKWARD_HOST: what the device waits for its host,
recomputation included."""

# Slots of the hardware vector: the curves, then memory bytes/s; passes of memory-bound kernels and of the loss over
# their bytes; seconds of the smallest kernel; bytes of an element; products whose dims are no multiples of 8, over
# others; launches of a softmax that the fused kernel refuses; host seconds a kernel, backward over forward, and a
# collective; how its wait grows with the group; the exponent in which host and device overlap; the part of the
# collectives that nothing hides; 1 where each rank sends its part of a tensor that is whole on an axis.
H_GEMM, H_ATTENTION = 0, G_COUNT
(
    H_BANDWIDTH,
    H_ELEMENTWISE,
    H_LOSS,
    H_KERNEL_S,
    H_ELEMENT,
    H_MISALIGNED,
    H_FALLBACK,
    H_HOST_S,
    H_HOST_BACKWARD,
    H_HOST_COLLECTIVE_S,
    H_WAIT_EXPONENT,
    H_OVERLAP_EXPONENT,
    H_EXPOSED,
    H_SCATTERED,
) = range(G_COUNT + A_COUNT, G_COUNT + A_COUNT + 14)
H_COUNT = H_SCATTERED + 1
GRADIENT_BYTES = 4.0
"""Of one element of a weight's gradient, as the product that makes it writes it."""
ALIGNED = 8.0
"""Tensor cores take rows of a multiple of this many elements."""
GRANTED_HEADS = 4.0
"""The fused softmax takes multiples of this many heads of samples (Megatron-LM)."""

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
        float64[:, ::1],
    ),
    Arrays,
)
"""Numba's type of `Tables.arrays`."""


@njit(void(float64[::1], float64[::1], float64[::1], float64[::1]), cache=True)
def product_s(shape, dims, hardware, times):
    """Forward and backward seconds of a product of local extents `dims`."""
    curve = hardware[H_GEMM : H_GEMM + G_COUNT]
    element = hardware[H_ELEMENT]
    batch, m, n, k = dims[BATCH], dims[M], dims[N], dims[K]
    slow = 1.0
    written = GRADIENT_BYTES
    if shape[X_KIND] == BATCHED_PRODUCT:
        written = element
        if m % ALIGNED != 0.0 or n % ALIGNED != 0.0 or k % ALIGNED != 0.0:
            slow = hardware[H_MISALIGNED]
    slow *= shape[X_SHARE]
    times[0] = slow * gemm_s(m, n, k, batch, element, element, curve)
    times[1] = 0.0
    if shape[X_LEFT_GRADIENT] > 0.0:
        times[1] += slow * gemm_s(m, k, n, batch, element, element, curve)
    if shape[X_RIGHT_GRADIENT] > 0.0:
        times[1] += slow * gemm_s(k, n, m, batch, element, written, curve)


@njit(void(float64[::1], float64[::1], float64[::1], float64[::1]), cache=True)
def _attention_kernel_s(shape, dims, hardware, times):
    """Forward and backward seconds of fused attention whose scores have local extents `dims`."""
    curve = hardware[H_ATTENTION : H_ATTENTION + A_COUNT]
    heads = dims[BATCH]
    causal = shape[X_CAUSAL] > 0.0
    for way in range(2):
        times[way] = attention_s(
            1.0, heads, heads, dims[M], dims[N], dims[K], causal, hardware[H_ELEMENT], curve, way == 1
        )


@njit(void(float64[::1], float64[::1], float64, float64[::1], float64[::1]), cache=True)
def _least_s(shape, dims, divisor, hardware, times):
    """Least seconds of a product or of attention of extents `dims` of which each rank does one part in `divisor`.

    The arithmetic at the rate of the curve and the smallest kernel: what `gemm_s` and `attention_s` come to at best.
    """
    if shape[X_KIND] == ATTENTION:
        curve = hardware[H_ATTENTION : H_ATTENTION + A_COUNT]
        head = dims[K]
        # A split of the head size gains nothing by this, for small heads cost more an element.
        depth = (head + curve[A_HEAD]) * REFERENCE_HEAD / (REFERENCE_HEAD + curve[A_HEAD])
        amount = 4.0 * dims[BATCH] * dims[M] * dims[N] * depth / divisor
        times[0] = (0.5 if shape[X_CAUSAL] > 0.0 else 1.0) * amount / curve[A_FLOPS]
        times[1] = curve[A_FLOOR_S] + curve[A_BACKWARD] * times[0]
        times[0] += curve[A_FLOOR_S]
    else:
        curve = hardware[H_GEMM : H_GEMM + G_COUNT]
        amount = 2.0 * dims[BATCH] * dims[M] * dims[N] * dims[K] / divisor
        times[0] = shape[X_SHARE] * (curve[G_FLOOR_S] + amount / curve[G_FLOPS])
        times[1] = times[0] * (shape[X_LEFT_GRADIENT] + shape[X_RIGHT_GRADIENT])


@njit(float64(float64, float64, float64), cache=True)
def _overlapped(device_s, host_s, exponent):
    """Seconds of a device and its host that overlap: the larger, and more where they are alike."""
    larger = max(device_s, host_s)
    if larger <= 0.0:
        return 0.0
    smaller = min(device_s, host_s)
    return larger * (1.0 + (smaller / larger) ** exponent) ** (1.0 / exponent)


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

    A view, or an operator on parameters alone, hands a partial gradient on from its consumer: it is added up over the
    micro-batches and reduced once. Each rank of an inner axis is left with its part, which the outer axes reduce.
    """
    reader, place = op, slot
    # Bit a stands for axis a.
    settled = 0
    partial = 0
    while True:
        free = operators[reader, OP_FREE] == 1
        for a in range(axes.shape[0]):
            if free or settled >> a & 1:
                continue
            if axes[a] <= 1.0 or chosen[reader - first, a] < 0:
                settled |= 1 << a
                continue
            at = signatures[operators[reader, OP_SIGNATURES] + chosen[reader - first, a], S_PLACES] + place
            if places[at, 0] == BROADCAST and places[at, 1] == PARTIAL:
                partial |= 1 << a
                settled |= 1 << a
            elif places[at, 0] != BROADCAST:
                settled |= 1 << a
        if not free and operators[reader, OP_PARAMETRIC] == 0:
            break
        made = operands[operators[reader, OP_OPERANDS] + operators[reader, OP_INPUTS], D_TENSOR]
        found = -1
        for other in range(reader + 1, last):
            for s in range(operators[other, OP_INPUTS]):
                if found < 0 and operands[operators[other, OP_OPERANDS] + s, D_TENSOR] == made:
                    found = other
                    place = s
        if found < 0:
            break
        reader = found
    for a in range(axes.shape[0] - 1, -1, -1):
        if partial >> a & 1:
            out[C_REDUCE + a] += elements
            elements /= axes[a]


@njit(
    float64(
        int64[:, ::1],
        int64[:, ::1],
        int64[:, ::1],
        int64[:, ::1],
        int64[:, ::1],
        int64,
        int64,
        int64[::1],
        float64[::1],
        float64,
    ),
    cache=True,
)
def _refused(tensors, operators, signatures, places, operands, op, slot, chosen, axes, samples):
    """1 where the local samples and heads of operand `slot` are none that the fused softmax takes."""
    tensor = operands[operators[op, OP_OPERANDS] + slot, D_TENSOR]
    heads = 1.0
    for dim in range(tensors[tensor, T_NDIM] - 2):
        heads *= tensors[tensor, T_DIMS + dim]
        if tensors[tensor, T_BATCH_DIM] == dim:
            heads *= samples
        for a in range(axes.shape[0]):
            if _placement(operators, signatures, places, op, slot, chosen[a]) == dim:
                heads /= axes[a]
    return 0.0 if heads % GRANTED_HEADS == 0.0 else 1.0


@njit(void(float64, float64, float64[::1], float64[::1], float64[::1]), cache=True)
def _host_wait(launched, relaunched, waits, hardware, out):
    """Writes how much longer host and device take together than the device alone.

    Args:
        launched: kernels of the forward pass.
        relaunched: those that recomputation launches again.
        waits: host time of collectives forward, backward and recomputed, in that of a group of two.
        hardware: see `unit_cost`.
        out: of `unit_cost`.
    """
    forward = 0.0
    backward = 0.0
    for kind in range(KIND_COUNT):
        forward += out[C_FORWARD_COMM + kind]
        backward += out[C_BACKWARD_COMM + kind] + out[C_RECOMPUTE_COMM + kind]
    forward = out[C_FORWARD] + hardware[H_EXPOSED] * forward
    backward = out[C_BACKWARD] + out[C_RECOMPUTE] + hardware[H_EXPOSED] * backward
    a_kernel, a_collective, p = hardware[H_HOST_S], hardware[H_HOST_COLLECTIVE_S], hardware[H_OVERLAP_EXPONENT]
    host = a_kernel * launched + a_collective * waits[0]
    out[C_FORWARD_HOST] = _overlapped(forward, host, p) - forward
    host = a_kernel * (hardware[H_HOST_BACKWARD] * launched + relaunched) + a_collective * (waits[1] + waits[2])
    out[C_BACKWARD_HOST] = _overlapped(backward, host, p) - backward


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
    operators, costs, operands, tensors, sizes, signatures, exchanges, places, shapes = tables
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
    times = np.empty(2)
    launched = 0.0
    relaunched = 0.0
    waits = np.zeros(3)
    growth = np.empty(num_axes)
    for a in range(num_axes):
        growth[a] = max(0.0, axes[a] - 1.0) ** hardware[H_WAIT_EXPONENT]
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
                for a in range(num_axes - 1, -1, -1):
                    if zero_axes[a] and target[a] == BROADCAST:
                        out[C_GATHER + a] += sharded
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
                    passes_on = producer >= first and operators[producer, OP_PARAMETRIC] == 1
                    if passes_on and source[a] == BROADCAST and given[a] == PARTIAL:
                        # What depends on parameters alone keeps its gradient partial until the end of the step.
                        given[a] = BROADCAST
                moves = not shared and _differs(source, target, axes)
                back = not shared and tensors[tensor, T_GRAD] == 1 and _differs(given, wanted, axes)
                if moves or back:
                    data = (sizes[tensor, E_FIXED] + sizes[tensor, E_SAMPLE] * samples) * sizes[tensor, E_BYTES]
                    tag[0] = op
                    tag[1] = tensor
                if moves:
                    comm[:] = 0.0
                    tag[2] = 0
                    wait = convert(data, source, target, axes, growth, links, comm, tag, records, cursor)
                    waits[0] += wait
                    again = recomputed[k] and (is_boundary or recomputed[producer - first])
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
                sent = local
                for a in range(1, num_axes):
                    if hardware[H_SCATTERED] > 0.0 and target[a] == BROADCAST:
                        sent /= axes[a]
                out[C_BOUNDARY] += sent
            if role == CARRIED and operands[row, D_EARLIER] < 0:
                # It goes on to the next stage beside the boundary.
                out[C_BOUNDARY] += _local_bytes(sizes, tensors, tensor, arrives, axes, samples)

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
        if kernel == MEASURED:
            forward = costs[op, F_MEASURED] * samples / divisor
            backward = costs[op, B_MEASURED] * samples / divisor
        elif kernel in (MEMORY, ROOFLINE):
            passes = 1.0
            if kernel == MEMORY:
                passes = hardware[H_ELEMENTWISE] * (hardware[H_LOSS] if shape[X_LOSS] > 0.0 else 1.0)
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
            if shape[X_HEADS] >= 0.0 and not undecided:
                kernels += hardware[H_FALLBACK] * _refused(
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
                _least_s(shape, dims, divisor, hardware, times)
            else:
                for a in range(num_axes):
                    split = signatures[operators[op, OP_SIGNATURES] + chosen[k, a], S_CLASS]
                    if split >= 0:
                        dims[split] /= axes[a]
                if kernel == ATTENTION:
                    _attention_kernel_s(shape, dims, hardware, times)
                else:
                    product_s(shape, dims, hardware, times)
            forward = times[0]
            backward = times[1]
        launched += kernels
        if recomputed[k]:
            relaunched += kernels
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

    _host_wait(launched, relaunched, waits, hardware, out)
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

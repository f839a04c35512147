"""The price of a step in closed form, over many runs at once: how its constants are found.

The formulas are those of docs/cost-model.md, "Formulas of a step"; kernels come from `automap.price.gemm` and
`automap.price.attention`. The pipeline is in closed form, for a fit prices each run thousands of times. Units: seconds,
bytes, elements.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from automap.price.attention import A_BACKWARD, A_FLOPS, attention_s
from automap.price.gemm import G_FLOPS, gemm_s
from automap.price.tables import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

# Trainer: the fields of automap/data/trainers that are fitted, in this order.
TRAINER = (
    "elementwise_traffic",
    "attention_rate",
    "host_us_per_operator",
    "host_us_per_collective",
    "gradient_overlap",
    "tensor_overlap",
    "gather_bandwidth_share",
    "step_overhead_ms",
    "send_host_ms",
    "send_overlap",
)
ELEMENTWISE, ATTENTION_RATE, HOST, HOST_COLLECTIVE, GRADIENT, TENSOR, GATHER, STEP, SEND, SEND_OVERLAP = range(10)
# Constants common to all, in this order: automap/data/fitted/step.json.
SHARED = (
    "overlap_exponent",
    "host_backward",
    "node_latency_us",
    "kernel_us",
    "attention_backward",
    "optimizer_bytes",
    "micro_batch_ms",
    "loss_passes",
    "group_wait_exponent",
    "fallback_kernels",
    "misaligned",
    "ring_us",
)
(
    OVERLAP_EXPONENT,
    HOST_BACKWARD,
    NODE_LATENCY,
    KERNEL,
    ATTENTION_BACKWARD,
    OPTIMIZER_BYTES,
    MICRO_BATCH,
    LOSS_PASSES,
    WAIT_EXPONENT,
    FALLBACK_KERNELS,
    MISALIGNED,
    RING,
) = range(12)
# Columns of a run.
(
    R_FIRST_PART,
    R_LAST_PART,
    R_FIRST_UNIT,
    R_LAST_UNIT,
    R_RANKS,
    R_MICRO_BATCHES,
    R_VIRTUAL,
    R_ZERO,
    R_DEVICE,
    R_TRAINER,
    R_PER_NODE,
    R_NIC_RATE,
    R_CROSSES,
    R_PRECISION,
    R_LOW_PRECISION,
    R_ZERO_BUBBLE,
    R_MESH_LINK,
    R_INTRA_RATE,
    R_PARAMETER_BYTES,
    R_GRADIENT_BYTES,
    R_TIED,
    R_SHARED,
    R_SHARED_ZERO,
    R_ZERO_GROUP,
    R_PORTABLE,
    R_SCATTERED_SENDS,
    R_ASYNC_TP,
    R_INTER,
    R_INTRA,
) = range(29)
R_COUNT = 29
BF16, TF32, FP32, FP8 = range(4)
NVFP4_SPEEDUP = 1.8
"""Products in nvfp4 against fp8 (megatron-bridge rows: 2.9 against 1.6 over bf16)."""
ASYNC_TP = 0.5
"""Share of the collectives of a stage that asynchronous tensor parallelism hides besides."""
MESH_SHARE = np.array([0.0, 0.0, 23e9, 45e9, 85e9, 37e9, 46e9, 87e9, 135e9]) / 130e9
"""DGX-1: achieved bandwidth of 2, 3 ... 8 ranks over that of all (collectives_measured.csv, V100)."""


@njit(cache=False)
def collective(kind, ranks, nodes, per_node, data, run, rate, shared, node_rate):
    """Time of one collective of a group inside a host, or across hosts through its share of their NICs."""
    if ranks <= 1.0 or data <= 0.0:
        return 0.0
    factor = (ranks - 1.0) / ranks
    if kind == ALL_REDUCE:
        factor *= 2.0
    latency = shared[NODE_LATENCY] * 1e-6
    if nodes <= 1.0:
        if run[R_MESH_LINK] > 0.0:
            rate *= MESH_SHARE[int(min(ranks, 8.0))]
        x = factor * data / rate * (1.0 + 0.3 / ranks)
        return latency * (1.0 + 0.2 * (ranks - 1.0)) / 2.4 + x + 2.5 * math.sqrt(x * 1e-6)
    bandwidth = node_rate * per_node / run[R_PER_NODE]
    if per_node > 1.0:
        bandwidth = min(bandwidth, rate)
    x = factor * data / bandwidth
    if kind in (ALL_GATHER, REDUCE_SCATTER):
        return latency + shared[RING] * 1e-6 * (ranks - 1.0) + x
    return latency + 25e-6 * math.log2(nodes) + x


@njit(cache=False)
def kernel_times(entry, run, trainer, shared, products, attention, memory_rate):
    """Forward, input-gradient and weight-gradient seconds of one kernel, and the kernels its host launches."""
    kind = int(entry[0])
    size = 2.0 if run[R_PRECISION] == BF16 else 4.0
    precision = int(run[R_PRECISION])
    m, n, k, batch = entry[1], entry[2], entry[3], entry[4]
    launched = entry[8]
    forward = backward = weight = 0.0
    if kind == 0:
        share = trainer[ELEMENTWISE] * (shared[LOSS_PASSES] if entry[11] > 0.0 else 1.0)
        forward = entry[5] * share / memory_rate + shared[KERNEL] * 1e-6 * entry[8]
        backward = entry[6] * share / memory_rate + shared[KERNEL] * 1e-6 * entry[9]
        if m > 0.0 and m % 4.0 != 0.0:
            # Megatron's fused softmax takes multiples of four heads and samples only.
            launched += shared[FALLBACK_KERNELS]
    elif kind == 1:
        curve, width, gain = products[precision], size, 1.0
        if run[R_LOW_PRECISION] > 0.0:
            curve, width = products[FP8], 1.0
            gain = NVFP4_SPEEDUP if run[R_LOW_PRECISION] == 3.0 else 1.0
        forward = gemm_s(m, n, k, 1.0, width, size, curve) / gain
        backward = gemm_s(m, k, n, 1.0, width, size, curve) / gain
        weight = gemm_s(k, n, m, 1.0, width, 4.0, curve) / gain
    elif kind == 2:
        curve = products[precision]
        slow = shared[MISALIGNED] if m % 8.0 != 0.0 or n % 8.0 != 0.0 or k % 8.0 != 0.0 else 1.0
        forward = gemm_s(m, n, k, batch, size, size, curve) * slow
        backward = gemm_s(m, k, n, batch, size, size, curve) + gemm_s(k, n, m, batch, size, size, curve)
        backward *= slow
    elif kind == 3:
        forward = attention_s(1.0, m, m, n, k, batch, entry[10] > 0.0, size, attention, False)
        backward = attention_s(1.0, m, m, n, k, batch, entry[10] > 0.0, size, attention, True)
    else:
        arithmetic = 2.0 * m * n * k / products[precision][G_FLOPS]
        forward = max(arithmetic, entry[5] / memory_rate) + shared[KERNEL] * 1e-6
        backward = max(2.0 * arithmetic, entry[6] / memory_rate) + 2.0 * shared[KERNEL] * 1e-6
    return forward, backward, weight, launched


@njit(cache=False)
def unit_times(unit, operators, collectives, axes, run, trainer, shared, products, attention, memory_rate, rates):
    """Forward, backward (recomputation included) and weight-gradient seconds of one unit and micro-batch."""
    forward = backward = weight = again = launched = launched_again = 0.0
    for o in range(int(unit[0]), int(unit[1])):
        f, b, w, n = kernel_times(operators[o], run, trainer, shared, products, attention, memory_rate)
        forward += f
        backward += b
        weight += w
        launched += n
        if operators[o][7] > 0.0:
            again += f
            launched_again += n
    moved = np.zeros(3)
    waits = np.zeros(3)
    for x in range(int(unit[2]), int(unit[3])):
        entry = collectives[x]
        axis = axes[int(entry[1])]
        seconds = collective(entry[0], axis[0], axis[1], axis[2], entry[2], run, rates[0], shared, rates[1])
        wait = (axis[0] - 1.0) ** shared[WAIT_EXPONENT]
        direction = 0 if entry[3] == 0.0 else 1
        moved[direction] += seconds
        waits[direction] += wait
        if entry[4] > 0.0 and direction == 0:
            moved[2] += seconds
            waits[2] += wait
    hidden = trainer[TENSOR]
    if run[R_ASYNC_TP] > 0.0:
        hidden = min(0.95, hidden + ASYNC_TP)
    p, host, wait_s = shared[OVERLAP_EXPONENT], trainer[HOST] * 1e-6, trainer[HOST_COLLECTIVE] * 1e-6
    device = forward + moved[0] * (1.0 - hidden)
    first = (device**p + (host * launched + wait_s * waits[0]) ** p) ** (1.0 / p)
    device = backward + weight + again + (moved[1] + moved[2]) * (1.0 - hidden)
    host_s = host * (shared[HOST_BACKWARD] * launched + launched_again) + wait_s * (waits[1] + waits[2])
    second = (device**p + host_s**p) ** (1.0 / p)
    return first, second, weight


@njit(cache=False)
def predict(arrays, products, attentions, memory_rates, intra, inter, trainers, shared, out):
    """Seconds of a step of every run.

    Args:
        arrays: operators, collectives, units, parts, runs and axes, see `Fleet`.
        products: [devices, precisions, G_COUNT] curves.
        attentions: [devices, 2, A_COUNT] curves of native and portable kernels.
        memory_rates: [devices] bytes/s.
        intra: [link kinds] share of the line rate inside a host.
        inter: [link kinds] share of the line rate between hosts.
        trainers: [trainers, 10].
        shared: [12].
        out: [runs], written.
    """
    operators, collectives, units, parts, runs, all_axes = arrays
    times = np.zeros((units.shape[0], 3))
    for r in range(runs.shape[0]):
        run, axes = runs[r], all_axes[r]
        trainer, device = trainers[int(run[R_TRAINER])], int(run[R_DEVICE])
        memory_rate = memory_rates[device]
        rate = run[R_INTRA_RATE] * intra[int(run[R_INTRA])]
        node_rate = run[R_NIC_RATE] * inter[int(run[R_INTER])]
        rates = np.array([rate, node_rate])
        attention = attentions[device, int(run[R_PORTABLE])].copy()
        attention[A_FLOPS] *= trainer[ATTENTION_RATE]
        attention[A_BACKWARD] = shared[ATTENTION_BACKWARD]
        for u in range(int(run[R_FIRST_UNIT]), int(run[R_LAST_UNIT])):
            times[u] = unit_times(
                units[u], operators, collectives, axes, run, trainer, shared, products[device], attention,
                memory_rate, rates,
            )  # fmt: skip
        ranks, count = int(run[R_RANKS]), run[R_MICRO_BATCHES]
        zero, virtual = run[R_ZERO], run[R_VIRTUAL]
        size = axes[0, 0] * axes[2, 0]
        nodes, per_node = max(axes[0, 1], axes[2, 1]), axes[0, 2] * axes[2, 2]
        gather_rate = run[R_NIC_RATE] * trainer[GATHER]
        overlap = trainer[GRADIENT]
        stage = np.zeros(ranks)
        last_backward = np.zeros(ranks)
        weights = 0.0
        held = np.zeros(ranks)
        held_zero = np.zeros(ranks)
        reduced = np.zeros(ranks)
        largest = 0.0
        for i in range(int(run[R_FIRST_PART]), int(run[R_LAST_PART])):
            rank, u, often = int(parts[i, 0]) % ranks, int(parts[i, 1]), parts[i, 2]
            forward, backward = times[u, 0], times[u, 1]
            if zero >= 2.0 and size > 1.0:
                data = units[u, 4] * run[R_PARAMETER_BYTES]
                if nodes <= 1.0:
                    gather = collective(ALL_GATHER, size, 1.0, size, data, run, rate, shared, gather_rate)
                else:
                    gather = shared[NODE_LATENCY] * 1e-6 + shared[RING] * 1e-6 * (size - 1.0)
                    gather += (size - 1.0) / size * data / (gather_rate * min(1.0, per_node / run[R_PER_NODE]))
                scatter = gather * run[R_GRADIENT_BYTES] / run[R_PARAMETER_BYTES]
                once = gather if zero >= 3.0 else 0.0
                both = gather + scatter
                forward += (1.0 - overlap) * once + max(0.0, overlap * once - forward)
                backward += (1.0 - overlap) * both + max(0.0, overlap * both - backward)
            stage[rank] += often * (forward + backward)
            last_backward[rank] += often * backward
            weights += often * times[u, 2]
            held[rank] += often * units[u, 4]
            held_zero[rank] += often * units[u, 5]
            reduced[rank] += often * units[u, 6]
            if i + 1 < int(run[R_LAST_PART]) and parts[i + 1, 0] != parts[i, 0]:
                largest = max(largest, units[u, 7])
        held[0] -= run[R_SHARED]
        held_zero[0] -= run[R_SHARED_ZERO]
        reduced[0] -= run[R_SHARED]
        send = 0.0
        if ranks > 1:
            link = min(rate, node_rate / run[R_PER_NODE]) if run[R_CROSSES] > 0.0 else 0.6 * rate
            data = largest / run[R_SCATTERED_SENDS]
            send = trainer[SEND] * 1e-3 + data / link * (1.0 - trainer[SEND_OVERLAP])
        slowest = total = 0.0
        for q in range(ranks):
            exchanges = 0.0
            if ranks > 1:
                # One exchange with each neighbour, both directions at once; virtual stages go round.
                exchanges = virtual if virtual > 1.0 else (1.0 if q in (0, ranks - 1) else 2.0)
            stage[q] += shared[MICRO_BATCH] * 1e-3 + send * exchanges
            total += stage[q]
            slowest = max(slowest, stage[q])
        bubble = (total - slowest) / virtual
        if run[R_ZERO_BUBBLE] == 1.0:
            bubble = max(0.0, total - slowest - 2.0 * weights / ranks * (ranks - 1.0))
        if run[R_ZERO_BUBBLE] == 2.0:
            bubble = 0.0
        end = 0.0
        for q in range(ranks):
            sync = 0.0
            if size > 1.0 and zero < 2.0 and reduced[q] > 0.0:
                data = reduced[q] * run[R_GRADIENT_BYTES]
                sync = collective(ALL_REDUCE, size, nodes, per_node, data, run, rate, shared, node_rate)
                spread = 0.0
                if zero >= 1.0:
                    sync, spread = _zero_one(
                        sync, reduced[q] * run[R_PARAMETER_BYTES], size, nodes, per_node, run, rate, shared, gather_rate
                    )
                sync = sync * (1.0 - overlap) + max(0.0, sync * overlap - last_backward[q])
                sync += spread * (1.0 - 0.8 * overlap)
            update = (held_zero[q] if zero >= 1.0 else held[q]) * shared[OPTIMIZER_BYTES] / memory_rate
            end = max(end, sync + update)
        if run[R_TIED] > 0.0 and ranks > 1:
            link = min(rate, node_rate / run[R_PER_NODE]) if run[R_CROSSES] > 0.0 else rate
            end += run[R_TIED] * run[R_GRADIENT_BYTES] / link
        out[r] = count * slowest + bubble + end + trainer[STEP] * 1e-3


@njit(cache=False)
def _zero_one(reduce, data, size, nodes, per_node, run, rate, shared, gather_rate):
    """ZeRO 1: half of the all-reduce, then the weights gathered from their owners over the group of the states."""
    group = run[R_ZERO_GROUP]
    if 0.0 < group <= run[R_PER_NODE]:
        # States are whole on every host: gradients are reduced over all, weights gathered inside.
        return reduce, collective(ALL_GATHER, group, 1.0, group, data, run, rate, shared, gather_rate)
    if nodes <= 1.0:
        return 0.5 * reduce, collective(ALL_GATHER, size, 1.0, size, data, run, rate, shared, gather_rate)
    share = gather_rate * min(1.0, per_node / run[R_PER_NODE])
    return 0.5 * reduce, shared[RING] * 1e-6 * (size - 1.0) + data / share

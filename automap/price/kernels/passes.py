"""Seconds of one action of every kind on every chunk of a pipeline.

A rank waits for its neighbours, so exchanges between ranks are part of the passes, and nothing is on its way besides.
Units: seconds, bytes.
"""

from __future__ import annotations

import math

from numba import boolean, float64, types, void

from automap.jit import borrowing
from automap.price.kernels.collectives import RAMP_UNIT_S
from automap.price.kernels.cost_records import RANK_COST, SETTINGS, UNIT_COST
from automap.price.kernels.records import ALL_GATHER, ALL_TO_ALL, NUM_COLLECTIVES, REDUCE_SCATTER
from automap.price.kernels.stage_records import LINK
from automap.price.kernels.step_records import PIPELINE, STAGE_ARRAYS, STEP_WORKSPACE
from automap.schedule import BACKWARD, FORWARD, INPUT, WEIGHT


@borrowing(float64(float64, LINK, float64, float64), inner=True)
def gather_s(size, link, data, calls):
    """Time of all-gathers of `data` bytes together, in a number of calls, at the rate that ZeRO's gathers reach."""
    if size <= 1.0 or data <= 0.0:
        return 0.0
    x = (size - 1.0) / size * data / link.gather_bytes_per_s
    latency, ramp = link.latency_s[ALL_GATHER], link.ramp[ALL_GATHER]
    return calls * latency + x + ramp * math.sqrt(calls * x * RAMP_UNIT_S)


@borrowing(
    types.UniTuple(float64, 2)(
        types.UniTuple(float64[::1], 2), float64, float64[::1], LINK[::1], boolean[::1], SETTINGS
    ),
    inner=True,
)
def _zero_traffic_s(elements, calls, axes, links, zero_axes, settings):
    """Seconds of what ZeRO 2 and 3 move for one unit and micro-batch: gathers of parameters, scatters of gradients.

    Args:
        elements: parameters that are gathered and gradients that are scattered over each axis, both [axes].
        calls: calls that gather the parameters; their gradients are scattered in one.
        axes: [axes] ranks of each mesh axis.
        links: [axes] link of each mesh axis.
        zero_axes: [axes] whether ZeRO shards over the axis.
    """
    scatter = 0.0
    gather = 0.0
    gathered, scattered = elements
    for a in range(axes.shape[0]):
        if zero_axes[a]:
            scatter += gather_s(axes[a], links[a], scattered[a] * settings.sent_gradient_bytes, min(calls, 1.0))
            if settings.zero_stage >= 3.0:
                gather += gather_s(axes[a], links[a], gathered[a] * settings.parameter_bytes, calls)
    return gather, scatter


@borrowing(types.UniTuple(float64, 2)(types.UniTuple(float64, 2), float64, float64, SETTINGS), inner=True)
def _shown_s(traffic, forward, backward, settings):
    """Seconds by which ZeRO's traffic, gathers and scatters, makes a forward and a backward pass longer."""
    gather, scatter = traffic
    hidden = settings.gather_overlap
    first = gather * (1.0 - hidden) + max(0.0, gather * hidden - forward)
    hidden = settings.gradient_overlap
    both = gather + scatter
    second = both * (1.0 - hidden) + max(0.0, both * hidden - backward)
    return first, second


@borrowing(void(UNIT_COST[::1], PIPELINE, STAGE_ARRAYS, SETTINGS, STEP_WORKSPACE, RANK_COST[::1]))
def passes(costs, pipeline, stages, settings, workspace, result):
    """Writes the seconds of one action of every kind on every chunk.

    Args:
        costs: [rows] unit costs.
        pipeline: what runs where; `counts` of the workspace says how often.
        workspace: `seconds`, `exchange` and `last_backward` are written.
        result: [ranks] what the passes consist of is added.
    """
    num_ranks, num_chunks, parts = pipeline.num_ranks, pipeline.num_chunks, pipeline.parts
    seconds, exchange, counts = workspace.seconds, workspace.exchange, workspace.counts
    num_micro_batches = pipeline.order.num_micro_batches
    exchange[:num_chunks] = 0.0
    seconds[:] = 0.0
    workspace.last_backward[:num_ranks] = 0.0
    gather_kind = ALL_GATHER if settings.zero_stage >= 3.0 else REDUCE_SCATTER
    for i in range(parts.shape[0]):
        chunk = parts[i].chunk
        cost = costs[parts[i].row]
        times = float64(parts[i].times)
        rank = chunk % num_ranks
        mine = result[rank]
        spent_forward = cost.forward_s + cost.forward_host_s
        spent_backward = cost.backward_s + cost.recompute_s + cost.backward_host_s
        spent_input = cost.input_s + cost.recompute_s + cost.input_host_s
        spent_weight = cost.weight_s + cost.weight_host_s
        mine.compute_s += times * (
            num_micro_batches * spent_forward
            + counts[BACKWARD, chunk] * spent_backward
            + counts[INPUT, chunk] * (spent_input + spent_weight)
        )
        for c in range(NUM_COLLECTIVES):
            exposed = 1.0 - (settings.exchange_overlap if c == ALL_TO_ALL else settings.tensor_overlap)
            first = exposed * cost.forward_comm_s[c]
            second = exposed * (cost.backward_comm_s[c] + cost.recompute_comm_s[c])
            spent_forward += first
            spent_backward += second
            spent_input += second
            mine.comm_s[c] += times * num_micro_batches * (first + second)
        seconds[FORWARD, chunk] += times * spent_forward
        seconds[BACKWARD, chunk] += times * spent_backward
        seconds[INPUT, chunk] += times * spent_input
        seconds[WEIGHT, chunk] += times * spent_weight
        if settings.zero_stage >= 2.0:
            calls = cost.num_parameters if settings.gathers_singly > 0.0 else 1.0
            at = pipeline.stages[rank]
            elements = cost.gathered[:], cost.scattered[:]
            traffic = _zero_traffic_s(elements, calls, stages.axes[at], stages.links[at], pipeline.zero_axes, settings)
            one, two = _shown_s(traffic, spent_forward, spent_backward, settings)
            seconds[FORWARD, chunk] += times * one
            seconds[BACKWARD, chunk] += times * two
            seconds[INPUT, chunk] += times * two
            mine.comm_s[gather_kind] += times * num_micro_batches * (one + two)
        if chunk < num_chunks - 1 and (i == parts.shape[0] - 1 or parts[i + 1].chunk != chunk):
            shown = 1.0 - settings.send_overlap
            rate = stages.send_bytes_per_s[pipeline.boundaries[rank]]
            exchange[chunk] = settings.send_s + shown * cost.boundary_bytes / rate
    if settings.zero_stage >= 2.0:
        _add_tied_traffic(pipeline, stages, settings, workspace, result)
    _add_exchanges(pipeline, settings, workspace, result)


@borrowing(void(PIPELINE, STAGE_ARRAYS, SETTINGS, STEP_WORKSPACE, RANK_COST[::1]), inner=True)
def _add_tied_traffic(pipeline, stages, settings, workspace, result):
    """Adds what ZeRO moves of parameters that two units of a rank read with unlike placements; see `passes`.

    Such units gather all that each of them requires; bytes alone, for a unit has paid for its calls, and in the first
    chunk of the rank, for it does not matter where.
    """
    gather_kind = ALL_GATHER if settings.zero_stage >= 3.0 else REDUCE_SCATTER
    for t in range(pipeline.tied.shape[0]):
        tie = pipeline.tied[t]
        rank = tie.rank
        if rank == tie.other_rank:
            at = pipeline.stages[rank]
            elements = tie.gathered_again[:], tie.scattered_again[:]
            traffic = _zero_traffic_s(elements, 0.0, stages.axes[at], stages.links[at], pipeline.zero_axes, settings)
            one, two = _shown_s(traffic, math.inf, math.inf, settings)
            workspace.seconds[FORWARD, rank] += one
            workspace.seconds[BACKWARD, rank] += two
            workspace.seconds[INPUT, rank] += two
            result[rank].comm_s[gather_kind] += pipeline.order.num_micro_batches * (one + two)


@borrowing(void(PIPELINE, SETTINGS, STEP_WORKSPACE, RANK_COST[::1]), inner=True)
def _add_exchanges(pipeline, settings, workspace, result):
    """Adds exchanges between ranks, and the host's time of a micro-batch, to the passes; see `passes`."""
    num_ranks, num_chunks, num_micro_batches = pipeline.num_ranks, pipeline.num_chunks, pipeline.order.num_micro_batches
    seconds, exchange = workspace.seconds, workspace.exchange
    per_rank = float64(num_chunks // num_ranks)
    for chunk in range(num_chunks):
        rank = chunk % num_ranks
        workspace.last_backward[rank] += seconds[BACKWARD, chunk]
        # One exchange with each neighbour, both directions at once; virtual stages go round, one a chunk.
        before = exchange[chunk - 1] if chunk > 0 else 0.0
        shown = before + exchange[chunk] if num_chunks == num_ranks else max(before, exchange[chunk])
        result[rank].exchange_s += num_micro_batches * shown
        result[rank].overhead_s += num_micro_batches * settings.micro_batch_s / per_rank
        seconds[FORWARD, chunk] += 0.5 * shown + settings.micro_batch_s / per_rank
        seconds[BACKWARD, chunk] += 0.5 * shown
        seconds[INPUT, chunk] += 0.5 * shown

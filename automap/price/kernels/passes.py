"""Seconds of one action of every kind on every chunk of a pipeline.

Exchanges between ranks are part of the passes, since a rank waits for its neighbours; no further time is priced for
messages on their way. Units: seconds, bytes.
"""

from __future__ import annotations

import math

from numba import boolean, float64, int64, types, void

from automap.jit import borrowing
from automap.price.kernels.collectives import RAMP_UNIT_S
from automap.price.kernels.cost_records import RANK_COST, SETTINGS, UNIT_COST, UNIT_IN_STEP
from automap.price.kernels.memory import add_to_moment, makes_gradients, state_bytes, working_bytes
from automap.price.kernels.pipeline import count_actions
from automap.price.kernels.records import ALL_GATHER, NUM_COLLECTIVES
from automap.price.kernels.stage_records import LINK
from automap.price.kernels.step_records import PIPELINE, STAGE_ARRAYS, STEP_WORKSPACE
from automap.schedule import BACKWARD, FORWARD, INPUT, WEIGHT


@borrowing(float64(float64, LINK, float64, float64), inner=True)
def gather_s(size, link, data, calls):
    """Seconds of all-gathers of `data` bytes in total, in a number of calls, at the rate that ZeRO's gathers reach."""
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
    """Seconds of ZeRO's collectives for one unit and micro-batch, if nothing hides them.

    Args:
        elements: parameters that are gathered and gradients that are scattered over each axis, both [axes].
        calls: number of calls that gather the parameters; one call scatters the gradients.
        axes: [axes] ranks of each mesh axis.
        links: [axes] link of each mesh axis.
        zero_axes: [axes] whether ZeRO shards over the axis.
        settings: ZeRO 2 or 3.

    Returns:
        Seconds to gather parameters (0 under ZeRO 2) and to scatter gradients.
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


@borrowing(float64(float64, float64, float64), inner=True)
def _rest_s(traffic, hidden, beside):
    """Exposed seconds of traffic beside a pass of `beside` seconds that can hide the share `hidden` of it."""
    return traffic * (1.0 - hidden) + max(0.0, traffic * hidden - beside)


@borrowing(types.UniTuple(float64, 4)(types.UniTuple(float64, 2), types.UniTuple(float64, 4), SETTINGS), inner=True)
def _shown_s(traffic, beside, settings):
    """Seconds by which the collectives of ZeRO make passes longer, in the order of `beside`.

    Where the backward pass runs in two parts, the part for gradients of inputs gathers the weights, and the part for
    gradients of weights scatters these gradients.

    Args:
        traffic: seconds to gather and to scatter, see `_zero_traffic_s`.
        beside: seconds of the forward pass, of the backward pass, and of its parts for inputs and for weights.
        settings: shares of the traffic that may be hidden.
    """
    gather, scatter = traffic
    hidden = settings.gradient_overlap
    return (
        _rest_s(gather, settings.gather_overlap, beside[0]),
        _rest_s(gather + scatter, hidden, beside[1]),
        _rest_s(gather, hidden, beside[2]),
        _rest_s(scatter, hidden, beside[3]),
    )


@borrowing(void(PIPELINE, STAGE_ARRAYS, SETTINGS, STEP_WORKSPACE, RANK_COST[::1]), inner=True)
def _add_tied_traffic(pipeline, stages, settings, workspace, result):
    """Adds the traffic of ZeRO for parameters that two units of a rank read with unlike placements, see `passes`.

    Each of these units gathers the parameter as all of them together need it. Only the further bytes are added, since
    the price of a unit includes its calls. They are added to the first chunk of the rank; the choice does not matter.
    """
    for t in range(pipeline.tied.shape[0]):
        tie = pipeline.tied[t]
        rank = tie.rank
        if rank == tie.other_rank:
            at = pipeline.stages[rank]
            elements = tie.gathered_again[:], tie.scattered_again[:]
            traffic = _zero_traffic_s(elements, 0.0, stages.axes[at], stages.links[at], pipeline.zero_axes, settings)
            nothing = (math.inf, math.inf, math.inf, math.inf)
            shown = _shown_s(traffic, nothing, settings)
            workspace.seconds[FORWARD, rank] += shown[0]
            workspace.seconds[BACKWARD, rank] += shown[1]
            workspace.seconds[INPUT, rank] += shown[2]
            workspace.seconds[WEIGHT, rank] += shown[3]
            result[rank].zero_s += pipeline.order.num_micro_batches * (shown[0] + shown[1])


@borrowing(void(PIPELINE, SETTINGS, STEP_WORKSPACE, RANK_COST[::1]), inner=True)
def _add_exchanges(pipeline, settings, workspace, result):
    """Adds exchanges between ranks, and the host time of each micro-batch, to the passes, see `passes`."""
    num_ranks, num_chunks, num_micro_batches = pipeline.num_ranks, pipeline.num_chunks, pipeline.order.num_micro_batches
    seconds, exchange = workspace.seconds, workspace.exchange
    per_rank = float64(num_chunks // num_ranks)
    for chunk in range(num_chunks):
        rank = chunk % num_ranks
        workspace.last_backward[rank] += seconds[BACKWARD, chunk]
        # A rank exchanges with both neighbours, one after the other, and in both directions at once. With virtual
        # stages it sends to the next rank while it receives from the one before.
        before = exchange[chunk - 1] if chunk > 0 else 0.0
        shown = before + exchange[chunk] if num_chunks == num_ranks else max(before, exchange[chunk])
        result[rank].exchange_s += num_micro_batches * shown
        result[rank].overhead_s += num_micro_batches * settings.micro_batch_s / per_rank
        seconds[FORWARD, chunk] += 0.5 * shown + settings.micro_batch_s / per_rank
        seconds[BACKWARD, chunk] += 0.5 * shown
        seconds[INPUT, chunk] += 0.5 * shown


@borrowing(void(UNIT_COST, SETTINGS, UNIT_IN_STEP), inner=True)
def write_unit(cost, settings, unit):
    """Writes the `UnitInStepRow` of a unit cost."""
    spent_forward = cost.forward_s + cost.forward_host_s
    spent_backward = cost.backward_s + cost.recompute_s + cost.backward_host_s
    spent_input = cost.input_s + cost.recompute_s + cost.input_host_s
    for c in range(NUM_COLLECTIVES):
        second = cost.backward_comm_s[c] + cost.recompute_comm_s[c]
        spent_forward += cost.forward_comm_s[c]
        spent_backward += second
        spent_input += second
    unit.forward_s, unit.backward_s, unit.input_s = spent_forward, spent_backward, spent_input
    unit.weight_s = cost.weight_s + cost.weight_host_s
    unit.saved_bytes, unit.live_bytes, unit.workspace_bytes = cost.saved_bytes, cost.live_bytes, cost.workspace_bytes
    unit.boundary_bytes, unit.result_bytes = cost.boundary_bytes, cost.result_bytes
    unit.num_parameters = cost.num_parameters
    unit.parameters, unit.zero_parameters = cost.parameters, cost.zero_parameters
    unit.frozen, unit.zero_frozen = cost.frozen, cost.zero_frozen
    for a in range(cost.reduced.shape[0]):
        unit.reduced[a], unit.gathered[a], unit.scattered[a] = cost.reduced[a], cost.gathered[a], cost.scattered[a]
        unit.gathered_frozen[a] = cost.gathered_frozen[a]


@borrowing(types.UniTuple(float64, 4)(UNIT_IN_STEP, int64, PIPELINE, STAGE_ARRAYS, SETTINGS), inner=True)
def zero_s(unit, rank, pipeline, stages, settings):
    """Seconds by which ZeRO makes each pass of a unit longer: forward, backward, and the parts of the latter for inputs
    and for weights."""
    if settings.zero_stage < 2.0:
        return 0.0, 0.0, 0.0, 0.0
    calls = unit.num_parameters if settings.gathers_singly > 0.0 else 1.0
    at = pipeline.stages[rank]
    elements = unit.gathered[:], unit.scattered[:]
    traffic = _zero_traffic_s(elements, calls, stages.axes[at], stages.links[at], pipeline.zero_axes, settings)
    beside = (unit.forward_s, unit.backward_s, unit.input_s, unit.weight_s)
    shown = _shown_s(traffic, beside, settings)
    if unit.frozen >= unit.parameters and unit.backward_s <= 0.0:
        # A unit without a backward pass gathers nothing for it.
        return shown[0], 0.0, 0.0, 0.0
    return shown


@borrowing(void(PIPELINE, STEP_WORKSPACE, RANK_COST[::1]), inner=True)
def begin_passes(pipeline, workspace, result):
    """Sets the sums of `add_unit` and `end_passes` to zero, and counts the actions."""
    num_ranks, num_chunks = pipeline.num_ranks, pipeline.num_chunks
    count_actions(pipeline.order, num_chunks, workspace.counts)
    for chunk in range(num_chunks):
        workspace.exchange[chunk] = workspace.saved[chunk] = 0.0
        moment = workspace.moments[chunk]
        moment.saved = moment.activations = moment.gradients = moment.working = 0.0
        for word in range(workspace.seconds.shape[0]):
            workspace.seconds[word, chunk] = 0.0
    for rank in range(num_ranks):
        mine, total = result[rank], workspace.totals[rank]
        mine.compute_s = mine.overhead_s = mine.exchange_s = mine.zero_s = 0.0
        for c in range(NUM_COLLECTIVES):
            mine.comm_s[c] = 0.0
        workspace.last_backward[rank] = 0.0
        total.crossing_bytes = total.parameters = total.zero_parameters = 0.0
        total.frozen = total.zero_frozen = 0.0
        for a in range(pipeline.zero_axes.shape[0]):
            total.reduced[a] = total.gathered[a] = total.gathered_frozen[a] = total.scattered[a] = 0.0


@borrowing(
    void(UNIT_IN_STEP, types.UniTuple(float64, 4), int64, PIPELINE, STAGE_ARRAYS, SETTINGS, STEP_WORKSPACE),
    inner=True,
)
def add_unit(unit, zero, number, pipeline, stages, settings, workspace):
    """Adds the units of a part to the passes of their chunk and to the sums of their rank.

    Args:
        unit: the `UnitInStepRow` of one of the units, which are equal.
        zero: its `zero_s`.
        number: number of the part in `pipeline.parts`.
        workspace: `seconds`, `exchange`, `saved`, `moments` and `totals` are added to.
    """
    part, num_ranks, seconds = pipeline.parts[number], pipeline.num_ranks, workspace.seconds
    chunk, times = part.chunk, float64(part.times)
    rank = chunk % num_ranks
    total = workspace.totals[rank]
    seconds[FORWARD, chunk] += times * unit.forward_s
    seconds[BACKWARD, chunk] += times * unit.backward_s
    seconds[INPUT, chunk] += times * unit.input_s
    seconds[WEIGHT, chunk] += times * unit.weight_s
    if settings.zero_stage >= 2.0:
        seconds[FORWARD, chunk] += times * zero[0]
        seconds[BACKWARD, chunk] += times * zero[1]
        seconds[INPUT, chunk] += times * zero[2]
        seconds[WEIGHT, chunk] += times * zero[3]
    is_last = number == pipeline.parts.shape[0] - 1 or pipeline.parts[number + 1].chunk != chunk
    if is_last and chunk < pipeline.num_chunks - 1:
        shown = 1.0 - settings.send_overlap
        rate = stages.send_bytes_per_s[pipeline.boundaries[rank]]
        workspace.exchange[chunk] = settings.send_s + shown * unit.boundary_bytes / rate
        following = workspace.totals[(chunk + 1) % num_ranks]
        total.crossing_bytes = max(total.crossing_bytes, unit.boundary_bytes)
        following.crossing_bytes = max(following.crossing_bytes, unit.boundary_bytes)
    workspace.saved[chunk] += times * unit.saved_bytes
    live_bytes = unit.result_bytes + (unit.live_bytes if part.is_recomputed == 1 else 0.0)
    of_unit = unit.parameters, unit.parameters - unit.frozen, unit.zero_parameters
    working = working_bytes(unit.workspace_bytes, of_unit, settings)
    if settings.pairs_passes == 1.0 and number < pipeline.parts.shape[0] - 1:
        # The forward pass beside it has saved as many units as this backward pass has freed, and one more. When the
        # backward pass of the last unit, with the loss, runs, no forward pass has begun.
        working += unit.saved_bytes
    held = unit.saved_bytes, live_bytes, working
    makes = makes_gradients(pipeline.order.num_micro_batches, settings)
    moment, gradient_bytes = workspace.moments[rank if makes else chunk], 0.0
    if makes:
        frozen = unit.frozen, unit.zero_frozen
        gradient_bytes = state_bytes((unit.parameters, unit.zero_parameters), frozen, settings)[1]
    add_to_moment(held, gradient_bytes, times, moment)
    if is_last and part.is_recomputed == 0:
        # The next unit is on another rank, so this rank keeps the tensor too.
        moment.saved += unit.result_bytes
        workspace.saved[chunk] += unit.result_bytes
    total.parameters += times * unit.parameters
    total.zero_parameters += times * unit.zero_parameters
    total.frozen += times * unit.frozen
    total.zero_frozen += times * unit.zero_frozen
    for a in range(pipeline.zero_axes.shape[0]):
        total.reduced[a] += times * unit.reduced[a]
        total.gathered[a] += times * unit.gathered[a]
        total.gathered_frozen[a] += times * unit.gathered_frozen[a]
        total.scattered[a] += times * unit.scattered[a]


@borrowing(void(PIPELINE, STAGE_ARRAYS, SETTINGS, STEP_WORKSPACE, RANK_COST[::1]), inner=True)
def end_passes(pipeline, stages, settings, workspace, result):
    """Adds the times that belong to no single unit to the passes, after all units have been added."""
    if settings.zero_stage >= 2.0:
        _add_tied_traffic(pipeline, stages, settings, workspace, result)
    _add_exchanges(pipeline, settings, workspace, result)


@borrowing(
    void(UNIT_COST, types.UniTuple(float64, 4), int64, PIPELINE, SETTINGS, STEP_WORKSPACE, RANK_COST), inner=True
)
def _report(cost, zero, number, pipeline, settings, workspace, mine):
    """Adds computation and collectives in the passes of a part to the result of its rank."""
    chunk, times = pipeline.parts[number].chunk, float64(pipeline.parts[number].times)
    num_micro_batches, counts = pipeline.order.num_micro_batches, workspace.counts
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
        both = cost.forward_comm_s[c] + cost.backward_comm_s[c] + cost.recompute_comm_s[c]
        mine.comm_s[c] += times * num_micro_batches * both
    if settings.zero_stage >= 2.0:
        shown = num_micro_batches * zero[0] + counts[BACKWARD, chunk] * zero[1]
        mine.zero_s += times * (shown + counts[INPUT, chunk] * (zero[2] + zero[3]))


@borrowing(void(UNIT_COST[::1], PIPELINE, STAGE_ARRAYS, SETTINGS, STEP_WORKSPACE, RANK_COST[::1]))
def passes(costs, pipeline, stages, settings, workspace, result):
    """Writes the seconds of one action of every kind on every chunk, and the sums over the units of each rank.

    Args:
        costs: [rows] unit costs.
        pipeline: the units of each chunk, and the order of the actions.
        stages: the stages that the ranks run on.
        settings: trainer, precision and ZeRO.
        workspace: `counts`, `seconds`, `exchange`, `last_backward`, `saved`, `moments` and `totals` are written.
        result: [ranks] seconds of computation, collectives, exchanges and host overhead are written.
    """
    unit = workspace.unit[0]
    begin_passes(pipeline, workspace, result)
    for number in range(pipeline.parts.shape[0]):
        cost, rank = costs[pipeline.parts[number].row], pipeline.parts[number].chunk % pipeline.num_ranks
        write_unit(cost, settings, unit)
        zero = zero_s(unit, rank, pipeline, stages, settings)
        add_unit(unit, zero, number, pipeline, stages, settings, workspace)
        _report(cost, zero, number, pipeline, settings, workspace, result[rank])
    end_passes(pipeline, stages, settings, workspace, result)

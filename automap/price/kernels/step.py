"""From the costs of units to the time and memory of a step, for plans and for partial plans.

The time of a rank is that of its chunks in the schedule, plus the exposed part of its gradient reduction, plus that of
its optimizer. The step ends when the slowest rank is done. Units: seconds, bytes.
"""

from __future__ import annotations

import math

from numba import boolean, float64, int64, void

from automap.jit import borrowing
from automap.price.kernels.collectives import collective_s
from automap.price.kernels.cost_records import RANK_COST, SETTINGS, UNIT_COST
from automap.price.kernels.memory import (
    bucket_bytes,
    in_flight,
    makes_gradients,
    standing_bytes,
    state_bytes,
    update_bytes,
)
from automap.price.kernels.passes import gather_s, passes
from automap.price.kernels.pipeline import run_schedule
from automap.price.kernels.records import ALL_REDUCE
from automap.price.kernels.step_records import PIPELINE, STAGE_ARRAYS, STEP_WORKSPACE
from automap.price.kernels.tied_parameters import exchange_s
from automap.schedule import BACKWARD, FORWARD, INPUT, WEIGHT

SPREAD_OVERLAP = 0.8
"""Hidden share of the gathers of weights after the optimizer, under ZeRO 1 and 2, over the share of the gradient
reduction that may be hidden. Fitted to published runs."""


@borrowing(void(PIPELINE, STEP_WORKSPACE), inner=True)
def _bound_schedule(pipeline, workspace):
    """Lower bounds, in closed form, of the times and peaks of `run_schedule`, for all kinds but an explicit order.

    A rank starts when the first micro-batch has passed through the ranks before it, and then does all of its work. The
    first rank is done when, after that, the last gradient has come back through the ranks before. Gradients of weights
    may be made later.

    Args:
        workspace: with `counts`, `seconds`, `saved` and `busy`; `ends` and `peak` are written.
    """
    num_ranks, num_chunks = pipeline.num_ranks, pipeline.num_chunks
    counts, seconds = workspace.counts, workspace.seconds
    busy, ends, peak = workspace.busy, workspace.ends, workspace.peak
    backward = INPUT if counts[INPUT, 0] > 0.0 else BACKWARD
    fill = 0.0
    drain = 0.0
    ends[:num_ranks] = 0.0
    for rank in range(num_ranks):
        late = 0.0
        peak[rank] = 0.0
        for chunk in range(rank, num_chunks, num_ranks):
            peak[rank] += workspace.saved[chunk]
            late += counts[WEIGHT, chunk] * seconds[WEIGHT, chunk]
        peak[rank] *= in_flight(rank, num_ranks, num_chunks, pipeline.order.num_micro_batches)
        ends[rank] = max(ends[rank], fill + busy[rank])
        if rank > 0:
            ends[0] = max(ends[0], fill + (busy[rank] - late) + drain)
        fill += seconds[FORWARD, rank]
        drain += seconds[backward, rank]
    for rank in range(num_ranks):
        ends[rank] = min(ends[rank], max(ends[0], busy[rank]))


@borrowing(void(PIPELINE, STEP_WORKSPACE), inner=True)
def _untie(pipeline, workspace):
    """Subtracts tied parameters that several units of a rank read from its sums, so that each counts once."""
    for t in range(pipeline.tied.shape[0]):
        tie = pipeline.tied[t]
        if tie.rank == tie.other_rank:
            total, excess = workspace.totals[tie.rank], tie.excess
            total.parameters -= excess.parameters
            total.zero_parameters -= excess.zero_parameters
            total.frozen -= excess.frozen
            total.zero_frozen -= excess.zero_frozen
            for a in range(pipeline.zero_axes.shape[0]):
                total.reduced[a] = max(0.0, total.reduced[a] - excess.reduced[a])
                total.gathered[a] = max(0.0, total.gathered[a] - excess.gathered[a])
                total.gathered_frozen[a] = max(0.0, total.gathered_frozen[a] - excess.gathered_frozen[a])
                total.scattered[a] = max(0.0, total.scattered[a] - excess.scattered[a])


@borrowing(void(PIPELINE, STAGE_ARRAYS, SETTINGS, STEP_WORKSPACE, RANK_COST[::1]), inner=True)
def _add_tied(pipeline, stages, settings, workspace, result):
    """Adds the all-reduces of the gradients of parameters that several ranks hold. They are exposed."""
    tied, holds = pipeline.tied, workspace.holds
    links = (stages.send_latency_s, stages.send_bytes_per_s)
    for first in range(tied.shape[0]):
        if tied[first].first != first:
            continue
        size, elements, following = 0.0, 0.0, first
        holds[: pipeline.num_ranks] = False
        while following < tied.shape[0] and tied[following].first == first:
            tie = tied[following]
            if tie.rank != tie.other_rank:
                for rank in range(pipeline.num_ranks):
                    if not holds[rank] and rank in (tie.rank, tie.other_rank):
                        holds[rank] = True
                        size += 1.0
                elements = max(elements, tie.exchanged)
            following += 1
        if elements > 0.0 and size > 1.0:
            data = elements * settings.sent_gradient_bytes
            seconds = exchange_s(size, data, holds[: pipeline.num_ranks], pipeline.boundaries, links)
            for rank in range(pipeline.num_ranks):
                if holds[rank]:
                    result[rank].sync_s += seconds


@borrowing(float64(int64, PIPELINE, STAGE_ARRAYS, SETTINGS, STEP_WORKSPACE), inner=True)
def _sync_s(rank, pipeline, stages, settings, workspace):
    """Exposed seconds of the reduction of a rank's gradients, and of the gathers after its optimizer."""
    at, zero_stage, total = pipeline.stages[rank], settings.zero_stage, workspace.totals[rank]
    axes, links = stages.axes[at], stages.links[at]
    sync = 0.0
    spread = 0.0
    for a in range(axes.shape[0]):
        data = (total.scattered[a] if zero_stage >= 1.0 else total.reduced[a]) * settings.sent_gradient_bytes
        whole = collective_s(ALL_REDUCE, axes[a], links[a], data)
        if zero_stage < 1.0 or not pipeline.zero_axes[a]:
            sync += whole
        elif zero_stage < 2.0:
            sync += 0.5 * whole
        if zero_stage < 3.0 and zero_stage >= 1.0:
            # Each rank has updated its shard alone, so all updated parameters are gathered.
            changed = total.gathered[a] - total.gathered_frozen[a]
            spread += gather_s(axes[a], links[a], changed * settings.parameter_bytes, 1.0)
    hidden = settings.gradient_overlap
    # Only the backward pass of the last micro-batch can hide the reduction.
    sync = sync * (1.0 - hidden) + max(0.0, sync * hidden - workspace.last_backward[rank])
    return sync + spread * (1.0 - SPREAD_OVERLAP * hidden)


@borrowing(void(int64, PIPELINE, float64[::1], SETTINGS, STEP_WORKSPACE, RANK_COST), inner=True)
def _write_memory(rank, pipeline, axes, settings, workspace, result):
    """Writes the memory of a rank at its fullest moment.

    This moment is either in the passes of a micro-batch, when most activations are saved, or during the update of the
    optimizer. Of several chunks, that one counts which needs most memory beyond the activations that it has saved.
    """
    total, num_micro_batches, chosen = workspace.totals[rank], pipeline.order.num_micro_batches, rank
    every, frozen = (total.parameters, total.zero_parameters), (total.frozen, total.zero_frozen)
    parameters, whole, optimizer = state_bytes(every, frozen, settings)
    gradients = whole
    if makes_gradients(num_micro_batches, settings):
        gradients = workspace.moments[rank].gradients
    else:
        most = -math.inf
        for chunk in range(rank, pipeline.num_chunks, pipeline.num_ranks):
            moment = workspace.moments[chunk]
            beyond = moment.activations - moment.saved + moment.working
            if beyond > most:
                chosen, most = chunk, beyond
    moment = workspace.moments[chosen]
    activations, working = max(0.0, workspace.peak[rank] + (moment.activations - moment.saved)), moment.working
    updating = update_bytes(every, frozen, settings)
    if whole + updating > gradients + activations + working:
        gradients, activations, working = whole, 0.0, updating
    replicas = 1.0
    for a in range(axes.shape[0] - 1):
        replicas *= axes[a]
    working += bucket_bytes(replicas, total.parameters - total.frozen, settings)
    used = parameters + gradients + optimizer + activations + working
    standing = standing_bytes(total.crossing_bytes, pipeline.num_ranks, num_micro_batches, settings)
    result.parameter_bytes = parameters
    result.gradient_bytes = gradients
    result.optimizer_bytes = optimizer
    result.activation_bytes = activations
    result.buffer_bytes = working + settings.unused_share * used + standing


@borrowing(void(PIPELINE, STAGE_ARRAYS, SETTINGS, boolean, STEP_WORKSPACE, RANK_COST[::1]), inner=True, apart=True)
def end_step(pipeline, stages, settings, exact, workspace, result):
    """Writes time and memory of every rank from the passes of its chunks and the sums over its units; arguments as for
    `step`."""
    num_ranks, num_chunks = pipeline.num_ranks, pipeline.num_chunks
    counts, seconds, busy = workspace.counts, workspace.seconds, workspace.busy[:num_ranks]
    ends, peak = workspace.ends[:num_ranks], workspace.peak[:num_ranks]
    _untie(pipeline, workspace)
    for rank in range(num_ranks):
        busy[rank] = 0.0
    for chunk in range(num_chunks):
        workspace.saved[chunk] = math.ceil(workspace.saved[chunk])
        for word in range(4):
            busy[chunk % num_ranks] += counts[word, chunk] * seconds[word, chunk]
    if exact:
        saved, send = workspace.saved[:num_chunks], workspace.send[:num_chunks]
        run_schedule(pipeline.order, seconds, send, saved, busy, ends, peak)
    else:
        _bound_schedule(pipeline, workspace)
    for rank in range(num_ranks):
        result[rank].sync_s = _sync_s(rank, pipeline, stages, settings, workspace)
    _add_tied(pipeline, stages, settings, workspace, result)
    for rank in range(num_ranks):
        mine, total, at = result[rank], workspace.totals[rank], pipeline.stages[rank]
        state = total.parameters - total.frozen
        if settings.zero_stage >= 1.0:
            state = total.zero_parameters - total.zero_frozen
        mine.bubble_s = max(0.0, ends[rank] - busy[rank])
        mine.optimizer_s = state * settings.update_bytes / stages.hardware[at].bytes_per_s
        mine.overhead_s += settings.step_s
        mine.end_s = ends[rank] + mine.sync_s + mine.optimizer_s + settings.step_s
        mine.capacity_bytes = stages.capacity[at]
        _write_memory(rank, pipeline, stages.axes[at], settings, workspace, mine)


@borrowing(void(UNIT_COST[::1], PIPELINE, STAGE_ARRAYS, SETTINGS, boolean, STEP_WORKSPACE, RANK_COST[::1]), apart=True)
def step(costs, pipeline, stages, settings, exact, workspace, result):
    """Writes time and memory of every rank.

    Args:
        costs: [rows] results of `unit_cost`.
        pipeline: the units of each chunk, and the order of the actions.
        stages: the stages that the ranks run on.
        settings: trainer, precision and ZeRO.
        exact: whether the schedule is simulated; otherwise its time is a lower bound in closed form.
        workspace: scratch.
        result: [ranks] written.
    """
    passes(costs, pipeline, stages, settings, workspace, result)
    end_step(pipeline, stages, settings, exact, workspace, result)


@borrowing(float64(RANK_COST[::1]))
def step_time_s(result):
    """Seconds of a step of these ranks, [ranks]: it ends with the slowest one."""
    slowest = 0.0
    for rank in range(result.shape[0]):
        slowest = max(slowest, result[rank].end_s)
    return slowest


@borrowing(float64(RANK_COST), inner=True)
def rank_overflow(result):
    """Bytes by which a rank exceeds its memory, as a share of that memory; at most 0 when everything fits."""
    used = 0.0
    used += result.parameter_bytes
    used += result.gradient_bytes
    used += result.optimizer_bytes
    used += result.activation_bytes
    used += result.buffer_bytes
    return used / max(result.capacity_bytes, 1.0) - 1.0


@borrowing(float64(RANK_COST[::1]))
def overflow(result):
    """Largest `rank_overflow` of all ranks, [ranks]."""
    worst = -1.0
    for rank in range(result.shape[0]):
        worst = max(worst, rank_overflow(result[rank]))
    return worst

"""From the costs of units to the time and memory of a step: one compiled function for plans and for prefixes.

A rank's time is that of its chunks in the schedule, then the part of its gradient reduction that the backward pass
does not hide, then its optimizer; the step ends with the slowest rank. Units: seconds, bytes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import boolean, float64, int64, types, void

from automap.jit import borrowing, kernel
from automap.price.kernels.collectives import (
    KIND_COUNT,
    RAMP_UNIT_S,
    V_GATHER_BYTES_PER_S,
    V_LATENCY_S,
    V_RAMP,
    collective_s,
)
from automap.price.kernels.columns import (
    C_BACKWARD,
    C_BACKWARD_COMM,
    C_BACKWARD_HOST,
    C_BOUNDARY,
    C_COUNT,
    C_FORWARD,
    C_FORWARD_COMM,
    C_FORWARD_HOST,
    C_GATHER,
    C_INPUT,
    C_INPUT_HOST,
    C_LIVE,
    C_PARAMETERS,
    C_RECOMPUTE,
    C_RECOMPUTE_COMM,
    C_REDUCE,
    C_SAVED,
    C_SCATTER,
    C_TENSORS,
    C_WEIGHT,
    C_WEIGHT_HOST,
    C_WORKSPACE,
    C_ZERO,
    H_BANDWIDTH,
)
from automap.price.kernels.pipeline import count_actions, run_schedule
from automap.price.kernels.tied_parameters import (
    E_AXES,
    E_GATHER,
    E_HELD,
    E_REDUCE,
    E_SCATTER,
    E_ZERO,
    TIE_EXCHANGED,
    TIE_HAS,
    TIE_ONE,
    TIE_OTHER,
)
from automap.price.tables import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from automap.schedule import A_COUNT, BACKWARD, FORWARD, INPUT, WEIGHT

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Slots of the settings vector.
# P_SENT: bytes of a gradient on its way; P_UPDATE: bytes that the optimizer moves a parameter.
(
    P_PARAMETER,
    P_GRADIENT,
    P_OPTIMIZER,
    P_ZERO,
    P_GRADIENT_OVERLAP,
    P_GATHER_OVERLAP,
    P_TENSOR_OVERLAP,
    P_RESERVED,
    P_SENT,
    P_UPDATE,
    P_MICRO_BATCH_S,
    P_STEP_S,
    P_SEND_S,
    P_SEND_OVERLAP,
    P_EXCHANGE_OVERLAP,
    P_SINGLY,
) = range(16)
P_COUNT = 16
SPREAD_OVERLAP = 0.8
"""Share of the gradients' overlap that the gathers of the weights behind the optimizer reach, under ZeRO 1 and 2."""

# Columns of the result, one row a rank.
(
    R_END,
    R_COMPUTE,
    R_BUBBLE,
    R_OPTIMIZER,
    R_SYNC,
    R_PARAMETERS,
    R_GRADIENTS,
    R_STATE,
    R_ACTIVATIONS,
    R_BUFFERS,
    R_CAPACITY,
    R_OVERHEAD,
    R_EXCHANGE,
) = range(13)
R_COMM = 13
R_COUNT = R_COMM + KIND_COUNT


class Room(NamedTuple):
    """Scratch memory of one caller, for so many ranks and chunks at most."""

    counts: Floats
    """[words, chunks]"""
    seconds: Floats
    """[words, chunks]"""
    chunks: Floats
    """[CHUNK_ROWS, chunks]"""
    ranks: Floats
    """[RANK_ROWS, ranks]"""
    reduce: Floats
    """[ranks, axes] sums of C_REDUCE, tied parameters once."""
    gather: Floats
    """[ranks, axes] of C_GATHER."""
    scatter: Floats
    """[ranks, axes] of C_SCATTER."""
    program: Ints
    """[0, A_COUNT] of a schedule that is not explicit."""


ROOM = types.NamedTuple((*[float64[:, ::1]] * 7, int64[:, ::1]), Room)
"""Numba's type of `Room`."""
CHUNK_ROWS, RANK_ROWS = 3, 9


@kernel(ROOM(int64, int64, int64))
def new_room(num_ranks, num_chunks, num_axes):
    """Memory for pipelines of so many ranks and chunks at most."""
    return Room(
        np.empty((4, num_chunks)),
        np.empty((4, num_chunks)),
        np.empty((CHUNK_ROWS, num_chunks)),
        np.empty((RANK_ROWS, num_ranks)),
        np.empty((num_ranks, num_axes)),
        np.empty((num_ranks, num_axes)),
        np.empty((num_ranks, num_axes)),
        np.empty((0, A_COUNT), np.int64),
    )


@borrowing(float64(float64, float64[::1], float64, float64), inner=True)
def _gather_s(size, link, data, rings):
    """Time of all-gathers of `data` bytes together, in `rings` calls, at the rate that ZeRO's gathers reach."""
    if size <= 1.0 or data <= 0.0:
        return 0.0
    x = (size - 1.0) / size * data / link[V_GATHER_BYTES_PER_S]
    latency, ramp = link[V_LATENCY_S + ALL_GATHER], link[V_RAMP + ALL_GATHER]
    return rings * latency + x + ramp * math.sqrt(rings * x * RAMP_UNIT_S)


@borrowing(
    types.UniTuple(float64, 2)(
        float64[::1],
        float64[::1],
        float64,
        float64[::1],
        float64[:, ::1],
        boolean[::1],
        float64[::1],
        float64,
        float64,
    ),
    inner=True,
)
def _zero_s(gathered, scattered, rings, axes, links, zero_axes, settings, forward, backward):
    """What ZeRO 2 and 3 add to the passes of one unit and micro-batch: what they do not hide of its own traffic.

    Args:
        gathered: [axes] parameters that are gathered over each axis, see C_GATHER.
        scattered: [axes] gradients that are scattered over each, see C_SCATTER.
        rings: calls that gather them; their gradients are scattered in one.
        axes: [axes] mesh sizes.
        links: [axes, V_COUNT].
        zero_axes: [axes] whether ZeRO shards over the axis.
        settings: see the P_ constants.
        forward: seconds of the forward pass.
        backward: seconds of the backward pass.
    """
    scatter = 0.0
    gather = 0.0
    for a in range(axes.shape[0]):
        if zero_axes[a]:
            scatter += _gather_s(axes[a], links[a], scattered[a] * settings[P_SENT], min(rings, 1.0))
            if settings[P_ZERO] >= 3.0:
                gather += _gather_s(axes[a], links[a], gathered[a] * settings[P_PARAMETER], rings)
    hidden = settings[P_GATHER_OVERLAP]
    first = gather * (1.0 - hidden) + max(0.0, gather * hidden - forward)
    hidden = settings[P_GRADIENT_OVERLAP]
    both = gather + scatter
    second = both * (1.0 - hidden) + max(0.0, both * hidden - backward)
    return first, second


@borrowing(
    void(int64, float64[:, ::1], float64[:, ::1], float64[::1], float64[::1], float64[::1], float64[::1]), inner=True
)
def _bound_schedule(num_micro_batches, counts, seconds, kept, busy, ends, peak):
    """Bounds from below, in closed form, what `run_schedule` finds under any kind but an explicit order.

    A rank works through all its chunks after the first micro-batch has come to it; the first rank is done once the
    last gradient has come back through all chunks before, and gradients of weights need not be made until then.

    Args:
        num_micro_batches..peak: see `run_schedule`.
        counts: see `count_actions`.
    """
    num_ranks = ends.shape[0]
    num_chunks = kept.shape[0]
    backward = INPUT if counts[INPUT, 0] > 0.0 else BACKWARD
    fill = 0.0
    drain = 0.0
    ends[0] = 0.0
    for rank in range(num_ranks):
        late = 0.0
        for chunk in range(rank, num_chunks, num_ranks):
            peak[rank] += kept[chunk]
            late += counts[WEIGHT, chunk] * seconds[WEIGHT, chunk]
        if num_chunks == num_ranks:
            peak[rank] *= min(num_ranks - rank, num_micro_batches)
        ends[rank] = max(ends[rank], fill + busy[rank])
        if rank > 0:
            ends[0] = max(ends[0], fill + (busy[rank] - late) + drain)
        fill += seconds[FORWARD, rank]
        drain += seconds[backward, rank]
    for rank in range(num_ranks):
        ends[rank] = min(ends[rank], max(ends[0], busy[rank]))


@borrowing(
    void(
        float64[:, ::1],
        int64[:, ::1],
        float64[:, ::1],
        int64,
        int64[::1],
        float64[:, ::1],
        float64[:, :, ::1],
        boolean[::1],
        int64[::1],
        float64[::1],
        float64[:, ::1],
        float64[::1],
        float64[:, ::1],
        float64[::1],
        float64[::1],
        float64[:, ::1],
    )
)
def passes(
    costs,
    parts,
    counts,
    num_micro_batches,
    stages,
    axes,
    links,
    zero_axes,
    boundaries,
    send_bytes_per_s,
    tied,
    settings,
    seconds,
    exchange,
    last_backward,
    result,
):
    """Seconds of one action of every kind on every chunk.

    Args:
        costs, parts, num_micro_batches, stages, axes, links, zero_axes, boundaries, send_bytes_per_s, tied, settings:
            see `combine`.
        counts: [words, chunks] how often a chunk does each word in a step.
        seconds: [words, chunks], written. Exchanges are part of the passes: a rank waits for its neighbours, and
            nothing is on its way besides.
        exchange: [chunks] seconds that a rank waits for what crosses behind a chunk, written.
        last_backward: [ranks] seconds of the last backward pass, without its exchanges; written.
        result: [ranks, R_COUNT], what the passes consist of is added.
    """
    num_ranks = last_backward.shape[0]
    num_chunks = exchange.shape[0]
    exchange[:] = 0.0
    zero_stage = settings[P_ZERO]
    seconds[:] = 0.0
    last_backward[:] = 0.0
    for i in range(parts.shape[0]):
        chunk = parts[i, 0]
        row = parts[i, 1]
        times = float64(parts[i, 2])
        rank = chunk % num_ranks
        spent_forward = costs[row, C_FORWARD] + costs[row, C_FORWARD_HOST]
        spent_backward = costs[row, C_BACKWARD] + costs[row, C_RECOMPUTE] + costs[row, C_BACKWARD_HOST]
        spent_input = costs[row, C_INPUT] + costs[row, C_RECOMPUTE] + costs[row, C_INPUT_HOST]
        spent_weight = costs[row, C_WEIGHT] + costs[row, C_WEIGHT_HOST]
        result[rank, R_COMPUTE] += times * (
            num_micro_batches * spent_forward
            + counts[BACKWARD, chunk] * spent_backward
            + counts[INPUT, chunk] * (spent_input + spent_weight)
        )
        for c in range(KIND_COUNT):
            exposed = 1.0 - settings[P_EXCHANGE_OVERLAP if c == ALL_TO_ALL else P_TENSOR_OVERLAP]
            first = exposed * costs[row, C_FORWARD_COMM + c]
            second = exposed * (costs[row, C_BACKWARD_COMM + c] + costs[row, C_RECOMPUTE_COMM + c])
            spent_forward += first
            spent_backward += second
            spent_input += second
            result[rank, R_COMM + c] += times * num_micro_batches * (first + second)
        seconds[FORWARD, chunk] += times * spent_forward
        seconds[BACKWARD, chunk] += times * spent_backward
        seconds[INPUT, chunk] += times * spent_input
        seconds[WEIGHT, chunk] += times * spent_weight
        if zero_stage >= 2.0:
            gathers, scatters = costs[row, C_GATHER:C_TENSORS], costs[row, C_SCATTER:C_COUNT]
            rings = costs[row, C_TENSORS] if settings[P_SINGLY] > 0.0 else 1.0
            at = stages[rank]
            one, two = _zero_s(
                gathers, scatters, rings, axes[at], links[at], zero_axes, settings, spent_forward, spent_backward
            )
            seconds[FORWARD, chunk] += times * one
            seconds[BACKWARD, chunk] += times * two
            seconds[INPUT, chunk] += times * two
            gather = ALL_GATHER if zero_stage >= 3.0 else REDUCE_SCATTER
            result[rank, R_COMM + gather] += times * num_micro_batches * (one + two)
        if chunk < num_chunks - 1 and (i == parts.shape[0] - 1 or parts[i + 1, 0] != chunk):
            shown = 1.0 - settings[P_SEND_OVERLAP]
            exchange[chunk] = settings[P_SEND_S] + shown * costs[row, C_BOUNDARY] / send_bytes_per_s[boundaries[rank]]
    more = TIE_HAS + E_AXES + 3 * axes.shape[1]
    for t in range(tied.shape[0] if zero_stage >= 2.0 else 0):
        rank = int64(tied[t, TIE_ONE])
        if rank == int64(tied[t, TIE_OTHER]):
            # Units that read a parameter unlike gather all that each of them wants; bytes alone, for a unit has paid
            # for its calls, and in the first chunk of the rank, for it does not matter where.
            at = stages[rank]
            gathers, scatters = tied[t, more:], tied[t, more + axes.shape[1] :]
            one, two = _zero_s(gathers, scatters, 0.0, axes[at], links[at], zero_axes, settings, math.inf, math.inf)
            seconds[FORWARD, rank] += one
            seconds[BACKWARD, rank] += two
            seconds[INPUT, rank] += two
            gather = ALL_GATHER if zero_stage >= 3.0 else REDUCE_SCATTER
            result[rank, R_COMM + gather] += num_micro_batches * (one + two)

    per_rank = float64(num_chunks // num_ranks)
    for chunk in range(num_chunks):
        rank = chunk % num_ranks
        last_backward[rank] += seconds[BACKWARD, chunk]
        # One exchange with each neighbour, both directions at once; virtual stages go round, one a chunk.
        before = exchange[chunk - 1] if chunk > 0 else 0.0
        shown = before + exchange[chunk] if num_chunks == num_ranks else max(before, exchange[chunk])
        result[rank, R_EXCHANGE] += num_micro_batches * shown
        result[rank, R_OVERHEAD] += num_micro_batches * settings[P_MICRO_BATCH_S] / per_rank
        seconds[FORWARD, chunk] += 0.5 * shown + settings[P_MICRO_BATCH_S] / per_rank
        seconds[BACKWARD, chunk] += 0.5 * shown
        seconds[INPUT, chunk] += 0.5 * shown


@borrowing(
    void(
        float64[:, ::1],
        int64[:, ::1],
        boolean[::1],
        int64,
        int64[:, ::1],
        int64,
        int64,
        int64[::1],
        float64[:, ::1],
        float64[:, :, ::1],
        float64[:, ::1],
        float64[::1],
        boolean[::1],
        int64[::1],
        float64[::1],
        float64[::1],
        float64[:, ::1],
        float64[::1],
        boolean,
        ROOM,
        float64[:, ::1],
    )
)
def combine(
    costs,
    parts,
    recomputes,
    kind,
    program,
    num_ranks,
    num_micro_batches,
    stages,
    axes,
    links,
    hardware,
    capacity,
    zero_axes,
    boundaries,
    send_latency_s,
    send_bytes_per_s,
    tied,
    settings,
    exact,
    room,
    result,
):
    """Time and memory of every rank.

    Args:
        costs: [rows, C_COUNT] of `unit_cost`.
        parts: [n, 3] of (chunk, row, how often the row occurs in the chunk), by chunk.
        recomputes: [n] whether the unit is recomputed as a whole.
        kind: of the schedule, see `automap.schedule`.
        program: of an explicit schedule; of other kinds empty.
        num_ranks: pipeline ranks.
        num_micro_batches: of one step.
        stages: [ranks] row of each in the four arrays that follow.
        axes: [stages, axes] mesh sizes.
        links: [stages, axes, V_COUNT].
        hardware: [stages, H_COUNT].
        capacity: [stages] bytes.
        zero_axes: [axes] whether ZeRO shards over the axis.
        boundaries: [ranks] row of the boundary behind each in the two arrays that follow.
        send_latency_s: [boundaries] to the next rank.
        send_bytes_per_s: [boundaries] to the next rank.
        tied: [n, tie_columns] parameters used by two units, see `automap.price.kernels.tied_parameters.tie`.
        settings: see the P_ constants.
        exact: simulate the schedule; otherwise bound it from below in closed form.
        room: scratch.
        result: [ranks, R_COUNT], written.
    """
    num_chunks = 0
    for i in range(parts.shape[0]):
        num_chunks = max(num_chunks, parts[i, 0] + 1)
    num_axes = axes.shape[1]
    counts, seconds = room.counts, room.seconds
    kept, send, exchange = room.chunks[0, :num_chunks], room.chunks[1, :num_chunks], room.chunks[2, :num_chunks]
    live, workspace, gathered = room.ranks[0, :num_ranks], room.ranks[1, :num_ranks], room.ranks[2, :num_ranks]
    parameters, sharded, busy = room.ranks[3, :num_ranks], room.ranks[4, :num_ranks], room.ranks[5, :num_ranks]
    ends, peak, last_backward = room.ranks[6, :num_ranks], room.ranks[7, :num_ranks], room.ranks[8, :num_ranks]
    reduce, gather, scatter = room.reduce, room.gather, room.scatter
    room.chunks[:, :num_chunks] = 0.0
    room.ranks[:, :num_ranks] = 0.0
    reduce[:num_ranks] = 0.0
    gather[:num_ranks] = 0.0
    scatter[:num_ranks] = 0.0
    zero_stage = settings[P_ZERO]
    for rank in range(num_ranks):
        for c in range(R_COUNT):
            result[rank, c] = 0.0
    count_actions(kind, num_micro_batches, program, counts)
    passes(
        costs,
        parts,
        counts,
        num_micro_batches,
        stages,
        axes,
        links,
        zero_axes,
        boundaries,
        send_bytes_per_s,
        tied,
        settings,
        seconds,
        exchange,
        last_backward,
        result,
    )
    for i in range(parts.shape[0]):
        chunk = parts[i, 0]
        row = parts[i, 1]
        times = float64(parts[i, 2])
        rank = chunk % num_ranks
        kept[chunk] += times * costs[row, C_SAVED]
        if recomputes[i]:
            live[rank] = max(live[rank], costs[row, C_LIVE])
        workspace[rank] = max(workspace[rank], costs[row, C_WORKSPACE])
        gathered[rank] = max(gathered[rank], costs[row, C_PARAMETERS])
        parameters[rank] += times * costs[row, C_PARAMETERS]
        sharded[rank] += times * costs[row, C_ZERO]
        for a in range(num_axes):
            reduce[rank, a] += times * costs[row, C_REDUCE + a]
            gather[rank, a] += times * costs[row, C_GATHER + a]
            scatter[rank, a] += times * costs[row, C_SCATTER + a]
    for t in range(tied.shape[0]):
        one = int64(tied[t, TIE_ONE])
        if one == int64(tied[t, TIE_OTHER]):
            has = tied[t, TIE_HAS:]
            parameters[one] -= has[E_HELD]
            sharded[one] -= has[E_ZERO]
            for a in range(num_axes):
                reduce[one, a] = max(0.0, reduce[one, a] - has[E_AXES + E_REDUCE * num_axes + a])
                gather[one, a] = max(0.0, gather[one, a] - has[E_AXES + E_GATHER * num_axes + a])
                scatter[one, a] = max(0.0, scatter[one, a] - has[E_AXES + E_SCATTER * num_axes + a])

    for chunk in range(num_chunks):
        kept[chunk] = math.ceil(kept[chunk])
        for word in range(4):
            busy[chunk % num_ranks] += counts[word, chunk] * seconds[word, chunk]
    if exact:
        run_schedule(kind, num_ranks, num_micro_batches, program, seconds, send, kept, busy, ends, peak)
    else:
        _bound_schedule(num_micro_batches, counts, seconds, kept, busy, ends, peak)

    for rank in range(num_ranks):
        at = stages[rank]
        sync = 0.0
        spread = 0.0
        for a in range(num_axes):
            data = (scatter[rank, a] if zero_stage >= 1.0 else reduce[rank, a]) * settings[P_SENT]
            whole = collective_s(ALL_REDUCE, axes[at, a], links[at, a], data)
            if zero_stage < 1.0 or not zero_axes[a]:
                sync += whole
            elif zero_stage < 2.0:
                sync += 0.5 * whole
            if zero_stage < 3.0 and zero_stage >= 1.0:
                # Whatever the gradients needed: no rank has updated more than its shard.
                spread += _gather_s(axes[at, a], links[at, a], gather[rank, a] * settings[P_PARAMETER], 1.0)
        hidden = settings[P_GRADIENT_OVERLAP]
        # Only the backward pass of the last micro-batch can hide the reduction.
        sync = sync * (1.0 - hidden) + max(0.0, sync * hidden - last_backward[rank])
        sync += spread * (1.0 - SPREAD_OVERLAP * hidden)
        for t in range(tied.shape[0]):
            one = int64(tied[t, TIE_ONE])
            other = int64(tied[t, TIE_OTHER])
            if one != other and rank in (one, other):
                here, there = boundaries[one], boundaries[other]
                slow = min(send_bytes_per_s[here], send_bytes_per_s[there])
                wait = max(send_latency_s[here], send_latency_s[there])
                # An all-reduce of two: each sends all that it has.
                sync += wait + tied[t, TIE_EXCHANGED] * settings[P_SENT] / slow
        mine = parameters[rank]
        shard = sharded[rank]
        state = shard if zero_stage >= 1.0 else mine
        update = state * settings[P_UPDATE] / hardware[at, H_BANDWIDTH]
        result[rank, R_BUBBLE] = max(0.0, ends[rank] - busy[rank])
        result[rank, R_SYNC] = sync
        result[rank, R_OPTIMIZER] = update
        result[rank, R_OVERHEAD] += settings[P_STEP_S]
        result[rank, R_END] = ends[rank] + sync + update + settings[P_STEP_S]
        result[rank, R_PARAMETERS] = (shard if zero_stage >= 3.0 else mine) * settings[P_PARAMETER]
        result[rank, R_GRADIENTS] = (shard if zero_stage >= 2.0 else mine) * settings[P_GRADIENT]
        result[rank, R_STATE] = state * settings[P_OPTIMIZER]
        result[rank, R_ACTIVATIONS] = peak[rank] + live[rank]
        result[rank, R_BUFFERS] = 2.0 * workspace[rank] + settings[P_RESERVED]
        if zero_stage >= 3.0:
            result[rank, R_BUFFERS] += 2.0 * gathered[rank] * settings[P_PARAMETER]
        if zero_stage >= 2.0:
            result[rank, R_BUFFERS] += gathered[rank] * settings[P_GRADIENT]
        result[rank, R_CAPACITY] = capacity[at]


@borrowing(float64(float64[:, ::1]))
def step_time_s(result: np.ndarray) -> float:
    """The step ends with the slowest rank."""
    slowest = 0.0
    for rank in range(result.shape[0]):
        slowest = max(slowest, result[rank, R_END])
    return slowest


@borrowing(float64(float64[::1]), inner=True)
def rank_overflow(result):
    """Share of its memory by which a rank overflows; at most 0 when everything fits."""
    used = 0.0
    for column in range(R_PARAMETERS, R_CAPACITY):
        used += result[column]
    return used / max(result[R_CAPACITY], 1.0) - 1.0


@borrowing(float64(float64[:, ::1]))
def overflow(result: np.ndarray) -> float:
    """Largest share of its memory by which a rank overflows; 0 or less when everything fits."""
    worst = -1.0
    for rank in range(result.shape[0]):
        worst = max(worst, rank_overflow(result[rank]))
    return worst

"""Pipeline schedules in time: when every rank is done, and its peak of saved activations.

Every rank runs its actions in a fixed order (`automap.schedule`), each as soon as its inputs are there. All times are
maxima of sums, so a faster part never makes the whole slower. `run_schedule` knows the order of each kind and needs no
list; `run_program` runs any list and tells when each action began. Units: seconds, bytes.
"""

from __future__ import annotations

import numpy as np
from numba import float64, int64, types, void

from automap.jit import borrowing, kernel
from automap.price.kernels.step_records import ORDER
from automap.schedule import (
    A_BEFORE,
    A_CHUNK,
    A_RANK,
    A_WORD,
    BACKWARD,
    EXPLICIT,
    FORWARD,
    INPUT,
    WEIGHT,
    ZB1P,
    ZB2P,
    pattern,
)

_pattern = borrowing(types.UniTuple(int64, 2)(int64, int64, int64, int64), inner=True)(pattern)


@borrowing(void(ORDER, int64, float64[:, ::1]))
def count_actions(order, num_chunks, counts):
    """Writes how often each chunk does each word of `automap.schedule`, [words, chunks or more]."""
    kind, num_micro_batches, program = order
    for chunk in range(num_chunks):
        for word in range(counts.shape[0]):
            counts[word, chunk] = 0.0
    if kind == EXPLICIT:
        for i in range(program.shape[0]):
            counts[program[i, A_WORD], program[i, A_CHUNK]] += 1.0
    else:
        is_split = kind in (ZB1P, ZB2P)
        for chunk in range(num_chunks):
            counts[FORWARD, chunk] = num_micro_batches
            if is_split:
                counts[INPUT, chunk] = counts[WEIGHT, chunk] = num_micro_batches
            else:
                counts[BACKWARD, chunk] = num_micro_batches


@borrowing(void(int64[:, ::1], float64[:, ::1], float64[::1], float64[::1], float64[:, ::1]))
def run_program(program, seconds, send, ends, times):
    """Runs the actions of a list.

    Args:
        program: [actions, A_COUNT] see `automap.schedule`.
        seconds: [words, chunks] seconds of one action.
        send: [chunks] seconds from chunk c to chunk c + 1, and of the gradient back.
        ends: [ranks] when the rank has finished its last action, written.
        times: [actions, 2] when each began and ended, written.
    """
    ends[:] = 0.0
    for i in range(program.shape[0]):
        rank = program[i, A_RANK]
        word = program[i, A_WORD]
        chunk = program[i, A_CHUNK]
        before = program[i, A_BEFORE]
        start = ends[rank]
        if before >= 0:
            arrival = times[before, 1] + send[chunk - 1 if word == FORWARD else chunk]
            start = max(start, arrival)
        times[i, 0] = start
        times[i, 1] = start + seconds[word, chunk]
        ends[rank] = times[i, 1]


@kernel(void(int64, int64, int64, int64, float64[:, ::1], float64[::1], float64[::1]), inner=True)
def _staircase(num_micro_batches, base, lag, backward, seconds, send, ends):
    """`run_schedule` where the warm-up grows by one a rank: GPipe, 1F1B, ZB-1p.

    In sweep t every rank, in the order of the pipeline, runs the backward of micro-batch t - base - (ranks behind it)
    - 1, gradients of weights that are due, and then the forward of micro-batch t: what each needs was done in the
    sweep before, or by the rank before in this one.
    """
    num_ranks = ends.shape[0]
    gradient = np.zeros(num_ranks + 1)
    for sweep in range(num_micro_batches + base + num_ranks):
        ready = 0.0
        for rank in range(num_ranks):
            end = ends[rank]
            returning = sweep - base - (num_ranks - rank)
            if 0 <= returning < num_micro_batches:
                if rank < num_ranks - 1:
                    arrival = gradient[rank + 1] + send[rank]
                    end = max(end, arrival)
                end += seconds[backward, rank]
                gradient[rank] = end
                if lag > 0 and returning >= rank:
                    end += seconds[WEIGHT, rank]
            if sweep < num_micro_batches:
                if rank > 0:
                    arrival = ready + send[rank - 1]
                    end = max(end, arrival)
                end += seconds[FORWARD, rank]
                ready = end
            ends[rank] = end


@kernel(void(int64, int64, int64, int64, float64[:, ::1], float64[::1], float64[::1]), inner=True)
def _slope(num_micro_batches, base, lag, backward, seconds, send, ends):
    """`run_schedule` where the warm-up grows by two a rank: interleaved, ZB-2p.

    In sweep t rank r runs its forward number t - r, before it its backward number t + r - 2 ranks + 1 - base, and
    between them gradients of weights that are due. What each needs was done in the sweep before, so ranks are
    independent within a sweep. Chunks go round: what rank 0 waits for comes from the last rank.
    """
    num_ranks = ends.shape[0]
    num_chunks = send.shape[0]
    virtual = num_chunks // num_ranks
    total = virtual * num_micro_batches
    turn = num_ranks * virtual
    # Row s: what the ranks need in a sweep t with t mod turn = s, or t - base - 2 ranks + 1 mod turn = s.
    onward = np.empty((turn, num_ranks))
    coming = np.empty((turn, num_ranks))
    back = np.empty((turn, num_ranks))
    returning = np.empty((turn, num_ranks))
    for place in range(turn):
        chunk = place // num_ranks * num_ranks
        for rank in range(num_ranks):
            s = place + rank if place + rank < turn else place + rank - turn
            onward[s, rank] = seconds[FORWARD, chunk + rank]
            coming[s, rank] = send[chunk + rank - 1] if chunk + rank > 0 else -np.inf
            s = place - rank if place >= rank else place - rank + turn
            last = num_chunks - num_ranks - chunk + rank
            back[s, rank] = seconds[backward, last]
            returning[s, rank] = send[last] if last < num_chunks - 1 else -np.inf
    # Ends of the last forward of rank r at r + 1, of the last backward at r, and of what came behind it at r.
    reached = np.zeros(num_ranks + 1)
    gradient = np.zeros(num_ranks + 1)
    turned = np.zeros(num_ranks + 1) if lag > 0 else gradient
    behind = base + 2 * num_ranks - 1
    s = 0
    b = -behind % turn
    for sweep in range(total + behind):
        shift = sweep - behind
        gradient[num_ranks] = gradient[0]
        first = max(0, -shift)
        for rank in range(min(first, num_ranks)):
            gradient[rank] = reached[rank + 1]
        for rank in range(first, min(num_ranks, total - shift)):
            arrival = gradient[rank + 1] + returning[b, rank]
            end = reached[rank + 1]
            gradient[rank] = (arrival if arrival > end else end) + back[b, rank]
        if lag > 0:
            for rank in range(min(num_ranks, total - shift)):
                turned[rank] = gradient[rank]
                if shift + rank >= lag * rank:
                    turned[rank] += seconds[WEIGHT, rank]
        reached[0] = reached[num_ranks]
        first = max(0, sweep - total + 1)
        for rank in range(min(num_ranks, sweep + 1) - 1, first - 1, -1):
            arrival = reached[rank] + coming[s, rank]
            end = turned[rank]
            reached[rank + 1] = (arrival if arrival > end else end) + onward[s, rank]
        for rank in range(min(first, num_ranks)):
            reached[rank + 1] = turned[rank]
        s = s + 1 if s + 1 < turn else 0
        b = b + 1 if b + 1 < turn else 0
    for rank in range(num_ranks):
        ends[rank] = turned[rank]


@borrowing(float64(int64, int64, int64, int64, int64, float64[::1]), inner=True)
def _peak(rank, num_ranks, num_micro_batches, warm_up, lag, saved):
    """Most bytes that a rank holds which turns from forward to backward after `warm_up` forwards.

    It frees what a forward saved in the backward pass, `lag` micro-batches later where these are behind. Bytes are
    whole numbers, so the sum does not depend on its order.
    """
    virtual = saved.shape[0] // num_ranks
    total = virtual * num_micro_batches
    turn = virtual * num_ranks
    first = min(warm_up + 1, total)
    held = 0.0
    for j in range(virtual):
        rounds = min(max(first % turn - j * num_ranks, 0), num_ranks)
        held += (first // turn * num_ranks + rounds) * saved[j * num_ranks + rank]
    most = held
    number = first
    # Along a run of equal chunks what is held grows or falls evenly, and all repeats after `turn` forwards.
    while number < min(first + turn, total):
        freed = number - first
        run = min(num_ranks - number % num_ranks, num_ranks - freed % num_ranks, total - number)
        more = saved[number % turn // num_ranks * num_ranks + rank]
        less = saved[(virtual - 1 - freed % turn // num_ranks) * num_ranks + rank]
        held += run * (more - less)
        number += run
        most = max(most, held)
    return most + min(lag, max(0, num_micro_batches - first)) * saved[rank]


@kernel(void(ORDER, float64[:, ::1], *[float64[::1]] * 5), apart=True)
def run_schedule(order, seconds, send, saved, busy, ends, peak):
    """Times one step and finds each rank's peak of saved activations.

    A rank goes on to its next step once it is done with this one (gradients are checked after the update, Qi et al.):
    in a long run a step takes as long as the first rank needs from its first action to its last, but no less than any
    rank works. That counts as the end of ranks which have gradients of weights left then.

    Args:
        order: order of the actions.
        seconds: [words, chunks] seconds of one action; recomputation is part of the backward pass, or of that of the
            input.
        send: [chunks] seconds from chunk c to chunk c + 1, and of the gradient back.
        saved: [chunks] whole bytes that one micro-batch keeps between its forward and its backward pass, or the
            gradients of its weights.
        busy: [ranks] seconds of work.
        ends: [ranks] seconds until the rank has finished its step, written.
        peak: [ranks] bytes, written.
    """
    kind, num_micro_batches, program = order
    num_ranks = ends.shape[0]
    num_chunks = send.shape[0]
    ends[:] = 0.0
    if kind == EXPLICIT:
        run_program(program, seconds, send, ends, np.empty((program.shape[0], 2)))
        held = np.zeros(num_ranks)
        peak[:] = 0.0
        for i in range(program.shape[0]):
            rank = program[i, A_RANK]
            word = program[i, A_WORD]
            if word == FORWARD:
                held[rank] += saved[program[i, A_CHUNK]]
                peak[rank] = max(peak[rank], held[rank])
            elif word != INPUT:
                held[rank] -= saved[program[i, A_CHUNK]]
    else:
        base, step = _pattern(kind, num_ranks, num_chunks, num_micro_batches)
        split = kind in (ZB1P, ZB2P)
        lag = step if split else 0
        backward = INPUT if split else BACKWARD
        if step == 1:
            _staircase(num_micro_batches, base, lag, backward, seconds, send, ends)
        else:
            _slope(num_micro_batches, base, lag, backward, seconds, send, ends)
        for rank in range(num_ranks):
            if split:
                for _ in range(min(lag * rank, num_micro_batches)):
                    ends[rank] += seconds[WEIGHT, rank]
            warm_up = base + step * (num_ranks - 1 - rank)
            peak[rank] = _peak(rank, num_ranks, num_micro_batches, warm_up, lag * rank, saved)
    for rank in range(num_ranks):
        ends[rank] = min(ends[rank], max(ends[0], busy[rank]))

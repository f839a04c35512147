"""Pipeline schedules in time: when every rank is done, and its peak of saved activations.

Every rank runs its actions in a fixed order (`automap.schedule`), each as soon as its inputs are there. All times are
maxima of sums, so a faster part never makes the whole slower. `run_schedule` runs the kinds of schedules of
`automap.schedule` without a list of their actions; `run_program` runs any list of actions and also writes when each of
them began. Units: seconds, bytes.
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
    """Writes how often each chunk runs each kind of action of `automap.schedule` in a step.

    Args:
        order: order of the actions.
        num_chunks: chunks of all ranks.
        counts: [words, chunks or more] written.
    """
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
    """Runs a list of actions.

    Args:
        program: [actions, A_COUNT] the list, see `automap.schedule`.
        seconds: [words, chunks] seconds of one action.
        send: [chunks] seconds of a message from chunk c to chunk c + 1, and of one with the gradient back.
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
    """`run_schedule` for schedules whose warm-up is one micro-batch longer on each earlier rank: GPipe, 1F1B, ZB-1p.

    In sweep t, every rank runs the backward pass of micro-batch t - base - (ranks after it) - 1, then gradients of
    weights that are due, and then the forward pass of micro-batch t. A sweep goes through the ranks in the order of the
    pipeline. The inputs of each action come from the sweep before, or from the rank before in the same sweep.
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
    """`run_schedule` for schedules whose warm-up is two passes longer on each earlier rank: interleaved, ZB-2p.

    In sweep t, rank r runs its backward pass number t + r - 2 * ranks + 1 - base, then gradients of weights that are
    due, and then its forward pass number t - r. The inputs of each action come from the sweep before, so the ranks are
    independent within a sweep. After the last rank, a micro-batch goes on to the next chunk of rank 0.
    """
    num_ranks = ends.shape[0]
    num_chunks = send.shape[0]
    virtual = num_chunks // num_ranks
    total = virtual * num_micro_batches
    turn = num_ranks * virtual
    # Row s holds the seconds of the ranks in sweeps t with t mod turn = s (of forward passes and the messages before
    # them), or with (t - base - 2 * ranks + 1) mod turn = s (of backward passes and the messages before them).
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
    # When rank r ended its latest forward pass, at r + 1; its latest backward pass, at r; and the gradients of weights
    # after it, at r.
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
    """Most bytes of saved activations on a rank that runs `warm_up` forward passes before its first backward pass.

    The backward pass of a micro-batch frees its activations; where gradients of weights are made `lag` micro-batches
    later, these free them. Bytes are whole numbers, so the sum does not depend on its order.
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
    # During consecutive passes of one chunk the held bytes grow or fall evenly, so its ends suffice. After `turn`
    # forward passes everything repeats.
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
    """Times one step and finds the peak of saved activations of each rank.

    A rank starts its next step when it is done with this one, before other ranks are (gradients are checked after the
    update, Qi et al., arXiv 2401.10241). In a long run, a step therefore takes as long as the first rank needs from its
    first action to its last one, but at least as long as any rank works. No rank counts as ending later than that, even
    if it still computes gradients of weights.

    Args:
        order: order of the actions.
        seconds: [words, chunks] seconds of one action. Recomputation is part of the backward pass; if that runs in two
            parts, of the part for inputs.
        send: [chunks] seconds of a message from chunk c to chunk c + 1, and of one with the gradient back.
        saved: [chunks] whole bytes that one micro-batch keeps from its forward pass to its backward pass or, if these
            are computed separately, to the gradients of its weights.
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

"""Pipeline schedules: the order of actions on every rank, its timing and its peak of kept activations.

A chunk is a run of operators; chunk c lives on rank c mod pp (virtual stages). Every rank serves its actions in the
order fixed here, each as soon as its inputs are there (max-plus). Units: seconds, bytes.
"""

from __future__ import annotations

import numpy as np
from numba import float64, int64, njit, void

GPIPE, ONE_F_ONE_B, INTERLEAVED = range(3)
KINDS = {"gpipe": GPIPE, "1f1b": ONE_F_ONE_B, "interleaved": INTERLEAVED}


@njit(void(int64, int64, int64, int64, int64, int64[:, ::1]), cache=True)
def rank_order(
    kind: int, rank: int, num_ranks: int, num_chunks: int, num_micro_batches: int, order: np.ndarray
) -> None:
    """Writes the actions of one rank.

    GPipe: all forwards, then all backwards in reverse. 1F1B: as many forwards as ranks follow, then forward and
    backward by turns (Megatron-LM, DAPPLE's early backward). Interleaved: Megatron-LM's order over virtual stages.

    Args:
        kind: GPIPE, ONE_F_ONE_B or INTERLEAVED.
        rank: pipeline rank.
        num_ranks: ranks.
        num_chunks: chunks, a multiple of the ranks.
        num_micro_batches: of one step; a multiple of the ranks if interleaved.
        order: [2 * chunks of the rank * micro-batches, 3] of (backward?, chunk, micro-batch), written.
    """
    virtual = num_chunks // num_ranks
    total = virtual * num_micro_batches
    if kind == GPIPE:
        warm_up = total
    elif kind == ONE_F_ONE_B:
        warm_up = min(num_ranks - rank - 1, total)
    else:
        warm_up = min((num_ranks - rank - 1) * 2 + (virtual - 1) * num_ranks, total)
        if num_micro_batches == num_ranks:
            warm_up = total
    done_forward = 0
    done_backward = 0
    at = 0
    group = num_ranks * virtual
    while done_backward < total:
        forward = done_forward < warm_up or (done_forward < total and done_forward - done_backward <= warm_up)
        step = done_forward if forward else done_backward
        if kind == INTERLEAVED:
            chunk = (step % group) // num_ranks
            micro_batch = (step // group) * num_ranks + step % num_ranks
        else:
            chunk = step // num_micro_batches
            micro_batch = step % num_micro_batches
            if kind == GPIPE and not forward:
                micro_batch = num_micro_batches - 1 - micro_batch
        if not forward:
            chunk = virtual - 1 - chunk
        order[at, 0] = 0 if forward else 1
        order[at, 1] = chunk * num_ranks + rank
        order[at, 2] = micro_batch
        at += 1
        if forward:
            done_forward += 1
        else:
            done_backward += 1


@njit(
    void(
        int64,
        float64[::1],
        float64[::1],
        float64[::1],
        float64[::1],
        float64[::1],
        float64[::1],
        float64[::1],
    ),
    cache=True,
)
def one_f_one_b(num_micro_batches, forward, backward, send, kept, ends, busy, peak):
    """`run_schedule` for 1F1B with one chunk a rank, in one sweep without lists of actions.

    In sweep t every rank, in the order of the pipeline, runs the backward of micro-batch t - (ranks behind it) - 1 and
    then the forward of micro-batch t: what each needs was done in the sweep before, or by the rank before in this one.
    """
    num_ranks = forward.shape[0]
    gradient = np.zeros(num_ranks + 1)
    ends[:] = 0.0
    busy[:] = 0.0
    for rank in range(num_ranks):
        peak[rank] = 0.0
        for _ in range(min(num_ranks - rank, num_micro_batches)):
            peak[rank] += kept[rank]
    for sweep in range(num_micro_batches + num_ranks):
        ready = 0.0
        for rank in range(num_ranks):
            returning = sweep - (num_ranks - rank)
            if 0 <= returning < num_micro_batches:
                arrival = gradient[rank + 1] + send[rank] if rank < num_ranks - 1 else 0.0
                ends[rank] = max(arrival, ends[rank]) + backward[rank]
                busy[rank] += backward[rank]
                gradient[rank] = ends[rank]
            if sweep < num_micro_batches:
                arrival = ready + send[rank - 1] if rank > 0 else 0.0
                ends[rank] = max(arrival, ends[rank]) + forward[rank]
                busy[rank] += forward[rank]
                ready = ends[rank]


@njit(
    void(
        int64,
        int64,
        int64,
        float64[::1],
        float64[::1],
        float64[::1],
        float64[::1],
        float64[::1],
        float64[::1],
        float64[::1],
    ),
    cache=True,
)
def run_schedule(kind, num_ranks, num_micro_batches, forward, backward, send, kept, ends, busy, peak):
    """Times one step and finds each rank's peak of kept activations.

    Args:
        kind: GPIPE, ONE_F_ONE_B or INTERLEAVED.
        num_ranks: pipeline ranks.
        num_micro_batches: of one step.
        forward: [chunks] seconds of one micro-batch.
        backward: [chunks] seconds of one micro-batch, recomputation included.
        send: [chunks] seconds from chunk c to chunk c + 1, and of the gradient back.
        kept: [chunks] bytes that one micro-batch keeps between its forward and its backward.
        ends: [ranks] when the rank has finished its last action, written.
        busy: [ranks] seconds of work, written.
        peak: [ranks] bytes, written.
    """
    num_chunks = forward.shape[0]
    if kind == ONE_F_ONE_B and num_chunks == num_ranks:
        one_f_one_b(num_micro_batches, forward, backward, send, kept, ends, busy, peak)
        return
    per_rank = 2 * (num_chunks // num_ranks) * num_micro_batches
    orders = np.empty((num_ranks, per_rank, 3), np.int64)
    for rank in range(num_ranks):
        rank_order(kind, rank, num_ranks, num_chunks, num_micro_batches, orders[rank])
        held = 0.0
        peak[rank] = 0.0
        for i in range(per_rank):
            chunk = orders[rank, i, 1]
            if orders[rank, i, 0] == 0:
                held += kept[chunk]
                peak[rank] = max(peak[rank], held)
            else:
                held -= kept[chunk]
    done_forward = np.full((num_chunks, num_micro_batches), -1.0)
    done_backward = np.full((num_chunks, num_micro_batches), -1.0)
    cursor = np.zeros(num_ranks, np.int64)
    ends[:] = 0.0
    busy[:] = 0.0
    left = num_ranks * per_rank
    while left > 0:
        progressed = False
        for rank in range(num_ranks):
            while cursor[rank] < per_rank:
                action = orders[rank, cursor[rank]]
                chunk = action[1]
                micro_batch = action[2]
                ready = 0.0
                if action[0] == 0:
                    if chunk > 0:
                        ready = done_forward[chunk - 1, micro_batch]
                        if ready < 0.0:
                            break
                        ready += send[chunk - 1]
                    spent = forward[chunk]
                    end = max(ready, ends[rank]) + spent
                    done_forward[chunk, micro_batch] = end
                else:
                    if chunk < num_chunks - 1:
                        ready = done_backward[chunk + 1, micro_batch]
                        if ready < 0.0:
                            break
                        ready += send[chunk]
                    spent = backward[chunk]
                    end = max(ready, ends[rank]) + spent
                    done_backward[chunk, micro_batch] = end
                ends[rank] = end
                busy[rank] += spent
                cursor[rank] += 1
                left -= 1
                progressed = True
        if not progressed:
            ends[:] = np.inf
            return

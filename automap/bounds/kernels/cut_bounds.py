"""Lower bounds on plans whose cuts are being decided, from the least costs of units on the ranks.

All bounds are admissible: no completion is faster or needs less memory. Units: seconds, bytes; memory as share of
capacity (overflow).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import float64, int64, void

from automap.jit import borrowing
from automap.price.kernels.array_types import Floats2, Ints, Ints2, tuple_type
from automap.price.kernels.memory import in_flight, makes_gradients
from automap.schedule import ZB1P, ZB2P
from automap.space.kernels.cuts import nth_cut
from automap.space.kernels.layout import cut_window
from automap.space.kernels.masks import shape_node
from automap.space.kernels.records import SPACE
from automap.space.kernels.workspace import WORKSPACE


class LowerBounds(NamedTuple):
    """Bounds of a space before any signature is decided."""

    nodes: Floats2
    """[nodes of `SpaceArrays.shape_nodes`, 2] lower bounds on seconds and overflow of all plans below a node."""
    shapes: Ints
    """[shapes] row of the tables of units for stages of the usual sizes, which no slot decides."""
    unlike: Ints2
    """[distinct stages, values of the slot `micro_batches`] row of the tables of units for stages of unlike size, or
    -1."""
    work: Floats2
    """[rows, units + 1] least seconds of a micro-batch in all units before each."""
    states: Floats2
    """[rows, units + 1] least bytes of parameters, gradients and moments of all units before each."""
    gradients: Floats2
    """[rows, units + 1] bytes of the gradients among them."""
    saved: Floats2
    """[rows, units + 1] least bytes that a micro-batch saves for its backward pass in all units before each."""
    sent: Floats2
    """[rows, units + 1] least bytes of the tensor that crosses after this many units."""
    shared_bytes: float
    """Bytes of state of parameters that several units use, which may count once."""
    reserved_bytes: float
    """Bytes that the framework holds on every device."""


LOWER_BOUNDS = tuple_type(LowerBounds)
"""Numba's type of `LowerBounds`."""


@borrowing(void(SPACE, LOWER_BOUNDS, int64[::1], WORKSPACE), inner=True)
def find_least(space, bounds, value, workspace):
    """Writes `Workspace.least`: the row of the tables of units for each rank."""
    layout = workspace.draft.layout
    shape = space.shape_nodes[shape_node(space, value, space.first.schedule)].shape
    count = value[space.first.micro_batches]
    for rank in range(layout.frame[0].num_ranks):
        is_usual = layout.frame[0].is_usual
        workspace.least[rank] = bounds.shapes[shape] if is_usual else bounds.unlike[layout.stages[rank], count]


@borrowing(float64(SPACE, LOWER_BOUNDS, WORKSPACE, int64), inner=True)
def _pipeline_bound(space, bounds, workspace, known):
    """Lower bound on the seconds of a step from the first `known` chunks, whose ends are decided.

    A rank waits while one micro-batch passes through the chunks before its first one, and then works on all
    micro-batches.
    """
    layout, settings = workspace.draft.layout, workspace.settings[0]
    frame = layout.frame[0]
    ranks, count = frame.num_ranks, frame.num_micro_batches
    # Ranks may compute gradients of weights while they wait.
    is_filled = frame.schedule in (ZB1P, ZB2P)
    busy, before = workspace.step.busy[:ranks], workspace.step.ends[:ranks]
    busy[:] = 0.0
    before[:] = 0.0
    start, passed, received = 0, 0.0, 0.0
    for chunk in range(known):
        rank, end = chunk % ranks, layout.ends[chunk]
        row = workspace.least[rank]
        seconds = bounds.work[row, end] - bounds.work[row, start]
        sent = 0.0
        if chunk < frame.num_chunks - 1:
            rate = space.send_bytes_per_s[layout.boundaries[rank]]
            sent = settings.send_s + (1.0 - settings.send_overlap) * bounds.sent[row, end] / rate
        seconds += received + sent if frame.num_chunks == ranks else max(received, sent)
        seconds += settings.micro_batch_s * ranks / frame.num_chunks
        received = sent
        busy[rank] += seconds
        if chunk < ranks:
            before[rank] = 0.0 if is_filled else passed
            passed += seconds
        start = end
    longest = 0.0
    for rank in range(ranks):
        longest = max(longest, before[rank] + count * busy[rank])
    return longest + settings.step_s


@borrowing(float64(SPACE, LOWER_BOUNDS, WORKSPACE, int64), inner=True)
def _memory_bound(space, bounds, workspace, chunk):
    """Lower bound on the overflow of a device that holds the units of a chunk."""
    layout = workspace.draft.layout
    frame = layout.frame[0]
    start, end = layout.ends[chunk - 1] if chunk > 0 else 0, layout.ends[chunk]
    rank = chunk % frame.num_ranks
    row = workspace.least[rank]
    waiting = in_flight(rank, frame.num_ranks, frame.num_chunks, frame.num_micro_batches)
    used = max(0.0, bounds.states[row, end] - bounds.states[row, start] - bounds.shared_bytes)
    saved = waiting * (bounds.saved[row, end] - bounds.saved[row, start])
    if makes_gradients(frame.num_micro_batches, workspace.settings[0]):
        # At its fullest moment, a rank has at least the saved activations or the gradients of each unit.
        saved = max(0.0, saved - (bounds.gradients[row, end] - bounds.gradients[row, start]))
    used = (1.0 + workspace.settings[0].unused_share) * (used + saved) + bounds.reserved_bytes
    return used / max(1.0, space.capacity[layout.stages[rank]]) - 1.0


@borrowing(void(LOWER_BOUNDS, WORKSPACE, int64), inner=True)
def find_rest(bounds, workspace, first):
    """Writes `Workspace.rest`: for each unit, least seconds of a micro-batch in all units after it, divided evenly
    among the ranks from `first` on."""
    rest, layout = workspace.rest, workspace.draft.layout
    num_ranks = layout.frame[0].num_ranks
    devices = 0
    for rank in range(first, num_ranks):
        devices += layout.devices[rank]
    last = rest.shape[0] - 1
    rest[last] = 0.0
    for unit in range(last - 1, -1, -1):
        least = np.inf
        for rank in range(first, num_ranks):
            work = bounds.work[workspace.least[rank]]
            least = min(least, (work[unit + 1] - work[unit]) * layout.devices[rank])
        rest[unit] = rest[unit + 1] + least / devices


@borrowing(void(SPACE, LOWER_BOUNDS, int64, int64, WORKSPACE, float64[::1]), inner=True)
def look_at_cut(space, bounds, slot, cut, workspace, out):
    """Writes lower bounds on seconds and overflow after one end of a chunk, value `cut` of a slot, into `out`, [2]."""
    layout = workspace.draft.layout
    chunk, num_chunks = slot - space.first.cut, layout.frame[0].num_chunks
    start, low, high = cut_window(space, chunk, layout)
    end = nth_cut(space.weight, start, low, high, layout.shares[chunk], cut)
    layout.ends[chunk] = end
    known = chunk + 1
    over = _memory_bound(space, bounds, workspace, chunk)
    if chunk == num_chunks - 2:
        known = num_chunks
        over = max(over, _memory_bound(space, bounds, workspace, chunk + 1))
    seconds = _pipeline_bound(space, bounds, workspace, known)
    out[0] = max(seconds, layout.frame[0].num_micro_batches * workspace.rest[end])
    out[1] = over

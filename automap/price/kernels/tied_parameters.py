"""The cost of a parameter that several units of one rank read: the rank holds it once, and reduces its gradient once.

On an axis on which all readers require the same placement, the parameter has that placement. On an axis on which they
differ it is B, each reader takes its part of it, and the gradient is summed over the axis. Units are priced as if each
had a parameter of its own. This module computes the correction: the difference between the cost of separate parameters
and that of one shared parameter.
"""

from __future__ import annotations

import math

from numba import boolean, float64, int64, types, void

from automap.jit import borrowing
from automap.price.kernels.collectives import UNKNOWN
from automap.price.kernels.cost_records import READING, SHARE, TIE
from automap.price.kernels.records import TABLES
from automap.price.kernels.stage_records import STAGE
from ir.factors import BROADCAST, PARTIAL

NOBODY = UNKNOWN - 1
"""Placement of a parameter before its first reader is added."""


@borrowing(void(READING[::1]))
def begin(reading):
    """Writes the reading of a parameter without readers, [axes]."""
    for a in range(reading.shape[0]):
        reading[a].placement = NOBODY
        reading[a].is_summed = 0
        reading[a].is_open = 0


@borrowing(void(TABLES, int64, int64, int64[:, ::1], READING[::1]))
def read_too(tables, reader, first, chosen, reading):
    """Adds one more unit to the readers of a parameter.

    A reader whose signature is undecided is assumed to require the same placement as the others.

    Args:
        reader: first operand row of the unit that reads the parameter.
        first: operator row at which `chosen` begins.
        chosen: [operators, axes] signatures, -1 where they are undecided.
        reading: [axes] the reading by the units added before; written.
    """
    operators, operands = tables.operators, tables.operands
    for a in range(reading.shape[0]):
        op = operands[reader].operator
        signature = chosen[op - first, a]
        placement = UNKNOWN
        if signature >= 0:
            at = tables.signatures[operators[op].first_signature + signature].first_placement
            # A parameter that is read as P is held whole: the first rank reads it, the others read zeros.
            placement = max(tables.placements[at + reader - operators[op].first_operand].placement, BROADCAST)
        if reading[a].placement == NOBODY or reading[a].placement == UNKNOWN:
            reading[a].placement = placement
        elif placement != UNKNOWN and placement != reading[a].placement:
            reading[a].placement = BROADCAST
            reading[a].is_summed = 1
        # A view, or an operator on parameters alone, passes on the gradient of its result.
        behind = reader
        while behind >= 0:
            op = operands[behind].operator
            if operators[op].is_free == 0:
                used = chosen[op - first, a]
                if used < 0:
                    reading[a].is_open = 1
                    break
                at = tables.signatures[operators[op].first_signature + used].first_placement
                found = tables.placements[at + behind - operators[op].first_operand]
                if found.placement != BROADCAST:
                    break
                if found.gradient == PARTIAL:
                    reading[a].is_summed = 1
                    break
            behind = operands[behind].next_reader


@borrowing(void(READING[::1], float64, boolean, STAGE, SHARE))
def write_share(reading, elements, is_trained, stage, share):
    """Writes what a parameter adds to a rank, as `add_elements` and `add_reduction` do for a single reader.

    Args:
        reading: [axes] the reading by all units of the rank.
        elements: elements of the whole parameter.
        is_trained: whether it is trained.
        stage: mesh of the rank, and the axes over which ZeRO shards.
        share: overwritten.
    """
    axes, zero_axes = stage.axes, stage.zero_axes
    num_axes = axes.shape[0]
    for a in range(share.reduced.shape[0]):
        share.reduced[a] = share.gathered[a] = share.gathered_frozen[a] = share.scattered[a] = 0.0
    for a in range(num_axes):
        if reading[a].placement >= 0 or reading[a].placement == UNKNOWN:
            elements /= axes[a]
    share.parameters = elements
    shard = elements
    for a in range(num_axes - 1, -1, -1):
        is_summed = is_trained and axes[a] > 1.0 and reading[a].is_summed == 1
        if is_summed:
            share.reduced[a] += elements
        # For a lower bound, an undecided axis scatters the elements and reduces none.
        if is_summed or reading[a].is_open == 1:
            elements /= axes[a]
        if zero_axes[a] and reading[a].placement == BROADCAST:
            share.gathered[a] += shard
            if not is_trained:
                share.gathered_frozen[a] += shard
            if is_summed:
                share.scattered[a] += shard
            shard /= axes[a]
    share.zero_parameters = shard
    share.frozen = 0.0 if is_trained else share.parameters
    share.zero_frozen = 0.0 if is_trained else shard
    for a in range(num_axes - 1, -1, -1):
        if not zero_axes[a]:
            is_summed = is_trained and axes[a] > 1.0 and reading[a].is_summed == 1
            if is_summed:
                share.scattered[a] += shard
            if is_summed or reading[a].is_open == 1:
                shard /= axes[a]


@borrowing(void(float64, SHARE[::1], TIE))
def write_tie(uses, shares, tie):
    """Writes the correction for one more unit of a rank that reads a parameter which the rank already holds.

    Under ZeRO 2 and 3, each unit gathers and scatters the parameter in the placement in which the rank holds it for all
    of its units.

    Args:
        uses: number of units that read it before.
        shares: [3] what the parameter adds to the rank for these units, for the further unit alone, and for all.
        tie: `excess`, `gathered_again` and `scattered_again` are written.
    """
    before, alone, together, excess = shares[0], shares[1], shares[2], tie.excess
    excess.parameters = before.parameters + alone.parameters - together.parameters
    excess.zero_parameters = before.zero_parameters + alone.zero_parameters - together.zero_parameters
    excess.frozen = before.frozen + alone.frozen - together.frozen
    excess.zero_frozen = before.zero_frozen + alone.zero_frozen - together.zero_frozen
    for a in range(excess.reduced.shape[0]):
        excess.reduced[a] = before.reduced[a] + alone.reduced[a] - together.reduced[a]
        excess.gathered[a] = before.gathered[a] + alone.gathered[a] - together.gathered[a]
        both = before.gathered_frozen[a] + alone.gathered_frozen[a]
        excess.gathered_frozen[a] = both - together.gathered_frozen[a]
        excess.scattered[a] = before.scattered[a] + alone.scattered[a] - together.scattered[a]
        tie.gathered_again[a] = _again(uses, before.gathered[a], alone.gathered[a], together.gathered[a])
        tie.scattered_again[a] = _again(uses, before.scattered[a], alone.scattered[a], together.scattered[a])


@borrowing(float64(float64, float64, float64, float64), inner=True)
def _again(uses, before, alone, together):
    """Elements that are moved for a micro-batch beyond those which the price of separate units includes, see
    `write_tie`."""
    return max(0.0, (uses + 1.0) * together - uses * before - alone)


@borrowing(
    float64(float64, float64, boolean[::1], int64[::1], types.UniTuple(float64[::1], 2)),
    inner=True,
)
def exchange_s(size, data, holds, boundaries, links):
    """Seconds of an all-reduce among the ranks that hold one parameter: a ring, 2 (n - 1) / n of its bytes.

    Only the links between consecutive ranks of the pipeline are known, and the one from the last rank to the first. The
    all-reduce runs at the rate of the slowest link of the best walk along the pipeline that visits all ranks which hold
    the parameter. Where consecutive ranks fill one host after another, that is the link between hosts.

    Args:
        size: number of ranks that hold the parameter.
        data: bytes of its gradient.
        holds: [ranks] whether a rank holds it.
        boundaries: [ranks] row in `links` of the boundary after each rank.
        links: [boundaries] seconds of an empty message to the next rank, and bandwidth to it.
    """
    # A walk along the ring of ranks that visits all of them leaves out the way between two consecutive ones. It is best
    # to leave out the way with the slowest link, or that with the longest latency.
    ranks, first = holds.shape[0], 0
    while not holds[first]:
        first += 1
    slow, next_slow, wait, next_wait = math.inf, math.inf, 0.0, 0.0
    slow_way, wait_way, way, way_slow, way_wait = -1, -1, 0, math.inf, 0.0
    for step in range(ranks):
        at = boundaries[(first + step) % ranks]
        way_slow, way_wait = min(way_slow, links[1][at]), max(way_wait, links[0][at])
        if holds[(first + step + 1) % ranks]:
            if way_slow < slow:
                slow, next_slow, slow_way = way_slow, slow, way
            else:
                next_slow = min(next_slow, way_slow)
            if way_wait > wait:
                wait, next_wait, wait_way = way_wait, wait, way
            else:
                next_wait = max(next_wait, way_wait)
            way, way_slow, way_wait = way + 1, math.inf, 0.0
    is_same, others = slow_way == wait_way, size - 1.0
    without_slow = others * (next_wait if is_same else wait) + 2.0 * others / size * data / next_slow
    without_wait = others * next_wait + 2.0 * others / size * data / (next_slow if is_same else slow)
    return min(without_slow, without_wait)

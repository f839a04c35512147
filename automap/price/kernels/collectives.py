"""The collectives that placements call for: conversions between placements and their cost.

`convert` is the one place that says which collectives turn a tensor from one placement into another on an n-D mesh,
and in which order: first what shrinks the local part (slices, reduce-scatters), then what keeps its size
(all-to-alls, all-reduces), then what grows it (all-gathers). The price adds its times up; `Evaluator.collectives` lists
them one by one. Ring volumes. Units: seconds, bytes.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from numba import float64, int64, types

from automap.jit import borrowing
from automap.price.tables import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SEND_RECV
from ir.factors import BROADCAST, PARTIAL

UNKNOWN = -3
"""A placement that has not been decided yet: converting from or to it is free, and it is split wherever it may be."""
SUMMED = -4
"""Placement of what crosses into a chunk: whole, by an all-reduce before it was sent."""

KIND_COUNT = 5
RAMP_UNIT_S = 1e-6


# Columns of a link, each of the first three one a kind of collective: latency; achieved bytes/s; ramp between small and
# large messages. Then bytes/s of ZeRO's gathers and scatters; host time of a collective, in that of a group of two.
V_LATENCY_S, V_BYTES_PER_S, V_RAMP = 0, KIND_COUNT, 2 * KIND_COUNT
V_GATHER_BYTES_PER_S, V_WAIT = range(3 * KIND_COUNT, 3 * KIND_COUNT + 2)
V_COUNT = 3 * KIND_COUNT + 2
RINGS = (ALL_GATHER, REDUCE_SCATTER)
"""Kinds that go round the ranks one by one; all else goes up and down a tree."""


@borrowing(float64(int64, float64, float64[::1], float64))
def collective_s(kind: int, size: float, link: np.ndarray, data: float) -> float:
    """Time of one collective.

    Args:
        kind: ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL or SEND_RECV.
        size: ranks of the group.
        link: [V_COUNT] of the group.
        data: bytes of the larger of what a rank holds before and after (the nccl-tests convention).
    """
    if size <= 1.0 or data <= 0.0:
        return 0.0
    share = (size - 1.0) / size
    if kind == ALL_REDUCE:
        share *= 2.0
    if kind == SEND_RECV:
        share = 1.0
    x = share * data / link[V_BYTES_PER_S + kind]
    return float(link[V_LATENCY_S + kind] + x + link[V_RAMP + kind] * math.sqrt(x * RAMP_UNIT_S))


def host_link(
    size: int, *, latency_s: float, growth: float, bytes_per_s: float, small_group: float, ramp: float
) -> npt.NDArray[np.float64]:
    """[V_COUNT] what `collective_s` takes of a group inside a host.

        t = latency * (1 + growth * (n - 1)) + x + ramp * sqrt(x * 1 us)
        x = factor * bytes / bandwidth * (1 + small_group / n)

    Bare collectives (`automap/data/fitted/collectives.json`) and those of training steps differ in the constants alone.

    Args:
        size: ranks of the group, n.
        latency_s: of two ranks.
        growth: what each further rank adds to it, as a share.
        bytes_per_s: achieved by a large group.
        small_group: what small groups lack of it.
        ramp: of the square root, which stands for NCCL's change of protocols between small and large messages.
    """
    vector = np.zeros(V_COUNT)
    rate = bytes_per_s
    if size > 1:
        vector[V_LATENCY_S : V_LATENCY_S + KIND_COUNT] = latency_s * (1.0 + growth * (size - 1.0))
        vector[V_RAMP : V_RAMP + KIND_COUNT] = ramp
        rate = bytes_per_s / (1.0 + small_group / size)
    vector[V_BYTES_PER_S : V_BYTES_PER_S + KIND_COUNT] = vector[V_GATHER_BYTES_PER_S] = rate
    return vector


# Columns of a record of one collective.
L_KIND, L_AXIS, L_BYTES, L_SECONDS, L_OPERATOR, L_TENSOR, L_BACKWARD = range(7)
L_COUNT = 7
NO_RECORDS = np.empty((0, L_COUNT))
"""Given in place of a buffer where nobody wants a list."""
TAG = types.UniTuple(int64, 3)


@borrowing(float64(int64, int64, float64, float64[::1], float64, TAG, float64[:, ::1], int64[::1]), inner=True)
def spend(
    kind: int,
    axis: int,
    size: float,
    link: np.ndarray,
    data: float,
    tag: tuple[int, int, int],
    records: np.ndarray,
    cursor: np.ndarray,
) -> float:
    """`collective_s`, written down when `records` has room.

    Args:
        kind: see `collective_s`.
        axis: mesh axis.
        size: see `collective_s`.
        link: see `collective_s`.
        data: see `collective_s`.
        tag: operator row that asks for it, tensor row, 1 in the backward pass or -1 before the tensor is sent here.
        records: [n, L_COUNT] buffer.
        cursor: [1] rows written.
    """
    seconds: float = collective_s(kind, size, link, data)
    if cursor[0] < records.shape[0] and size > 1.0 and data > 0.0:
        row = records[cursor[0]]
        row[L_KIND] = kind
        row[L_AXIS] = axis
        row[L_BYTES] = data
        row[L_SECONDS] = seconds
        row[L_OPERATOR] = tag[0]
        row[L_TENSOR] = tag[1]
        row[L_BACKWARD] = tag[2]
        cursor[0] += 1
    return seconds


@borrowing(
    float64(
        float64,
        int64[::1],
        int64[::1],
        float64[::1],
        float64[:, ::1],
        float64[::1],
        TAG,
        float64[:, ::1],
        int64[::1],
    )
)
def convert(
    data: float,
    source: np.ndarray,
    target: np.ndarray,
    sizes: np.ndarray,
    links: np.ndarray,
    times: np.ndarray,
    tag: tuple[int, int, int],
    records: np.ndarray,
    cursor: np.ndarray,
) -> float:
    """Adds the time of each kind of collective that turns `source` into `target` to `times`.

    Args:
        data: bytes of the whole tensor.
        source: placement on each mesh axis.
        target: wanted placement on each mesh axis.
        sizes: ranks of each axis.
        links: [axes, V_COUNT].
        times: [KIND_COUNT], seconds, added to.
        tag: see `spend`.
        records: see `spend`.
        cursor: see `spend`.

    Returns:
        The sum of V_WAIT over the collectives.
    """
    local = data
    waited = 0.0
    for a in range(sizes.shape[0]):
        if source[a] == UNKNOWN or target[a] == UNKNOWN or source[a] >= 0:
            local /= sizes[a]
    for a in range(sizes.shape[0]):
        if target[a] >= 0 and source[a] < 0 and source[a] != UNKNOWN:
            if source[a] == PARTIAL:
                waited += links[a, V_WAIT]
                times[REDUCE_SCATTER] += spend(REDUCE_SCATTER, a, sizes[a], links[a], local, tag, records, cursor)
            local /= sizes[a]
    for a in range(sizes.shape[0]):
        if source[a] >= 0 and target[a] >= 0 and source[a] != target[a]:
            waited += links[a, V_WAIT]
            times[ALL_TO_ALL] += spend(ALL_TO_ALL, a, sizes[a], links[a], local, tag, records, cursor)
        elif source[a] == PARTIAL and target[a] == BROADCAST:
            waited += links[a, V_WAIT]
            times[ALL_REDUCE] += spend(ALL_REDUCE, a, sizes[a], links[a], local, tag, records, cursor)
    for a in range(sizes.shape[0] - 1, -1, -1):
        if source[a] >= 0 and (target[a] == BROADCAST or target[a] == PARTIAL):
            local *= sizes[a]
            if target[a] == BROADCAST:
                # Parts of a sum are zeros around what a rank holds: nothing is sent.
                waited += links[a, V_WAIT]
                times[ALL_GATHER] += spend(ALL_GATHER, a, sizes[a], links[a], local, tag, records, cursor)
    return waited

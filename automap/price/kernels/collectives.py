"""The collectives that placements require: conversions between placements and their cost.

`convert` is the one place that says which collectives turn a tensor from one placement into another on an n-D mesh,
and in which order: first those that shrink the local part (slices, reduce-scatters), then those that keep its size
(all-to-alls, all-reduces), then those that grow it (all-gathers). Each sends as many bytes as ring algorithms do. The
price counts the exposed part of each, see `exposed_share`; `Evaluator.collectives` lists them one by one. Units:
seconds, bytes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import boolean, float64, int64

from automap.jit import borrowing
from automap.price.kernels.array_types import Record, record_of, tuple_type
from automap.price.kernels.cost_records import RECORDER, Recorder
from automap.price.kernels.records import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, NUM_COLLECTIVES, REDUCE_SCATTER, SEND_RECV
from automap.price.kernels.stage_records import HARDWARE, LINK, STAGE, LinkRow, Stage
from ir.factors import BROADCAST, PARTIAL

UNKNOWN = -3
"""A placement that is undecided. For lower bounds, converting from or to it is free, and it counts as split."""
SUMMED = -4
"""Placement of a tensor that crosses into a chunk: the chunk before made a partial sum of it and all-reduced that
before sending, so that it arrives whole (B)."""

RAMP_UNIT_S = 1e-6
"""Time at which the ramp of a link is stated: 1 us, by definition."""
RINGS = (ALL_GATHER, REDUCE_SCATTER)
"""Kinds that run as a ring between hosts: their latency grows with the number of ranks. That of all other kinds grows
with the logarithm of the number of hosts, as in a tree."""


@borrowing(float64(int64, float64, LINK, float64))
def collective_s(kind: int, size: float, link: Record, data: float) -> float:
    """Time of one collective.

    Args:
        kind: ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL or SEND_RECV.
        size: ranks of the group.
        link: link of the group, see `LinkRow`.
        data: bytes that a rank holds before or after the collective, the larger of the two (the convention of
            nccl-tests).

    Returns:
        Seconds.
    """
    if size <= 1.0 or data <= 0.0:
        return 0.0
    share = (size - 1.0) / size
    if kind == ALL_REDUCE:
        share *= 2.0
    if kind == SEND_RECV:
        share = 1.0
    x = share * data / link.bytes_per_s[kind]
    return float(link.latency_s[kind] + x + link.ramp[kind] * math.sqrt(x * RAMP_UNIT_S))


def host_link(
    size: int, *, latency_s: float, growth: float, bytes_per_s: float, small_group: float, ramp: float
) -> Record:
    """The link of a group inside a host, a `LinkRow`.

        t = latency * (1 + growth * (n - 1)) + x + ramp * sqrt(x * 1 us)
        x = factor * bytes / bandwidth * (1 + small_group / n)

    Bare collectives (`automap/data/fitted/collectives.json`) and those of training steps differ in the constants alone.

    Args:
        size: ranks of the group, n.
        latency_s: latency of two ranks.
        growth: share of that latency which each further rank adds.
        bytes_per_s: bandwidth that a large group reaches.
        small_group: the bytes of a group of n ranks take 1 + small_group / n times as long as those of a large group.
        ramp: factor of the square root, which models NCCL's change of protocols between small and large messages.
    """
    alone = size <= 1
    rate = bytes_per_s if alone else bytes_per_s / (1.0 + small_group / size)
    each = np.ones(NUM_COLLECTIVES)
    return record_of(
        LinkRow(
            latency_s=each * (0.0 if alone else latency_s * (1.0 + growth * (size - 1.0))),
            bytes_per_s=each * rate,
            ramp=each * (0.0 if alone else ramp),
            gather_bytes_per_s=rate,
            host_time=0.0,
        )
    )


class Reason(NamedTuple):
    """Why a collective runs; it is recorded with the collective."""

    operator: int
    """Row of the operator that requires it."""
    tensor: int
    """Row of the tensor that moves."""
    direction: int
    """FORWARD_PASS, BACKWARD_PASS or BEFORE_SENDING."""
    copies: float
    """`TensorRow.copies` of the tensor."""


REASON = tuple_type(Reason)


@borrowing(float64(int64, boolean, HARDWARE), inner=True)
def exposed_share(kind: int, is_routed: bool, hardware: Record) -> float:
    """Share of the time of a collective inside a stage that is exposed, 0 to 1.

    Trainers overlap the collectives of tensor and sequence parallelism, piece by piece, with the product before or
    after them, and all-to-alls with the computation of other samples. Two kinds of collectives are wholly exposed:
    those to and from experts other than all-to-alls, since experts start when all their tokens are there; and those
    that gather samples, or reduce and scatter them.

    Args:
        kind: of the collective.
        is_routed: whether the samples are split before or after the collective, or it sends tokens to or from experts.
        hardware: of the stage, with the shares of its trainer.
    """
    if kind == ALL_TO_ALL:
        return float(hardware.exposed_exchange)
    return 1.0 if is_routed else float(hardware.exposed)


@borrowing(float64(float64, float64), inner=True)
def sent_share(copies: float, ranks: float) -> float:
    """Share of the copies of a token that are sent if a rank gets one copy for all experts of the token that it holds.

    The experts of a token are assumed to be on random ranks: a rank has none of the k experts with probability
    (1 - 1 / ranks)^k.

    Args:
        copies: experts of a token.
        ranks: ranks that share the experts.
    """
    if copies <= 1.0 or ranks <= 1.0:
        return 1.0
    return float(ranks * (1.0 - (1.0 - 1.0 / ranks) ** copies) / copies)


@borrowing(float64(int64, int64, boolean, STAGE, float64, REASON, RECORDER), inner=True)
def spend(
    kind: int, axis: int, moves_samples: bool, stage: Stage, data: float, reason: Reason, recorder: Recorder
) -> float:
    """Exposed seconds of one collective over a mesh axis; records the collective if the recorder has room.

    Args:
        kind: of the collective.
        axis: the mesh axis.
        moves_samples: whether the samples are split before or after it, see `exposed_share`.
        data: bytes, see `collective_s`.
    """
    size = stage.axes[axis]
    seconds: float = collective_s(kind, size, stage.links[axis], data)
    shown: float = exposed_share(kind, moves_samples or reason.copies > 0.0, stage.hardware) * seconds
    count = recorder.num_rows[0]
    if count < recorder.rows.shape[0] and size > 1.0 and data > 0.0:
        row = recorder.rows[count]
        row.kind = kind
        row.axis = axis
        row.data_bytes = data
        row.seconds = seconds
        row.shown_s = shown
        row.operator = reason.operator
        row.tensor = reason.tensor
        row.direction = reason.direction
        recorder.num_rows[0] = count + 1
    return shown


@borrowing(boolean(int64), inner=True)
def _is_unsplit(placement: int) -> bool:
    """Whether all ranks of an axis hold the whole tensor, or partial sums of it."""
    return placement in (BROADCAST, PARTIAL)


@borrowing(float64(int64, float64, float64, STAGE, REASON, RECORDER), inner=True)
def _summed_s(axis: int, whole: float, least: float, stage: Stage, reason: Reason, recorder: Recorder) -> float:
    """Least exposed seconds of summing up tokens over an axis while another one, which may exchange them, is undecided.

    If it does not, they are all-reduced. If it does, they are reduced and scattered before the exchange, and gathered
    after it, where a trainer that sends one copy of a token to a rank has fewer of them.

    Args:
        axis: the mesh axis over which the tokens are partial sums.
        whole: bytes of an all-reduce.
        least: fewest bytes that are scattered and gathered if another axis exchanges tokens.
    """
    link, size = stage.links[axis], stage.axes[axis]
    shown: float = spend(ALL_REDUCE, axis, False, stage, whole, reason, recorder)
    apart: float = collective_s(REDUCE_SCATTER, size, link, least) + collective_s(ALL_GATHER, size, link, least)
    return float(min(shown, exposed_share(ALL_GATHER, True, stage.hardware) * apart))


@borrowing(float64(float64, int64[::1], int64[::1], STAGE, float64[::1], REASON, RECORDER), inner=True)
def _exchange(
    local: float,
    source: np.ndarray,
    target: np.ndarray,
    stage: Stage,
    times: np.ndarray,
    reason: Reason,
    recorder: Recorder,
) -> float:
    """Adds the exposed seconds of the all-to-alls and all-reduces of a conversion to `times`.

    A trainer may send tokens that go to experts over several axes in one joined exchange. It is priced axis by axis:
    tokens that go to another rank of one axis reach their final rank with that, so that the axes after it are priced
    for the other tokens alone. Such a trainer sends no token twice (the dispatcher `alltoall` of Megatron-Core): where
    no dim is split over an axis, each of its ranks sends a part. Partial sums are reduced and scattered over this axis
    before the exchange, and tokens that are whole after it are gathered.

    Args:
        local: bytes that a rank holds.

    Returns:
        Host time, see `convert`.
    """
    sizes, links = stage.axes, stage.links
    is_joined = reason.copies > 0.0 and stage.hardware.joins_exchanges > 0.0
    ranks = 1.0
    # Ranks of the smallest exchange that undecided axes may still become; 1 if they cannot become one.
    fewest = 1.0
    for a in range(sizes.shape[0]):
        if source[a] >= 0 and target[a] >= 0 and source[a] != target[a]:
            ranks *= sizes[a]
        elif (source[a] == UNKNOWN or target[a] == UNKNOWN) and sizes[a] > 1.0:
            fewest = sizes[a] if fewest <= 1.0 else min(fewest, sizes[a])
    sent = local
    if reason.copies > 0.0 and stage.hardware.copies_once > 0.0:
        sent *= sent_share(reason.copies, ranks)
    in_parts = is_joined and ranks > 1.0
    least = local
    if reason.copies > 0.0 and stage.hardware.copies_once > 0.0:
        least *= sent_share(reason.copies, fewest)
    waited: float = 0.0
    for a in range(sizes.shape[0]):
        if in_parts and sizes[a] > 1.0 and _is_unsplit(source[a]) and _is_unsplit(target[a]):
            if source[a] == PARTIAL:
                waited += links[a].host_time
                times[REDUCE_SCATTER] += spend(REDUCE_SCATTER, a, False, stage, sent, reason, recorder)
            sent /= sizes[a]
    part = sent
    for a in range(sizes.shape[0]):
        if source[a] == UNKNOWN or target[a] == UNKNOWN:
            # Once decided it may be an all-to-all; a joined one would leave fewer bytes to the axes after it.
            part /= sizes[a] if is_joined else 1.0
        elif source[a] >= 0 and target[a] >= 0 and source[a] != target[a]:
            waited += links[a].host_time
            times[ALL_TO_ALL] += spend(ALL_TO_ALL, a, False, stage, part, reason, recorder)
            part /= sizes[a] if is_joined else 1.0
        elif source[a] == PARTIAL and target[a] == BROADCAST and not in_parts:
            waited += links[a].host_time
            if is_joined and fewest > 1.0:
                times[ALL_REDUCE] += _summed_s(a, local, least, stage, reason, recorder)
            else:
                times[ALL_REDUCE] += spend(ALL_REDUCE, a, False, stage, local, reason, recorder)
        if _is_unsplit(source[a]) and _is_unsplit(target[a]):
            least /= sizes[a]
    for a in range(sizes.shape[0] - 1, -1, -1):
        if in_parts and sizes[a] > 1.0 and _is_unsplit(source[a]) and _is_unsplit(target[a]):
            sent *= sizes[a]
            if target[a] == BROADCAST:
                waited += links[a].host_time
                times[ALL_GATHER] += spend(ALL_GATHER, a, False, stage, sent, reason, recorder)
    return waited


@borrowing(float64(float64, int64[::1], int64[::1], int64, STAGE, float64[::1], REASON, RECORDER))
def convert(
    data: float,
    source: np.ndarray,
    target: np.ndarray,
    batch_dim: int,
    stage: Stage,
    times: np.ndarray,
    reason: Reason,
    recorder: Recorder,
) -> float:
    """Adds the exposed seconds of the collectives that turn the placement `source` into `target` to `times`.

    Args:
        data: bytes of the whole tensor.
        source: [axes] placement on each mesh axis.
        target: [axes] required placement on each mesh axis.
        batch_dim: dim of the tensor that holds the samples, or -1.
        times: [NUM_COLLECTIVES] seconds of each kind, added to.

    Returns:
        Host time of the collectives, as a multiple of that of a collective of two ranks.
    """
    sizes, links = stage.axes, stage.links
    local = data
    waited: float = 0.0
    for a in range(sizes.shape[0]):
        if source[a] == UNKNOWN or target[a] == UNKNOWN or source[a] >= 0:
            local /= sizes[a]
    for a in range(sizes.shape[0]):
        if target[a] >= 0 and source[a] < 0 and source[a] != UNKNOWN:
            if source[a] == PARTIAL:
                waited += links[a].host_time
                times[REDUCE_SCATTER] += spend(
                    REDUCE_SCATTER, a, target[a] == batch_dim, stage, local, reason, recorder
                )
            local /= sizes[a]
    exchanged: float = _exchange(local, source, target, stage, times, reason, recorder)
    waited += exchanged
    for a in range(sizes.shape[0] - 1, -1, -1):
        if source[a] >= 0 and (target[a] == BROADCAST or target[a] == PARTIAL):
            local *= sizes[a]
            if target[a] == BROADCAST:
                # S to P sends nothing: each rank pads its part with zeros.
                waited += links[a].host_time
                times[ALL_GATHER] += spend(ALL_GATHER, a, source[a] == batch_dim, stage, local, reason, recorder)
    return waited

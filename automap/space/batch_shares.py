"""Batch shares: how many samples of a micro-batch each rank gets in a stage with devices of several kinds.

Whale (arXiv 2011.09208) balances a mixed cluster by giving faster devices more of the batch. A plan chooses one of a
few ways to share out the samples: evenly, in proportion to the speed of the kinds on this model's own units, some ways
around that, and in proportion to their memory. A way between even and proportional gives a fast kind less than its
speed allows, which saves its memory; a way beyond proportional gives a slow kind less, which saves that of the slow
kind. Only the ranks of the outer axis may have unlike shares, which the other axes divide evenly. Every rank has at
least one sample, since a rank without samples would still take part in all collectives. Units: samples, seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from automap.arrays import Floats, Ints
from automap.price.evaluator import Evaluator
from automap.price.kernels.stage_records import Stage
from automap.price.lowered_plan import Segment
from automap.price.stage_layout import StageLayout
from ir.factors import BROADCAST

TILTS = (1.0, 0.95, 1.05, 0.9, 1.1, 0.75, 1.25, 0.5)
"""Ways to share out samples, as points on the line from the even shares, 0, to the shares in proportion to speed, 1
(assumed). They are dense around 1, since the best point depends a little on the shardings of a plan."""
NUM_WAYS = 2 + len(TILTS)
"""Number of ways: even, `TILTS`, in proportion to memory."""
GROWTH = 4
"""Factor between the numbers of samples at which a kind is priced (assumed). Between these, seconds are interpolated
linearly."""
HALVINGS = 40
"""Number of bisections of an interval of seconds, which reduce it to 1e-12 of its length."""


class Speeds:
    """Seconds of one device of each kind for all units of a model, forward and backward, by number of samples.

    Attributes:
        samples: [points] ascending, from 0.
        seconds: [kinds, points], strictly rising.
    """

    def __init__(self, evaluator: Evaluator, kinds: Sequence[StageLayout]) -> None:
        """Prices every unit type on one device of each kind.

        Args:
            evaluator: of the problem.
            kinds: for each kind, a stage of such devices.
        """
        most = evaluator.problem.training.global_batch
        points = [1, GROWTH]
        while points[-1] < most:
            points.append(points[-1] * GROWTH)
        self.samples: Floats = np.array([0, *points], dtype=np.float64)
        self.seconds: Floats = np.empty((len(kinds), len(self.samples)))
        for number, stage in enumerate(kinds):
            found = np.array([seconds_alone(evaluator, stage, float(count)) for count in points])
            # The time without samples, which is that of launches, is extrapolated from the first two points.
            start = max(0.0, found[0] - (found[1] - found[0]) / (points[1] - points[0]))
            rising = np.maximum.accumulate([start, *found.tolist()])
            self.seconds[number] = rising + 1e-12 * rising[-1] * np.arange(len(rising))

    def balanced(self, kinds: Ints, ranks: Ints, inner: Floats, batch: Ints) -> Floats:
        """Samples for which all ranks of a stage take the same time.

        Args:
            kinds: [stages, kinds of a stage] number of each kind.
            ranks: [stages, kinds of a stage] ranks of each; 0 after the last kind of a stage.
            inner: [stages] devices of a rank, which divide its work.
            batch: [batches] samples of a micro-batch.

        Returns:
            [stages, batches, kinds of a stage] samples of a rank of each kind, not rounded.
        """
        shape = (len(ranks), len(batch), ranks.shape[1])
        low = np.zeros(shape[:2])
        high = np.full(shape[:2], self.seconds.max())
        which = np.broadcast_to(kinds[:, None, :], shape)
        found = np.zeros(shape)
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            at = np.broadcast_to(middle[:, :, None], shape)
            for number, seconds in enumerate(self.seconds):
                mine = which == number
                found[mine] = np.interp(at[mine], seconds, self.samples)
            found *= inner[:, None, None]
            enough = (found * ranks[:, None, :]).sum(axis=2) >= batch
            high = np.where(enough, middle, high)
            low = np.where(enough, low, middle)
        return found


def seconds_alone(evaluator: Evaluator, stage: StageLayout, samples: float) -> float:
    """Seconds of one device of a stage for all units of the model, forward and backward, without any splits."""
    blocks, spans, num_axes = evaluator.blocks, evaluator.tables.spans, len(stage.axes)
    times = np.bincount([unit.type for unit in blocks.units], minlength=blocks.num_types)
    nothing, nowhere = np.zeros(num_axes, dtype=np.bool_), np.full(num_axes, BROADCAST, dtype=np.int64)
    alone = Stage(np.ones(num_axes), stage.links, stage.hardware, nothing, float(samples))
    workspace, total = evaluator.new_workspace(num_axes), 0.0
    for unit_type in np.flatnonzero(times).tolist():
        first, last = int(spans[unit_type]), int(spans[unit_type + 1])
        segment = Segment(
            unit=-1,
            first=first,
            last=last,
            chosen=np.zeros((last - first, num_axes), dtype=np.int64),
            recomputed=np.zeros(last - first, dtype=np.bool_),
        )
        cost = evaluator.unit_cost(segment, nowhere, alone, workspace)
        seconds = cost.forward_s + cost.backward_s + cost.forward_host_s + cost.backward_host_s
        total += float(times[unit_type] * seconds)
    return total


def ways_to_share(balanced: Floats, memory: Floats, ranks: Ints, quanta: Ints, batch: Ints) -> tuple[Ints, Ints]:
    """Samples of the kinds of each stage, for every way to share them out.

    Args:
        balanced: [stages, batches, kinds] samples of a rank for which all ranks take the same time.
        memory: [stages, kinds] bytes of a device.
        ranks: [stages, kinds] ranks of each kind; 0 after the last kind of a stage.
        quanta: [stages] the samples of a rank are a multiple of this.
        batch: [batches] samples of a micro-batch.

    Returns:
        [stages, batches, NUM_WAYS, kinds] samples of all ranks of a kind together; and [stages, batches, NUM_WAYS] the
        first way with the same samples, 0 also where a way leaves a rank without samples.
    """
    count = ranks.sum(axis=1)
    even = batch / count[:, None]
    by_memory = memory / (memory * ranks).sum(axis=1, keepdims=True)
    per_rank = np.stack(
        [
            *(even[:, :, None] + tilt * (balanced - even[:, :, None]) for tilt in TILTS),
            by_memory[:, None, :] * batch[:, None],
        ],
        axis=2,
    )
    step, many = quanta[:, None, None, None], ranks[:, None, None, :]
    totals = np.maximum(np.rint(per_rank / step), 1.0).astype(np.int64) * step * many
    # The kind with most samples gets the rest from rounding, since that changes it least.
    largest = (per_rank * many).argmax(axis=3)[..., None]
    others = totals.sum(axis=3, keepdims=True) - np.take_along_axis(totals, largest, axis=3)
    np.put_along_axis(totals, largest, batch[:, None, None] - others, axis=3)
    is_legal = (totals >= step * many).all(axis=3) & (batch % quanta[:, None] == 0)[:, :, None]
    is_even = (totals * count[:, None, None, None] == many * batch[:, None, None]).all(axis=3)
    first = np.zeros((*totals.shape[:2], NUM_WAYS), dtype=np.int64)
    for way in range(1, NUM_WAYS):
        first[:, :, way] = np.where(is_legal[:, :, way - 1] & ~is_even[:, :, way - 1], way, 0)
        for other in range(way - 1, 0, -1):
            is_same = (totals[:, :, way - 1] == totals[:, :, other - 1]).all(axis=2) & (first[:, :, way] > 0)
            first[:, :, way] = np.where(is_same, first[:, :, other], first[:, :, way])
    return np.concatenate([np.zeros_like(totals[:, :, :1]), totals], axis=2), first


def share_out(
    evaluator: Evaluator, stages: Sequence[StageLayout], quanta: Ints, batch: Ints, most: int
) -> tuple[Ints, Ints]:
    """`ways_to_share` of stages of several kinds.

    Args:
        evaluator: of the problem.
        stages: each with several `kinds`, at most `most`.
        quanta: [stages] the samples of a rank are a multiple of this.
        batch: [batches] samples of a micro-batch.
        most: number of kinds of the stage with most kinds.
    """
    if not stages:
        return np.zeros((0, len(batch), NUM_WAYS, most), dtype=np.int64), np.zeros((0, len(batch), NUM_WAYS), np.int64)
    named: dict[bytes, StageLayout] = {}
    kinds, ranks = np.zeros((len(stages), most), dtype=np.int64), np.zeros((len(stages), most), dtype=np.int64)
    memory = np.zeros((len(stages), most))
    for at, stage in enumerate(stages):
        for number, kind in enumerate(stage.kinds):
            name = kind.stage.hardware.tobytes()
            named.setdefault(name, kind.stage)
            kinds[at, number] = list(named).index(name)
            ranks[at, number], memory[at, number] = len(kind.ranks), kind.stage.capacity
    inner = np.array([stage.axes[1:].prod() for stage in stages])
    balanced = Speeds(evaluator, list(named.values())).balanced(kinds, ranks, inner, batch)
    return ways_to_share(balanced, memory, ranks, quanta, batch)


def dealt(total: int, ranks: int, quantum: int) -> list[int]:
    """[ranks] `total` samples divided as evenly as possible, in multiples of `quantum`; the first ranks have more."""
    least, more = divmod(total // quantum, ranks)
    return [quantum * (least + (rank < more)) for rank in range(ranks)]

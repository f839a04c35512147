"""Simulated steps: the step times of many partitions of a pipeline under its schedule, from the costs of a stage table,
and a local search that moves units and devices between the stages of a partition.

The latency of a partition adds up its stages and takes the slowest one once for each further micro-batch. It does not
know that the stages after a stage hide the reduction of its gradients, or that stages wait for each other. The
simulation does. A partition takes some microseconds, since a table knows what every stage costs; a price takes about a
millisecond. Where units move, a stage recomputes what it then must. Units: seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from agents.planners.chunk_moves import moves_of
from agents.planners.device_partition import Partition, StageOf
from agents.planners.kernels.simulated_steps import Pipelines, step_times
from agents.planners.stage_table import StageTable
from automap.arrays import Floats, Ints, Mask
from automap.price.kernels.step_records import Order
from automap.schedule import KINDS, NO_PROGRAM

SHARPNESS = (16.0, np.inf)
"""Exponents p of the norm of the stages' seconds that replaces those of the slowest stage in the objective of moves,
one after another (assumed). The last one is the step time itself, which no move shortens where two stages are equally
slow; with a finite exponent it is worth something to relieve one of them."""
MOST_MOVES = 48
"""Largest number of rounds of moves under each of these exponents (assumed)."""
MOST_TRIED = 4_000
"""About the largest number of partitions that a round of moves tries (assumed): stages that are far from each other
exchange nothing in pipelines so long that there would be more."""
TOGETHER = 8
"""Largest number of moves that are made at once: the best ones, each of other stages (assumed)."""
PAIRED = 12
"""Number of the best moves that are combined in pairs where no single one gains (assumed)."""
RANDOM, WORSE = 3, 1.15
"""Number of random moves that change a partition, and largest factor by which they may make it slower (assumed)."""
ENTRIES = 5
"""Number of entries of a stage table that take as long as a stage of a simulation, half a microsecond."""
GAIN = 1e-6
"""Least share by which moves must shorten the step (assumed)."""


class Places(NamedTuple):
    """Some partitions with equally many stages."""

    ends: Ints
    """[partitions, stages - 1] number of units before the end of each stage but the last."""
    places: Ints
    """[partitions, stages - 1] place in the order of the devices after each stage but the last."""

    @staticmethod
    def of(partitions: Sequence[Partition]) -> Places:
        """The places of partitions with equally many stages."""
        inner = [partition.stages[1:] for partition in partitions]
        ends, places = ([[of[at] for of in stages] for stages in inner] for at in (0, 2))
        shape = len(partitions), len(partitions[0].stages) - 1
        return Places(np.array(ends, dtype=np.int64).reshape(shape), np.array(places, dtype=np.int64).reshape(shape))

    def some(self, rows: Ints) -> Places:
        """The partitions with these numbers."""
        return Places(self.ends[rows], self.places[rows])


class SimulatedSteps:
    """Simulates the partitions of one table under 1F1B.

    Attributes:
        table: the costs of stages.
        entries: number of entries of the table whose costs would take as long as the simulations so far.
    """

    def __init__(self, table: StageTable) -> None:
        self.entries = 0
        self.table, self._units, self._devices = table, table.space.num_units, len(table.order)
        self._sizes = np.zeros(self._devices + 1, dtype=np.bool_)
        self._sizes[table.sizes] = True
        self._patterns: dict[tuple[int, int], int] = {}
        self._sent: dict[tuple[int, int, int, int], tuple[float, float]] = {}
        self._tied = table.num_tied
        self._order = Order(KINDS["1f1b"], table.num_micro_batches, NO_PROGRAM)

    def ranked(self, partitions: Iterable[Partition]) -> list[tuple[float, Partition]]:
        """Distinct partitions with their step times, the fastest first; those that do not fit are left out."""
        of_numbers: dict[int, dict[tuple[StageOf, ...], Partition]] = {}
        for partition in partitions:
            of_numbers.setdefault(len(partition.stages), {})[partition.stages] = partition
        found: list[tuple[float, Partition]] = []
        for distinct in of_numbers.values():
            some = list(distinct.values())
            found += zip(self.seconds(Places.of(some), np.inf).tolist(), some, strict=True)
        return sorted((one for one in found if one[0] < np.inf), key=lambda one: one[0])

    def seconds(self, partitions: Places, sharpness: float) -> Floats:
        """[partitions] step times, infinite where a partition is not possible or does not fit.

        Args:
            partitions: the partitions.
            sharpness: exponent p, see `SHARPNESS`; infinite for the step times themselves.
        """
        count, last = partitions.ends.shape
        bounds = np.zeros((2, count, last + 2), dtype=np.int64)
        bounds[0, :, 1:-1], bounds[1, :, 1:-1] = partitions
        bounds[:, :, -1] = np.array([[self._units], [self._devices]])
        (firsts, begins), lasts, sizes = bounds[:, :, :-1], bounds[0, :, 1:], np.diff(bounds[1], axis=1)
        legal: Mask = np.asarray(((lasts > firsts) & (sizes > 0)).all(axis=1))
        legal[legal] = self._sizes[sizes[legal]].all(axis=1)
        rows = np.flatnonzero(legal)
        costs = np.empty((len(rows), 4 + self._tied, last + 1))
        links = np.ones((len(rows), 2, last + 1))
        base, following = self._devices + 1, np.zeros((len(rows), last + 1), dtype=np.int64)
        following[:, :-1] = sizes[rows, 1:]
        if self._tied and last:
            # The stages that hold a tied parameter may exchange it over the link from the last stage to the first.
            following[:, -1] = sizes[rows, 0]
        keys = (following * base + sizes[rows]) * base + begins[rows]
        firsts, lasts = firsts[rows], lasts[rows]
        for stage in range(last + 1):
            for key, mine in _groups(keys[:, stage]):
                rest, place = divmod(key, base)
                after, size = divmod(rest, base)
                passes = self.table.passes(last + 1 - stage, place, size)
                costs[mine, :, stage] = passes[:, firsts[mine, stage], lasts[mine, stage]].T
                if after:
                    links[mine, :, stage] = self._link(place, size, (place + size) % self._devices, after)
        stages = self._with_transfers(costs, links[:, 1, :-1])
        self.entries += ENTRIES * len(rows) * (last + 1)
        found, simulated = np.full(count, np.inf), np.empty(len(rows))
        sent_bytes = float(self.table.space.evaluator.settings(self.table.zero).sent_gradient_bytes)
        step_times(self._order, Pipelines(stages, links, sent_bytes * costs[:, 4:]), simulated)
        if sharpness < np.inf:
            fits = np.flatnonzero(simulated < np.inf)
            spent_s = stages[fits, :2].sum(axis=1)
            slowest_s = spent_s.max(axis=1)
            norms = ((spent_s / slowest_s[:, None]) ** sharpness).sum(axis=1) ** (1.0 / sharpness)
            simulated[fits] += (self._order.num_micro_batches - 1) * slowest_s * (norms - 1.0)
        found[rows] = simulated
        return found

    def _with_transfers(self, costs: Floats, bytes_per_s: Floats) -> Floats:
        """[partitions, 3, stages] the seconds of `Pipelines`.

        Args:
            costs: [partitions, 4 + tied parameters, stages] results of `StageTable.passes`.
            bytes_per_s: [partitions, stages - 1] bandwidth from a device of each stage to the next one.
        """
        settings = self.table.space.evaluator.settings(self.table.zero)
        shown = 1.0 - float(settings.send_overlap)
        crossing_s = float(settings.send_s) + shown * costs[:, 3, :-1] / bytes_per_s
        stages = np.ascontiguousarray(costs[:, :3])
        # A stage exchanges with both neighbours, one after the other.
        stages[:, :2, :-1] += 0.5 * crossing_s[:, None]
        stages[:, :2, 1:] += 0.5 * crossing_s[:, None]
        return stages

    def _link(self, place: int, size: int, other: int, following: int) -> tuple[float, float]:
        """Seconds of an empty message from each device of a stage to another stage, and bytes/s.

        Args:
            place: place of the first device of the stage in the order.
            size: number of its devices.
            other: place of the first device of the other stage.
            following: number of its devices.
        """
        key = place, size, other, following
        if key not in self._sent:
            laid_out, both = self.table.space.evaluator.laid_out, ((place, size), (other, following))
            devices = tuple(np.array(self.table.devices(*one)) for one in both)
            for one, mine in zip(both, devices, strict=True):
                if one not in self._patterns:
                    self._patterns[one] = laid_out.pattern(mine)
            patterns = self._patterns[both[0]], self._patterns[both[1]]
            self._sent[key] = laid_out.sends.of(patterns, *devices)
        return self._sent[key]

    def moved(
        self, partition: Partition, steps: Sequence[int], is_over: Callable[[], bool] = lambda: False
    ) -> Partition:
        """Moves a unit, devices or both between two stages, or makes several such moves at once, as long as the step
        gets shorter.

        Args:
            partition: the partition to begin with, which fits.
            steps: numbers of devices that move at a time, besides those with which a stage has a sample less or more.
            is_over: whether moves shall end.

        Returns:
            The best partition found.
        """
        now = best = Places.of([partition])
        best_s = float(self.seconds(now, np.inf)[0])
        for sharpness in SHARPNESS:
            worth_s = float(self.seconds(now, sharpness)[0])
            for _ in range(MOST_MOVES):
                found = None if is_over() else self._better(now, worth_s, steps, sharpness)
                if found is None:
                    break
                worth_s, now = found
                if (now_s := float(self.seconds(now, np.inf)[0])) < best_s:
                    best_s, best = now_s, now
        return self._partition(best)

    def changed(self, partition: Partition, steps: Sequence[int], rng: np.random.Generator) -> Partition:
        """The partition after `RANDOM` random moves, each of which makes it at most `WORSE` times as slow.

        Args:
            partition: a partition that fits.
            steps: see `moved`.
            rng: draws the moves.
        """
        now = Places.of([partition])
        most_s = WORSE * float(self.seconds(now, np.inf)[0])
        for _ in range(RANDOM):
            tried = self._neighbours(now, steps)
            near = np.flatnonzero(self.seconds(tried, np.inf) <= most_s)
            if len(near):
                now = tried.some(rng.choice(near, 1))
        return self._partition(now)

    def _better(
        self, now: Places, worth_s: float, steps: Sequence[int], sharpness: float
    ) -> tuple[float, Places] | None:
        """A partition that is better than the one at hand, and what it is worth; None where there is none."""
        tried = self._neighbours(now, steps)
        spent_s = self.seconds(tried, sharpness)
        ranked = np.argsort(spent_s, kind="stable")
        ranked = ranked[spent_s[ranked] < np.inf]
        if not len(ranked):
            return None
        if spent_s[ranked[0]] < worth_s * (1.0 - GAIN):
            more = _together(now, tried.some(ranked[: 4 * TOGETHER]))
        else:
            more = _pairs(now, tried.some(ranked[:PAIRED]))
        tried = Places(*(np.concatenate([one[:1], other]) for one, other in zip(tried.some(ranked), more, strict=True)))
        spent_s = self.seconds(tried, sharpness)
        least = np.argmin(spent_s, keepdims=True)
        least_s = float(spent_s[least[0]])
        return (least_s, tried.some(least)) if least_s < worth_s * (1.0 - GAIN) else None

    def _neighbours(self, now: Places, steps: Sequence[int]) -> Places:
        """All moves of a partition: of a unit, of devices, and of both, the same way or against each other."""
        count = now.ends.shape[1]
        kinds = 1 + 3 * (len(steps) + 2)
        moves = moves_of(count, max(MOST_TRIED // (2 * kinds * max(count, 1)), 1))
        longer = np.diff(np.pad(moves, ((0, 0), (1, 1))), axis=1)
        fewer, more = np.array([self._a_sample(stage) for stage in self._staged(now)]).reshape(-1, 2).T
        takes, gives = fewer[longer.argmax(axis=1)], more[longer.argmin(axis=1)]
        ends, places = [now.ends + moves], [np.broadcast_to(now.places, moves.shape)]
        for step in [takes, gives, *(np.full(len(moves), fixed) for fixed in steps)]:
            some, widths = moves[step > 0], step[step > 0, None]
            for sign in (-1, 0, 1):
                ends.append(now.ends + sign * some)
                places.append(now.places + widths * some)
        return Places(np.concatenate(ends), np.concatenate(places))

    def _a_sample(self, stage: tuple[int, StageOf]) -> tuple[int, int]:
        """How many devices more a stage needs for its fullest replica to have a sample less, and how many it can give
        until it has a sample more; 0 where it cannot.

        Args:
            stage: number of stages from the stage to the last, and the stage.
        """
        tp, samples = self.table.strategy(*stage).tp, self.table.samples
        replicas = stage[1].devices // tp
        most = -(-samples // replicas)
        less = -(-samples // (most - 1)) - replicas if most > 1 else 0
        return less * tp, (replicas - -(-samples // (most + 1))) * tp

    def _staged(self, now: Places) -> list[tuple[int, StageOf]]:
        """The stages of one partition, each with the number of stages from itself to the last."""
        stages = self._partition(now).stages
        return [(len(stages) - number, stage) for number, stage in enumerate(stages)]

    def _partition(self, one: Places) -> Partition:
        """The partition of one row."""
        ends = [0, *one.ends[0].tolist(), self._units]
        places = [0, *one.places[0].tolist(), self._devices]
        stages = tuple(
            StageOf(first, last, begin, end - begin)
            for (first, last), (begin, end) in zip(itertools.pairwise(ends), itertools.pairwise(places), strict=True)
        )
        each = (
            float(self.table.seconds(len(stages) - number, stage.place, stage.devices)[stage.first, stage.last])
            for number, stage in enumerate(stages)
        )
        return Partition(max(each), stages)


def _groups(keys: Ints) -> Iterator[tuple[int, Ints]]:
    """The distinct ones of [n] whole numbers, and the places of each of them."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    ends = [*(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist(), len(keys)] if len(keys) else []
    for begin, end in itertools.pairwise([0, *ends]):
        yield int(ordered[begin]), order[begin:end]


def _together(now: Places, changed: Places) -> Places:
    """A partition with the first two changes at once, with the first three, and so on.

    A change is skipped if it alters a stage that an earlier one alters.

    Args:
        now: the partition.
        changed: the partition with each change alone.
    """
    touched, total, found = set[int](), now, list[Places]()
    for row in range(len(changed.ends)):
        more = Places(*(of[row] - before for of, before in zip(changed, now, strict=True)))
        stages = set(np.flatnonzero(sum(np.abs(np.diff(of[0], prepend=0, append=0)) for of in more)).tolist())
        if not stages & touched:
            touched |= stages
            total = Places(*(before + of for before, of in zip(total, more, strict=True)))
            found.append(total)
    ends, places = ([of[:0], *(one[number] for one in found[1:TOGETHER])] for number, of in enumerate(now))
    return Places(np.concatenate(ends), np.concatenate(places))


def _pairs(now: Places, changed: Places) -> Places:
    """A partition with every two changes at once; the arguments are those of `_together`."""
    first, second = np.triu_indices(len(changed.ends))
    return Places(*(of[first] + of[second] - before for of, before in zip(changed, now, strict=True)))

"""Chunk moves: a local search that moves units between the chunks of a pipeline as long as the step gets shorter.

A cut of a pipeline is given by the ends of its chunks. A move makes one chunk longer and another one shorter by a unit,
and shifts all ends between the two. The costs of the units are computed once, for each kind of stage and recompute
mode. For each cut, the schedule is then simulated and the memory is added up as in the exact price, within
microseconds. So a move is judged by all that a step waits for, such as long chunks or the gradients of an embedding,
and also by memory: moves can lead from a cut that does not fit to one that does. Units: seconds, bytes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from agents.planners.kernels.chunk_moves import UnitsOfRanks, steps_with_cuts
from agents.planners.unit_profile import UnitsInOrder
from automap.arrays import Floats, Ints, Mask
from automap.price.evaluator import pipeline_of
from automap.price.kernels.array_types import Rows
from automap.price.kernels.cost_records import PART_DTYPE, RANK_COST_DTYPE
from automap.price.kernels.step_records import Pipeline, new_step_workspace
from automap.price.lowered_plan import RECOMPUTE_MODES, LoweredPlan
from automap.space.space import PlanSpace, Values

FARTHEST, MOVES = 16, 5_000
"""The two chunks of a move are at most `FARTHEST` chunks apart, or farther as long as a cut has at most about `MOVES`
moves (assumed). So all pairs are tried with up to 51 chunks; with hundreds there are too many. T5-11B has an embedding
before its encoder and one before its decoder, and units move from the chunk of one to that of the other: with 48 chunks
on 512 H100 these are 23 chunks apart."""
SHARPNESS = (32.0, np.inf)
"""Exponents p of the norm (sum over ranks of t^p)^(1/p) that is minimised, one after another, t being the seconds until
a rank is done (assumed). The last one is the step time itself. It depends on the slowest rank alone; so a finite
exponent comes first, which also tells which of two cuts is more even."""
MOST_MOVES = 32
"""Largest number of rounds of moves under each of these exponents (assumed)."""
PAIRED = 12
"""Number of best moves that are combined in pairs where no single move gains. On 120 plans of T5-3B, GPT-2 XL and
BERT-large, cuts then end 0.1 % slower than the best that any of twelve variants found; 0.4 % without."""
TOGETHER = 12
"""Largest number of moves that are made at once where the best of them gains alone: the best ones, each of other chunks
(assumed)."""
LIKELY = 0.125
"""Share of all moves, the best ones, that the next rounds try first; all others are tried again when none of these
gains (assumed). With this and `TOGETHER`, 66 plans of nine problems of `benchmarks/network_gap.py` took 56 % of the
time, and ended from 1.1 % faster to 0.1 % slower."""
ALL_CUTS = 20_000
"""Number of cuts of a pipeline up to which all of them are tried (assumed): 2 to 13 microseconds each."""
FEW = 4
"""Micro-batches for each chunk after which a schedule is assumed to repeat itself."""
SAFE = 1e-4
"""Share of a device's memory that is kept free, for the error of the memory that is found here. The error is smaller
with plans in which partial sums are added up late (assumed)."""
GAIN = 1e-9
"""Least share by which a move must shorten the step: smaller differences are rounding errors."""


@functools.cache
def moves_of(count: int, farthest: int) -> Ints:
    """All moves that make one chunk longer and another one shorter by a unit.

    Args:
        count: number of ends, which is one less than that of chunks.
        farthest: largest distance between the two chunks, in chunks.

    Returns:
        [n, ends] by how many units each end moves: -1, 0 or 1.
    """
    spans = [(a, b) for a in range(count) for b in range(a + 1, min(count, a + farthest) + 1)]
    moves = [[sign * (a <= at < b) for at in range(count)] for a, b in spans for sign in (1, -1)]
    return np.array(moves, dtype=np.int64).reshape(len(moves), count)


def farthest(count: int) -> int:
    """Largest distance, in chunks, between the two chunks of a move, where `count` ends can move."""
    return max(FARTHEST, MOVES // (2 * count))


@functools.cache
def _shortened(count: int) -> Ints:
    """[n] number of the chunk that gets shorter in each move of `shifts`, where `count` ends can move."""
    found: Ints = np.diff(moves_of(count, farthest(count)), axis=1, prepend=0, append=0).argmin(axis=1)
    return found


def none_is_empty(ends: Ints, last: int) -> Mask:
    """[n] whether every chunk of a cut has at least one unit.

    Args:
        ends: [n, ends] ends of all chunks but the last.
        last: end of the last chunk.
    """
    lasts = np.all(ends[:, -1:] < last, axis=1)
    return np.asarray(np.all(ends[:, 1:] > ends[:, :-1], axis=1) & np.all(ends[:, :1] > 0, axis=1) & lasts)


def shifts(ends: Ints, units: int) -> Ints:
    """[n, chunks - 1] the cuts that one move leads to, in which no chunk is empty.

    Args:
        ends: [chunks - 1] ends of all chunks but the last.
        units: number of units of the model.
    """
    moves = moves_of(len(ends), farthest(len(ends)))
    # The chunk that gets shorter must have at least two units.
    counts = np.diff(ends, prepend=0, append=units)
    legal: Ints = ends + moves[counts[_shortened(len(ends))] > 1]
    return legal


def moved(space: PlanSpace, values: Values, *, also_evenly: bool = False) -> Values:
    """Moves units from chunk to chunk of a plan until no move lowers its overflow of memory or its step time.

    Args:
        space: the plan space.
        values: values of the plan. Its signatures and levels of recomputation stay. A plan of one stage is returned as
            it is.
        also_evenly: whether a second search starts from equally many units in each chunk; the better plan is returned.
    """
    count = space.shape(values).num_chunks
    if space.shape(values).pp == 1:
        return values
    steps = _Steps(space, values)
    begins = [np.array(space.cuts(values, count - 1))]
    if also_evenly:
        begins.append(np.arange(1, count) * space.num_units // count)
    found = [_descend(steps, ends, space.num_units) for ends in begins]
    _, ends = min(found, key=lambda one: one[0])
    return with_cuts(space, values, ends.tolist())


def best_cuts(space: PlanSpace, values: Values, most: int) -> list[Values]:
    """The fastest plans that differ from a plan in their cuts alone: the best first, those that fit before the others.

    All cuts are tried where there are at most `ALL_CUTS`, otherwise pairs of the best single moves.

    Args:
        space: the plan space.
        values: values of the plan.
        most: largest number of plans.
    """
    count = space.shape(values).num_chunks - 1
    ends, units = np.array(space.cuts(values, count)), space.num_units
    if math.comb(units - 1, count) <= ALL_CUTS:
        tried = np.array(list(itertools.combinations(range(1, units), count)))
    else:
        steps = _Steps(space, values)
        near = np.vstack([ends, shifts(ends, units)])
        tried = _pairs(ends, near[_Ranked.of(steps, near, np.inf).order[: 2 * PAIRED]], units)
    order = _Ranked.of(_Steps(space, values), tried, np.inf).order
    plans = (with_cuts(space, values, cut) for cut in tried[order[: 2 * most]].tolist() if cut != ends.tolist())
    return list(dict.fromkeys(plans))[:most]


def _descend(steps: _Steps, ends: Ints, units: int) -> tuple[tuple[float, float], Ints]:
    """Moves units as long as that gains, under one norm of `SHARPNESS` after the other.

    Args:
        steps: simulates the step with other cuts.
        ends: [chunks - 1] ends of all chunks but the last.
        units: number of units of the model.

    Returns:
        The overflow of memory and the step time in seconds of the best cut, and its ends.
    """
    best, found = _Ranked.of(steps, ends[None], np.inf).exact, ends
    for sharpness in SHARPNESS:
        worth, likely = _Ranked.of(steps, ends[None], sharpness).worth, ends[None] - ends
        for _ in range(MOST_MOVES):
            changed = ends + likely
            tried = np.vstack([ends, changed[none_is_empty(changed, units)]])
            ranked = _Ranked.of(steps, tried, sharpness)
            if not ranked.gains(worth):
                tried = np.vstack([ends, shifts(ends, units)])
                ranked = _Ranked.of(steps, tried, sharpness)
                likely = tried[ranked.order[: int(LIKELY * len(tried))]] - ends
            if ranked.gains(worth):
                together = _together(ends, tried[ranked.order[: 4 * TOGETHER]], units)
                ranked = min(ranked, _Ranked.of(steps, together, sharpness), key=lambda one: one.worth)
            else:
                ranked = _Ranked.of(steps, _pairs(ends, tried[ranked.order[: PAIRED + 1]], units), sharpness)
                if not ranked.gains(worth):
                    break
            worth, ends = ranked.worth, ranked.best
            if ranked.exact < best:
                best, found = ranked.exact, ends
    return best, found


def _pairs(ends: Ints, changed: Ints, units: int) -> Ints:
    """[n, chunks - 1] a cut as it is, then with every two changes at once; the two may be the same change.

    Args:
        ends: [chunks - 1] ends of all chunks but the last.
        changed: [changes, chunks - 1] these ends with each change alone.
        units: number of units of the model.
    """
    first, second = np.triu_indices(len(changed))
    both = changed[first] + changed[second] - ends
    legal: Ints = np.vstack([ends, both[none_is_empty(both, units)]])
    return legal


def _together(ends: Ints, changed: Ints, units: int) -> Ints:
    """[n, chunks - 1] a cut with the first change, with the first two at once, and so on.

    A change is skipped if it alters the length of a chunk that an earlier one alters.

    Args:
        ends: [chunks - 1] ends of all chunks but the last.
        changed: [changes, chunks - 1] these ends with each change alone.
        units: number of units of the model.
    """
    changes = changed - ends
    alters = np.diff(changes, axis=1, prepend=0, append=0) != 0
    touched, found, total = np.zeros(len(ends) + 1, dtype=np.bool_), list[Ints](), ends
    for change, chunks in zip(changes, alters, strict=True):
        if len(found) == TOGETHER:
            break
        if not (touched & chunks).any():
            touched |= chunks
            total = total + change
            found.append(total)
    together = np.array(found)
    legal: Ints = np.vstack([changed[:1], together[none_is_empty(together, units)]])
    return legal


class _Ranked(NamedTuple):
    """Some cuts, sorted by their overflow of memory and then by the norm of the seconds of their ranks."""

    order: Ints
    """[cuts] numbers of the cuts, the best first."""
    best: Ints
    """[chunks - 1] ends of the best cut."""
    worth: tuple[float, float]
    """Overflow of memory of the best cut, and its norm in seconds."""
    exact: tuple[float, float]
    """Overflow of memory of the best cut, and its step time in seconds."""

    @staticmethod
    def of(steps: _Steps, ends: Ints, sharpness: float) -> _Ranked:
        """Sorts cuts.

        Args:
            steps: simulates the step with other cuts.
            ends: [cuts, chunks - 1] ends of all chunks but the last, of at least one cut.
            sharpness: exponent of the norm, see `SHARPNESS`.
        """
        seconds, overflow = steps.ranks(ends)
        norm = _norm(seconds, sharpness)
        order = np.lexsort((norm, overflow))
        first, over = order[0], float(overflow[order[0]])
        return _Ranked(order, ends[first], (over, float(norm[first])), (over, float(seconds[first].max())))

    def gains(self, worth: tuple[float, float]) -> bool:
        """Whether the best cut is better than a cut of this worth."""
        return self.worth < (worth[0], worth[1] * (1.0 - GAIN))


def _norm(seconds: Floats, sharpness: float) -> Floats:
    """[n] norms of [n, ranks] seconds over the ranks, with the exponent `sharpness`."""
    slowest: Floats = seconds.max(axis=1)
    if np.isinf(sharpness):
        return slowest
    shares = ((seconds / slowest[:, None]) ** sharpness).sum(axis=1)
    found: Floats = slowest * shares ** (1.0 / sharpness)
    return found


class _Steps:
    """Simulates the step of a plan with other cuts."""

    def __init__(self, space: PlanSpace, values: Values) -> None:
        self._space, shape = space, space.shape(values)
        first = space.first.recompute
        about = [space.levels.levels[level] for level in values[first : first + shape.pp]]
        self._levels = np.array([(level.light, level.heavy, level.steps) for level in about], dtype=np.int64)
        self._views = [self._view(lowered) for lowered in space.lowered(values).views]

    def ranks(self, ends: Ints) -> tuple[Floats, Floats]:
        """Times the ranks with each of some cuts, and adds up by how much they overflow memory.

        Args:
            ends: [cuts, chunks - 1] ends of all chunks but the last.

        Returns:
            [cuts, ranks] seconds until each rank is done; and [cuts] the sum of the overflows of all ranks, each a
            share of a device's memory. A rank with devices of several kinds counts once for each kind.
        """
        found = []
        for lowered, units, pipeline in self._views:
            evaluator = self._space.evaluator
            workspace = new_step_workspace(pipeline.num_ranks, pipeline.num_chunks)
            result = np.empty(pipeline.num_ranks, dtype=RANK_COST_DTYPE)
            stages, settings = lowered.layout.arrays, evaluator.settings(lowered.zero)
            counts, weights = _run_counts(pipeline)
            out = np.zeros((len(ends), pipeline.num_ranks, 2))
            for count, weight in zip(counts, weights, strict=True):
                some = np.empty_like(out)
                of_count = pipeline._replace(order=pipeline.order._replace(num_micro_batches=count))
                steps_with_cuts(units, of_count, stages, settings, workspace, result, ends, some)
                out += weight * some
            found.append(out)
        both = np.concatenate(found, axis=1)
        return both[:, :, 0], np.maximum(both[:, :, 1] + SAFE, 0.0).sum(axis=1)

    def _view(self, lowered: LoweredPlan) -> tuple[LoweredPlan, UnitsOfRanks, Pipeline]:
        """A lowered plan with the costs of all units on each of its ranks, and its pipeline with a part for each
        unit."""
        evaluator, num_units = self._space.evaluator, self._space.num_units
        in_order = UnitsInOrder(evaluator, [segment for chunk in lowered.chunks for segment in chunk])
        known: dict[tuple[int, float], int] = {}
        costs: list[Rows] = []
        rows = []
        # [modes, units] rows of the costs of distinct units.
        numbers = np.arange(len(RECOMPUTE_MODES))[:, None] + len(RECOMPUTE_MODES) * in_order.distinct
        for rank, stage in enumerate(lowered.stages):
            key = (lowered.layout.numbers[rank], float(lowered.rank_samples[rank]))
            if key not in known:
                known[key] = len(costs)
                costs.append(in_order.distinct_costs(stage))
            rows.append(known[key] * len(costs[0]) + numbers)
        parts = np.zeros(num_units, dtype=PART_DTYPE)
        # Approximation: with other cuts, the same ranks hold a tied parameter.
        pipeline = pipeline_of(lowered, parts, evaluator.tied.rows(lowered))
        about = UnitsOfRanks(np.concatenate(costs), np.array(rows), self._levels, self._space.levels.steps)
        return lowered, about, pipeline


def _run_counts(pipeline: Pipeline) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The numbers of micro-batches for which a schedule is simulated, and the weights of the step times found.

    After its first micro-batches a schedule repeats itself, and its time grows linearly. So with many micro-batches the
    time is extrapolated from two shorter schedules; with few the schedule itself is simulated, with weight 1.
    """
    all_of_them = pipeline.order.num_micro_batches
    few = FEW * pipeline.num_chunks
    if all_of_them <= 4 * few or len(pipeline.order.program):
        return (all_of_them,), (1.0,)
    further = (all_of_them - 2 * few) / few
    return (few, 2 * few), (-further, 1.0 + further)


def with_cuts(space: PlanSpace, values: Values, ends: Sequence[int], levels: Ints | None = None) -> Values:
    """A plan with other cuts.

    Args:
        space: the plan space.
        values: values of the plan.
        ends: [chunks - 1] ends of all chunks but the last.
        levels: [ranks, units + 1, units + 1] entry [r, i, j]: level of recomputation of rank r with the units i to
            j - 1; None = the levels stay.
    """
    found = list(values)
    shape = space.shape(values)
    shares = space.cut_shares(values)
    start = 0
    for chunk, end in enumerate([*ends, space.num_units]):
        if chunk < shape.num_chunks - 1:
            candidates = space.candidates(start, chunk, shape.num_chunks, shares[chunk]).tolist()
            found[space.first.cut + chunk] = candidates.index(end) if end in candidates else 0
        if levels is not None:
            found[space.first.recompute + chunk] = int(levels[chunk, start, end])
        start = end
    # The signatures stay legal: the mesh and the samples are the same.
    first = space.first.signature
    return (*space.repair(found[:first]), *found[first:])

"""Units moved between the chunks of a pipeline, as long as that makes the step shorter.

A move gives one unit more to one chunk and one unit less to another, and so moves all ends between the two. The costs
of the units are computed once, for each kind of stage and recompute mode. For each cut that is tried, the schedule is
then run and the memory added up as for the exact price, in some microseconds. So moves also lead from cuts that do not
fit to cuts that do, and they shorten whatever the step waits for: long chunks, or the gradients of an embedding. Units:
seconds, bytes.
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
"""Least number of chunks from one that becomes longer to the one that becomes shorter, at most, and number of moves up
to which it may be larger (assumed): of up to 51 chunks all pairs are tried, of hundreds they are too many. T5-11B has
an embedding before its encoder and one before its decoder, and units move from the chunk of one to that of the other:
with 48 chunks on 512 H100 they are 23 chunks apart."""
SHARPNESS = (32.0, np.inf)
"""Exponents of the norm over ranks that is minimised in place of the step time, one after another (assumed). The time
of the slowest rank alone does not say which of two cuts is more even; with the last exponent the norm is the step
time."""
MOST_MOVES = 32
"""Largest number of moves under each of these exponents."""
PAIRED = 12
"""Number of best moves, of which two at a time are combined where no single move gains. On 120 plans of T5-3B, GPT-2
XL and BERT-large, cuts then end 0.1 % slower than the best that any of twelve variants found; 0.4 % without."""
TOGETHER = 12
"""Largest number of moves, the best ones of unlike chunks, that are made at once where the best of them gains alone
(assumed)."""
LIKELY = 0.125
"""Share of all moves, the best ones, that are tried again as long as one of them gains (assumed). With both, 66 plans
of nine problems of `benchmarks/network_gap.py` took 56 % of the time, and ended from 1.1 % faster to 0.1 % slower."""
ALL_CUTS = 20_000
"""Number of cuts of a pipeline up to which all of them are tried: 2 to 13 microseconds each."""
FEW = 4
"""Micro-batches for each chunk after which a schedule is taken to repeat itself (assumed)."""
SAFE = 1e-4
"""Share of a device's memory that is kept free: with plans that add up sums late, memory differs from the exact one by
less (assumed)."""
GAIN = 1e-9
"""Share by which a move shortens the step at least: less is rounding."""


@functools.cache
def moves_of(count: int, farthest: int) -> Ints:
    """[n, ends] how far each end of a chunk moves, for all moves that make one chunk longer and another shorter by 1.

    Args:
        count: number of the ends.
        farthest: largest distance between the two chunks, in chunks.
    """
    spans = [(a, b) for a in range(count) for b in range(a + 1, min(count, a + farthest) + 1)]
    moves = [[sign * (a <= at < b) for at in range(count)] for a, b in spans for sign in (1, -1)]
    return np.array(moves, dtype=np.int64).reshape(len(moves), count)


def farthest(count: int) -> int:
    """Chunks from one that becomes longer to the one that becomes shorter, at most, where `count` chunks have ends."""
    return max(FARTHEST, MOVES // (2 * count))


@functools.cache
def _shortened(count: int) -> Ints:
    """[n] the chunk that gets shorter in each of the moves of `shifts`."""
    found: Ints = np.diff(moves_of(count, farthest(count)), axis=1, prepend=0, append=0).argmin(axis=1)
    return found


def rises(ends: Ints, last: int) -> Mask:
    """[n] whether no chunk is empty.

    Args:
        ends: [n, ends] end of each chunk but the last one.
        last: end of the last chunk.
    """
    lasts = np.all(ends[:, -1:] < last, axis=1)
    return np.asarray(np.all(ends[:, 1:] > ends[:, :-1], axis=1) & np.all(ends[:, :1] > 0, axis=1) & lasts)


def shifts(ends: Ints, units: int) -> Ints:
    """[n, chunks - 1] ends of chunks in which one chunk has a unit more and another one a unit less.

    All ends between the two move by one unit. No chunk is empty; the two are at most `farthest` apart.

    Args:
        ends: [chunks - 1] ends of the units of all chunks but the last.
        units: of the model.
    """
    moves = moves_of(len(ends), farthest(len(ends)))
    # The chunk that gets shorter must have two units.
    counts = np.diff(ends, prepend=0, append=units)
    legal: Ints = ends + moves[counts[_shortened(len(ends))] > 1]
    return legal


def moved(space: PlanSpace, values: Values, *, also_evenly: bool = False) -> Values:
    """A plan of which units have moved from chunk to chunk, until no move makes it fit better or faster.

    Signatures and levels of recomputation stay. Plans of one stage stay as they are.

    Args:
        space: the space.
        values: the plan.
        also_evenly: whether the search also starts from equally many units in each chunk; the better plan is taken.
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
    """The plans with other cuts that take least time, the best first, those that fit before the others.

    Of short pipelines all cuts are tried, of longer ones those in which two units move.

    Args:
        space: the space.
        values: the plan; its signatures and levels of recomputation stay.
        most: number of plans.
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
    """Moves units as long as that gains. Returns the overflow of memory and the step time in seconds of the best cut,
    and its ends."""
    best, found = _Ranked.of(steps, ends[None], np.inf).exact, ends
    for sharpness in SHARPNESS:
        worth, likely = _Ranked.of(steps, ends[None], sharpness).worth, ends[None] - ends
        for _ in range(MOST_MOVES):
            changed = ends + likely
            tried = np.vstack([ends, changed[rises(changed, units)]])
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
    """[n, chunks - 1] ends of chunks as they are, then with two changes made at once, also one of them twice.

    Args:
        ends: [chunks - 1] ends of the units of all chunks but the last.
        changed: [changes, chunks - 1] these ends with each change alone.
        units: of the model.
    """
    first, second = np.triu_indices(len(changed))
    both = changed[first] + changed[second] - ends
    legal: Ints = np.vstack([ends, both[rises(both, units)]])
    return legal


def _together(ends: Ints, changed: Ints, units: int) -> Ints:
    """[n, chunks - 1] ends of chunks with the first change, the first two, and so on, without those that change a chunk
    of one before them.

    Args:
        ends: [chunks - 1] ends of the units of all chunks but the last.
        changed: [changes, chunks - 1] these ends with each change alone.
        units: of the model.
    """
    touched, found, total = set[int](), [], ends
    for one in changed:
        chunks = set(np.flatnonzero(np.diff(one - ends, prepend=0, append=0)).tolist())
        if not chunks & touched:
            touched |= chunks
            total = total + one - ends
            found.append(total)
    together = np.array(found[:TOGETHER])
    legal: Ints = np.vstack([changed[:1], together[rises(together, units)]])
    return legal


class _Ranked(NamedTuple):
    """Cuts in the order of how good they are."""

    order: Ints
    """Numbers of the cuts, the best first."""
    best: Ints
    """[chunks - 1] ends of the best one."""
    worth: tuple[float, float]
    """Its overflow of memory and its norm of seconds."""
    exact: tuple[float, float]
    """Its overflow of memory and the seconds of its step."""

    @staticmethod
    def of(steps: _Steps, ends: Ints, sharpness: float) -> _Ranked:
        """Ranks cuts, [cuts, chunks - 1] of which there is one at least."""
        seconds, overflow = steps.ranks(ends)
        norm = _norm(seconds, sharpness)
        order = np.lexsort((norm, overflow))
        first, over = order[0], float(overflow[order[0]])
        return _Ranked(order, ends[first], (over, float(norm[first])), (over, float(seconds[first].max())))

    def gains(self, worth: tuple[float, float]) -> bool:
        """Whether the best cut is better than one of this worth."""
        return self.worth < (worth[0], worth[1] * (1.0 - GAIN))


def _norm(seconds: Floats, sharpness: float) -> Floats:
    """[n] the norm over ranks of seconds, [n, ranks]."""
    slowest: Floats = seconds.max(axis=1)
    if np.isinf(sharpness):
        return slowest
    shares = ((seconds / slowest[:, None]) ** sharpness).sum(axis=1)
    found: Floats = slowest * shares ** (1.0 / sharpness)
    return found


class _Steps:
    """The steps of a plan with other cuts."""

    def __init__(self, space: PlanSpace, values: Values) -> None:
        self._space, shape = space, space.shape(values)
        first = space.first.recompute
        about = [space.levels.levels[level] for level in values[first : first + shape.pp]]
        self._levels = np.array([(level.light, level.heavy, level.steps) for level in about], dtype=np.int64)
        self._views = [self._view(lowered) for lowered in space.lowered(values).views]

    def ranks(self, ends: Ints) -> tuple[Floats, Floats]:
        """[cuts, ranks] seconds until each rank is done, and [cuts] overflow of memory of all ranks together.

        Where stages have devices of several kinds, each rank has one entry for each of these kinds.

        Args:
            ends: [cuts, chunks - 1] ends of the units of all chunks but the last.
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
        evaluator, num_units = self._space.evaluator, self._space.num_units
        in_order = UnitsInOrder(evaluator, [segment for chunk in lowered.chunks for segment in chunk])
        known: dict[tuple[int, float], int] = {}
        costs: list[Rows] = []
        rows = []
        numbers = np.arange(len(RECOMPUTE_MODES) * num_units).reshape(len(RECOMPUTE_MODES), num_units)
        for rank, stage in enumerate(lowered.stages):
            key = (lowered.layout.numbers[rank], float(lowered.rank_samples[rank]))
            if key not in known:
                known[key] = len(costs)
                costs.append(in_order.costs(stage).ravel())
            rows.append(known[key] * numbers.size + numbers)
        parts = np.zeros(num_units, dtype=PART_DTYPE)
        parts["times"] = 1
        # Which ranks hold a tied parameter is taken to stay as it is.
        pipeline = pipeline_of(lowered, parts, evaluator.tied.rows(lowered))
        about = UnitsOfRanks(np.concatenate(costs), np.array(rows), self._levels, self._space.levels.steps)
        return lowered, about, pipeline


def _run_counts(pipeline: Pipeline) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Numbers of micro-batches for which a schedule is run, and the weights with which these add up to its own number.

    Behind its first micro-batches a schedule repeats itself, so of many micro-batches the step is the straight line
    through two shorter ones.
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
        space: the space.
        values: the plan.
        ends: ends of the units of all chunks but the last.
        levels: [ranks, units + 1, units + 1] level of recomputation of each rank that has the units from the first
            index to before the second; None = the levels stay.
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

"""Pipeline cuts: where to cut a pipeline and what each rank recomputes, by dynamic programming over units.

As in PipeDream (arXiv 1806.03377) and DAPPLE (arXiv 2007.01045), the best cut of the first units over the first ranks
follows from those of fewer units, with the slowest rank as cost. Where a rank has several chunks, chunks are made
longer and shorter by one unit each as long as ranks become more even. The costs of units are those of given signatures;
each rank takes the fastest level of recomputation with which its chunk, its state and the micro-batches in flight fit,
and is held while it sends and receives. Gradient reductions are left to the exact price. Units: seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agents.planners.unit_profile import unit_costs
from automap.arrays import Mask
from automap.price.kernels.array_types import Record, Rows
from automap.price.kernels.memory import buffer_bytes, in_flight, state_bytes
from automap.price.lowered_plan import RECOMPUTE_MODES
from automap.price.stage_layout import PipelineLayout
from automap.space.shape import Shape
from automap.space.space import PlanSpace, Values

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

UNEVEN = 8
"""Power of the ranks' times whose sum says how uneven they are (assumed)."""
MOST_MOVES = 32
"""Changes at most by which chunks are evened."""
FARTHEST = 8
"""Chunks from one that becomes longer to the one that becomes shorter, at most (assumed): all pairs are too many."""
SLACKS = (1.0, 1.01, 1.05)
"""Allowed times of the slowest rank, over the least possible one; within each, the sum of all ranks is least."""


def partition(seconds: Sequence[Floats], slack: float = 1.0) -> list[int] | None:
    """Cuts units into one span for each rank.

    With T(r, u) the least time of the slowest of r ranks that have the first u units, and t(r, v, u) the time of rank r
    with the units from v to before u: T(r, u) = min over v of max(T(r - 1, v), t(r, v, u)) (PipeDream, section 3.1).

    Args:
        seconds: for each rank, [units + 1, units + 1] time of the units from the first index to before the second;
            infinite where they do not fit or may not be.
        slack: see `SLACKS`.

    Returns:
        Ends of the units of all ranks but the last, of a cut whose slowest rank is within `slack` of the least
        possible time and whose sum is least; None where nothing fits.
    """
    count = len(seconds[0]) - 1
    worst = np.full(count + 1, np.inf)
    worst[0] = 0.0
    for of in seconds:
        worst = np.maximum(worst[:, None], of).min(axis=0)
    limit = worst[count] * slack
    if not np.isfinite(limit):
        return None
    total = np.full(count + 1, np.inf)
    total[0] = 0.0
    begins = []
    for of in seconds:
        sums = total[:, None] + np.where(of <= limit * (1.0 + 1e-12), of, np.inf)
        begins.append(sums.argmin(axis=0))
        total = sums.min(axis=0)
    ends = [count]
    for begin in reversed(begins):
        ends.append(int(begin[ends[-1]]))
    return ends[-2:0:-1]


def cut_anew(space: PlanSpace, values: Values) -> list[Values]:
    """Plans with the shape and the signatures of a plan, and with the cuts and levels of recomputation of `partition`.

    Where no cut fits into memory there is one plan, whose fullest rank is as empty as possible: with other signatures
    it may fit. With virtual stages, the cuts are those of `evened`, and the levels stay. There are none for plans of
    one stage. The exact price says whether the plans are better.
    """
    shape = space.shape(values)
    if shape.pp == 1:
        return []
    if shape.virtual > 1:
        return [_with_cuts(space, values, evened(_times(space, values), _ends(space, values)))]
    ranks = _ranks(space, values)
    choices = [rank.fastest() for rank in ranks]
    fits = partition([seconds for seconds, _ in choices]) is not None
    if not fits:
        choices = [rank.emptiest() for rank in ranks]
    costs, levels = [cost for cost, _ in choices], [chosen for _, chosen in choices]
    found = []
    for slack in SLACKS if fits else SLACKS[:1]:
        ends = partition(costs, slack)
        if ends is not None:
            found.append(_with_cuts(space, values, ends, levels))
    return list(dict.fromkeys(found))


class _Rank(NamedTuple):
    """What a pipeline rank may be given: the units from the first index to before the second, at each level."""

    levels: Ints
    """[levels] numbers of the levels of recomputation."""
    seconds: Floats
    """[levels, units + 1, units + 1] seconds of a micro-batch; infinite where the rank may not have these units."""
    full: Floats
    """[levels, units + 1, units + 1] memory used over that of the device, at least 0."""

    def fastest(self) -> tuple[Floats, Ints]:
        """[units + 1, units + 1] least seconds of a level that fits, infinite where none does, and that level."""
        return self._least(np.where(self.full <= 1.0, self.seconds, np.inf))

    def emptiest(self) -> tuple[Floats, Ints]:
        """[units + 1, units + 1] the least memory of a level, and that level."""
        return self._least(np.where(np.isfinite(self.seconds), self.full, np.inf))

    def _least(self, costs: Floats) -> tuple[Floats, Ints]:
        return costs.min(axis=0), self.levels[costs.argmin(axis=0)]


def evened(seconds: Floats, ends: Sequence[int]) -> list[int]:
    """Moves the ends of chunks that go round the ranks, so that all ranks take about equally long.

    One unit more in a chunk and one less in another moves all ends between the two. Of all such changes that which
    makes the ranks most even is made, until none does.

    Args:
        seconds: [ranks, units + 1, units + 1] see `partition`; the chunks go to the ranks in turn.
        ends: ends of the units of all chunks but the last, to begin with.
    """
    ranks, units = len(seconds), seconds.shape[1] - 1
    now, worth = np.array(ends), np.inf
    of = np.arange(len(ends) + 1) % ranks
    for _ in range(MOST_MOVES):
        tried = np.vstack([now, shifts(now, units)])
        bounds = np.pad(tried, ((0, 0), (1, 1)), constant_values=((0, 0), (0, units)))
        loads = seconds[of, bounds[:, :-1], bounds[:, 1:]].reshape(len(tried), -1, ranks).sum(axis=1)
        # The slowest rank counts most.
        uneven = (loads**UNEVEN).sum(axis=1)
        best = int(uneven.argmin())
        if not uneven[best] < worth * (1.0 - 1e-9):
            break
        worth, now = float(uneven[best]), tried[best]
    found: list[int] = now.tolist()
    return found


def shifts(ends: Ints, units: int) -> Ints:
    """[n, chunks - 1] ends of chunks in which one chunk has a unit more and another one a unit less.

    All ends between the two move by one unit. No chunk is empty; the two are at most `FARTHEST` apart.

    Args:
        ends: [chunks - 1] ends of the units of all chunks but the last.
        units: of the model.
    """
    found = ends + moves_of(len(ends))
    legal: Ints = found[rises(found, units)]
    return legal


def moves_of(count: int) -> Ints:
    """[n, ends] by how much the ends of chunks move where one chunk gets longer and another one shorter by 1."""
    spans = [(a, b) for a in range(count) for b in range(a + 1, min(count, a + FARTHEST) + 1)]
    moves = [[sign * (a <= at < b) for at in range(count)] for a, b in spans for sign in (1, -1)]
    return np.array(moves, dtype=np.int64).reshape(len(moves), count)


def rises(ends: Ints, last: int) -> Mask:
    """[n] whether ends, [n, ends], leave no chunk empty of those up to the last end."""
    bounds = np.pad(ends, ((0, 0), (1, 1)), constant_values=((0, 0), (0, last)))
    return np.asarray((np.diff(bounds, axis=1) > 0).all(axis=1))


def shifted(space: PlanSpace, values: Values) -> list[Values]:
    """Plans with the cuts of `shifts`, all else as in a plan."""
    plans = (
        _with_cuts(space, values, ends) for ends in shifts(np.array(_ends(space, values)), space.num_units).tolist()
    )
    return [plan for plan in dict.fromkeys(plans) if plan != values]


def _ends(space: PlanSpace, values: Values) -> list[int]:
    """Ends of the units of all chunks but the last."""
    return space.cuts(values, space.shape(values).num_chunks - 1)


def _times(space: PlanSpace, values: Values) -> Floats:
    """[ranks, units + 1, units + 1] seconds of a micro-batch at the levels of recomputation of a plan."""
    evaluator, lowered = space.evaluator, space.lowered(values).views[0]
    settings = evaluator.settings(lowered.zero)
    segments = [segment for chunk in lowered.chunks for segment in chunk]
    known: dict[tuple[int, float, int], Floats] = {}
    found = []
    for rank in range(space.shape(values).pp):
        level = values[space.first.recompute + rank]
        key = (lowered.layout.numbers[rank], float(lowered.rank_samples[rank]), level)
        if key not in known:
            costs = unit_costs(evaluator, segments, lowered.stages[rank])
            known[key] = _spans(space, costs, np.array([level]), space.shape(values), settings).seconds[0]
            crossing = costs["boundary_bytes"][0, :-1]
        found.append(known[key] + _exchanges(space, lowered.layout, rank, crossing))
    return np.array(found)


def _ranks(space: PlanSpace, values: Values) -> list[_Rank]:
    """What each rank of a plan may be given with the signatures of this plan."""
    evaluator, lowered = space.evaluator, space.lowered(values).views[0]
    shape, settings = space.shape(values), evaluator.settings(lowered.zero)
    levels = np.flatnonzero(space.levels.legal(shape.num_chunks))
    known: dict[tuple[int, float], _Spans] = {}
    ranks = []
    for rank, stage in enumerate(lowered.layout.stages):
        key = (lowered.layout.numbers[rank], float(lowered.rank_samples[rank]))
        if key not in known:
            segments = [segment for chunk in lowered.chunks for segment in chunk]
            costs = unit_costs(evaluator, segments, lowered.stages[rank])
            known[key] = _spans(space, costs, levels, shape, settings)
            crossing = costs["boundary_bytes"][0, :-1]
        spans = known[key]
        alive = in_flight(rank, shape.pp, shape.pp, shape.num_micro_batches)
        if lowered.kind == "gpipe":
            alive = shape.num_micro_batches
        full = (spans.state + alive * spans.saved + spans.held[:, None, None]) / stage.capacity
        seconds = spans.seconds + _exchanges(space, lowered.layout, rank, crossing)
        low, high = space.constrained.window(rank, shape.pp) if rank < shape.pp - 1 else (space.num_units,) * 2
        ends = np.arange(space.num_units + 1)
        seconds[:, :, (ends < low) | (ends > high)] = np.inf
        ranks.append(_Rank(levels, seconds, full))
    return ranks


def _exchanges(space: PlanSpace, layout: PipelineLayout, rank: int, crossing: Floats) -> Floats:
    """[units + 1, units + 1] seconds in which a rank sends and receives for a micro-batch, in both passes.

    Args:
        crossing: [units - 1] bytes that cross between two units.
    """
    bytes_at, shown = np.concatenate([[0.0], crossing, [0.0]]), 1.0 - space.problem.trainer.send_overlap
    before, behind = (
        np.where(bytes_at > 0.0, layout.send_latency_s[at] + bytes_at / layout.send_bytes_per_s[at], 0.0)
        for at in (rank - 1, rank)
    )
    found: Floats = 2.0 * shown * (before[:, None] + behind[None, :])
    return found


class _Spans(NamedTuple):
    """Units from the first index to before the second on one rank, [levels, units + 1, units + 1]."""

    seconds: Floats
    """Seconds of a micro-batch; infinite where there is no unit."""
    state: Floats
    """Bytes of parameters, gradients and moments."""
    saved: Floats
    """Bytes that a micro-batch leaves for its backward pass."""
    held: Floats
    """[levels] bytes of buffers: work space, a unit that runs again, what ZeRO gathers, what crosses between ranks."""


def _spans(space: PlanSpace, costs: Rows, levels: Ints, shape: Shape, settings: Record) -> _Spans:
    """What spans of units cost at some levels of recomputation; `costs` are those of `unit_costs`.

    Buffers are those of the units of the model that need most of them, as if each rank had these.
    """
    spent = costs["forward_s"] + costs["forward_host_s"] + costs["backward_s"] + costs["backward_host_s"]
    spent += costs["recompute_s"]
    comm = costs["forward_comm_s"] + costs["backward_comm_s"] + costs["recompute_comm_s"]
    spent += comm @ space.evaluator.exposed
    # Repeated blocks are alike, so that few numbers of parameters are distinct.
    parameters = np.stack([costs["parameters"].ravel(), costs["zero_parameters"].ravel()])
    distinct, at = np.unique(parameters, axis=1, return_inverse=True)
    state = np.array([sum(state_bytes(whole, sharded, settings)) for whole, sharded in distinct.T.tolist()])
    before = np.zeros((3, len(costs), space.num_units + 1))
    np.cumsum([spent, state[at.reshape(costs.shape)], costs["saved_bytes"]], axis=2, out=before[:, :, 1:])
    begin, end = np.indices((space.num_units + 1, space.num_units + 1))
    found = np.empty((3, len(levels), *begin.shape))
    working, gathered, crossing = (costs[name].max() for name in ("workspace_bytes", "parameters", "boundary_bytes"))
    buffers = buffer_bytes(working, gathered, crossing, shape.pp, shape.num_micro_batches, settings)
    held = np.full(len(levels), buffers)
    for number, level in enumerate(space.levels.levels[level] for level in levels.tolist()):
        turn = begin + space.levels.first_units(level.steps, np.maximum(0, end - begin))
        heavy, light = before[:, level.heavy], before[:, level.light]
        found[:, number] = heavy[:, turn] - heavy[:, begin] + light[:, end] - light[:, turn]
        if RECOMPUTE_MODES[level.heavy] == "full":
            # The last unit, which holds the scores of the loss, runs again with all others alone.
            last = space.num_units - int(level.steps > 0 and space.num_units > 1)
            held[number] += costs[level.heavy]["live_bytes"][:last].max()
    found[0, :, end <= begin] = np.inf
    return _Spans(seconds=found[0], state=found[1], saved=found[2], held=held)


def _with_cuts(space: PlanSpace, values: Values, ends: Sequence[int], levels: Sequence[Ints] | None = None) -> Values:
    """A plan with other ends of the chunks' units, and with the level of recomputation of each rank's span if given."""
    found = list(values)
    shape = space.shape(values)
    shares = space.cut_shares(values)
    start = 0
    for chunk, end in enumerate([*ends, space.num_units]):
        if chunk < shape.num_chunks - 1:
            candidates = space.candidates(start, chunk, shape.num_chunks, shares[chunk]).tolist()
            found[space.first.cut + chunk] = candidates.index(end) if end in candidates else 0
        if levels is not None:
            found[space.first.recompute + chunk] = int(levels[chunk][start, end])
        start = end
    # The signatures stay legal: the mesh and the samples are the same.
    first = space.first.signature
    return (*space.repair(found[:first]), *found[first:])

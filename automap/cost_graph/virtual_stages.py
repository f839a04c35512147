"""Virtual stages: a lower bound on the step time of interleaved pipelines, by a linear program over chunks.

The program spreads the units of a model over the chunks of the ranks. Its rows require that no path through the passes
(`automap.cost_graph.paths`) is longer than the step. Micro-batches go through the chunks in groups of p, the number of
ranks. T is the sum of the seconds of a chunk's forward and backward pass, and m the number of micro-batches. The first
program has rows for these paths, for every chunk c on a rank r; j is the number of chunks of r before c:

- The first micro-batch goes through all chunks before c. From then on rank r works on all m micro-batches, except for
  the work that it has done before: p passes of each of its first j chunks. The last micro-batch goes back in the same
  way. The length is m T of the rank, less p T of its first j chunks, plus T of all chunks before c.
- The same path, but rank 0 first works on p micro-batches of its first j chunks.

Then further rows are generated. The schedule is simulated for the spread that is the optimum of the program. The
longest path there, with the gradients of its last rank, becomes a row. This is repeated until no path is longer than
the optimum.

Every chunk has at least one unit, and holds the saved activations of p micro-batches, except for the last chunk of each
rank. Units: seconds, bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from automap.arrays import Floats, Ints
from automap.cost_graph.spread_program import SpreadProgram
from automap.cost_graph.unlike_stages import RankBounds
from automap.price.kernels.pipeline import run_program
from automap.schedule import A_BEFORE, A_CHUNK, A_RANK, A_WORD, FORWARD, INTERLEAVED, arrange

MOST_CHUNKS = 48
"""Largest number of chunks with variables of their own (assumed); with more, the middle chunks of each rank share
theirs."""
MOST_ROUNDS = 12
"""Largest number of rounds in which rows are generated for one pipeline (assumed)."""
MOST_ACTIONS = 40_000
"""Largest number of actions of a step whose schedule is simulated (assumed)."""
RISE = 3e-4
"""Share by which the optimum must rise in a round for another round to follow (assumed)."""


@dataclass(frozen=True, kw_only=True)
class Interleaving:
    """An interleaved pipeline, with lower bounds for its units."""

    rank_bounds: Sequence[RankBounds]
    """[ranks] bounds of each rank."""
    times: Floats
    """[types] number of units of each type."""
    ends: Floats
    """[2, types] the first unit, and the last one, as a share of all units of its type; 0 for other types."""
    virtual: int
    """Chunks of a rank."""
    num_micro_batches: int
    """Micro-batches of a step."""
    in_flight: Sequence[int]
    """[ranks] micro-batches in flight in the last chunk of each rank."""
    besides_s: Floats
    """[2, chunks] seconds of a forward pass, and of a backward pass, of each chunk besides its units."""
    step_s: float
    """Seconds of a step besides its passes."""

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.rank_bounds)


def groups(ranks: int, virtual: int) -> list[int]:
    """Sizes of the groups of consecutive chunks of a rank that share variables; those of its first and last chunk are
    1."""
    alone = max(3, MOST_CHUNKS // ranks)
    return [1] * virtual if virtual <= alone else [*[1] * (alone - 2), virtual - alone + 1, 1]


def paths(sizes: Sequence[int], ranks: int, num_micro_batches: int) -> Iterator[Floats]:
    """[groups, ranks] how often each path contains a forward and a backward pass of each chunk.

    Args:
        sizes: chunks of each group, see `groups`; no path enters a rank after a group with several chunks.
        ranks: pipeline ranks.
        num_micro_batches: micro-batches of a step.
    """
    alone = next((number for number, size in enumerate(sizes) if size > 1), len(sizes))
    for j in range(alone):
        for rank in range(ranks):
            work = np.zeros((len(sizes), ranks))
            work[:, rank] = num_micro_batches
            work[:j, rank] -= ranks
            chain = work.copy()
            chain[:j] += 1.0
            chain[j, :rank] += 1.0
            yield chain
            if j and rank:
                work[:j, 0] += ranks
                work[j, :rank] += 1.0
                yield work


def fastest_interleaving(pipeline: Interleaving, target_s: float) -> float:
    """A lower bound on the step time in seconds: that of the fastest spread of the units over the chunks.

    Args:
        pipeline: the pipeline.
        target_s: a bound that suffices: no more paths are generated once it is reached.
    """
    sizes = groups(pipeline.ranks, pipeline.virtual)
    is_short = any(bounds.may_be_short(max(pipeline.ranks, *pipeline.in_flight)) for bounds in pipeline.rank_bounds)
    of_ranks = [np.array([bounds.busy_s for bounds in pipeline.rank_bounds])]
    of_ranks += [np.array([bounds.passes_s[path] for bounds in pipeline.rank_bounds]) for path in range(4)]
    # [ranks, ways, types]; if memory is not short, with the fastest way alone.
    busy_s, *passes_s = (seconds if is_short else seconds.min(axis=1, keepdims=True) for seconds in of_ranks)
    program = _first_program(pipeline, sizes, busy_s, np.array(passes_s), is_short=is_short)
    found_s = program.seconds()
    if 2 * pipeline.virtual * pipeline.ranks * pipeline.num_micro_batches > MOST_ACTIONS:
        return found_s
    for _ in range(MOST_ROUNDS):
        if found_s >= target_s or not len(program.shares):
            break
        shares = program.shares.reshape(len(sizes), *busy_s.shape)
        longer = list(_longer_paths(pipeline, sizes, np.array(passes_s), shares, found_s))
        for row, path_s in longer:
            program.add_seconds(row, pipeline.step_s + path_s)
        before_s, found_s = found_s, max(found_s, program.seconds()) if longer else found_s
        if found_s < before_s * (1.0 + RISE):
            break
    return found_s


def _first_program(
    pipeline: Interleaving, sizes: Sequence[int], busy_s: Floats, passes_s: Floats, *, is_short: bool
) -> SpreadProgram:
    """The linear program with the paths that are known before any schedule is run.

    Args:
        pipeline: the pipeline.
        sizes: chunks of each group.
        busy_s: [ranks, ways, types] see `RankBounds.busy_s`.
        passes_s: [4, ranks, ways, types] see `RankBounds.passes_s`.
        is_short: whether memory may be short.
    """
    both_s, ended_s, forward_s, _ = passes_s
    starts = np.cumsum([0, *sizes[:-1]])
    by_chunk = pipeline.besides_s.sum(axis=0).reshape(pipeline.virtual, pipeline.ranks)
    besides_s = np.add.reduceat(by_chunk, starts, axis=0)
    nothing = np.zeros((len(sizes), *busy_s.shape))
    program = SpreadProgram(busy_s.shape[2], float(busy_s.min(axis=(0, 1)).sum()) / pipeline.ranks)
    bound = nothing.copy()
    bound[0, 0], bound[-1, -1] = pipeline.ends
    program.add_shares(bound)
    for rank, bounds in enumerate(pipeline.rank_bounds):
        # The first micro-batch passes the chunks before, then the rank works, and then it reduces its gradients.
        row = nothing.copy()
        row[0, :rank] = forward_s[:rank]
        row[:, rank] = busy_s[rank]
        filled_s = float(pipeline.besides_s[0, :rank].sum())
        own_s = pipeline.num_micro_batches * float(besides_s[:, rank].sum())
        program.add_seconds(row, pipeline.step_s + filled_s + own_s)
        # Every chunk has a unit.
        for group, size in enumerate(sizes):
            row = nothing.copy()
            row[group, rank] = -pipeline.times
            program.add_room(row, -float(size))
        if is_short:
            row = nothing.copy()
            row[:-1, rank] = bounds.used_bytes(pipeline.ranks)
            row[-1, rank] = bounds.used_bytes(pipeline.in_flight[rank])
            program.add_room(row, bounds.room)
    for often in paths(sizes, pipeline.ranks, pipeline.num_micro_batches):
        row = often[..., None, None] * both_s
        # The path ends on rank 0, and is followed by its gradients.
        if often[:, 0].min() >= 1.0:
            row[:, 0] += (ended_s - both_s)[0]
        program.add_seconds(row, pipeline.step_s + float((often * besides_s).sum()))
    return program


def _longer_paths(
    pipeline: Interleaving, sizes: Sequence[int], passes_s: Floats, shares: Floats, found_s: float
) -> Iterator[tuple[Floats, float]]:
    """The longest path to the end of each rank for some spread, with the rank's gradients, if it is longer than
    `found_s`.

    Args:
        pipeline: the pipeline.
        sizes: chunks of each group.
        passes_s: [4, ranks, ways, types] see `RankBounds.passes_s`.
        shares: [groups, ranks, ways, types] share of the units of each type in each group of chunks.
        found_s: seconds.

    Yields:
        [groups, ranks, ways, types] seconds of all units of a type on the path, and seconds of the path besides.
    """
    both_s, ended_s, forward_s, backward_s = passes_s
    group_of, starts = np.repeat(np.arange(len(sizes)), sizes), np.cumsum([0, *sizes[:-1]])
    each = shares / np.array(sizes)[:, None, None, None]
    there_s, whole_s = (((each * some).sum(axis=(2, 3)))[group_of].reshape(-1) for some in (forward_s, both_s))
    seconds = np.zeros((4, len(whole_s)))
    seconds[:2] = np.maximum([there_s, whole_s - there_s], 0.0) + pipeline.besides_s
    behind_s = pipeline.step_s + (shares * (ended_s - both_s)).sum(axis=(0, 2, 3))
    counts = (pipeline.ranks, pipeline.virtual, pipeline.num_micro_batches)
    for last, often in _critical(*counts, seconds, found_s - behind_s):
        # Chunks of a group share their count: that of the chunk which is least often on the path.
        by_chunk = often.reshape(2, pipeline.virtual, pipeline.ranks)
        there, back = (np.minimum.reduceat(some, starts, axis=0)[..., None, None] for some in by_chunk)
        together = np.minimum(there, back)
        row = together * both_s + (there - together) * forward_s + (back - together) * backward_s
        # Gradients count if the backward pass that may hide them is on the path.
        if together[:, last].min() >= 1.0:
            row[:, last] += (ended_s - both_s)[last]
        yield row, float((often * pipeline.besides_s).sum())


def _critical(
    ranks: int, virtual: int, num_micro_batches: int, seconds: Floats, found_s: Floats
) -> Iterator[tuple[int, Floats]]:
    """For each rank that ends later than `found_s`, the path to its end.

    Args:
        ranks: pipeline ranks.
        virtual: chunks of a rank.
        num_micro_batches: micro-batches of a step.
        seconds: [words, chunks] seconds of each pass.
        found_s: [ranks] seconds.

    Yields:
        The rank, and [2, chunks] how often the path contains forward and backward passes of each chunk.
    """
    program, before = _program(ranks, virtual, num_micro_batches)
    times, ends = np.empty((len(program), 2)), np.empty(ranks)
    run_program(program, seconds, np.zeros(ranks * virtual), ends, times)
    finished, waited = times[:, 1], before.tolist()
    for last in np.flatnonzero(ends > found_s * (1.0 + RISE)).tolist():
        action = int(np.flatnonzero(program[:, A_RANK] == last)[-1])
        on_path = list[int]()
        while action >= 0:
            on_path.append(action)
            mine, other = waited[action]
            action = other if mine < 0 or (other >= 0 and finished[other] > finished[mine]) else mine
        often = np.zeros((2, ranks * virtual))
        np.add.at(often, ((program[on_path, A_WORD] != FORWARD).astype(np.int64), program[on_path, A_CHUNK]), 1.0)
        yield last, often


@functools.lru_cache(maxsize=16)
def _program(ranks: int, virtual: int, num_micro_batches: int) -> tuple[Ints, Ints]:
    """The list of actions of an interleaved pipeline (`automap.schedule`), and [actions, 2] the rows of the two actions
    for which each one waits: that before it on its rank, and that on the neighbouring chunk; -1 for none."""
    program = arrange(INTERLEAVED, ranks, ranks * virtual, num_micro_batches)
    before = np.full((len(program), 2), -1, dtype=np.int64)
    for rank in range(ranks):
        rows = np.flatnonzero(program[:, A_RANK] == rank)
        before[rows[1:], 0] = rows[:-1]
    before[:, 1] = program[:, A_BEFORE]
    return program, before

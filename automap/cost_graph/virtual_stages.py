"""Virtual stages: the fastest spread of a model's units over the chunks of an interleaved pipeline.

Micro-batches go through the chunks in turns of as many as there are ranks p. With T a chunk's seconds of a forward and
a backward pass, the end of a step is at least these paths through the order of the passes, for every chunk c of rank r,
the j-th one there (from 0):

- The first micro-batch comes through all chunks before c. From then on rank r works, but for what it does before: p
  passes of each of its first j chunks. The last micro-batch goes back in the same way: m T of the rank, less p T of its
  first j chunks, and T of all chunks before c.
- The same, where rank 0 works through p micro-batches of its first j chunks before the first micro-batch goes on.

Every chunk has a unit at least, and saves for p micro-batches, but for the last chunk of each rank. Units: seconds,
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from automap.arrays import Floats
from automap.cost_graph.spread_program import SpreadProgram
from automap.cost_graph.unlike_stages import Standing

MOST_CHUNKS = 32
"""Most chunks that the program tells apart (assumed); of more, those in the middle of each rank are one."""


@dataclass(frozen=True, kw_only=True)
class Interleaving:
    """An interleaved pipeline, and what its units take at least."""

    standings: Sequence[Standing]
    """[ranks] on each rank; the paths are a forward and a backward pass of one micro-batch, and the same with the
    gradients."""
    times: Floats
    """[types] number of units of each type."""
    ends: Floats
    """[2, types] share of each type that the first unit is, and the last one."""
    virtual: int
    """Chunks of a rank."""
    num_micro_batches: int
    """Micro-batches of a step."""
    held: Sequence[int]
    """[ranks] micro-batches for which the last chunk of a rank saves."""
    besides_s: Floats
    """[chunks] seconds that a forward and a backward pass of a chunk take besides its units."""
    step_s: float
    """Seconds that a step takes besides."""

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.standings)


def groups(ranks: int, virtual: int) -> list[int]:
    """Numbers of chunks of a rank that the program takes as one, in order."""
    alone = max(2, MOST_CHUNKS // ranks)
    return [1] * virtual if virtual <= alone else [*[1] * (alone - 2), virtual - alone + 1, 1]


def paths(sizes: Sequence[int], ranks: int, num_micro_batches: int) -> Iterator[Floats]:
    """[groups, ranks] how often a forward and a backward pass of each chunk are on each path.

    Args:
        sizes: chunks of each group, see `groups`; no path enters a rank behind a group of several.
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


def fastest_interleaving(of: Interleaving) -> float:
    """Seconds of the fastest spread of units over the chunks."""
    sizes = groups(of.ranks, of.virtual)
    is_short = any(standing.may_be_short(max(of.ranks, *of.held)) for standing in of.standings)
    of_ranks = [np.array([one.busy_s for one in of.standings])]
    of_ranks += [np.array([one.trip_s[path] for one in of.standings]) for path in range(2)]
    # Of each rank [ways, types], one way where memory is not short.
    busy_s, once_s, ended_s = (some if is_short else some.min(axis=1, keepdims=True) for some in of_ranks)
    starts = np.cumsum([0, *sizes[:-1]])
    besides_s = np.add.reduceat(of.besides_s.reshape(of.virtual, of.ranks), starts, axis=0)
    nothing = np.zeros((len(sizes), *busy_s.shape))
    program = SpreadProgram(busy_s.shape[2], float(busy_s.min(axis=(0, 1)).sum()) / of.ranks)
    bound = nothing.copy()
    bound[0, 0], bound[-1, -1] = of.ends
    program.add_shares(bound)
    for rank in range(of.ranks):
        row = nothing.copy()
        row[:, rank] = busy_s[rank]
        program.add_seconds(row, of.step_s + of.num_micro_batches * float(besides_s[:, rank].sum()))
        for group, size in enumerate(sizes):
            row = nothing.copy()
            row[group, rank] = -of.times
            program.add_room(row, -float(size))
        if is_short:
            row = nothing.copy()
            row[:-1, rank] = of.standings[rank].used_bytes(of.ranks)
            row[-1, rank] = of.standings[rank].used_bytes(of.held[rank])
            program.add_room(row, of.standings[rank].room)
    for often in paths(sizes, of.ranks, of.num_micro_batches):
        row = often[..., None, None] * once_s
        # The path ends on rank 0, whose gradients come behind it.
        row[:, 0] += (often[:, 0, None, None] >= 1.0) * (ended_s - once_s)[0]
        program.add_seconds(row, of.step_s + float((often * besides_s).sum()))
    return program.seconds()

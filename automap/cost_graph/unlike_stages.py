"""Unlike stages: the fastest spread of a model's units over ranks that differ, as a linear program.

For each type of units and each rank, lower bounds on time and memory are given. The program may divide units into
fractions and ignores their order. Its optimum is therefore a lower bound on the step time of every pipeline over these
ranks. Units: seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from automap.arrays import Floats, Ints
from automap.cost_graph.paths import Passes
from automap.cost_graph.relaxed_costs import OfTypes
from automap.cost_graph.spread_program import SpreadProgram


@dataclass(frozen=True, kw_only=True)
class RankBounds:
    """Lower bounds on the time and the memory of a model's units on one rank.

    A *way* is a recompute mode together with one of two bounds on the state (parameters, gradients and moments): that
    of the fastest signatures, or the least possible one.
    """

    busy_s: Floats
    """[ways, types] seconds of all units of a type for all micro-batches, the gradients and the update."""
    passes_s: Floats
    """[4, ways, types] seconds of all units of a type in the passes of one micro-batch, see `PASSES`; [0, ways, types]
    if they are not known."""
    state_bytes: Floats
    """[ways, types] bytes of parameters, gradients and moments."""
    saved_bytes: Floats
    """[ways, types] bytes that are saved for the backward pass of one micro-batch."""
    room: float
    """Bytes that state and saved tensors may take on the rank."""
    crossing: Floats
    """[units - 1] bytes that are sent to the next rank if the pipeline is cut after each unit."""

    @staticmethod
    def of(found: Sequence[OfTypes], saved_bytes: Floats, *, room: float, crossing: Floats) -> RankBounds:
        """The bounds of a rank from those of relaxations.

        Two lines bound the seconds t and the state s of a type from below: t >= fast_s, and t + price * s >= priced_s.
        The two ways of a mode are the corners of this region: the fastest one, and the one with the least state. All
        paths share one state, so the first corner takes the least state of all paths.

        Args:
            found: bounds of the types, first for all micro-batches, and then for each of `PASSES` or for none.
            saved_bytes: [modes, types] bytes that all units of a type save for one micro-batch.
            room: see `RankBounds.room`.
            crossing: see `RankBounds.crossing`.
        """
        least = found[0].least_bytes
        mosts = [(one.priced_s - one.fast_s) / one.price_s for one in found if one.price_s > 0.0]
        most = np.maximum(np.min(mosts, axis=(0, 1)), least) if mosts else least
        lean = [np.maximum(one.fast_s, one.priced_s - one.price_s * least) for one in found]
        busy_s, *passes_s = (np.concatenate([one.fast_s, slow_s]) for one, slow_s in zip(found, lean, strict=True))
        each = len(saved_bytes)
        return RankBounds(
            busy_s=busy_s,
            passes_s=np.array(passes_s).reshape(len(passes_s), *busy_s.shape),
            state_bytes=np.concatenate([np.tile(most, (each, 1)), np.tile(least, (each, 1))]),
            saved_bytes=np.concatenate([saved_bytes, saved_bytes]),
            room=room,
            crossing=crossing,
        )

    @staticmethod
    def undecided(
        seconds: Sequence[Floats], state_bytes: Floats, saved_bytes: Floats, *, room: float, crossing: Floats
    ) -> RankBounds:
        """The bounds of a rank where every signature is undecided; both ways of a mode are then the same.

        Args:
            seconds: [modes, types] seconds in all micro-batches, and then of each of `PASSES` or of none.
            state_bytes: [types] bytes of parameters, gradients and moments.
            saved_bytes: [modes, types] bytes that all units of a type save for one micro-batch.
            room: see `RankBounds.room`.
            crossing: see `RankBounds.crossing`.
        """
        twice = np.array([np.concatenate([some, some]) for some in seconds])
        return RankBounds(
            busy_s=twice[0],
            passes_s=twice[1:],
            state_bytes=np.tile(state_bytes, (len(twice[0]), 1)),
            saved_bytes=np.concatenate([saved_bytes, saved_bytes]),
            room=room,
            crossing=crossing,
        )

    @staticmethod
    def mixed(some: Sequence[RankBounds], weights: Floats | None = None) -> RankBounds:
        """One bound from those of several kinds of devices of one rank: the mean of the seconds, the least of the rest.

        A rank is as slow as its slowest kind, so each bound holds, and so does any mean of them.

        Args:
            some: the bounds of each kind.
            weights: [kinds] weights of the mean; None: in proportion to the speed of each kind, so that the mean
                differs little between types of units.
        """
        if weights is None:
            weights = np.array([1.0 / max(float(one.busy_s.min(axis=0).sum()), 1e-30) for one in some])
        return replace(
            RankBounds.minimum(some),
            busy_s=np.average([one.busy_s for one in some], axis=0, weights=weights),
            passes_s=np.average([one.passes_s for one in some], axis=0, weights=weights),
        )

    @staticmethod
    def minimum(some: Sequence[RankBounds]) -> RankBounds:
        """A bound that is below several others: the least of each number, and the most room."""
        return RankBounds(
            busy_s=np.min([one.busy_s for one in some], axis=0),
            passes_s=np.min([one.passes_s for one in some], axis=0),
            state_bytes=np.min([one.state_bytes for one in some], axis=0),
            saved_bytes=np.min([one.saved_bytes for one in some], axis=0),
            room=max(one.room for one in some),
            crossing=np.min([one.crossing for one in some], axis=0),
        )

    def with_gradients(self, seconds: Floats) -> RankBounds:
        """The bounds with more seconds for the gradients of all units of each type, [types]."""
        passes_s = self.passes_s.copy()
        passes_s[1:2] += seconds
        return replace(self, busy_s=self.busy_s + seconds, passes_s=passes_s)

    def on(self, passes: Passes) -> Floats:
        """[ways, types] seconds of all units of a type in some passes."""
        return np.tensordot(passes.weights, self.passes_s, 1)

    def used_bytes(self, in_flight: int) -> Floats:
        """[ways, types] bytes of all units of a type while `in_flight` micro-batches are in flight."""
        found: Floats = self.state_bytes + in_flight * self.saved_bytes
        return found

    def may_be_short(self, in_flight: int, share: float = 1.0) -> bool:
        """Whether a share of all units may need more than the room if each unit runs in its fastest way."""
        fastest = self.busy_s.argmin(axis=0)
        used = self.used_bytes(in_flight)[fastest, np.arange(len(fastest))]
        return bool(share * used.sum() > self.room)


def quick_spreads(busy_s: Floats, besides_s: Floats) -> Floats:
    """[spreads] lower bounds of spreads by fixed weights: those of the ranks are in proportion to their speed.

    Args:
        busy_s: [spreads, ranks, types] seconds of all units of a type on each rank, see `RankBounds.busy_s`.
        besides_s: [spreads, ranks] seconds that each rank takes besides its units.
    """
    weight = 1.0 / np.maximum(busy_s.sum(axis=2), 1e-30)
    weight /= weight.sum(axis=1, keepdims=True)
    found: Floats = (weight * besides_s).sum(axis=1) + (busy_s * weight[:, :, None]).min(axis=1).sum(axis=1)
    return found


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights of the rows of a spread's linear program (its dual variables). Any weights give a lower bound of any
    spread."""

    busy: Floats
    """[ranks] weights of the rows that say how long each rank works."""
    paths: Floats
    """[ranks] weights of the rows of the paths that end on each rank; with `busy` they add up to 1."""
    shares_s: Floats
    """[ranks, types] weights, in seconds, of the rows for the share of each type that a rank must have."""


@dataclass(frozen=True, kw_only=True)
class Spreads:
    """Many spreads over equally many ranks, with one `RankBounds` for each rank; see `fastest_spread`."""

    busy_s: Floats
    """[spreads, ranks, types] seconds of all units of a type on each rank, see `RankBounds.busy_s`."""
    besides_s: Floats
    """[spreads, ranks] seconds that each rank takes besides its units."""
    trip_s: Floats
    """[spreads, ranks, paths, types] seconds of all units of a type on each path; `paths` may be 0."""
    besides_trip_s: Floats
    """[spreads, ranks] seconds that the path which ends on each rank takes besides units; without paths, [spreads,
    0]."""
    bound: Floats
    """[ranks, types] least share of each type on each rank: the first and the last unit have a fixed place."""

    def take(self, at: Ints) -> Spreads:
        """Some of the spreads."""
        return replace(
            self,
            busy_s=self.busy_s[at],
            besides_s=self.besides_s[at],
            trip_s=self.trip_s[at],
            besides_trip_s=self.besides_trip_s[at],
        )

    def bounds(self, weights: Weights) -> Floats:
        """[spreads] lower bounds of all spreads by the given weights."""
        ranks = np.arange(self.busy_s.shape[1])
        each = weights.busy[:, None] * self.busy_s - weights.shares_s
        found: Floats = self.besides_s @ weights.busy + (weights.shares_s * self.bound).sum()
        for last, weight in enumerate(weights.paths[: self.besides_trip_s.shape[1]].tolist()):
            each = each + weight * self.trip_s[:, ranks, (ranks >= last) * 1 + (ranks > last)]
            found = found + weight * self.besides_trip_s[:, last]
        found += each.min(axis=1).sum(axis=1)
        return found

    def quick(self) -> Floats:
        """[spreads] lower bounds by fixed weights: those of `quick_spreads`, or the same for all paths."""
        found = quick_spreads(self.busy_s, self.besides_s)
        ranks, types = self.bound.shape
        if not self.besides_trip_s.shape[1]:
            return found
        even = Weights(busy=np.zeros(ranks), paths=np.full(ranks, 1.0 / ranks), shares_s=np.zeros((ranks, types)))
        return np.maximum(found, self.bounds(even))


def fastest_spread(
    views: Sequence[Sequence[RankBounds]],
    busy_s: Sequence[float],
    trip_s: Sequence[float],
    in_flight: Sequence[int],
    bound: Floats | None = None,
    trips: Sequence[Passes] = (),
) -> tuple[float, Weights]:
    """Seconds of the fastest spread, and the weights that prove that no spread is faster.

    A path that ends on rank r runs through all ranks. On the ranks before r it has the passes `trips[0]` (without the
    last backward pass), on r `trips[1]` (with the gradients), and after r `trips[2]`.

    Args:
        views: for each rank, its bounds for each of its kinds of devices; all of them hold.
        busy_s: [ranks] seconds of each rank besides its units.
        trip_s: [ranks] seconds of the path that ends on each rank besides its units; empty if no path counts.
        in_flight: [ranks] micro-batches in flight on each rank.
        bound: see `Spreads.bound`; None: no rank must have any unit.
        trips: the passes of a path on the ranks before its last one, on this one, and on those after it.
    """
    is_short = [[view.may_be_short(count) for view in some] for some, count in zip(views, in_flight, strict=True)]
    keeps_ways = any(map(any, is_short))

    def seconds(of_ways: Floats) -> Floats:
        return of_ways if keeps_ways else of_ways.min(axis=0, keepdims=True)

    first_s = seconds(views[0][0].busy_s)
    nothing = np.zeros((len(views), *first_s.shape))
    program = SpreadProgram(first_s.shape[1], float(first_s.min(axis=0).sum()))
    for rank, some in enumerate(views):
        for view, short in zip(some, is_short[rank], strict=True):
            row = nothing.copy()
            row[rank] = seconds(view.busy_s)
            program.add_seconds(row, busy_s[rank], ("busy", rank, 0))
            if short:
                row = nothing.copy()
                row[rank] = view.used_bytes(in_flight[rank])
                program.add_room(row, view.room)
    if bound is not None:
        program.add_shares(np.broadcast_to(bound[:, None], nothing.shape))
    for number in range(max(map(len, views))):
        # The bounds of all ranks for one kind of devices.
        seen = [some[min(number, len(some) - 1)] for some in views]
        for last, more_s in enumerate(trip_s):
            of_ranks = [view.on(trips[(rank >= last) + (rank > last)]) for rank, view in enumerate(seen)]
            program.add_seconds(np.array([seconds(some) for some in of_ranks]), more_s, ("path", last, 0))
    fastest_s = program.seconds()
    ranks, types = range(len(views)), range(first_s.shape[1])
    busy, paths = (np.array([program.weights.get((name, rank, 0), 0.0) for rank in ranks]) for name in ("busy", "path"))
    shares = [[program.weights.get(("share", rank, kind), 0.0) for kind in types] for rank in ranks]
    whole = max(float(busy.sum() + paths.sum()), 1e-30)
    return fastest_s, Weights(busy=busy / whole, paths=paths / whole, shares_s=np.array(shares) / whole)

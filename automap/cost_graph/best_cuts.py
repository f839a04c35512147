"""Best cuts: a lower bound on the step time of pipelines without virtual stages, by dynamic programming over units.

Each rank has one sequence of consecutive units. For every sequence there are lower bounds on the seconds of its passes
and on its memory. A step is at least as long as the work of its slowest rank, and as the longest path through its
passes (`automap.cost_graph.paths`). The program finds the cuts for which the longest of these is as short as possible.

With m micro-batches, rank r of p runs w = min(m, p - r) forward passes before its first backward pass under 1F1B. F and
B are the seconds of its passes, T = F + B. Two paths run through each rank r:

- The first micro-batch goes to the last rank and back to r. From then on r works without a pause: m - w forward and
  m - 1 backward passes are left.
- The same, but after the last forward pass of r, for m > w, the last micro-batch goes on to the last rank and back to
  r. In place of w - 1 backward passes of r, the path has T of all ranks behind r.

From r, a path goes back to a rank before it, or ends on r; it is followed by the gradients of its last rank. These
paths also bound GPipe. There, the path with m T of the slowest rank is at least as long.

What a path takes on the ranks before r depends on their cuts. It is replaced by the least that it takes for any cuts,
and so are the ranks behind r. Where memory is short, its limit is relaxed by a price of each byte (Lagrange). Units:
seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from automap.arrays import Floats, Ints
from automap.cost_graph.paths import Passes
from automap.cost_graph.unlike_stages import RankBounds
from automap.cost_graph.whole_units import prices_of_memory

MOST_PIPELINES = 100
"""Number of pipelines whose cuts are found together, which limits memory."""


BOTH, ENDED, THERE = Passes(both=1.0), Passes(ended=1.0), Passes(there=1.0)


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """Pipelines without virtual stages."""

    stages: Sequence[Sequence[RankBounds]]
    """For each stage, its bounds for each of its kinds of devices, all of which hold."""
    units: Ints
    """[units] type of each unit, in order."""
    in_flight: Sequence[int]
    """[ranks] micro-batches in flight on each rank."""
    num_micro_batches: int
    """Micro-batches of a step."""
    step_s: float
    """Seconds of a step besides its passes."""
    micro_batch_s: float
    """Seconds of a forward pass besides its units and exchanges."""
    send_s: float
    """Seconds of an exchange of one micro-batch with the next rank, without the time for its bytes."""
    shown: float
    """Share of the time for the bytes of an exchange that is not hidden."""
    has_paths: bool
    """Whether the paths above hold: every schedule is 1F1B or GPipe."""

    def bounds(self, at: Ints, rates: Floats, target_s: float = np.inf) -> Floats:
        """[pipelines] lower bound on the seconds of a step under the best cuts.

        Args:
            at: [pipelines, ranks] number of the stage of each rank.
            rates: [pipelines, ranks] bytes a second from each rank to the next one.
            target_s: a bound that suffices.
        """
        found = np.zeros(len(at))
        one_of_each = [some[0] for some in self.stages]
        most = [max(self.in_flight)] * len(one_of_each)
        prices = list(prices_of_memory(one_of_each, most, np.unique(self.units).tolist(), at.shape[1]))
        # The work of each rank alone takes less time to compute than paths, and often suffices.
        tries = [(price_s, False) for price_s in prices]
        tries += [(price_s, True) for price_s in prices if self.has_paths]
        for price_s, with_paths in tries:
            left = np.flatnonzero(found < target_s)
            for begin in range(0, len(left), MOST_PIPELINES):
                some = left[begin : begin + MOST_PIPELINES]
                of = _BestCuts(self, at[some], rates[some], price_s)
                found[some] = np.maximum(found[some], of.longest_s(with_paths=with_paths))
        return found


class _BestCuts:
    """Cuts of some pipelines at one price of memory."""

    def __init__(self, cuts: Cuts, at: Ints, rates: Floats, price_s: float) -> None:
        """Prepares what is sent.

        Args:
            cuts: see `Cuts`.
            at: [pipelines, ranks] number of the stage of each rank.
            rates: [pipelines, ranks] bytes a second from each rank to the next one.
            price_s: price of a byte, in seconds.
        """
        self._cuts, self._at, self._price_s = cuts, at, price_s
        self._times = np.maximum(np.bincount(cuts.units), 1)
        (self._count, self._ranks), self._places = at.shape, len(cuts.units) + 1
        crossing = np.array([np.min([view.crossing for view in some], axis=0) for some in cuts.stages])
        # [pipelines, ranks + 1, cuts] seconds of the exchange of a micro-batch if a rank begins at each cut.
        self._sent_s = np.zeros((self._count, self._ranks + 1, self._places))
        sent_s = cuts.send_s + cuts.shown * crossing[at[:, :-1]] / rates[:, :-1, None]
        self._sent_s[:, 1:-1, 1:-1] = sent_s

    def longest_s(self, *, with_paths: bool) -> Floats:
        """[pipelines] seconds of a step if the cuts are those for which it is shortest."""
        longest = self._nothing(first=True)
        if with_paths:
            behind = self._behind_s()
            fill, drained = self._nothing(first=True), self._nothing(first=True)
        for rank in range(self._ranks):
            each = self._busy_s(rank)
            if with_paths:
                each = np.maximum(each, self._paths_s(rank, fill, drained, behind[rank + 1]))
                both, ended = self._on_s(rank, BOTH), self._on_s(rank, ENDED)
                drained = np.maximum(drained[:, :, None] + both, fill[:, :, None] + ended).min(axis=1)
                fill = (fill[:, :, None] + self._on_s(rank, THERE)).min(axis=1)
            longest = np.maximum(longest[:, :, None], each).min(axis=1)
        return longest[:, -1] + self._cuts.step_s

    def _nothing(self, *, first: bool) -> Floats:
        """[pipelines, cuts] seconds of no rank, which ends at the first cut, or begins at the last one."""
        found = np.full((self._count, self._places), np.inf)
        found[:, 0 if first else -1] = 0.0
        return found

    def _behind_s(self) -> list[Floats]:
        """[ranks + 1][pipelines, cuts] least seconds of a forward and a backward pass of all ranks from a rank on, if
        it begins at each cut."""
        found = [self._nothing(first=False)]
        for rank in range(self._ranks - 1, 0, -1):
            found.append((self._on_s(rank, BOTH) + found[-1][:, None, :]).min(axis=2))
        return [found[-1], *reversed(found)]

    def _paths_s(self, rank: int, fill: Floats, drained: Floats, behind: Floats) -> Floats:
        """[pipelines, cuts, cuts] the longest path through a rank that has the units from one cut to another.

        Args:
            rank: the rank.
            fill: [pipelines, cuts] least seconds of a forward pass of all ranks before, if they end at each cut.
            drained: [pipelines, cuts] least seconds of a path that goes through the ranks before and back to one of
                them, with the gradients of this one.
            behind: [pipelines, cuts] least seconds of a forward and a backward pass of all ranks behind.
        """
        count = self._cuts.num_micro_batches
        warm = min(count, self._ranks - rank)
        found = np.full((self._count, self._places, self._places), -np.inf)
        # The passes of the rank besides those of one micro-batch, and how often the path visits the ranks behind.
        ways = [(Passes(both=count - warm, back=warm - 1), 1.0)]
        ways += [(Passes(both=count - warm), 2.0)] if count > warm else []
        for more, visits in ways:
            back = Passes(both=more.both + 1.0, back=more.back)
            ends = Passes(both=more.both, ended=1.0, back=more.back)
            here = np.maximum(
                drained[:, :, None] + self._on_s(rank, back, self._price_s),
                fill[:, :, None] + self._on_s(rank, ends, self._price_s),
            )
            np.maximum(found, here + visits * behind[:, None, :], out=found)
        return found

    def _busy_s(self, rank: int) -> Floats:
        """[pipelines, cuts, cuts] seconds of a rank in a step, with the price of its memory."""
        count = float(self._cuts.num_micro_batches)
        found = self._spans_s(rank, lambda view: view.busy_s, self._price_s)
        return found + self._besides_s(rank, exchanges=count, forward=count)

    def _on_s(self, rank: int, passes: Passes, price_s: float = 0.0) -> Floats:
        """[pipelines, cuts, cuts] seconds of some passes of a rank that has the units from one cut to another.

        Args:
            rank: the rank.
            passes: the passes.
            price_s: price of a byte of the rank's memory.
        """
        found = self._spans_s(rank, lambda view: view.on(passes), price_s)
        return found + self._besides_s(rank, exchanges=passes.exchanges, forward=passes.forward)

    def _spans_s(self, rank: int, seconds: Callable[[RankBounds], Floats], price_s: float) -> Floats:
        """[pipelines, cuts, cuts] seconds of the units from one cut to another on a rank; infinite if there is no unit.

        Args:
            rank: the rank.
            seconds: [ways, types] seconds of all units of a type by the bounds of a kind of devices.
            price_s: price of a byte of memory, which is added for the units and subtracted for the room.
        """
        numbers, where = np.unique(self._at[:, rank], return_inverse=True)
        in_flight, found = self._cuts.in_flight[rank], list[Floats]()
        for number in numbers.tolist():
            of_kinds = []
            for view in self._cuts.stages[number]:
                priced_s = seconds(view)
                if price_s:
                    priced_s = priced_s + price_s * view.used_bytes(in_flight)
                each = priced_s.min(axis=0) / self._times
                ends_s = np.concatenate([[0.0], np.cumsum(each[self._cuts.units])])
                of_kinds.append(ends_s[None, :] - ends_s[:, None] - price_s * view.room)
            found.append(np.max(of_kinds, axis=0))
        spans = np.array(found)
        spans[:, np.tri(self._places, dtype=np.bool_)] = np.inf
        return spans[where]

    def _besides_s(self, rank: int, *, exchanges: float, forward: float) -> Floats:
        """[pipelines, cuts, cuts] seconds of a rank besides its units for a number of exchanges and forward passes."""
        before, behind = self._sent_s[:, rank], self._sent_s[:, rank + 1]
        found: Floats = exchanges * (before[:, :, None] + behind[:, None, :]) + forward * self._cuts.micro_batch_s
        return found

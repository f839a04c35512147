"""Paths through the passes of a pipeline: weights of the passes of each rank in lower bounds of the step time.

A path is a chain of passes in which each waits for the one before. A step is at least as long as any path, so a
weighted sum of the times of the ranks is a lower bound. With F and B the seconds of a rank's forward and backward pass,
T = F + B, m micro-batches and p ranks, these paths are used:

- *Any schedule*: a rank works on all micro-batches, reduces its gradients and updates. Averaged over the ranks, passes
  have the weight m / p (times the sum of T over the ranks), and gradients and update 1 / p.
- *1F1B without virtual stages, m > p*: a micro-batch goes to the last rank and back, and then rank 0 begins the
  micro-batch with a number p higher. With m - 1 = k p + s, these are k + 1 round trips over all ranks. For each of the
  remaining s micro-batches, the path contains T of one rank, averaged over all ranks. Gradients and update of rank 0
  come after that.
- *GPipe, any m*: the forward passes of one rank and the backward passes of another one, between two round trips.
- *Virtual stages, m = p*: all forward passes come before all backward passes. In both, a path goes through all chunks,
  and through all micro-batches of one chunk: 1 + (m - 1) / chunks times the sum of T, in the mean over the chunks.

Averaged over the ranks, the paths of 1F1B and GPipe are (m + p - 1) / p times the sum of T. So no uneven division of
the work among ranks is faster than the even one. There are also paths that end on another rank r: they lack the last
backward passes of the ranks before r, and end with the gradients of rank r. For m <= p, the paths of 1F1B use the order
of its backward passes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from automap.schedule import KINDS, pattern
from automap.space.shape import Shape

SHARES = (1.0, 0.5, 0.0)
"""Shares of the paths that end on rank 0 in mixtures; the rest of the paths end on each rank equally (assumed)."""
ORDERS = frozenset({"1f1b", "gpipe"})
"""Schedules for whose order there are paths; for all others there is only the path *any schedule*."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """The weights of the times of each rank in a path."""

    forward: float
    """Weight of a forward pass of one micro-batch."""
    backward: float
    """Weight of a backward pass of one micro-batch."""
    gradients: float
    """Weight of the reduction of gradients and of the optimizer's update; not more than that of a backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """How often a path contains the passes of a rank."""

    both: float = 0.0
    """A forward and a backward pass."""
    ended: float = 0.0
    """A forward and a backward pass, and the gradients that the backward pass may hide."""
    there: float = 0.0
    """A forward pass."""
    back: float = 0.0
    """A backward pass."""

    @staticmethod
    def of(path: Path) -> Passes:
        """The passes of a path whose weight of gradients is 0 or 1."""
        both = min(path.forward, path.backward)
        return Passes(
            both=both - path.gradients,
            ended=path.gradients,
            there=path.forward - both,
            back=path.backward - both,
        )

    @property
    def weights(self) -> tuple[float, float, float, float]:
        """The numbers, in the order of `PASSES`."""
        return self.both, self.ended, self.there, self.back

    @property
    def forward(self) -> float:
        """Forward passes."""
        return self.both + self.ended + self.there

    @property
    def exchanges(self) -> float:
        """Exchanges with the neighbouring ranks: each pass contains half of one."""
        return self.both + self.ended + 0.5 * (self.there + self.back)


PASSES = (
    Path(forward=1.0, backward=1.0, gradients=0.0),
    Path(forward=1.0, backward=1.0, gradients=1.0),
    Path(forward=1.0, backward=0.0, gradients=0.0),
    Path(forward=0.0, backward=1.0, gradients=0.0),
)
"""What `RankBounds.passes_s` bounds, as paths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PathMixture:
    """A weighted mean of paths, which is a lower bound as each of them is."""

    path: Path
    """Weights of the seconds of each rank."""
    ends_first: float
    """Share of the paths that end on rank 0, followed by its gradients; `path` does not count these gradients."""
    passes: float
    """Sum of the weights of the forward passes of all ranks."""
    sends: float
    """Weight of the exchanges of one micro-batch on all ranks together, see `exchanged_s`."""


def path_mixtures(shape: Shape, schedules: Sequence[str]) -> list[PathMixture]:
    """Mixtures of paths for a pipeline whose ranks are all equal.

    Args:
        shape: shape of the plans.
        schedules: the possible schedules if there are no virtual stages.
    """
    m, p = float(shape.num_micro_batches), float(shape.pp)
    busy = Path(forward=m / p, backward=m / p, gradients=1.0 / p)
    found = [PathMixture(path=busy, ends_first=0.0, passes=m, sends=m / p)]
    if shape.virtual > 1 and shape.num_micro_batches == shape.pp:
        all_of = 1.0 + (m - 1.0) / shape.num_chunks
        found.append(
            PathMixture(
                path=Path(forward=all_of, backward=all_of, gradients=0.0),
                ends_first=1.0,
                passes=p * all_of,
                sends=all_of,
            )
        )
    if shape.pp == 1 or shape.virtual > 1 or not ORDERS.issuperset(schedules):
        return found
    trips = [(share, path_to_ranks(shape, schedules, share)) for share in SHARES]
    return [
        PathMixture(path=trip, ends_first=share, passes=p * trip.forward, sends=sends_on(trip)) for share, trip in trips
    ]


def sends_on(path: Path) -> float:
    """Weight of the exchanges of one micro-batch on all ranks together: each pass contains half of an exchange."""
    return 0.5 * (path.forward + path.backward)


def exchanged_s(sent_s: Sequence[float], virtual: int) -> list[float]:
    """[chunks] seconds of the exchanges of each chunk with the chunks before and after it, for one micro-batch.

    Args:
        sent_s: [ranks] seconds of an exchange of each rank with the next one; of the last rank with the first one.
        virtual: chunks of each rank. If there are several, the longer one of the two exchanges of a chunk counts, else
            their sum.
    """
    last = len(sent_s) * virtual - 1
    around = [
        (sent_s[(chunk - 1) % len(sent_s)] if chunk else 0.0, sent_s[chunk % len(sent_s)] if chunk < last else 0.0)
        for chunk in range(last + 1)
    ]
    return [before + behind if virtual == 1 else max(before, behind) for before, behind in around]


def least_in_flight(shape: Shape, schedules: Sequence[str]) -> list[int]:
    """[ranks] lower bound on the micro-batches in flight on each rank when its backward passes begin. The rank has
    saved the activations of each of its units for this many micro-batches.

    Args:
        shape: shape of the plans.
        schedules: the possible schedules if there are no virtual stages.
    """
    p, turn = shape.pp, shape.num_chunks
    kinds = [KINDS[name] for name in (schedules if shape.virtual == 1 else ("interleaved",))]
    patterns = [pattern(kind, p, turn, shape.num_micro_batches) for kind in kinds] if p > 1 else [(0, 1)]
    found = []
    for rank in range(p):
        first = min(base + step * (p - 1 - rank) for base, step in patterns) + 1
        first = min(first, shape.virtual * shape.num_micro_batches)
        # A rank runs p forward passes of each of its chunks in turn. The last chunk has run the fewest so far.
        found.append(first // turn * p + min(max(first % turn - (turn - p), 0), p))
    return found


def path_to_ranks(shape: Shape, schedules: Sequence[str], share: float) -> Path:
    """Weights of the seconds of each rank in a mixture of paths; all 0 if no such paths are known.

    Args:
        shape: shape of the plans.
        schedules: the possible schedules if there are no virtual stages.
        share: share of the paths that end on rank 0; the others end on each rank equally.
    """
    p, trips = float(shape.pp), path_trips(shape, schedules)
    if not trips:
        return Path(forward=0.0, backward=0.0, gradients=0.0)
    before, _, behind = trips
    late = (1.0 - share) * (p - 1.0) / p * (behind.backward - before.backward)
    return Path(forward=behind.forward, backward=behind.backward - late, gradients=(1.0 - share) / p)


def path_trips(shape: Shape, schedules: Sequence[str]) -> tuple[Path, ...]:
    """Weights of the seconds of a rank in three kinds of paths: that end on a rank after it, on itself, and on a rank
    before it.

    A path that ends on rank r lacks the backward passes of the ranks before r on the last trip back. If there is only
    one trip, as in GPipe and for m at most p, it has no backward passes of these ranks at all.

    Returns:
        The three weights; empty if no such paths are known.
    """
    first = path_to_first(shape, schedules)
    if not first.backward:
        return ()
    is_only = "gpipe" in schedules or shape.num_micro_batches <= shape.pp
    before = replace(first, backward=0.0 if is_only else first.backward - 1.0)
    return before, replace(first, gradients=1.0), first


def path_to_first(shape: Shape, schedules: Sequence[str]) -> Path:
    """Weights of the seconds of each rank in the path that ends on rank 0, without its gradients; all 0 if no such path
    is known."""
    if shape.pp == 1 or shape.virtual > 1 or not ORDERS.issuperset(schedules):
        return Path(forward=0.0, backward=0.0, gradients=0.0)
    most = 1.0 + (shape.num_micro_batches - 1.0) / shape.pp
    is_long = set(schedules) == {"gpipe"} or shape.num_micro_batches > shape.pp
    return Path(forward=most if is_long else 1.0, backward=most, gradients=0.0)

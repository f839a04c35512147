"""Paths: how much the passes of a pipeline's ranks weigh in a step, whatever their times are.

With F and B the seconds of a rank's forward and backward pass, T = F + B, m micro-batches and p ranks, the end of a
step is at least any path through the order of the passes. Three kinds of them, each a sum over ranks:

- A rank works on all micro-batches, reduces its gradients and updates: in the mean over the ranks, m / p times the sum
  of T, and 1 / p times that of the rest.
- 1F1B without virtual stages, m > p: a micro-batch runs to the last rank and back, and then rank 0 begins the one p
  later. With m - 1 = k p + s these are k + 1 round trips over all ranks; the s micro-batches between them are waited
  for on any rank at T each, so on an even mixture of ranks. Gradients and update of rank 0 alone come behind that.
- GPipe, any m: the forward passes of one rank and the backward passes of another, between two round trips.

- Virtual stages, m = p: all forward passes come before the backward passes, in both those of one chunk behind each
  other and the way through all chunks: 1 + (m - 1) / chunks times the sum of T in the mean over the chunks.

In the mean over the ranks the second and the third are (m + p - 1) / p times the sum of T: no uneven division of the
work is faster than the even one. Such a path ends on any rank r too, without the backward passes of the ranks before r,
and there the gradients of rank r come behind it. Where m is at most p, 1F1B is taken to do backward passes alone one
after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from automap.space.shape import Shape

SHARES = (1.0, 0.5, 0.0)
"""Shares of the paths that end on rank 0, the rest end on all ranks alike (assumed)."""
ORDERS = frozenset({"1f1b", "gpipe"})
"""Schedules whose order the paths know; of others, only that ranks work on all micro-batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """What the seconds of each rank weigh in a step."""

    forward: float
    """Weight of a forward pass of one micro-batch."""
    backward: float
    """Weight of a backward pass of one micro-batch."""
    gradients: float
    """Weight of the reduction of gradients and of the optimizer's update; not more than that of a backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ways:
    """One mixture of paths."""

    path: Path
    """What the seconds of each rank weigh."""
    passes: float
    """Sum of the weights of the forward passes of all ranks."""
    sends: float
    """Weight of the exchanges across all boundaries between chunks, at least."""


def ways(shape: Shape, schedules: Sequence[str]) -> list[Ways]:
    """Mixtures of paths of a pipeline whose ranks are alike.

    Args:
        shape: its shape.
        schedules: the schedules that it may have if it has no virtual stages.
    """
    m, p = float(shape.num_micro_batches), float(shape.pp)
    busy = Path(forward=m / p, backward=m / p, gradients=1.0 / p)
    # Of virtual stages the longer one of the two exchanges of a chunk counts.
    found = [Ways(path=busy, passes=m, sends=m / p * (1.0 if shape.virtual > 1 else 2.0))]
    if shape.virtual > 1 and shape.num_micro_batches == shape.pp:
        all_of = 1.0 + (m - 1.0) / shape.num_chunks
        found.append(Ways(path=Path(forward=all_of, backward=all_of, gradients=0.0), passes=p * all_of, sends=all_of))
    if shape.pp == 1 or shape.virtual > 1 or not ORDERS.issuperset(schedules):
        return found
    trips = (path_to_ranks(shape, schedules, share) for share in SHARES)
    return [Ways(path=trip, passes=p * trip.forward, sends=2.0 * min(trip.forward, trip.backward)) for trip in trips]


def path_to_ranks(shape: Shape, schedules: Sequence[str], share: float) -> Path:
    """What the seconds of each rank weigh in paths that end on rank 0, for a share of them, or else on any rank.

    All weights are 0 where no such path is known.
    """
    if shape.pp == 1 or shape.virtual > 1 or not ORDERS.issuperset(schedules):
        return Path(forward=0.0, backward=0.0, gradients=0.0)
    p = float(shape.pp)
    most = 1.0 + (shape.num_micro_batches - 1.0) / p
    is_long = set(schedules) == {"gpipe"} or shape.num_micro_batches > shape.pp
    late = (1.0 - share) * (p - 1.0) / p
    return Path(forward=most if is_long else 1.0, backward=most - late, gradients=(1.0 - share) / p)

"""Paths: how much the passes of a pipeline's ranks weigh in a step, whatever their times are.

With F and B the seconds of a rank's forward and backward pass, T = F + B, m micro-batches and p ranks, the end of a
step is at least any path through the order of the passes. Three kinds of them, each a sum over ranks:

- A rank works on all micro-batches, reduces its gradients and updates: in the mean over the ranks, m / p times the sum
  of T, and 1 / p times that of the rest.
- 1F1B without virtual stages, m > p: a micro-batch runs to the last rank and back, and then rank 0 begins the one p
  later. With m - 1 = k p + s these are k + 1 round trips over all ranks; the s micro-batches between them are waited
  for on any rank at T each, so on an even mixture of ranks. Gradients and update of rank 0 alone come after that.
- GPipe, any m: the forward passes of one rank and the backward passes of another, between two round trips.

- Virtual stages, m = p: all forward passes come before the backward passes, in both those of one chunk after each
  other and the way through all chunks: 1 + (m - 1) / chunks times the sum of T in the mean over the chunks.

In the mean over the ranks the second and the third are (m + p - 1) / p times the sum of T: no uneven division of the
work is faster than the even one. Such a path ends on any rank r too, without the last backward passes of the ranks
before r, and there the gradients of rank r come after it. Where m is at most p, 1F1B is taken to do backward passes
alone one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from automap.schedule import KINDS, pattern
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
    ends_first: float
    """Share of the paths that end on rank 0, whose gradients come after them; `path` does not count these."""
    passes: float
    """Sum of the weights of the forward passes of all ranks."""
    sends: float
    """Weight of the exchanges of one micro-batch on all ranks together, see `exchanged_s`."""


def ways(shape: Shape, schedules: Sequence[str]) -> list[Ways]:
    """Mixtures of paths of a pipeline whose ranks are alike.

    Args:
        shape: its shape.
        schedules: the schedules that it may have if it has no virtual stages.
    """
    m, p = float(shape.num_micro_batches), float(shape.pp)
    busy = Path(forward=m / p, backward=m / p, gradients=1.0 / p)
    found = [Ways(path=busy, ends_first=0.0, passes=m, sends=m / p)]
    if shape.virtual > 1 and shape.num_micro_batches == shape.pp:
        all_of = 1.0 + (m - 1.0) / shape.num_chunks
        found.append(
            Ways(
                path=Path(forward=all_of, backward=all_of, gradients=0.0),
                ends_first=1.0,
                passes=p * all_of,
                sends=all_of,
            )
        )
    if shape.pp == 1 or shape.virtual > 1 or not ORDERS.issuperset(schedules):
        return found
    trips = [(share, path_to_ranks(shape, schedules, share)) for share in SHARES]
    return [Ways(path=trip, ends_first=share, passes=p * trip.forward, sends=sends_on(trip)) for share, trip in trips]


def sends_on(path: Path) -> float:
    """Weight of the exchanges of one micro-batch on all ranks together: each pass waits for half of them."""
    return 0.5 * (path.forward + path.backward)


def exchanged_s(sent_s: Sequence[float], virtual: int) -> list[float]:
    """[chunks] seconds that each chunk exchanges tensors with those around it for one micro-batch.

    Args:
        sent_s: [ranks] seconds of an exchange of each rank with the next one; of the last rank with the first one.
        virtual: virtual stages; the longer one of the two exchanges of a chunk counts where there are several.
    """
    last = len(sent_s) * virtual - 1
    around = [
        (sent_s[(chunk - 1) % len(sent_s)] if chunk else 0.0, sent_s[chunk % len(sent_s)] if chunk < last else 0.0)
        for chunk in range(last + 1)
    ]
    return [before + behind if virtual == 1 else max(before, behind) for before, behind in around]


def held(shape: Shape, schedules: Sequence[str]) -> list[int]:
    """[ranks] micro-batches for which a rank keeps what any of its units saves, at least, when its backward passes
    begin.

    Args:
        shape: its shape.
        schedules: the schedules that it may have if it has no virtual stages.
    """
    p, turn = shape.pp, shape.num_chunks
    kinds = [KINDS[name] for name in (schedules if shape.virtual == 1 else ("interleaved",))]
    patterns = [pattern(kind, p, turn, shape.num_micro_batches) for kind in kinds] if p > 1 else [(0, 1)]
    found = []
    for rank in range(p):
        first = min(base + step * (p - 1 - rank) for base, step in patterns) + 1
        first = min(first, shape.virtual * shape.num_micro_batches)
        # Forward passes go round the chunks of a rank, for as many micro-batches as there are ranks; the last chunk
        # has had the fewest.
        found.append(first // turn * p + min(max(first % turn - (turn - p), 0), p))
    return found


def path_to_ranks(shape: Shape, schedules: Sequence[str], share: float) -> Path:
    """What the seconds of each rank weigh in paths that end on rank 0, for a share of them, or else on any rank.

    All weights are 0 where no such path is known.
    """
    p, trips = float(shape.pp), path_trips(shape, schedules)
    if not trips:
        return Path(forward=0.0, backward=0.0, gradients=0.0)
    before, _, behind = trips
    late = (1.0 - share) * (p - 1.0) / p * (behind.backward - before.backward)
    return Path(forward=behind.forward, backward=behind.backward - late, gradients=(1.0 - share) / p)


def path_trips(shape: Shape, schedules: Sequence[str]) -> tuple[Path, ...]:
    """What the seconds of a rank weigh in paths that end on a rank after it, on itself and on a rank before it.

    A path that ends on rank r has no backward pass of the ranks before r from the last trip back. Where that is the
    only trip, as in GPipe and where m is at most p, it has none at all: what it waits for comes from ranks after them.

    Returns:
        Nothing where no such path is known.
    """
    first = path_to_first(shape, schedules)
    if not first.backward:
        return ()
    is_only = "gpipe" in schedules or shape.num_micro_batches <= shape.pp
    before = replace(first, backward=0.0 if is_only else first.backward - 1.0)
    return before, replace(first, gradients=1.0), first


def path_to_first(shape: Shape, schedules: Sequence[str]) -> Path:
    """What the seconds of each rank weigh in the path that ends on rank 0, without its gradients.

    All weights are 0 where no such path is known.
    """
    if shape.pp == 1 or shape.virtual > 1 or not ORDERS.issuperset(schedules):
        return Path(forward=0.0, backward=0.0, gradients=0.0)
    most = 1.0 + (shape.num_micro_batches - 1.0) / shape.pp
    is_long = set(schedules) == {"gpipe"} or shape.num_micro_batches > shape.pp
    return Path(forward=most if is_long else 1.0, backward=most, gradients=0.0)

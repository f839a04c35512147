"""Predicted against measured peak memory: the spread of each trainer's errors, and what it would have allowed.

Only errors on the dangerous side count, where a run needed more than was predicted. Units: bytes; errors are natural
logarithms of measured over predicted memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from automap.memory_band import margin
from automap.trainers import trainers
from automap.validation.errors_by_group import Predicted
from automap.validation.published_cases import RELEASES, trainer_of

COMPILED = ("alpa", "oneflow")
"""Trainers whose framework lays memory out when it compiles; all others run on PyTorch and its allocator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """A measured peak memory and its prediction."""

    trainer: str
    group: str
    """Source of the run."""
    model: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Logarithm of measured over predicted memory."""
        return math.log(self.measured / self.predicted)

    def exceeds(self, confidence: float, spread: float) -> bool:
        """Whether more was needed than the smallest device has into which the run would be said to fit."""
        return self.measured > self.predicted * margin(confidence, spread)


def peaks(rows: Iterable[Predicted]) -> tuple[Peak, ...]:
    """The distinct peaks among some runs: tables repeat the memory of one plan at several numbers of micro-batches."""
    found = (
        Peak(
            trainer=trainer_of(row.run),
            group=row.run.group,
            model=str(row.run.model.get("name")),
            predicted=row.peak_memory_bytes,
            measured=row.run.peak_memory_bytes,
        )
        for row in rows
        if row.why is None and row.run.peak_memory_bytes is not None
    )
    return tuple(dict.fromkeys(found))


def upper_spread(some: Iterable[Peak]) -> float:
    """The standard deviation of errors that are normal around 0, from those above 0; groups count alike.

    The mean square of the positive part of such an error is half of its variance.
    """
    groups: dict[str, list[float]] = {}
    for peak in some:
        groups.setdefault(peak.group, []).append(max(0.0, peak.error) ** 2)
    means = [sum(squares) / len(squares) for squares in groups.values()]
    return math.sqrt(2.0 * sum(means) / len(means)) if means else 0.0


def spreads(some: Sequence[Peak]) -> Mapping[str, tuple[float, str]]:
    """The spread of each trainer and where it comes from: its own, but no less than that of all on PyTorch together.

    A trainer of which nothing was measured has the latter, all releases of one software the same; the generic one,
    which may be any, the widest on PyTorch.
    """
    on_pytorch = [peak for peak in some if peak.trainer not in COMPILED]
    pooled = upper_spread(on_pytorch)
    together = f"the {len(on_pytorch)} peaks of all trainers on PyTorch, sources counting alike"
    found = {}
    for name in trainers():
        releases = next((some for some in _releases() if name in some), {name})
        mine = [peak for peak in some if peak.trainer in releases]
        own, whose = upper_spread(mine), "its" if len(releases) == 1 else "its releases'"
        found[name] = (own, f"{whose} {len(mine)} peaks") if own > pooled else (pooled, together)
    widest = max(((found[peak.trainer][0], peak.trainer) for peak in on_pytorch), default=(pooled, "all of them"))
    found["generic"] = widest[0], f"assumed: the widest on PyTorch, that of {widest[1]}"
    return found


def _releases() -> list[set[str]]:
    """The trainers of each software that has several releases."""
    return [{name, *earlier.values()} for name, earlier in RELEASES.items()]


def left_out(some: Sequence[Peak]) -> tuple[tuple[Peak, float], ...]:
    """Each peak with the spread that its trainer has without the runs of its model in its source."""
    found = []
    known: dict[tuple[str, str], Mapping[str, tuple[float, str]]] = {}
    for peak in some:
        key = peak.group, peak.model
        if key not in known:
            known[key] = spreads([other for other in some if (other.group, other.model) != key])
        found.append((peak, known[key][peak.trainer][0]))
    return tuple(found)

"""What a lowered plan costs, in numbers. Units: seconds; shares of memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from automap.plan import Sync
from automap.price.kernels.array_types import Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Averaging:
    """How replicas are averaged, and what that takes."""

    sync: Sync
    axis: int
    """Mesh axis of the replicas."""
    all_reduce_s: tuple[float, ...]
    """[ranks] seconds of the all-reduce of one averaging."""
    copies_s: tuple[float, ...]
    """[ranks] seconds of the copies of one averaging, in the memory of the rank."""
    shown_s: tuple[float, ...]
    """[ranks] seconds by which a step is longer, on average: the part of `end_s` that no other field has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a lowered plan costs."""

    step_time_s: float
    """Seconds of a step."""
    overflow: float
    """Largest share of its memory by which a device overflows; at most 0 when the plan fits."""
    ranks: Rows = field(repr=False)
    """[ranks] rows of `RankCostRow`, as the kind of device sees them that is done last."""
    view: int = 0
    """Number of that kind among `LoweredPlan.views`."""
    of_views: tuple[Rows, ...] = field(default=(), repr=False)
    """`ranks` as each kind of device sees them."""
    averaging: Averaging | None = None
    """How replicas are averaged in place of their gradients, or None."""

    @property
    def busiest(self) -> int:
        """The pipeline rank that works longest, and so waits least; of equals the first."""
        return int((self.ranks["end_s"] - self.ranks["bubble_s"]).argmax())

    def idle_s(self, rank: int) -> float:
        """Seconds of a step in which a pipeline rank waits, also behind its own end: what its work leaves of a step."""
        row = self.ranks[rank]
        return max(0.0, self.step_time_s - float(row.end_s) + float(row.bubble_s))

    @property
    def fits(self) -> bool:
        """Whether every device has room."""
        return self.overflow <= 0.0

"""The predicted cost of a lowered plan. Units: seconds; shares of memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from automap.plan import Sync
from automap.price.kernels.array_types import Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Averaging:
    """The periodic averaging of replicas, and its cost."""

    sync: Sync
    axis: int
    """Mesh axis of the replicas."""
    all_reduce_s: tuple[float, ...]
    """[ranks] seconds of the all-reduce of one averaging."""
    copies_s: tuple[float, ...]
    """[ranks] seconds of the copies of one averaging, in the memory of the rank."""
    shown_s: tuple[float, ...]
    """[ranks] exposed seconds in each step, on average. They are part of `RankCostRow.end_s` and of no other field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Step time and memory of a lowered plan."""

    step_time_s: float
    """Seconds of a step."""
    overflow: float
    """Bytes by which the fullest device exceeds its memory, as a share of that memory; at most 0 when the plan fits."""
    ranks: Rows = field(repr=False)
    """[ranks] rows of `RankCostRow`, of the slowest of `LoweredPlan.views`."""
    view: int = 0
    """Number of this view."""
    of_views: tuple[Rows, ...] = field(default=(), repr=False)
    """`ranks` of each view."""
    averaging: Averaging | None = None
    """How replicas are averaged in place of their gradients, or None."""

    @property
    def busiest(self) -> int:
        """The pipeline rank that works longest; the first of equal ones."""
        return int((self.ranks["end_s"] - self.ranks["bubble_s"]).argmax())

    def idle_s(self, rank: int) -> float:
        """Seconds of a step in which a pipeline rank does not work, also after its own last action."""
        row = self.ranks[rank]
        return max(0.0, self.step_time_s - float(row.end_s) + float(row.bubble_s))

    @property
    def fits(self) -> bool:
        """Whether the plan fits into the memory of every device."""
        return self.overflow <= 0.0

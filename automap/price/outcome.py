"""What a lowered plan costs, in numbers. Units: seconds; shares of memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from automap.plan import Sync

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Averaging:
    """How replicas are averaged, and what that takes."""

    sync: Sync
    axis: int
    """Of the replicas."""
    all_reduce_s: tuple[float, ...]
    """[ranks] of one averaging."""
    copies_s: tuple[float, ...]
    """[ranks] of one averaging, in the memory of the rank."""
    shown_s: tuple[float, ...]
    """[ranks] by which a step is longer, on average: the part of R_END that no other column has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a choice costs."""

    step_time_s: float
    overflow: float
    """Largest share of its memory by which a device overflows; at most 0 when the choice fits."""
    ranks: Floats = field(repr=False)
    """[ranks, R_COUNT], see `combine`; as the kind of device sees them that is done last."""
    view: int = 0
    """Number of that kind among `LoweredPlan.views`."""
    of_views: tuple[Floats, ...] = field(default=(), repr=False)
    """`ranks` of each of them."""
    averaging: Averaging | None = None
    """Of `ranks`, where replicas are averaged in place of their gradients."""

    @property
    def fits(self) -> bool:
        """Whether every device has room."""
        return self.overflow <= 0.0

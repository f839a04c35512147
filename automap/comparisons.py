"""What a plan is compared with: the plan that the user runs today, the best plan of any trainer, and plans with other
degrees of parallelism.

Records alone; `automap.space.changes` and `agents.portfolio.any_trainer` fill the first two in. Units: seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One difference between the user's plan and the plan found, on a way that makes them one after another."""

    about: str
    """The decision before and after, as in `tensor parallel 8 → 4`."""
    saved_s: float
    """Seconds that a step takes less with this change after those before it; negative where it takes longer. The sum
    over all changes is the whole difference."""
    parts_s: Mapping[str, float]
    """What these seconds consist of: compute, communication, bubble, optimizer and overhead of the busiest rank."""
    fits: bool
    """Whether the plan with the changes so far fits into memory."""
    alone_s: float | None
    """Step time of the user's plan with this change alone; null if that is not a plan, or does not fit."""
    without_s: float | None
    """Step time of the plan found without this change; null if that is not a plan, or does not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Yours:
    """The plan that the user runs today, and how the plan found differs from it."""

    name: str
    """Name of its file; `plan` for a plan document."""
    step_time_s: float
    """Its predicted step time, also where it does not fit."""
    shortage: str | None
    """Where and by how much it does not fit into memory; null if it fits."""
    notes: tuple[str, ...] = ()
    """What its file says without effect on the price, and what is unusual about it."""
    changes: tuple[Change, ...] = ()
    """The changes that lead from it to the plan found, in the order in which they are made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """A plan with other degrees of parallelism than the one that is returned, for people to see what else there is."""

    strategy: str
    """One line that describes it."""
    step_time_s: float
    """Its predicted step time."""
    memory: float
    """Share of the memory of its fullest device."""
    tie: bool
    """Whether the estimate cannot tell its step time from that of the fastest plan found."""
    data_parallel: str | None = None
    """What runs it where all devices are replicas and nothing else, such as DDP; null for other plans."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetCost:
    """The best plan that was found for any trainer, where it is faster than the best one of the target."""

    step_time_s: float
    """Its predicted step time."""
    beyond: tuple[str, ...]
    """What of it the target cannot express."""

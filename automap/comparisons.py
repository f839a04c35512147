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
    """Seconds of `saved_s` by what they are saved in: compute, communication, bubble, optimizer and overhead of the
    busiest rank."""
    fits: bool
    """Whether the plan with the changes so far fits into memory."""
    alone_s: float | None
    """Step time of the user's plan with this change alone, seconds; null if there is no such plan, or it does not
    fit."""
    without_s: float | None
    """Step time of the plan found without this change, seconds; null if there is no such plan, or it does not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Yours:
    """The plan that the user runs today, and how the plan found differs from it."""

    name: str
    """Name of its file; `plan` for a plan document."""
    step_time_s: float
    """Its predicted step time, also where it does not fit, seconds."""
    shortage: str | None
    """Where and by how much it does not fit into memory; null if it fits."""
    notes: tuple[str, ...] = ()
    """Settings of its file that the price does not depend on, and what is unusual about the plan."""
    changes: tuple[Change, ...] = ()
    """The changes that lead from it to the plan found, in the order in which they are made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """A plan with other degrees of parallelism than the one that is returned, for people to see what else there is."""

    strategy: str
    """One line that describes the plan."""
    step_time_s: float
    """Predicted step time of the plan, seconds."""
    memory: float
    """Share of its memory that the fullest device uses, 0..1."""
    tie: bool
    """Whether the estimate cannot tell its step time from that of the fastest plan found."""
    data_parallel: str | None = None
    """Software that runs the plan if it is pure data parallelism, such as DDP; null for other plans."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetCost:
    """The best plan that was found for any trainer, where it is faster than the best one of the target."""

    step_time_s: float
    """Predicted step time of the plan, seconds."""
    beyond: tuple[str, ...]
    """The parts of the plan that the target cannot express, one sentence for each."""

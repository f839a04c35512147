"""What a job says about its trials. Units: seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from automap.records import Range

PROPOSE_S = 5.0
"""Seconds for which plans are proposed before each trial, at most; nearly always it is one (assumed)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trials:
    """How plans are run on this host before one of them is chosen."""

    top_k: Annotated[int, Range(1, 64)] = 3
    """Number of plans to run; fewer where no other plan may be the fastest."""
    steps: Annotated[int, Range(1, 1000)] = 5
    """Steps of each plan that are measured, after a warm-up."""
    time_limit_s: Annotated[float, Range(1, 3600)] = 120.0
    """Seconds that each trial may take."""

    @property
    def seconds(self) -> float:
        """Seconds that all trials together may take."""
        return self.top_k * (self.time_limit_s + PROPOSE_S)

"""Limits: what a pruned space leaves of the decisions of a problem; see `envs.pruning` for the rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from automap.space.shape import Shape


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Each leaves at least one value of every decision."""

    shapes: Callable[[Shape], bool] = lambda shape: True
    """Which shapes stay."""
    windows: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Number of chunks -> first and last end of each chunk; of others all that constraints leave."""
    signatures: npt.NDArray[np.bool_] | None = None
    """[axes, values of all groups] which stay, see `SpaceArrays.obeys`; None = all."""


WHOLE = Limits()
"""Nothing is left out."""

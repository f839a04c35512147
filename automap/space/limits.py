"""Limits: the part of the decisions of a problem that a pruned space keeps; see `envs.pruning` for the rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from automap.arrays import Mask
from automap.space.shape import Shape


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The part of a space that is kept: at least one value of every decision."""

    shapes: Callable[[Shape], bool] = lambda shape: True
    """Whether a shape is kept."""
    windows: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Number of chunks -> first and last end of each chunk that are kept; for other numbers of chunks all ends that
    obey the constraints."""
    signatures: Mask | None = None
    """[axes, values of all groups] whether a signature is kept, see `SpaceArrays.obeys`; None = all."""
    mixes: bool = True
    """Whether a pipeline rank may have two recompute modes."""
    one_mode: bool = False
    """Whether all pipeline ranks have the same recompute mode."""
    cores: bool = True
    """Whether the core of attention may be recomputed alone (the recompute mode `selective`)."""


WHOLE = Limits()
"""The limits of a space that is not pruned."""

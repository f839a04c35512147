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
    """Whether a shape stays."""
    windows: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Number of chunks -> first and last end of each chunk that stay; for other numbers all that constraints leave."""
    signatures: Mask | None = None
    """[axes, values of all groups] whether a signature stays, see `SpaceArrays.obeys`; None = all stay."""
    mixes: bool = True
    """Whether a pipeline rank may have two recompute modes."""
    one_mode: bool = False
    """Whether all pipeline ranks have one recompute mode, the same."""
    cores: bool = True
    """Whether the core of attention may be computed again alone (the recompute mode `selective`)."""


WHOLE = Limits()
"""The limits of a space that is not pruned."""

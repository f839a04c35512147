"""A lowered plan: a plan in numbers, as the price reads it.

It says where the stages stand, which unit goes to which chunk, and the signature of every operator of every unit type;
-1 where it is undecided.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from automap.arrays import Floats, Ints, Mask
from automap.price.kernels.stage_records import Stage
from automap.price.stage_layout import PipelineLayout
from automap.schedule import NO_PROGRAM

RECOMPUTE_MODES = ("none", "selective", "full")


def spread(samples: int, ranks: int) -> int:
    """Samples that a stage is priced with: those of the rank with most of them, times the ranks."""
    return -(-samples // ranks) * ranks


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Operators of one unit in one chunk."""

    unit: int
    """Number of the unit."""
    first: int
    """First operator row of its type."""
    last: int
    """One past the last operator row."""
    chosen: Ints
    """[last - first, axes] signature of each operator on each axis; -1 where it is undecided."""
    recomputed: Mask
    """[last - first] whether the operator runs again in the backward pass."""


class UnitCall(NamedTuple):
    """One of several equal units of a plan in equal surroundings."""

    segment: Segment
    """Operators of the unit."""
    rank: int
    """Pipeline rank; of the first one where all ranks are alike."""
    incoming: Ints
    """[axes] placement of the tensor that crosses into the unit."""
    unit_type: int
    """Type of the unit."""
    before: int
    """Type of the unit before it, or -1."""
    opens: bool
    """Whether it is the first unit of its chunk."""


@dataclass(frozen=True, kw_only=True)
class LoweredPlan:
    """A plan in numbers."""

    axes: tuple[str, ...]
    """Names of the mesh axes, outermost first."""
    layout: PipelineLayout
    """Devices and meshes of the pipeline ranks."""
    num_micro_batches: int
    """Micro-batches of one step."""
    samples: int
    """Samples of a micro-batch, over all replicas of a stage."""
    kind: str
    """Kind of the schedule, see `automap.schedule.KINDS`."""
    chunks: tuple[tuple[Segment, ...], ...]
    """Of each chunk in dataflow order; chunk c runs on rank c mod ranks."""
    zero: int
    """Stage of ZeRO, 0 to 3."""
    zero_axes: Mask
    """[axes] whether ZeRO shards over the axis."""
    program: Ints = field(default_factory=lambda: NO_PROGRAM)
    """Actions of an explicit schedule, see `automap.schedule`; empty for other kinds."""
    spread_over: tuple[int, ...] = ()
    """[ranks] mesh axis over which the samples of a micro-batch are spread as evenly as they go; empty: they divide."""
    shares: tuple[tuple[int, ...] | None, ...] = ()
    """[ranks] samples of each index of the outer axis; None and empty: as `spread_over` says."""
    most: tuple[int, ...] = ()
    """[ranks] largest share of an index times their number, in a plan of `views`; empty in other plans."""

    @functools.cached_property
    def rank_samples(self) -> Floats:
        """[ranks] samples of a micro-batch that each rank is priced with: the largest share times their number."""
        if self.most:
            return np.array(self.most, dtype=np.float64)
        stages = self.layout.stages
        replicas = [int(stage.axes[a]) for stage, a in zip(stages, self.spread_over, strict=False)] or [1] * len(stages)
        samples = [spread(self.samples, count) for count in replicas]
        for rank, mine in enumerate(self.shares):
            if mine is not None:
                samples[rank] = max(mine) * len(mine)
        return np.array(samples, dtype=np.float64)

    @functools.cached_property
    def stages(self) -> tuple[Stage, ...]:
        """For each rank, everything but the unit itself that the cost of a unit on this rank depends on."""
        return tuple(
            Stage(stage.axes, stage.links, stage.hardware, self.zero_axes, samples)
            for stage, samples in zip(self.layout.stages, self.rank_samples.tolist(), strict=True)
        )

    @functools.cached_property
    def views(self) -> tuple[LoweredPlan, ...]:
        """The plan as each kind of device sees it, the slowest first: all of a stage alike, with the kind's share.

        What it costs is the most that any of them does. Only a plan with shares has several: others are priced as if
        all devices of a stage were as slow, and as small, as the worst of them.
        """
        stages = self.layout.stages
        shared = tuple(mine is not None for mine in self.shares)
        kinds = [len(stage.kinds) for stage, is_shared in zip(stages, shared, strict=False) if is_shared]
        if not any(kinds):
            return (self,)
        found = []
        for view in range(max(kinds)):
            samples = [int(count) for count in self.rank_samples]
            for rank, mine in enumerate(self.shares):
                if mine is not None and stages[rank].kinds:
                    kind = stages[rank].kinds[min(view, len(stages[rank].kinds) - 1)]
                    samples[rank] = max(mine[index] for index in kind.ranks) * len(mine)
            layout = self.layout.seen(view, shared)
            found.append(replace(self, layout=layout, shares=(), most=tuple(samples)))
        return tuple(found)

    @functools.cached_property
    def is_uniform(self) -> bool:
        """Whether equal units cost the same on all ranks."""
        return self.layout.uniform and len(set(self.rank_samples.tolist())) == 1


def same_lowered(one: LoweredPlan, other: LoweredPlan) -> bool:
    """Whether two lowered plans are the same plan."""
    return _content(one) == _content(other)


def _content(lowered: LoweredPlan) -> tuple[object, ...]:
    """All that makes up a plan, in a form that `==` compares."""
    return (
        lowered.axes,
        lowered.num_micro_batches,
        lowered.kind,
        lowered.zero,
        lowered.zero_axes.tolist() if lowered.zero else None,
        lowered.program.tolist(),
        [stage.devices for stage in lowered.layout.stages],
        lowered.rank_samples.tolist(),
        lowered.shares,
        [
            [(s.unit, s.first, s.last, s.chosen.tobytes(), s.recomputed.tobytes()) for s in segments]
            for segments in lowered.chunks
        ],
    )

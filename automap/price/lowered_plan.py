"""A lowered plan: a plan in numbers, the form that the price reads.

It holds the devices of each stage, the units of each chunk, and the signature of every operator; -1 where it is
undecided.
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
    """Samples that a stage is priced with, if samples are spread over ranks as evenly as possible: those of the rank
    with the most samples, times the ranks."""
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
    """[last - first] whether the operator is recomputed in the backward pass."""


class UnitCall(NamedTuple):
    """A distinct unit of a plan, see `Evaluator.distinct_units`: one of several equal units with equal costs."""

    segment: Segment
    """Operators of the unit."""
    rank: int
    """Pipeline rank, the first one of several equal ranks."""
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
    """Segments of each chunk in dataflow order; chunk c runs on rank c mod ranks."""
    zero: int
    """Stage of ZeRO, 0 to 3."""
    zero_axes: Mask
    """[axes] whether ZeRO shards over the axis."""
    program: Ints = field(default_factory=lambda: NO_PROGRAM)
    """Actions of an explicit schedule, see `automap.schedule`; empty for other kinds."""
    spread_over: tuple[int, ...] = ()
    """[ranks] mesh axis over which the samples of a micro-batch are spread as evenly as possible; empty if they divide
    evenly."""
    shares: tuple[tuple[int, ...] | None, ...] = ()
    """[ranks] samples of each index of the outer axis; None or empty: see `spread_over`."""
    most: tuple[int, ...] = ()
    """[ranks] in the plans of `views`: largest share of an index times the number of indices; else empty."""

    @functools.cached_property
    def rank_samples(self) -> Floats:
        """[ranks] samples of a micro-batch that each rank is priced with: the largest share times the number of
        shares."""
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
        """[ranks] the `Stage` of each rank, on which the cost of its units depends."""
        return tuple(
            Stage(stage.axes, stage.links, stage.hardware, self.zero_axes, samples)
            for stage, samples in zip(self.layout.stages, self.rank_samples.tolist(), strict=True)
        )

    @functools.cached_property
    def views(self) -> tuple[LoweredPlan, ...]:
        """The plan once for each kind of device, the slowest kind first.

        In the view of a kind, all devices of each stage with several kinds are of this kind, and have its share of the
        samples. The cost of the plan is the largest of all views. Without shares there is one view: a stage is then
        priced as if all of its devices were as slow as the slowest one and had as little memory as the smallest one.
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
    """The content of a plan in a form that can be compared by `==`."""
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

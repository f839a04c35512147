"""The mesh of a stage as one rank sees it, and the process groups of its axes.

The rank of a process is a device number of the plan. Every rank makes the groups of all stages in the same order, also
those that it is not part of: `torch.distributed` requires that.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from automap.errors import PlanError
from automap.plan import Plan, Stage, parse_devices


def meet(folder: Path, rank: int, num_ranks: int, device: torch.device, *, limit_s: float) -> None:
    """Joins the processes of one launch, over NCCL on GPUs and over gloo on CPUs; they meet in a file, not at a port.

    Args:
        folder: the folder of the launch, see `automap.runtime.launch.launcher`.
        rank: the number of this process.
        num_ranks: the number of processes of the launch.
        device: the device of this process.
        limit_s: seconds that a process waits for another in any collective.
    """
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=limit_s),
    )


class Groups:
    """Process groups by their ranks, each made once.

    All processes must call `of` in the same order.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of some ranks; None for a single rank, and on a rank outside the group."""
        if len(ranks) == 1:
            return None
        if ranks not in self._made:
            group = dist.new_group(list(ranks))
            self._made[ranks] = group if dist.get_rank() in ranks else None
        return self._made[ranks]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of a mesh as one rank sees it."""

    name: str
    number: int
    """The position of the axis among the axes of the plan."""
    size: int
    index: int
    """The coordinate of this rank on the axis."""
    group: dist.ProcessGroup | None
    """The ranks that differ from this rank on this axis alone, in order; None where there are no others."""
    shares: tuple[int, ...] | None = None
    """[size] the samples of a micro-batch for each coordinate; None where they are spread evenly."""
    is_apart: bool = False
    """Whether its ranks hold replicas that are trained apart: averaged periodically, no collectives within a step."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The devices of a stage, arranged along mesh axes."""

    devices: tuple[int, ...]
    axes: tuple[Axis, ...]
    """All axes of the plan, outermost first, including those of one rank."""
    is_mine: bool
    """Whether this rank is part of the mesh; if not, its coordinates are 0 and it has no groups."""

    @property
    def live(self) -> tuple[Axis, ...]:
        """Axes of more than one rank."""
        return tuple(axis for axis in self.axes if axis.size > 1)

    @property
    def apart(self) -> Axis | None:
        """The axis whose replicas are trained apart and averaged periodically."""
        return next((axis for axis in self.live if axis.is_apart), None)

    @property
    def replicas(self) -> tuple[int, ...]:
        """[devices] the number of each device's replica; empty where no replicas are trained apart."""
        axis = self.apart
        return () if axis is None else tuple(self.coordinates(i)[axis.number] for i in range(len(self.devices)))

    def coordinates(self, position: int) -> tuple[int, ...]:
        """[axes] the coordinates of the device at `position` in `devices`."""
        found = []
        for axis in reversed(self.axes):
            found.append(position % axis.size)
            position //= axis.size
        return tuple(reversed(found))

    @property
    def here(self) -> tuple[int, ...]:
        """[axes] the coordinates of this rank."""
        return tuple(axis.index for axis in self.axes)


def make_meshes(
    plan: Plan, axes: Sequence[str], rank: int | None = None, groups: Groups | None = None
) -> tuple[Mesh, ...]:
    """The mesh of every stage of a plan.

    Args:
        plan: any plan.
        axes: the names of the mesh axes of the plan, outermost first (`LoweredPlan.axes`).
        rank: the number of this process, a device number; None where nothing is run.
        groups: keeps the process groups; None where nothing is run. All ranks must call this with the same plans in the
            same order.

    Raises:
        PlanError: the plan names devices that have no process.
    """
    is_apart = plan.sync.kind != "synchronous"
    return tuple(_mesh(stage, i, axes, rank, groups, is_apart=is_apart) for i, stage in enumerate(plan.stages))


def _mesh(
    stage: Stage, number: int, axes: Sequence[str], rank: int | None, groups: Groups | None, *, is_apart: bool
) -> Mesh:
    """The mesh of a stage; all process groups of its axes are made in one order, also those without this rank.

    Args:
        stage: the stage.
        number: its number, for errors.
        axes, rank, groups: see `make_meshes`.
        is_apart: whether the replicas of the plan are averaged every few steps.
    """
    devices = parse_devices(stage.devices)
    if groups is not None and max(devices) >= dist.get_world_size():
        raise PlanError(
            f"there are only {dist.get_world_size()} processes", field=f"plan.stages[{number}].devices",
            value=stage.devices, repair="Start one process a device of the plan.",
        )  # fmt: skip
    sizes = [dict(stage.mesh).get(axis, 1) for axis in axes]
    where = list(itertools.product(*map(range, sizes)))
    here = where[devices.index(rank)] if rank in devices else None
    spread = next((axes.index(a) for a in stage.batch_axes if a in axes), 0)
    made = []
    for a, size in enumerate(sizes):
        group = None
        for others in itertools.product(*(range(n) for b, n in enumerate(sizes) if b != a)):
            line = [(*others[:a], i, *others[a:]) for i in range(size)]
            if groups is not None:
                found = groups.of(tuple(devices[where.index(c)] for c in line))
                group = found if here in line else group
        shares = stage.batch_shares if a == spread and size > 1 else None
        index = here[a] if here else 0
        apart = is_apart and stage.batch_axes[:1] == (axes[a],)
        made.append(Axis(name=axes[a], number=a, size=size, index=index, group=group, shares=shares, is_apart=apart))
    return Mesh(devices=devices, axes=tuple(made), is_mine=here is not None)

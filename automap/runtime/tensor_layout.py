"""The parts of tensors that the ranks of a mesh hold, and the steps that change the placement of a tensor.

The part of a tensor on one rank is a box: a range of each dim. A dim that several mesh axes split is split by the outer
axis first. Dims are split evenly, or into equal parts rounded up of which the last rank has the rest, as torch's
`Shard` does; samples by the batch shares of the stage. Nothing here communicates. Units: elements,
samples.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch

from automap.errors import PlanError
from automap.runtime.mesh_groups import Axis, Mesh
from ir.factors import BROADCAST, PARTIAL, Placement, shares_out
from ir.graph import Tensor

Box = tuple[tuple[int, int], ...]
"""The range (start, stop) of each dim of a whole tensor that one rank holds."""
Placements = tuple[Placement, ...]
"""The placement of a tensor on each axis of a mesh."""
Extent = tuple[tuple[int, ...], int | None]
"""The shape of a whole tensor for one sample, and its batch dim if it has one."""
StepKind = Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice", "first", "pad"]

_KINDS: Mapping[str, StepKind] = {
    "PS": "reduce_scatter", "BS": "slice", "SS": "all_to_all", "PB": "all_reduce", "SB": "all_gather", "SP": "pad",
    "BP": "first",
}  # fmt: skip
"""Placements before and after a change on one axis (S, B or P) -> the step that makes the change."""
_ORDER = (("PS", "BS"), ("SS", "PB"), ("SB", "SP"), ("BP",))
"""Changes in the order in which they are made, as in `automap.price.kernels.collectives.convert`: first those that
shrink the local part, then those that keep its size, then those that grow it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One change of placement on one mesh axis."""

    kind: StepKind
    """The name of a collective, or a local operation: `slice` keeps the rank's own part; `first` keeps the whole on the
    first rank of the axis and makes zeros on the others; `pad` puts zeros around the rank's own part."""
    axis: Axis
    dim: int = -1
    """The dim that is gathered, cut or padded; for an all-to-all, the dim that is gathered."""
    sizes: tuple[int, ...] = ()
    """The size of `dim` on each rank of the axis."""
    to_dim: int = -1
    """The dim that an all-to-all cuts."""
    to_sizes: tuple[int, ...] = ()
    """The size of `to_dim` on each rank of the axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTensor:
    """A tensor as one stage holds it: a parameter, a data input, or a tensor that enters or leaves the stage."""

    name: str
    placements: Placements
    """S(i) or B on each axis of the stage's mesh: a partial tensor is summed before it leaves a stage."""
    shape: tuple[int, ...]
    """The shape of the whole tensor for one micro-batch."""
    dtype: torch.dtype
    carries_gradient: bool
    """Whether a gradient comes back; it has the same placements as the tensor, and is whole on B axes."""
    boxes: tuple[Box, ...]
    """The box of each rank of the stage, in the order of `Stage.devices`; ranks with equal boxes are replicas."""


class TensorLayouts:
    """Boxes and redistribution steps of the tensors of one stage for one micro-batch.

    Attributes:
        mesh: the mesh of the stage.
        samples: the number of samples of a micro-batch.
        box: (extent, placements, coordinates of a rank) -> the box of that rank, cached.
        route: (extent, placements before, placements after) -> the steps between them, cached; see `steps`.
    """

    def __init__(self, mesh: Mesh, samples: int) -> None:
        self.mesh, self.samples = mesh, samples
        self.box = functools.lru_cache(maxsize=None)(self._box)
        self.route = functools.lru_cache(maxsize=None)(self._route)

    def shape(self, tensor: Tensor, placements: Placements) -> tuple[int, ...]:
        """The shape of this rank's part of a tensor."""
        return tuple(stop - start for start, stop in self.here(tensor, placements))

    def here(self, tensor: Tensor, placements: Placements) -> Box:
        """The box of this rank."""
        return self.box((tensor.shape, tensor.batch_dim), placements, self.mesh.here)

    def boxes(self, tensor: Tensor, placements: Placements) -> tuple[Box, ...]:
        """The box of every rank of the mesh."""
        extent = tensor.shape, tensor.batch_dim
        return tuple(
            self.box(extent, placements, self.mesh.coordinates(position)) for position in range(len(self.mesh.devices))
        )

    def steps(self, tensor: Tensor, source: Placements, target: Placements) -> tuple[Step, ...]:
        """The steps that bring a tensor from one placement to another; none where the two are equal.

        The order is that of `automap.price.kernels.collectives.convert`. Where an axis changes while an inner axis
        splits the same dim, parts would become stripes of the tensor: there it is gathered and cut again.
        """
        return self.route((tensor.shape, tensor.batch_dim), source, target)

    def _box(self, extent: Extent, placements: Placements, coordinates: tuple[int, ...]) -> Box:
        """The box of the rank with some coordinates: axes divide a dim one after the other, the outer ones first."""
        shape, batch_dim = extent
        found = []
        for dim, size in enumerate(shape):
            is_batch = dim == batch_dim
            start, stop = 0, self.samples if is_batch else size
            for axis in self.mesh.axes:
                if axis.size > 1 and placements[axis.number] == dim:
                    ends = _ends(stop - start, axis, is_batch=is_batch)
                    index = coordinates[axis.number]
                    start, stop = start + ends[index], start + ends[index + 1]
            scale = size if is_batch else 1
            found.append((start * scale, stop * scale))
        return tuple(found)

    def _sizes(self, extent: Extent, placements: Sequence[Placement], axis: Axis, dim: int) -> tuple[int, ...]:
        """The size of `dim` on each rank of an axis."""
        here = self.mesh.here
        for position in range(len(self.mesh.devices)):
            # Every rank must find out alike whether the tensor can be split so.
            self.box(extent, tuple(placements), self.mesh.coordinates(position))
        found = []
        for index in range(axis.size):
            at = (*here[: axis.number], index, *here[axis.number + 1 :])
            start, stop = self.box(extent, tuple(placements), at)[dim]
            found.append(stop - start)
        return tuple(found)

    def _route(self, extent: Extent, source: Placements, target: Placements) -> tuple[Step, ...]:
        """See `steps`; where no order avoids stripes, the dims concerned are gathered first."""
        # A placement on the way may have no even split.
        with contextlib.suppress(PlanError):
            steps = self._ordered(extent, list(source), target)
            if steps is not None:
                return tuple(steps)
        current, gathered = list(source), []
        for axis in reversed(self.mesh.live):
            dim = source[axis.number]
            if dim >= 0 and not self._keeps_outer_splits(source, target, axis):
                gathered.append(Step("all_gather", axis, dim, self._sizes(extent, current, axis, dim)))
                current[axis.number] = BROADCAST
        steps = self._ordered(extent, current, target)
        assert steps is not None, (source, target)
        return (*gathered, *steps)

    def _ordered(self, extent: Extent, current: list[Placement], target: Placements) -> list[Step] | None:
        """The steps in the order of the price; None where a part would become stripes. Changes `current`."""
        steps = []
        live = [axis for axis in self.mesh.live if current[axis.number] != target[axis.number]]
        for changes in _ORDER:
            for axis in reversed(live) if "SB" in changes else live:
                given, wanted = current[axis.number], target[axis.number]
                change = _letter(given) + _letter(wanted)
                if given == wanted or change not in changes:
                    continue
                inner = [current[b.number] for b in self.mesh.live if b.number > axis.number]
                if any(dim >= 0 and dim in inner for dim in (given, wanted)):
                    return None
                sizes = self._sizes(extent, current, axis, given) if given >= 0 else ()
                current[axis.number] = wanted
                to_sizes = self._sizes(extent, current, axis, wanted) if wanted >= 0 else ()
                kind = _KINDS[change]
                if kind == "all_to_all":
                    steps.append(Step(kind, axis, given, sizes, wanted, to_sizes))
                else:
                    steps.append(Step(kind, axis, max(given, wanted, -1), sizes or to_sizes))
        return steps

    def _keeps_outer_splits(self, source: Placements, target: Placements, axis: Axis) -> bool:
        """Whether an axis and all axes outside it keep their splits of the dim that the axis splits."""
        dim = source[axis.number]
        outer = [a.number for a in self.mesh.live if a.number <= axis.number]
        return all((source[a] == dim) == (target[a] == dim) for a in outer)


def _letter(placement: Placement) -> str:
    return "S" if placement >= 0 else "P" if placement == PARTIAL else "B"


def _ends(size: int, axis: Axis, *, is_batch: bool) -> list[int]:
    """The bounds of the parts of a dim, or of the samples, on the ranks of an axis: one more than there are ranks."""
    parts = axis.size
    if is_batch and axis.shares is not None:
        total = sum(axis.shares)
        if any(size * share % total for share in axis.shares):
            raise PlanError(
                f"{size} samples cannot be shared out so over axis {axis.name}", field="plan.stages.batch_shares",
                value=list(axis.shares),
                repair="Give shares whose sum is the number of samples of a micro-batch.",
            )  # fmt: skip
        sizes = [size * share // total for share in axis.shares]
    elif is_batch:
        sizes = [size // parts + (i < size % parts) for i in range(parts)]
    else:
        if not shares_out(size, parts, unevenly=True):
            raise PlanError(
                f"a dim of {size} is not split evenly over axis {axis.name}", field="plan.stages.mesh", value=parts,
                repair="Split another dim, or change the mesh.",
            )  # fmt: skip
        part = -(-size // parts)
        sizes = [part] * (parts - 1) + [size - (parts - 1) * part]
    if not all(sizes):
        raise PlanError(
            f"{size} samples leave a rank of axis {axis.name} without any", field="plan.samples_per_micro_batch",
            value=sizes, repair="Use larger micro-batches, or fewer ranks.",
        )  # fmt: skip
    return [0, *accumulate(sizes)]

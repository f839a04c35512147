"""Where the parts of a tensor lie on a mesh, and by which steps they come to lie otherwise.

A dim that several axes split is split by the outer one first. Dims split evenly, samples by the shares of the stage.
Units: elements, samples.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from automap.errors import PlanError
from automap.runtime.mesh_groups import Axis, Mesh
from automap.runtime.stage_program import Box
from ir.factors import BROADCAST, PARTIAL, Placement
from ir.graph import Tensor

Placements = tuple[Placement, ...]
"""On each axis of the mesh."""
StepKind = Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "slice", "first", "pad"]


@dataclass(frozen=True, slots=True)
class Step:
    """One change of placement on one axis."""

    kind: StepKind
    """A collective; or without any: `slice` keeps the own part, `first` keeps a whole on the first rank and makes zeros
    of it on the others, `pad` puts zeros around the own part."""
    axis: Axis
    dim: int = -1
    """That is gathered or cut; of an all-to-all the one that is gathered."""
    sizes: tuple[int, ...] = ()
    """Of `dim` on each rank of the axis."""
    to_dim: int = -1
    """That an all-to-all cuts."""
    to_sizes: tuple[int, ...] = ()


class PipelineLayouts:
    """Boxes and routes of the tensors of one stage for one micro-batch.

    Attributes:
        mesh: of the stage.
        samples: of a micro-batch.
    """

    def __init__(self, mesh: Mesh, samples: int) -> None:
        self.mesh, self.samples = mesh, samples
        self.box = functools.lru_cache(maxsize=None)(self._box)
        self.route = functools.lru_cache(maxsize=None)(self._route)

    def shape(self, tensor: Tensor, placements: Placements) -> tuple[int, ...]:
        """What this rank holds."""
        return tuple(stop - start for start, stop in self.box(_key(tensor), placements, self.mesh.here))

    def here(self, tensor: Tensor, placements: Placements) -> Box:
        """What this rank holds."""
        return self.box(_key(tensor), placements, self.mesh.here)

    def boxes(self, tensor: Tensor, placements: Placements) -> tuple[Box, ...]:
        """What every rank of the mesh holds."""
        count = range(len(self.mesh.devices))
        return tuple(self.box(_key(tensor), placements, self.mesh.coordinates(i)) for i in count)

    def steps(self, tensor: Tensor, source: Placements, target: Placements) -> tuple[Step, ...]:
        """How a tensor comes from one placement to another; nothing where it is there.

        The order is that of `automap.price.kernels.collectives.convert`. Where an axis changes while an inner one
        splits the same dim, the parts would come to lie in stripes: there the tensor is gathered and cut anew.
        """
        return self.route(_key(tensor), source, target)

    def _box(
        self, tensor: tuple[tuple[int, ...], int | None], placements: Placements, coordinates: tuple[int, ...]
    ) -> Box:
        shape, batch_dim = tensor
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

    def _lengths(
        self, tensor: tuple[tuple[int, ...], int | None], placements: Sequence[Placement], axis: Axis, dim: int
    ) -> tuple[int, ...]:
        """Extent of `dim` on each rank of `axis`."""
        here = self.mesh.here
        found = []
        for position in range(len(self.mesh.devices)):
            # Whether it can be split so must be found out alike on all ranks.
            self.box(tensor, tuple(placements), self.mesh.coordinates(position))
        for index in range(axis.size):
            at = (*here[: axis.number], index, *here[axis.number + 1 :])
            start, stop = self.box(tensor, tuple(placements), at)[dim]
            found.append(stop - start)
        return tuple(found)

    def _route(
        self, tensor: tuple[tuple[int, ...], int | None], source: Placements, target: Placements
    ) -> tuple[Step, ...]:
        live = [axis for axis in self.mesh.live if source[axis.number] != target[axis.number]]
        current = list(source)
        steps: list[Step] = []
        with contextlib.suppress(PlanError):  # a placement on the way, which has no even split
            if self._walk(tensor, live, current, target, steps):
                return tuple(steps)
        current, steps = list(source), []
        for axis in reversed(self.mesh.live):
            a, dim = axis.number, source[axis.number]
            if dim >= 0 and not _is_outermost(self.mesh, source, target, axis):
                sizes = self._lengths(tensor, current, axis, dim)
                current[a] = BROADCAST
                steps.append(Step("all_gather", axis, dim, sizes))
        rest = [axis for axis in self.mesh.live if current[axis.number] != target[axis.number]]
        done = self._walk(tensor, rest, current, target, steps)
        assert done, (source, target)
        return tuple(steps)

    def _walk(
        self,
        tensor: tuple[tuple[int, ...], int | None],
        live: Sequence[Axis],
        current: list[Placement],
        target: Placements,
        steps: list[Step],
    ) -> bool:
        """Adds the steps in the order of the price; False where parts would come to lie in stripes."""

        def is_free(axis: Axis, dim: int) -> bool:
            return not any(b.number > axis.number and current[b.number] == dim for b in self.mesh.live)

        for axis in live:
            a, dim = axis.number, target[axis.number]
            if dim >= 0 > current[a]:
                if not is_free(axis, dim):
                    return False
                is_sum = current[a] == PARTIAL
                current[a] = dim
                sizes = self._lengths(tensor, current, axis, dim)
                steps.append(Step("reduce_scatter" if is_sum else "slice", axis, dim, sizes))
        for axis in live:
            a, dim = axis.number, target[axis.number]
            if current[a] >= 0 and dim >= 0 and current[a] != dim:
                if not (is_free(axis, current[a]) and is_free(axis, dim)):
                    return False
                before, sizes = current[a], self._lengths(tensor, current, axis, current[a])
                current[a] = dim
                steps.append(Step("all_to_all", axis, before, sizes, dim, self._lengths(tensor, current, axis, dim)))
            elif current[a] == PARTIAL and dim == BROADCAST:
                current[a] = BROADCAST
                steps.append(Step("all_reduce", axis))
        for axis in reversed(live):
            a = axis.number
            if current[a] >= 0 and target[a] < 0:
                if not is_free(axis, current[a]):
                    return False
                sizes = self._lengths(tensor, current, axis, current[a])
                steps.append(Step("all_gather" if target[a] == BROADCAST else "pad", axis, current[a], sizes))
                current[a] = target[a]
        for axis in live:
            if current[axis.number] == BROADCAST and target[axis.number] == PARTIAL:
                current[axis.number] = PARTIAL
                steps.append(Step("first", axis))
        return True


def _key(tensor: Tensor) -> tuple[tuple[int, ...], int | None]:
    return tensor.shape, tensor.batch_dim


def _is_outermost(mesh: Mesh, source: Placements, target: Placements, axis: Axis) -> bool:
    """Whether an axis keeps its split, and so do all that split the same dim before it."""
    dim = source[axis.number]
    for other in mesh.live:
        a = other.number
        if (source[a] == dim) != (target[a] == dim):
            return False
        if a == axis.number:
            return True
    return False


def _ends(size: int, axis: Axis, *, is_batch: bool) -> list[int]:
    """Bounds of the parts of a dim, or of samples, on the ranks of an axis."""
    parts = axis.size
    if is_batch and axis.shares is not None:
        total = sum(axis.shares)
        if any(size * share % total for share in axis.shares):
            raise PlanError(
                f"{size} samples cannot be shared out so over axis {axis.name}",
                field="plan.stages.batch_shares",
                value=list(axis.shares),
                repair="Give shares whose sum is the number of samples of a micro-batch.",
            )
        sizes = [size * share // total for share in axis.shares]
    else:
        if size % parts and not is_batch:
            raise PlanError(
                f"a dim of {size} is not split evenly over axis {axis.name}",
                field="plan.stages.mesh",
                value=parts,
                repair="Split another dim, or change the mesh.",
            )
        sizes = [size // parts + (i < size % parts) for i in range(parts)]
    if not all(sizes):
        raise PlanError(
            f"{size} samples leave a rank of axis {axis.name} without any",
            field="plan.samples_per_micro_batch",
            value=sizes,
            repair="Use larger micro-batches, or fewer ranks.",
        )
    ends = [0, *accumulate(sizes)]
    assert all(low < high for low, high in pairwise(ends))
    return ends

"""The parameters of one stage on one rank: leaves of autograd, ZeRO, and the reduction of gradients once a step.

A leaf has the placement that the stage program states; on the axes where its gradient is partial, the gradient is
summed once a step. Under ZeRO the leaves of a unit form one flat vector, padded with zeros, of which each rank owns a
piece:

    0   whole leaves; gradients are all-reduced, over several axes the piece of the inner axis over the outer ones
    1   whole leaves; gradients are reduce-scattered, the optimizer updates pieces, `refresh` gathers them
    2   as 1, but gradients are reduce-scattered in the backward pass of each micro-batch
    3   as 2, but the vector is gathered where it is used, in the forward and again in the backward pass

Frozen parameters have no gradients. Under ZeRO 3 they are sharded and gathered like others, and else whole.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from automap.plan import Zero
from automap.runtime.executor.stage_program import StageProgram
from automap.runtime.mesh_groups import Axis
from automap.runtime.operators.apply import value_of
from automap.runtime.redistribute import all_gather, all_reduce_in_place, direction, move, reduce_scatter
from ir.factors import BROADCAST, PARTIAL


@dataclass
class _Flat:
    """Parameters that are reduced together, and under ZeRO sharded together as one flat vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """The local shape of each parameter."""
    zero: int
    """The ZeRO stage, 0 where nothing is sharded."""
    axes: tuple[Axis, ...]
    """The axes over which the vector is sharded, outermost first."""
    sums: tuple[Axis, ...]
    """The axes on which gradients are partial, outermost first."""
    is_frozen: bool = False
    """Whether the parameters are not trained."""
    leaves: dict[str, Tensor] = field(default_factory=dict)
    """Parameter -> its leaf of autograd, where the parameters are leaves."""
    whole: Tensor | None = None
    """The flat vector, where it is kept."""
    piece: Tensor | None = None
    """This rank's piece of the vector: a leaf of autograd."""
    gathered: Tensor | None = None
    """The vector while the backward pass needs it again."""
    in_use: Callable[[], Tensor | None] = lambda: None
    """Gives the vector while the forward pass uses it."""

    @property
    def label(self) -> tuple[str, str]:
        """The names of operator and tensor for the record of collectives."""
        return "", self.names[0]

    def flatten(self, tensors: Sequence[Tensor | None], like: Tensor) -> Tensor:
        """The tensors as one vector, padded to a multiple of the number of ranks."""
        parts = [
            like.new_zeros(prod(shape)) if t is None else t.reshape(-1)
            for t, shape in zip(tensors, self.shapes, strict=True)
        ]
        size, ranks = sum(map(len, parts)), prod(axis.size for axis in self.axes)
        return torch.cat([*parts, like.new_zeros(-size % ranks)])

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Parameter -> its view of a flat vector."""
        sizes = [prod(shape) for shape in self.shapes]
        parts = torch.split(vector, [*sizes, vector.numel() - sum(sizes)])
        return {n: p.reshape(s) for n, p, s in zip(self.names, parts, self.shapes, strict=False)}

    def cut(self, vector: Tensor) -> Tensor:
        """This rank's piece of a vector, without a sum."""
        for axis in reversed(self.axes):
            vector = vector.chunk(axis.size)[axis.index]
        return vector

    def scatter(self, vector: Tensor) -> Tensor:
        """This rank's piece of the sum of gradients."""
        for axis in reversed(self.axes):
            parts = (vector.numel() // axis.size,) * axis.size
            if axis in self.sums:
                vector = reduce_scatter(vector, axis, 0, parts, self.label)
            else:
                vector = vector.chunk(axis.size)[axis.index]
        return vector

    def gather(self, piece: Tensor) -> Tensor:
        """The vector of which each rank has a piece, gathered."""
        for axis in self.axes:
            piece = all_gather(piece, axis, 0, (piece.numel(),) * axis.size, self.label)
        return piece


class _Use(torch.autograd.Function):
    """Returns the parameters of a flat vector for one micro-batch; in the backward pass, their gradients are joined to
    one vector and reduce-scattered together."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, flat: _Flat, vector: Tensor) -> tuple[Tensor, ...]:
        ctx.flat = flat
        ctx.set_materialize_grads(False)
        return tuple(flat.views(vector).values())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        flat: _Flat = ctx.flat
        flat.gathered = None
        like = next(gradient for gradient in gradients if gradient is not None)
        with direction("backward"):
            return flat.scatter(flat.flatten(gradients, like)), None, None


@dataclass(frozen=True)
class _Again:
    """Stands for a saved tensor that is part of a flat vector: the backward pass gathers this vector again."""

    flat: _Flat
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Parameters:
    """The parameters of one stage on this rank.

    Attributes:
        leaves: the leaves that the optimizer updates, by name.
        members: leaf -> the parameters that it holds.
    """

    def __init__(self, stage: StageProgram, values: Mapping[str, Tensor], zero: Zero, device: torch.device) -> None:
        """Cuts this rank's parts out of whole values.

        Args:
            values: whole parameters, under the names of the graph or of its file.
            zero: the ZeRO stage and its axes.
        """
        self.stage, self.device = stage, device
        self.sharded_over = tuple(axis for axis in stage.mesh.live if zero.stage and axis.name in zero.axes)
        readers = self._readers()
        groups: dict[object, list[str]] = {}
        for name in stage.parameters:
            axes, sums = self._axes(name)
            # Under ZeRO, the parameters that one unit reads are gathered together. The gradient of a parameter of
            # several stages must be complete before it is scattered.
            is_frozen = stage.graph.tensors[name].frozen
            key = (readers[name] if axes else None, axes, sums, name in stage.tied, name in stage.trained, is_frozen)
            groups.setdefault(key, []).append(name)
        self.flats: list[_Flat] = []
        for names in groups.values():
            axes, sums = self._axes(names[0])
            level = min(zero.stage, 1) if names[0] in stage.tied else zero.stage
            if stage.graph.tensors[names[0]].frozen:
                level = 3 if zero.stage == 3 else 0
            elif names[0] not in stage.trained:
                level = 0
            level = level if axes else 0
            self.flats.append(self._flat(names, axes, sums, level, values))
        self.home = {name: flat for flat in self.flats for name in flat.names}
        self.leaves: dict[str, Tensor] = {}
        for number, flat in enumerate(self.flats):
            if flat.piece is not None and not flat.is_frozen:
                self.leaves[f"zero.{number}.{flat.names[0]}"] = flat.piece
            else:
                self.leaves.update({n: t for n, t in flat.leaves.items() if n in stage.trained})
        self._frozen = {
            f"frozen.{number}.{flat.names[0]}": flat.piece
            for number, flat in enumerate(self.flats)
            if flat.piece is not None and flat.is_frozen
        }
        """Pieces of vectors that are not trained."""
        self._last: _Flat | None = None
        """The vector of frozen parameters that a backward pass gathered last."""
        self._vectors = {id(flat.piece): flat for flat in self.flats if flat.piece is not None}
        self.members = {
            key: self._vectors[id(leaf)].names if id(leaf) in self._vectors else (key,)
            for key, leaf in self.leaves.items()
        }

    def _readers(self) -> dict[str, tuple[int, ...]]:
        """Parameter -> the units that read it."""
        found: dict[str, list[int]] = {}
        for placed in self.stage.operators:
            for name in placed.op.inputs:
                found.setdefault(name, []).append(placed.unit)
        return {name: tuple(dict.fromkeys(units)) for name, units in found.items()}

    def _axes(self, name: str) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
        """The axes over which ZeRO shards a parameter, and the axes on which its gradient is partial and summed."""
        held = self.stage.placements[name]
        gradient = self.stage.gradients.get(name, held)
        sums = tuple(axis for axis in self.stage.mesh.live if gradient[axis.number] == PARTIAL and not axis.is_apart)
        return tuple(axis for axis in self.sharded_over if held[axis.number] == BROADCAST), sums

    def _flat(
        self,
        names: Sequence[str],
        axes: tuple[Axis, ...],
        sums: tuple[Axis, ...],
        zero: int,
        values: Mapping[str, Tensor],
    ) -> _Flat:
        """The parameters `names` in one vector, of which ZeRO gives this rank a piece.

        Args:
            names: parameters of one unit that are trained alike.
            axes: the axes over which ZeRO shards the vector.
            sums: the axes on which their gradients are partial.
            zero: stage of ZeRO, 0 to 3; at 0 every parameter is a leaf of its own.
            values: whole parameters, by name.
        """
        stage = self.stage
        parts = []
        for name in names:
            part = self._part(name, value_of(stage.graph, name, values).detach())
            parts.append(part.to(stage.dtype) if stage.graph.tensors[name].is_float else part)
        flat = _Flat(
            names=tuple(names),
            shapes=tuple(tuple(p.shape) for p in parts),
            zero=zero,
            axes=axes if zero else (),
            sums=sums,
            is_frozen=stage.graph.tensors[names[0]].frozen,
        )
        if not zero:
            flat.leaves = {
                n: p.clone(memory_format=torch.contiguous_format).requires_grad_(n in stage.trained)
                for n, p in zip(names, parts, strict=True)
            }
            return flat
        vector = flat.flatten(parts, parts[0])
        piece = flat.cut(vector)
        if zero < 3:
            flat.whole = vector
        flat.piece = (piece.clone() if zero == 3 else piece).detach().requires_grad_(not flat.is_frozen)
        if zero == 1:
            flat.leaves = {n: v.detach().requires_grad_() for n, v in flat.views(vector).items()}
        return flat

    def _part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter, or of a tensor of its shape."""
        box = self.stage.layouts.here(self.stage.graph.tensors[name], self.stage.placements[name])
        return whole[tuple(slice(*span) for span in box)].to(self.device)

    def read(self, name: str, env: MutableMapping[object, Tensor], unit: int) -> Tensor:
        """The local part of a parameter, connected to its leaf.

        Args:
            env: the values of a forward pass, which keep a flat vector and its parts while a unit uses them.
            unit: the unit that reads the parameter.
        """
        flat = self.home[name]
        if flat.zero < 2:
            return flat.leaves[name]
        kept, *_ = self.flat_keys(name, unit)
        if kept not in env:
            assert flat.piece is not None
            with torch.no_grad():
                vector = flat.gather(flat.piece) if flat.zero == 3 else flat.whole
            assert vector is not None
            env[kept], flat.in_use = vector, weakref.ref(vector)
            views: tuple[Tensor, ...] = _Use.apply(flat.piece, flat, vector)  # type: ignore[no-untyped-call]
            env.update(((*kept, one), view) for one, view in zip(flat.names, views, strict=True))
        return env[*kept, name]

    def used(self) -> list[Tensor]:
        """The leaves that `read` connects to, except those that are gathered for each micro-batch (ZeRO 3)."""
        kept = [flat for flat in self.flats if flat.zero < 3]
        found = [t for flat in kept for t in (flat.leaves.values() or [flat.piece]) if t is not None]
        return [t for t in found if t.requires_grad]

    def flat_keys(self, name: str, unit: int) -> tuple[tuple[object, ...], ...]:
        """The keys under which `read` keeps the vector of a parameter and the parameter; none without a vector."""
        flat = self.home[name]
        kept = ("parameters", id(flat), unit)
        return (kept, (*kept, name)) if flat.zero >= 2 else ()

    def saving(self) -> contextlib.AbstractContextManager[object]:
        """A context in which vectors of ZeRO 3 are not saved for the backward pass, which gathers them again."""
        flats = [flat for flat in self.flats if flat.zero == 3]
        if not flats:
            return contextlib.nullcontext()

        def pack(tensor: Tensor) -> Tensor | _Again:
            for flat in flats:
                vector = flat.in_use()
                if vector is not None and vector.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                    return _Again(flat, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
            return tensor

        def unpack(kept: Tensor | _Again) -> Tensor:
            if isinstance(kept, Tensor):
                return kept
            flat = kept.flat
            if flat.is_frozen and flat is not self._last:
                # Frozen parameters have no gradient that shows the end of a unit; the next unit's gather shows it.
                self._forget()
                self._last = flat
            if flat.gathered is None:
                assert flat.piece is not None
                with direction("recompute"), torch.no_grad():
                    flat.gathered = flat.gather(flat.piece.detach())
            return flat.gathered.as_strided(kept.shape, kept.stride, kept.offset)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def tied_gradients(self) -> dict[str, Tensor]:
        """The gradients of parameters that several stages read, complete within this stage, by name. A collective."""
        found = {}
        for name in self.stage.tied:
            flat = self.home[name]
            leaf = flat.leaves[name]
            if leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf)
            if flat.sums:
                leaf.grad = _total(leaf.grad.reshape(-1), flat.sums, ("", name)).reshape(leaf.shape)
            found[name] = leaf.grad
        return found

    def _forget(self) -> None:
        """Frees the vector of frozen parameters that a backward pass gathered."""
        if self._last is not None:
            self._last.gathered = None
        self._last = None

    @torch.no_grad()
    def finish(self) -> None:
        """Reduces the gradients of the step to `leaves[...].grad`. A collective."""
        self._forget()
        for flat in self.flats:
            if flat.names[0] not in self.stage.trained:
                continue
            is_tied = flat.names[0] in self.stage.tied
            if flat.zero == 0:
                if not is_tied:
                    self._reduce(flat)
                continue
            piece = flat.piece
            assert piece is not None
            if flat.zero == 1:
                like = next(iter(flat.leaves.values()))
                vector = flat.flatten([leaf.grad for leaf in flat.leaves.values()], like)
                piece.grad = (flat.cut(vector) if is_tied else flat.scatter(vector)).clone()
                for leaf in flat.leaves.values():
                    leaf.grad = None
            if piece.grad is None:
                piece.grad = torch.zeros_like(piece)
            rest = () if is_tied else tuple(axis for axis in flat.sums if axis not in flat.axes)
            if rest:
                piece.grad = _total(piece.grad, rest, flat.label)

    def _reduce(self, flat: _Flat) -> None:
        """All-reduces the gradients of whole leaves; see `_total`."""
        leaves = list(flat.leaves.values())
        if not flat.sums:
            return
        vector = flat.flatten([leaf.grad for leaf in leaves], leaves[0])
        for leaf in leaves:
            leaf.grad = None
        for leaf, total in zip(leaves, flat.views(_total(vector, flat.sums, flat.label)).values(), strict=True):
            leaf.grad = total

    @torch.no_grad()
    def refresh(self) -> None:
        """Gathers the pieces that the optimizer has changed. A collective."""
        with direction("update"):
            for flat in self.flats:
                if flat.whole is not None and flat.piece is not None:
                    flat.whole.copy_(flat.gather(flat.piece))

    @torch.no_grad()
    def wholes(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameter -> its whole tensor on every rank. A collective.

        Args:
            local: for `leaves`, or all parameters that are not part of a vector, the tensors of their shapes that are
                made whole: their values, their gradients, or moments of an optimizer.
        """
        found: dict[str, Tensor] = {}
        whole = (BROADCAST,) * len(self.stage.mesh.axes)
        for key, held in local.items():
            flat = self._vector(key)
            for name, part in ({key: held} if flat is None else flat.views(flat.gather(held))).items():
                tensor = self.stage.graph.tensors[name]
                steps = self.stage.layouts.steps(tensor, self.stage.placements[name], whole)
                found[name] = move(part, steps).clone()
        return found

    def _vector(self, leaf: str) -> _Flat | None:
        """The vector that a leaf is a piece of."""
        return self._vectors.get(id(self._frozen.get(leaf, self.leaves.get(leaf))))

    def values(self) -> dict[str, Tensor]:
        """This rank's tensors from which `wholes` makes whole parameters, frozen ones included."""
        fixed = {n: t for flat in self.flats if flat.piece is None for n, t in flat.leaves.items()}
        return {name: t.detach() for name, t in {**self.leaves, **self._frozen, **fixed}.items()}

    def gradients(self) -> dict[str, Tensor]:
        """This rank's tensors from which `wholes` makes whole gradients, after `finish`."""
        return {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in self.leaves.items()}

    def own(self, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `wholes`: leaf -> this rank's part."""
        found = {}
        for key, names in self.members.items():
            if names[0] in wholes:
                flat, parts = self._vector(key), [self._part(name, wholes[name]) for name in names]
                found[key] = parts[0] if flat is None else flat.cut(flat.flatten(parts, parts[0]))
        return found


def _total(vector: Tensor, axes: Sequence[Axis], label: tuple[str, str]) -> Tensor:
    """The sum over some axes: the inner axis first, its piece only over the others. May overwrite the vector."""
    if len(axes) < 2:
        all_reduce_in_place(vector, axes[0], label)
        return vector
    inner, size = axes[-1], vector.numel()
    padded = torch.cat([vector, vector.new_zeros(-size % inner.size)])
    parts = (padded.numel() // inner.size,) * inner.size
    piece = _total(reduce_scatter(padded, inner, 0, parts, label), axes[:-1], label)
    return all_gather(piece, inner, 0, parts, label)[:size]

"""Modules that run on their part of the sharding axis: linear layers, embeddings and norms, on local tensors.

Parameters are DTensors, so that optimizers and checkpoints know which part each rank holds; the arithmetic and the
collectives are plain. A fused weight (queries, keys and values in one) is stored piece by piece for each rank. torch's
compiler leaves out what communicates: it compiles the code around.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from automap.errors import PlanError
from automap.runtime.mesh_groups import Axis, Mesh
from automap.runtime.redistribute import convert, sum_over
from automap.runtime.split_cross_entropy import SplitScores
from automap.runtime.tensor_layout import TensorLayouts
from automap.runtime.trainer.compiled_code import uncompiled
from automap.runtime.trainer.roles import Move, Role
from ir.factors import BROADCAST, PARTIAL, gradient_placement


def layouts_of(axis: Axis) -> TensorLayouts:
    """The tensor layouts on a mesh of the sharding axis alone."""
    return TensorLayouts(Mesh(devices=tuple(range(axis.size)), axes=(axis,), is_mine=True), samples=0)


@uncompiled
def moved(x: Tensor, move: Move | None, layouts: TensorLayouts) -> Tensor:
    """The tensor after a change of placement, whose gradient returns in the placement that the producer requires."""
    if move is None:
        return x
    shape = list(x.shape)
    if move.given >= 0:
        shape[move.given] *= layouts.mesh.axes[0].size
    extent = tuple(shape), None
    there = layouts.route(extent, (move.given,), (move.wanted,))
    back = layouts.route(extent, (move.gradient,), (gradient_placement(move.given),))
    return convert(x, there, back)


def split_cross_entropy(scores: Tensor, labels: Tensor, axis: Axis, ignored: int) -> Tensor:
    """The summed cross-entropy where each rank has its own classes.

    Args:
        scores: [..., classes of this rank].
        labels: [...] class numbers among all classes; `ignored` where there is none.
        axis: the ranks, in the order of their classes.
        ignored: the label of rows that are left out.
    """
    kept = labels != ignored
    split = SplitScores(scores, [axis], dim=scores.ndim - 1, first_class=axis.index * scores.shape[-1])
    return (split.cross_entropy(torch.where(kept, labels, 0)) * kept).sum()


def _local(parameter: Tensor | None) -> Tensor | None:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _own(module: nn.Module, name: str, role: Role, layouts: TensorLayouts) -> Tensor | None:
    """The part of a parameter that a role computes with; one that is held whole for another module is sliced."""
    parameter: Tensor | None = getattr(module, name, None)
    dim = None if parameter is None else weight_dim(module, role.kind, name)
    if parameter is None or dim is None or isinstance(parameter, DTensor):
        return _local(parameter)
    return moved(parameter, Move(given=BROADCAST, wanted=dim, gradient=dim), layouts)


@uncompiled
def _linear(module: nn.Module, role: Role, layouts: TensorLayouts, x: Tensor) -> Tensor:
    weight, bias = _own(module, "weight", role, layouts), _own(module, "bias", role, layouts)
    assert weight is not None
    weight = weight if isinstance(module, nn.Linear) else weight.t()
    behind = role.kind == "row"
    y = moved(F.linear(moved(x, role.enter, layouts), weight, None if behind else bias), role.leave, layouts)
    return y + bias if behind and bias is not None else y


@uncompiled
def _embedding(module: nn.Embedding, role: Role, layouts: TensorLayouts, ids: Tensor) -> Tensor:
    weight = _own(module, "weight", role, layouts)
    assert weight is not None
    ids, padding = moved(ids, role.enter, layouts), module.padding_idx
    if role.kind != "vocabulary":
        return moved(F.embedding(ids, weight, padding), role.leave, layouts)
    first = layouts.mesh.here[0] * weight.shape[0]
    ids = ids - first
    mine = (ids >= 0) & (ids < weight.shape[0])
    # The row of the padding has no gradient, on the rank that holds it.
    padding = None if padding is None or not 0 <= padding - first < weight.shape[0] else padding - first
    y = F.embedding(torch.where(mine, ids, 0), weight, padding) * mine.unsqueeze(-1)
    return moved(y, role.leave, layouts)


class _SplitNorm(TorchFunctionMode):
    """Takes the means of a norm over the features of all ranks, while the norm's own code runs on those of one."""

    def __init__(self, axes: Sequence[Axis]) -> None:
        super().__init__()
        self._axes = axes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(DTensor, DTensor.to_local, (args, kwargs or {}))
        if func is F.layer_norm:
            return self._normalised(*args, **kwargs, centred=True)
        if func is F.rms_norm:
            return self._normalised(*args, **kwargs, centred=False)
        dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if func in (torch.mean, torch.Tensor.mean) and dims in (-1, (-1,), [-1]):
            return self._mean(args[0])
        return func(*args, **kwargs)

    def _mean(self, x: Tensor) -> Tensor:
        """[..., 1] the mean of [..., features of this rank] over the features of all ranks."""
        return sum_over(x.sum(-1, keepdim=True), self._axes, PARTIAL) / (x.shape[-1] * self._axes[0].size)

    def _normalised(
        self, x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
        eps: float | None = None, *, centred: bool,
    ) -> Tensor:  # fmt: skip
        """What `layer_norm` (centred) and `rms_norm` make of [..., features]."""
        wide = x if x.dtype == torch.float64 else x.float()
        if centred:
            wide = wide - self._mean(wide)
        y = (wide * torch.rsqrt(self._mean(wide * wide) + (torch.finfo(x.dtype).eps if eps is None else eps))).to(
            x.dtype
        )
        y = y if weight is None else y * weight
        return y if bias is None else y + bias


@uncompiled
def _norm(forward: Callable[[Tensor], Tensor], role: Role, layouts: TensorLayouts, x: Tensor) -> Tensor:
    """A norm of which each rank has some features; its means keep their last dim."""
    x = moved(x, role.enter, layouts)
    with _SplitNorm(layouts.mesh.axes):
        y = forward(x)
    return moved(y, role.leave, layouts)


def _unchanged(forward: Callable[..., Tensor], role: Role, layouts: TensorLayouts, *args: Any, **kwargs: Any) -> Tensor:
    """A module that runs its own code on what it is given, which is its first tensor."""
    if role.enter is not None and role.enter.is_change:
        leaves, structure = tree_flatten((args, kwargs))
        first = next(place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        leaves[first] = moved(leaves[first], role.enter, layouts)
        args, kwargs = tree_unflatten(leaves, structure)
    return moved(forward(*args, **kwargs), role.leave, layouts)


class _SplitTable(TorchFunctionMode):
    """Looks up rows of one embedding in the part of each rank, while the embedding's own code runs."""

    def __init__(self, module: nn.Embedding, role: Role, layouts: TensorLayouts) -> None:
        super().__init__()
        self._module, self._role, self._layouts = module, role, layouts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.embedding and args[1] is self._module.weight:
            return _embedding(self._module, self._role, self._layouts, args[0])
        return func(*args, **(kwargs or {}))


@uncompiled
def _own_embedding(
    forward: Callable[..., Tensor], module: nn.Embedding, role: Role, layouts: TensorLayouts, *args: Any, **kwargs: Any
) -> Tensor:
    """An embedding with code of its own around the look-up, such as positions with an offset or a scale."""
    with _SplitTable(module, role, layouts):
        return forward(*args, **kwargs)


def interleave(pieces: tuple[int, ...], ranks: int) -> list[int]:
    """The order of the outputs of a fused weight in which each rank's shares of all pieces are contiguous.

    Args:
        pieces: the number of outputs of each piece.
        ranks: the size of the sharding axis.
    """
    starts = [sum(pieces[:i]) for i in range(len(pieces))]
    return [
        start + rank * (size // ranks) + i
        for rank in range(ranks)
        for start, size in zip(starts, pieces, strict=True)
        for i in range(size // ranks)
    ]


def weight_dim(module: nn.Module, kind: str, name: str) -> int | None:
    """The dim of a parameter that a role splits; None = the parameter is whole."""
    if kind in ("along", "whole"):
        return None
    if kind == "features":
        return 0
    if isinstance(module, nn.Embedding):
        return 0 if kind == "vocabulary" else 1
    if name == "bias":
        return 0 if kind == "column" else None
    by_outputs = 0 if isinstance(module, nn.Linear) else 1
    return by_outputs if kind == "column" else 1 - by_outputs


Split = dict[int, nn.Parameter]
"""Identity of a parameter, as the user made it or as it replaces that -> the parameter that replaces it."""


def split_modules(module: nn.Module, roles: Mapping[str, Role], layouts: TensorLayouts, mesh: DeviceMesh) -> None:
    """Splits the parameters of a network's modules and makes their forwards run on them.

    A parameter that modules share stays shared. Where they split it differently, every rank holds the whole, and those
    modules that split it take their part: its gradient is gathered.

    Args:
        module: a network with the same values on every rank.
        roles: path of a module -> its role.
        layouts: the tensor layouts on the sharding axis.
        mesh: the device mesh of that axis.

    Raises:
        PlanError: a dim does not divide.
    """
    dims: dict[int, set[int | None]] = {}
    parts = [(module.get_submodule(path), role) for path, role in roles.items()]
    for child, role in parts:
        for name, parameter in child.named_parameters(recurse=False):
            dims.setdefault(id(parameter), set()).add(weight_dim(child, role.kind, name))
    made: Split = {}
    for child, role in parts:
        for name, parameter in list(child.named_parameters(recurse=False)):
            dim = weight_dim(child, role.kind, name)
            if id(parameter) not in made:
                alike = dim is not None and len(dims[id(parameter)]) == 1
                own = (
                    _split(parameter, name, dim, role, layouts.mesh.axes[0], mesh)
                    if alike and dim is not None
                    else parameter
                )
                made[id(parameter)] = made[id(own)] = own
            child.register_parameter(name, made[id(parameter)])
        _run_by_role(child, role, layouts)
    # Modules that share a parameter and are never called have no role, such as `shared` of T5.
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            child.register_parameter(name, made.get(id(parameter), parameter))


def _run_by_role(module: nn.Module, role: Role, layouts: TensorLayouts) -> None:
    forward = module.forward
    if role.kind in ("whole", "along"):
        forward = functools.partial(_unchanged, forward, role, layouts)
    elif isinstance(module, nn.Embedding) and type(module).forward is not nn.Embedding.forward:
        forward = functools.partial(_own_embedding, forward, module, role, layouts)
    elif isinstance(module, nn.Embedding):
        forward = functools.partial(_embedding, module, role, layouts)
    elif isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
        forward = functools.partial(_linear, module, role, layouts)
    elif role.kind == "features":
        forward = functools.partial(_norm, forward, role, layouts)
    else:
        forward = functools.partial(_unchanged, forward, role, layouts)
    module.forward = forward


def _split(parameter: nn.Parameter, name: str, dim: int, role: Role, axis: Axis, mesh: DeviceMesh) -> nn.Parameter:
    whole = parameter.detach()
    if whole.shape[dim] % axis.size:
        raise PlanError(
            f"{axis.size} ranks do not divide dim {dim} of {name}", field=f"plan.shardings.{axis.name}",
            value=tuple(whole.shape), repair="Use another number of ranks.",
        )  # fmt: skip
    if role.pieces:
        whole = whole.index_select(dim, torch.tensor(interleave(role.pieces, axis.size), device=whole.device))
    split = distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)
    return nn.Parameter(split, requires_grad=parameter.requires_grad)

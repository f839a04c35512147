"""Modules that run on their part of the sharding axis: linear layers, embeddings and norms, on local tensors.

Parameters are DTensors, so that optimizers and checkpoints know which part each rank holds; the arithmetic and the
collectives are plain. A fused weight (queries, keys and values in one) is stored piece by piece for each rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from automap.errors import PlanError
from automap.runtime.mesh_groups import Axis, Mesh
from automap.runtime.redistribute import convert, sum_over
from automap.runtime.split_cross_entropy import SplitScores
from automap.runtime.tensor_layout import TensorLayouts
from automap.runtime.trainer.roles import Move, Role
from ir.factors import BROADCAST, PARTIAL, gradient_placement


def layouts_of(axis: Axis) -> TensorLayouts:
    """The tensor layouts on a mesh of the sharding axis alone."""
    return TensorLayouts(Mesh(devices=tuple(range(axis.size)), axes=(axis,), is_mine=True), samples=0)


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


def _linear(module: nn.Module, role: Role, layouts: TensorLayouts, x: Tensor) -> Tensor:
    weight, bias = _own(module, "weight", role, layouts), _own(module, "bias", role, layouts)
    assert weight is not None
    weight = weight if isinstance(module, nn.Linear) else weight.t()
    behind = role.kind == "row"
    y = moved(F.linear(moved(x, role.enter, layouts), weight, None if behind else bias), role.leave, layouts)
    return y + bias if behind and bias is not None else y


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


def _norm(module: nn.Module, role: Role, layouts: TensorLayouts, x: Tensor) -> Tensor:
    """A norm of which each rank has some features: the sums over all of them are taken over the ranks."""
    weight, bias = _local(module.get_parameter("weight")), _local(getattr(module, "bias", None))
    assert weight is not None
    x = moved(x, role.enter, layouts)
    axes, size = layouts.mesh.axes, x.shape[-1] * layouts.mesh.axes[0].size

    def mean(part: Tensor) -> Tensor:
        return sum_over(part.sum(-1, keepdim=True), axes, PARTIAL) / size

    wide = x if x.dtype == torch.float64 else x.float()
    if isinstance(module, nn.LayerNorm):
        wide = wide - mean(wide)
    y = (wide * torch.rsqrt(mean(wide * wide) + norm_epsilon(module))).to(x.dtype) * weight
    return moved(y if bias is None else y + bias, role.leave, layouts)


def norm_epsilon(module: nn.Module) -> float:
    """The number that a norm adds to the variance; classes call it differently."""
    found = next((v for n in ("eps", "variance_epsilon") if isinstance(v := getattr(module, n, None), float)), None)
    return torch.finfo(module.get_parameter("weight").dtype).eps if found is None else found


def _unchanged(
    forward: Callable[..., Tensor], role: Role, layouts: TensorLayouts, x: Tensor, *args: object, **kwargs: object
) -> Tensor:
    return moved(forward(moved(x, role.enter, layouts), *args, **kwargs), role.leave, layouts)


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


def _run_by_role(module: nn.Module, role: Role, layouts: TensorLayouts) -> None:
    forward = module.forward
    if isinstance(module, nn.Embedding):
        forward = functools.partial(_embedding, module, role, layouts)
    elif isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
        forward = functools.partial(_linear, module, role, layouts)
    elif role.kind == "features":
        forward = functools.partial(_norm, module, role, layouts)
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

"""Modules that run on their part of the sharding axis: linear layers, embeddings and norms, on local tensors.

Parameters are DTensors, so that optimizers and checkpoints know which part each rank holds; the arithmetic and the
collectives are plain. A fused weight (queries, keys and values in one) is stored piece by piece for each rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from automap.errors import PlanError
from automap.runtime.mesh_groups import Axis, Mesh
from automap.runtime.redistribute import convert
from automap.runtime.split_cross_entropy import SplitScores
from automap.runtime.tensor_layout import TensorLayouts
from automap.runtime.trainer.roles import Move, Role
from ir.factors import gradient_placement


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


def _linear(module: nn.Module, role: Role, layouts: TensorLayouts, x: Tensor) -> Tensor:
    weight, bias = _local(module.get_parameter("weight")), _local(getattr(module, "bias", None))
    assert weight is not None
    weight = weight if isinstance(module, nn.Linear) else weight.t()
    behind = role.kind == "row"
    y = moved(F.linear(moved(x, role.enter, layouts), weight, None if behind else bias), role.leave, layouts)
    return y + bias if behind and bias is not None else y


def _embedding(module: nn.Module, role: Role, layouts: TensorLayouts, ids: Tensor) -> Tensor:
    weight = _local(module.get_parameter("weight"))
    assert weight is not None
    ids = moved(ids, role.enter, layouts)
    if role.kind != "vocabulary":
        return moved(F.embedding(ids, weight), role.leave, layouts)
    ids = ids - layouts.mesh.here[0] * weight.shape[0]
    mine = (ids >= 0) & (ids < weight.shape[0])
    y = F.embedding(torch.where(mine, ids, 0), weight) * mine.unsqueeze(-1)
    return moved(y, role.leave, layouts)


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
    if isinstance(module, nn.Embedding):
        return 0 if kind == "vocabulary" else 1
    if name == "bias":
        return 0 if kind == "column" else None
    by_outputs = 0 if isinstance(module, nn.Linear) else 1
    return by_outputs if kind == "column" else 1 - by_outputs


Split = dict[int, tuple[nn.Parameter, int | None]]
"""Identity of a parameter as the user made it -> the parameter that replaces it, and the dim that is split."""


def apply_role(module: nn.Module, role: Role, layouts: TensorLayouts, mesh: DeviceMesh, made: Split) -> None:
    """Splits the parameters of a module and makes its forward run on them.

    Args:
        module: a module with the same values on every rank.
        layouts: the tensor layouts on the sharding axis.
        mesh: the device mesh of that axis.
        made: the parameters that were split already; parameters that modules share stay shared.

    Raises:
        PlanError: a dim does not divide, or modules that share a parameter split it differently.
    """
    (axis,) = layouts.mesh.axes
    for name, parameter in list(module.named_parameters(recurse=False)):
        dim = weight_dim(module, role.kind, name)
        if id(parameter) not in made:
            made[id(parameter)] = parameter, None
            if dim is not None:
                made[id(parameter)] = _split(parameter, name, dim, role, axis, mesh), dim
            # The new parameter maps to itself. The table keeps both alive, so that their ids are not used again.
            made[id(made[id(parameter)][0])] = made[id(parameter)]
        known, before = made[id(parameter)]
        if before != dim:
            raise PlanError(
                f"{name} is shared by modules that split it differently", field=f"plan.shardings.{axis.name}",
                value=[before, dim], repair="Give them one placement, or run it with `automap trial`.",
            )  # fmt: skip
        module.register_parameter(name, known)
    forward = module.forward
    if isinstance(module, nn.Embedding):
        forward = functools.partial(_embedding, module, role, layouts)
    elif isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
        forward = functools.partial(_linear, module, role, layouts)
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

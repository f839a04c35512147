"""Modules that run on their part of a sharding axis: linear layers, embeddings and norms, on local tensors.

The parameters stay DTensors, so that optimizers and checkpoints know what each rank holds; the arithmetic and the
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
from automap.runtime.mesh_groups import Axis
from automap.runtime.redistribute import all_reduce, convert
from automap.runtime.tensor_layout import Step
from automap.runtime.trainer.roles import Move, Role
from ir.factors import BROADCAST, PARTIAL, Placement, placement_text


def _steps(x_size: int, given: Placement, wanted: Placement, axis: Axis) -> tuple[Step, ...]:
    """The collective between two placements of a tensor whose split dim has `x_size` on this rank."""
    if given == wanted:
        return ()
    if given == PARTIAL and wanted == BROADCAST:
        return (Step("all_reduce", axis),)
    if given >= 0 and wanted == BROADCAST:
        return (Step("all_gather", axis, given, (x_size,) * axis.size),)
    if given in (PARTIAL, BROADCAST) and wanted >= 0:
        sizes = (x_size // axis.size,) * axis.size
        return (Step("reduce_scatter" if given == PARTIAL else "slice", axis, wanted, sizes),)
    if given >= 0 and wanted == PARTIAL:
        return (Step("pad", axis, given, (x_size,) * axis.size),)
    raise PlanError(
        f"modules cannot bring {placement_text(given)} to {placement_text(wanted)}",
        field=f"plan.shardings.{axis.name}", value=placement_text(wanted), repair="Run it with `automap trial`.",
    )  # fmt: skip


def moved(x: Tensor, move: Move | None, axis: Axis) -> Tensor:
    """`x` in the placement that `move` wants; its gradient comes back in the one that the producer wants."""
    if move is None:
        return x
    back = move.given if move.given >= 0 else BROADCAST
    dim = max(move.given, move.wanted, 0)
    there = _steps(x.shape[dim], move.given, move.wanted, axis)
    size = x.shape[dim]
    if there and there[0].kind == "all_gather":
        size *= axis.size
    elif there and there[0].kind in ("slice", "reduce_scatter"):
        if size % axis.size:
            raise PlanError(
                f"{axis.size} ranks do not divide dim {dim} of {tuple(x.shape)}", field=f"plan.shardings.{axis.name}",
                value=size, repair="Give data of the size that the plan was made for.",
            )  # fmt: skip
        size //= axis.size
    return convert(x, there, _steps(size, move.gradient, back, axis))


class _Total(torch.autograd.Function):
    """A sum over the ranks whose result all ranks use alike."""

    @staticmethod
    def forward(ctx: object, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def split_cross_entropy(scores: Tensor, labels: Tensor, axis: Axis, ignored: int = -100) -> Tensor:
    """Summed cross-entropy where each rank has its own classes: three small all-reduces.

    Args:
        scores: [..., classes of this rank].
        labels: [...] class numbers, of all classes; `ignored` where there is none.
        axis: the ranks, in the order of their classes.
        ignored: a label that counts nothing.
    """
    kept = labels != ignored
    local = torch.where(kept, labels, 0) - axis.index * scores.shape[-1]
    mine = (local >= 0) & (local < scores.shape[-1]) & kept
    top = all_reduce(scores.detach().amax(-1), axis, largest=True)
    powers = torch.exp(scores - top.unsqueeze(-1)).sum(-1)
    picked = scores.gather(-1, torch.where(mine, local, 0).unsqueeze(-1)).squeeze(-1) * mine
    total: Tensor = _Total.apply(torch.stack([powers, picked]), axis)  # type: ignore[no-untyped-call]
    return ((total[0].log() + top - total[1]) * kept).sum()


def _local(parameter: Tensor | None) -> Tensor | None:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _linear(module: nn.Module, role: Role, axis: Axis, x: Tensor) -> Tensor:
    weight, bias = _local(module.get_parameter("weight")), _local(getattr(module, "bias", None))
    assert weight is not None
    weight = weight if isinstance(module, nn.Linear) else weight.t()
    behind = role.kind == "row"
    y = moved(F.linear(moved(x, role.enter, axis), weight, None if behind else bias), role.leave, axis)
    return y + bias if behind and bias is not None else y


def _embedding(module: nn.Module, role: Role, axis: Axis, ids: Tensor) -> Tensor:
    weight = _local(module.get_parameter("weight"))
    assert weight is not None
    ids = moved(ids, role.enter, axis)
    if role.kind != "vocabulary":
        return moved(F.embedding(ids, weight), role.leave, axis)
    ids = ids - axis.index * weight.shape[0]
    mine = (ids >= 0) & (ids < weight.shape[0])
    y = F.embedding(torch.where(mine, ids, 0), weight) * mine.unsqueeze(-1)
    return moved(y, role.leave, axis)


def _as_it_is(
    forward: Callable[..., Tensor], role: Role, axis: Axis, x: Tensor, *args: object, **kwargs: object
) -> Tensor:
    return moved(forward(moved(x, role.enter, axis), *args, **kwargs), role.leave, axis)


def interleave(pieces: tuple[int, ...], ranks: int) -> list[int]:
    """Order of outputs in which each rank's share of every piece lies together."""
    starts = [sum(pieces[:i]) for i in range(len(pieces))]
    return [
        start + rank * (size // ranks) + i
        for rank in range(ranks)
        for start, size in zip(starts, pieces, strict=True)
        for i in range(size // ranks)
    ]


def weight_dim(module: nn.Module, kind: str, name: str) -> int | None:
    """The dim of a parameter that a role splits; None = whole."""
    if kind in ("along", "whole"):
        return None
    if isinstance(module, nn.Embedding):
        return 0 if kind == "vocabulary" else 1
    if name == "bias":
        return 0 if kind == "column" else None
    by_outputs = 0 if isinstance(module, nn.Linear) else 1
    return by_outputs if kind == "column" else 1 - by_outputs


Split = dict[int, tuple[nn.Parameter, int | None]]
"""Identity of a parameter as the user made it -> what it became, and the dim that is split."""


def apply_role(module: nn.Module, role: Role, axis: Axis, mesh: DeviceMesh, made: Split) -> None:
    """Splits the parameters of a module and makes its forward run on them.

    Args:
        module: with the same values on every rank.
        role: of the module.
        axis: the sharding axis.
        mesh: of that axis.
        made: of all modules; parameters that modules share stay shared.

    Raises:
        PlanError: a dim does not divide, or modules that share a parameter split it differently.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        dim = weight_dim(module, role.kind, name)
        if id(parameter) not in made:
            made[id(parameter)] = parameter, None
            if dim is not None:
                made[id(parameter)] = _split(parameter, name, dim, role, axis, mesh), dim
            # Keeps the identity taken.
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
        forward = functools.partial(_embedding, module, role, axis)
    elif isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
        forward = functools.partial(_linear, module, role, axis)
    else:
        forward = functools.partial(_as_it_is, forward, role, axis)
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

"""The processes of a plan as a device mesh, and the samples that each of them trains on.

The rank of a process is a device number of the plan. All stages have like meshes (`supported_plans`).
"""

from __future__ import annotations

import os
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from automap.errors import PlanError
from automap.plan import Plan, parse_devices
from automap.runtime.executor.replica_averaging import Replicas
from automap.runtime.mesh_groups import Axis
from automap.runtime.trainer.gradients import local_of
from automap.runtime.trainer.roles import Roles


def devices_of(plan: Plan) -> list[tuple[int, ...]]:
    """The devices of each pipeline rank."""
    return [parse_devices(text) for text in dict.fromkeys(stage.devices for stage in plan.stages)]


def own_device() -> torch.device:
    """The GPU that torchrun gives this process, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def make_mesh(plan: Plan, device: torch.device) -> DeviceMesh:
    """The processes by (pipe, apart, replicate, shard, split).

    These are the pipeline ranks, the batch axis whose replicas are trained apart, the batch axes outside of ZeRO, the
    axes of ZeRO, of which some may repeat all work, and the sharding axis.

    Raises:
        PlanError: there is not one process for each device of the plan.
    """
    stage, devices = plan.stages[0], devices_of(plan)
    world = dist.get_world_size()
    every = sorted(d for row in devices for d in row)
    number = len(every)
    if every != list(range(world)):
        raise PlanError(
            f"has other devices than the {world} processes that were started, which are numbered from 0",
            field="plan.stages.devices", value=", ".join(dict.fromkeys(s.devices for s in plan.stages)),
            repair=f"Start {number} in all, one for each device: torchrun --nproc-per-node={number} on one host.",
        )  # fmt: skip
    count = dict(stage.mesh)
    names = list(count)
    apart = [] if plan.sync.kind == "synchronous" else list(stage.batch_axes[:1])
    sharded = [n for n in names if stage.zero.stage and n in stage.zero.axes]
    replicated = [n for n in names if n in stage.batch_axes and n not in (*apart, *sharded)]
    split = [n for n in names if n not in (*stage.batch_axes, *sharded)]
    grid = torch.tensor(devices).reshape(len(devices), *count.values())
    grid = grid.permute(0, *(1 + names.index(n) for n in (*apart, *replicated, *sharded, *split)))
    shape = [prod(count[n] for n in some) for some in (apart, replicated, sharded, split)]
    dims = ("pipe", "apart", "replicate", "shard", "split")
    return DeviceMesh(device.type, grid.reshape(len(devices), *shape), mesh_dim_names=dims)


def sharding_axis(roles: Roles, mesh: DeviceMesh) -> Axis:
    """The sharding axis in the form that the collectives of `automap.runtime.redistribute` take."""
    size = mesh.size()
    group = mesh.get_group() if size > 1 else None
    return Axis(name=roles.axis or "", number=0, size=size, index=mesh.get_local_rank(), group=group)


def shares_of(plan: Plan) -> tuple[int, ...]:
    """[ranks of the first batch axis] their samples of each micro-batch."""
    stage, count = plan.stages[0], plan.samples_per_micro_batch
    size = dict(stage.mesh).get(stage.batch_axes[0], 1)
    return stage.batch_shares or tuple(count // size + (i < count % size) for i in range(size))


def own_samples(plan: Plan, rank: int) -> range:
    """The samples of each micro-batch that a rank trains on.

    The first batch axis has the shares of the plan; the others split these in equal parts.

    Raises:
        PlanError: an axis does not divide the samples.
    """
    stage = plan.stages[0]
    devices = next(row for row in devices_of(plan) if rank in row)
    position = devices.index(rank)
    coordinates: dict[str, int] = {}
    for name, size in reversed(stage.mesh):
        coordinates[name], position = position % size, position // size
    low, high = 0, plan.samples_per_micro_batch
    for number, name in enumerate(stage.batch_axes):
        count, size = high - low, dict(stage.mesh).get(name, 1)
        shares = shares_of(plan) if number == 0 else (count // size,) * size
        if number and count % size:
            raise PlanError(
                f"{size} ranks do not divide {count} samples", field="plan.stages[0].batch_axes", value=name,
                repair="Use larger micro-batches.",
            )  # fmt: skip
        index = coordinates.get(name, 0)
        low, high = low + sum(shares[:index]), low + sum(shares[: index + 1])
    return range(low, high)


def own_replica(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The ranks that are trained together with this one; None = all."""
    replicas = mesh.mesh.transpose(0, 1).flatten(1).tolist()
    groups = [dist.new_group(ranks) for ranks in replicas] if len(replicas) > 1 else []
    return next((g for g, ranks in zip(groups, replicas, strict=False) if dist.get_rank() in ranks), None)


def trained_apart(plan: Plan, mesh: DeviceMesh, module: nn.Module) -> Replicas | None:
    """The replicas of a network that are trained apart, if there are any.

    Args:
        mesh: the axis of such replicas.
        module: the modules of this rank.
    """
    if mesh.size() == 1:
        return None
    index = mesh.get_local_rank()
    axis = Axis(name="apart", number=0, size=mesh.size(), index=index, group=mesh.get_group())
    local = [local_of(parameter.detach()) for parameter in module.parameters()]
    return Replicas(plan.sync, local, axis, shares_of(plan)[index] / plan.samples_per_micro_batch)


@torch.no_grad()
def broadcast(module: nn.Module, device: torch.device) -> None:
    """Moves a network to a device, and gives every process the values of rank 0."""
    module.to(device)
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor, 0)

"""A plan applied to the user's own network, by the names of its modules.

    trainer = parallelize(module, plan, graph)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=3e-4)
    loss = trainer.step(ids[trainer.rows], labels[trainer.rows])
    optimizer.step(); optimizer.zero_grad()

Weights are split by the roles of their modules (`trainer_roles`, `trainer_styles`), ZeRO is FSDP2, pipelines are
torch's schedules over stages cut between modules (`trainer_stages`). Process rank = device number of the plan. Losses
are sums divided by the count of the whole batch, known before the first backward pass: so every reduction is a sum, and
unequal shares of samples or of labels need nothing else. What is finer than modules is refused.
"""

from __future__ import annotations

import functools
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate

from automap.errors import PlanError
from automap.plan import Plan
from automap.runtime.trainer.gradients import OverlappedSums, local_of, sum_gradients
from automap.runtime.trainer.roles import LOSS, Roles, devices_of, read_roles, tied_names, unit_paths
from automap.runtime.trainer.setup import (
    check_same,
    computes,
    divide_sizes,
    even_parts,
    own_device,
    probe_inputs,
    run_again,
    sharding_axis,
)
from automap.runtime.trainer.stages import cut, prune
from automap.runtime.trainer.styles import Split, apply_role, interleave, split_cross_entropy, weight_dim
from ir.graph import Graph

IGNORED = -100
"""A label that counts nothing, as in torch."""

LossFunction = Callable[[Tensor, Tensor], Tensor]


def summed_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of [..., classes] scores and [...] labels, summed over all that are not `IGNORED`."""
    return F.cross_entropy(scores.flatten(0, -2), labels.flatten(), reduction="sum", ignore_index=IGNORED)


def count_labels(labels: Tensor) -> Tensor:
    """Labels that are not `IGNORED`."""
    return (labels != IGNORED).sum()


def parallelize(
    module: nn.Module,
    plan: Plan,
    graph: Graph,
    *,
    loss: LossFunction = summed_cross_entropy,
    count: Callable[[Tensor], Tensor] = count_labels,
    per_rank: Sequence[str] = (),
) -> Trainer:
    """Applies a plan to a network; every process of the plan calls it, started by torchrun.

    Args:
        module: built alike on every process; the values of rank 0 count.
        plan: of `graph`.
        graph: of the same structure: scopes of operators are paths of modules.
        loss: (outputs, labels) of some samples -> the sum of their losses.
        count: labels of some samples -> what the sum over all samples is divided by.
        per_rank: attributes that hold sizes of one rank, such as `h.*.attn.num_heads`: divided by the sharding axis.
            Code that writes its sizes as -1 needs none.

    Raises:
        PlanError: the plan is of another model, has another number of devices, or is finer than modules.
    """
    roles = read_roles(plan, graph, module)
    if roles.splits_classes and loss is not summed_cross_entropy:
        raise PlanError(
            "only the built-in cross-entropy runs on split classes", field="loss", value=loss,
            repair="Leave it out, or take a plan that keeps the classes whole.",
        )  # fmt: skip
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return Trainer(module, plan, graph, roles, loss, count, per_rank)


class Trainer:
    """A network that is trained by a plan.

    Attributes:
        module: what this rank holds, under the user's names.
        rows: [samples] positions in a global batch of the samples that this rank wants, micro-batch by micro-batch.
        device: where inputs go.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        graph: Graph,
        roles: Roles,
        loss: LossFunction,
        count: Callable[[Tensor], Tensor],
        per_rank: Sequence[str],
    ) -> None:
        self.plan, self.roles, self._loss, self._count = plan, roles, loss, count
        self.device = own_device()
        mesh = self._make_mesh()
        self._axis, self._pipe, self._shard = sharding_axis(roles, mesh["split"]), mesh["pipe"], mesh["shard"]
        self._columns = mesh.mesh.flatten(1).t().tolist()
        self.rows = self._own_rows()
        self._alike(module)
        self._ties = tied_names(module)
        units = unit_paths(module)
        self._split(module, graph, mesh["split"], per_rank)
        number, ranks = len(plan.stages), self._pipe.size()
        self._mine = list(range(self._pipe.get_local_rank(), number, ranks))
        stages, self._names = ([module], []) if number == 1 else cut(module, roles, number)
        self._tie_groups = self._make_tie_groups(module, stages)
        kept = [stages[n] for n in self._mine]
        if number > 1:
            prune(module, kept)
        self.module = module
        self._fold(mesh, kept, units)
        self._schedule = self._pipeline(kept) if number > 1 else None

    # -- Setting up

    def _make_mesh(self) -> DeviceMesh:
        """(pipe, replicate, shard, split): pipeline ranks, batch axes outside and inside of ZeRO, the sharding axis."""
        plan, stage = self.plan, self.plan.stages[0]
        devices = devices_of(plan)
        size = dist.get_world_size()
        if sorted(d for row in devices for d in row) != list(range(size)):
            raise PlanError(
                f"there are {size} processes", field="plan.stages.devices", value=[s.devices for s in plan.stages],
                repair="Start one process for each device of the plan, numbered from 0.",
            )  # fmt: skip
        names = [name for name, _ in stage.mesh]
        sizes = [size for _, size in stage.mesh]
        sharded = [n for n in names if n in stage.batch_axes and stage.zero.stage and n in stage.zero.axes]
        replicated = [n for n in names if n in stage.batch_axes and n not in sharded]
        rest = [n for n in names if n not in stage.batch_axes]
        grid = torch.tensor(devices).reshape(len(devices), *sizes)
        grid = grid.permute(0, *(1 + names.index(n) for n in (*replicated, *sharded, *rest)))
        count = dict(stage.mesh)
        shape = [1, 1, 1]
        for i, some in enumerate((replicated, sharded, rest)):
            for n in some:
                shape[i] *= count[n]
        return DeviceMesh(
            self.device.type, grid.reshape(len(devices), *shape), mesh_dim_names=("pipe", "replicate", "shard", "split")
        )

    def _own_rows(self) -> Tensor:
        """Samples of this rank: a first batch axis as the plan shares it, the others in equal parts of that."""
        plan, stage = self.plan, self.plan.stages[0]
        devices = next(row for row in devices_of(plan) if dist.get_rank() in row)
        place = devices.index(dist.get_rank())
        where: dict[str, int] = {}
        for name, size in reversed(stage.mesh):
            where[name], place = place % size, place // size
        low, high = 0, plan.samples_per_micro_batch
        for number, name in enumerate(stage.batch_axes):
            size = dict(stage.mesh).get(name, 1)
            shares = stage.batch_shares if number == 0 and stage.batch_shares else even_parts(high - low, size)
            if number and (high - low) % size:
                raise PlanError(
                    f"{size} ranks do not divide {high - low} samples", field="plan.stages[0].batch_axes", value=name,
                    repair="Use larger micro-batches.",
                )  # fmt: skip
            index = where.get(name, 0)
            low, high = low + sum(shares[:index]), low + sum(shares[: index + 1])
        self._own_samples = high - low
        starts = torch.arange(plan.num_micro_batches)[:, None] * plan.samples_per_micro_batch
        return (starts + torch.arange(low, high)).flatten()

    def _alike(self, module: nn.Module) -> None:
        """Gives every process the values of rank 0, and refuses modules whose ranks would differ."""
        for path, child in module.named_modules():
            if self.roles.axis and isinstance(child, nn.Dropout) and child.p > 0.0:
                raise PlanError(
                    "ranks of a split layer would drop different elements", field=f"module.{path}.p", value=child.p,
                    repair="Set it to 0, or take a plan without split weights.",
                )  # fmt: skip
        module.to(self.device)
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor, 0)

    def _split(self, module: nn.Module, graph: Graph, mesh: DeviceMesh, per_rank: Sequence[str]) -> None:
        """Splits layers over the sharding axis, and sees to it that the network still computes the same."""
        roles = self.roles
        if roles.axis is not None:
            inputs = probe_inputs(graph, module, roles.axis_size)
            wanted = computes(module, inputs)
            divide_sizes(module, per_rank, roles.axis_size)
            made: Split = {}
            for path, role in roles.modules.items():
                apply_role(module.get_submodule(path), role, self._axis, mesh, made)
            check_same(computes(module, inputs), wanted, roles, self._axis)
        for path in filter(None, roles.recomputed):
            child = module.get_submodule(path)
            child.forward = functools.partial(run_again, child.forward)

    def _make_tie_groups(
        self, module: nn.Module, stages: Sequence[nn.Module]
    ) -> list[tuple[set[str], dist.ProcessGroup]]:
        """Names of each weight that several stages hold, and the ranks between which its gradients are added."""
        found = []
        names = [{name for name, _ in stage.named_parameters(remove_duplicate=False)} for stage in stages]
        for first in dict.fromkeys(self._ties.values()):
            aliases = {first, *(alias for alias, other in self._ties.items() if other == first)}
            holders = sorted({i % self._pipe.size() for i, held in enumerate(names) if held & aliases})
            for column in self._columns if len(holders) > 1 else ():
                ranks = [column[i] for i in holders]
                group = dist.new_group(ranks)
                if dist.get_rank() in ranks:
                    found.append((aliases, group))
        return found

    def _fold(self, mesh: DeviceMesh, kept: Sequence[nn.Module], units: Sequence[str]) -> None:
        """Data parallelism: FSDP2 under ZeRO, else plain replicas."""
        stage = self.plan.stages[0]
        self._zero = stage.zero.stage if mesh["shard"].size() > 1 else 0
        self._sums: OverlappedSums | None = None
        if not self._zero:
            # Without ZeRO no axis is set apart for its shards.
            if mesh["replicate"].size() > 1:
                # A weight of several stages of this rank is reached by the passes of each.
                holders = Counter(p for root in kept for p in root.parameters())
                passes = {p: count * self.plan.num_micro_batches for p, count in holders.items()}
                self._sums = OverlappedSums(passes, mesh["replicate"].get_group())
            return
        folded = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
        policy = MixedPrecisionPolicy()
        if self.plan.training.precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        again = self._zero == 3
        for root in kept:
            inside = dict(root.named_modules())
            for unit in (*(inside[path] for path in units if path in inside), root):
                fully_shard(unit, mesh=folded, reshard_after_forward=again, mp_policy=policy)
            for part in root.modules():
                if isinstance(part, FSDPModule):
                    part.set_gradient_divide_factor(1.0)
                    part.set_force_sum_reduction_for_comms(True)

    def _pipeline(self, kept: Sequence[nn.Module]) -> Any:
        number, kind = len(self.plan.stages), self.plan.schedule.kind
        group = self._pipe.get_group()
        stages: list[Any] = [
            PipelineStage(stage, n, number, self.device, group=group) for n, stage in zip(self._mine, kept, strict=True)
        ]
        count = self.plan.num_micro_batches
        if kind == "interleaved":
            return ScheduleInterleaved1F1B(stages, count, loss_fn=self._share, scale_grads=False)
        single = Schedule1F1B if kind == "1f1b" else ScheduleGPipe
        return single(stages[0], count, loss_fn=self._share, scale_grads=False)

    # -- Training

    def parameters(self) -> list[dict[str, list[nn.Parameter]]]:
        """Parameter groups for an optimizer: what lies on one mesh together, since fused steps mix no meshes."""
        groups: dict[Any, list[nn.Parameter]] = {}
        for parameter in self.module.parameters():
            groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
        return [{"params": some} for some in groups.values()]

    def step(self, *data: Tensor) -> float:
        """Forward and backward passes of all micro-batches; gradients are complete afterwards.

        Args:
            data: the model's inputs, then the labels: [rows, ...] of `rows` alone.

        Returns:
            the loss of the whole batch, the same on every process.
        """
        if any(len(x) != len(self.rows) for x in data):
            raise PlanError(
                f"this rank wants {len(self.rows)} samples", field="data", value=[len(x) for x in data],
                repair="Give the samples at `trainer.rows` of a global batch.",
            )  # fmt: skip
        *inputs, labels = (x.to(self.device) for x in data)
        counts = self._count(labels).to(torch.float64) * self._reports(last=True)
        self._total = float(self._everywhere(counts))
        run = self._accumulate if self._schedule is None else self._run_schedule
        if self._sums is not None:
            self._sums.begin()
        losses = run(inputs, labels)
        self._finish()
        return float(self._everywhere(sum(losses, torch.zeros((), device=self.device)).double() * self._reports(True)))

    def _reports(self, last: bool) -> bool:
        """Whether this rank speaks for its samples: the first of the sharding axis, in the last stage."""
        return self._axis.index == 0 and (not last or len(self.plan.stages) - 1 in self._mine)

    def _everywhere(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        value = value.detach().to(torch.float64 if self.device.type == "cpu" else torch.float32)
        if dist.get_world_size() > 1:
            dist.all_reduce(value)
        return value

    def _share(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """What some samples of this rank add to the loss of the whole batch."""
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        loss = self._loss
        if self.roles.splits_classes:
            loss = functools.partial(split_cross_entropy, axis=self._axis, ignored=IGNORED)
        return (
            run_again(loss, outputs, labels) if LOSS in self.roles.recomputed else loss(outputs, labels)
        ) / self._total

    def _autocast(self) -> Any:
        """Replicas compute in bf16 under autocast; FSDP2 does so by its own policy."""
        on = self.plan.training.precision == "bf16" and not self._zero
        return torch.autocast(self.device.type, torch.bfloat16, enabled=on)

    def _accumulate(self, inputs: Sequence[Tensor], labels: Tensor) -> list[Tensor]:
        losses, root = [], self.module
        pieces = zip(*(torch.split(x, self._own_samples) for x in (*inputs, labels)), strict=True)
        for number, (*some, those) in enumerate(pieces):
            last = number == self.plan.num_micro_batches - 1
            if isinstance(root, FSDPModule):
                root.set_is_last_backward(last)
                root.set_requires_gradient_sync(last or self._zero > 1)
                root.set_requires_all_reduce(last)
                root.set_reshard_after_backward(last or self._zero == 3)
            with self._autocast():
                outputs = root(*some)
            loss = self._share(outputs, those)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return losses

    def _run_schedule(self, inputs: Sequence[Tensor], labels: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        last = len(self.plan.stages) - 1 in self._mine
        assert self._schedule is not None
        with self._autocast():
            self._schedule.step(
                **dict(zip(self._names, inputs, strict=True)), target=labels if last else None,
                losses=losses if last else None, return_outputs=False,
            )  # fmt: skip
        return [loss.detach() for loss in losses]

    def _finish(self) -> None:
        """Adds up gradients over replicas, over the sharding axis where they are partial, and over tied copies."""
        named = dict(self.module.named_parameters())
        if self._sums is not None:
            self._sums.finish()
        if self._axis.group is not None:
            sum_gradients(
                (p for name, p in named.items() if self._ties.get(name, name) in self.roles.summed), self._axis.group
            )
        for aliases, group in self._tie_groups:
            sum_gradients((named[name] for name in aliases & named.keys()), group)

    # -- Checkpoints

    def save(self, folder: str | Path, optimizer: torch.optim.Optimizer, **more: Any) -> None:
        """Writes weights, optimizer state and `more` (numbers, text) to a folder, every process its part.

        An older checkpoint there is replaced once the new one is complete.
        Fused weights are written in the order of the user's module and tied weights once, so that any plan reads them.
        """
        fresh = Path(f"{folder}.writing")
        self._by_one(lambda: shutil.rmtree(fresh, ignore_errors=True))
        save({**self._file_state(optimizer), "more": more}, checkpoint_id=fresh)
        self._by_one(lambda: _take_place(fresh, Path(folder)))

    def _by_one(self, work: Callable[[], None]) -> None:
        """The first process works, the others wait for it."""
        if dist.get_rank() == 0:
            work()
        float(self._everywhere(torch.zeros((), device=self.device)))

    def load(self, folder: str | Path, optimizer: torch.optim.Optimizer, **more: Any) -> dict[str, Any]:
        """Reads what `save` wrote, also under another plan.

        Args:
            folder: of `save`.
            optimizer: of this trainer; its settings (learning rates) stay as they are.
            more: what to read besides, with values of the same kinds.

        Returns:
            `more` as it was saved.
        """
        _allocate(optimizer)
        state = {**self._file_state(optimizer), "more": dict(more)}
        load(state, checkpoint_id=folder)
        with torch.no_grad():
            for key, value in self._state(optimizer).items():
                fused = self._fused(key)
                if fused is not None and value.dim():
                    local_of(value).copy_(self._own_part(state[key], *fused))
                elif state[key] is not value:
                    value.copy_(state[key])
        found: dict[str, Any] = state["more"]
        return found

    def _state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Every tensor of this rank by its name in files."""
        found = {}
        for name, parameter in self.module.named_parameters():
            found[f"model.{self._ties.get(name, name)}"] = parameter.detach()
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"optimizer.{self._ties.get(name, name)}.{key}"] = value
        parameters = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        for name, buffer in self.module.state_dict().items():
            if name not in parameters:
                found[f"model.{name}"] = buffer
        return found

    def _file_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The same with fused weights whole, in the order of the user's module."""
        state: dict[str, Any] = {}
        for key, value in self._state(optimizer).items():
            fused = self._fused(key)
            state[key] = value
            if fused is not None and value.dim():
                order, dim = fused
                state[key] = _whole_of(value).index_select(dim, torch.argsort(order))
        return state

    def _fused(self, key: str) -> tuple[Tensor, int] | None:
        """How the outputs of a fused weight are ordered, and their dim."""
        for path, role in self.roles.modules.items():
            if not role.pieces:
                continue
            for name in ("weight", "bias"):
                if f".{path}.{name}." in f".{key}.":
                    dim = weight_dim(self.module.get_submodule(path), role.kind, name)
                    if dim is not None:
                        order = interleave(role.pieces, self.roles.axis_size)
                        return torch.tensor(order, device=self.device), dim
        return None

    def _own_part(self, whole: Tensor, order: Tensor, dim: int) -> Tensor:
        """What this rank holds of a whole fused weight."""
        part = whole.index_select(dim, order).chunk(self._axis.size, dim)[self._axis.index]
        if not self._zero:
            return part
        parts = part.chunk(self._shard.size())
        index = self._shard.get_local_rank()
        return parts[index] if index < len(parts) else part[:0]


def _take_place(fresh: Path, folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    fresh.rename(folder)


def _whole_of(value: Tensor) -> Tensor:
    """Gathered over the shards of ZeRO first: one plain all-gather an axis."""
    if not isinstance(value, DTensor):
        return value.clone()
    outer = [Replicate()] * (value.device_mesh.ndim - 1)
    return value.redistribute(placements=[*outer, value.placements[-1]]).full_tensor()


def _allocate(optimizer: torch.optim.Optimizer) -> None:
    """Makes an optimizer that has not worked yet hold its state: one step of zero gradients that changes nothing."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate

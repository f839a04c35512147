"""Trains a network of the user by a plan, module by module.

Weights are split by the roles of their modules (`roles`, `sharded_modules`), ZeRO is FSDP2, and pipelines are torch's
schedules over stages that are cut between modules (`stage_modules`). The loss of each micro-batch is a sum over its
labels, divided by the number of labels of the whole batch, which is known before the first backward pass. So every
reduction of losses and gradients is a sum, also where ranks have different numbers of samples or labels. A plan that is
finer than modules is refused.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from automap.errors import PlanError
from automap.plan import Plan
from automap.runtime.number_formats import low_precision, set_tf32
from automap.runtime.trainer.borders import enter_by_borders, returned_by
from automap.runtime.trainer.checkpoint import Checkpoint
from automap.runtime.trainer.ended_processes import names_the_ended
from automap.runtime.trainer.evaluation import between_steps, gather_classes, refuse_draw, traced_draw
from automap.runtime.trainer.gradient_check import GradientCheck
from automap.runtime.trainer.gradients import (
    Earlier,
    OverlappedSums,
    local_of,
    shorten,
    square_of,
    sum_gradients,
    tie_groups,
)
from automap.runtime.trainer.left_out_blocks import Call, order_of_blocks
from automap.runtime.trainer.loss_scaling import LossScale
from automap.runtime.trainer.losses import IGNORED, CountFunction, LossFunction, classes_last, summed_cross_entropy
from automap.runtime.trainer.module_tree import LOSS, tied_names, unit_paths
from automap.runtime.trainer.pipeline_schedules import make_schedule
from automap.runtime.trainer.process_mesh import (
    broadcast,
    make_mesh,
    own_device,
    own_replica,
    own_samples,
    sharding_axis,
    trained_apart,
)
from automap.runtime.trainer.random_numbers import Draws, alike, draw_independently, draws_of
from automap.runtime.trainer.reached_parameters import Reached
from automap.runtime.trainer.recomputation import recompute, run_again
from automap.runtime.trainer.roles import Roles
from automap.runtime.trainer.running_statistics import average_statistics
from automap.runtime.trainer.sharded_modules import layouts_of, split_cross_entropy, split_modules
from automap.runtime.trainer.skipping_stages import SkippingStage, cut_untraced, drop_weights
from automap.runtime.trainer.split_check import check_same, computes, divide_sizes, probe_inputs, runs, sizes_of_ranks
from automap.runtime.trainer.stage_modules import Untraced, arguments, cut, prune
from automap.runtime.trainer.stand_ins import StandIns
from automap.runtime.trainer.step_data import Indices, check_step
from automap.runtime.trainer.training_graph import input_names, scores_of
from automap.runtime.trainer.zero_units import spread_states
from ir.graph import Graph

SCALE = "loss scale"
"""The name of the scale of the loss in checkpoints; no argument of `save` can have it."""


@names_the_ended
class ModuleTrainer:
    """A network whose modules are trained by a plan; see `automap.runtime.trainer.entry.parallelize`.

    Attributes:
        module: the modules that this rank holds, under the user's names.
        rows: [samples] positions in a global batch of the samples that this rank trains on, by micro-batch.
        device: the device of the inputs.
        scaling: the scale of the loss, for plans in fp16, and the number of steps that were skipped for it.
        why: empty: modules run the plan; see `GraphTrainer`.
    """

    why = ""

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        graph: Graph,
        roles: Roles,
        loss: LossFunction,
        count: CountFunction,
        per_rank: Sequence[str],
    ) -> None:
        self.plan, self.roles, self._loss, self._count, self._graph = plan, roles, loss, count, graph
        self.device = own_device()
        self.scaling = LossScale(self.device, on=plan.training.precision == "fp16")
        set_tf32(on=plan.training.precision == "tf32")
        mesh = make_mesh(plan, self.device)
        self._axis, self._pipe = sharding_axis(roles, mesh["split"]), mesh["pipe"]
        self._columns = mesh.mesh.flatten(1).t().tolist()
        self._together = own_replica(mesh)
        axes = ("apart", "replicate", "shard")
        self._replica_groups = [mesh[name].get_group() for name in axes if mesh[name].size() > 1]
        self._alike = mesh["replicate"].size() * mesh["shard"].size() * mesh["split"].size()
        samples = own_samples(plan, dist.get_rank())
        self._num_samples = len(samples)
        starts = torch.arange(plan.num_micro_batches)[:, None] * plan.samples_per_micro_batch
        self.rows = (starts + torch.tensor(samples)).flatten()
        broadcast(module, self.device)
        self._ties = tied_names(module)
        self._reached, names = Reached(module, self._ties, self.device), tuple(module.state_dict())
        units = unit_paths(module)
        self._inputs = input_names(graph, module)
        self._indices = Indices(graph, has_classes=loss is summed_cross_entropy)
        order, number = list[Call](), len(plan.stages)
        if number > 1 or plan.stages[0].zero.stage:
            some = probe_inputs(graph, module, 2)
            order = order_of_blocks(module, units, some, self._inputs, are_all_needed=number > 1)
        draws = self._split(module, graph, mesh["split"], per_rank)
        self._mine = list(range(self._pipe.get_local_rank(), number, self._pipe.size()))
        stages = [module] if number == 1 else self._cut(module, graph)
        self._tie_groups = tie_groups(self._ties, stages, self._pipe.size(), self._columns)
        kept = [stages[n] for n in self._mine]
        read = {self._ties.get(name, name) for stage in stages for name, _ in stage.named_parameters()}
        unread = {name: p.detach() for name, p in module.named_parameters() if number > 1 and name not in read}
        if number > 1:
            (drop_weights if isinstance(kept[0], SkippingStage) else prune)(module, kept)
        self.module = module
        self._replicate(mesh, kept, units)
        self._reached.watch(module, kept)
        for each in kept if self._zero else ():
            StandIns(each, order)
        self._stages, self._traced_draw = kept, traced_draw(stages, *draws)
        self._replicas = trained_apart(plan, mesh["apart"], module)
        self._is_updated = False
        shards = mesh["shard"] if self._zero else None
        self._checkpoint = Checkpoint(module, roles, self._ties, self._axis, shards, self.device, names, unread)
        self._schedule: Any = None
        if number > 1:
            held = dict(zip(self._mine, kept, strict=True))
            self._schedule = make_schedule(
                plan, held, self._share, zero=self._zero, device=self.device, group=self._pipe.get_group()
            )

    # -- Setting up

    def _split(self, module: nn.Module, graph: Graph, mesh: DeviceMesh, per_rank: Sequence[str]) -> tuple[Draws, Draws]:
        """Splits layers over the sharding axis, and checks that the network computes the same as before.

        Returns:
            What it draws in training and in evaluation.
        """
        roles = self.roles
        inputs = probe_inputs(graph, module, max(2, roles.axis_size))
        drawing = functools.partial(draws_of, module, lambda: runs(module, inputs, self._inputs))
        drawn = drawing() if dist.get_world_size() > 1 else {}
        in_evaluation = drawing(training=False) if drawn and len(self.plan.stages) > 1 else {}
        if roles.axis is not None:
            wanted = computes(module, inputs, self._inputs)
            gradients = GradientCheck(graph, module, inputs, self._inputs, wanted)
            divide_sizes(module, per_rank, roles.axis_size)
            split_modules(module, roles.modules, layouts_of(self._axis), mesh)
            with returned_by(module, {one.maker for some in roles.borders.values() for one in some}) as returned:
                for path, borders in roles.borders.items():
                    enter_by_borders(module.get_submodule(path), borders, layouts_of(self._axis), returned)
                check: Any = functools.partial(check_same, module, inputs, self._inputs, wanted, (roles, self._axis))
                found = () if per_rank else sizes_of_ranks(module, roles)
                try:
                    check()
                except PlanError:
                    if not found:
                        raise
                    divide_sizes(module, found, roles.axis_size)
                    check()
                gradients.check((roles, self._axis))
            draw_independently(module, drawn, drawing(), self._axis)
        recompute(module, roles.recomputed)
        return drawn, in_evaluation

    def _cut(self, module: nn.Module, graph: Graph) -> list[nn.Module]:
        self._names = arguments(graph, module)
        try:
            return cut(module, self.roles, len(self.plan.stages), self._names)
        except Untraced:
            scopes = {op.name: op.scope for op in graph.operators}
            ends = [
                (scopes[one.operators[1]], scopes[two.operators[0]])
                for one, two in itertools.pairwise(self.plan.stages)
            ]
            inputs = functools.partial(probe_inputs, graph, module)
            return cut_untraced(module, self.roles, ends, inputs, self._names)

    def _replicate(self, mesh: DeviceMesh, kept: Sequence[nn.Module], units: Sequence[str]) -> None:
        """Sets up data parallelism: FSDP2 under ZeRO, otherwise plain replicas whose gradients are summed."""
        stage = self.plan.stages[0]
        self._zero = stage.zero.stage if mesh["shard"].size() > 1 else 0
        self._sums, self._whole = None, list[nn.Parameter]()
        if not self._zero:
            if mesh["replicate"].size() > 1:
                # A weight of several stages of this rank is reached by the passes of each.
                holders = Counter(p for root in kept for p in root.parameters())
                passes = {p: count * self.plan.num_micro_batches for p, count in holders.items()}
                self._sums = OverlappedSums(passes, mesh["replicate"].get_group())
            return
        over = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
        low = low_precision(self.plan.training.precision)
        self._whole = spread_states(self.module, kept, units, over, low=low, frees_weights=self._zero == 3)

    # -- Training

    def parameters(self) -> list[dict[str, list[nn.Parameter]]]:
        """Parameter groups for an optimizer, one for each device mesh: fused optimizers take parameters of one mesh
        only.

        Frozen parameters are in no group: they have no gradient, and no optimizer state in checkpoints.
        """
        groups: dict[Any, list[nn.Parameter]] = {}
        for parameter in filter(lambda p: p.requires_grad, self.module.parameters()):
            groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
        # A stage may be the loss alone; optimizers need a group.
        return [{"params": some} for some in groups.values()] or [{"params": []}]

    def step(self, *data: Tensor) -> float:
        """Forward and backward passes of all micro-batches; gradients are complete afterwards.

        They are added to existing gradients, as by several backward passes of torch. In fp16, a step whose gradients
        overflow leaves no gradients, so that the optimizer changes nothing, and counts in `scaling.num_skipped`.
        Replicas that are trained apart are averaged at the beginning of the step that follows a period.

        Args:
            data: the model's inputs, then the labels: [len(rows), ...] the samples at `rows` of a global batch.

        Returns:
            The loss of the whole batch, equal on every process; where replicas are trained apart, that of the samples
            of this process's replica.
        """
        check_step(data, self._graph, len(self.rows))
        self._take_up()
        inputs, labels = self._count_in(data)
        run = self._accumulate if self._schedule is None else self._run_schedule
        earlier, num_skipped = Earlier(self.module.parameters()), self.scaling.num_skipped
        if self._sums is not None:
            self._sums.begin()
        with alike(self._axis, self.device):
            losses = run(inputs, labels)
        reached = self._reached.own()
        self._finish()
        total = self._everywhere(torch.cat([self._sum(losses)[None], reached]))
        self._reached.forget(total[1:])
        self.scaling.finish(self.module.parameters(), self._together)
        earlier.add(to_all=num_skipped == self.scaling.num_skipped)
        self._is_updated = True
        return float(total[0])

    def _count_in(self, data: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Inputs and labels on the device of this rank, once all ranks know how many labels count. A collective."""
        *inputs, labels = (x.to(self.device) for x in data)
        counts = self._count(labels).to(torch.float64) * self._reports()
        self._total = self._indices.count(counts, (*inputs, labels), self._together)
        return inputs, labels

    def evaluate(self, *data: Tensor) -> tuple[float, Tensor | None]:
        """The loss of a batch in evaluation mode, without gradients and without any effect on the training.

        Running statistics are averaged over all replicas for it. Replicas that are trained apart evaluate their own
        weights, unless `finish` has averaged them. All ranks must call this.

        Args:
            data: as for `step`.

        Returns:
            The loss as `step` returns it, and the scores of this rank's samples, in the order of `rows`; None for these
            where another stage makes them.
        """
        check_step(data, self._graph, len(self.rows))
        if self._traced_draw:
            raise refuse_draw(self._traced_draw)
        average_statistics(self.module, self._replica_groups)
        inputs, labels = self._count_in(data)
        with between_steps(self.module, self._stages, self.device), alike(self._axis, self.device):
            losses, scores = self._forward(inputs, labels)
            if scores is not None and self.roles.splits_classes:
                scores = gather_classes(scores, self._axis)
        return float(self._everywhere(self._sum(losses))), scores

    def clip_gradients(self, max_norm: float) -> float:
        """Scales the gradients of all ranks, after `step`, so that their norm together is at most `max_norm`.

        (`torch.nn.utils.clip_grad_norm_` would only see the gradients of this rank.) All ranks must call this.

        Returns:
            The norm before scaling, equal on every rank; where replicas are trained apart, the norm of this replica.
        """
        held = [(name, p, p.grad) for name, p in self.module.named_parameters() if p.grad is not None]
        square = square_of(((local_of(g), self._copies(name, p)) for name, p, g in held), self.device)
        norm = math.sqrt(float(self._everywhere(square)))
        shorten((local_of(g) for *_, g in held), norm, max_norm)
        return norm

    def _copies(self, name: str, parameter: nn.Parameter) -> float:
        """How many of the ranks that train together hold the same elements of a parameter as this rank."""
        parts = 1
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            parts = math.prod(mesh.size(i) for i, p in enumerate(parameter.placements) if not p.is_replicate())
        stages = [group.size() for aliases, group in self._tie_groups if name in aliases]
        return self._alike / parts * (stages[0] if stages else 1)

    def finish(self) -> None:
        """Averages replicas that are trained apart, so that all are equal."""
        self._take_up()
        if self._replicas is not None:
            self._replicas.finish()

    def _take_up(self) -> None:
        """Averages replicas after the optimizer's step, where a period ends there."""
        if self._is_updated and self._replicas is not None:
            self._replicas.after_step()
        self._is_updated = False

    def _sum(self, losses: Sequence[Tensor]) -> Tensor:
        """This rank's contribution to the reported loss, from the terms of its micro-batches."""
        return sum(losses, torch.zeros((), device=self.device)).double() / self.scaling.scale * self._reports()

    def _reports(self) -> bool:
        """Whether this rank reports the loss of its samples: the first of the sharding axis, in the last stage."""
        return self._axis.index == 0 and len(self.plan.stages) - 1 in self._mine

    def _everywhere(self, value: Tensor) -> Tensor:
        """The sum over all ranks that train together."""
        value = value.detach().to(torch.float64)
        if dist.get_world_size() > 1:
            dist.all_reduce(value, group=self._together)
        return value

    def _share(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The term of some samples of this rank in the loss of the whole batch, times the scale of the loss."""
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        loss = self._loss
        if self.roles.splits_classes:
            outputs = classes_last(outputs)
            loss = functools.partial(split_cross_entropy, axis=self._axis, ignored=IGNORED)
        found = run_again(None, loss, outputs, labels) if LOSS in self.roles.recomputed else loss(outputs, labels)
        return found * (self.scaling.scale / self._total)

    def _autocast(self) -> Any:
        """Autocast to formats of 2 bytes for plain replicas; FSDP2 does so by its own policy."""
        low = low_precision(self.plan.training.precision)
        return torch.autocast(self.device.type, low, enabled=low is not None and not self._zero)

    def _pieces(self, inputs: Sequence[Tensor], labels: Tensor) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(torch.split(x, self._num_samples) for x in (*inputs, labels)), strict=True)

    def _accumulate(self, inputs: Sequence[Tensor], labels: Tensor) -> list[Tensor]:
        """Runs the micro-batches of a plan of one stage; returns their terms of the loss."""
        losses, root = [], self.module
        for number, (*some, those) in enumerate(self._pieces(inputs, labels)):
            last = number == self.plan.num_micro_batches - 1
            if isinstance(root, FSDPModule):
                root.set_is_last_backward(last)
                root.set_requires_gradient_sync(last or self._zero > 1)
                root.set_requires_all_reduce(last)
                root.set_reshard_after_backward(last or self._zero == 3)
            with self._autocast():
                outputs = scores_of(root, some, self._inputs)
            loss = self._share(outputs, those)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return losses

    def _forward(self, inputs: Sequence[Tensor], labels: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """Runs the micro-batches forward; returns their terms of the loss and the scores, on the last stage."""
        losses: list[Tensor] = []
        if self._schedule is not None:
            with self._autocast():
                return losses, self._schedule.eval(**self._fed(inputs, labels, losses))
        scores = []
        for *some, those in self._pieces(inputs, labels):
            with self._autocast():
                scores.append(scores_of(self.module, some, self._inputs))
            losses.append(self._share(scores[-1], those))
        return losses, torch.cat(scores)

    def _run_schedule(self, inputs: Sequence[Tensor], labels: Tensor) -> list[Tensor]:
        """Runs the micro-batches through the pipeline; returns their terms of the loss, on the last stage."""
        losses: list[Tensor] = []
        with self._autocast():
            self._schedule.step(**self._fed(inputs, labels, losses), return_outputs=False)
        return [loss.detach() for loss in losses]

    def _fed(self, inputs: Sequence[Tensor], labels: Tensor, losses: list[Tensor]) -> dict[str, Any]:
        """The arguments of a schedule: the inputs by name, and on the last stage the labels and a list for the
        losses."""
        last = {"target": labels, "losses": losses} if len(self.plan.stages) - 1 in self._mine else {}
        return {**dict(zip(self._names, inputs, strict=True)), **last}

    def _finish(self) -> None:
        """Completes gradients: sums them over replicas, over the sharding axis where they are partial, and over the
        copies of tied weights. Buffers that code changes are averaged over replicas."""
        named = dict(self.module.named_parameters())
        if self._sums is not None:
            self._sums.finish()
        for group in self._replica_groups if self._whole else ():
            sum_gradients(self._whole, group)
        if self._axis.group is not None:
            sum_gradients(
                (p for name, p in named.items() if self._ties.get(name, name) in self.roles.summed), self._axis.group
            )
        together = self._replica_groups if self._replicas is None else self._replica_groups[1:]
        average_statistics(self.module, together, of_norms=False)
        for aliases, group in self._tie_groups:
            sum_gradients((named[name] for name in aliases & named.keys()), group)

    # -- Checkpoints

    def save(self, folder: str | Path, optimizer: torch.optim.Optimizer, **more: Any) -> None:
        """Writes weights, optimizer state and `more` (numbers, text) to a folder; any plan of the model reads them.

        Every process writes its part, after replicas that are trained apart are averaged, and running statistics of
        all replicas. A checkpoint that is there is replaced once the new one is complete.
        """
        self.finish()
        average_statistics(self.module, self._replica_groups)
        self._checkpoint.save(Path(folder), optimizer, {**more, SCALE: self.scaling.state()})

    def load(self, folder: str | Path, optimizer: torch.optim.Optimizer, **more: Any) -> dict[str, Any]:
        """Reads what `save` wrote, also under another plan.

        Args:
            folder: the folder of `save`.
            optimizer: the optimizer of this trainer; its settings (learning rates) stay as they are.
            more: what to read besides, with values of the same kinds.

        Returns:
            `more` as it was saved.

        Raises:
            UserError: the folder holds no checkpoint of this network and kind of optimizer, or a damaged one.
        """
        self._take_up()
        found = self._checkpoint.load(Path(folder), optimizer, {**more, SCALE: self.scaling.state()})
        self.scaling.restore(found.pop(SCALE))
        return found

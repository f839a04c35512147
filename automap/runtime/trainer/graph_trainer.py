"""Trains the graph of a network by a plan that is finer than its modules.

The executor that trials use runs the operators of the graph with the weights of the network, in place of the network's
code. So plans may have stages with different meshes, any sharding of single operators, split experts, ZeRO over any
axis, and replicas that are averaged periodically. A network is refused if its code does what its graph does not:
dropout, running statistics, frozen weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from automap.cluster import parse_cluster
from automap.errors import ModelError, PlanError
from automap.hints import Hints
from automap.plan import Plan, model_ref
from automap.price.evaluator import Evaluator
from automap.problem import Problem
from automap.runtime.executor.optimizer import Masters
from automap.runtime.executor.pipeline import Pipeline
from automap.runtime.executor.runner import DTYPES, join, replicas_of
from automap.runtime.executor.stage_executor import StageExecutor
from automap.runtime.mesh_groups import Groups
from automap.runtime.number_formats import set_tf32
from automap.runtime.operators.apply import value_of
from automap.runtime.sharded_operators.call import with_attributes
from automap.runtime.tensor_layout import Box, StageTensor
from automap.runtime.trainer.ended_processes import names_the_ended
from automap.runtime.trainer.gradient_ends import gradient_end
from automap.runtime.trainer.gradients import Earlier, shorten, square_of
from automap.runtime.trainer.graph_checkpoint import GraphCheckpoint
from automap.runtime.trainer.loss_scaling import LossScale
from automap.runtime.trainer.losses import IGNORED
from automap.runtime.trainer.module_tree import tied_names
from automap.runtime.trainer.process_mesh import own_device
from automap.runtime.trainer.running_statistics import StatisticsKept, changed_buffers
from automap.runtime.trainer.same_code import PROBED, difference
from automap.runtime.trainer.skipping_stages import drop_weights
from automap.runtime.trainer.split_check import computes, probe_inputs
from automap.runtime.trainer.step_data import Indices, check_step
from automap.runtime.trainer.supported_plans import INSTEAD
from automap.runtime.trainer.training_graph import input_names, scores_of
from ir.frozen import names_in_file
from ir.graph import Graph
from ir.operators.experts import COMBINE, DISPATCH

LOSS_KIND = "SoftmaxCrossEntropyLoss"
ROUNDING = 1000.0
"""Units in the last place by which scores may differ in training and evaluation (assumed): the fast path of torch's
encoder layers differs by some tens of them in float64, a dropout by far more."""
SCALE = "loss scale"


@dataclass(frozen=True)
class Whole:
    """A network before anything is changed."""

    values: Mapping[str, Tensor]
    """Its parameters and buffers under all of their names."""
    inputs: list[Tensor]
    """Random inputs."""
    scores: Tensor
    """The scores that it computes from them, without dropout."""
    trained: Tensor
    """The scores that it computes from them as it is, in training mode or not."""
    end: str
    """Function of its code that ends or changes gradients; empty if there is none, see `gradient_end`."""

    @classmethod
    def of(cls, module: nn.Module, graph: Graph) -> Self:
        """Keeps the tensors of a network, and runs it three times."""
        inputs, names = probe_inputs(graph, module, PROBED), input_names(graph, module)
        values = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        found = computes(module, inputs, names)
        trained = found
        if not any(isinstance(child, _BatchNorm) for child in module.modules()):
            devices = [] if found.device.type == "cpu" else [found.device]
            with torch.no_grad(), torch.random.fork_rng(devices=devices), StatisticsKept(module):
                trained = scores_of(module, inputs, names)
        return cls({**values, **buffers}, inputs, found, trained, gradient_end(module, inputs, names))


@names_the_ended
class GraphTrainer:
    """A network whose graph is trained by a plan; `ModuleTrainer` says what its methods do.

    `parameters` are this rank's parts of the weights, under ZeRO vectors of several, in float32 where the plan computes
    in less. Where replicas are trained apart, they are averaged at the beginning of the step after a period.

    Attributes:
        why: why modules cannot run the plan.
        rows: [samples] positions in a global batch of the samples that this rank reads, by micro-batch; stages in the
            middle of a pipeline read none.
        device: the device of the inputs.
        scaling: the scale of the loss, for plans in fp16, and the number of steps that were skipped for it.
    """

    def __init__(self, module: nn.Module, plan: Plan, graph: Graph, whole: Whole, finer: PlanError) -> None:
        """Takes the weights of a network; the module keeps none.

        Raises:
            PlanError: the graph cannot stand for the network.
        """
        _check_code(module, graph, whole, finer)
        self.plan, self.why, self.device = plan, str(finer), own_device()
        self._graph = graph = as_trained(graph, module)
        _check_scores(graph, whole, self.device)
        self.scaling = LossScale(self.device, on=plan.training.precision == "fp16")
        values = {name: tensor.detach().to(self.device) for name, tensor in whole.values.items()}
        for tensor in {id(t): t for t in values.values()}.values():
            dist.broadcast(tensor, 0)
        self._labels, self._inputs = graph.operators[-1].inputs[1], [tensor.name for tensor in graph.data_inputs]
        self._executors: dict[int, StageExecutor]
        self._pipeline, self._executors = _joined(plan, graph, values, self.device)
        self._masters = Masters(
            {f"{n}.{name}": leaf for n, e in self._executors.items() for name, leaf in e.parameters.items()}
        )
        self._replicas = replicas_of(plan, self._executors, self._masters.masters)
        ties = tied_names(module)
        read = {ties.get(n, n) for t in graph.parameters for n in names_in_file(graph, t.name)} | ties.keys()
        # Buffers, and parameters that no output reads.
        persistent = {n: values[n] for n in module.state_dict() if n not in read}
        self._checkpoint = GraphCheckpoint(graph, ties, self._executors, self._masters, persistent, values)
        self._checkpoint.begin_with(values)
        self._replica = self._own_replica()
        drop_weights(module, ())
        self._rows()
        self._given: dict[str, Tensor] = {}
        self._indices = Indices(graph)
        self._is_updated = False

    def _rows(self) -> None:
        """Sets `rows`: the samples between the first and the last that any input of this rank's stages needs."""
        spans = [self._box(executor, tensor)[0] for executor in self._executors.values() for tensor in executor.data]
        self._first = min((start for start, _ in spans), default=0)
        self._num_samples = max((stop for _, stop in spans), default=0) - self._first
        starts = torch.arange(self.plan.num_micro_batches)[:, None] * self.plan.samples_per_micro_batch
        self.rows = (starts + self._first + torch.arange(self._num_samples)).flatten()

    @staticmethod
    def _box(executor: StageExecutor, tensor: StageTensor) -> Box:
        return tensor.boxes[executor.program.mesh.devices.index(dist.get_rank())]

    # -- Training

    def parameters(self) -> list[dict[str, list[Tensor]]]:
        """The parameters of this rank, for an optimizer."""
        return [{"params": self._masters.masters}]

    def parts(self) -> Iterator[Tensor]:
        """The parameters of this rank that are not whole weights."""
        masters, tensors = iter(self._masters.masters), self._graph.tensors
        for executor in self._executors.values():
            for name, master in zip(executor.parameters, masters, strict=False):
                if name not in tensors or tensors[name].shape != tuple(master.shape):
                    yield master

    def step(self, *data: Tensor) -> float:
        """Forward and backward passes of all micro-batches; see `ModuleTrainer.step`.

        Returns:
            The loss of the whole batch; where replicas are trained apart, that of the samples of this rank's replica.
        """
        check_step(data, self._graph, len(self.rows))
        self._take_up()
        scale = self._count_in(data)
        earlier, num_skipped = Earlier(self._masters.masters), self.scaling.num_skipped
        loss = self._pipeline.step(self._part)
        self._masters.take_gradients()
        self.scaling.finish(self._masters.masters, self._replica)
        earlier.add(to_all=num_skipped == self.scaling.num_skipped)
        self._is_updated = True
        return self._sum(loss / scale if loss is not None and self._reports() else 0.0)

    def _count_in(self, data: Sequence[Tensor]) -> float:
        """Stores the data of a batch, and divides its loss by the labels of all ranks; returns the loss scale."""
        self._given = dict(zip((*self._inputs, self._labels), (x.to(self.device) for x in data), strict=True))
        own = torch.tensor(self._own_count(), device=self.device)
        count, scale = self._indices.count(own, tuple(self._given.values()), self._replica), self.scaling.scale
        for executor in self._executors.values():
            executor.scale = scale / count
        return scale

    def evaluate(self, *data: Tensor) -> tuple[float, Tensor | None]:
        """The loss of a batch, and the scores of this rank's samples; see `ModuleTrainer.evaluate`."""
        check_step(data, self._graph, len(self.rows))
        self._publish()
        scale = self._count_in(data)
        for executor in self._executors.values():
            executor.scores = {}
        loss = self._pipeline.evaluate(self._part)
        found = dict[int, Tensor]()
        for executor in self._executors.values():
            found |= executor.scores or {}
            executor.scores = None
        own = slice(self._first, self._first + self._num_samples)
        scores = torch.cat([found[number][own] for number in sorted(found)]) if found and self._num_samples else None
        return self._sum(loss / scale if loss is not None and self._reports() else 0.0), scores

    def clip_gradients(self, max_norm: float) -> float:
        """Scales the gradients of all ranks; see `ModuleTrainer.clip_gradients`."""
        norm = math.sqrt(self._sum(float(square_of(self._whole_gradients(), self.device))))
        shorten((master.grad for master in self._masters.masters if master.grad is not None), norm, max_norm)
        return norm

    def _whole_gradients(self) -> Iterator[tuple[Tensor, float]]:
        """The gradients of this rank's stages, each whole, and the number of ranks that have it. A collective."""
        masters = iter(self._masters.masters)
        for number, executor in self._executors.items():
            mesh = executor.program.mesh
            ranks = len(mesh.devices) if mesh.apart is None else mesh.replicas.count(mesh.apart.index)
            before = {name for stage in self._pipeline.stages[:number] for name in stage.parameters}
            for leaf, master in zip(executor.parameters, masters, strict=False):
                wholes = {} if master.grad is None else executor.wholes({leaf: master.grad})
                yield from ((whole, ranks) for name, whole in wholes.items() if name not in before)

    def finish(self) -> None:
        """Averages replicas that are trained apart, so that all are equal."""
        self._take_up()
        if self._replicas is not None:
            self._replicas.finish()
            self._publish()

    def _take_up(self) -> None:
        """Copies the weights that the optimizer has changed since the last step to the executors."""
        if self._is_updated:
            if self._replicas is not None:
                self._replicas.after_step()
            self._publish()
        self._is_updated = False

    def _publish(self) -> None:
        self._masters.publish()
        self._pipeline.refresh()

    def _part(self, name: str, box: Box, micro_batch: int) -> Tensor:
        """The part of an input that a box of a micro-batch describes."""
        start, stop = (micro_batch * self._num_samples - self._first + end for end in box[0])
        part = self._given[name][start:stop][(slice(None), *(slice(*span) for span in box[1:]))]
        return part.to(self._dtype) if part.is_floating_point() else part

    @property
    def _dtype(self) -> torch.dtype:
        return next(executor.program.dtype for executor in self._executors.values())

    def _last(self) -> tuple[StageExecutor, StageTensor] | None:
        """The stage of this rank that makes the loss, and its labels."""
        for executor in self._executors.values():
            if executor.loss is not None:
                return executor, next(tensor for tensor in executor.data if tensor.name == self._labels)
        return None

    def _own_count(self) -> float:
        """The labels that this rank alone counts: the first of its stage that holds them."""
        last = self._last()
        if last is None:
            return 0.0
        executor, tensor = last
        box = self._box(executor, tensor)
        if executor.program.mesh.devices[tensor.boxes.index(box)] != dist.get_rank():
            return 0.0
        parts = (self._part(tensor.name, box, number) for number in range(self.plan.num_micro_batches))
        return float(sum((part != IGNORED).sum() for part in parts))

    def _reports(self) -> bool:
        """Whether this rank reports the loss of its replica: the first rank of it in the last stage."""
        last = self._last()
        if last is None:
            return False
        mesh, axis = last[0].program.mesh, last[0].program.mesh.apart
        own = 0 if axis is None else mesh.replicas.index(axis.index)
        return mesh.devices[own] == dist.get_rank()

    def _sum(self, value: float) -> float:
        """The sum over the ranks that train together."""
        found = torch.tensor(value, dtype=torch.float64, device=self.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(found, group=self._replica)
        return float(found)

    def _own_replica(self) -> dist.ProcessGroup | None:
        """The ranks of this rank's replica; None = all ranks, where no replicas are trained apart."""
        ranks: dict[int, set[int]] = {}
        for stage in self._pipeline.stages:
            for rank, replica in zip(stage.ranks, stage.replicas, strict=False):
                ranks.setdefault(replica, set()).add(rank)
        groups = {replica: dist.new_group(sorted(ranks[replica])) for replica in sorted(ranks)}
        return next((groups[replica] for replica in groups if dist.get_rank() in ranks[replica]), None)

    # -- Checkpoints

    def save(self, folder: str | Path, optimizer: torch.optim.Optimizer, **more: Any) -> None:
        """Writes a checkpoint that any plan of the model reads; replicas that are trained apart are averaged first."""
        self.finish()
        self._checkpoint.save(Path(folder), optimizer, {**more, SCALE: self.scaling.state()})

    def load(self, folder: str | Path, optimizer: torch.optim.Optimizer, **more: Any) -> dict[str, Any]:
        """Reads what `save` of any trainer wrote; see `ModuleTrainer.load`."""
        self._take_up()
        found = self._checkpoint.load(Path(folder), optimizer, {**more, SCALE: self.scaling.state()})
        self._publish()
        self.scaling.restore(found.pop(SCALE))
        return found


def as_trained(graph: Graph, module: nn.Module) -> Graph:
    """The graph with three facts that ONNX files do not state: labels may be `IGNORED`, padding rows of embeddings are
    not trained, and experts take any number of tokens."""
    fixed = {
        path: child.padding_idx
        for path, child in module.named_modules()
        if isinstance(child, nn.Embedding) and child.padding_idx is not None
    }
    *operators, loss = (
        with_attributes(op, padding_idx=fixed[op.scope]) if op.kind == "Gather" and op.scope in fixed else op
        for op in graph.operators
    )
    operators.append(with_attributes(loss, ignore_index=IGNORED))
    return with_room(replace(graph, operators=tuple(operators), sha256=model_ref(graph).sha256))


def with_room(graph: Graph) -> Graph:
    """The graph with a slot for every token in every expert, so that no token is dropped. In the graphs that are
    searched, experts have fewer slots and drop the tokens above their capacity."""
    tensors, operators, grown = dict(graph.tensors), [], dict[str, int]()
    for op in graph.operators:
        tokens = max((grown[name] for name in op.inputs if name in grown), default=0)
        if op.kind == DISPATCH:
            tokens = prod(tensors[op.inputs[0]].shape[:-1]) // dict(op.attributes).get("groups", 1)
        for name in op.outputs if tokens and op.kind != COMBINE else ():
            shape = list(tensors[name].shape)
            shape[-2], grown[name] = tokens, tokens
            tensors[name] = replace(tensors[name], shape=tuple(shape))
        is_limited = tokens and op.kind in (DISPATCH, COMBINE)
        operators.append(with_attributes(op, capacity=tokens) if is_limited else op)
    return replace(graph, operators=tuple(operators), tensors=tensors)


def _joined(
    plan: Plan, graph: Graph, values: Mapping[str, Tensor], device: torch.device
) -> tuple[Pipeline, dict[int, StageExecutor]]:
    """The pipeline of a plan on this rank."""
    problem = Problem(graph=graph, cluster=parse_cluster(plan.cluster), training=plan.training, hints=Hints())
    double = any(tensor.dtype == torch.float64 for tensor in values.values() if isinstance(tensor, Tensor))
    dtype = torch.float64 if double else DTYPES[problem.precision]
    set_tf32(on=problem.precision == "tf32")
    return join(Evaluator(problem), plan, dist.get_rank(), values, Groups(), dtype=dtype, device=device)


def computes_alike(trained: Tensor, scores: Tensor) -> bool:
    """Whether a module computes the same in training and evaluation, for which torch may have kernels of their own."""
    eps = torch.finfo(scores.dtype).eps
    most = min(ROUNDING * eps, 0.01) * float(scores.abs().max())
    return float((trained - scores).abs().max()) <= most


def _check_code(module: nn.Module, graph: Graph, whole: Whole, finer: PlanError) -> None:
    """Refuses networks whose code does what their graph does not."""
    faults: list[tuple[str, object, str, str]] = []
    if not computes_alike(whole.trained, whole.scores):
        dropouts = [path for path, child in module.named_modules() if isinstance(child, _DropoutNd) and child.p > 0.0]
        where = f".{dropouts[0]}" if dropouts else ""
        faults.append((f"module{where}", "dropout", "dropout is not part of the graph", "Set it to 0. "))
    faults += [
        (f"module.{path}", type(child).__name__, "the graph keeps no running statistics", "")
        for path, child in module.named_modules()
        if isinstance(child, _BatchNorm) and child.track_running_stats
    ]
    faults += [
        (f"module.{name}", "changed in training", "the graph keeps no buffers that code changes", "")
        for name in changed_buffers(module)
    ]
    faults += [
        (f"module.{name}", "frozen", "a graph in place of modules trains all weights", "")
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad
    ]
    if whole.end:
        faults.append(("module", whole.end, "the graph has gradients where the code ends or changes them", ""))
    loss = graph.operators[-1]
    if loss.kind != LOSS_KIND or dict(loss.attributes).get("reduction") != "sum":
        faults.append(("plan.training.loss", loss.kind, "the graph is trained by the built-in cross-entropy alone", ""))
    faults += [
        (f"model.{name}", "no value", "code makes this constant, and the exported file has no value of it", "")
        for name in _valueless(graph, whole)
    ]
    for field, value, what, repair in faults[:1]:
        raise PlanError(
            f"modules cannot run the plan ({finer}), and its graph cannot take their place: {what}",
            field=field, value=value, repair=f"{repair}Or search with --target automap." if repair else INSTEAD,
        )  # fmt: skip


def _valueless(graph: Graph, whole: Whole) -> Iterator[str]:
    """Buffers and constants that neither the graph nor the network has values of."""
    for tensor in graph.tensors.values():
        if tensor.role in ("buffer", "constant") and tensor.name not in graph.producer:
            try:
                value_of(graph, tensor.name, whole.values, PROBED)
            except ModelError:
                yield tensor.name


def _check_scores(graph: Graph, whole: Whole, device: torch.device) -> None:
    """Refuses a graph that computes something else than the network, in float32."""
    try:
        error, limit = difference(graph, whole.values, whole.inputs, whole.scores)
    except RuntimeError as fault:  # of an operator that holds at the exported batch alone; alike on all ranks
        raise PlanError(
            f"modules cannot run the plan, and its graph cannot be computed for {PROBED} samples ({fault})",
            field="model", value=graph.name, repair=INSTEAD,
        ) from None  # fmt: skip
    wrong = torch.tensor(float(not error <= limit), device=device)
    dist.all_reduce(wrong)
    if wrong:
        raise PlanError(
            "computes something else than the graph that was searched", field="module",
            value=f"{error:.1e} where {limit:.1e} is rounding", repair="Export the module again, and search with that.",
        )  # fmt: skip

"""The common input and output of all exports: the numbers of a plan, and the files and notes that a writer makes of
them.

A `Run` has the numbers of a plan for which configurations have settings. It can be made only for plans that the target
can express (`automap.verify.target`). Writers state in notes what they leave to the trainer;
`automap.export.rounding` states where the trainer differs from the plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from automap.errors import PlanError
from automap.plan import Degrees, Plan, parse_devices
from automap.price.degrees import degrees_of
from automap.price.estimate import processes, torchrun
from automap.price.evaluator import Evaluator
from automap.price.lowered_plan import LoweredPlan, Segment
from automap.price.plan_reader import lower_plan
from automap.problem import Problem
from automap.targets import Target
from automap.verify import Verifier
from ir.blocks import Blocks
from ir.factors import Signature
from ir.graph import Graph, Operator
from ir.groups import fused_groups
from ir.layers import layer_units, layers_with
from ir.operators.experts import DISPATCH


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """One line of the report on what an export kept."""

    about: str
    """The decision of the plan."""
    kept: Literal["exact", "rounded", "left to you"]
    """`rounded`: the trainer does something slightly different."""
    text: str
    cost_s: float | None = None
    """Extra seconds of a step because of the difference, negative if it is faster; null unless `rounded`, or where it
    is not priced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """The files of one configuration."""

    target: str
    version: str
    """Version of the trainer that reads the files."""
    files: Mapping[str, str]
    """Name -> text."""
    launch: str
    """The command that starts a training with the files."""
    notes: tuple[Note, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of a model that configurations state."""

    num_layers: int
    """Layers, see `ir.layers`."""
    has_experts: tuple[bool, ...]
    """[layers] whether each has experts."""
    hidden: int | None
    """Last dim of the tensor that passes from layer to layer; null without layers."""
    heads: int | None
    """Heads of attention; null without attention."""
    has_biases: bool
    """Whether layers add parameters with one dim to the results of matrix products."""
    experts: int
    """Experts of a layer, 0 for none."""
    top_k: int
    """Experts of a token, 0 for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The numbers of a plan for which configurations have settings."""

    plan: Plan
    problem: Problem
    target: Target
    degrees: Degrees
    layers: tuple[tuple[int, ...], ...]
    """[chunks] numbers of the layers of each, from 0, in dataflow order."""
    recompute: Literal["none", "selective", "full"]
    whole_head: str | None
    """The product with the vocabulary, if the ranks that split weights all compute it whole because their number does
    not divide it; otherwise null."""
    shape: ModelShape
    devices: int
    """Devices of the plan."""
    lowered: LoweredPlan
    """The plan in numbers."""
    evaluator: Evaluator
    """The problem in numbers."""

    @property
    def processes(self) -> tuple[int, ...]:
        """[hosts] processes on each host of the plan."""
        return processes(self.plan, self.problem.cluster)

    @property
    def torchrun(self) -> str:
        """The beginning of a command that starts one process a device."""
        return torchrun(self.plan, self.problem.cluster)

    @property
    def gradients_in_4_bytes(self) -> bool:
        """Whether gradients are kept wider than activations."""
        return self.problem.state_bytes[1] >= 4.0 and self.problem.activation_bytes < 4.0

    @property
    def other_optimizer(self) -> str:
        """The optimizer of the plan in parentheses, for notes; empty for Adam, which most scripts take."""
        kind = self.problem.training.optimizer
        return "" if kind == "adam" else f" (the plan is for {kind})"


def read_run(plan: Plan, problem: Problem, target: Target) -> Run:
    """The numbers of a plan.

    Args:
        problem: the problem of the plan, on its own cluster and under its own training.

    Raises:
        PlanError: the plan is malformed, illegal, or the target cannot express it; names all that it cannot.
    """
    evaluator = Evaluator(problem)
    lowered = lower_plan(plan, evaluator)
    refused = Verifier(problem).beyond(plan, target.name)
    if refused:
        # Several stages may have the same fault.
        places = {violation.what: violation.where for violation in reversed(refused)}
        what = "; ".join(f"{where}: {text}" for text, where in reversed(places.items()))
        raise PlanError(
            f"{target.name} cannot express this plan: {what}",
            field="target",
            value=target.name,
            repair=f"Search with --target {target.name}, or export for another target.",
        )
    found = degrees_of(lowered, evaluator)
    layers = numbered_layers(problem.graph, evaluator.blocks)
    chunks = [tuple(layer for s in chunk for layer in layers.get(s.unit, ())) for chunk in lowered.chunks]
    segments = [segment for chunk in lowered.chunks for segment in chunk]
    inside = [segment for segment in segments if segment.unit in layers or not layers]
    again = {bool(segment.recomputed.any()): bool(segment.recomputed.all()) for segment in inside}
    devices = {device for stage in plan.stages for device in parse_devices(stage.devices)}
    return Run(
        plan=plan,
        problem=problem,
        target=target,
        degrees=found[0],
        layers=tuple(chunks),
        recompute="none" if True not in again else "full" if again[True] else "selective",
        whole_head=_whole_head(lowered, evaluator, [s for s in segments if s.unit not in layers], found[0]),
        shape=shape_of(problem.graph, evaluator.blocks, layers),
        devices=len(devices),
        lowered=lowered,
        evaluator=evaluator,
    )


def signatures(run: Run) -> Iterator[tuple[Operator, tuple[Signature, ...]]]:
    """The operators that depend on data, each with its signature on every mesh axis."""
    return ((op, placed) for _, op, placed in staged_signatures(run))


def staged_signatures(run: Run) -> Iterator[tuple[int, Operator, tuple[Signature, ...]]]:
    """The operators that depend on data, each with the number of its stage and its signature on every mesh axis."""
    for number, chunk in enumerate(run.lowered.chunks):
        for segment in chunk:
            unit = run.evaluator.blocks.units[segment.unit]
            table = run.evaluator.tables.linkage.types[unit.type].signatures
            begin = segment.first - int(run.evaluator.tables.spans[unit.type])
            for row, chosen in enumerate(segment.chosen.tolist(), begin):
                op = run.problem.graph.operators[unit.start + row]
                yield number, op, tuple(table[row][value] for value in chosen)


def _whole_head(lowered: LoweredPlan, evaluator: Evaluator, outside: Sequence[Segment], degrees: Degrees) -> str | None:
    """The largest product outside of the layers that is whole on an axis of weights."""
    axes = [lowered.axes.index(axis) for axis, use in degrees.axes.items() if use == "tensor"]
    found: list[tuple[float, str]] = []
    for segment in outside:
        unit = evaluator.blocks.units[segment.unit]
        table = evaluator.tables.linkage.types[unit.type].signatures
        begin = segment.first - int(evaluator.tables.spans[unit.type])
        for row, chosen in enumerate(segment.chosen, begin):
            op = evaluator.problem.graph.operators[unit.start + row]
            flops = op.forward_flops.at(1)
            if flops > 0.0 and any(not table[row][chosen[axis]].divides_work for axis in axes):
                found.append((flops, op.name))
    return max(found)[1] if found else None


def numbered_layers(graph: Graph, blocks: Blocks) -> dict[int, range]:
    """Number of a unit of `layer_units` -> the numbers of its layers, from 0."""
    times = layer_units(graph, blocks)
    ends = itertools.accumulate(times.values())
    return {number: range(end - times[number], end) for number, end in zip(times, ends, strict=True)}


def shape_of(graph: Graph, blocks: Blocks, layers: Mapping[int, range]) -> ModelShape:
    """The sizes of a model, given the layers of its units, as `numbered_layers` says them."""
    units = [blocks.units[number] for number in layers]
    boundary = units[0].boundary if units else None
    routers = [op for op in graph if op.kind == DISPATCH]
    return ModelShape(
        num_layers=sum(map(len, layers.values())),
        has_experts=layers_with(graph, blocks, DISPATCH),
        hidden=graph.tensors[boundary].shape[-1] if boundary else None,
        heads=_num_heads(graph),
        has_biases=any(_adds_bias(graph, op) for unit in units for op in graph.operators[unit.start : unit.stop]),
        # The dispatch makes [experts, slots, hidden] and reads [tokens, experts of each token].
        experts=graph.tensors[routers[0].outputs[0]].shape[0] if routers else 0,
        top_k=graph.tensors[routers[0].inputs[1]].shape[-1] if routers else 0,
    )


def _num_heads(graph: Graph) -> int | None:
    """The heads of the first attention of a model; None without attention, or where they are not stated."""
    attention = next((group for group in fused_groups(graph) if group.kind == "attention"), None)
    found = None
    for op in [graph.operators[index] for index in attention.members] if attention else ():
        queries = graph.tensors[op.inputs[0]].shape
        if op.kind == "Softmax":
            found = graph.tensors[op.outputs[0]].shape[1]  # of scores [samples, heads, queries, keys]
        elif op.kind == "Attention":
            found = queries[1] if len(queries) == 4 else dict(op.attributes).get("q_num_heads")
    return found


def _adds_bias(graph: Graph, op: Operator) -> bool:
    """Whether an operator adds a parameter of one dim."""
    return op.kind in ("Add", "Gemm") and any(_is_vector(graph, name) for name in op.inputs)


def _is_vector(graph: Graph, name: str) -> bool:
    return graph.is_weight(name) and len(graph.tensors[name].shape) == 1


def each_host(run: Run) -> str:
    """The instruction for plans with several hosts: what to start on each of them."""
    text = f"Start it on each of the {len(run.processes)} hosts, with the name or address of the first one for HOST"
    if run.target.name == "accelerate":
        text += ", and with --machine_rank 0 on the first host, 1 on the second, and so on"
    return text


def header(run: Run, lines: Sequence[str] = (), *, version: str | None = None) -> str:
    """Lines of comment for the top of a file: who wrote it, for which version, and from what.

    Args:
        lines: more of them.
        version: the version of the trainer that reads the file; None = that of the target.
    """
    estimate = run.plan.estimate
    text = [
        f"Written by AutoMAP for {version or run.target.version}.",
        f"Model {run.plan.model.name}, {run.devices} devices, global batch {run.problem.training.global_batch}.",
        *([f"Predicted: {estimate.step_time_s:.4g} s a step."] if estimate is not None else []),
        *([f"{each_host(run)}."] if len(run.processes) > 1 else []),
        *lines,
    ]
    return "".join(f"# {one_line(line)}\n" for line in text)


def one_line(text: str) -> str:
    """A text that is safe in a comment of a script: names of models are untrusted, and a line break would end the
    comment."""
    return "".join(letter if letter.isprintable() else " " for letter in text)

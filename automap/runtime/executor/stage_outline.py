"""What every stage of a plan holds, reads and writes, and in which placements: known on all ranks before anything runs.

Views of parameters and constants are made in every stage that reads them. A parameter lies in a stage as its readers
want it, whole where they differ. The gradient of what depends on parameters alone stays partial on an axis if any
reader leaves it so: it is summed once a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from automap.plan import Plan
from automap.price.evaluator import Evaluator
from automap.price.lowered_plan import LoweredPlan
from automap.runtime.mesh_groups import Mesh
from automap.runtime.operators.base import torch_dtype
from automap.runtime.stage_program import Crossing
from automap.runtime.tensor_layout import PipelineLayouts, Placements
from ir.factors import BROADCAST, PARTIAL, Signature, gradient_placement
from ir.graph import Graph, Operator
from ir.loss import has_loss


@dataclass(frozen=True, kw_only=True)
class Planned:
    """An operator with what the plan says of it."""

    op: Operator
    unit: int
    signatures: tuple[Signature, ...]
    """On each axis of the plan."""
    recomputed: bool


@dataclass
class Outline:
    """One stage."""

    number: int
    mesh: Mesh
    layouts: PipelineLayouts
    graph: Graph
    dtype: torch.dtype
    """Of floating-point tensors."""
    constants: tuple[Operator, ...]
    """Operators that depend on nothing, in order: made once, whole on every rank."""
    operators: tuple[Planned, ...]
    trained: frozenset[str]
    """Tensors of the graph that carry a gradient."""
    lies: dict[str, Placements] = field(default_factory=dict)
    """Placement of every tensor where it is made, held or arrives."""
    returns: dict[str, Placements] = field(default_factory=dict)
    """Placement in which the maker of a tensor, or the end of the step, takes its gradient."""
    given: dict[tuple[int, int], Placements] = field(default_factory=dict)
    """(operator, operand) -> placement in which the operator hands the operand's gradient back."""
    inputs: tuple[Crossing, ...] = ()
    outputs: tuple[Crossing, ...] = ()
    data: tuple[Crossing, ...] = ()
    parameters: dict[str, Crossing] = field(default_factory=dict)
    stored: tuple[str, ...] = ()
    """Buffers and constants of the file that are read, whole on every rank."""
    tied: tuple[str, ...] = ()
    loss: str | None = None

    def wants(self, position: int, slot: int) -> Placements:
        """In which placement an operator reads an operand."""
        return self.clean(tuple(s.inputs[slot] for s in self.operators[position].signatures))

    def clean(self, placements: Placements) -> Placements:
        """B on axes of one rank."""
        return tuple(p if axis.size > 1 else BROADCAST for p, axis in zip(placements, self.mesh.axes, strict=True))

    def crossing(self, name: str, placements: Placements) -> Crossing:
        """A tensor that lies so."""
        tensor = self.graph.tensors[name]
        return Crossing(
            name=name,
            placements=placements,
            shape=tensor.shape_at(self.layouts.samples),
            dtype=self.dtype if tensor.is_float else torch_dtype(tensor.dtype),
            carries_gradient=name in self.trained,
            boxes=self.layouts.boxes(tensor, placements),
        )


def outline(
    plan: Plan, lowered: LoweredPlan, evaluator: Evaluator, meshes: Sequence[Mesh], dtype: torch.dtype = torch.float32
) -> tuple[Outline, ...]:
    """All stages of a plan.

    Args:
        plan: of the evaluator's problem.
        lowered: `automap.price.plan_reader.to_choice` of it.
        evaluator: of the problem.
        meshes: see `automap.runtime.mesh_groups.make_meshes`.
        dtype: of floating-point tensors.

    Raises:
        PlanError: samples or dims cannot be split so.
    """
    graph = evaluator.problem.graph
    homes = _homes(lowered, evaluator)
    trained, sampled = _trained(graph), _sampled(graph)
    stages = []
    for number, mesh in enumerate(meshes):
        mine = {i for i, (chunk, _) in homes.items() if chunk == number}
        needed, constants = _needed(graph, mine)
        stages.append(
            Outline(
                number=number,
                mesh=mesh,
                layouts=PipelineLayouts(mesh, plan.samples_per_micro_batch),
                graph=graph,
                dtype=dtype,
                constants=tuple(graph.operators[i] for i in sorted(constants)),
                operators=tuple(homes[i][1] for i in sorted(mine | needed)),
                trained=trained,
            )
        )
    made = {name: tuple(s.outputs[k] for s in planned.signatures)
            for _, planned in homes.values() for k, name in enumerate(planned.op.outputs)}  # fmt: skip
    for stage in stages:
        _place(stage, made)
    for stage in stages:
        _cross(stage, stages, made)
        _return(stage, sampled)
    return tuple(stages)


def _homes(lowered: LoweredPlan, evaluator: Evaluator) -> dict[int, tuple[int, Planned]]:
    """Operator -> the stage that runs it, and how."""
    graph, linkage = evaluator.problem.graph, evaluator.tables.linkage
    found = {}
    for number, segments in enumerate(lowered.chunks):
        for segment in segments:
            unit = linkage.blocks.units[segment.unit]
            first = segment.first - int(evaluator.tables.spans[unit.type])
            for k, chosen in enumerate(segment.chosen):
                table = linkage.types[unit.type].signatures[first + k]
                index = unit.start + first + k
                found[index] = (
                    number,
                    Planned(
                        op=graph.operators[index],
                        unit=segment.unit,
                        signatures=tuple(table[int(value)] for value in chosen),
                        recomputed=bool(segment.recomputed[k]),
                    ),
                )
    return found


def _trained(graph: Graph) -> frozenset[str]:
    """Tensors that depend on a parameter and carry a gradient."""
    found = {t.name for t in graph.tensors.values() if t.role == "parameter" and t.is_float}
    for op in graph.operators:
        if any(name in found for name in op.inputs):
            found.update(name for name in op.outputs if graph.tensors[name].is_float)
    return frozenset(found)


def _sampled(graph: Graph) -> frozenset[str]:
    """Tensors that depend on data."""
    found = {t.name for t in graph.tensors.values() if t.role == "input"}
    for op in graph.operators:
        if any(name in found for name in op.inputs):
            found.update(op.outputs)
    return frozenset(found)


def _needed(graph: Graph, mine: set[int]) -> tuple[set[int], set[int]]:
    """Views outside a stage that it must make as well, and constants."""
    views: set[int] = set()
    constants: set[int] = set()
    queue = sorted(mine)
    while queue:
        for name in graph.operators[queue.pop()].inputs:
            index = graph.producer.get(name)
            if index is None or index in mine or index in views or index in constants:
                continue
            maker = graph.operators[index]
            if maker.is_constant or maker.is_view:
                (constants if maker.is_constant else views).add(index)
                queue.append(index)
    return views, constants


def _place(stage: Outline, made: Mapping[str, Placements]) -> None:
    """Fills `lies`, `data`, `parameters` and `stored`."""
    graph = stage.graph
    readers: dict[str, list[Placements]] = {}
    for position, planned in enumerate(stage.operators):
        for slot, name in enumerate(planned.op.inputs):
            readers.setdefault(name, []).append(stage.wants(position, slot))
        for name in planned.op.outputs:
            stage.lies[name] = stage.clean(made[name])
    whole = (BROADCAST,) * len(stage.mesh.axes)
    for op in stage.constants:
        stage.lies.update(dict.fromkeys(op.outputs, whole))
    stored = [n for op in stage.constants for n in op.inputs if n not in graph.producer]
    for name, wanted in readers.items():
        tensor = graph.tensors[name]
        if name in graph.producer:
            continue
        if tensor.role in ("parameter", "input"):
            alike = [{w[a] for w in wanted} for a in range(len(whole))]
            placements = tuple(p.pop() if len(p) == 1 else BROADCAST for p in alike)
            stage.lies[name] = tuple(BROADCAST if p == PARTIAL else p for p in placements)
        else:
            stored.append(name)
            stage.lies[name] = whole
    stage.stored = tuple(dict.fromkeys(stored))
    stage.data = tuple(stage.crossing(n, stage.lies[n]) for n in readers if graph.tensors[n].role == "input")
    stage.parameters = {n: stage.crossing(n, stage.lies[n]) for n in readers if graph.tensors[n].role == "parameter"}


def _cross(stage: Outline, stages: Sequence[Outline], made: Mapping[str, Placements]) -> None:
    """Fills `inputs`, `outputs`, `tied` and `loss`."""
    own = {name for planned in stage.operators for name in planned.op.outputs}

    def entering(other: Outline) -> list[str]:
        inside = {name for planned in other.operators for name in planned.op.outputs}
        inside.update(name for op in other.constants for name in op.outputs)
        names = dict.fromkeys(name for planned in other.operators for name in planned.op.inputs)
        return [n for n in names if n in other.graph.producer and n not in inside]

    def sent(name: str) -> Placements:
        # A sum is made whole before it leaves a stage.
        return stage.clean(tuple(BROADCAST if p == PARTIAL else p for p in made[name]))

    for name in entering(stage):
        stage.lies[name] = sent(name)
    stage.inputs = tuple(stage.crossing(name, stage.lies[name]) for name in entering(stage))
    leaving = dict.fromkeys(n for other in stages if other is not stage for n in entering(other) if n in own)
    stage.outputs = tuple(stage.crossing(name, sent(name)) for name in leaving)
    stage.tied = tuple(
        n for n in stage.parameters if any(n in other.parameters for other in stages if other is not stage)
    )
    if has_loss(stage.graph) and stage.graph.outputs[-1] in own:
        stage.loss = stage.graph.outputs[-1]


def _return(stage: Outline, sampled: frozenset[str]) -> None:
    """Fills `given` and `returns`, from the last operator to the first."""
    axes = range(len(stage.mesh.axes))
    readers: dict[str, list[tuple[int, int]]] = {}
    for position, planned in enumerate(stage.operators):
        for slot, name in enumerate(planned.op.inputs):
            readers.setdefault(name, []).append((position, slot))

    def collect(name: str) -> Placements:
        """Of something that depends on parameters alone: P where some reader does not hand a whole back."""
        lies = stage.lies[name]
        handed = [stage.given[use] for use in readers.get(name, ()) if use in stage.given]
        return tuple(
            PARTIAL if lies[a] == BROADCAST and any(g[a] != BROADCAST for g in handed) else gradient_placement(lies[a])
            for a in axes
        )

    for position in range(len(stage.operators) - 1, -1, -1):
        planned = stage.operators[position]
        outputs = [n for n in planned.op.outputs if n in stage.trained]
        for name in outputs:
            stage.returns[name] = tuple(gradient_placement(p) for p in stage.lies[name])
        stays = _stays_whole(stage, position)
        if outputs and not any(n in sampled for n in planned.op.inputs):
            found = [collect(n) for n in outputs]
            for name in outputs:
                stage.returns[name] = tuple(
                    PARTIAL if stays[a] and any(f[a] == PARTIAL for f in found) else stage.returns[name][a]
                    for a in axes
                )
        for slot, name in enumerate(planned.op.inputs):
            if name in stage.trained and outputs:
                own = stage.clean(tuple(s.input_gradients[slot] for s in planned.signatures))
                stage.given[position, slot] = tuple(
                    PARTIAL if stays[a] and stage.returns[outputs[0]][a] == PARTIAL else own[a] for a in axes
                )
    for name in stage.parameters:
        if name in stage.trained:
            stage.returns[name] = collect(name)
    for crossing in stage.inputs:
        stage.returns[crossing.name] = crossing.placements


def _stays_whole(stage: Outline, position: int) -> list[bool]:
    """[axes] whether an operator reads and writes wholes."""
    planned = stage.operators[position]
    return [all(p == BROADCAST for p in (*s.inputs, *s.outputs)) for s in planned.signatures]

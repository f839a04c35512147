"""The program of each stage of a plan: its operators, and the placements of all tensors that it holds.

Programs are found from the plan alone, alike on all ranks, before anything runs. Views of parameters and constants are
made in every stage that reads them. A parameter has the placement that its readers in a stage require, and is whole
where they differ. The gradient of a tensor that depends on parameters alone stays partial on an axis if any reader
leaves it partial: it is summed once a step.
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
from automap.runtime.tensor_layout import Placements, StageTensor, TensorLayouts
from ir.factors import BROADCAST, PARTIAL, Signature, gradient_placement
from ir.graph import Graph, Operator
from ir.loss import has_loss


@dataclass(frozen=True, kw_only=True)
class PlacedOperator:
    """An operator with what the plan says about it."""

    op: Operator
    unit: int
    """The number of the unit that the operator belongs to."""
    signatures: tuple[Signature, ...]
    """The signature on each mesh axis of the plan."""
    recomputed: bool


@dataclass
class StageProgram:
    """The operators of one stage and the placements of its tensors."""

    number: int
    """The number of the stage in the plan."""
    mesh: Mesh
    layouts: TensorLayouts
    graph: Graph
    dtype: torch.dtype
    """The type of floating-point tensors."""
    constants: tuple[Operator, ...]
    """Operators that depend on nothing, in order: each rank runs them once, whole."""
    operators: tuple[PlacedOperator, ...]
    trained: frozenset[str]
    """The names of the graph's tensors that carry a gradient."""
    placements: dict[str, Placements] = field(default_factory=dict)
    """Tensor -> its placement where it is made, held or received."""
    gradients: dict[str, Placements] = field(default_factory=dict)
    """Tensor -> the placement of its gradient when its maker, or the end of the step, uses the gradient."""
    operand_gradients: dict[tuple[int, int], Placements] = field(default_factory=dict)
    """(position of an operator, slot) -> the placement in which the operator computes the gradient of the operand."""
    inputs: tuple[StageTensor, ...] = ()
    """Tensors that other stages make."""
    outputs: tuple[StageTensor, ...] = ()
    """Tensors that other stages read."""
    data: tuple[StageTensor, ...] = ()
    """Inputs of the graph that the stage reads; each rank cuts its box out of the micro-batch."""
    parameters: dict[str, StageTensor] = field(default_factory=dict)
    """Parameters of the graph that the stage reads, by name."""
    stored: tuple[str, ...] = ()
    """Buffers and constants of the model file that the stage reads, whole on every rank."""
    tied: tuple[str, ...] = ()
    """Trained parameters that other stages read as well."""
    loss: str | None = None
    """The name of the loss, if this stage makes it."""

    def required(self, position: int, slot: int) -> Placements:
        """The placement of an operand that an operator requires."""
        return self.on_live_axes(tuple(s.inputs[slot] for s in self.operators[position].signatures))

    def on_live_axes(self, placements: Placements) -> Placements:
        """The placements, with B on the axes that have a single rank."""
        return tuple(p if axis.size > 1 else BROADCAST for p, axis in zip(placements, self.mesh.axes, strict=True))

    def tensor(self, name: str, placements: Placements) -> StageTensor:
        """A tensor of the stage in some placements."""
        tensor = self.graph.tensors[name]
        return StageTensor(
            name=name,
            placements=placements,
            shape=tensor.shape_at(self.layouts.samples),
            dtype=self.dtype if tensor.is_float else torch_dtype(tensor.dtype),
            carries_gradient=name in self.trained,
            boxes=self.layouts.boxes(tensor, placements),
        )

    def readers(self) -> dict[str, list[tuple[int, int]]]:
        """Tensor -> (position of an operator, slot) of each operand that is this tensor."""
        found: dict[str, list[tuple[int, int]]] = {}
        for position, placed in enumerate(self.operators):
            for slot, name in enumerate(placed.op.inputs):
                found.setdefault(name, []).append((position, slot))
        return found


def stage_programs(
    plan: Plan, lowered: LoweredPlan, evaluator: Evaluator, meshes: Sequence[Mesh], dtype: torch.dtype
) -> tuple[StageProgram, ...]:
    """The programs of all stages of a plan.

    Args:
        lowered: the same plan in numbers (`automap.price.plan_reader.lower_plan`).
        meshes: the mesh of each stage, see `automap.runtime.mesh_groups.make_meshes`.
        dtype: the type of floating-point tensors.

    Raises:
        PlanError: samples or dims cannot be split as the plan says.
    """
    graph = evaluator.problem.graph
    homes = _homes(lowered, evaluator)
    trained, sampled = _trained(graph), _sampled(graph)
    stages = []
    for number, mesh in enumerate(meshes):
        mine = {i for i, (chunk, _) in homes.items() if chunk == number}
        needed, constants = _needed(graph, mine)
        stages.append(
            StageProgram(
                number=number,
                mesh=mesh,
                layouts=TensorLayouts(mesh, plan.samples_per_micro_batch),
                graph=graph,
                dtype=dtype,
                constants=tuple(graph.operators[i] for i in sorted(constants)),
                operators=tuple(homes[i][1] for i in sorted(mine | needed)),
                trained=trained,
            )
        )
    made = {
        name: tuple(s.outputs[k] for s in placed.signatures)
        for _, placed in homes.values()
        for k, name in enumerate(placed.op.outputs)
    }
    for stage in stages:
        _place_tensors(stage, made)
    for stage in stages:
        _place_borders(stage, stages, made)
        _place_gradients(stage, sampled)
    return tuple(stages)


def _homes(lowered: LoweredPlan, evaluator: Evaluator) -> dict[int, tuple[int, PlacedOperator]]:
    """Operator -> the number of the stage that runs it, and its placement."""
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
                    PlacedOperator(
                        op=graph.operators[index],
                        unit=segment.unit,
                        signatures=tuple(table[int(value)] for value in chosen),
                        recomputed=bool(segment.recomputed[k]),
                    ),
                )
    return found


def _trained(graph: Graph) -> frozenset[str]:
    """The tensors that depend on a trained parameter and carry a gradient."""
    found = {t.name for t in graph.tensors.values() if t.role == "parameter" and t.is_float and not t.frozen}
    for op in graph.operators:
        if any(name in found for name in op.inputs):
            found.update(name for name in op.outputs if graph.tensors[name].is_float)
    return frozenset(found)


def _sampled(graph: Graph) -> frozenset[str]:
    """The tensors that depend on data."""
    found = {t.name for t in graph.tensors.values() if t.role == "input"}
    for op in graph.operators:
        if any(name in found for name in op.inputs):
            found.update(op.outputs)
    return frozenset(found)


def _needed(graph: Graph, mine: set[int]) -> tuple[set[int], set[int]]:
    """Views of other stages that a stage must make as well, and the constants that it needs."""
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


def _place_tensors(stage: StageProgram, made: Mapping[str, Placements]) -> None:
    """Fills `placements`, `data`, `parameters` and `stored`.

    Args:
        stage: the program to be filled.
        made: tensor -> the placement in which its operator makes it.
    """
    graph, readers = stage.graph, stage.readers()
    for placed in stage.operators:
        for name in placed.op.outputs:
            stage.placements[name] = stage.on_live_axes(made[name])
    whole = (BROADCAST,) * len(stage.mesh.axes)
    for op in stage.constants:
        stage.placements.update(dict.fromkeys(op.outputs, whole))
    stored = [n for op in stage.constants for n in op.inputs if n not in graph.producer]
    for name, uses in readers.items():
        if name in graph.producer:
            continue
        if graph.tensors[name].role in ("parameter", "input"):
            required = [{p[a] for p in (stage.required(*use) for use in uses)} for a in range(len(whole))]
            placements = tuple(p.pop() if len(p) == 1 else BROADCAST for p in required)
            stage.placements[name] = tuple(BROADCAST if p == PARTIAL else p for p in placements)
        else:
            stored.append(name)
            stage.placements[name] = whole
    held = {name: graph.tensors[name].role for name in readers}
    stage.stored = tuple(dict.fromkeys(stored))
    stage.data = tuple(stage.tensor(n, stage.placements[n]) for n in readers if held[n] == "input")
    stage.parameters = {n: stage.tensor(n, stage.placements[n]) for n in readers if held[n] == "parameter"}


def _place_borders(stage: StageProgram, stages: Sequence[StageProgram], made: Mapping[str, Placements]) -> None:
    """Fills `inputs`, `outputs`, `tied` and `loss`; see `_place_tensors`."""
    own = {name for placed in stage.operators for name in placed.op.outputs}

    def entering(other: StageProgram) -> list[str]:
        inside = {name for placed in other.operators for name in placed.op.outputs}
        inside.update(name for op in other.constants for name in op.outputs)
        names = dict.fromkeys(name for placed in other.operators for name in placed.op.inputs)
        return [n for n in names if n in other.graph.producer and n not in inside]

    def sent(name: str) -> Placements:
        # A sum is made whole before it leaves a stage.
        return stage.on_live_axes(tuple(BROADCAST if p == PARTIAL else p for p in made[name]))

    for name in entering(stage):
        stage.placements[name] = sent(name)
    stage.inputs = tuple(stage.tensor(name, stage.placements[name]) for name in entering(stage))
    leaving = dict.fromkeys(n for other in stages if other is not stage for n in entering(other) if n in own)
    stage.outputs = tuple(stage.tensor(name, sent(name)) for name in leaving)
    trained = [n for n in stage.parameters if not stage.graph.tensors[n].frozen]
    stage.tied = tuple(n for n in trained if any(n in other.parameters for other in stages if other is not stage))
    if has_loss(stage.graph) and stage.graph.outputs[-1] in own:
        stage.loss = stage.graph.outputs[-1]


def _place_gradients(stage: StageProgram, sampled: frozenset[str]) -> None:
    """Fills `operand_gradients` and `gradients`, from the last operator to the first.

    Args:
        stage: the program to be filled.
        sampled: the tensors that depend on data.
    """
    axes, readers = range(len(stage.mesh.axes)), stage.readers()

    def collected(name: str) -> Placements:
        """The gradient of a tensor that depends on parameters alone: P where some reader leaves it partial."""
        held = stage.placements[name]
        left = [stage.operand_gradients[use] for use in readers.get(name, ()) if use in stage.operand_gradients]
        return tuple(
            PARTIAL
            if held[axis] == BROADCAST and any(gradient[axis] != BROADCAST for gradient in left)
            else gradient_placement(held[axis])
            for axis in axes
        )

    for position in range(len(stage.operators) - 1, -1, -1):
        placed = stage.operators[position]
        outputs = [n for n in placed.op.outputs if n in stage.trained]
        for name in outputs:
            stage.gradients[name] = tuple(gradient_placement(p) for p in stage.placements[name])
        # An operator that reads and writes whole tensors on an axis passes a partial gradient on.
        passes = [
            all(placement == BROADCAST for placement in (*signature.inputs, *signature.outputs))
            for signature in placed.signatures
        ]
        if outputs and not any(n in sampled for n in placed.op.inputs):
            found = [collected(n) for n in outputs]
            for name in outputs:
                stage.gradients[name] = tuple(
                    PARTIAL
                    if passes[axis] and any(gradient[axis] == PARTIAL for gradient in found)
                    else stage.gradients[name][axis]
                    for axis in axes
                )
        for slot, name in enumerate(placed.op.inputs):
            if name in stage.trained and outputs:
                own = stage.on_live_axes(tuple(s.input_gradients[slot] for s in placed.signatures))
                stage.operand_gradients[position, slot] = tuple(
                    PARTIAL if passes[axis] and stage.gradients[outputs[0]][axis] == PARTIAL else own[axis]
                    for axis in axes
                )
    for name in stage.parameters:
        if name in stage.trained:
            stage.gradients[name] = collected(name)
    for entering in stage.inputs:
        stage.gradients[entering.name] = entering.placements

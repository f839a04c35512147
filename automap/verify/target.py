"""Rules about the target (`training.target`): a plan that its trainer's configuration can express."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from automap.plan import Plan, parse_devices
from automap.targets import Target
from automap.units import hands_on_one
from automap.verify.model import Model, Placed
from automap.verify.modules import check_modules, parameters_behind
from automap.verify.reading import Chunk, Violation, layer_operators, num_ranks
from ir.adapters import adapters
from ir.groups import fused_groups

SIDES = {"batch": "data", "weights": "tensor", "positions": "context", "experts": "expert"}
"""The dim that operators split on an axis -> the kind of parallelism."""
LINEAR = ("MatMul", "Gemm", "Gather", "Add")
"""Kinds of the operators of linear layers, with their biases, and embeddings."""
SMALL = 0.05
"""Share of the largest operator's FLOPs up to which operators, such as routers, may have any placement (assumed)."""


def check_target(plan: Plan, chunks: Sequence[Chunk], model: Model) -> Iterator[Violation]:
    """The parts of a plan that the configuration of the target cannot express."""
    target = model.problem.target
    if target is None:
        return
    ranks = num_ranks(plan)
    kinds = (*target.schedules, *(["interleaved"] if target.virtual_stages else []))
    if plan.schedule.kind not in kinds:
        yield Violation("schedule.kind", f"{target.name} has no schedule {plan.schedule.kind}")
    if plan.sync.kind not in target.sync:
        yield Violation("sync.kind", f"{target.name} has {', '.join(target.sync)} training alone")
    if target.fills_pipelines and plan.num_micro_batches < ranks:
        what = f"{target.name} needs {ranks} micro-batches for as many pipeline ranks"
        yield Violation("num_micro_batches", what)
    if ranks > 1 and "pipeline" not in target.parallel:
        yield Violation("stages", f"{target.name} has no pipelines")
    if len(chunks) > 1 and _has_several_kinds(model, target):
        yield Violation("stages", f"{target.name} has no pipelines of layers of several kinds")
    for chunk in chunks[:-1] if hands_on_one(target) else ():
        crossing = sorted(model.crossing(max(chunk.operators) + 1))
        if len(crossing) > 1:
            yield Violation(
                chunk.where, f"{target.name} has stages that hand on one tensor, not {', '.join(crossing[:2])}"
            )
            break
    if target.alike:
        yield from _unlike(plan, chunks, target, ranks)
    if not target.recompute_levels:
        yield from _modes(chunks, model, target)
    for chunk in chunks if target.patterned else ():
        yield from _pattern(chunk, model, target, ranks)
    if target.grain != "operators":
        yield from check_modules(chunks, model, target)
    for chunk in chunks:
        others = len(_live(chunk)) > 1 or (bool(_live(chunk)) and _replicas(chunk) == 1)
        stages = target.zero_in_pipelines if ranks > 1 else target.zero_with_others if others else target.zero
        # Without replicas there is nothing to shard.
        if chunk.stage.zero.stage not in stages and _replicas(chunk) > 1:
            yield Violation(f"{chunk.where}.zero.stage", f"{target.name} has no ZeRO {chunk.stage.zero.stage} there")


def _has_several_kinds(model: Model, target: Target) -> bool:
    """Whether a configuration that counts the layers of stages would count those of an encoder and of a decoder."""
    units = model.blocks.units
    kinds = {units[number].type for number in model.layers}
    is_row = bool(model.layers) and max(model.layers) - min(model.layers) + 1 == len(model.layers)
    beside = any(units[number].beside for number in model.layers)
    is_stack = is_row and not beside and len(set(map(model.crossing_shapes, model.layers))) == 1
    inside = {i for group in fused_groups(model.graph) if group.kind == "attention" for i in group.members}
    attending = {units[model.unit_of[i]].type for i in inside if i in model.unit_of}
    several = target.transformers and len(kinds) > 1 and not is_stack
    return several or (target.stages_of_modules and len(attending) > 1)


def _modes(chunks: Sequence[Chunk], model: Model, target: Target) -> Iterator[Violation]:
    """Pipeline ranks with several recompute modes, and equal blocks of a stage of which only some are recomputed."""
    modes = {}
    for chunk in chunks:
        layers = layer_operators(chunk, model)
        inside = chunk.again & set(layers)
        if target.layers_only and chunk.again - inside:
            name = model.graph.operators[min(chunk.again - inside)].name
            yield Violation(f"{chunk.where}.recompute", f"{target.name} computes layers again, not {name}")
        if layers:
            modes[len(inside) == len(layers), not inside] = chunk
        yield from _mixed(chunk, model, target)
    if len(modes) > 1:
        yield Violation(f"{list(modes.values())[1].where}.recompute", f"{target.name} has one mode for all stages")


def _mixed(chunk: Chunk, model: Model, target: Target) -> Iterator[Violation]:
    """Equal blocks of a stage that differ in their recomputation."""
    again: dict[int, set[frozenset[int]]] = {}
    for number in dict.fromkeys(model.unit_of[i] for i in chunk.operators):
        unit = model.blocks.units[number]
        mine = frozenset(i - unit.start for i in range(unit.start, unit.stop) if i in chunk.again)
        again.setdefault(unit.type, set()).add(mine)
    if any(len(kinds) > 1 for kinds in again.values()):
        yield Violation(f"{chunk.where}.recompute", f"{target.name} has one mode for all equal blocks of a stage")


def _live(chunk: Chunk) -> list[str]:
    return [axis for axis, size in chunk.sizes.items() if size > 1]


def _replicas(chunk: Chunk) -> int:
    return max((chunk.sizes[axis] for axis in _live(chunk) if axis != "tp"), default=1)


def _unlike(plan: Plan, chunks: Sequence[Chunk], target: Target, ranks: int) -> Iterator[Violation]:
    """Pipeline ranks that differ from the first one."""
    first = chunks[0]
    devices = [device for chunk in chunks[:ranks] for device in parse_devices(chunk.stage.devices)]
    if any(one > other for one, other in itertools.pairwise(devices)):
        yield Violation("stages", f"{target.name} takes the devices in their order")
    for chunk in chunks:
        if chunk.stage.mesh != first.stage.mesh:
            yield Violation(f"{chunk.where}.mesh", f"all stages of {target.name} have the same mesh")
        if chunk.stage.batch_shares is not None or plan.samples_per_micro_batch != chunk.samples:
            yield Violation(f"{chunk.where}.batch_axes", f"{target.name} gives all ranks the same number of samples")


def _pattern(chunk: Chunk, model: Model, target: Target, ranks: int) -> Iterator[Violation]:
    """Axes on which the layers of a stage differ, or split a dim for which the target has no degree."""
    split = {axis: _side(chunk, model, axis) for axis in _live(chunk)}
    every = {side for sides in split.values() for side in sides} | ({"pipeline"} if ranks > 1 else set())
    for pair in target.apart:
        if every.issuperset(pair):
            yield Violation(f"{chunk.where}.mesh", f"{target.name} has no {' beside '.join(pair)} parallelism")
    for axis, sides in split.items():
        dense = sides - {"expert"}
        if sides and (len(dense) > 1 or not sides <= set(target.parallel)):
            what = " and ".join(sorted(sides))
            yield Violation(f"{chunk.where}.mesh", f"{target.name} has no axis for {what} as {axis}")
        if dense == {"tensor"}:
            yield from _norms(chunk, model, target, axis)
        elif dense == {"data"}:
            yield from _whole_weights(chunk, model, target, axis)
        if target.grain == "linear":
            yield from _weights(chunk, model, target, axis)


def _side(chunk: Chunk, model: Model, axis: str) -> set[str]:
    """The kinds of parallelism of products with weights on an axis: of those in the layers of a stage or, in a model
    without repeated layers, of all. Adapters may be whole if their layer is split."""
    times = Counter(unit.type for unit in model.blocks.units)
    layers = [range(unit.start, unit.stop) for unit in model.blocks.units if times[unit.type] > 1]
    inside = [index for layer in layers for index in layer if _multiplies(index, 0.0, model)]
    operators = layer_operators(chunk, model) if inside else chunk.operators
    # The head of a large vocabulary may be larger than all products of the layers.
    among = inside or range(len(model.graph.operators))
    large = SMALL * max(model.graph.operators[index].forward_flops.at(1) for index in among)
    found = [(i, _split(model, i, chunk.placed[i][axis])) for i in operators if _multiplies(i, large, model)]
    thin = {name for pair in adapters(model.graph).items() for name in pair}
    return {side for i, side in found if side != "repetition" or model.graph.operators[i].name not in thin}


def _multiplies(index: int, large: float, model: Model) -> bool:
    """Whether an operator reads a weight and does more than `large` FLOPs a sample."""
    op = model.graph.operators[index]
    return op.forward_flops.at(1) > large and any(name in model.parametric for name in op.inputs)


def _split(model: Model, index: int, placed: Placed) -> str:
    op = model.graph.operators[index]
    number = model.legal(index)[placed]
    if number is None:
        return "repetition"
    factor = op.rule.factors[number]
    if factor.is_batch:
        return SIDES["batch"]
    weights = [text for name, text in zip(op.inputs, placed.inputs, strict=True) if name in model.parametric]
    if not any(text.startswith("S") for text in weights):
        return SIDES["positions"]
    # The weight of experts is [experts, inputs, outputs].
    return SIDES["experts" if op.kind == "automap.GroupedMatMul" and weights[0] == "S(0)" else "weights"]


def _weights(chunk: Chunk, model: Model, target: Target, axis: str) -> Iterator[Violation]:
    """The first operator that is not part of a linear layer or an embedding, and whose weights are split on an axis."""
    for index in chunk.operators:
        op = model.graph.operators[index]
        placed = chunk.placed[index][axis]
        is_split = any(
            text != "B" and any(parameters_behind(model, name))
            for name, text in zip(op.inputs, placed.inputs, strict=True)
        )
        if is_split and not op.is_view and op.kind not in LINEAR:
            fault = f"{target.name} splits linear layers and embeddings alone, not {op.name}"
            yield Violation(f"{chunk.where}.shardings", fault)
            return


def _norms(chunk: Chunk, model: Model, target: Target, axis: str) -> Iterator[Violation]:
    """Normalisations in layers whose placement on an axis of tensor parallelism the target does not have."""
    for index in layer_operators(chunk, model):
        op = model.graph.operators[index]
        made = model.graph.tensors[op.outputs[0]]
        if op.kind.endswith("LayerNormalization") or op.kind == "RMSNormalization":
            text = chunk.placed[index][axis].outputs[0]
            positions = [f"S({dim})" for dim in range(len(made.shape) - 1) if dim != made.batch_dim]
            wanted = [text for along in target.sequence_parallel for text in (positions if along else ["B"])]
            if text not in wanted:
                sometimes = len(target.sequence_parallel) > 1
                how = "at most" if sometimes else "always" if target.sequence_parallel[0] else "never"
                fault = f"{target.name} {how} splits the sequence in normalisations on {axis}, which have {text}"
                yield Violation(f"{chunk.where}.shardings", fault)
                return


def _whole_weights(chunk: Chunk, model: Model, target: Target, axis: str) -> Iterator[Violation]:
    """Operators outside of the layers, such as embeddings, that split weights where the layers split the batch."""
    inside = {*layer_operators(chunk, model)}
    for index in chunk.operators:
        op, placed = model.graph.operators[index], chunk.placed[index][axis]
        batch = {name: f"S({model.graph.tensors[name].batch_dim})" for name in op.inputs}
        # A table that the exporter repeats for each sample has a batch, and is not a weight.
        split = [text != batch[name] for name, text in zip(op.inputs, placed.inputs, strict=True)
                 if name in model.parametric and text.startswith("S")]  # fmt: skip
        if index not in inside and any(split):
            what = f"{target.name} does not split the weights of {op.name} over replicas"
            yield Violation(f"{chunk.where}.shardings", what)
            return

"""Rules about the hints of the user: `hints.fix` and `hints.constraints`.

If a constraint names the leader of a linkage group, it applies to the leader; otherwise it applies to the members that
it names. If no placement that divides evenly obeys the constraint, every placement that divides evenly is legal.

If a degree is fixed, the name of its axis has a meaning (`Fix`): ranks of tp and cp work on the same samples, and a
product with a weight is split over tp with its weight, and over cp without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from automap.globs import select
from automap.hints import Constraint, Fix
from automap.plan import Plan
from automap.problem import PAIRED_MICRO_BATCHES
from automap.verify.model import Model, Placed
from automap.verify.reading import Chunk, Violation, layer_operators, num_ranks, remainders
from automap.verify.schedule import rank_orders
from ir.graph import Graph
from ir.layers import layers_of_modules
from ir.linkage import Group
from ir.operators.experts import num_experts


def check_hints(plan: Plan, chunks: Sequence[Chunk], model: Model) -> Iterator[Violation]:
    """The hints that the plan does not obey."""
    yield from _fixed(plan, chunks, model)
    names = [op.name for op in model.graph.operators]
    constraints = model.problem.hints.constraints
    named = [{model.position[name] for name in select(c.scope, names)} for c in constraints]
    for number, (constraint, members) in enumerate(zip(constraints, named, strict=True)):
        for chunk in chunks:
            mine = [i for i in chunk.operators if i in members]
            where = f"{chunk.where}, hints.constraints[{number}]"
            if mine and constraint.stage not in (None, chunk.number):
                yield Violation(where, f"{names[mine[0]]} is bound to stage {constraint.stage}")
    if model.problem.hints.fix.recompute is None:
        yield from _recomputed(chunks, model, named)
    for chunk in chunks:
        yield from _sharded(chunk, chunks, model, named)
    if model.problem.training.overlap_expert_exchange:
        yield from _unpaired(plan, chunks, model)


def _unpaired(plan: Plan, chunks: Sequence[Chunk], model: Model) -> Iterator[Violation]:
    """What keeps the passes of two micro-batches from running in pairs, as `training.overlap_expert_exchange` asks."""
    asked = "training.overlap_expert_exchange"
    ranks = num_ranks(plan)
    if ranks > 1 and plan.schedule.kind != "interleaved":
        yield Violation("schedule.kind", f"{asked} needs interleaved pipelines")
    else:
        # Of the passes of the first rank, in order: those before the first backward pass, and the one beside it.
        order = "".join(word for word, _, _ in rank_orders(plan)[0])
        alone = order.index("B") if ranks > 1 else 1
        if order.count("F") < PAIRED_MICRO_BATCHES * alone:
            what = f"{asked} needs more micro-batches: {alone} of {order.count('F')} forward passes run alone"
            yield Violation("num_micro_batches", what)
    for chunk in chunks:
        if chunk.again - _mode(chunk, model, "selective"):
            yield Violation(f"{chunk.where}.recompute", f"{asked} does not go with more than selective recomputation")


def _fixed(plan: Plan, chunks: Sequence[Chunk], model: Model) -> Iterator[Violation]:
    fix, ranks = model.problem.hints.fix, num_ranks(plan)
    wanted = {axis: getattr(fix, axis) for axis in ("dp", "tp", "cp", "ep")}
    for chunk in chunks:
        for axis, size in wanted.items():
            if size is not None and chunk.sizes.get(axis, 1) != size:
                yield Violation(f"{chunk.where}.mesh", f"hints.fix.{axis} is {size}: {chunk.stage.mesh}")
        has_replicas = any(chunk.sizes.get(axis, 1) > 1 for axis in ("dp", "cp", "ep"))
        if fix.zero is not None and has_replicas and chunk.stage.zero.stage != fix.zero:
            yield Violation(f"{chunk.where}.zero.stage", f"hints.fix.zero is {fix.zero}")
        if fix.recompute is not None and chunk.again != _mode(chunk, model, fix.recompute):
            yield Violation(f"{chunk.where}.recompute", f"hints.fix.recompute is {fix.recompute}")
        if fix.batch_shares == "even" and chunk.stage.batch_shares is not None:
            yield Violation(f"{chunk.where}.batch_shares", "hints.fix.batch_shares is even")
    found = {"pp": ranks, "num_micro_batches": plan.num_micro_batches, "virtual_stages": len(plan.stages) // ranks}
    for name, value in found.items():
        asked = getattr(fix, name)
        if asked is not None and asked != value:
            yield Violation("stages" if name != "num_micro_batches" else name, f"hints.fix.{name} is {asked}")
    kind = plan.schedule.kind
    if (
        fix.schedule is not None
        and kind != fix.schedule
        and not (fix.schedule == "interleaved" and kind == "1f1b" and len(plan.stages) == ranks)
    ):
        yield Violation("schedule.kind", f"hints.fix.schedule is {fix.schedule}")


def _mode(chunk: Chunk, model: Model, mode: str) -> frozenset[int]:
    """The operators that a recompute mode recomputes; none in a unit without a backward pass."""
    return _whole_mode(chunk, model, mode) - _without_backward(chunk, model)


def _without_backward(chunk: Chunk, model: Model) -> frozenset[int]:
    """The operators of units in which and before which nothing is trained."""
    graph, units = model.graph, {model.unit_of[index] for index in chunk.operators}
    ranges = [range(model.blocks.units[number].start, model.blocks.units[number].stop) for number in units]
    return frozenset(
        index
        for unit in ranges
        if not any(op.is_live and graph.runs_backward(op) for op in graph.operators[unit.start : unit.stop])
        for index in unit
    )


def _whole_mode(chunk: Chunk, model: Model, mode: str) -> frozenset[int]:
    """The operators that a recompute mode recomputes where everything is trained."""
    if mode == "full":
        target = model.problem.target
        if target is None:
            return frozenset(chunk.operators)
        inside = layer_operators(chunk, model) if target.layers_only else chunk.operators
        if target.grain == "operators":
            return frozenset(inside)
        if target.layers_only:
            # A layer in a module with operators outside of the layer is not recomputed.
            kinds, units = layers_of_modules(model.graph, model.blocks), model.blocks.units
            inside = [index for index in inside if units[model.unit_of[index]].type in kinds]
        return frozenset(index for index in inside if not _is_between_modules(model.graph, index))
    return _core(chunk, model) if mode == "selective" else frozenset()


def _is_between_modules(graph: Graph, index: int) -> bool:
    """Whether an operator that saves activations belongs to no module but the whole model, and is not the loss."""
    op = graph.operators[index]
    return not op.scope and op.outputs[0] != graph.outputs[-1] and graph.keeps_activations(op)


def _core(chunk: Chunk, model: Model) -> frozenset[int]:
    """The operators of attention that no kernel fuses."""
    found = set()
    for index in chunk.operators:
        unit = model.blocks.units[model.unit_of[index]]
        kernel = model.kernels.get(index)
        is_fused = kernel is not None and kernel.kind == "attention"
        if index - unit.start in model.linkage.types[unit.type].core and not is_fused:
            found.add(index)
    return frozenset(found)


def _recomputed(chunks: Sequence[Chunk], model: Model, named: Sequence[set[int]]) -> Iterator[Violation]:
    """Operators that are not recomputed although they must be, or that are recomputed although they must not be.

    If some operators of a rank must be recomputed, all others of the rank may be too, also those for which a constraint
    forbids it. Constraints on operators that no recompute mode of the target recomputes have no effect.
    """
    modes = model.problem.recompute_modes
    able = frozenset[int]().union(*(_mode(chunk, model, mode) for chunk in chunks for mode in modes))
    named = [members & able for members in named]
    for chunk in chunks:
        of_rank = {i for other in chunks if other.rank == chunk.rank for i in other.operators}
        constraints = model.problem.hints.constraints
        must = {i for c, m in zip(constraints, named, strict=True) if c.recompute for i in m & of_rank}
        for number, (constraint, members) in enumerate(zip(constraints, named, strict=True)):
            mine = members & set(chunk.operators)
            wrong = mine - chunk.again if constraint.recompute else mine & chunk.again
            if constraint.recompute is None or not wrong or (not constraint.recompute and must):
                continue
            name = model.graph.operators[min(wrong)].name
            what = f"{name} is {'not ' if constraint.recompute else ''}recomputed"
            yield Violation(f"{chunk.where}.recompute, hints.constraints[{number}]", what)


def _sharded(chunk: Chunk, chunks: Sequence[Chunk], model: Model, named: Sequence[set[int]]) -> Iterator[Violation]:
    """The placements of a chunk's operators that disobey the constraints or the fixed degrees.

    Args:
        chunk: the chunk.
        chunks: all chunks of the plan.
        model: the model.
        named: for each constraint, the operators that it names.
    """
    constraints = model.problem.hints.constraints
    about = [(n, c) for n, c in enumerate(constraints) if c.replicate or c.split or c.sharding]
    fix = model.problem.hints.fix
    bound_axes = [axis for axis in chunk.sizes if fix.ep is not None or _is_bound(fix, axis)]
    if not about and not bound_axes:
        return
    for number in dict.fromkeys(model.unit_of[i] for i in chunk.operators):
        unit = model.blocks.units[number]
        for group in model.linkage.types[unit.type].groups:
            leader, members = unit.start + group.leader, [unit.start + m for m in group.members]
            if not all(m in chunk.placed for m in members):
                continue
            constrained = []
            for n, constraint in about:
                candidates = [leader] if leader in named[n] else [m for m in members if m in named[n]]
                constrained += [(n, constraint, m) for m in candidates if model.graph.operators[m].is_live]
            bound = _Bound(unit.type, group, members, constrained)
            for axis in bound_axes:
                yield from _named_splits(chunk, chunks, model, bound, axis)
            if chunk.sizes.get("tp", 1) == 1:
                yield from _nothing_to_split_over(chunk, model, constrained)
            for axis in chunk.sizes:
                yield from _unlike_constraints(chunk, chunks, model, bound, axis)


class _Bound(NamedTuple):
    """A linkage group in one of its units, and the constraints on it."""

    unit_type: int
    group: Group
    members: Sequence[int]
    """Operators of the group."""
    constraints: Sequence[tuple[int, Constraint, int]]
    """(number of the constraint, the constraint, member that it binds)"""

    def ways(self, chunk: Chunk, chunks: Sequence[Chunk], model: Model, axis: str) -> Iterator[Mapping[int, Placed]]:
        """The placements of all members on an axis that obey the constraints and divide evenly on every stage."""
        for row in model.ways(self.unit_type, self.group):
            way = dict(zip(self.members, row, strict=True))
            obeys = all(_obeys(each, model, member, way[member], axis) for _, each, member in self.constraints)
            if obeys and all(_divides(chunk, other, model, way, axis) for other in chunks):
                yield way


def _nothing_to_split_over(
    chunk: Chunk, model: Model, constrained: Sequence[tuple[int, Constraint, int]]
) -> Iterator[Violation]:
    """The operators that a constraint splits, in a chunk without an axis tp of several ranks."""
    for number, constraint, member in constrained:
        if constraint.split:
            yield Violation(
                f"{chunk.where}.mesh, hints.constraints[{number}]",
                f"there is no axis tp of several ranks that could divide {model.graph.operators[member].name}",
            )


def _unlike_constraints(
    chunk: Chunk, chunks: Sequence[Chunk], model: Model, bound: _Bound, axis: str
) -> Iterator[Violation]:
    """The first member of a group whose placement on an axis disobeys a constraint that some placements obey."""
    for number, constraint, member in bound.constraints:
        if not _obeys(constraint, model, member, chunk.placed[member][axis], axis):
            if any(True for _ in bound.ways(chunk, chunks, model, axis)):
                where = f"{chunk.where}.shardings, hints.constraints[{number}]"
                yield Violation(where, f"{model.graph.operators[member].name} has another placement on {axis}")
            return


def _named_splits(chunk: Chunk, chunks: Sequence[Chunk], model: Model, bound: _Bound, axis: str) -> Iterator[Violation]:
    """An operator of a group that splits another dim over an axis than the fixed degrees allow.

    If no placement both divides evenly and obeys the constraints, every placement is allowed.
    """
    wrong = [m for m in bound.members if not _is_as_named(model, m, chunk.placed[m][axis], axis)]
    if not wrong:
        return
    for way in bound.ways(chunk, chunks, model, axis):
        if all(_is_as_named(model, member, placed, axis) for member, placed in way.items()):
            fix = model.problem.hints.fix
            name = axis if getattr(fix, axis, None) is not None else _reason(fix)
            where = f"{chunk.where}.shardings, hints.fix.{name}"
            yield Violation(where, f"{model.graph.operators[wrong[0]].name} splits something else over {axis}")
            return


def _is_bound(fix: Fix, axis: str) -> bool:
    """Whether operators may not split their batch over an axis; axes with other names are free."""
    return axis in ("cp", "tp") and (fix.dp is not None or bool(fix.zero) or getattr(fix, axis) is not None)


def _reason(fix: Fix) -> str:
    """The hint that restricts an axis whose own degree is not fixed."""
    return "dp" if fix.dp is not None else "zero" if fix.zero else "ep"


def _is_as_named(model: Model, index: int, placed: Placed, axis: str) -> bool:
    """Whether an operator splits the dim that the name of an axis stands for: weights over tp, sequences over cp."""
    number, op = model.legal(index)[placed], model.graph.operators[index]
    fix = model.problem.hints.fix
    splits_experts = number is not None and op.rule.factors[number].name == "e"
    if fix.shares_experts(num_experts(op)):
        if splits_experts != (axis == "ep"):
            return False
    elif fix.ep == 1 and splits_experts and op.kind.startswith("automap."):
        return False
    if number is None:
        return True
    if not _is_bound(fix, axis):
        return True
    if op.rule.factors[number].is_batch:
        return False
    parts = [text for name, text in zip(op.inputs, placed.inputs, strict=True) if model.graph.is_weight(name)]
    target = model.problem.target
    # What the degrees of a target split is its pattern, which `check_target` reads in the large products. With the
    # sequence split between products, routers of experts read a part of the tokens with whole weights.
    has_pattern = target is not None and target.patterned
    if not parts or not op.forward_flops.at(1) or getattr(fix, axis) is None or has_pattern:
        return True
    splits_weight = any(text.startswith("S") for text in parts)
    return splits_weight if axis == "tp" else not splits_weight


def _divides(chunk: Chunk, other: Chunk, model: Model, way: Mapping[int, Placed], axis: str) -> bool:
    """Whether the operators of a unit divide evenly with some placements on an axis, given those on outer axes.

    Equal units of all stages have equal placements: `other` is the stage whose mesh and samples are checked.
    """
    axes = list(chunk.sizes)
    outer = axes[: axes.index(axis)]
    sizes = {a: other.sizes.get(a, 1) for a in axes}
    return not any(
        remainders(model, index, {**{a: chunk.placed[index][a] for a in outer}, axis: placed}, sizes, samples)
        for index, placed in way.items()
        for samples in dict.fromkeys(other.shares)
    )


def _obeys(constraint: Constraint, model: Model, index: int, placed: Placed, axis: str) -> bool:
    number = model.legal(index)[placed]
    factor = None if number is None else model.graph.operators[index].rule.factors[number]
    if constraint.replicate:
        is_whole = factor is None and set(placed.inputs + placed.outputs) <= {"B"}
        if not is_whole and (factor is None or not factor.is_batch):
            return False
    if constraint.split and axis == "tp" and (factor is None or factor.is_batch):
        return False
    return (constraint.sharding or {}).get(axis, placed.outputs[0]) == placed.outputs[0]

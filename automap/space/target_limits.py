"""The plan space of a problem with a target: the plans that the configuration of the target's trainer can express.

`SpaceOutline` has the limits on single decisions, such as ZeRO stages. This module has the limits that depend on the
model: the degrees into which Megatron's pattern can be split, the possible cuts of a pipeline, and the pattern itself.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, replace

import numpy as np

from automap.errors import ProblemError
from automap.price.degrees import sequence_length
from automap.price.evaluator import Evaluator
from automap.price.lowered_plan import RECOMPUTE_MODES
from automap.problem import Problem
from automap.space.constraints import Constrained
from automap.space.limits import WHOLE, Limits
from automap.space.module_limits import (
    cuts_between_modules,
    recomputes_cores,
    recomputes_units,
)
from automap.space.shape import Shape
from automap.space.space import PlanSpace
from automap.space.target_patterns import has_attention, num_layer_kinds, obeys, patterns
from automap.targets import Target, targets
from automap.units import hands_on_one
from ir.graph import Graph
from ir.layers import is_one_stack, layer_spans


def plan_space(problem: Problem) -> PlanSpace:
    """The plans of a problem that its target can express.

    Raises:
        ProblemError: there is none, or hints leave none.
    """
    target = problem.target
    if target is None:
        return PlanSpace(problem)
    check_model(problem.graph, target, field="training.target")
    evaluator = Evaluator(problem)
    whole = PlanSpace(problem, evaluator)
    found = [_limits(whole, target, along) for along in target.sequence_parallel]
    spaces = [PlanSpace(problem, evaluator, limits=some) for some in found if any(map(some.shapes, whole.shapes))]
    if not spaces:
        _check_fixed(problem, target, evaluator)
        raise ProblemError(
            f"no plan of this model on {problem.cluster.num_devices} devices is one of {target.name}",
            field="training.target",
            value=target.name,
            repair=f"{_other_batch(problem, target)}; {target.name} splits {', '.join(target.parallel)}.",
        )
    return spaces[0] if len(spaces) == 1 else max(spaces, key=_promise)


def _check_fixed(problem: Problem, target: Target, evaluator: Evaluator) -> None:
    """Checks each fixed hint: the target has plans with other values, or without the hint, but none with this one.

    Raises:
        ProblemError: such a hint, with what is possible.
    """
    _check_zero(problem, target, evaluator)
    fixed = {name: getattr(problem.hints.fix, name) for name in ("tp", "pp")}
    free = replace(problem, hints=replace(problem.hints, fix=replace(problem.hints.fix, tp=None, pp=None)))
    whole = PlanSpace(free, evaluator)
    limits = [_limits(whole, target, along) for along in target.sequence_parallel]
    shapes = [shape for shape in whole.shapes if any(some.shapes(shape) for some in limits)]
    for name, value in fixed.items():
        legal = sorted({getattr(shape, name) for shape in shapes})
        if value is not None and legal and value not in legal:
            raise ProblemError(
                f"the target {target.name} has no plan of this model with this degree",
                field=f"hints.fix.{name}",
                value=value,
                repair=f"Use {', '.join(map(str, legal))}, or another target{_why_not(whole, target, name, value)}.",
            )
    stated = [name for name, value in asdict(problem.hints.fix).items() if value is not None]
    for names in (*([name] for name in stated), stated):
        fix = replace(problem.hints.fix, **dict.fromkeys(names))
        if names and _has_plans(replace(problem, hints=replace(problem.hints, fix=fix)), target, evaluator):
            values = [getattr(problem.hints.fix, name) for name in names]
            raise ProblemError(
                f"the target {target.name} has no plan of this model with this, and has some without it",
                field=f"hints.fix.{names[0]}" if len(names) == 1 else "hints.fix",
                value=values[0] if len(names) == 1 else dict(zip(names, values, strict=True)),
                repair=f"Leave it out, or use another target; {_together(problem, target)}.",
            )


def _together(problem: Problem, target: Target) -> str:
    """What a target splits; of two degrees that are fixed and do not go together, that they do not."""
    sides = {"pp": "pipeline", "tp": "tensor", "cp": "context", "ep": "expert"}
    split = {sides[name] for name in sides if (getattr(problem.hints.fix, name) or 1) > 1}
    apart = [f"{one} and {other}" for one, other in target.apart if {one, other} <= split]
    parallel = ", ".join(target.parallel)
    return f"{target.name} does not split {apart[0]} together" if apart else f"{target.name} splits {parallel}"


def _check_zero(problem: Problem, target: Target, evaluator: Evaluator) -> None:
    """Checks a fixed ZeRO stage: which ones a target has depends on what else is split.

    Raises:
        ProblemError: the target has plans with other stages, and none with this one.
    """
    stage, others = problem.hints.fix.zero, {*target.zero, *target.zero_with_others, *target.zero_in_pipelines}
    legal = []
    for other in sorted(others - {stage}) if stage is not None else ():
        near = replace(problem, hints=replace(problem.hints, fix=replace(problem.hints.fix, zero=other)))
        with contextlib.suppress(ProblemError):
            legal += [other] if _has_plans(near, target, evaluator) else []
    if legal:
        beside, pipelines = (", ".join(map(str, some)) for some in (target.zero_with_others, target.zero_in_pipelines))
        raise ProblemError(
            f"the target {target.name} has no plan of this model with this ZeRO stage beside the other degrees",
            field="hints.fix.zero",
            value=stage,
            repair=f"Use {', '.join(map(str, legal))}, or split the batch alone: beside split weights or sequences, "
            f"{target.name} has ZeRO {beside}" + (f", and in pipelines {pipelines}." if pipelines else "."),
        )


def _other_batch(problem: Problem, target: Target) -> str:
    """The repair if a target has no plan of a problem: another global batch near it, if that has plans; else another
    target."""
    batch, devices = problem.training.global_batch, problem.cluster.num_devices
    below = batch // devices * devices
    for other in filter(None, (below, below + devices)):
        training = replace(problem.training, global_batch=other)
        with contextlib.suppress(ProblemError):
            near = replace(problem, training=training)
            if _has_plans(near, target, Evaluator(near)):
                return f"Use a global batch of {other}, or another target"
    return "Use another target"


def _why_not(space: PlanSpace, target: Target, name: str, value: int) -> str:
    """Text at the end of a repair: the reason why a target has no plan with a degree."""
    found = ""
    if name == "tp" and target.patterned and "tensor" in target.parallel:
        found = _why_whole(space, target)
        if not found and not target.tensor_alone and all(s.replicas == 1 for s in space.shapes if s.tp == value):
            found = f"it splits weights beside replicas alone, for which tp {value} leaves no devices"
    elif name == "pp" and "pipeline" in target.parallel:
        found = _why_uncut(space, target)
    return f": {found}" if found else f"; {target.name} splits {', '.join(target.parallel)}"


def _has_plans(problem: Problem, target: Target, evaluator: Evaluator) -> bool:
    """Whether a target can express any plan of a problem."""
    whole = PlanSpace(problem, evaluator)
    limits = [_limits(whole, target, along) for along in target.sequence_parallel]
    return any(some.shapes(shape) for some in limits for shape in whole.shapes)


def _promise(space: PlanSpace) -> tuple[int, bool, float]:
    """A key to compare patterns: the one with more degrees is better, then the one with the better even plan.

    One pattern is chosen for all plans of a problem, since all stages have the same pattern, and the price of tensor
    parallelism depends little on other decisions. Of equal patterns the first is taken.
    """
    shapes = [shape for shape in space.shapes if shape.tp > 1 and shape.virtual == 1]
    if not shapes:
        return 0, False, 0.0
    rows = []
    for shape in shapes:
        zero = int(np.flatnonzero(space.zeros_of(shape))[-1])
        for mode in (mode for mode, is_legal in zip(RECOMPUTE_MODES, space.modes, strict=True) if is_legal):
            prefix = space.even_values(shape, recompute=mode, zero=zero)
            whole = [0] * (len(space.slots) - len(prefix))
            rows.append(space.repair((*prefix, *whole)))
    priced = space.price(np.array(rows, dtype=np.int64))
    fits = priced[:, 1] <= 0.0
    seconds = priced[fits, 0] if fits.any() else priced[:, 0]
    return len({(shape.tp, shape.middle) for shape in shapes}), bool(fits.any()), -float(seconds.min())


def check_model(graph: Graph, target: Target, *, field: str) -> None:
    """Checks that a target trains models of this kind.

    Args:
        field: field of the problem that names the target, for errors.

    Raises:
        ProblemError: the target trains transformers, and the model is none.
    """
    if target.transformers and not has_attention(graph):
        raise ProblemError(
            f"{target.name} trains transformers, and the model has no attention",
            field=field,
            value=target.name,
            repair=f"Use one of {', '.join(t.name for t in targets().values() if not t.transformers)}.",
        )


def _limits(space: PlanSpace, target: Target, along: bool) -> Limits:
    """The limits of a target, except for those on shapes, which the caller checks.

    Args:
        along: whether ranks of tp split the sequence in normalisations.
    """
    windows = _windows(space, target)
    found = [p for p in patterns(space, target, along) if not p.fault] if target.patterned else []
    degrees = {pattern.degrees for pattern in found}

    def stays(shape: Shape) -> bool:
        if shape.num_chunks > 1 and shape.num_chunks not in windows:
            return False
        return (not target.patterned or (shape.tp, shape.middle) in degrees) and _expressible(
            space, target, shape, along
        )

    graph, units = space.problem.graph, space.linkage.blocks.units
    in_modules = target.grain == "operators" or recomputes_units(graph, units)
    return Limits(
        shapes=stays,
        windows=windows,
        signatures=obeys(space, found) if target.patterned else None,
        one_mode=not (target.recompute_levels and in_modules),
        cores=target.grain == "operators" or recomputes_cores(space),
    )


def _expressible(space: PlanSpace, target: Target, shape: Shape, along: bool) -> bool:
    """Whether a target has the degrees of a shape, and they divide the numbers that its configuration requires."""
    sides = {"pipeline": shape.pp, "tensor": shape.tp}
    if space.meshes.middle is not None:
        sides["expert" if space.meshes.middle.name == "ep" else "context"] = shape.middle
    if any(size > 1 and side not in target.parallel for side, size in sides.items()):
        return False
    if any(sides.get(one, 1) > 1 and sides.get(other, 1) > 1 for one, other in target.apart):
        return False
    if shape.replicas > 1 and not space.zeros_of(shape).any():
        return False
    if shape.virtual > 1 and not target.virtual_stages:
        return False
    if target.fills_pipelines and shape.num_micro_batches < shape.pp:
        return False
    ranks = shape.dp * (shape.middle if space.meshes.splits_batch else 1)
    if target.alike and shape.samples % ranks:
        return False
    if shape.tp > 1 and shape.replicas == 1 and not target.tensor_alone:
        return False
    length, context = sequence_length(space.problem.graph), sides.get("context", 1)
    parts = context * (shape.tp if along else 1)
    return length is None or parts == 1 or length % (target.even_sequence * parts) == 0


def _windows(space: PlanSpace, target: Target) -> dict[int, tuple[tuple[int, int], ...]]:
    """Number of chunks -> first and last end of each chunk: the first layer is in a chunk with all units before it, and
    the last layer with all units after it."""
    graph, blocks = space.problem.graph, space.linkage.blocks
    types = [unit.type for unit in blocks.units]
    spans = layer_spans(graph, blocks) or tuple(range(number, number + 1) for number in range(len(types)))
    numbers = [number for span in spans for number in span]
    constrained = Constrained(space.problem, space.evaluator, WHOLE)
    found: dict[int, tuple[tuple[int, int], ...]] = {}
    if _why_uncut(space, target):
        return found
    stops = [number for number in range(len(types)) if not target.stages_of_modules or _has_module(space, number)]
    # A first layer of several units is not cut.
    first = spans[0].stop - (len(spans[0]) == 1)
    last = min(numbers[-1] + 1, stops[-1]) if stops else 0
    for count in {shape.num_chunks for shape in space.shapes if shape.num_chunks > 1}:
        rows = [constrained.window(chunk, count) for chunk in range(count)]
        lows = [max(low, first + chunk) for chunk, (low, _) in enumerate(rows[:-1])]
        highs = [min(high, last - (count - 2 - chunk)) for chunk, (_, high) in enumerate(rows[:-1])]
        if all(low <= high for low, high in zip(lows, highs, strict=True)):
            found[count] = (*zip(lows, highs, strict=True), rows[-1])
    return found


def _why_uncut(space: PlanSpace, target: Target) -> str:
    """The reason why a target with pipelines cuts a model nowhere; empty if it does."""
    graph, blocks = space.problem.graph, space.linkage.blocks
    spans = layer_spans(graph, blocks)
    kinds = {blocks.units[number].type for span in spans for number in span}
    # A configuration counts the layers of a single stack, and not those of an encoder and a decoder.
    several = len(kinds) > 1 and target.transformers and not is_one_stack(graph, blocks)
    if several or (target.stages_of_modules and num_layer_kinds(space) > 1):
        return "its pipelines have layers of one kind, and the model has several, as an encoder and a decoder are"
    if hands_on_one(target) and blocks.carried:
        return "its stages hand on one tensor, and several cross wherever the model can be cut"
    if target.grain != "operators" and not cuts_between_modules(graph, blocks.units):
        return "its stages consist of whole modules, and some module is called in several layers of the model"
    return ""


def _has_module(space: PlanSpace, number: int) -> bool:
    """Whether some operator of a unit is in a module."""
    unit = space.linkage.blocks.units[number]
    return any(op.scope for op in space.problem.graph.operators[unit.start : unit.stop])


def why_whole(problem: Problem, evaluator: Evaluator) -> str:
    """The reason why the target of a problem splits no weights of its layers; empty if it does, or if the target has no
    tensor parallelism."""
    target = problem.target
    if target is None or not target.patterned or "tensor" not in target.parallel:
        return ""
    return _why_whole(PlanSpace(problem, evaluator), target)


def _why_whole(space: PlanSpace, target: Target) -> str:
    found = [p for along in target.sequence_parallel for p in patterns(space, target, along) if p.degrees[0] > 1]
    return found[0].fault if found and all(pattern.fault for pattern in found) else ""

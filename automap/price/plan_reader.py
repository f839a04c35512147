"""Plan documents read into lowered plans.

`lower_plan` reads any legal plan, also one that is not in the plan space, and refuses other plans with an error that
names the field. `automap.price.plan_writer` is its inverse.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from automap.arrays import Ints
from automap.errors import PlanError
from automap.plan import Plan, Schedule, Zero, check_model, parse_devices
from automap.price.evaluator import Evaluator
from automap.price.lowered_plan import LoweredPlan, Segment, spread
from automap.price.stage_layout import PipelineLayout
from automap.price.stage_reader import KnownOperators, StageReader, refuse
from automap.schedule import NO_PROGRAM, read_order


def lower_plan(plan: Plan, evaluator: Evaluator, axes: Sequence[str] = ("dp", "tp")) -> LoweredPlan:
    """Lowers a plan. The sync mode is not part of a lowered plan, see `automap.price.local_sgd`.

    Args:
        plan: the plan document.
        evaluator: of its problem.
        axes: mesh axes that the lowered plan gets in any case, outermost first.

    Raises:
        PlanError: the plan is malformed, illegal, or for another problem; names the path.
    """
    problem = evaluator.problem
    check_model(plan, problem)
    _check_micro_batches(plan, problem.training.global_batch)
    axes = _axis_names(plan, axes)
    ranks = _ranks(plan, problem.cluster.num_devices)
    layout = _layout(plan, evaluator, axes, ranks)
    program = _program(plan.schedule, ranks, len(plan.stages), plan.num_micro_batches)
    zero = _zero(plan)
    spread_over = tuple(_first_batch_axis(plan, number, axes) for number in range(ranks))
    shares = tuple(_shares(plan, number, spread_over) for number in range(len(plan.stages)))
    samples = [
        [spread(plan.samples_per_micro_batch, int(stage.axes[a]))] if mine is None else [n * len(mine) for n in {*mine}]
        for stage, a, mine in zip(layout.stages, spread_over, shares, strict=False)
    ]
    return LoweredPlan(
        axes=axes,
        layout=layout,
        num_micro_batches=plan.num_micro_batches,
        samples=plan.samples_per_micro_batch,
        kind=plan.schedule.kind,
        chunks=_chunks(plan, evaluator, axes, samples),
        zero=zero.stage,
        zero_axes=np.array([a in zero.axes and any(dict(s.mesh).get(a, 1) > 1 for s in plan.stages) for a in axes]),
        program=program,
        spread_over=spread_over if any(some != [plan.samples_per_micro_batch] for some in samples) else (),
        shares=shares[:ranks] if any(mine is not None for mine in shares) else (),
    )


def _check_micro_batches(plan: Plan, global_batch: int) -> None:
    if plan.num_micro_batches < 1 or plan.num_micro_batches * plan.samples_per_micro_batch != global_batch:
        raise refuse(
            "num_micro_batches",
            plan.num_micro_batches,
            f"micro-batches do not add up to the global batch of {global_batch}",
            "Make num_micro_batches * samples_per_micro_batch equal to it.",
        )


def _zero(plan: Plan) -> Zero:
    """The ZeRO settings of a plan, which are the same for all of its stages."""
    zero = plan.stages[0].zero
    for number, stage in enumerate(plan.stages):
        if stage.zero != zero:
            raise refuse(
                f"stages[{number}].zero",
                stage.zero.stage,
                "differs from stages[0]",
                "Give all stages one ZeRO stage, over the same axes.",
            )
        if not 0 <= stage.zero.stage <= 3:
            raise refuse(f"stages[{number}].zero.stage", stage.zero.stage, "no such ZeRO stage", "Give 0 to 3.")
        for axis in stage.zero.axes:
            if axis not in dict(stage.mesh):
                names = ", ".join(name for name, _ in stage.mesh)
                raise refuse(f"stages[{number}].zero.axes", axis, "no such mesh axis", f"Use {names}.")
    return zero


def _chunks(
    plan: Plan, evaluator: Evaluator, axes: Sequence[str], samples: Sequence[Sequence[int]]
) -> tuple[tuple[Segment, ...], ...]:
    """The segments of each stage, after a check that the stages have all operators once and in order.

    Args:
        axes: mesh axes of the lowered plan, outermost first.
        samples: for each pipeline rank, the distinct numbers of samples which its batch axis must divide.
    """
    live = {axis for stage in plan.stages for axis, size in stage.mesh if size > 1}
    reader = StageReader(evaluator=evaluator, axes=axes, live=live, known=KnownOperators(evaluator))
    order = _cuttable(evaluator)
    position = {name: i for i, (name, _, _) in enumerate(order)}
    chunks, cursor = [], 0
    for number, stage in enumerate(plan.stages):
        first, last = (position.get(name, -1) for name in stage.operators)
        if first != cursor or last < first:
            expected = order[cursor][0] if cursor < len(order) else "nothing"
            what = "stages do not cover the operators once and in order"
            raise _refuse_stage(plan, number, "operators", what, f"Begin this stage at {expected!r}.")
        if last + 1 < len(order) and order[last + 1][2]:
            end = evaluator.problem.graph.operators[evaluator.blocks.units[order[last][1]].stop - 1].name
            what = "what crosses a cut inside a block is not priced"
            raise _refuse_stage(plan, number, "operators", what, f"End this stage at {end!r}.")
        operators = order[first : last + 1]
        chunks.append(reader.segments(stage, number, operators, samples[number % len(samples)]))
        cursor = last + 1
    if cursor != len(order):
        raise refuse(
            "stages",
            order[cursor][0],
            "operators after the last stage belong to no stage",
            "Extend the last stage to the end.",
        )
    return tuple(chunks)


def _first_batch_axis(plan: Plan, number: int, axes: Sequence[str]) -> int:
    """The axis over which a stage spreads its samples as evenly as possible: the first of its batch axes."""
    stage, samples = plan.stages[number], plan.samples_per_micro_batch
    name = next((axis for axis in stage.batch_axes if axis in axes), axes[0])
    count = dict(stage.mesh).get(name, 1) if stage.batch_axes else 1
    if count > samples:
        what = f"{samples} samples leave some of {count} ranks without any"
        raise _refuse_stage(plan, number, "batch_axes", what, "Give fewer ranks, or larger micro-batches.")
    return list(axes).index(name)


def _shares(plan: Plan, number: int, spread_over: Sequence[int]) -> tuple[int, ...] | None:
    """Samples of each rank of the first batch axis, or None where these are as even as possible.

    Args:
        spread_over: [pipeline ranks] number of that axis.
    """
    stage, shares = plan.stages[number], plan.stages[number].batch_shares
    ranks = len(spread_over)
    axis = spread_over[number % ranks]
    if shares != plan.stages[number % ranks].batch_shares:
        raise refuse(
            f"stages[{number}].batch_shares",
            shares,
            f"differ from stages[{number % ranks}]",
            "Give the stages of one rank equal shares.",
        )
    if shares is None:
        return None
    count = dict(stage.mesh).get(stage.batch_axes[0], 1) if stage.batch_axes else 1
    if len(shares) != count or sum(shares) != plan.samples_per_micro_batch or min(shares, default=0) < 1:
        what = f"are not the samples of {count} ranks, at least one each, {plan.samples_per_micro_batch} in all"
        repair = "Give each rank of the first batch axis its samples, or null."
        raise _refuse_stage(plan, number, "batch_shares", what, repair)
    if axis != 0:
        path = f"stages[{number}].batch_shares"
        raise refuse(path, stage.batch_axes[0], "only shares of the outermost axis are priced", "Use null.")
    return shares if len({*shares}) > 1 else None


def _program(schedule: Schedule, ranks: int, chunks: int, num_micro_batches: int) -> Ints:
    """The list of actions of an explicit schedule; empty for other kinds. Checks that the kind suits the plan."""
    kind, order = schedule.kind, schedule.order
    if (kind == "explicit") != (order is not None):
        raise refuse(
            "schedule.order",
            "null" if order is None else "a list",
            f"does not go with the kind {kind}",
            "Give an order if the kind is explicit, and only then.",
        )
    if order is not None:
        return read_order(order, ranks, chunks, num_micro_batches)
    if kind != "interleaved" and chunks != ranks:
        raise refuse("schedule.kind", kind, "devices serve several stages", "Use interleaved, or an explicit order.")
    if kind == "interleaved" and num_micro_batches % ranks:
        raise refuse(
            "num_micro_batches",
            num_micro_batches,
            f"the interleaved schedule needs a multiple of {ranks} pipeline ranks",
            "Change the number of micro-batches.",
        )
    return NO_PROGRAM


def _refuse_stage(plan: Plan, number: int, name: str, message: str, repair: str) -> PlanError:
    """The error for a field of a stage."""
    value = getattr(plan.stages[number], name)
    value = [list(each) for each in value] if name == "mesh" else list(value) if isinstance(value, tuple) else value
    return refuse(f"stages[{number}].{name}", value, message, repair)


def _axis_names(plan: Plan, known: Sequence[str]) -> tuple[str, ...]:
    """Names of the axes of all meshes and of `known`, outermost first. Axes that are not in `known` come before the
    last axis of `known`, unless a mesh has them in another order."""
    names = dict.fromkeys(name for stage in plan.stages for name, _ in stage.mesh)
    others = [name for name in names if name not in known]
    usual = (*known[:-1], *others, known[-1])
    as_written = (*names, *(name for name in known if name not in names))
    wrong = [_out_of_order(plan, order) for order in (usual, as_written)]
    if None not in wrong:
        assert wrong[0] is not None
        mesh = [name for name, _ in plan.stages[wrong[0]].mesh]
        raise refuse(
            f"stages[{wrong[0]}].mesh", mesh, "axes come in another order", f"Order them as {', '.join(usual)}."
        )
    return usual if wrong[0] is None else as_written


def _out_of_order(plan: Plan, order: Sequence[str]) -> int | None:
    """Number of the first stage whose mesh has its axes in another order, or None."""
    for number, stage in enumerate(plan.stages):
        mine = [name for name, _ in stage.mesh]
        if [name for name in order if name in mine] != mine:
            return number
    return None


def _ranks(plan: Plan, num_devices: int) -> int:
    """Number of pipeline ranks, after a check that chunk c has the devices of chunk c - ranks."""
    devices = [parse_devices(stage.devices) for stage in plan.stages]
    if not devices:
        raise refuse("stages", "[]", "no stages", "Give at least one.")
    ranks = next((r for r in range(1, len(devices)) if devices[r] == devices[0]), len(devices))
    used: set[int] = set()
    for number, mine in enumerate(devices):
        if mine != devices[number % ranks] or len(devices) % ranks:
            what = "virtual stages must visit the pipeline ranks in the same order again and again"
            raise _refuse_stage(plan, number, "devices", what, "Give chunk c the devices of chunk c - ranks.")
        if any(d >= num_devices for d in mine):
            what = f"the cluster has devices 0 to {num_devices - 1}"
            raise _refuse_stage(plan, number, "devices", what, "Name devices of the cluster.")
        if number < ranks:
            if used & set(mine) or len(set(mine)) != len(mine):
                what = "a device is named twice"
                raise _refuse_stage(plan, number, "devices", what, "Give each device to one pipeline rank.")
            used |= set(mine)
    return ranks


def _layout(plan: Plan, evaluator: Evaluator, axes: Sequence[str], ranks: int) -> PipelineLayout:
    """The devices and meshes of the pipeline ranks, after a check that stages of one rank have one mesh, whose size is
    the number of its devices."""
    for number, stage in enumerate(plan.stages):
        if stage.mesh != plan.stages[number % ranks].mesh:
            what = f"differs from stages[{number % ranks}].mesh"
            raise _refuse_stage(plan, number, "mesh", what, "Give all stages of a pipeline rank one mesh.")
    stages = []
    for number, stage in enumerate(plan.stages[:ranks]):
        mesh = dict(stage.mesh)
        sizes = [mesh.get(axis, 1) for axis in axes]
        devices = parse_devices(stage.devices)
        if min(sizes) < 1 or int(np.prod(sizes)) != len(devices):
            what = f"does not have {len(devices)} places"
            raise _refuse_stage(plan, number, "mesh", what, "Make the product of the axes the number of devices.")
        stages.append((devices, sizes))
    return evaluator.layout_of(stages)


def _cuttable(evaluator: Evaluator) -> list[tuple[str, int, int]]:
    """(name, unit, offset in the unit) of every operator that belongs to a stage, in order."""
    operators = evaluator.problem.graph.operators
    return [
        (operators[index].name, number, index - unit.start)
        for number, unit in enumerate(evaluator.blocks.units)
        for index in range(unit.start, unit.stop)
    ]

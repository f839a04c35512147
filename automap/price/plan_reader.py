"""Plan documents read into lowered plans.

`lower_plan` reads any legal plan, of the space or not, and refuses the others by name. `automap.price.plan_writer` is
the way back.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from automap.arrays import Ints
from automap.errors import PlanError
from automap.globs import by_precision, first_match, matches, matches_operator
from automap.plan import AxisSharding, Plan, Schedule, Stage, Zero, check_model, parse_devices
from automap.price.evaluator import Evaluator
from automap.price.kernels.placements import divides
from automap.price.lowered_plan import LoweredPlan, Segment, spread
from automap.price.stage_layout import PipelineLayout
from automap.schedule import NO_PROGRAM, read_order
from ir.factors import parse_placement, whole_signature


def default_signatures(evaluator: Evaluator, unit_type: int, offset: int) -> tuple[int, int]:
    """Signatures of an operator for which a plan states none: on axes other than batch axes, and on batch axes.

    On the former the operator is whole; on the latter it splits its batch if it can.
    """
    table = evaluator.tables.linkage.types[unit_type].signatures[offset]
    whole = whole_signature(table)
    arrays = evaluator.tables.arrays
    begin = arrays.operators["first_signature"][int(evaluator.tables.spans[unit_type]) + offset]
    split = np.flatnonzero(arrays.signatures["splits_batch"][begin : begin + len(table)])
    return whole, int(split[0]) if len(split) else whole


def lower_plan(plan: Plan, evaluator: Evaluator, axes: Sequence[str] = ("dp", "tp")) -> LoweredPlan:
    """The lowered plan that `plan` states; how replicas stay together is no part of it (`automap.price.local_sgd`).

    Args:
        axes: mesh axes that the lowered plan has whether the plan names them or not, outermost first.

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
    shares = tuple(_shares(plan, number, spread_over[number % ranks]) for number in range(len(plan.stages)))
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
        raise _refuse(
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
            raise _refuse(
                f"stages[{number}].zero",
                stage.zero.stage,
                "differs from stages[0]",
                "Give all stages one ZeRO stage, over the same axes.",
            )
        if not 0 <= stage.zero.stage <= 3:
            raise _refuse(f"stages[{number}].zero.stage", stage.zero.stage, "no such ZeRO stage", "Give 0 to 3.")
        for axis in stage.zero.axes:
            if axis not in dict(stage.mesh):
                names = ", ".join(name for name, _ in stage.mesh)
                raise _refuse(f"stages[{number}].zero.axes", axis, "no such mesh axis", f"Use {names}.")
    return zero


def _chunks(
    plan: Plan, evaluator: Evaluator, axes: Sequence[str], samples: Sequence[Sequence[int]]
) -> tuple[tuple[Segment, ...], ...]:
    """The segments of each stage; together the stages have all operators, once and in order.

    Args:
        axes: mesh axes of the lowered plan, outermost first.
        samples: for each pipeline rank the distinct numbers of samples that its batch axis has to divide.
    """
    live = {axis for stage in plan.stages for axis, size in stage.mesh if size > 1}
    known = _Known(evaluator)
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
        chunks.append(_segments(stage, evaluator, operators, axes, live, samples[number % len(samples)], number, known))
        cursor = last + 1
    if cursor != len(order):
        raise _refuse("stages", order[cursor][0], "operators are left over", "Extend the last stage to the end.")
    return tuple(chunks)


def _first_batch_axis(plan: Plan, number: int, axes: Sequence[str]) -> int:
    """The axis over which a stage spreads its samples as evenly as they go: the first of its batch axes."""
    stage, samples = plan.stages[number], plan.samples_per_micro_batch
    name = next((axis for axis in stage.batch_axes if axis in axes), axes[0])
    count = dict(stage.mesh).get(name, 1) if stage.batch_axes else 1
    if count > samples:
        what = f"{samples} samples leave some of {count} ranks without any"
        raise _refuse_stage(plan, number, "batch_axes", what, "Give fewer ranks, or larger micro-batches.")
    return list(axes).index(name)


def _shares(plan: Plan, number: int, axis: int) -> tuple[int, ...] | None:
    """Samples of each rank of the first batch axis, or None where these are as even as they go."""
    stage, shares = plan.stages[number], plan.stages[number].batch_shares
    ranks = _ranks(plan, 1 << 62)
    if shares != plan.stages[number % ranks].batch_shares:
        raise _refuse(
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
        raise _refuse(path, stage.batch_axes[0], "only shares of the outermost axis are priced", "Use null.")
    return shares if len({*shares}) > 1 else None


def _program(schedule: Schedule, ranks: int, chunks: int, num_micro_batches: int) -> Ints:
    """The list of actions of an explicit schedule; empty for other kinds, which must suit the plan."""
    kind, order = schedule.kind, schedule.order
    if (kind == "explicit") != (order is not None):
        raise _refuse(
            "schedule.order",
            "null" if order is None else "a list",
            f"does not go with the kind {kind}",
            "Give an order if the kind is explicit, and only then.",
        )
    if order is not None:
        return read_order(order, ranks, chunks, num_micro_batches)
    if kind != "interleaved" and chunks != ranks:
        raise _refuse("schedule.kind", kind, "devices serve several stages", "Use interleaved, or an explicit order.")
    if kind == "interleaved" and num_micro_batches % ranks:
        raise _refuse(
            "num_micro_batches",
            num_micro_batches,
            f"the interleaved schedule needs a multiple of {ranks} pipeline ranks",
            "Change the number of micro-batches.",
        )
    return NO_PROGRAM


def _refuse(field: str, value: object, message: str, repair: str) -> PlanError:
    return PlanError(message, field=f"plan.{field}", value=value, repair=repair)


def _refuse_stage(plan: Plan, number: int, name: str, message: str, repair: str) -> PlanError:
    """The error for a field of a stage."""
    value = getattr(plan.stages[number], name)
    value = [list(each) for each in value] if name == "mesh" else list(value) if isinstance(value, tuple) else value
    return _refuse(f"stages[{number}].{name}", value, message, repair)


def _axis_names(plan: Plan, known: Sequence[str]) -> tuple[str, ...]:
    """Names of the axes of all meshes and of `known`, outermost first: axes that are not in `known` come before its
    last one, unless a mesh has them in another order."""
    names = dict.fromkeys(name for stage in plan.stages for name, _ in stage.mesh)
    others = [name for name in names if name not in known]
    usual = (*known[:-1], *others, known[-1])
    as_written = (*names, *(name for name in known if name not in names))
    wrong = [_out_of_order(plan, order) for order in (usual, as_written)]
    if None not in wrong:
        assert wrong[0] is not None
        mesh = [name for name, _ in plan.stages[wrong[0]].mesh]
        raise _refuse(
            f"stages[{wrong[0]}].mesh", mesh, "axes come in another order", f"Order them as {', '.join(usual)}."
        )
    return usual if wrong[0] is None else as_written


def _out_of_order(plan: Plan, order: Sequence[str]) -> int | None:
    """The first stage whose mesh has its axes in another order."""
    for number, stage in enumerate(plan.stages):
        mine = [name for name, _ in stage.mesh]
        if [name for name in order if name in mine] != mine:
            return number
    return None


def _ranks(plan: Plan, num_devices: int) -> int:
    """Number of pipeline ranks: chunk c must have the devices of chunk c - ranks."""
    devices = [parse_devices(stage.devices) for stage in plan.stages]
    if not devices:
        raise _refuse("stages", "[]", "no stages", "Give at least one.")
    ranks = next((r for r in range(1, len(devices)) if devices[r] == devices[0]), len(devices))
    used: set[int] = set()
    for number, mine in enumerate(devices):
        if mine != devices[number % ranks] or len(devices) % ranks:
            what = "virtual stages must go round the pipeline ranks in order"
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


class _Known:
    """What is the same for equal operators of a plan, computed once."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.default = functools.cache(functools.partial(default_signatures, evaluator))
        self.signature = functools.cache(functools.partial(_find_signature, evaluator))
        self._arrays = evaluator.tables.arrays
        self._divides: set[tuple[int, int, bytes, tuple[float, ...]]] = set()

    def check_divides(
        self, row: int, chosen: Ints, mesh_sizes: tuple[float, ...], samples: Sequence[int], path: str
    ) -> None:
        """Refuses signatures that split a dim which the ranks of the mesh cannot share.

        Args:
            row: row of the operator.
            chosen: [axes] its signatures.
            mesh_sizes: [axes] ranks.
            samples: the numbers of samples with which the dims have to divide.
            path: where the plan states the signatures.
        """
        for count in samples:
            case = (row, count, chosen.tobytes(), mesh_sizes)
            if case in self._divides:
                continue
            if not divides(self._arrays, row, np.ascontiguousarray(chosen), np.array(mesh_sizes), count):
                what = "a dim cannot be shared by the ranks of the mesh"
                repair = "Split another dim, or change the mesh or the micro-batch."
                raise _refuse(path, [int(size) for size in mesh_sizes], what, repair)
            self._divides.add(case)


def _segments(
    stage: Stage,
    evaluator: Evaluator,
    operators: Sequence[tuple[str, int, int]],
    axes: Sequence[str],
    live: AbstractSet[str],
    samples: Sequence[int],
    number: int,
    known: _Known,
) -> tuple[Segment, ...]:
    """The segments of one stage, one for each of its units.

    Args:
        stage: the stage.
        operators: (name, unit, offset in the unit) of its operators, in order.
        axes: mesh axes of the lowered plan, outermost first.
        live: the axes that have several ranks in some stage.
        samples: the numbers of samples with which dims that are split by batch have to divide.
        number: number of the stage, for errors.
        known: what other stages have computed.
    """
    by_unit: dict[int, list[tuple[str, int]]] = {}
    for name, unit, offset in operators:
        by_unit.setdefault(unit, []).append((name, offset))
    used: set[str] = set()
    segments = []
    mesh = dict(stage.mesh)
    mesh_sizes = tuple(float(mesh.get(axis, 1)) for axis in axes)
    # The full name of an operator names it alone, even if it reads like a module of others.
    own = {name for name, _, _ in operators}
    globs = by_precision(key for key in stage.shardings if key not in own)
    regions = tuple(glob for glob in stage.recompute if glob not in own)
    for unit, members in by_unit.items():
        unit_type = evaluator.blocks.units[unit].type
        base = int(evaluator.tables.spans[unit_type])
        chosen = np.zeros((len(members), len(axes)), dtype=np.int64)
        inside: list[tuple[int, int, str]] = []
        for k, (name, offset) in enumerate(members):
            key = name if name in stage.shardings else first_match(globs, name)
            entry = stage.shardings[key] if key is not None else {}
            for a, axis in enumerate(axes):
                batch = axis in stage.batch_axes
                if axis in entry:
                    assert key is not None
                    found = known.signature(unit_type, offset, entry[axis])
                    if found is not None:
                        chosen[k, a] = found
                        used.add(key)
                    elif matches_operator(key, name):
                        raise _no_signature(evaluator, unit_type, offset, entry[axis], f"stages[{number}].{key}.{axis}")
                    else:
                        inside.append((k, a, key))
                        chosen[k, a] = known.default(unit_type, offset)[False]
                else:
                    if key is not None and matches_operator(key, name):
                        used.add(key)
                    chosen[k, a] = known.default(unit_type, offset)[batch and axis in live]
        _follow(evaluator, unit_type, members, inside, chosen)
        for k, (name, offset) in enumerate(members):
            known.check_divides(base + offset, chosen[k], mesh_sizes, samples, f"stages[{number}].shardings.{name}")
        recomputed = np.array(
            [name in stage.recompute or first_match(regions, name) is not None for name, _ in members], dtype=np.bool_
        )
        first, last = base + members[0][1], base + members[-1][1] + 1
        segments.append(Segment(unit=unit, first=first, last=last, chosen=chosen, recomputed=recomputed))
    _check_named(stage, number, used, own)
    return tuple(segments)


def _check_named(stage: Stage, number: int, used: AbstractSet[str], own: AbstractSet[str]) -> None:
    """Refuses names in a stage that name nothing.

    Args:
        used: keys of the shardings that place an operator.
        own: names of the operators of the stage.
    """
    mesh = dict(stage.mesh)
    for key, entry in stage.shardings.items():
        for axis in entry:
            if axis not in mesh:
                repair = f"Use {', '.join(mesh)}." if mesh else "The mesh has none: remove it."
                raise _refuse(f"stages[{number}].shardings.{key}", axis, "no such mesh axis", repair)
        if key not in used:
            raise _refuse(
                f"stages[{number}].shardings",
                key,
                "matches no operator of the stage that can be placed so",
                "Remove or correct the key.",
            )
    for glob in stage.recompute:
        if glob not in own and not any(matches(glob, name) for name in own):
            what = "matches no operator of the stage"
            raise _refuse(f"stages[{number}].recompute", glob, what, "Remove or correct the entry.")


def _follow(
    evaluator: Evaluator,
    unit_type: int,
    members: Sequence[tuple[str, int]],
    inside: Iterable[tuple[int, int, str]],
    chosen: Ints,
) -> None:
    """Operators of a sharded module that cannot be placed as its key says follow the leader of their linkage group."""
    place = {offset: k for k, (_, offset) in enumerate(members)}
    groups = evaluator.tables.linkage.types[unit_type].groups
    for k, a, key in inside:
        offset = members[k][1]
        group = next((g for g in groups if offset in g.members), None)
        if group is not None and group.leader in place and matches(key, members[place[group.leader]][0]):
            chosen[k, a] = group.assignment[chosen[place[group.leader], a]][group.members.index(offset)]


def _find_signature(evaluator: Evaluator, unit_type: int, offset: int, entry: AxisSharding) -> int | None:
    """Number of the signature that `entry` writes, or None."""
    table = evaluator.tables.linkage.types[unit_type].signatures[offset]
    for index, signature in enumerate(table):
        if AxisSharding.of(signature) == entry:
            return index
    return None


@functools.lru_cache(maxsize=4096)
def _no_signature(evaluator: Evaluator, unit_type: int, offset: int, entry: AxisSharding, path: str) -> PlanError:
    table = evaluator.tables.linkage.types[unit_type].signatures[offset]
    try:
        for text in (*entry.inputs, *entry.outputs):
            parse_placement(text)
    except ValueError as fault:
        return _refuse(path, [*entry.inputs, *entry.outputs], str(fault), "Write B, P or S(dim).")
    legal = "; ".join(signature.text for signature in table)
    return _refuse(
        path, f"{list(entry.inputs)} -> {list(entry.outputs)}", "not a legal signature", f"Use one of: {legal}."
    )

"""Rules about the plan as a whole: the operators and devices of each stage, the cuts, and the division of samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from automap.errors import PlanError
from automap.globs import select
from automap.plan import Plan, model_ref, parse_devices
from automap.verify.model import Model
from automap.verify.reading import Violation, num_ranks, spread_samples

SHOWN = 3
"""The number of operators that a message names."""


def check_structure(plan: Plan, model: Model) -> tuple[Violation, ...]:
    """All faults of the plan as a whole; after these, single operators cannot be checked. Rules that depend on a broken
    rule are left out."""
    own = model_ref(model.graph)
    if plan.model.sha256 != own.sha256:
        return (Violation("model.sha256", f"the plan is for {plan.model}, not for {own}"),)
    if not plan.stages:
        return (Violation("stages", "there are none"),)
    found = [*_batch(plan, model), *_meshes(plan), *_ranges(plan, model), *_sync(plan, model)]
    if not any(v.where.endswith(".operators") for v in found):
        found += [*_coverage(plan, model), *_flow(plan, model), *_cuts(plan, model), *_recompute(plan, model)]
    return (*found, *_devices(plan, model))


def _batch(plan: Plan, model: Model) -> Iterator[Violation]:
    count, samples = plan.num_micro_batches, plan.samples_per_micro_batch
    batch = model.problem.training.global_batch
    if count < 1 or samples < 1 or count * samples != batch:
        yield Violation("num_micro_batches", f"{count} of {samples} samples are not the global batch of {batch}")
    for number, stage in enumerate(plan.stages):
        mesh = dict(stage.mesh)
        for axis in stage.batch_axes:
            where = f"stages[{number}].batch_axes"
            if axis not in mesh:
                yield Violation(where, f"the mesh has no axis {axis!r}")
            elif axis == stage.batch_axes[0] and not 1 <= mesh[axis] <= samples:
                yield Violation(where, f"{samples} samples do not reach all {mesh[axis]} ranks of {axis}")
            elif mesh[axis] < 1 or any(count % mesh[axis] for count in set(spread_samples(plan, stage))):
                yield Violation(where, f"{samples} samples do not divide over {mesh[axis]} ranks of {axis}")
        yield from _shares(plan, number)


def _shares(plan: Plan, number: int) -> Iterator[Violation]:
    stage, where = plan.stages[number], f"stages[{number}].batch_shares"
    shares, samples = stage.batch_shares, plan.samples_per_micro_batch
    if shares is None:
        return
    parts = dict(stage.mesh).get(stage.batch_axes[0], 1) if stage.batch_axes else 1
    if len(shares) != parts or sum(shares) != samples or min(shares) < 1:
        yield Violation(where, f"{shares} are not {parts} shares of {samples} samples, none of them empty")
    for other in plan.stages:
        if other.devices == stage.devices and other.batch_shares != shares:
            yield Violation(where, f"another stage on devices {stage.devices} has {other.batch_shares}")
            return


def _meshes(plan: Plan) -> Iterator[Violation]:
    for number, stage in enumerate(plan.stages):
        names = [axis for axis, _ in stage.mesh]
        if len(set(names)) < len(names) or any(size < 1 for _, size in stage.mesh):
            yield Violation(f"stages[{number}].mesh", f"{stage.mesh} is none: axes repeat or are empty")
        zero = stage.zero
        if not 0 <= zero.stage <= 3:
            yield Violation(f"stages[{number}].zero.stage", f"there is no ZeRO {zero.stage}")
        if zero.stage and not zero.axes:
            yield Violation(f"stages[{number}].zero.axes", f"ZeRO {zero.stage} over no axis")
        for axis in zero.axes:
            if axis not in names:
                yield Violation(f"stages[{number}].zero.axes", f"the mesh has no axis {axis!r}")


def _devices(plan: Plan, model: Model) -> Iterator[Violation]:
    there = model.problem.cluster.num_devices
    try:
        where = [parse_devices(stage.devices) for stage in plan.stages]
    except PlanError as fault:
        yield Violation("stages", str(fault))
        return
    ranks = num_ranks(plan)
    owner: dict[int, int] = {}
    for number, (stage, mine) in enumerate(zip(plan.stages, where, strict=True)):
        path = f"stages[{number}].devices"
        if max(mine) >= there:
            yield Violation(path, f"device {max(mine)} is not among the {there} of the cluster")
        if len(set(mine)) < len(mine):
            yield Violation(path, f"{stage.devices} names a device twice")
        size = math.prod(size for _, size in stage.mesh)
        if size != len(mine):
            mesh = " × ".join(f"{axis} {ranks_on}" for axis, ranks_on in stage.mesh)
            yield Violation(f"stages[{number}].mesh", f"the mesh {mesh} has {size} places for {len(mine)} devices")
        if mine != where[number % ranks]:
            yield Violation(path, f"virtual stages go round {ranks} ranks: not where stage {number % ranks}")
        elif stage.mesh != plan.stages[number % ranks].mesh:
            yield Violation(f"stages[{number}].mesh", f"differs from that of stage {number % ranks}")
        for device in mine:
            if owner.setdefault(device, number % ranks) != number % ranks:
                yield Violation(path, f"device {device} is also of pipeline rank {owner[device]}")
                break
    if len(plan.stages) % ranks:
        yield Violation("stages", f"{len(plan.stages)} stages do not go round {ranks} pipeline ranks")


def _ranges(plan: Plan, model: Model) -> Iterator[Violation]:
    for number, stage in enumerate(plan.stages):
        path = f"stages[{number}].operators"
        unknown = [name for name in stage.operators if name not in model.position]
        if unknown:
            yield Violation(path, f"the model has no operator {unknown[0]!r}")
        elif model.position[stage.operators[0]] > model.position[stage.operators[1]]:
            yield Violation(path, f"{stage.operators[0]} stands after {stage.operators[1]}")


def _spans(plan: Plan, model: Model) -> list[range]:
    places = [tuple(model.position[name] for name in stage.operators) for stage in plan.stages]
    return [range(first, last + 1) for first, last in places]


def _coverage(plan: Plan, model: Model) -> Iterator[Violation]:
    count = Counter(index for span in _spans(plan, model) for index in span)
    for times, what in ((0, "in no stage"), (2, "in more than one stage")):
        found = [
            op.name for i, op in enumerate(model.graph.operators) if op.is_live and min(count.get(i, 0), 2) == times
        ]
        if found:
            yield Violation("stages", f"{len(found)} operators are {what}: {', '.join(found[:SHOWN])}")


def _flow(plan: Plan, model: Model) -> Iterator[Violation]:
    made: set[int] = set()
    for number, span in enumerate(_spans(plan, model)):
        for index in span:
            for name in model.graph.operators[index].inputs:
                maker = model.live_maker(name)
                if maker is not None and maker not in made:
                    yield Violation(
                        f"stages[{number}].operators",
                        f"{model.graph.operators[index].name} needs {name!r} before it is made",
                    )
                    return
            made.add(index)


def _cuts(plan: Plan, model: Model) -> Iterator[Violation]:
    """Checks that the tensors that cross between two stages are those of a legal cut."""
    for number, span in enumerate(_spans(plan, model)[:-1]):
        end = span.stop
        crossing = model.crossing(end)
        if crossing not in model.crossings:
            yield Violation(
                f"stages[{number}].operators",
                f"cannot be cut after {model.graph.operators[end - 1].name}: {len(crossing)} tensors cross, "
                + ", ".join(sorted(crossing)[:SHOWN]),
            )


def _recompute(plan: Plan, model: Model) -> Iterator[Violation]:
    for number, (stage, span) in enumerate(zip(plan.stages, _spans(plan, model), strict=True)):
        names = [model.graph.operators[i].name for i in span]
        for glob in stage.recompute:
            if not select(glob, names):
                yield Violation(f"stages[{number}].recompute", f"{glob!r} names no operator of the stage")


def _sync(plan: Plan, model: Model) -> Iterator[Violation]:
    sync, training = plan.sync, model.problem.training
    if sync.kind not in training.sync_modes:
        yield Violation("sync.kind", f"{sync.kind} was not allowed, only {', '.join(training.sync_modes)}")
    if sync.period is not None and sync.period > training.sync_period:
        yield Violation("sync.period", f"{sync.period} steps, where {training.sync_period} are allowed")

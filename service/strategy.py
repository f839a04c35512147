"""A plan in one line: the use of every mesh axis, and everything that is unusual.

`pipeline 2 × 4 replicas × tensor parallel 8 · 16 micro-batches of 32 · ZeRO 1 · recompute full`. An axis is named by
what operators do on it (`plan.degrees`), whatever the plan calls it. Knows the plan alone, not its model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from automap.plan import AxisSharding, Degrees, Plan, Stage, Sync, parse_devices

USES = {
    "tensor": "tensor parallel {}",
    "context": "context parallel {}",
    "other": "operators over {}",
}
"""Uses of axes in words, except those that split the batch or nothing."""

DATA_PARALLEL = {0: "DDP", 1: "DDP with ZeRO 1", 2: "FSDP that shards gradients (SHARD_GRAD_OP)", 3: "FSDP"}
"""Stage of ZeRO -> what of PyTorch runs pure data parallelism with it."""


def strategy(plan: Plan) -> str:
    """The plan's strategy in one line."""
    stages = plan.stages
    groups = list(dict.fromkeys(stage.devices for stage in stages))
    parts = []
    if len(groups) > 1:
        chunks = len(stages) // len(groups)
        parts.append(f"pipeline {len(groups)}" + (f" ({chunks} chunks each)" if chunks > 1 else ""))
    found = (_axes(stage, degrees) for stage, degrees in zip(stages, _degrees(plan), strict=True))
    meshes = list(dict.fromkeys(" × ".join(words) or "1 replica" for words in found))
    if len(meshes) > 1:
        parts.append("stages of " + " / ".join(meshes))
    elif any(size > 1 for _, size in stages[0].mesh):
        parts += meshes
    used, there = num_devices(plan)
    words = [f"{used} of {there} devices"] if used < there else []
    words.append(" × ".join(parts) or "one device")
    count = plan.num_micro_batches
    words.append(f"{count} micro-batch{'es' if count > 1 else ''} of {plan.samples_per_micro_batch}")
    words += _shares(plan)
    words += _off_batch(plan)
    words += _zero(plan)
    recompute = [_recompute(stage) for stage in stages]
    if any(recompute):
        kinds = [kind or "nothing" for kind in dict.fromkeys(recompute)]
        words.append("recompute " + " / ".join(kinds))
    if plan.schedule.kind != "1f1b" and len(groups) > 1:
        words.append(plan.schedule.kind)
    if plan.sync.kind != "synchronous":
        words.append(_sync(plan.sync))
    return " · ".join(words)


def data_parallel(plan: Plan) -> str | None:
    """What of PyTorch runs a plan whose devices are all replicas and nothing else; None for other plans."""
    stage, *further = plan.stages
    live = [size for _, size in stage.mesh if size > 1]
    is_plain = not further and not stage.batch_shares and not _off_batch(plan) and plan.sync.kind == "synchronous"
    if not is_plain or len(live) != 1 or not plan.degrees:
        return None
    # Where a plan states what splits the batch in place of what does not, parameters may be split beside it.
    is_usual = all(axis in stage.batch_axes for axis, size in stage.mesh if size > 1)
    if plan.degrees[0].data != live[0] or plan.degrees[0].expert > 1 or not is_usual:
        return None
    return DATA_PARALLEL[stage.zero.stage]


def num_devices(plan: Plan) -> tuple[int, int]:
    """Number of devices that a plan uses, and number of devices of its cluster."""
    used = {device for stage in plan.stages for device in parse_devices(stage.devices)}
    return len(used), sum(int(node["num_devices"]) * int(node.get("count", 1)) for node in plan.cluster["nodes"])


def _degrees(plan: Plan) -> tuple[Degrees | None, ...]:
    """The degrees of each stage; None where the document was never priced."""
    return (plan.degrees or (None,)) * len(plan.stages) if len(plan.degrees) < 2 else plan.degrees


def batch(plan: Plan) -> str:
    """What a device has of a micro-batch, and how many micro-batches a step has."""
    most = max(plan.degrees, key=lambda degrees: degrees.micro_batch)
    what = f"{most.micro_batch} sample{'s' if most.micro_batch > 1 else ''}"
    if most.sequence_length is not None:
        what += f" of {most.sequence_length:,} tokens"
    steps, samples = most.accumulation_steps, plan.training.global_batch
    each = f" in each of {steps} micro-batches" if steps > 1 else ""
    return f"{what} a device{each}, {samples:,} sample{'s' if samples > 1 else ''} a step"


def _axes(stage: Stage, degrees: Degrees | None) -> list[str]:
    """The use of each axis of several ranks; axes that split the batch count as one, wherever they are.

    Without degrees the axes are called what the document calls them.
    """
    live = {axis: size for axis, size in stage.mesh if size > 1}
    if degrees is None:
        return [f"{axis} {size}" for axis, size in live.items()]
    words = []
    if degrees.data > 1:
        sizes = [size for axis, size in live.items() if degrees.axes[axis] == "data"]
        groups = f" in {' × '.join(map(str, sizes[:-1]))} groups of {sizes[-1]}" if len(sizes) > 1 else ""
        words.append(f"{degrees.data} replicas{groups}")
    words += [f"experts over {degrees.expert}"] if degrees.expert > 1 else []
    for use, text in USES.items():
        size = getattr(degrees, use)
        if size > 1:
            words.append(text.format(size))
    return [*words, _repeated(stage, degrees)] if degrees.repeated > 1 else words


def _repeated(stage: Stage, degrees: Degrees) -> str:
    """Axes on which most of the arithmetic is not split, and what is split there."""
    every = [axis for axis, use in degrees.axes.items() if use == "repeated"]
    axes = [axis for axis in every if axis not in degrees.expert_axes]
    split = [n for n, entry in stage.shardings.items() if any(a in entry and not _is_whole(entry[a]) for a in axes)]
    if split:
        names = split[0] if len(split) == 1 else f"{split[0]} and {len(split) - 1} more"
        return f"most work repeated by {degrees.repeated}, all but {names}"
    # On an axis that splits the batch, operators do so that the plan does not mention.
    is_mixed = any(axis in stage.batch_axes for axis in axes)
    share = "most" if is_mixed else "all" if axes == every else "all other"
    return f"{share} work repeated by {degrees.repeated}"


def _shares(plan: Plan) -> list[str]:
    """Least and most samples of a rank, if not all groups of the first batch axis have equally many.

    The other batch axes split the samples of a group as evenly as they can.
    """
    found: set[int] = set()
    for stage, degrees in zip(plan.stages, _degrees(plan), strict=True):
        sizes, uses = dict(stage.mesh), degrees.axes if degrees else {}
        share, more = divmod(plan.samples_per_micro_batch, sizes.get(stage.batch_axes[0], 1) if stage.batch_axes else 1)
        within = math.prod(sizes.get(axis, 1) for axis in stage.batch_axes[1:] if uses.get(axis, "data") == "data")
        for samples in stage.batch_shares or ((share, share + 1) if more else ()):
            found |= {samples // within, -(-samples // within)}
    if len(found) < 2:
        return []
    least, most = min(found), max(found)
    if least == 0:
        return [f"at most {most} sample{'s' if most > 1 else ''} a rank, none on some"]
    return [f"{least} to {most} samples a rank"]


def _off_batch(plan: Plan) -> list[str]:
    """Operators that do something else on an axis that splits the batch of all others; not experts on theirs."""
    own: dict[str, Mapping[str, AxisSharding]] = {}
    for stage, degrees in zip(plan.stages, _degrees(plan), strict=True):
        others = () if degrees is None else (*(a for a, u in degrees.axes.items() if u != "data"), *degrees.expert_axes)
        for name, entry in stage.shardings.items():
            axes = {axis: how for axis, how in entry.items() if axis in stage.batch_axes and axis not in others}
            if axes:
                own.setdefault(name, axes)
        for axis, use in degrees.axes.items() if degrees is not None else ():
            if use == "data" and axis not in (*stage.batch_axes, *others):
                own |= _beside_batch(stage, axis)
    if not own:
        return []
    repeated = sum(all(_is_whole(how) for how in entry.values()) for entry in own.values())
    first = next(iter(own))
    words = f"{first} and {len(own) - 1} more not split by batch" if len(own) > 1 else f"{first} not split by batch"
    if repeated:
        words += f", {'repeated' if repeated == len(own) else f'{repeated} of them repeated'}"
    return [words]


def _beside_batch(stage: Stage, axis: str) -> dict[str, Mapping[str, AxisSharding]]:
    """Operators that split something else on an axis on which the plan states what splits the batch, the first dim or
    the one that most split."""
    split = {name: entry for name, entry in stage.shardings.items() if axis in entry and not _is_whole(entry[axis])}
    made = Counter("".join(entry[axis].outputs[:1]) for entry in split.values())
    batch = max(made, key=lambda text: (text == "S(0)", made[text]), default="")
    return {name: {axis: entry[axis]} for name, entry in split.items() if "".join(entry[axis].outputs[:1]) != batch}


def _is_whole(how: AxisSharding) -> bool:
    return set(how.inputs) | set(how.outputs) <= {"B"}


def _zero(plan: Plan) -> list[str]:
    stages = sorted({stage.zero.stage for stage in plan.stages})
    if stages == [0]:
        return []
    first = plan.stages[0]
    sizes = dict(first.mesh)
    over = math.prod(sizes.get(axis, 1) for axis in first.zero.axes)
    replicas = plan.degrees[0].data if plan.degrees else math.prod(sizes.get(axis, 1) for axis in first.batch_axes)
    return ["ZeRO " + "/".join(map(str, stages)) + (f" over {over}" if over != replicas else "")]


def _sync(sync: Sync) -> str:
    every = "every step" if sync.period == 1 else f"every {sync.period} steps"
    if sync.kind == "local_sgd":
        return f"local SGD, averaged {every}"
    later = "1 step" if sync.delay == 1 else f"{sync.delay} steps"
    return f"DaSGD, averaged {every}, merged {later} later"


def _recompute(stage: Stage) -> str:
    if not stage.recompute:
        return ""
    # Whole modules, or single operators in them.
    modules = [name for name in stage.recompute if "/" not in name]
    if not modules or any("*" in name for name in modules):
        return "full" if modules else "selective"
    return f"full in {len(modules)} module{'s' if len(modules) > 1 else ''}"

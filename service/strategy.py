"""A plan in one line: the use of every mesh axis, and everything that is unusual.

`pipeline 2 × 4 replicas × tensor parallel 8 · 16 micro-batches of 32 · ZeRO 1 · recompute full`. An axis is named by
what operators do on it, whatever the plan calls it. Knows the plan alone, not its model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from automap.plan import AxisSharding, Plan, Stage, Sync, parse_devices

OTHERS = {"tp": "tensor parallel {}", "cp": "sequence over {}"}
"""Axes by name on which most operators do not split their batch."""


def strategy(plan: Plan) -> str:
    """The plan's strategy in one line."""
    stages = plan.stages
    groups = list(dict.fromkeys(stage.devices for stage in stages))
    parts = []
    if len(groups) > 1:
        chunks = len(stages) // len(groups)
        parts.append(f"pipeline {len(groups)}" + (f" ({chunks} chunks each)" if chunks > 1 else ""))
    meshes = list(dict.fromkeys(" × ".join(_axes(stage)) or "1 replica" for stage in stages))
    if len(meshes) > 1:
        parts.append("stages of " + " / ".join(meshes))
    elif any(size > 1 for _, size in stages[0].mesh):
        parts += meshes
    used, there = num_devices(plan)
    words = [f"{used} of {there} devices"] if used < there else []
    words.append(" × ".join(parts) or "one device")
    count = plan.num_micro_batches
    words.append(
        f"{count} micro-batches of {plan.samples_per_micro_batch}"
        if count > 1
        else f"{plan.samples_per_micro_batch} at once"
    )
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


def num_devices(plan: Plan) -> tuple[int, int]:
    """Number of devices that a plan uses, and number of devices of its cluster."""
    used = {device for stage in plan.stages for device in parse_devices(stage.devices)}
    return len(used), sum(int(node["num_devices"]) * int(node.get("count", 1)) for node in plan.cluster["nodes"])


def _axes(stage: Stage) -> list[str]:
    """The use of each axis of several ranks; axes that split the batch count as one, wherever they are."""
    live = {axis: size for axis, size in stage.mesh if size > 1}
    batch = [axis for axis in live if axis in stage.batch_axes]
    words = []
    if batch:
        sizes = [live[axis] for axis in batch]
        groups = f" in {' × '.join(map(str, sizes[:-1]))} groups of {sizes[-1]}" if len(sizes) > 1 else ""
        words.append(f"{math.prod(sizes)} replicas{groups}")
    for axis, size in live.items():
        named = any(axis in entry for entry in stage.shardings.values())
        if axis == "ep" and named:
            words.append(f"experts over {size}")
        elif axis not in batch and not named:
            words.append(f"all work repeated by {size}")
        elif axis not in batch:
            words.append(OTHERS.get(axis, "operators over {}").format(size))
    return words


def _shares(plan: Plan) -> list[str]:
    """Least and most samples of a rank, if not all ranks have equally many."""
    found: set[int] = set()
    for stage in plan.stages:
        ranks = dict(stage.mesh).get(stage.batch_axes[0], 1) if stage.batch_axes else 1
        share, more = divmod(plan.samples_per_micro_batch, ranks)
        found |= set(stage.batch_shares or ((share, share + 1) if more else ()))
    return [f"{min(found)} to {max(found)} samples a rank"] if found else []


def _off_batch(plan: Plan) -> list[str]:
    """Operators that do something else on an axis that splits the batch of all others; not experts on theirs."""
    own: dict[str, Mapping[str, AxisSharding]] = {}
    for stage in plan.stages:
        for name, entry in stage.shardings.items():
            axes = {axis: how for axis, how in entry.items() if axis in stage.batch_axes and axis != "ep"}
            if axes:
                own.setdefault(name, axes)
    if not own:
        return []
    repeated = sum(all(_is_whole(how) for how in entry.values()) for entry in own.values())
    first = next(iter(own))
    words = f"{first} and {len(own) - 1} more not split by batch" if len(own) > 1 else f"{first} not split by batch"
    if repeated:
        words += f", {'repeated' if repeated == len(own) else f'{repeated} of them repeated'}"
    return [words]


def _is_whole(how: AxisSharding) -> bool:
    return set(how.inputs) | set(how.outputs) <= {"B"}


def _zero(plan: Plan) -> list[str]:
    stages = sorted({stage.zero.stage for stage in plan.stages})
    if stages == [0]:
        return []
    first = plan.stages[0]
    sizes = dict(first.mesh)
    over = math.prod(sizes.get(axis, 1) for axis in first.zero.axes)
    replicas = math.prod(sizes.get(axis, 1) for axis in first.batch_axes)
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
    return "full" if any("/" not in name for name in stage.recompute) else "selective"

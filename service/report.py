"""A plan in words, for the command line and the demo. Knows nothing of terminals."""

from __future__ import annotations

from automap.plan import DeviceMemory, Plan, SearchRecord, Stage, Sync, parse_devices

GIB = 1 << 30


def strategy(plan: Plan) -> str:
    """The plan's strategy in one line: `pp 2 × dp 4 × tp 8 · 16 micro-batches of 32 · ZeRO 1 · recompute full`."""
    stages = plan.stages
    groups = list(dict.fromkeys(stage.devices for stage in stages))
    parts = []
    if len(groups) > 1:
        chunks = len(stages) // len(groups)
        parts.append(f"pp {len(groups)}" + (f" ({chunks} chunks each)" if chunks > 1 else ""))
    meshes = list(dict.fromkeys(_mesh(stage) for stage in stages))
    if len(meshes) == 1:
        parts += [f"{axis} {size}" for axis, size in meshes[0]]
    else:
        parts.append("stages of " + " / ".join(" × ".join(f"{a} {n}" for a, n in mesh) or "1" for mesh in meshes))
    words = [" × ".join(parts) or "one device"]
    count = plan.num_micro_batches
    words.append(
        f"{count} micro-batches of {plan.samples_per_micro_batch}"
        if count > 1
        else f"{plan.samples_per_micro_batch} at once"
    )
    shares = sorted({share for stage in stages for share in stage.batch_shares or ()})
    if shares:
        words.append(f"{shares[0]} to {shares[-1]} samples a rank")
    own = list(dict.fromkeys(name for stage in stages for name in _off_batch(stage)))
    if own:
        words.append(own[0] + (f" and {len(own) - 1} more" if len(own) > 1 else "") + " not split by batch")
    zero = sorted({stage.zero.stage for stage in stages})
    if zero != [0]:
        words.append("ZeRO " + "/".join(map(str, zero)))
    recompute = [_recompute(stage) for stage in stages]
    if any(recompute):
        kinds = [kind or "nothing" for kind in dict.fromkeys(recompute)]
        words.append("recompute " + " / ".join(kinds))
    if plan.schedule.kind != "1f1b" and len(groups) > 1:
        words.append(plan.schedule.kind)
    if plan.sync.kind != "synchronous":
        words.append(_sync(plan.sync))
    return " · ".join(words)


def fullest(plan: Plan) -> DeviceMemory:
    """The devices with the least room left."""
    assert plan.estimate is not None
    return max(plan.estimate.memory_bytes, key=lambda memory: memory.total / memory.capacity)


def summary(plan: Plan) -> list[tuple[str, str]]:
    """Label and text of every line that a user reads first."""
    estimate, search = plan.estimate, plan.search
    lines = [("strategy", strategy(plan))]
    if estimate is not None:
        low, high = estimate.error_band_s
        lines.append(("step", f"{seconds(estimate.step_time_s)} (between {seconds(low)} and {seconds(high)})"))
        if plan.measured is not None and "step_time_s" in plan.measured:
            text = f"{seconds(plan.measured['step_time_s'])} a step, the median of {plan.measured['num_steps']}"
            lines.append(("measured", text))
        speed = f"{estimate.samples_per_s:,.0f} samples/s"
        if estimate.tokens_per_s_per_device is not None:
            num_devices = len({d for stage in plan.stages for d in parse_devices(stage.devices)})
            speed += f", {estimate.tokens_per_s_per_device * num_devices:,.0f} tokens/s"
        # Nobody knows the FLOPs of a measured profile.
        lines.append(("speed", f"{speed}, {estimate.mfu:.0%} of peak" if estimate.mfu else speed))
        memory = fullest(plan)
        share = memory.total / memory.capacity
        text = f"{memory.total / GIB:.1f} of {memory.capacity / GIB:.1f} GiB ({share:.0%}) on devices {memory.devices}"
        lines.append(("memory", text))
    if estimate is not None and search is not None:
        lines.append(("against", against(plan)))
        lines.append(("found by", f"{search.found_by} in {search.evaluations:,} evaluations, seed {search.seed}"))
        if len(search.searchers) > 1:
            each = (f"{name} {'nothing' if s is None else seconds(s)}" for name, s in search.searchers.items())
            lines.append(("reached", ", ".join(each)))
        lines.append(("bound", gap(estimate.step_time_s, search)))
        lines += trials(search)
    return lines


def trials(search: SearchRecord) -> list[tuple[str, str]]:
    """What came of each plan that was tried, and how far the estimates are from it."""
    lines = []
    for trial in search.trials:
        found = trial.outcome.replace("_", " ")
        if trial.measured is not None:
            found = f"{seconds(trial.measured['step_time_s'])} measured"
        lines.append(("tried", f"{trial.strategy}: {seconds(trial.predicted['step_time_s'])} estimated, {found}"))
    scale = search.calibration
    if scale is not None:
        text = f"steps take {scale.factor:.3g} times their estimates here"
        more = ""
        if scale.num_trials > 1:
            more = f", the ratios within {scale.spread:.3g} of each other: computing {scale.compute:.3g}, "
            more += f"communicating {scale.communication:.3g}"
        lines.append(("scale", f"{text} ({scale.num_trials} measured{more})"))
    return lines


def gap(step_time_s: float, search: SearchRecord) -> str:
    """How much faster another plan could be."""
    if search.proven:
        return "no plan of those that can be decided here is faster: proven"
    if search.lower_bound_s is None:
        return "not known"
    return f"no plan takes less than {seconds(search.lower_bound_s)}, {1 - search.lower_bound_s / step_time_s:.0%} less"


def against(plan: Plan) -> str:
    """How much faster the plan is than what others would run."""
    assert plan.estimate is not None and plan.search is not None
    texts = []
    names = {"dp": "pure data parallelism", "expert": "the best expert template", "yours": "your plan"}
    for key, name in names.items():
        baseline_s = plan.search.baselines.get(key)
        if baseline_s is not None:
            texts.append(f"{baseline_s / plan.estimate.step_time_s:.2f}x {name}")
        elif key != "yours":
            texts.append(f"{name} does not fit")
    return ", ".join(texts)


def seconds(value: float) -> str:
    """A time with three significant digits."""
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        # By what is shown: 999.6 µs are 1 ms, not 1e+03 µs.
        if value * scale < 999.5:
            return f"{value * scale:.3g} {unit}"
    return f"{value:.3g} s" if value < 999.5 else f"{value:,.0f} s"


def _mesh(stage: Stage) -> tuple[tuple[str, int], ...]:
    return tuple((axis, size) for axis, size in stage.mesh if size > 1)


def _off_batch(stage: Stage) -> list[str]:
    """Operators that do something else on an axis that splits the batch of all others."""
    return [name for name, axes in stage.shardings.items() if any(axis in stage.batch_axes for axis in axes)]


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

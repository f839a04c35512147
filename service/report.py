"""A plan in words, for the command line and the demo. Knows nothing of terminals."""

from __future__ import annotations

from collections.abc import Sequence

from automap.amounts import in_seconds
from automap.comparisons import Change, TargetCost
from automap.plan import DeviceMemory, Estimate, Plan, devices_in_words
from automap.search_record import LEFT_BY_TARGET, LEFT_IDLE, SearchRecord
from automap.targets import ANY
from service.strategy import batch, data_parallel, num_devices, strategy

GIB = 1 << 30
FINDERS = {"expert": "the templates", "yours": "you"}
"""Who found a plan, in words, where that is not a searcher's name."""
MOST = 0.8
"""Share of a difference that is most of it."""
SHOWN = 0.1
"""Share of a change's worth from which on a part of it is shown."""
COUNTS = {1: "one makes", 2: "two make", 3: "three make", 4: "four make"}
"""How many changes make something, in words."""


def fullest(plan: Plan) -> DeviceMemory:
    """The devices with the least room left."""
    assert plan.estimate is not None
    return max(plan.estimate.memory_bytes, key=lambda memory: memory.total / memory.capacity)


def memory_share(plan: Plan) -> float:
    """Share of its memory that the fullest device uses."""
    memory = fullest(plan)
    return memory.total / memory.capacity


def summary(plan: Plan) -> list[tuple[str, str]]:
    """Label and text of every line that a user reads first."""
    estimate, search = plan.estimate, plan.search
    lines = [("strategy", strategy(plan))]
    used, there = num_devices(plan)
    if used < there and search is not None:
        why = "more would not make it faster, as far as the estimate can tell"
        if any(warning.endswith(LEFT_IDLE) for warning in plan.warnings):
            why = "the degrees in hints.fix leave the others idle"
        elif any(warning.endswith(LEFT_BY_TARGET) for warning in plan.warnings):
            why = "the target has no plan of this model with this batch on all of them"
        lines.append(("devices", f"{used} of {there}: {why}"))
    if plan.degrees:
        lines.append(("batch", batch(plan)))
    if estimate is not None:
        lines.append(("step", step(plan)))
        if plan.measured is not None and "step_time_s" in plan.measured:
            text = f"{in_seconds(plan.measured['step_time_s'])} a step, the median of {plan.measured['num_steps']}"
            lines.append(("measured", text))
        lines.append(("speed", speed(plan)))
        memory = fullest(plan)
        share = memory_share(plan)
        where = devices_in_words(memory.devices)
        text = f"{memory.total / GIB:.1f} of {memory.capacity / GIB:.1f} GiB ({share:.0%}) on {where}"
        if estimate.fit_probability is not None:
            text += f", fits with {probability(estimate.fit_probability)}"
        lines.append(("memory", text))
    if estimate is not None and search is not None:
        if comparison := against(plan):
            lines.append(("against", comparison))
        lines += yours(plan)
        if search.any_trainer is not None:
            lines.append(("target", without_target(plan, search.any_trainer)))
        searcher = FINDERS.get(search.found_by, search.found_by)
        lines.append(("found by", f"{searcher} in {search.evaluations:,} evaluations, seed {search.seed}"))
        if search.first_s is not None and search.first_after_s is not None:
            more = search.first_s / estimate.step_time_s - 1.0
            beside = f"{abs(more):.1%} {'above this one' if more > 0.0 else 'below this one, a tie'}"
            beside = beside if abs(more) >= 0.0005 else "as fast as this one"
            text = f"the network proposed a plan of {in_seconds(search.first_s)}, {beside}"
            lines.append(("at first", f"{text}, after {in_seconds(search.first_after_s)}"))
        if search.searchers:
            each = (f"{name} {'nothing' if s is None else in_seconds(s)}" for name, s in search.searchers.items())
            lines.append(("reached", ", ".join(each)))
        lines.append(("bound", bound(plan)))
        lines += trials(search)
        lines += side_by_side(plan)
    return lines


def yours(plan: Plan) -> list[tuple[str, str]]:
    """What the user runs today beside the plan, and what each change between the two is worth."""
    assert plan.estimate is not None and plan.search is not None
    own, best_s = plan.search.yours, plan.estimate.step_time_s
    if own is None:
        return []
    if own.shortage is not None:
        text = f"{own.name} does not fit: {own.shortage}; its step would take {in_seconds(own.step_time_s)}"
    else:
        text = f"{own.name} takes {in_seconds(own.step_time_s)}, this plan {in_seconds(best_s)}"
    large = most(own.changes)
    if plan.search.found_by == "yours":
        text += ": nothing that was found is faster, this is your plan"
    elif large and len(large) < len(own.changes):
        text += f": {len(own.changes)} changes, {COUNTS.get(len(large), f'{len(large)} make')} most of the difference"
    lines = [("yours", text), *(("", note) for note in own.notes)]
    return lines + [("change", worth(change)) for change in own.changes]


def side_by_side(plan: Plan) -> list[tuple[str, str]]:
    """The best plans with other degrees of parallelism: step time, difference from the plan, and memory.

    Where pure data parallelism is as fast, as far as the estimate can tell, a line says so.
    """
    assert plan.estimate is not None and plan.search is not None
    lines: list[tuple[str, str]] = []
    step_s = plan.estimate.step_time_s
    for one in plan.search.beside:
        more = one.step_time_s / step_s - 1.0
        difference = f"{more:+.1%}".replace("-", "−") + (", a tie" if one.tie else "")
        text = f"{in_seconds(one.step_time_s)} ({difference}), {one.memory:.0%} of the memory: {one.strategy}"
        lines.append(("" if lines else "others", text))
    if plan.training.target != ANY:
        return lines
    tied = next((one.data_parallel for one in plan.search.beside if one.tie and one.data_parallel), None)
    if (own := data_parallel(plan)) is not None:
        lines.append(("simplest", f"this plan is pure data parallelism: use {own}"))
    elif tied is not None:
        lines.append(("simplest", f"pure data parallelism is as fast, as far as the estimate can tell: use {tied}"))
    return lines


def without_target(plan: Plan, found: TargetCost) -> str:
    """What the plan's target costs, and why."""
    assert plan.estimate is not None and plan.search is not None
    less = 1.0 - found.step_time_s / (plan.search.fastest_s or plan.estimate.step_time_s)
    text = f"the best plan found for any trainer takes {in_seconds(found.step_time_s)}, {less:.0%} less"
    return f"{text}: {'; '.join(found.beyond)}"


def most(changes: Sequence[Change]) -> list[Change]:
    """The fewest changes that save `MOST` of what all those that save something do."""
    found: list[Change] = []
    total = sum(change.saved_s for change in changes if change.saved_s > 0.0)
    for change in sorted(changes, key=lambda one: -one.saved_s):
        if total <= 0.0 or sum(one.saved_s for one in found) >= MOST * total:
            break
        found.append(change)
    return found


def worth(change: Change) -> str:
    """A change with the seconds that it saves, and where."""
    if not change.saved_s:
        return f"{change.about}: as fast"
    text = f"{change.about}: {in_seconds(abs(change.saved_s))} {'less' if change.saved_s > 0.0 else 'more'}"
    parts = sorted(change.parts_s.items(), key=lambda part: -abs(part[1]))
    shown = [(name, saved) for name, saved in parts if abs(saved) >= SHOWN * abs(change.saved_s)]
    text += f" ({', '.join(f'{name} {_signed(-saved)}' for name, saved in shown)})"
    return text if change.fits else f"{text}; it does not fit yet"


def _signed(value: float) -> str:
    return f"{'−' if value < 0.0 else '+'}{in_seconds(abs(value))}"


def trials(search: SearchRecord) -> list[tuple[str, str]]:
    """Results of the trials, what was expected of each after those before it, and how measured times compare with the
    estimates."""
    lines = []
    for trial in search.trials:
        found = trial.outcome.replace("_", " ")
        if trial.measured is not None:
            found = f"{in_seconds(trial.measured['step_time_s'])} measured"
        estimated = in_seconds(trial.predicted["step_time_s"])
        times = f"{estimated} estimated, {in_seconds(trial.expected_s)} expected, {found}"
        lines.append(("tried", f"{trial.strategy} (by {trial.found_by}): {times}"))
    scale = search.calibration
    if scale is not None:
        text = f"steps take {scale.factor:.3g} times their estimates here"
        more = ""
        if scale.num_trials > 1:
            more = f", the ratios within {scale.spread:.3g} of each other: computing {scale.compute:.3g}, "
            more += f"communicating {scale.communication:.3g}"
        lines.append(("scale", f"{text} ({scale.num_trials} measured{more})"))
    return lines


def step(plan: Plan) -> str:
    """The step time with its error band."""
    assert plan.estimate is not None
    low, high = plan.estimate.error_band_s
    return f"{in_seconds(plan.estimate.step_time_s)} (between {in_seconds(low)} and {in_seconds(high)})"


def head(plan: Plan) -> list[tuple[str, str]]:
    """Label and text of the lines about a plan that no search need have found."""
    return [
        ("strategy", strategy(plan)),
        ("batch", batch(plan)),
        ("step", step(plan)),
        ("speed", speed(plan)),
        ("bound", bound(plan)),
    ]


def time_parts(estimate: Estimate) -> dict[str, float]:
    """Seconds of a step by what they are spent on; they add up to the step time."""
    found = {name: float(estimate.breakdown_s[name]) for name in ("compute", "bubble", "optimizer", "overhead")}
    exposed = estimate.breakdown_s["exposed_communication"]
    return found | {f"exposed {name.replace('_', '-')}": float(value) for name, value in exposed.items()}


def speed(plan: Plan) -> str:
    """Samples and tokens a second, and the share of the peak that the model's own FLOPs are (MFU)."""
    assert plan.estimate is not None
    text = f"{_three_figures(plan.estimate.samples_per_s)} samples/s"
    tokens = plan.estimate.tokens_per_s_per_device
    if tokens is not None:
        devices = num_devices(plan)[0]
        text += f", {_three_figures(tokens * devices)} tokens/s ({_three_figures(tokens)} a device)"
    # Nobody knows the FLOPs of a measured profile.
    return f"{text}, MFU {_percent(plan.estimate.mfu)}" if plan.estimate.mfu else text


def _percent(share: float) -> str:
    """A share with one decimal of a percent, or two figures where that would be none: 56.6%, 0.0041%."""
    return f"{share:.1%}" if share >= 5e-4 else f"{100.0 * share:.2g}%"


def _three_figures(value: float) -> str:
    """At least three figures, with commas: 0.123, 19.2, 10,446."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def bound(plan: Plan) -> str:
    """The lower bound on the step time of other plans: of those that the search can decide, or of all plans."""
    assert plan.estimate is not None
    anyhow, step_s = plan.estimate.lower_bound_s, plan.estimate.step_time_s
    fastest_s, proven, least = None, False, anyhow
    if plan.search is not None:
        fastest_s, proven, least = plan.search.fastest_s, plan.search.proven, plan.search.lower_bound_s or anyhow
    if proven and fastest_s is None:
        return "no plan that this search can decide is faster: proven"
    if proven and fastest_s is not None:
        less = f"{in_seconds(fastest_s)}, {1 - fastest_s / step_s:.0%} less"
        return f"the fastest plan that this search can decide takes {less}: proven"
    if plan.search is not None and plan.search.certified_after_s is not None:
        return (
            f"no plan that this search can decide is more than {1 - least / step_s:.1%} faster: "
            f"none takes less than {in_seconds(least)}"
        )
    which = "that this search can decide" if least > anyhow else "of this model on this cluster"
    return f"no plan {which} takes less than {in_seconds(least)}, {1 - least / step_s:.0%} less"


def against(plan: Plan) -> str:
    """How much faster the plan is than what others would run, and that it ties with the fastest plan found."""
    assert plan.estimate is not None and plan.search is not None
    texts, ties = [], []
    step_s, fastest_s = plan.estimate.step_time_s, plan.search.fastest_s
    names = {"dp": "pure data parallelism", "expert": "the best expert template", "yours": "your plan"}
    for key, name in names.items():
        baseline_s = plan.search.baselines.get(key)
        # Of the plans that are as fast as the fastest one, the plainest is returned; the others are ties.
        if baseline_s is not None and fastest_s is not None and fastest_s <= baseline_s < step_s:
            ties.append(name)
        elif baseline_s is not None:
            texts.append(f"{baseline_s / step_s:.2f}x {name}")
        elif key in plan.search.baselines and key != "yours":
            texts.append(f"{name} does not fit into memory")
        elif key == "dp" and "expert" in plan.search.baselines:
            texts.append(f"{name} is not possible with this batch or these hints")
    if fastest_s is not None:
        others = f"{', '.join(ties)} and " if ties else ""
        texts.append(f"as fast as {others}the fastest plan found ({fastest_s / step_s:.2f}x, a tie)")
    return ", ".join(texts)


def probability(value: float) -> str:
    """A probability in words; nothing is called certain."""
    if 0.01 <= value < 0.99:
        return f"{value:.0%} probability"
    return "more than 99% probability" if value > 0.5 else "less than 1% probability"

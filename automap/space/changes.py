"""Differences between two plans: the degrees are changed one after another, and each step is priced exactly.

Both plans are read as stated strategies (`automap.space.stated_strategy`). Starting from the first one, the next change
is the one that gives the fastest plan, chosen

1. among the changes that save time and give a plan that fits into memory;
2. else among those that save time;
3. else among all others, which may be needed for the last plan to fit.

If no single change saves time, two changes are made together if that is faster. If no change gives a plan, all
remaining ones are made together. The last change contains all that is not a degree, such as shardings of single
operators. Units: seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from automap.arrays import Ints
from automap.comparisons import Change
from automap.device_kinds import in_gib
from automap.errors import UserError
from automap.plan import MEMORY_CLASSES, Estimate, Plan, Sync, devices_in_words
from automap.price.degrees import degrees_of
from automap.price.estimate import estimate_lowered
from automap.price.evaluator import Evaluator, blank
from automap.price.lowered_plan import LoweredPlan
from automap.price.plan_reader import lower_plan
from automap.space.stated_parts import layer_counts
from automap.space.stated_strategy import Strategy, hand_made

NAMES: Mapping[str, str] = {
    "devices": "devices",
    "shares": "shares of the samples",
    "tp": "tensor parallel",
    "sequence_parallel": "sequence parallel",
    "pp": "pipeline",
    "virtual": "chunks of a pipeline rank",
    "layers": "layers of each chunk",
    "schedule": "schedule",
    "cp": "context parallel",
    "ep": "experts over",
    "micro_batch": "micro-batch",
    "zero": "ZeRO",
    "recompute": "recompute",
}
"""Fields of a strategy that are changed one at a time, in words; the number of replicas follows from them."""
DETOUR = 0.1
"""A change whose plan fits into memory, and that makes the step longer by at most this share, is preferred to faster
ones whose plans do not fit (assumed)."""
UNEQUAL_SHARES = "unequal shares of the samples"
UNLIKE_STAGES = "stages of unlike sizes"
SAME = 1e-9
"""Relative difference below which step times count as equal: sums of the same terms in another order (assumed)."""


def changes(yours: LoweredPlan, best: LoweredPlan, evaluator: Evaluator) -> tuple[Change, ...]:
    """The changes from one plan to another; a single change if one of the plans has no nearest strategy.

    Args:
        yours, best: two plans of the evaluator's problem, with synchronous replicas.
        evaluator: of the problem.
    """
    way = _Way(evaluator, nearest(yours, evaluator), nearest(best, evaluator))
    before, after = (estimate_lowered(plan, evaluator) for plan in (yours, best))
    first, last = way.estimate(way.yours), way.estimate(way.best)
    rest, found = _parts(before, after), list[Change]()
    if first is not None and last is not None:
        found = list(way.changes())
        for name, value in _parts(first, last).items():
            rest[name] -= value
    saved_s = sum(rest.values())
    if max(abs(value) for value in rest.values()) > SAME * before.step_time_s:
        pairs = (yours, way.yours), (best, way.best)
        words = list(dict.fromkeys(word for pair in pairs for word in beyond_degrees(*pair, evaluator)))
        alike = _alike(yours, best)
        words = [word for word in words if word not in alike]
        found.append(
            Change(
                about=", ".join(words) or "details",
                saved_s=saved_s,
                parts_s=rest,
                fits=after.fits,
                alone_s=None,
                without_s=last.step_time_s if found and last is not None and last.fits else None,
            )
        )
    return tuple(found)


def changes_of_plans(yours: Plan, best: Plan, evaluator: Evaluator) -> tuple[Change, ...]:
    """The changes from one plan to another whose replicas may be averaged.

    If the sync modes differ, averaged replicas become synchronous in the first change, or synchronous ones averaged in
    the last change.

    Args:
        yours, best: two plans of the evaluator's problem, with estimates.
        evaluator: of the problem.
    """
    lowered = [lower_plan(plan, evaluator) for plan in (yours, best)]
    found = changes(lowered[0], lowered[1], evaluator)
    before, after = yours.estimate, best.estimate
    first, last = (estimate_lowered(plan, evaluator) for plan in lowered)
    assert before is not None and after is not None
    if yours.sync == best.sync:
        saved = _parts(before, first)
        for name, value in _parts(last, after).items():
            saved[name] += value
        steps = [_of_averages("averaging of the replicas", saved, after)]
        steps = steps if abs(steps[0].saved_s) > SAME * before.step_time_s else []
        return (*found, *steps)
    begin, end = f"replicas {_averaged(yours.sync)}", f"replicas {_averaged(best.sync)}"
    synced = _of_averages(f"{begin} → synchronous", _parts(before, first), first)
    apart = _of_averages(f"synchronous → {end}", _parts(last, after), after)
    return (
        *([synced] if yours.sync.kind != "synchronous" else []),
        *found,
        *([apart] if best.sync.kind != "synchronous" else []),
    )


def _averaged(sync: Sync) -> str:
    every = "every step" if sync.period == 1 else f"every {sync.period} steps"
    return f"averaged {every} ({sync.kind})"


def _of_averages(about: str, parts: Mapping[str, float], after: Estimate) -> Change:
    """The change of the sync mode."""
    return Change(
        about=about, saved_s=sum(parts.values()), parts_s=parts, fits=after.fits, alone_s=None, without_s=None
    )


def nearest(lowered: LoweredPlan, evaluator: Evaluator) -> Strategy:
    """The strategy with the degrees and the devices of a plan; it is the same plan unless the plan has more than
    these."""
    degrees = degrees_of(lowered, evaluator)[0]
    used = tuple(device for stage in lowered.layout.stages for device in stage.devices)
    replicas = max(1, len(used) // (degrees.tensor * degrees.pipeline * degrees.context))
    segments = [segment for chunk in lowered.chunks for segment in chunk]
    again = [segment for segment in segments if segment.recomputed.any()]
    mode = "none" if not again else "full" if all(segment.recomputed.all() for segment in again) else "selective"
    # Where axes are others than those of the strategy, what their indices have says nothing of its replicas.
    is_shared = all(mine is None or len(mine) == replicas for mine in lowered.shares)
    return plain(
        Strategy(
            tp=degrees.tensor,
            pp=degrees.pipeline,
            cp=degrees.context,
            ep=degrees.expert,
            micro_batch=-(-lowered.samples // replicas),
            virtual=degrees.virtual_stages,
            schedule=lowered.kind,
            zero=degrees.zero,
            recompute=mode,
            sequence_parallel=degrees.sequence_parallel,
            layers=layer_counts(evaluator, lowered.chunks),
            devices=None if used == tuple(range(evaluator.problem.cluster.num_devices)) else used,
            shares=lowered.shares if is_shared and degrees.expert == 1 else (),
        )
    )


def plain(strategy: Strategy) -> Strategy:
    """A strategy without the settings that have no effect with its other degrees."""
    virtual = strategy.virtual if strategy.pp > 1 else 1
    kind = strategy.schedule if strategy.schedule not in (None, "interleaved") else "1f1b"
    return replace(
        strategy,
        virtual=virtual,
        schedule=None if strategy.pp == 1 else "interleaved" if virtual > 1 else kind,
        sequence_parallel=strategy.sequence_parallel and strategy.tp > 1,
        layers=strategy.layers if strategy.layers and len(strategy.layers) == strategy.pp * virtual else None,
    )


def beyond_degrees(lowered: LoweredPlan, strategy: Strategy, evaluator: Evaluator) -> Iterator[str]:
    """The parts of a plan that its nearest strategy does not have, in words."""
    if _is_unlike(lowered):
        yield UNLIKE_STAGES
    if any(mine is not None for mine in lowered.shares) and strategy.shares != lowered.shares:
        yield UNEQUAL_SHARES
    try:
        stated = hand_made(evaluator, strategy)
    except UserError:
        return
    if [[s.unit for s in chunk] for chunk in lowered.chunks] != [[s.unit for s in chunk] for chunk in stated.chunks]:
        yield "other cuts"
    if lowered.axes == stated.axes:
        mine, plain_ones = (_signatures(plan, evaluator) for plan in (lowered, stated))
        # Undecided rows belong to no operator of the plan.
        unlike = (mine != plain_ones).any(axis=1) & (mine >= 0).any(axis=1)
        if unlike.any():
            number = int(unlike.sum())
            yield f"{number} operator{'s' if number > 1 else ''} split in {'their' if number > 1 else 'its'} own way"
        if lowered.zero and lowered.zero_axes.tolist() != stated.zero_axes.tolist():
            yield "ZeRO over a part of the replicas"
    else:
        yield f"mesh axes {', '.join(lowered.axes)}"
    again = [sum(int(s.recomputed.sum()) for s in chunk) for chunk in lowered.chunks]
    if again != [sum(int(s.recomputed.sum()) for s in chunk) for chunk in stated.chunks]:
        yield "recomputation of other operators"


def _is_unlike(lowered: LoweredPlan) -> bool:
    return len({tuple(stage.axes.tolist()) for stage in lowered.layout.stages}) > 1


def _alike(one: LoweredPlan, other: LoweredPlan) -> set[str]:
    """Parts that both plans have beyond their strategies and that are equal, so that they are not a difference."""
    places = [[(tuple(s.devices), tuple(s.axes.tolist())) for s in plan.layout.stages] for plan in (one, other)]
    alike = {UNLIKE_STAGES: places[0] == places[1], UNEQUAL_SHARES: one.shares == other.shares}
    return {word for word, is_alike in alike.items() if is_alike}


def _signatures(lowered: LoweredPlan, evaluator: Evaluator) -> Ints:
    """[operator rows, axes] signatures of a plan, those of the last of equal units."""
    found = blank(evaluator, len(lowered.axes))
    for chunk in lowered.chunks:
        for segment in chunk:
            found[segment.first : segment.last] = segment.chosen
    return found


def _parts(before: Estimate, after: Estimate) -> dict[str, float]:
    """Seconds that the second of two plans saves, by part of the step."""
    found = {}
    for name in ("compute", "bubble", "optimizer", "overhead"):
        found[name] = before.breakdown_s[name] - after.breakdown_s[name]
    communication = [sum(estimate.breakdown_s["exposed_communication"].values()) for estimate in (before, after)]
    return {"communication": communication[0] - communication[1], **found}


class _Way:
    """The way from one strategy to another."""

    def __init__(self, evaluator: Evaluator, yours: Strategy, best: Strategy) -> None:
        self.evaluator, self.yours, self.best = evaluator, yours, best
        self.known: dict[Strategy, Estimate | None] = {}

    def estimate(self, strategy: Strategy) -> Estimate | None:
        """The estimate of a strategy; None if it gives no plan of the problem."""
        if strategy not in self.known:
            try:
                lowered = hand_made(self.evaluator, strategy)
                self.known[strategy] = estimate_lowered(lowered, self.evaluator)
            except UserError:
                self.known[strategy] = None
        return self.known[strategy]

    def changes(self) -> Iterator[Change]:
        """The changes that lead from `yours` to `best`."""
        current = self.yours
        while current != self.best:
            step = self._next(current)
            following = self._with(current, step)
            before, after = self.estimate(current), self.estimate(following)
            assert before is not None and after is not None
            parts = _parts(before, after)
            yield Change(
                about=in_words(current, following, self.evaluator.problem.cluster.num_devices),
                saved_s=before.step_time_s - after.step_time_s,
                parts_s=parts,
                fits=after.fits,
                alone_s=self._fitting_s(self._with(self.yours, step)),
                without_s=self._fitting_s(self._with(self.best, step, back=True)),
            )
            current = following

    def _next(self, current: Strategy) -> tuple[str, ...]:
        """The fields that are changed next: one; two, if that is faster than any one; or all remaining ones."""
        now = self.estimate(current)
        assert now is not None
        left = [name for name in NAMES if getattr(current, name) != getattr(self.best, name)]
        able: list[tuple[bool, bool, float, tuple[str, ...]]] = []
        for size in (1, 2, len(left)):
            for some in itertools.combinations(left, min(size, len(left))):
                following = self._with(current, some)
                # Some fields have no effect until others are changed.
                is_made = all(getattr(following, name) == getattr(self.best, name) for name in some)
                estimate = self.estimate(following) if is_made else None
                if estimate is not None:
                    step_s, now_s = estimate.step_time_s, now.step_time_s
                    is_liked = estimate.fits and step_s <= (1.0 + DETOUR) * now_s
                    able.append((step_s > now_s, not is_liked, step_s, some))
            if able and (not min(able)[0] or size > 1):
                break
        return min(able)[3]

    def _with(self, strategy: Strategy, names: Sequence[str], *, back: bool = False) -> Strategy:
        """A strategy with some fields of the best one, or of the user's."""
        source = self.yours if back else self.best
        return plain(replace(strategy, **{name: getattr(source, name) for name in names}))

    def _fitting_s(self, strategy: Strategy) -> float | None:
        estimate = self.estimate(strategy)
        return None if estimate is None or not estimate.fits else estimate.step_time_s


def in_words(before: Strategy, after: Strategy, num_devices: int) -> str:
    """The differences between two strategies, with the number of replicas, in words."""
    found = []
    for name, text in NAMES.items():
        values = [getattr(strategy, name) for strategy in (before, after)]
        follows = name == "schedule" and (before.virtual != after.virtual or None in values)
        if values[0] != values[1] and not follows:
            found.append(_devices(values, num_devices) if name == "devices" else f"{text} {_change(name, values)}")
    replicas = [
        len(strategy.devices or range(num_devices)) // (strategy.tp * strategy.pp * strategy.cp)
        for strategy in (before, after)
    ]
    if replicas[0] != replicas[1]:
        found.append(f"replicas {replicas[0]} → {replicas[1]}")
    return ", ".join(found)


def _devices(values: Sequence[tuple[int, ...] | None], num_devices: int) -> str:
    """The difference of the used devices in words: of their number, of the devices themselves, or of their order."""
    before, after = (range(num_devices) if devices is None else devices for devices in values)
    if len(before) != len(after):
        return f"devices {len(before)} → {len(after)}"
    return "another order of the devices" if set(before) == set(after) else "other devices"


def _change(name: str, values: Sequence[object]) -> str:
    before, after = (_text(name, value) for value in values)
    return f"{before} → {after}" if before != after else f"otherwise {after}"


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if name == "layers":
        return "even" if value is None else "uneven"
    if name == "shares":
        return "unequal" if value else "even"
    return "none" if value is None else str(value)


def shortage(estimate: Estimate) -> str | None:
    """Text about the devices with the largest shortage of memory, and its largest part; None if the plan may fit."""
    if not estimate.overflows:
        return None
    worst = max(estimate.memory_bytes, key=lambda memory: memory.total - memory.capacity)
    largest = max(MEMORY_CLASSES, key=lambda name: float(getattr(worst, name)))
    where = devices_in_words(worst.devices)
    need = "need" if where.startswith("devices") else "needs"
    return f"{where} {need} {in_gib(worst.total)} GiB of {in_gib(worst.capacity)}, most of it {largest}"

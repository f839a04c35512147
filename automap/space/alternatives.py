"""Alternatives to a plan: plans with one other degree, priced exactly.

The plan is read as a stated strategy (`automap.space.stated_strategy`), and an alternative is that strategy with
another degree. A plan may have more than its degrees, such as its own sharding of single operators, which a strategy
does not have. If the strategy itself has another price than the plan, it is listed as the first alternative. Units:
seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, replace
from typing import Any

from automap.errors import PlanError, UserError
from automap.plan import Estimate, Plan, Sync
from automap.price.estimate import estimate_lowered, estimated
from automap.price.evaluator import Evaluator
from automap.price.local_sgd import cheapest, evaluate_plan
from automap.price.lowered_plan import RECOMPUTE_MODES, LoweredPlan
from automap.price.plan_writer import to_plan
from automap.space.changes import in_words, nearest, plain, shortage
from automap.space.shape import divisors
from automap.space.stated_strategy import SCHEDULES, Strategy, hand_made, micro_batches
from automap.targets import SyncKind

MOST_VIRTUAL = 8
"""Largest number of chunks of a pipeline rank that is tried (assumed: more have hardly any bubble left)."""
ALONE = "these degrees alone, without the rest of the plan"
TOLD = 1e-3
"""Share of a step by which the degrees alone must be slower or faster to be listed."""
OF_REPLICAS = ("tp", "pp", "cp", "ep", "micro_batch")
"""Degrees whose change also changes the number of replicas, or the samples that are divided among them."""
SYNCHRONOUS = Sync()
TRIED = 3
"""Number of values on either side of a degree that are tried until one of them gives a plan."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that differs in one degree."""

    about: str
    """The decision before and after, as in `tensor parallel 8 → 4`."""
    step_time_s: float
    more_s: float
    """Difference of its step time to that of the plan, in seconds; negative if it is faster."""
    shortage: str | None
    """Text about the devices that are too small and their shortage; None if it fits into memory."""


def alternatives(
    lowered: LoweredPlan,
    evaluator: Evaluator,
    sync: Sync = SYNCHRONOUS,
    beyond: Callable[[Plan], Set[str]] = lambda plan: frozenset(),
) -> tuple[Alternative, ...]:
    """Plans that differ from a plan in one degree, with the nearest values on either side of it.

    The fastest come first, and those that do not fit last. If the plan has more than its degrees, the plan of the
    degrees alone comes before all others. If the plan averages its replicas, so do the alternatives that can, in the
    cheapest way.

    Args:
        lowered: a plan of the evaluator's problem. If no strategy is like it, there are no alternatives.
        evaluator: of the problem.
        sync: the plan's sync mode.
        beyond: the parts of a plan that its trainer does not support, in words. An alternative is left out if it has
            such parts that the plan of the degrees alone does not have.
    """
    strategy, kind = nearest(lowered, evaluator), sync.kind
    try:
        degrees = hand_made(evaluator, strategy)
        alone, _ = _priced(degrees, kind, evaluator)
    except UserError:
        return ()
    now_s = evaluate_plan(replace(to_plan(lowered, evaluator), sync=sync), lowered, evaluator).step_time_s
    own = beyond(to_plan(degrees, evaluator))
    found = {}
    if abs(alone.step_time_s - now_s) > TOLD * now_s:
        found[ALONE] = Alternative(ALONE, alone.step_time_s, alone.step_time_s - now_s, shortage(alone))
    for run in _runs(strategy, evaluator):
        for other in run:
            if other == strategy:
                continue
            try:
                changed = hand_made(evaluator, other)
                estimate, found_kind = _priced(changed, kind, evaluator)
            except UserError:
                continue
            about = in_words(strategy, other, evaluator.problem.cluster.num_devices)
            if not about:
                break
            if not beyond(to_plan(changed, evaluator)) <= own:
                continue
            about += f", {found_kind}" if found_kind != kind else ""
            more_s = estimate.step_time_s - now_s
            found[about] = Alternative(about, estimate.step_time_s, more_s, shortage(estimate))
            break
    return tuple(
        sorted(found.values(), key=lambda one: (one.about != ALONE, one.shortage is not None, one.step_time_s))
    )


def _priced(lowered: LoweredPlan, kind: SyncKind, evaluator: Evaluator) -> tuple[Estimate, SyncKind]:
    """The estimate of a plan with the cheapest variant of a sync mode, or of synchronous training if the plan cannot
    have that mode; and the mode."""
    if kind != "synchronous":
        plan = to_plan(lowered, evaluator)
        with contextlib.suppress(PlanError):
            plan = replace(plan, sync=cheapest(kind, plan, lowered, evaluator))
            estimate = estimated(plan, lowered, evaluator).estimate
            assert estimate is not None
            return estimate, kind
    return estimate_lowered(lowered, evaluator), "synchronous"


def _runs(strategy: Strategy, evaluator: Evaluator) -> Iterator[list[Strategy]]:
    """For each degree and direction, strategies with its next values; the first one that gives a plan counts."""

    def changed(name: str, value: Any) -> Strategy:
        # The number of replicas follows from the degrees. Layers of chunks and shares of replicas are kept only if
        # their numbers do not change.
        shares = () if name in OF_REPLICAS else strategy.shares
        return plain(replace(strategy, shares=shares, **{name: value}))

    yield [replace(strategy, layers=None)]
    yield [replace(strategy, shares=())]
    cluster, others = evaluator.problem.cluster.num_devices, strategy.tp * strategy.pp * strategy.cp

    def samples(devices: int) -> list[int]:
        batch = evaluator.problem.training.global_batch
        try:
            return sorted(micro_batches(batch, max(1, devices // others), strategy))
        except PlanError:
            return []

    if strategy.devices is not None:
        # More replicas leave each of them fewer samples.
        fewer = [count for count in reversed(samples(cluster)) if count <= strategy.micro_batch]
        yield [replace(changed("micro_batch", count), devices=None) for count in fewer][:TRIED]
    devices = len(strategy.devices or range(cluster))
    sizes = divisors(devices)
    for name in ("tp", "pp", "cp", "ep"):
        now = getattr(strategy, name)
        more = [changed(name, size) for size in sizes if size > now][:TRIED]
        if name == "tp" and now == 1:
            # Some trainers split weights only with the sequence between them.
            more = [one for tp in more for one in (tp, plain(replace(tp, sequence_parallel=True)))]
        yield more
        yield [changed(name, size) for size in reversed(sizes) if size < now][:TRIED]
    yield [changed("micro_batch", count) for count in samples(devices) if count > strategy.micro_batch][:TRIED]
    yield [changed("micro_batch", count) for count in reversed(samples(devices)) if count < strategy.micro_batch][
        :TRIED
    ]
    if strategy.pp > 1:
        yield [changed("virtual", count) for count in range(strategy.virtual + 1, MOST_VIRTUAL + 1)]
        yield [changed("virtual", count) for count in range(strategy.virtual - 1, 0, -1)]
        for kind in SCHEDULES:
            yield [changed("schedule", kind)] if kind != "interleaved" and strategy.virtual == 1 else []
    for stage in range(4):
        yield [changed("zero", stage)]
    for mode in RECOMPUTE_MODES:
        yield [changed("recompute", mode)]
    if strategy.tp > 1:
        yield [changed("sequence_parallel", not strategy.sequence_parallel)]

"""Incumbent: the best plan of a search, the budget it has used, and the result it ends with.

Every searcher prices through one of these, so that evaluations are counted alike. Units: seconds, evaluations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from agents.searcher import Budget, OnProgress, Progress, SearchResult, ShouldStop
from automap.errors import NothingFits, PlanError
from automap.plan import DeviceMemory, Estimate, Plan, SearchRecord
from automap.price.estimate import annotate, estimate_choice, lower_bound_s, price
from automap.price.evaluator import RECOMPUTE_MODES
from automap.problem import Problem
from automap.space import PlanSpace, Values

REPORT_EVERY_S = 0.2
"""Pause between two progress reports."""
GIB = float(1 << 30)


class Incumbent:
    """The best of what one searcher has priced.

    Attributes:
        evaluations: plans priced so far.
        charged: those that count against the budget.
        best: values of the best plan that fits, or None.
        best_s: its step time, or infinity.
        own_best_s: best step time of a feasible plan since `watch` was called.
        nearest: values of the plan that overflows least while none fits.
        improvements: (evaluations, seconds, step time) of each plan that was the best when it came.
    """

    def __init__(
        self,
        space: PlanSpace,
        budget: Budget,
        *,
        searcher: str,
        on_progress: OnProgress,
        should_stop: ShouldStop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.space = space
        self.budget = budget
        self.searcher = searcher
        self.evaluations = 0
        self.charged = 0
        self.best: Values | None = None
        self.best_s = float("inf")
        self.own_best_s = float("inf")
        self.nearest: Values | None = None
        self.least_overflow = float("inf")
        self.improvements: list[tuple[int, float, float]] = []
        self._on_progress = on_progress
        self._should_stop = should_stop
        self._clock = clock
        self._start = clock()
        self._reported = -REPORT_EVERY_S
        self._bound_s = lower_bound_s(space.problem)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self._clock() - self._start

    @property
    def fraction(self) -> float:
        """Share of the budget that is spent."""
        spent = 0.0
        if self.budget.seconds is not None:
            spent = self.seconds / self.budget.seconds
        if self.budget.evaluations is not None:
            spent = max(spent, self.charged / self.budget.evaluations)
        return min(spent, 1.0)

    @property
    def stopped(self) -> bool:
        """Whether the caller wants an end."""
        return self._should_stop()

    @property
    def finished(self) -> bool:
        """Whether to stop now."""
        return self.fraction >= 1.0 or self._should_stop()

    def price(self, plans: Sequence[Values]) -> npt.NDArray[np.float64]:
        """Prices plans and keeps the best.

        Returns:
            [plans, 2] seconds and overflow, see `PlanSpace.price`.
        """
        found = self.space.price(np.array(plans, dtype=np.int64).reshape(len(plans), -1))
        for values, (seconds, overflow) in zip(plans, found.tolist(), strict=True):
            self.offer(values, seconds, overflow)
        return found

    def offer(self, values: Values, step_time_s: float, overflow: float) -> None:
        """Takes note of a plan that has been priced."""
        self.evaluations += 1
        self.charged += 1
        if overflow <= 0.0:
            self.own_best_s = min(self.own_best_s, step_time_s)
            if step_time_s < self.best_s:
                self.best, self.best_s = values, step_time_s
                self.improvements.append((self.evaluations, self.seconds, step_time_s))
        elif self.best is None and overflow < self.least_overflow:
            self.nearest, self.least_overflow = values, overflow
        if self.seconds - self._reported >= REPORT_EVERY_S:
            self.report()

    def watch(self) -> None:
        """Begins `own_best_s` anew, for the next member of a portfolio."""
        self.own_best_s = float("inf")

    def report(self) -> None:
        """Tells how far the search is."""
        self._reported = self.seconds
        self._on_progress(
            Progress(
                searcher=self.searcher,
                evaluations=self.evaluations,
                seconds=self.seconds,
                best_step_time_s=None if self.best is None else self.best_s,
                lower_bound_s=self._bound_s,
                fraction=self.fraction,
            )
        )

    def result(
        self,
        *,
        seed: int,
        found_by: str | None = None,
        searchers: Mapping[str, float | None] | None = None,
        baselines: Mapping[str, float | None] | None = None,
        proven: bool = False,
    ) -> SearchResult:
        """The plan found, priced in full; `proven` if no plan of the space is better.

        Raises:
            NothingFits: no plan that fits was found.
        """
        self.report()
        if self.best is None:
            raise nothing_fits(self.space, self.nearest)
        choice = self.space.choice(self.best)
        plan = annotate(self.space.decode(self.best), choice, self.space.evaluator)
        record = SearchRecord(
            found_by=found_by or self.searcher,
            seed=seed,
            evaluations=self.evaluations,
            baselines={**(baselines or {}), "yours": baseline_s(self.space)},
            searchers=searchers or {self.searcher: self.best_s},
            seconds=self.seconds,
            proven=proven,
        )
        return SearchResult(
            plan=replace(plan, search=record),
            evaluations=self.evaluations,
            seconds=self.seconds,
            proven=proven,
            improvements=tuple(self.improvements),
        )


def baseline_s(space: PlanSpace) -> float | None:
    """Step time of the plan that the user runs today (`hints.baseline`), or None without one.

    Raises:
        PlanError: the baseline is malformed or for another model.
    """
    document = space.problem.hints.baseline
    if document is None:
        return None
    try:
        return price(space.problem, Plan.from_json(dict(document)), space.evaluator).step_time_s
    except PlanError as fault:
        field = "hints.baseline" + fault.field.removeprefix("plan")
        raise PlanError(fault.message, field=field, value=fault.value, repair=fault.repair) from None


def nothing_fits(space: PlanSpace, nearest: Values | None) -> NothingFits:
    """The error that says how far the nearest plan is from fitting, and what would help."""
    problem = space.problem
    if nearest is None:
        return NothingFits(
            "no plan was priced within the budget", field="budget", value="", repair="Give a larger budget."
        )
    estimate = estimate_choice(space.choice(nearest), space.evaluator)
    worst = max(estimate.memory_bytes, key=lambda m: m.total - m.capacity)
    short = (worst.total - worst.capacity) / GIB
    shape = space.shape(nearest)
    sizes = (*zip(space.axes, space.meshes.mesh(shape), strict=True), ("pp", shape.pp))
    degrees = ", ".join(f"{name} {size}" for name, size in sizes)
    return NothingFits(
        f"no plan fits: the nearest ({degrees}) needs {worst.total / GIB:.1f} GiB on "
        f"each of the devices {worst.devices}, which have {worst.capacity / GIB:.1f} GiB",
        field="cluster",
        value=f"{problem.cluster.name} is short of {short:.1f} GiB on device {worst.devices.split('-')[0]}",
        repair=_repair(problem, worst, estimate, space, nearest),
    )


def _repair(problem: Problem, worst: DeviceMemory, estimate: Estimate, space: PlanSpace, nearest: Values) -> str:
    state = sum(m.parameters + m.gradients + m.optimizer for m in estimate.memory_bytes) / len(estimate.memory_bytes)
    modes = [RECOMPUTE_MODES[m] for m in nearest[space.first_recompute : space.zero_slot]]
    advice = []
    if worst.activations > state and problem.training.global_batch > 1:
        advice.append("a smaller global_batch")
    if problem.training.optimizer == "adam" and worst.optimizer > 0.2 * worst.total:
        advice.append("optimizer sgd or momentum")
    if "full" not in modes and problem.hints.fix.recompute not in (None, "full"):
        advice.append("recompute full")
    needed = worst.total / max(worst.capacity, 1.0) * problem.cluster.num_devices
    advice.append(f"about {int(needed) + 1} such devices, or devices with {worst.total / GIB:.0f} GiB")
    return "Use " + ", or ".join(advice) + "."

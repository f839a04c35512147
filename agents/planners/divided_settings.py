"""Divided settings: units and devices divided among the stages of pipelines with given numbers of micro-batches.

A setting is a number of micro-batches and a ZeRO stage. The programs of Piper (`agents.planners.piper`) and Alpa
(`agents.planners.alpa`) divide units and devices for one setting after the other, and other settings follow from the
best one. Used by `agents.planners.pipeline_division`. Units: seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from agents.incumbent import Incumbent
from agents.planners.division_effort import Effort
from agents.planners.piper import OFFERED, ORDERS, piper_partitions
from agents.planners.promising_partitions import Division, Moves, promising
from agents.planners.solved_strategies import with_solved
from agents.planners.stage_strategies import Strategy, megatron_strategies
from agents.planners.stage_table import StageTable
from agents.planners.staged_plan import StagedPlan, fastest_staged, price_staged
from automap.schedule import SPLIT_KINDS
from automap.space.space import PlanSpace

ZEROS = (0, 1)
"""Stages of ZeRO that are tried with the best number of micro-batches (assumed: others seldom gain)."""
PRICED_QUICKLY, PRICED = 4, 16
"""Number of partitions that are priced for each setting and set of strategies, in `divide_quickly` and otherwise: those
with the shortest simulated step (assumed). A simulation is exact where all stages have the same strategy, also where
they share parameters. It is not where a stage sends its results in another placement than the next one reads, under
ZeRO 2 and 3, and where memory is exceeded by what it leaves out."""
MOVED_AT_ONCE = 2
"""Number of partitions of a setting in which units and devices move before they are priced (assumed), where they are
divided at length; those of all settings are moved later."""
STRIDE = 1.5
"""Least factor between numbers of micro-batches that are tried at first; then those next to the best one are tried
(assumed)."""
PATIENCE_QUICKLY, PATIENCE = 1, 2
"""How many larger, or smaller, numbers of micro-batches in a row are tried without a gain, in `divide_quickly` and
otherwise (assumed). A few long stages suit few micro-batches and more stages suit many; numbers between them can be
slower than both: on 256 devices the best plan of a chain of 50 layers took 716 ms with 2, 718 ms with 4 and 701 ms with
8."""

Priced = list[tuple[float, StagedPlan]]
"""Plans with their step times; infinity where one does not fit."""


class Setting(NamedTuple):
    """What is fixed while units and devices are divided among stages."""

    num_micro_batches: int
    zero: int
    """ZeRO stage."""


class DividedSettings:
    """Divides units and devices among stages, with one setting (micro-batches and ZeRO stage) after the other.

    Attributes:
        priced: all plans so far with their step times.
    """

    def __init__(
        self, incumbent: Incumbent, solved: Sequence[tuple[int, Strategy]], effort: Effort, *, at_length: bool
    ) -> None:
        """Begins with no plans.

        Args:
            incumbent: takes the plans.
            solved: see `solved_strategies`.
            effort: the limits of its time.
            at_length: whether the programs also divide the cluster into submeshes that do not tile it, and more of
                their partitions are priced, some after units and devices have moved in them.
        """
        self.priced: Priced = []
        self._incumbent, self._solved, self._effort = incumbent, solved, effort
        self._moves, self._moved_until_s = Moves(incumbent.space, self._are_moves_over), math.inf
        self._begins: list[Division] = []
        """Those of all settings in which nothing has been moved yet."""
        self._reached: list[Division] = []
        """What moves have led to from the others."""
        self._used: dict[Setting, tuple[Strategy, ...]] = {}
        """Strategies of the fastest partition of each setting, in a division at length: with few of them there is time
        for more settings."""
        self._megatron, self._at_length = megatron_strategies(incumbent.space), at_length
        self._known: set[object] = set()
        """`_key` of each plan that was tried."""
        self._best_s: dict[Setting, float] = {}
        """Step time of the best plan of each setting that was tried."""
        self._with_all: set[Setting] = set()
        """Settings that were tried with all strategies."""

    def run(self, settings: Sequence[Setting]) -> None:
        """Tries settings, behind each one other numbers of micro-batches with the strategies of the best plan, and at
        last the ZeRO stages of `ZEROS`.

        Args:
            settings: settings of pipelines, those of the fastest first.
        """
        self._incumbent.searcher = "piper"
        for setting in settings:
            self._try(setting)
            self._walk(STRIDE)
        self._walk(1.0)
        if self._best_s:
            self._try(self._best)
        count = (self._best if self._best_s else settings[0]).num_micro_batches
        for zero in ZEROS:
            if self._incumbent.space.zeros[:, zero].any():
                self._try(Setting(count, zero))

    def move(self, until_s: float = math.inf) -> None:
        """Moves units and devices in the best partitions of all settings.

        Args:
            until_s: seconds since the start of the search at which moves end, if the effort lasts so long.
        """
        self._incumbent.searcher, self._moved_until_s = "piper", until_s
        kinds = [kind for kind in kinds_of(self._incumbent.space) if kind != "gpipe"]
        for division in self._moves.improved(self._begins, self._reached):
            plan = self._moves.staged(division)
            self.priced += with_prices(self._incumbent, self._new(replace(plan, schedule=kind) for kind in kinds))

    def _are_moves_over(self) -> bool:
        incumbent, entries = self._incumbent, self._moves.entries
        return incumbent.finished or self._effort.entries <= entries or incumbent.seconds >= self._moved_until_s

    def _walk(self, factor: float) -> None:
        """Tries larger and smaller numbers of micro-batches than the best one, and then from the best of these, as long
        as that gains; `factor`: see `_try_counts`."""
        best = None
        while self._best_s and self._best != best:
            best = self._best
            for larger in (True, False):
                self._try_counts(best, factor, larger=larger)

    def _try_counts(self, setting: Setting, factor: float, *, larger: bool) -> None:
        """Tries larger or smaller numbers of micro-batches than that of a setting, until `PATIENCE` in a row have not
        gained; in a division at length with the strategies of its fastest partition alone.

        The best pipeline with unlike stages may have fewer or more stages than the best one with equal stages, and then
        another best number of micro-batches.

        Args:
            setting: a setting that was tried.
            factor: least factor between one number and the next.
            larger: whether larger numbers are tried.
        """
        least_s, waited, count = self._best_s[setting], 0, setting.num_micro_batches
        patience = PATIENCE if self._at_length else PATIENCE_QUICKLY
        while waited < patience and (count := _next_count(self._incumbent.space, count, factor, larger=larger)):
            step_s = self._try(setting._replace(num_micro_batches=count), self._used.get(setting))
            waited = 0 if step_s < least_s else waited + 1
            least_s = min(step_s, least_s)

    @property
    def _is_spent(self) -> bool:
        return self._effort.is_spent(min(self._best_s.values(), default=math.inf))

    @property
    def _best(self) -> Setting:
        """The best setting."""
        return min(self._best_s, key=self._best_s.__getitem__)

    def _try(self, setting: Setting, strategies: Sequence[Strategy] | None = None) -> float:
        """Tries a setting, unless the time is over or it was tried before, and returns the step time of its best plan.

        Args:
            setting: the setting.
            strategies: those that a stage may have; None = all.
        """
        tried = self._with_all if strategies is None else self._best_s
        if setting not in tried and not self._is_spent:
            if strategies is None:
                self._with_all.add(setting)
                strategies = with_solved(self._megatron, self._solved, setting.num_micro_batches)
            found = with_prices(self._incumbent, self._plans(setting, strategies))
            self.priced += found
            self._best_s[setting] = min([self._best_s.get(setting, math.inf), *(seconds for seconds, _ in found)])
        return self._best_s.get(setting, math.inf)

    def _plans(self, setting: Setting, strategies: Sequence[Strategy]) -> list[StagedPlan]:
        """The fastest new plans of a setting by the programs of Piper and Alpa.

        With 1F1B they are chosen by their price. Under GPipe stages hold more micro-batches; there they are chosen by
        their latency.
        """
        incumbent, space = self._incumbent, self._incumbent.space
        found: list[StagedPlan] = []
        table, kinds = None, kinds_of(space)
        for order in space.meshes.orders[:ORDERS]:
            table = StageTable(
                space, order, setting.num_micro_batches, strategies, zero=setting.zero, partly=True, known=table
            )
            ranked = promising(table, self._effort.entries, quick=not self._at_length)
            ranked = ranked[: PRICED if self._at_length else PRICED_QUICKLY]
            partitions, plans = [partition for _, partition in ranked], [table.staged(one) for _, one in ranked]
            divisions = [Division.of(table, *one) for one in ranked]
            at_once = MOVED_AT_ONCE if self._at_length else 0
            self._begins += divisions[at_once:]
            if not self._at_length:
                self._moves.know(table)
            elif ranked:
                self._used.setdefault(setting, divisions[0].strategies)
                for one in divisions[:at_once]:
                    self._reached.append(self._moves.best(one, table))
                    plans.append(self._moves.staged(self._reached[-1]))
            fastest = fastest_staged(incumbent, self._new(plans), OFFERED)
            found += [replace(plan, schedule=kind) for plan in fastest for kind in kinds if kind != "gpipe"]
            if "gpipe" in kinds:
                # Partitions for 1F1B may not fit: under GPipe all stages hold equally many micro-batches.
                more = piper_partitions(table, "gpipe") if table.entries < self._effort.entries else ()
                offered = {one.stages: one for one in (*partitions, *more)}.values()
                latencies = {one: table.latency_s(one, "gpipe") for one in offered}
                fitting = [one for one in sorted(offered, key=latencies.__getitem__) if math.isfinite(latencies[one])]
                found += self._new(table.staged(one, "gpipe") for one in fitting[:OFFERED])
            self._effort.entries -= table.entries
        return found

    def _new(self, plans: Iterable[StagedPlan]) -> list[StagedPlan]:
        """The plans that were not tried before; from now on they count as tried."""
        new = {key: plan for plan in plans if (key := _key(plan)) not in self._known}
        self._known.update(new)
        return list(new.values())


def _next_count(space: PlanSpace, count: int, factor: float, *, larger: bool) -> int:
    """The next number of micro-batches that is at least `factor` times larger, or smaller; 0 where there is none."""
    counts = space.meshes.micro_batches
    if larger:
        return min((other for other in counts if other > count and other >= factor * count), default=0)
    return max((other for other in counts if other < count and factor * other <= count), default=0)


def _key(plan: StagedPlan) -> object:
    """Key that is equal for equal plans whose stages have strategies of the same table."""
    stages = ((one.end, one.devices, one.tp, one.recompute, id(one.signatures)) for one in plan.stages)
    return plan.num_micro_batches, plan.zero, plan.schedule, *stages


def with_prices(incumbent: Incumbent, plans: Iterable[StagedPlan]) -> Priced:
    """Prices plans until the budget ends, at least the first one, and returns them with their step times."""
    found: Priced = []
    for plan in plans:
        found.append((price_staged(incumbent, [plan]), plan))
        if incumbent.finished:
            break
    return found


def kinds_of(space: PlanSpace) -> list[str]:
    """Schedules of the space that do not split backward passes; those that do are left to the space."""
    return [kind for kind in space.schedules if kind not in SPLIT_KINDS]

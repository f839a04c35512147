"""Division of pipelines: divides units and devices again among the stages of the best pipelines, by the programs of
Piper, Alpa, Galvatron and SPP. The stages of the new pipelines may differ in their devices and strategies.

In the plan space only short pipelines have unlike stages; in others at most the first stage differs. So there may be
faster pipelines outside the space. They are searched where the pipelines of the space are about as fast as the best
plan, or where the space has slow pipelines only, or none that fits:

1. The dynamic programs of Piper (`agents.planners.piper`) and Alpa (`agents.planners.alpa`) divide units and devices
   among stages, with the ZeRO stage of such a pipeline and its number of micro-batches, or fewer or more of them. Each
   stage chooses its inner axis, and recomputes in no more units than memory requires. The partitions with the shortest
   simulated steps are priced under each schedule of the space, before and after units and devices have moved in them
   (`agents.planners.promising_partitions`).
2. The dynamic program of Galvatron (`agents.planners.galvatron`) lets each layer of the stages of a pipeline choose by
   itself whether it recomputes.
3. Where any order of the passes may be run, the fastest of these plans are priced with DAPPLE's early warm-up and in
   the orders of SPP's list scheduling (`agents.planners.spp`).
4. In the fastest of all plans, single units and devices move from one stage to another as long as that gains
   (`agents.planners.moved_stages`).

The best plan found becomes that of the search if it is faster, also if it lies outside the space. Units: seconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from agents.incumbent import Incumbent
from agents.planners import spp
from agents.planners.division_effort import FAR, Effort, leads
from agents.planners.galvatron import layered
from agents.planners.moved_stages import moved
from agents.planners.piper import OFFERED, ORDERS, piper_partitions
from agents.planners.promising_partitions import Division, Moves, promising
from agents.planners.solved_strategies import solved_strategies, with_solved
from agents.planners.stage_strategies import Strategy, megatron_strategies
from agents.planners.stage_table import StageTable
from agents.planners.staged_plan import StagedPlan, fastest_staged, price_staged
from agents.sampling.expert import Grid
from automap.schedule import SPLIT_KINDS
from automap.space.shape import Shape
from automap.space.space import PlanSpace

NEAR = 1.1
"""A pipeline is divided again if it takes at most this many times the step time of the best plan (assumed); where there
is none, the fastest one, if it takes at most `FAR` times as long."""
NEARLY_FITS = 0.2
"""Where no plan fits, a pipeline is divided again if it overflows by at most this share of a device's memory
(assumed)."""
MOST_UNITS = 128
"""Largest number of units of a model (assumed): the time of the programs grows with its square."""
SETTINGS = 3
"""Number of pairs of micro-batches and ZeRO stage with which units and devices are divided (assumed)."""
ZEROS = (0, 1)
"""Stages of ZeRO that are tried with the best number of micro-batches (assumed: others seldom gain)."""
PRICED_QUICKLY, PRICED = 4, 16
"""Number of partitions that are priced for each setting and set of strategies, in `divide_quickly` and otherwise: those
with the shortest simulated step (assumed). A simulation is exact for chains of measured layers. It is not where stages
share parameters, under ZeRO 2 and 3, and where memory is exceeded by what it leaves out."""
MOVED_AT_ONCE = 2
"""Number of partitions of a setting in which units and devices move before they are priced (assumed); those of all
settings are moved later."""
STRIDE = 1.5
"""Least factor between numbers of micro-batches that are tried at first; then those next to the best one are tried
(assumed)."""
PATIENCE_QUICKLY, PATIENCE = 1, 2
"""How many larger, or smaller, numbers of micro-batches in a row are tried without a gain, in `divide_quickly` and
otherwise (assumed). A few long stages suit few micro-batches and more stages suit many; numbers between them can be
slower than both: on 256 devices the best plan of a chain of 50 layers took 716 ms with 2, 718 ms with 4 and 701 ms with
8."""
LAYERED = 8
"""Number of pipelines whose layers choose their recomputation by Galvatron's program (assumed)."""
LISTED = 3
"""Number of partitions whose micro-batches are ordered by list scheduling (assumed)."""
MOVED = 3
"""Number of the fastest plans in which units and devices are moved (assumed)."""
MOST_DEVICES = 64
"""Largest cluster for which SPP divides units and devices itself (assumed: the time grows with the square)."""
MOST_PASSES = 2_000
"""Largest number of forward passes that list scheduling orders: it takes a tenth of a second."""
LEAST_EVALUATIONS, LEAST_S = 100, 3.0
"""Least rest of a budget, in evaluations and in seconds, with which pipelines are divided. It takes some tenths of a
second, on 1,024 devices 2 seconds."""
SHARE, SHARE_S, LEADING_S = 0.6, 0.4, 0.8
"""Largest shares of the rest of a budget that dividing pipelines takes: of one in evaluations, of one in seconds, and
of one in seconds while the best plan lies outside the plan space (assumed). With 0.3 of the seconds, a search of 15 s
for 72 operators with branches on 160 devices ended before it had tried the best number of micro-batches."""
DIVIDED, ORDERED = 0.5, 0.6
"""Largest share of this that Piper's and Alpa's programs take, and share of the rest for orders of passes; moves have
the remainder (assumed). When the programs could take all of it, the portfolio was 1 to 4 % slower than SPP with 800
evaluations on seven A100s."""


Priced = list[tuple[float, StagedPlan]]
"""Plans with their step times; infinity where one does not fit."""


def divide_pipelines(incumbent: Incumbent, grid: Grid) -> None:
    """Divides the best pipelines again, in the four steps that the module describes.

    Args:
        incumbent: takes the plans, credited to `galvatron`, `piper`, `dapple` and `spp`.
        grid: plans with their prices.
    """
    space = incumbent.space
    if is_short(incumbent):
        return
    near = _near(incumbent, grid, NEAR)
    settings = _settings(space, near or _near(incumbent, grid, FAR)[:1])
    if not settings:
        return
    began_s, left_s = incumbent.seconds, math.inf if incumbent.left_s is None else incumbent.left_s
    with _share(incumbent, SHARE, LEADING_S):
        effort = Effort(incumbent, DIVIDED * SHARE_S * left_s, DIVIDED * LEADING_S * left_s)
        with _share(incumbent, DIVIDED, 1.0):
            division = _Division(incumbent, solved_strategies(space, grid), effort, at_length=True)
            division.run(settings)
        most_s = LEADING_S if leads(incumbent) else SHARE_S
        rest_s = max(began_s + most_s * left_s - incumbent.seconds, 0.0)
        with incumbent.share(seconds=rest_s if math.isfinite(rest_s) else None):
            _improve(incumbent, near, division)


def _improve(incumbent: Incumbent, near: Sequence[_Near], division: _Division) -> None:
    """Steps 2 to 4 of `divide_pipelines`."""
    with _share(incumbent, DIVIDED, ORDERED):
        division.move()
    tried = list(division.priced)
    if not incumbent.finished:
        tried += _layered(incumbent, near)
    if incumbent.space.problem.any_order and not incumbent.finished:
        with _share(incumbent, ORDERED, ORDERED):
            tried += _listed(incumbent, division.priced)
    incumbent.searcher = "piper"
    found: Priced = []
    for plan in _unlike(tried)[:MOVED]:
        if not incumbent.finished:
            better = moved(incumbent, plan)
            found.append((price_staged(incumbent, [better]), better))
    for plan in _unlike(found):
        if not incumbent.finished:
            price_staged(incumbent, [moved(incumbent, plan, everywhere=True)])


def _share(incumbent: Incumbent, evaluations: float, seconds: float) -> AbstractContextManager[None]:
    """A part of the budget: these shares of the evaluations and of the seconds that are left."""
    left, left_s = incumbent.left, incumbent.left_s
    return incumbent.share(
        evaluations=None if left is None else int(evaluations * left),
        seconds=None if left_s is None else seconds * left_s,
    )


def is_short(incumbent: Incumbent) -> bool:
    """Whether the rest of the budget is too short to divide pipelines."""
    left, left_s = incumbent.left, incumbent.left_s
    return (left is not None and left < LEAST_EVALUATIONS) or (left_s is not None and left_s < LEAST_S)


def divide_quickly(incumbent: Incumbent, grid: Grid, seconds: float) -> None:
    """Does only step 1 of `divide_pipelines`, in which stages may have any strategy from the beginning.

    Args:
        incumbent: takes the plans, credited to `piper`.
        grid: plans with their prices.
        seconds: after so many seconds no further setting is begun; the plans of the settings before are still priced.
            While all these plans are far slower than the best one, it is `division_effort.LONGER` times as long.
    """
    if settings := _settings(incumbent.space, _near(incumbent, grid, NEAR)):
        effort = Effort(incumbent, seconds, seconds)
        _Division(incumbent, solved_strategies(incumbent.space, grid), effort, at_length=False).run(settings)


def _settings(space: PlanSpace, pipelines: Sequence[_Near]) -> list[_Setting]:
    """The first `SETTINGS` settings of some pipelines.

    There are none for models that are too large, nor where the search allows other sync modes than synchronous: a plan
    outside the space is always synchronous.
    """
    if space.num_units > MOST_UNITS or space.problem.training.sync_modes != ("synchronous",):
        return []
    return list(dict.fromkeys(_Setting(shape.num_micro_batches, zero) for shape, zero in pipelines))[:SETTINGS]


def _priced(incumbent: Incumbent, plans: Iterable[StagedPlan]) -> Priced:
    """Prices plans until the budget ends, at least the first one, and returns them with their step times."""
    found: Priced = []
    for plan in plans:
        found.append((price_staged(incumbent, [plan]), plan))
        if incumbent.finished:
            break
    return found


def _layered(incumbent: Incumbent, near: Sequence[_Near]) -> Priced:
    """Galvatron's plans for the first `LAYERED` pipelines without virtual stages, with their step times."""
    incumbent.searcher = "galvatron"
    plain = [(shape, zero) for shape, zero in near if shape.virtual == 1]
    plans = (layered(incumbent.space, shape, zero) for shape, zero in plain[:LAYERED])
    return _priced(incumbent, filter(None, plans))


class _Division:
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
        self._moves = Moves(incumbent.space, lambda: incumbent.finished or effort.entries <= self._moves.entries)
        self._begins: list[Division] = []
        """Those of all settings in which nothing has been moved yet."""
        self._reached: list[Division] = []
        """What moves have led to from the others."""
        self._used: dict[_Setting, tuple[Strategy, ...]] = {}
        """Strategies of the fastest partition of each setting."""
        self._megatron, self._at_length = megatron_strategies(incumbent.space), at_length
        self._known: set[object] = set()
        """`_key` of each plan that was tried."""
        self._best_s: dict[_Setting, float] = {}
        """Step time of the best plan of each setting that was tried."""
        self._with_all: set[_Setting] = set()
        """Settings that were tried with all strategies."""

    def run(self, settings: Sequence[_Setting]) -> None:
        """Tries settings, then other numbers of micro-batches with the strategies of the best plan, and at last the
        ZeRO stages of `ZEROS`.

        Args:
            settings: settings of pipelines, those of the fastest first.
        """
        self._incumbent.searcher = "piper"
        for setting in settings:
            self._try(setting)
        for factor in (STRIDE, 1.0):
            best = None
            while self._best_s and self._best != best:
                best = self._best
                for larger in (True, False):
                    self._try_counts(best, factor, larger=larger)
        if self._best_s:
            self._try(self._best)
        count = (self._best if self._best_s else settings[0]).num_micro_batches
        for zero in ZEROS:
            if self._incumbent.space.zeros[:, zero].any():
                self._try(_Setting(count, zero))

    def move(self) -> None:
        """Moves units and devices in the best partitions of all settings."""
        self._incumbent.searcher = "piper"
        kinds = [kind for kind in _kinds(self._incumbent.space) if kind != "gpipe"]
        for division in self._moves.improved(self._begins, self._reached):
            plan = self._moves.staged(division)
            self.priced += _priced(self._incumbent, self._new(replace(plan, schedule=kind) for kind in kinds))

    def _try_counts(self, setting: _Setting, factor: float, *, larger: bool) -> None:
        """Tries larger or smaller numbers of micro-batches than that of a setting, with the strategies of its fastest
        partition, until `PATIENCE` in a row have not gained.

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
    def _best(self) -> _Setting:
        """The best setting."""
        return min(self._best_s, key=self._best_s.__getitem__)

    def _try(self, setting: _Setting, strategies: Sequence[Strategy] | None = None) -> float:
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
            priced = _priced(self._incumbent, self._plans(setting, strategies))
            self.priced += priced
            self._best_s[setting] = min([self._best_s.get(setting, math.inf), *(seconds for seconds, _ in priced)])
        return self._best_s.get(setting, math.inf)

    def _plans(self, setting: _Setting, strategies: Sequence[Strategy]) -> list[StagedPlan]:
        """The fastest new plans of a setting by the programs of Piper and Alpa.

        With 1F1B they are chosen by their price. Under GPipe stages hold more micro-batches; there they are chosen by
        their latency.
        """
        incumbent, space = self._incumbent, self._incumbent.space
        found: list[StagedPlan] = []
        table, kinds = None, _kinds(space)
        for order in space.meshes.orders[:ORDERS]:
            table = StageTable(
                space, order, setting.num_micro_batches, strategies, zero=setting.zero, partly=True, known=table
            )
            ranked = promising(table, self._effort.entries, quick=not self._at_length)
            ranked = ranked[: PRICED if self._at_length else PRICED_QUICKLY]
            partitions, plans = [partition for _, partition in ranked], [table.staged(one) for _, one in ranked]
            divisions = [Division.of(table, *one) for one in ranked]
            if divisions:
                self._used.setdefault(setting, divisions[0].strategies)
            if self._at_length:
                self._begins += divisions[MOVED_AT_ONCE:]
                for one in divisions[:MOVED_AT_ONCE]:
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


def _listed(incumbent: Incumbent, divided: Priced) -> Priced:
    """The fastest plans with DAPPLE's early warm-up and in the orders of list scheduling, and plans of SPP itself; all
    with their step times."""
    incumbent.searcher, unlike, space = "dapple", _unlike(divided), incumbent.space
    early = _priced(incumbent, (replace(plan, schedule="eager-1f1b") for plan in unlike[:LISTED]))
    incumbent.searcher = "spp"
    few = [plan for plan in unlike if len(plan.stages) <= MOST_PASSES // plan.num_micro_batches]
    orders = _priced(incumbent, itertools.chain(*(spp.listed(space, plan) for plan in few[:LISTED])))
    if space.meshes.devices > MOST_DEVICES or incumbent.finished:
        return early + orders
    return early + orders + list(spp.planned(incumbent, _counts(space, [plan.num_micro_batches for plan in few])))


def _counts(space: PlanSpace, counts: Sequence[int]) -> list[int]:
    """Distinct numbers of micro-batches, each followed by the next smaller and larger ones."""
    known = sorted({shape.num_micro_batches for shape in space.shapes} | set(counts))
    near = (known[max(0, at - 1) : at + 2] for at in map(known.index, counts))
    return list(dict.fromkeys(itertools.chain(*((count, *some) for count, some in zip(counts, near, strict=True)))))


def _unlike(plans: Priced) -> list[StagedPlan]:
    """The fastest plan of each partition, the fastest first."""
    found: dict[object, StagedPlan] = {}
    for _, plan in sorted((one for one in plans if math.isfinite(one[0])), key=lambda one: one[0]):
        found.setdefault((plan.num_micro_batches, *((stage.end, stage.devices) for stage in plan.stages)), plan)
    return list(found.values())


def _kinds(space: PlanSpace) -> list[str]:
    """Schedules of the space that do not split backward passes; those that do are left to the space."""
    return [kind for kind in space.schedules if kind not in SPLIT_KINDS]


class _Near(NamedTuple):
    """A pipeline near the best plan."""

    shape: Shape
    zero: int
    """ZeRO stage."""


class _Setting(NamedTuple):
    """What is fixed while units and devices are divided among stages."""

    num_micro_batches: int
    zero: int
    """ZeRO stage."""


def _near(incumbent: Incumbent, grid: Grid, most: float) -> list[_Near]:
    """The distinct pipelines of a grid that are near the best plan, the fastest first.

    If no plan fits, these are the pipelines that nearly fit, those with the least overflow first.

    Args:
        incumbent: knows the best plan.
        grid: plans with their prices.
        most: largest step time, as a multiple of that of the best plan.
    """
    space = incumbent.space
    times, overflows = grid.prices.T
    if math.isinf(incumbent.least_s):
        near = np.flatnonzero(overflows <= NEARLY_FITS)
        ranked = near[np.lexsort((times[near], overflows[near]))]
    else:
        near = np.flatnonzero((overflows <= 0.0) & (times <= most * incumbent.least_s))
        ranked = near[np.argsort(times[near], kind="stable")]
    found = []
    for row in ranked.tolist():
        plan = grid.values[row].tolist()
        shape = space.shape(plan)
        if shape.pp > 1 and shape.middle == 1:
            found.append(_Near(shape, plan[space.first.zero]))
    return list(dict.fromkeys(found))

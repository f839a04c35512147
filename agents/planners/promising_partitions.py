"""Promising partitions: which ways to divide units and devices among stages are worth a price.

The programs of Piper (`agents.planners.piper`) and Alpa (`agents.planners.alpa`) give a partition for each number of
stages and each limit of the slowest one. All of these are simulated (`agents.planners.simulated_steps`), since
latencies do not tell the best few. Then units and devices move in some of them. Units: seconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from agents.planners.alpa import inter_operator
from agents.planners.device_partition import Partition
from agents.planners.piper import piper_partitions
from agents.planners.simulated_steps import GAIN, Places, SimulatedSteps
from agents.planners.stage_strategies import Strategy
from agents.planners.stage_table import StageTable
from agents.planners.staged_plan import StagedPlan
from agents.planners.submeshes import FEW_DEVICES, aligned_sizes, tiles_suffice
from automap.space.device_order import Order
from automap.space.space import PlanSpace

PARTS = (16, 32)
"""On a large cluster, one of so many equal parts of its devices moves at a time, or a host (assumed)."""


BEGINS = 16
"""Number of partitions of all settings in which units and devices move (assumed). On a chain of 40 layers on 24 devices
the seventh one led to the best plan."""
CHANGED, PATIENCE = 3, 24
"""Number of the best partitions that are changed at random, in turn, before units and devices move again, and number of
changes without a better partition after which that ends (assumed)."""


class Division(NamedTuple):
    """A partition with all that its stages depend on."""

    step_s: float
    """Its simulated step time."""
    partition: Partition
    order: Order
    """The devices in the order in which stages take them."""
    num_micro_batches: int
    zero: int
    """ZeRO stage."""
    strategies: tuple[Strategy, ...]
    """The distinct strategies of its stages."""

    @property
    def setting(self) -> tuple[object, ...]:
        """All but the partition and its time."""
        return self.order, self.num_micro_batches, self.zero, self.strategies

    @staticmethod
    def of(table: StageTable, step_s: float, partition: Partition) -> Division:
        """A partition of a table."""
        stages = partition.stages
        used = (table.strategy(len(stages) - number, stage) for number, stage in enumerate(stages))
        return Division(step_s, partition, table.order, table.num_micro_batches, table.zero, tuple(dict.fromkeys(used)))


class Moves:
    """Moves units and devices between the stages of divisions.

    Attributes:
        entries: number of entries of stage tables that the moves so far have taken, or that would take as long.
    """

    def __init__(self, space: PlanSpace, is_over: Callable[[], bool]) -> None:
        """For a plan space; `is_over`: whether moves shall end."""
        self._space, self._is_over, self.entries = space, is_over, 0
        # Only the last table is kept, and those of `know`, since tables are large.
        self._last: tuple[object, SimulatedSteps] | None = None
        self._known: dict[tuple[object, ...], StageTable] = {}

    def know(self, table: StageTable) -> None:
        """Keeps a table, so that moves of its divisions use its costs again."""
        self._known[table.order, table.num_micro_batches, table.zero] = table

    def best(self, division: Division, known: StageTable | None = None) -> Division:
        """The best division that moves lead to; `known`: see `StageTable`."""
        steps = self._steps(division, known)
        before = steps.table.entries + steps.entries
        partition = steps.moved(division.partition, self._sizes(), self._is_over)
        step_s = float(steps.seconds(Places.of([partition]), np.inf)[0])
        self.entries += steps.table.entries + steps.entries - before
        return division._replace(step_s=step_s, partition=partition)

    def staged(self, division: Division) -> StagedPlan:
        """The plan of a division."""
        return self._steps(division, None).table.staged(division.partition)

    def improved(self, begins: Sequence[Division], reached: Sequence[Division]) -> Iterator[Division]:
        """Divisions that moves lead to from others, and then from changed ones of the best.

        Args:
            begins: the divisions to begin with, of which the `BEGINS` fastest have a turn.
            reached: what moves have led to before.
        """
        of_settings: dict[object, list[Division]] = {}
        for one in sorted(begins, key=lambda one: one.step_s)[:BEGINS]:
            of_settings.setdefault(one.setting, []).append(one)
        found = list(reached)
        for one in itertools.chain(*of_settings.values()):
            if not self._is_over():
                found.append(self.best(one))
                yield found[-1]
        if not found:
            return
        # Only one table is used, since others would have to be made again.
        best = min(found, key=lambda one: one.step_s)
        pool = {one.partition.stages: one for one in found if one.setting == best.setting}
        rng, waited = np.random.default_rng(0), 0
        while waited < PATIENCE and not self._is_over():
            near = sorted(pool.values(), key=lambda one: one.step_s)[:CHANGED]
            one = near[waited % len(near)]
            steps = self._steps(one, None)
            changed = steps.changed(one.partition, self._sizes(), rng)
            better = self.best(one._replace(partition=changed))
            waited = 0 if better.step_s < near[0].step_s * (1.0 - GAIN) else waited + 1
            if not waited:
                yield better
            pool[better.partition.stages] = better

    def _steps(self, division: Division, known: StageTable | None) -> SimulatedSteps:
        if self._last is None or self._last[0] != division.setting:
            table = StageTable(
                self._space,
                division.order,
                division.num_micro_batches,
                division.strategies,
                zero=division.zero,
                partly=True,
                known=known or self._known.get(division.setting[:3]),
            )
            self._last = division.setting, SimulatedSteps(table)
        return self._last[1]

    def _sizes(self) -> list[int]:
        """Numbers of devices that move at a time."""
        devices = self._space.meshes.devices
        if devices <= FEW_DEVICES:
            return [1]
        host = math.gcd(*(one.num_devices for one in self._space.problem.cluster.hosts))
        return sorted({host, *(max(devices // parts // host * host, host) for parts in PARTS)})


def promising(table: StageTable, entries: float, *, quick: bool) -> list[tuple[float, Partition]]:
    """The partitions of Piper's and Alpa's programs that fit, with their simulated step times, the fastest first.

    Args:
        table: the costs of stages, which are computed as the programs ask for them.
        entries: the programs end when the table has computed so many entries.
        quick: whether the programs run only on submeshes that tile the cluster; otherwise also on those that begin at
            any multiple of the smallest one.
    """

    def limited(partitions: Iterable[Partition]) -> Iterator[Partition]:
        for partition in partitions:
            yield partition
            if table.entries >= entries:
                return

    balanced = list(limited(piper_partitions(table)))
    known = balanced if tiles_suffice(len(table.order), aligned_sizes(table)) else []
    if known and not quick and table.entries < entries:
        known = list(limited(piper_partitions(table, tiled=False)))
    others = limited(inter_operator(table, known, tiled=quick)) if table.entries < entries else ()
    return SimulatedSteps(table).ranked(itertools.chain(balanced, known, others))

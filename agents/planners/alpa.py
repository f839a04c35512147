"""Alpa: an inter-operator dynamic program around an intra-operator integer program, after Zheng et al., "Alpa:
Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning" (OSDI 2022, arXiv 2201.12023).

*Intra-operator* (section 4): a stage runs on a submesh with a logical shape. For each shape the signatures of all
operators are the solution of a 0-1 program over the cost graph (`agents.planners.ilp`), solved once for the model:
equal layers have equal signatures.

*Inter-operator* (section 5): the latency of a pipeline is T = sum of t_i + (B - 1) max t_i, with B micro-batches and
t_i the time of stage i for one of them. For each limit t_max the least sum follows from

    F(s, k, d; t_max) = min over i and submeshes of t_intra((k, i), submesh, s) + F(s - 1, i + 1, d - devices; t_max)

(equation 3), where only stages of t_intra <= t_max count and s says how many micro-batches a stage holds. Submeshes are
1, 2, 4, … devices of a host, or whole hosts, and tile the cluster. Limits grow from the least possible one in steps
(Alpa tries all values of t_intra, epsilon apart). Units: seconds, devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from agents.incumbent import Incumbent
from agents.planners.device_partition import Partition, StageOf, partitions
from agents.planners.ilp import propose
from agents.planners.kernels.partitions import least_sum
from agents.planners.skeletons import SkeletonSearch
from agents.planners.stage_table import Setting, StageTable, Strategy, aligned_sizes, settings_by_templates
from agents.planners.staged_plan import fastest_staged, price_staged
from agents.searcher import SearchResult, SearchTask
from automap.arrays import Floats, Ints
from automap.space.space import PlanSpace

PATIENCE = 4
"""Settings without a better plan after which the search ends (assumed)."""
LIMITS = (1.0, 1.01, 1.05, 1.2, 1.5)
"""Limits of a stage, over the least possible time of the slowest one."""
OFFERED = 2
"""Pipelines of each setting that are verified: the fastest at the exact price."""


def intra_operator(search: SkeletonSearch, setting: Setting) -> list[Strategy]:
    """The strategies of all logical shapes: signatures by the integer program, at the best template of each shape."""
    space, found = search.space, []
    for tp, values in setting.of_each_tp.items():
        if search.finished:
            break
        search.solve(values, rounds=1)
        _, best = search.best[values[: space.first.signature]]
        found.append(Strategy.of(space, tp, space.signatures(best)))
    return found


def inter_operator(table: StageTable) -> Iterator[Partition]:
    """The pipelines of least sum for each limit and number of stages, by their latency."""
    sizes, layers = aligned_sizes(table), table.space.num_units
    if not sizes:
        return
    most = len(table.order) // min(sizes)
    slowest = [
        found.load_s
        for found in partitions(layers, len(table.order), sizes, table.aligned_seconds, table.nothing, most)
    ]
    found = []
    for limit in [min(slowest) * factor for factor in LIMITS] if slowest else []:
        for total_s, partition in least_sums(table, sizes, limit):
            found.append((total_s + (table.num_micro_batches - 1) * partition.load_s, partition))
    distinct = {partition.stages: partition for _, partition in sorted(found, key=lambda one: one[0])}
    yield from distinct.values()


def least_sums(table: StageTable, sizes: Sequence[int], limit: float) -> Iterator[tuple[float, Partition]]:
    """For each number of stages the pipeline of least sum whose stages take at most `limit`: equation 3."""
    layers, devices = table.space.num_units, len(table.order)
    nowhere = np.full(layers + 1, np.inf)
    nowhere[layers] = 0.0
    behind: dict[int, Floats] = {devices: nowhere}
    ways: list[dict[int, tuple[Ints, Ints]]] = []
    for count in range(1, min(layers, devices // min(sizes)) + 1):
        here: dict[int, Floats] = {}
        way: dict[int, tuple[Ints, Ints]] = {}
        for place in range(0, devices, min(sizes)):
            worth, ends, of = [], [], []
            for size in sizes:
                if place % size == 0 and place + size in behind:
                    best, end = np.empty(layers + 1), np.empty(layers + 1, dtype=np.int64)
                    least_sum(table.seconds(count, place, size), limit * (1.0 + 1e-12), behind[place + size], best, end)
                    worth.append(best)
                    ends.append(end)
                    of.append(size)
            if of:
                which = np.argmin(worth, axis=0)
                here[place] = np.array(worth)[which, np.arange(layers + 1)]
                way[place] = np.array(ends)[which, np.arange(layers + 1)], np.array(of)[which]
        behind = here
        ways.append(way)
        if 0 in here and np.isfinite(here[0][0]):
            stages = tuple(_traced(ways, layers))
            load_s = max(
                float(table.seconds(count - n, s.place, s.devices)[s.first, s.last]) for n, s in enumerate(stages)
            )
            yield float(here[0][0]), Partition(load_s, stages)


def _traced(ways: Sequence[dict[int, tuple[Ints, Ints]]], layers: int) -> Iterator[StageOf]:
    layer = place = 0
    for way in reversed(ways):
        ends, sizes = way[place]
        stage = StageOf(layer, int(ends[layer]), place, int(sizes[layer]))
        yield stage
        layer, place = stage.last, place + stage.devices
    assert layer == layers


def run_alpa(incumbent: Incumbent) -> None:
    """Plans for one pair of micro-batches and ZeRO stage after the other, from those of the best templates."""
    space: PlanSpace = incumbent.space
    search = SkeletonSearch(incumbent, propose)
    best_s, waited = float("inf"), 0
    for setting in settings_by_templates(space):
        if incumbent.finished or waited > PATIENCE:
            return
        strategies = intra_operator(search, setting)
        order = tuple(range(space.meshes.devices))
        table = StageTable(space, order, setting.num_micro_batches, strategies, zero=setting.zero)
        found = fastest_staged(incumbent, map(table.staged, inter_operator(table)), OFFERED)
        mine = min(price_staged(incumbent, found), incumbent.least_s)
        waited = 0 if mine < best_s else waited + 1
        best_s = min(best_s, mine)


def search_alpa(task: SearchTask) -> SearchResult:
    """The best plan of Alpa's two passes; see `Searcher`."""
    incumbent = Incumbent.begin(task, "alpa")
    incumbent.price_start(task)
    run_alpa(incumbent)
    return incumbent.result(seed=task.seed)

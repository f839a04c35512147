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

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from agents.incumbent import Incumbent
from agents.planners.device_partition import Partition, StageOf, partitions
from agents.planners.ilp import propose
from agents.planners.kernels.partitions import least_sum
from agents.planners.skeletons import SkeletonSearch
from agents.planners.stage_strategies import Strategy
from agents.planners.stage_table import StageTable
from agents.planners.staged_plan import fastest_staged, price_staged
from agents.planners.submeshes import aligned_sizes, untiled_sizes
from agents.planners.template_settings import Setting, settings_by_templates
from agents.searcher import SearchResult, SearchTask
from automap.arrays import Floats, Ints
from automap.space.space import PlanSpace

PATIENCE = 4
"""Settings without a better plan after which the search ends (assumed)."""
LIMITS = (1.0, 1.01, 1.05, 1.2, 1.5)
"""Limits of a stage, over the least possible time of the slowest one (assumed)."""
OFFERED = 2
"""Pipelines of each setting that are verified (assumed): the fastest at the exact price."""

FirstStages = dict[int, tuple[Ints, Ints]]
"""For each place where devices are left: the end and the devices of the best first stage, both [first layer]."""


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


def inter_operator(table: StageTable, balanced: Iterable[Partition] = (), *, tiled: bool = True) -> Iterator[Partition]:
    """The pipelines of least sum for each limit and number of stages, by their latency.

    Args:
        table: seconds of all stages.
        balanced: the partitions on submeshes that tile the cluster with the fastest slowest stage, if they are known.
        tiled: whether a submesh begins at a multiple of its size; otherwise at a multiple of the smallest one.
    """
    sizes, layers, devices = aligned_sizes(table), table.space.num_units, len(table.order)
    sizes = sizes if tiled else untiled_sizes(table)
    if not sizes:
        return
    most = devices // min(sizes)
    balanced = balanced or partitions(layers, devices, sizes, table.seconds, None, most, tiled=True)
    slowest = [found.load_s for found in balanced]
    found = []
    for limit in [min(slowest) * factor for factor in LIMITS] if slowest else []:
        for total_s, partition in least_sums(table, sizes, limit, tiled=tiled):
            found.append((total_s + (table.num_micro_batches - 1) * partition.load_s, partition))
    distinct = {partition.stages: partition for _, partition in sorted(found, key=lambda one: one[0])}
    yield from distinct.values()


def least_sums(
    table: StageTable, sizes: Sequence[int], limit: float, *, tiled: bool = True
) -> Iterator[tuple[float, Partition]]:
    """For each number of stages the pipeline of least sum whose stages take at most `limit`: equation 3.

    Args:
        table: seconds of all stages.
        sizes: numbers of devices that a stage may have.
        limit: seconds.
        tiled: see `inter_operator`.

    Yields:
        The sum of the stages' seconds, and the pipeline; nothing for a number of stages without any.
    """
    layers, devices = table.space.num_units, len(table.order)
    no_stages = np.full(layers + 1, np.inf)
    no_stages[layers] = 0.0
    # For each place where devices are left: [first layer] the least sum of the stages from this layer on.
    sums: dict[int, Floats] = {devices: no_stages}
    first_stages: list[FirstStages] = []
    for count in range(1, min(layers, devices // min(sizes)) + 1):
        sums, chosen = _with_one_stage_more(table, sizes, limit, count, sums, tiled=tiled)
        first_stages.append(chosen)
        if 0 in sums and np.isfinite(sums[0][0]):
            stages = tuple(_traced(first_stages, layers))
            load_s = max(
                float(table.seconds(count - n, s.place, s.devices)[s.first, s.last]) for n, s in enumerate(stages)
            )
            yield float(sums[0][0]), Partition(load_s, stages)


def _with_one_stage_more(
    table: StageTable, sizes: Sequence[int], limit: float, count: int, sums: dict[int, Floats], *, tiled: bool
) -> tuple[dict[int, Floats], FirstStages]:
    """The least sums of pipelines of `count` stages, given those of one stage less, and the stages that reach them."""
    devices = len(table.order)
    longer: dict[int, Floats] = {}
    chosen: FirstStages = {}
    for place in range(0, devices, min(sizes)):
        totals, ends, widths = [], [], []
        for size in sizes:
            if not (tiled and place % size) and place + size in sums:
                rest = sums[place + size]
                totals.append(np.empty(len(rest)))
                ends.append(np.empty(len(rest), dtype=np.int64))
                least_sum(table.seconds(count, place, size), limit * (1.0 + 1e-12), rest, totals[-1], ends[-1])
                widths.append(size)
        if widths:
            best = np.argmin(totals, axis=0)
            layer = np.arange(len(best))
            longer[place] = np.array(totals)[best, layer]
            chosen[place] = np.array(ends)[best, layer], np.array(widths)[best]
    return longer, chosen


def _traced(first_stages: Sequence[FirstStages], layers: int) -> Iterator[StageOf]:
    """The stages of the pipeline that begins with layer 0 on the first device, in order."""
    layer = place = 0
    for chosen in reversed(first_stages):
        ends, sizes = chosen[place]
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

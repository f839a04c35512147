"""Piper: pipelines whose stages differ in data and tensor parallelism, after Tarnawski et al., "Piper: Multidimensional
Planner for DNN Parallelization" (NeurIPS 2021).

A dynamic program over the remaining layers, devices and stages (the paper's section 4) makes the slowest stage as fast
as possible. The time of a stage is per sample and contains the reduction of its gradients and its transfers. Every
stage chooses its number of devices, its degree of tensor parallelism, and whether it recomputes. It must have memory
for one micro-batch for each stage from itself to the last one, so the state of the dynamic program contains the number
of these stages.

The layers are the units of our graph, which form a chain; so the remaining layers are always a suffix of it (in the
paper the graph may branch, and states are sets of layers that are closed under predecessors). The tensor parallelism of
a layer is Megatron-LM's, with or without sequence parallelism, and data parallelism may have two levels. The paper's
users give the number of micro-batches; here it and the ZeRO stage are those of the best templates, one pair after the
other. Units: seconds, devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agents.incumbent import Incumbent
from agents.planners.device_partition import Partition, partitions
from agents.planners.stage_strategies import Strategy, megatron_strategies
from agents.planners.stage_table import StageTable
from agents.planners.staged_plan import StagedPlan, fastest_staged, price_staged
from agents.planners.submeshes import aligned_sizes, stepped_sizes, tiles_suffice, untiled_sizes
from agents.planners.template_settings import settings_by_templates
from agents.searcher import SearchResult, SearchTask
from automap.arrays import Floats

PATIENCE = 4
"""Pairs of micro-batches and ZeRO stage without a better plan after which the search ends (assumed)."""
OFFERED = 2
"""Number of partitions of each pair that are verified (assumed): the fastest ones at the exact price."""
ORDERS = 2
"""Orders of the devices that are tried (assumed)."""


def piper_partitions(table: StageTable, schedule: str = "1f1b", *, tiled: bool = True) -> Iterator[Partition]:
    """The partitions whose slowest stage is fastest, one for every number of stages.

    On up to `FEW_DEVICES` devices, a stage may have any number of them. On more, it has as many as a submesh that tiles
    the cluster, or a multiple of a step if there are few such submeshes.

    Args:
        table: times of all stages.
        schedule: the schedule, which says how many micro-batches a stage holds.
        tiled: whether a submesh begins at a multiple of its size, as tiles do; otherwise at a multiple of the smallest
            one. A stage of 32 devices then may stand behind one of 16.
    """
    layers, devices = table.space.num_units, len(table.order)

    def seconds(behind: int, place: int, size: int) -> Floats:
        return table.seconds(table.held(behind, schedule), place, size)

    sizes = aligned_sizes(table)
    if tiles_suffice(devices, sizes):
        least = min(sizes)
        offered = sizes if tiled else untiled_sizes(table)
        return partitions(layers, devices, offered, seconds, None, devices // least, tiled=tiled)
    step, sizes = stepped_sizes(table)
    return partitions(layers, devices, sizes, seconds, None, devices // step, step=step)


def of_setting(
    incumbent: Incumbent, num_micro_batches: int, zero: int, strategies: Sequence[Strategy]
) -> list[StagedPlan]:
    """The fastest partitions with one number of micro-batches and one ZeRO stage, of every order of the devices.

    Args:
        strategies: those that a stage may have.
    """
    found, table = [], None
    for order in incumbent.space.meshes.orders[:ORDERS]:
        table = StageTable(incumbent.space, order, num_micro_batches, strategies, zero=zero, known=table)
        found += fastest_staged(incumbent, map(table.staged, piper_partitions(table)), OFFERED)
    return found


def run_piper(incumbent: Incumbent) -> None:
    """Plans for one pair of micro-batches and ZeRO stage after the other."""
    strategies = megatron_strategies(incumbent.space)
    best_s, waited = float("inf"), 0
    for setting in settings_by_templates(incumbent.space):
        if incumbent.finished or waited > PATIENCE:
            return
        found = of_setting(incumbent, setting.num_micro_batches, setting.zero, strategies)
        mine = price_staged(incumbent, found)
        waited = 0 if mine < best_s else waited + 1
        best_s = min(best_s, mine)


def search_piper(task: SearchTask) -> SearchResult:
    """The best plan of Piper's dynamic program; see `Searcher`."""
    incumbent = Incumbent.begin(task, "piper")
    incumbent.price_start(task)
    run_piper(incumbent)
    return incumbent.result(seed=task.seed)

"""SPP: pipelines over any network of devices, after Luo et al., INFOCOM 2022 (arXiv 2204.10562).

1. *Order of the devices* (`automap.space.device_order`): recursive minimum cuts, so that slow links are between stages.
   Without measured bandwidths the matrix is made from the links of the cluster.
2. *Partition* (`agents.planners.device_partition`): for every number of stages the layers and the devices in that order
   are divided so that the slowest stage or channel is fastest.
3. *Schedule* (`agents.planners.list_schedule`): list scheduling gives the order of the micro-batches, with at most

       (1 + (4 S - 4) / M) x (M x the load of the slowest of S stages and channels) + the longest reduction of gradients

   seconds for M micro-batches. This factor is reconstructed, not copied from the paper; it held in every random
   instance that was tried (`benchmarks/spp_bound.py`).

The plan has an explicit order, unless this order is that of 1F1B. All numbers of micro-batches are tried. The body of
the paper was not available, so formulas are reconstructed and no result of its tables is claimed. In our price a rank
is occupied while it sends; so the final order is made for passes that contain the transfers. Units: seconds, bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from agents.incumbent import Incumbent
from agents.planners.device_partition import partitions
from agents.planners.list_schedule import Stages, list_schedule
from agents.planners.pair_links import PairLinks
from agents.planners.stage_strategies import Strategy
from agents.planners.stage_table import StageTable
from agents.planners.staged_plan import StagedPlan, data_parallel, fastest_staged, lower_staged, price_staged
from agents.planners.submeshes import stepped_sizes, tiles_suffice
from agents.searcher import SearchResult, SearchTask
from automap.arrays import Floats
from automap.schedule import A_CHUNK, A_MICRO_BATCH, A_WORD, BACKWARD, FORWARD, write_order
from automap.space.device_order import MAX_CUT, Order, min_cut_order
from automap.space.shape import divisors
from automap.space.space import PlanSpace

LISTED = 2
"""Number of partitions that get an order by list scheduling, for each number of micro-batches (assumed): the fastest in
1F1B."""
FIRST_COUNT = 32
"""Number of micro-batches that is tried first (assumed)."""
MOST_ACTIONS = 20_000
"""Largest number of actions of an explicit order (assumed): more make a plan of megabytes."""


def recursive_order(space: PlanSpace) -> Order:
    """The order of the devices by recursive minimum cuts; of very large clusters that of their numbers."""
    cluster = space.problem.cluster
    if cluster.num_devices > MAX_CUT:
        return tuple(range(cluster.num_devices))
    return min_cut_order(PairLinks(cluster).matrix())


def plans(incumbent: Incumbent, order: Order, num_micro_batches: int) -> Iterator[StagedPlan]:
    """SPP's plans for a number of micro-batches: of the best partitions, in the order of list scheduling."""
    space = incumbent.space
    plain = Strategy(tp=1, signatures=data_parallel(space.evaluator, len(space.axes)))
    devices = len(order)

    def divided() -> Iterator[StagedPlan]:
        # First with channels that work in parallel to the stages, as in the paper; then with transfers that occupy the
        # stages, as in our price.
        table = None
        for holds in (False, True):
            table = StageTable(space, order, num_micro_batches, [plain], holds=holds, known=table)
            step, sizes = stepped_sizes(table)
            if tiles_suffice(devices, divisors(devices)):
                step, sizes = 1, sorted(set(divisors(devices)).intersection(table.sizes))
            channel = None if holds else table.channel
            found = partitions(space.num_units, devices, sizes, table.seconds, channel, devices, step=step)
            yield from map(table.staged, found)

    for plan in fastest_staged(incumbent, divided(), LISTED):
        yield plan
        if 2 * len(plan.stages) * num_micro_batches <= MOST_ACTIONS:
            yield from listed(space, plan)


def listed(space: PlanSpace, plan: StagedPlan) -> Iterator[StagedPlan]:
    """A plan in the orders of list scheduling; none where the trainer cannot run passes in any order.

    These are the orders with any number of micro-batches in flight, backward or forward passes first; and, for ranks
    with little memory, orders with a few more micro-batches in flight than 1F1B.
    """
    if len(plan.stages) == 1 or not space.problem.any_order:
        return
    count, micro_batches = len(plan.stages), plan.num_micro_batches
    stages = passes(space, plan)
    fewest = list(range(count, 0, -1))
    seen = {write_order("1f1b", count, count, micro_batches)}
    ways = [(None, False), (None, True), ([2 * n - 1 for n in fewest], False), ([n + 1 for n in fewest], False)]
    for registers, forward_first in ways:
        order = list_schedule(stages, micro_batches, registers, forward_first=forward_first).order
        if order not in seen:
            seen.add(order)
            yield StagedPlan(stages=plan.stages, num_micro_batches=micro_batches, schedule="explicit", order=order)


def passes(space: PlanSpace, plan: StagedPlan) -> Stages:
    """The times of the stages of a plan with one chunk for each rank, as in the price: passes contain transfers."""
    program, times = space.evaluator.timeline(lower_staged(space, plan))
    first = program[:, A_MICRO_BATCH] == 0
    took: dict[int, Floats] = {}
    for word in (FORWARD, BACKWARD):
        rows = np.flatnonzero(first & (program[:, A_WORD] == word))
        rows = rows[np.argsort(program[rows, A_CHUNK])]
        took[word] = times[rows, 1] - times[rows, 0]
    nothing = np.zeros(len(plan.stages) - 1)
    return Stages(
        forward_s=took[FORWARD],
        backward_s=took[BACKWARD],
        onward_s=nothing,
        back_s=nothing,
        reduce_s=np.zeros(len(plan.stages)),
    )


def search_spp(task: SearchTask) -> SearchResult:
    """The best plan of SPP; see `Searcher`."""
    incumbent = Incumbent.begin(task, "spp")
    incumbent.price_start(task)
    run_spp(incumbent)
    return incumbent.result(seed=task.seed)


def run_spp(incumbent: Incumbent) -> None:
    """Plans for every number of micro-batches, those near `FIRST_COUNT` first."""
    counts = {shape.num_micro_batches for shape in incumbent.space.shapes}
    for _ in planned(incumbent, sorted(counts, key=lambda count: abs(math.log(count / FIRST_COUNT)))):
        pass


def planned(incumbent: Incumbent, counts: Sequence[int]) -> Iterator[tuple[float, StagedPlan]]:
    """Prices the plans for these numbers of micro-batches until the budget ends.

    All orders of the devices are tried with the first number, and the best order is used for the others (assumed to be
    the best for these too). The order by minimum cuts is not always the best: such cuts often separate single devices,
    so on many clusters the order of the devices' numbers is better.

    Yields:
        The step time of each plan, infinite where it does not fit, and the plan.
    """
    space = incumbent.space
    orders = list(dict.fromkeys([recursive_order(space), *space.meshes.orders]))
    for count in counts:
        reached = dict.fromkeys(orders, math.inf)
        for order in orders:
            if incumbent.finished:
                return
            for plan in plans(incumbent, order, count):
                seconds = price_staged(incumbent, [plan])
                reached[order] = min(reached[order], seconds)
                yield seconds, plan
                if incumbent.finished:
                    return
        orders = [min(orders, key=reached.__getitem__)]

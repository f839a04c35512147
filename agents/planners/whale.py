"""Whale: hardware-aware load balance on devices of several kinds, after Jia et al., "Whale: Efficient Giant Model
Training over Heterogeneous GPUs" (USENIX ATC 2022, arXiv 2011.09208, section 3.3).

*Inside a stage* (algorithm 1): each device gets a share of the batch in proportion to its FLOP/s. While a device lacks
memory, samples move from the device that lacks most (the peak) to the least used device with free memory (the valley).
In the paper's listing a peak is left after one move; here it may be the peak again.

*Between stages*: an earlier stage holds the activations of more micro-batches. So devices are sorted by memory, the
largest first, and stages take them in this order. Then the layers are divided so that every stage fits into memory and
the largest quotient of a stage's FLOPs and its FLOP/s is as small as possible.

Pipelines nest in data parallelism: with K devices and N stages each stage has K / N of them. Whale's users give the
number of stages and of micro-batches; here all are tried. Units: samples, FLOP/s, bytes, seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from agents.incumbent import Incumbent
from agents.planners.pipeline_cuts import partition
from agents.planners.span_costs import SpanCosts, spans
from agents.planners.staged_plan import StageChoice, StagedPlan, data_parallel, search_staged
from agents.planners.tied_spans import TiedUnits
from agents.planners.unit_profile import UnitsInOrder
from agents.searcher import SearchResult, SearchTask
from automap.arrays import Floats, Ints
from automap.price.curves import gemm_curve
from automap.price.lowered_plan import RECOMPUTE_MODES, spread
from automap.space.shape import divisors
from automap.space.space import PlanSpace


def balance(
    samples: int, flops_per_s: Sequence[float], room: Sequence[float], fixed: Sequence[float], each: Sequence[float]
) -> list[int] | None:
    """Algorithm 1: shares samples out in proportion to the speed of devices, as far as their memory allows.

    Args:
        samples: number of samples, at least that of devices.
        flops_per_s: [devices] speed.
        room: [devices] bytes of memory.
        fixed: [devices] bytes that do not depend on the number of samples.
        each: [devices] bytes of one sample.

    Returns:
        [devices] samples of each device, at least 1; None where they do not fit.
    """
    rate, space = np.array(flops_per_s), np.array(room)
    fits = np.floor((space - np.array(fixed)) / np.maximum(np.array(each), 1e-30)).clip(0, samples).astype(int)
    if fits.min() < 1 or int(fits.sum()) < samples:
        return None
    wanted = samples * rate / rate.sum()
    found = np.maximum(np.floor(wanted), 1).astype(int)
    # After rounding down, the remaining samples go to the devices that are farthest below their share. Where shares
    # below 1 were raised to 1, the surplus is taken from the largest shares.
    while found.sum() != samples:
        step = 1 if found.sum() < samples else -1
        behind = np.where((found > 1) | (step > 0), step * (wanted - found), -np.inf)
        found[int(behind.argmax())] += step
    while True:
        used = (np.array(fixed) + found * np.array(each)) / space
        short = np.flatnonzero(found > fits)
        if not len(short):
            return [int(count) for count in found]
        peak = int(short[used[short].argmax()])
        free = np.flatnonzero(found < fits)
        valley = int(min(free, key=lambda device: (found[device] / rate[device], used[device])))
        moved = min(found[peak] - fits[peak], fits[valley] - found[valley])
        # Moving one sample at a time would be exact; half of what is missing ends nearly as evenly in fewer steps.
        moved = max(1, moved // 2)
        found[peak] -= moved
        found[valley] += moved


class Balance:
    """The devices of a cluster in Whale's order, and what the model takes on them."""

    def __init__(self, space: PlanSpace) -> None:
        cluster = space.problem.cluster
        self.space = space
        precision = space.problem.base_precision
        kinds = [cluster.device(number) for number in range(cluster.num_devices)]
        self.rate = [float(gemm_curve(kind, precision).flops_per_s) for kind in kinds]
        self.order = sorted(range(len(kinds)), key=lambda d: (-kinds[d].memory_bytes, -self.rate[d], d))
        chosen = data_parallel(space.evaluator, len(space.axes))
        self.units, self.tied = UnitsInOrder.of(space.evaluator, chosen), TiedUnits(space.evaluator, chosen)
        self._costs: dict[tuple[tuple[int, ...], int], SpanCosts] = {}
        graph = space.problem.graph
        self.flops: Floats = np.array(
            [
                sum(op.forward_flops.at(1) + op.backward_flops.at(1) for op in graph.operators[unit.start : unit.stop])
                for unit in space.linkage.blocks.units
            ]
        )

    def costs(self, devices: Sequence[int], samples: int) -> SpanCosts:
        """Costs of a stage on some devices, with equally many samples on each of them."""
        key = (tuple(devices), samples)
        if key not in self._costs:
            mesh = (len(devices), *[1] * (len(self.space.axes) - 1))
            (stage,) = self.space.evaluator.layout_of([(tuple(devices), mesh)]).stages
            self._costs[key] = SpanCosts(self.space, self.units, self.tied, stage, samples, 0)
        return self._costs[key]

    def shares(self, devices: Sequence[int], samples: int, span: tuple[int, int], alive: int, mode: int) -> Ints | None:
        """[devices] samples of each device of a stage by algorithm 1; None where they do not fit.

        Args:
            devices: devices of the stage.
            samples: samples of a micro-batch.
            span: first unit of the stage, and one past its last.
            alive: micro-batches in flight.
            mode: number of the recompute mode of its units.
        """
        cluster = self.space.problem.cluster
        kinds: dict[str, list[int]] = {}
        for device in devices:
            kinds.setdefault(cluster.hosts[cluster.node_of[device]].device, []).append(device)
        fixed, each, room = {}, {}, {}
        for kind, mine in kinds.items():
            one, two = (self.costs(mine[:1], count) for count in (1, 2))
            first, second = (float(of.used_bytes(alive)[mode][span]) for of in (one, two))
            each[kind], fixed[kind], room[kind] = second - first, 2.0 * first - second, one.capacity
        of = [cluster.hosts[cluster.node_of[device]].device for device in devices]
        found = balance(
            samples,
            [self.rate[device] for device in devices],
            [room[kind] for kind in of],
            [fixed[kind] for kind in of],
            [each[kind] for kind in of],
        )
        return None if found is None else np.array(found)

    def pipeline(self, count: int, num_micro_batches: int, mode: int) -> StagedPlan | None:
        """The plan with `count` stages; None where it does not fit."""
        space, size = self.space, len(self.order) // count
        samples = space.problem.training.global_batch // num_micro_batches
        stages = [self.order[rank * size : (rank + 1) * size] for rank in range(count)]
        loads = []
        for rank, devices in enumerate(stages):
            # Here a span fits if the largest device has room for it; the shares inside the stage are found later.
            costs = self.costs(devices[:1], spread(samples, size) // size)
            fits = costs.used_bytes(min(count - rank, num_micro_batches))[mode] <= costs.capacity
            load = spans(self.flops) / sum(self.rate[device] for device in devices)
            loads.append(np.where(fits | (count == 1), load, np.inf))
        ends = partition(loads)
        if ends is None:
            return None
        choices = []
        for rank, (begin, end) in enumerate(itertools.pairwise([0, *ends, space.num_units])):
            alive = min(count - rank, num_micro_batches)
            shares = self.shares(stages[rank], samples, (begin, end), alive, mode)
            if shares is None:
                return None
            is_mixed = len({self.rate[device] for device in stages[rank]}) > 1
            choices.append(
                StageChoice(
                    end=end,
                    devices=tuple(stages[rank]),
                    recompute=RECOMPUTE_MODES[mode],
                    batch_shares=tuple(shares.tolist()) if is_mixed else None,
                )
            )
        return StagedPlan(stages=tuple(choices), num_micro_batches=num_micro_batches)


def plans(incumbent: Incumbent) -> Iterator[StagedPlan]:
    """Balanced plans for every number of stages and of micro-batches, each with the lightest recomputation that
    fits."""
    space = incumbent.space
    balance_of = Balance(space)
    counts = sorted({shape.num_micro_batches for shape in space.shapes})
    for count in divisors(len(balance_of.order)):
        if count > space.num_units:
            break
        for num_micro_batches in counts:
            if space.problem.training.global_batch // num_micro_batches < len(balance_of.order) // count:
                break
            for mode in np.flatnonzero(space.modes).tolist():
                plan = balance_of.pipeline(count, num_micro_batches, mode)
                if plan is not None:
                    yield plan
                    break


def search_whale(task: SearchTask) -> SearchResult:
    """The best of Whale's balanced plans; see `Searcher`."""
    return search_staged(task, "whale", plans)

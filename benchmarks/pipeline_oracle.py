"""An oracle for synchronous pipelines in 1F1B order, without virtual stages, whose programs no searcher has.

It takes the costs of single units and the form of its plans from where the planners have them. Its plans are good, and
not always the best there are: devices move in parts, and the changes at the end are single ones.

For each number of micro-batches and each ZeRO stage, a dynamic program divides units and devices among stages. It
minimises the sum of the times of all stages under limits of the slowest one, for a series of limits; times are those
that the price has for single units. Devices move in up to 32 equal parts. The best of these plans are priced as whole
plans. Then single units, devices and recomputations change as long as the price of the whole plan falls. So the oracle
judges a search and not the price. Units: seconds, bytes.
"""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numba import float64, int64, void

from agents.planners.staged_plan import StageChoice, StagedPlan, data_parallel, lower_staged
from agents.planners.unit_profile import UnitsInOrder, needs, states
from automap.arrays import Floats, Ints
from automap.jit import borrowing
from automap.price.kernels.collectives import RAMP_UNIT_S
from automap.price.kernels.records import ALL_GATHER, ALL_REDUCE
from automap.price.kernels.stage_records import Stage
from automap.price.kernels.step import SPREAD_OVERLAP
from automap.price.lowered_plan import RECOMPUTE_MODES, spread
from automap.problem import Problem
from automap.space.shape import divisors
from automap.space.space import PlanSpace
from automap.space.templates import megatron_signatures

PARTS = 32
"""Largest number of equal parts of the devices that the dynamic program gives to stages; parts of a host, or hosts."""
MOST_STAGES = 64
"""Largest number of stages."""
LIMITS = np.array([1.0, 1.004, 1.01, 1.02, 1.04, 1.08, 1.15, 1.25, 1.5, 2.0])
"""Limits of the slowest stage, as multiples of its least time."""
PRICED, CLIMBED = 24, 8
"""Partitions of each number of micro-batches that are priced, and plans in which layers and devices move."""
REACH = 6
"""Largest distance of two stages between which devices move."""


@dataclass(frozen=True)
class Pipeline:
    """A plan of the oracle."""

    micro_batches: int
    zero: int
    levels: int
    """1, or 2 where stages of whole hosts share their samples in two levels, see `Way`."""
    ends: tuple[int, ...]
    """End of the units of each stage."""
    sizes: tuple[int, ...]
    """Devices of each stage."""
    again: tuple[int, ...]
    """Units of each stage, the first ones, that are recomputed."""


@borrowing(
    void(
        float64[:, :, :, ::1],
        int64[:, ::1],
        int64[::1],
        float64[::1],
        float64[:, :, ::1],
        float64[:, :, ::1],
        int64[:, :, :, ::1],
    )
)
def add_stage(costs, kinds, sizes, limits, after, found, ways):
    """Puts one stage before the stages that follow it, so that the sum of their seconds is least under each limit of a
    single stage, and under the first limit, 0, the most seconds of a stage instead of the sum.

    Args:
        costs: [2, kinds, units + 1, units + 1] seconds of each span on each kind of stage, and the least of them and of
            all longer spans that begin with the same unit.
        kinds: [parts, sizes] kind of a stage that begins with this part and has this size; -1 = none.
        sizes: [sizes] parts of the devices.
        limits: [limits] most seconds of a stage; 0 = no limit.
        after: [limits, parts + 1, units + 1] least seconds of the stages from this part and unit on.
        found: the same with the new stage; written.
        ways: [2, ...] end and number of the size of the new stage; written.
    """
    units, parts = costs.shape[2] - 1, kinds.shape[0]
    for w in range(limits.shape[0]):
        for part in range(parts):
            for k in range(sizes.shape[0]):
                kind, rest = kinds[part, k], part + sizes[k]
                if rest > parts or kind < 0:
                    continue
                for first in range(units):
                    for last in range(first + 1, units + 1):
                        best = found[w, part, first]
                        if costs[1, kind, first, last] > (limits[w] if limits[w] > 0.0 else best):
                            break
                        seconds, others = costs[0, kind, first, last], after[w, rest, last]
                        total = seconds + others if limits[w] > 0.0 else max(seconds, others)
                        if total < best and (limits[w] == 0.0 or seconds <= limits[w]):
                            found[w, part, first] = total
                            ways[0, w, part, first], ways[1, w, part, first] = last, k


def before(of_units: Floats) -> Floats:
    """[..., units + 1] sums over all units before this one."""
    return np.concatenate([np.zeros((*of_units.shape[:-1], 1)), np.cumsum(of_units, axis=-1)], axis=-1)


def spans(of_units: Floats) -> Floats:
    """[..., units + 1, units + 1] sums over the units i to j - 1."""
    sums = before(of_units)
    return sums[..., None, :] - sums[..., :, None]


def collective_s(link, kind: int, on_wire_s: Floats) -> Floats:
    """Seconds of many collectives, from their bytes over the rate of the link."""
    found = link["latency_s"][kind] + on_wire_s + link["ramp"][kind] * np.sqrt(np.maximum(on_wire_s, 0.0) * RAMP_UNIT_S)
    return np.where(on_wire_s > 0.0, found, 0.0)


class Costs:
    """What spans of units cost on some devices: [units + 1, units + 1], entry [i, j] of the units i to j - 1.

    Attributes:
        seconds: of both passes of a micro-batch without recomputation, of its transfers, and its share of the reduction
            of gradients.
        fixed, saved: bytes of the state of the training, and those that a micro-batch saves.
        beyond, most: peak bytes beside these without recomputation, and a bound of them with any recomputation.
        freed, more_s: [units + 1] bytes that recomputation of all units before this one frees, and its seconds.
        capacity: bytes of a device.
        recomputes: whether units may be recomputed.
    """

    def __init__(self, oracle: "Oracle", devices: Sequence[int], way: "Way", count: int, zero: int) -> None:
        space = oracle.space
        mesh = (len(devices) // way.inner, *[1] * (len(space.axes) - 2), way.inner)
        (layout,) = space.evaluator.layout_of([(tuple(devices), mesh)]).stages
        samples = spread(oracle.batch // count, mesh[0])
        axes = (layout.axes > 1.0) & (np.arange(len(layout.axes)) < len(layout.axes) - 1)
        rows = way.units.costs(Stage(layout.axes, layout.links, layout.hardware, axes, float(samples)))
        settings, full = space.evaluator.settings(zero), RECOMPUTE_MODES.index("full")
        forward_s = rows["forward_s"] + rows["forward_host_s"]
        backward_s = rows["backward_s"] + rows["backward_host_s"] + rows["recompute_s"]
        passes_s, saved, need = forward_s + backward_s, rows["saved_bytes"], needs(rows, settings)
        sync_s, spread_s = 0.0, 0.0
        hidden, last = space.problem.trainer.gradient_overlap, len(layout.axes) - 1
        for axis, (size, link) in enumerate(zip(layout.axes.tolist(), layout.links, strict=True)):
            if size > 1.0:
                sent = spans(rows[0]["scattered" if zero else "reduced"][:, axis]) * float(settings.sent_gradient_bytes)
                whole = collective_s(link, ALL_REDUCE, 2 * (size - 1) / size * sent / link["bytes_per_s"][ALL_REDUCE])
                sync_s = sync_s + (0.5 * whole if zero and axis < last else whole)
                if zero and axis < last:
                    held = spans(rows[0]["gathered"][:, axis]) * float(settings.parameter_bytes)
                    spread_s += collective_s(link, ALL_GATHER, (size - 1) / size * held / link["gather_bytes_per_s"])
        shown_s = sync_s * (1.0 - hidden) + np.maximum(sync_s * hidden - spans(backward_s[0]), 0.0)
        shown_s = shown_s + spread_s * (1.0 - SPREAD_OVERLAP * hidden)
        crossing = np.concatenate([[0.0], rows[0]["boundary_bytes"]])
        received, sending = (
            np.where((crossing > 0.0) & (rate > 0.0), float(settings.send_s) + crossing / max(rate, 1.0), 0.0)
            for rate in oracle.rates(devices)
        )
        sending[-1] = 0.0
        self.seconds: Floats = spans(passes_s[0]) + shown_s / count + received[:, None] + sending
        self.fixed, self.saved = spans(states(rows[0], settings)), spans(saved[0])
        begins, units = np.ogrid[: len(crossing), : len(crossing) - 1]
        self.beyond, self.most = np.zeros_like(self.fixed), np.zeros_like(self.fixed)
        peaks = np.where(units >= begins, before(saved[0])[1:] + need[0], -np.inf)
        self.beyond[:, 1:] = np.maximum.accumulate(peaks, axis=1) - before(saved[0])[1:]
        self.most[:, 1:] = np.maximum.accumulate(np.where(units >= begins, need.max(axis=0), -np.inf), axis=1)
        self.recomputes = oracle.recomputes
        frees = saved[full] < saved[0]
        self.freed = before(np.where(frees, saved[0] - saved[full], 0.0))
        self.more_s = before(np.where(frees, passes_s[full] - passes_s[0], 0.0))
        self.capacity = (float(layout.capacity) - settings.reserved_bytes) / (1.0 + settings.unused_share)

    def with_alive(self, alive: int) -> tuple[Floats, Ints]:
        """Seconds of all spans with so many micro-batches in flight and as little recomputation as fits, infinite
        where none does; and how many units, the first ones, are recomputed."""
        plain = self.fixed + alive * self.saved + self.beyond <= self.capacity
        first = np.arange(len(self.freed))[:, None]
        lacks = self.fixed + alive * self.saved + self.most - self.capacity
        count = np.searchsorted(self.freed, self.freed[:, None] + np.maximum(lacks, 0.0) / alive) - first
        # Where no unit may be recomputed, a count beyond all units is not legal.
        count = np.where(plain, 0, np.maximum(count, 0) if self.recomputes else len(self.freed))
        legal = (np.arange(len(self.freed)) > first) & (first + count <= np.arange(len(self.freed)))
        more_s = self.more_s[np.minimum(first + count, len(self.freed) - 1)] - self.more_s[:, None]
        return np.where(legal, self.seconds + more_s, np.inf), count


class Way(NamedTuple):
    """How the devices of a stage share the samples: in one level, or in two, the hosts and the devices of a host."""

    inner: int
    signatures: Ints
    units: UnitsInOrder


class Oracle:
    """The best pipeline that the dynamic program and single changes find for a problem.

    Attributes:
        space: for the units, the price and the numbers of micro-batches.
        batch: samples of a step.
        recomputes: whether a plan may recompute.
    """

    def __init__(self, problem: Problem, zeros: Sequence[int]) -> None:
        """For a problem and the ZeRO stages that a plan may have; all hosts are of one size."""
        self.space, self.zeros = PlanSpace(problem), zeros
        self.devices, self.host = problem.cluster.num_devices, problem.cluster.hosts[0].num_devices
        self.batch, evaluator = problem.training.global_batch, self.space.evaluator
        self.recomputes = bool(self.space.modes[RECOMPUTE_MODES.index("full")])
        signatures = [(1, data_parallel(evaluator, len(self.space.axes)))]
        for shape in self.space.shapes:
            if shape.tp == self.host > 1 and shape.dp > 1 and shape.samples % (shape.dp * shape.tp) == 0:
                prefix = self.space.even_values(shape, recompute="none", zero=0)
                values = megatron_signatures(self.space, shape, prefix, sequence_parallel=False, only_batch=True)
                signatures.append((shape.tp, self.space.signatures(values)))
                break
        self.ways = [Way(inner, chosen, UnitsInOrder.of(evaluator, chosen)) for inner, chosen in signatures]
        self.part = next(
            part
            for part in divisors(self.devices)
            if self.devices // part <= PARTS and (part % self.host == 0 or self.host % part == 0)
        )
        self.parts, self.units = self.devices // self.part, self.space.num_units
        self._prices: dict[Pipeline, tuple[float, float]] = {}

    def way(self, place: int, size: int, samples: int, levels: int) -> Way:
        """How a stage shares the samples of a micro-batch; in two levels only where whole hosts do so evenly."""
        hosts = self.host if levels == 2 else 1
        is_even = size > hosts > 1 and place % hosts == 0 and size % hosts == 0 and samples % size == 0
        return self.ways[-1 if is_even else 0]

    def rates(self, devices: Sequence[int]) -> tuple[float, float]:
        """Bytes/s of the transfer from an equal stage before these devices and to one behind them; 0 = none."""
        laid_out, size, place = self.space.evaluator.laid_out, len(devices), devices[0]
        first, own = np.arange(max(place - size, 0), place), np.array(devices)
        behind = np.arange(place + size, min(place + 2 * size, self.devices))

        def rate(one: Ints, other: Ints) -> float:
            if not len(one) or not len(other):
                return 0.0
            return laid_out.sends.of((laid_out.pattern(one), laid_out.pattern(other)), one, other)[1]

        return rate(first, own), rate(own, behind)

    def price(self, plan: Pipeline) -> tuple[float, float]:
        """Overflow of memory, or 0, and step time of a plan by the price of whole plans."""
        if plan not in self._prices:
            outcome = self.space.evaluator.evaluate(lower_staged(self.space, self.staged(plan)))
            self._prices[plan] = max(outcome.overflow, 0.0), outcome.step_time_s
        return self._prices[plan]

    def staged(self, plan: Pipeline) -> StagedPlan:
        """The plan in the form that can be priced."""
        samples, found, place = self.batch // plan.micro_batches, [], 0
        for begin, end, size, again in zip((0, *plan.ends), plan.ends, plan.sizes, plan.again, strict=False):
            way, modes = (
                self.way(place, size, samples, plan.levels),
                ("full",) * again + ("none",) * (end - begin - again),
            )
            found.append(
                StageChoice(
                    end=end,
                    devices=tuple(range(place, place + size)),
                    tp=way.inner,
                    recompute=modes if again else "none",
                    signatures=way.signatures,
                )
            )
            place += size
        return StagedPlan(stages=tuple(found), num_micro_batches=plan.micro_batches, zero=plan.zero)

    def best(self, climb_s: float) -> float:
        """Step time of the best plan in seconds, infinite where none fits.

        Args:
            climb_s: processor seconds for changes of single layers, devices and recomputations.
        """
        found: list[Pipeline] = []
        levels = range(1, len(self.ways) + 1)
        for count, zero, level in itertools.product(self.space.meshes.micro_batches, self.zeros, levels):
            found += sorted(set(self.partitions(count, zero, level)), key=self.price)[:2]
        best = (1.0, math.inf)
        ranked = sorted(found, key=self.price)[:CLIMBED]
        for number, plan in enumerate(ranked):
            until_s = time.process_time() + climb_s / len(ranked)
            best = min(best, self.price(self.climbed(plan, until_s, np.random.default_rng(number))))
        return best[1] if best[0] <= 0.0 else math.inf

    def partitions(self, count: int, zero: int, levels: int) -> Iterator[Pipeline]:
        """Plans of the dynamic program with so many micro-batches, those of least latency first."""
        samples = self.batch // count
        sizes = np.array([k for k in range(1, self.parts + 1) if k * self.part <= samples])
        kinds, of_kind = np.full((self.parts, len(sizes)), -1), dict[object, int]()
        costs: list[Costs] = []
        for part, (k, size) in itertools.product(range(self.parts), enumerate((sizes * self.part).tolist())):
            place = part * self.part
            if place + size <= self.devices:
                way, devices = self.way(place, size, samples, levels), range(place, place + size)
                hosts = np.unique([device // self.host for device in devices], return_counts=True)[1]
                key = (size, way.inner, hosts.tobytes(), *self.rates(devices))
                if key not in of_kind:
                    of_kind[key] = len(costs)
                    costs.append(Costs(self, devices, way, count, zero))
                kinds[part, k] = of_kind[key]
        if not costs:
            return
        most = min(MOST_STAGES, self.units, self.parts)
        tables = [_table(costs, min(stages, count)) for stages in range(1, most + 1)]
        least_s = min((row.sum_s for row in _divided(tables, kinds, sizes, np.zeros(1))), default=math.inf)
        if math.isfinite(least_s):
            rows = _divided(tables, kinds, sizes, least_s * LIMITS)
            for row in sorted(rows, key=lambda row: row.sum_s + (count - 1) * row.most_s)[:PRICED]:
                yield Pipeline(count, zero, levels, row.ends, tuple(self.part * size for size in row.sizes), row.again)

    def climbed(self, plan: Pipeline, until_s: float, rng: np.random.Generator) -> Pipeline:
        """The plan with changes, taken one at a time in random order, as long as one gains or the time is over."""
        tried: set[Pipeline] = set()
        while more := [one for one in self.neighbours(plan) if one not in tried]:
            for at in rng.permutation(len(more)).tolist():
                if time.process_time() > until_s:
                    return plan
                tried.add(more[at])
                if self.price(more[at]) < self.price(plan):
                    plan = more[at]
                    break
        return plan

    def neighbours(self, plan: Pipeline) -> Iterator[Pipeline]:
        """Plans in which a unit, devices or both move between two stages, or one unit more or less is recomputed."""
        samples, count = self.batch // plan.micro_batches, len(plan.sizes)
        steps = sorted({0, 1, self.part, self.host})
        devices = [*steps, *(-step for step in steps[1:])]
        lengths = np.diff((0, *plan.ends))
        for one, other in itertools.permutations(range(count), 2):
            for units, more in itertools.product((0, 1), devices if abs(one - other) <= REACH else ()):
                wide, long = list(plan.sizes), lengths.copy()
                wide[one], wide[other] = wide[one] - more, wide[other] + more
                long[one], long[other] = long[one] - units, long[other] + units
                if min(wide) > 0 and max(wide) <= samples and long.min() > 0 and (units or more > 0):
                    again = tuple(map(min, plan.again, long.tolist()))
                    yield replace(plan, ends=tuple(np.cumsum(long).tolist()), sizes=tuple(wide), again=again)
        for stage, change in itertools.product(range(count), (-1, 1) if self.recomputes else ()):
            again = list(plan.again)
            again[stage] += change
            if 0 <= again[stage] <= lengths[stage]:
                yield replace(plan, again=tuple(again))


class Row(NamedTuple):
    """A way to divide units and parts of the devices among stages."""

    sum_s: float
    """Seconds of all stages together, or those of the slowest one where there is no limit."""
    most_s: float
    """Seconds of the slowest stage."""
    ends: tuple[int, ...]
    sizes: tuple[int, ...]
    again: tuple[int, ...]


def _table(costs: Sequence[Costs], alive: int) -> tuple[Floats, Ints]:
    """The first argument of `add_stage` with so many micro-batches in flight, and the units that are recomputed."""
    seconds, again = map(np.array, zip(*(one.with_alive(alive) for one in costs), strict=True))
    least = np.minimum.accumulate(seconds[..., ::-1], axis=-1)[..., ::-1]
    return np.ascontiguousarray(np.stack([seconds, least])), again


def _divided(tables: Sequence[tuple[Floats, Ints]], kinds: Ints, sizes: Ints, limits: Floats) -> Iterator[Row]:
    """The best row under each limit for each number of stages; the tables are those from the last stage on."""
    parts, units = len(kinds), tables[0][0].shape[-1] - 1
    after = np.full((len(limits), parts + 1, units + 1), np.inf)
    after[:, parts, units] = 0.0
    ways: list[Ints] = []
    for costs, _ in tables:
        found, way = np.full_like(after, np.inf), np.zeros((2, *after.shape), dtype=np.int64)
        add_stage(costs, kinds, sizes, limits, after, found, way)
        ways.append(way)
        after = found
        for w in np.flatnonzero(np.isfinite(found[:, 0, 0])).tolist():
            part, unit, most_s, stages = 0, 0, 0.0, []
            for (seconds, again), chosen in zip(tables[len(ways) - 1 :: -1], ways[::-1], strict=True):
                end, k = chosen[:, w, part, unit].tolist()
                kind = kinds[part, k]
                most_s = max(most_s, float(seconds[0, kind, unit, end]))
                stages.append((end, int(sizes[k]), int(again[kind, unit, end])))
                part, unit = part + int(sizes[k]), end
            yield Row(float(found[w, 0, 0]), most_s, *zip(*stages, strict=True))

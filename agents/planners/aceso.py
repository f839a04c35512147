"""Aceso: iterative relief of bottlenecks, after Liu et al., "Aceso: Efficient Parallel DNN Training through Iterative
Bottleneck Alleviation" (EuroSys 2024).

The search begins with one balanced plan for each number of stages. In each iteration it finds the bottleneck: the rank
that overflows memory most, or the slowest rank if all fit. Primitives that relieve it are applied (the paper's table
1): units move to a neighbouring rank; the rank gets more or fewer devices; it, or all ranks, recompute more (to save
memory) or less (to save time); the ZeRO stage rises or falls; the size of micro-batches is halved or doubled; and a
factor of two moves from one degree of parallelism to another.

If no primitive gives a better plan, primitives are applied to the changed plans again, up to `MOST_HOPS` hops from the
plan at hand (section 3.3), the most promising first. A better plan begins the next iteration. At the end the signatures
of single operators are tuned (section 4.1). All plans are in the plan space and priced exactly. Units: seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from agents.incumbent import Incumbent
from agents.planners.linearization import Worth, worth_of
from agents.searcher import SearchResult, SearchTask
from automap.bounds.priced_templates import priced_templates
from automap.cost_graph.sensitivities import MEMORY
from automap.price.lowered_plan import RECOMPUTE_MODES
from automap.space.shape import Shape
from automap.space.space import PlanSpace, Values
from automap.space.templates import megatron_signatures

MOST_HOPS = 4
"""Largest number of primitives between a plan and the next better one; the paper uses 7, on a price that is cheaper."""
WIDTH = 6
"""Number of the best changed plans from which each further hop begins (assumed)."""
MOVED = (1, 2, 4, 8)
"""Numbers of units that a primitive moves to another rank, and of levels by which it changes recomputation
(assumed)."""


class Primitives:
    """The primitives that relieve the bottleneck of a plan."""

    def __init__(self, space: PlanSpace) -> None:
        self.space = space
        self._signatures: dict[tuple[int, ...], list[Values]] = {}

    def of(self, values: Values) -> list[Values]:
        """The plans that one primitive leads to, distinct and legal."""
        rank, lacks_memory = self.bottleneck(values)
        found = list(self._moved(values, rank))
        found += self._resized(values, rank)
        found += self._recomputed(values, rank, more=lacks_memory)
        found += self._sharded(values, more=lacks_memory)
        found += self._reshaped(values)
        repaired = (self.space.repair(plan) for plan in found)
        return [plan for plan in dict.fromkeys(repaired) if plan != values]

    def bottleneck(self, values: Values) -> tuple[int, bool]:
        """The rank that limits a plan, and whether this is because it overflows memory; otherwise it is the slowest."""
        ranks = self.space.evaluator.evaluate(self.space.lowered(values)).ranks
        used = sum(ranks[name] for name in MEMORY)
        fullness = used / ranks["capacity_bytes"]
        if fullness.max() > 1.0:
            return int(fullness.argmax()), True
        return int(ranks["end_s"].argmax()), False

    def _moved(self, values: Values, rank: int) -> Iterator[list[int]]:
        """Plans in which units of the rank move to the rank before or after it; the ends of the others stay."""
        space, shape = self.space, self.space.shape(values)
        if shape.pp == 1 or shape.virtual > 1:
            return
        ends = [*space.cuts(values, shape.pp - 1), space.num_units]
        shares = space.cut_shares(values)
        for count in MOVED:
            for at, step in ((rank - 1, count), (rank, -count)):
                if 0 <= at < shape.pp - 1:
                    changed = ends.copy()
                    changed[at] += step
                    row, start = list(values), 0
                    for chunk, end in enumerate(changed[:-1]):
                        candidates = space.candidates(start, chunk, shape.pp, shares[chunk]).tolist()
                        if end not in candidates:
                            break
                        row[space.first.cut + chunk] = candidates.index(end)
                        start = end
                    else:
                        yield row

    def _resized(self, values: Values, rank: int) -> Iterator[list[int]]:
        """Plans in which devices move between the rank and the last stage."""
        space = self.space
        slots = space.slots[space.first.devices : space.first.shares]
        for number, slot in enumerate(slots):
            if slot.index == rank:
                at = space.first.devices + number
                for size in np.flatnonzero(space.legal(values[:at])).tolist():
                    yield [*values[:at], size, *values[at + 1 :]]

    def _recomputed(self, values: Values, rank: int, *, more: bool) -> Iterator[list[int]]:
        """Plans in which the rank, or all ranks, recompute more or less."""
        space, shape = self.space, self.space.shape(values)
        mine = space.first.recompute + rank
        every = range(space.first.recompute, space.first.recompute + shape.pp)
        legal = np.flatnonzero(space.levels.legal(shape.num_chunks)).tolist()
        further = [level for level in legal if level != values[mine] and (level > values[mine]) == more]
        nearest = further if more else further[::-1]
        pure = [space.levels.of_mode(mode) for mode in RECOMPUTE_MODES]
        near = [nearest[count - 1] for count in MOVED if count <= len(nearest)]
        for level in dict.fromkeys([*near, *(level for level in pure if level in further)]):
            yield [*values[:mine], level, *values[mine + 1 :]]
            yield [level if at in every else value for at, value in enumerate(values)]

    def _sharded(self, values: Values, *, more: bool) -> Iterator[list[int]]:
        """Plans with a higher or a lower ZeRO stage."""
        at = self.space.first.zero
        for stage in np.flatnonzero(self.space.legal(values[:at])).tolist():
            if stage != values[at] and (stage > values[at]) == more:
                yield [*values[:at], stage, *values[at + 1 :]]

    def _reshaped(self, values: Values) -> Iterator[list[int]]:
        """Plans with micro-batches of half or twice the size, with other virtual stages, or with a factor of two moved
        from one degree of parallelism to another. If the mesh changes, they have Megatron-LM's signatures for it."""
        space, shape = self.space, self.space.shape(values)
        for other in space.shapes:
            same_mesh = (other.pp, other.tp, other.middle) == (shape.pp, shape.tp, shape.middle)
            ratio = other.num_micro_batches / shape.num_micro_batches
            if same_mesh and (ratio in (0.5, 2.0) or (ratio == 1.0 and other.virtual != shape.virtual)):
                row = space.meshes.values(other)
                plan = [*row, *values[len(row) :]]
                if other.virtual != shape.virtual:
                    cuts = space.first.recompute - space.first.cut
                    plan[space.first.cut : space.first.recompute] = [0] * cuts
                    plan[space.first.schedule] = 0
                yield plan
            elif not same_mesh and _is_near(shape, other) and ratio == 1.0 and other.virtual == 1:
                level = max(values[space.first.recompute : space.first.recompute + shape.pp])
                mode = RECOMPUTE_MODES[math.ceil(space.levels.amount(level))]
                prefix = space.even_values(other, recompute=mode, zero=values[space.first.zero])
                yield from ([*prefix, *signatures] for signatures in self._of_mesh(other, prefix))

    def _of_mesh(self, shape: Shape, prefix: Values) -> list[Values]:
        key = (*self.space.meshes.mesh(shape), shape.pp, shape.samples)
        if key not in self._signatures:
            ways = (False, True) if shape.tp > 1 else (False,)
            plans = [megatron_signatures(self.space, shape, prefix, sequence_parallel=way) for way in ways]
            self._signatures[key] = [plan[len(prefix) :] for plan in plans]
        return self._signatures[key]


def _is_near(shape: Shape, other: Shape) -> bool:
    """Whether two shapes differ by one factor of two that moves from one degree of parallelism to another."""
    ratios = [other.pp / shape.pp, other.tp / shape.tp, other.middle / shape.middle, other.dp / shape.dp]
    changed = sorted(ratio for ratio in ratios if ratio != 1.0)
    return changed == [0.5, 2.0]


def relieve(incumbent: Incumbent, primitives: Primitives, start: Values, seen: set[Values]) -> Values:
    """Applies primitives to a plan until none of the plans within `MOST_HOPS` primitives is better.

    Args:
        incumbent: prices the plans, and says when the budget is spent.
        primitives: the changes that relieve the bottleneck of a plan.
        start: the plan to begin with.
        seen: all plans priced so far, which are not priced again; new ones are added.

    Returns:
        The best plan found, after its signatures have been changed one by one as long as that gains.
    """
    space = incumbent.space
    best, ((seconds, overflow),) = start, incumbent.price([start]).tolist()
    worth = worth_of(seconds, overflow)
    while not incumbent.finished:
        waiting: list[Values] = [best]
        better: tuple[Worth, Values] | None = None
        for _ in range(MOST_HOPS):
            fresh = [plan for one in waiting for plan in primitives.of(one) if plan not in seen]
            fresh = list(dict.fromkeys(fresh))[: incumbent.left]
            if not fresh or incumbent.finished:
                break
            seen.update(fresh)
            prices = incumbent.price(fresh).tolist()
            ranked = sorted(zip((worth_of(*price) for price in prices), fresh, strict=True))
            if ranked[0][0] < worth:
                better = ranked[0]
                break
            waiting = [plan for _, plan in ranked[:WIDTH]]
        if better is None:
            break
        worth, best = better
    return _tuned(incumbent, space, best, worth)


def _tuned(incumbent: Incumbent, space: PlanSpace, values: Values, worth: Worth) -> Values:
    """The plan with other signatures of single linkage groups, as long as one of them makes it better."""
    while not incumbent.finished:
        plans = []
        for at in range(space.first.signature, len(space.slots)):
            legal = np.flatnonzero(space.legal(values[:at])).tolist()
            plans += [space.repair([*values[:at], other, *values[at + 1 :]]) for other in legal if other != values[at]]
        plans = list(dict.fromkeys(plans))[: incumbent.left]
        if not plans:
            break
        prices = incumbent.price(plans).tolist()
        found = min(zip((worth_of(*price) for price in prices), plans, strict=True))
        if found[0] >= worth:
            break
        worth, values = found
    return values


def starts(space: PlanSpace) -> list[Values]:
    """A balanced plan for each number of stages, the best template first."""
    values, prices = priced_templates(space)
    best: dict[tuple[int, int], tuple[Worth, Values]] = {}
    for row, price in zip(values.tolist(), prices.tolist(), strict=True):
        shape = space.shape(row)
        one = worth_of(*price), tuple(row)
        key = shape.pp, shape.middle
        best[key] = min(best.get(key, one), one)
    return [plan for _, plan in sorted(best.values())]


def run_aceso(incumbent: Incumbent) -> None:
    """Relieves the bottlenecks of one start after the other."""
    primitives, seen = Primitives(incumbent.space), set[Values]()
    for start in starts(incumbent.space):
        if incumbent.finished:
            return
        relieve(incumbent, primitives, start, seen)


def search_aceso(task: SearchTask) -> SearchResult:
    """The best plan of iterative relief; see `Searcher`."""
    incumbent = Incumbent.begin(task, "aceso")
    for plan in incumbent.price_start(task):
        relieve(incumbent, Primitives(incumbent.space), plan, set())
    run_aceso(incumbent)
    return incumbent.result(seed=task.seed)

"""Elimination: the best signatures of a frame by exact elimination on its cost graph, after OneFlow (arXiv 2110.15032).

OneFlow removes nodes of one or two neighbours and sums parallel edges, exactly, with the argmins remembered; it merges
nodes when stuck and ends with a greedy search. Here:

1. Values that no optimum takes are left out (`automap.cost_graph.message_passing`; exact).
2. `eliminate`: the node whose removal makes the smallest table goes first; the table over its neighbours of the least
   sums remembers its argmins. One neighbour is OneFlow's child elimination, two its node elimination, more its merging;
   a repeated block's edge to itself is a table over values of its own nodes.
3. Where every table left would be too large, nodes with many neighbours are held at their values in the plan at hand;
   each of them is then free in turn, until nothing gains (no longer exact; rare).
4. Memory: a Lagrange multiplier on the fullest ranks, bisected on a logarithmic scale until the plan just fits.

Slopes, solve, exact price, new slopes: see `agents.planners.skeletons`. Units: seconds, bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from agents.incumbent import Incumbent
from agents.planners.skeletons import Candidate, Frame, run_frames
from agents.searcher import Budget, OnProgress, SearchResult, ShouldStop
from automap.cost_graph.graph import CostGraph, Scalars
from automap.cost_graph.message_passing import descend, reduced
from automap.plan import Plan
from automap.problem import Problem
from automap.space.space import PlanSpace, Values

Floats = npt.NDArray[np.float64]
Factors = list[tuple[tuple[int, ...], Floats]]
Picked = tuple[int, ...]

LARGEST_TABLE = 1 << 21
"""Entries of a table before the least is taken over the node that goes."""
HELD_PASSES = 3
PRICES = (0.01, 100.0)
"""Least and greatest price of a device's whole memory, in steps."""
BISECTIONS = 6
FULLEST = 16.0
"""Exponent by which the fullest ranks count more in the price of memory."""


def eliminate(scalars: Scalars, held: dict[int, int]) -> tuple[Picked | None, int]:
    """The least assignment that keeps the held nodes at their values.

    Returns:
        the assignment, or None where a table would be too large; and the node with most neighbours then.
    """
    sizes = [len(costs) for costs in scalars.nodes]
    factors: Factors = []
    for around, table in scalars.factors:
        at = tuple(held.get(n, slice(None)) for n in around)
        factors.append((tuple(n for n in around if n not in held), table[at]))
    left = [n for n in range(len(sizes)) if n not in held]
    factors = [(nodes, table) for nodes, table in factors if nodes]
    steps: list[tuple[int, tuple[int, ...], npt.NDArray[np.int64]]] = []
    while left:
        neighbours = {n: {m for around, _ in factors if n in around for m in around} - {n} for n in left}
        weight = {n: float(np.prod([sizes[m] for m in (n, *neighbours[n])])) for n in left}
        node = min(left, key=lambda n: (weight[n], n))
        if weight[node] > LARGEST_TABLE:
            return None, max(left, key=lambda n: (len(neighbours[n]), sizes[n], -n))
        around = tuple(sorted(neighbours[node]))
        order = (*around, node)
        total = scalars.nodes[node].reshape((1,) * len(around) + (-1,))
        for nodes, table in factors:
            if node in nodes:
                ranked = sorted(range(len(nodes)), key=lambda i: order.index(nodes[i]))
                total = total + table.transpose(ranked).reshape([sizes[m] if m in nodes else 1 for m in order])
        factors = [f for f in factors if node not in f[0]]
        steps.append((node, around, total.argmin(axis=-1)))
        if around:
            factors = _add(factors, around, total.min(axis=-1))
        left.remove(node)
    picked = dict(held)
    for node, around, best in reversed(steps):
        picked[node] = int(best[tuple(picked[m] for m in around)])
    return tuple(picked[n] for n in range(len(sizes))), -1


def _add(factors: Factors, around: tuple[int, ...], table: Floats) -> Factors:
    """Parallel edges are one."""
    for i, (nodes, other) in enumerate(factors):
        if nodes == around:
            return [*factors[:i], (around, other + table), *factors[i + 1 :]]
    return [*factors, (around, table)]


def least(scalars: Scalars, start: Sequence[int]) -> tuple[Picked, bool]:
    """The least assignment, and whether it is proven so.

    Args:
        scalars: the graph.
        start: an assignment from which the nodes take their values that have to be held.
    """
    fixed = {n: 0 for n, costs in enumerate(scalars.nodes) if len(costs) == 1}
    held: list[int] = []
    while True:
        # Nothing that has a choice is held until the tables ask for it.
        found, widest = eliminate(scalars, {**fixed, **{n: start[n] for n in held}})
        if found is not None:
            break
        held.append(widest)
    for _ in range(HELD_PASSES if held else 0):
        before = scalars.value(found)
        for n in held:
            # All held but one, which is free with all others.
            again, _ = eliminate(scalars, {**fixed, **{m: found[m] for m in held if m != n}})
            if again is not None and scalars.value(again) < scalars.value(found):
                found = again
        found = descend(scalars, found)
        if scalars.value(found) >= before:
            break
    return found, not held


def solve(graph: CostGraph, weights: Floats, start: Sequence[int]) -> tuple[Picked, bool]:
    """The least assignment of a frame at some weights, [rows, C_COUNT], and whether it is proven so."""
    small = reduced(graph, weights, start)
    found, is_proven = least(small.scalars, small.best)
    return small.picked(found), is_proven and small.is_exact


def propose(frame: Frame) -> list[Candidate]:
    """Prices the plans that elimination finds at the frame's slopes, without and with a price on memory."""
    graph, at = frame.graph, frame.slopes
    found = [frame.price(solve(graph, frame.time, frame.picked)[0])]
    if found[0].overflow <= 0.0 or frame.incumbent.finished:
        return found
    fullness = (at.used / at.capacity) / (at.used / at.capacity).max()
    worth = fullness**FULLEST / (fullness**FULLEST).sum() / at.capacity
    memory = np.tensordot(worth, at.memory, axes=1)

    def with_memory_at(seconds: float) -> None:
        """`seconds` for a device's whole memory."""
        found.append(frame.price(solve(graph, frame.time + seconds * memory, found[-1].picked)[0]))

    low, high = (share * found[0].seconds for share in PRICES)
    with_memory_at(high)
    for _ in range(BISECTIONS if found[-1].overflow <= 0.0 else 0):
        if frame.incumbent.finished:
            break
        middle = math.sqrt(low * high)
        with_memory_at(middle)
        low, high = (low, middle) if found[-1].overflow <= 0.0 else (middle, high)
    return found


def run_elimination(space: PlanSpace, incumbent: Incumbent, *, start: Sequence[Values]) -> None:
    """Plans frame after frame until the incumbent's budget ends or nothing is left to try; see `run_frames`."""
    run_frames(space, incumbent, propose, start=start)


def search_elimination(
    problem: Problem,
    budget: Budget,
    *,
    seed: int,
    on_progress: OnProgress,
    should_stop: ShouldStop,
    start: Sequence[Plan] = (),
) -> SearchResult:
    """The best plan of elimination over frames, those of the best templates first; see `Searcher`."""
    from agents.planners.skeletons import search_frames

    return search_frames(
        problem,
        budget,
        propose,
        "elimination",
        seed=seed,
        on_progress=on_progress,
        should_stop=should_stop,
        start=start,
    )

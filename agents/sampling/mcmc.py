"""MCMC: Metropolis over moves of plans (FlexFlow, arXiv 1807.05358, section 6.2), many chains in lock step.

All chains propose at once and are priced in one call. They cool down in cycles, each twice as long as the last and
of twice as many chains: the first is one chain of some dozens of plans, and the schedule knows no budget, so the search
is anytime. A cycle begins from the best plans known, from templates and from plans drawn at random. With temperature 0
the same chains climb.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agents.incumbent import Incumbent
from agents.searcher import Budget, OnProgress, SearchResult, ShouldStop
from automap.plan import Plan
from automap.problem import Problem
from automap.space.space import Ints, PlanSpace

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cooling:
    """How a search anneals. Temperatures are in logarithms of the step time: 0.01 is one percent."""

    first_chains: int = 1
    most_chains: int = 32
    """A compiled call for so many plans costs little more than its work."""
    hot: float = 0.05
    cold: float = 0.001
    first_cycle: int = 32
    """Moves of each chain."""
    growth: float = 2.0
    longest_cycle: int = 1024


ANNEALING = Cooling()
CLIMBING = Cooling(hot=0.0, cold=0.0)

MISFIT = 0.5
"""Logarithm of the step time that a plan which does not fit loses, whatever its overflow."""
PER_OVERFLOW = 4.0
"""Another one for each share of the memory that is missing."""
RESUMED, FROM_TEMPLATES = 0.25, 0.25
"""Shares of the chains that begin a cycle from the best plans known and from templates; the others begin at random.
With larger shares searches of VGG-19 never left the surroundings of the templates."""
OF_A_MESH = 2
"""Templates of each mesh that lend their shape and signatures."""
KEPT = 32
"""Best plans known."""
DRAWN = 32
"""Plans drawn at random that lend their shapes during a cycle."""


def energies(prices: Floats) -> Floats:
    """[n] what the chains lower: the logarithm of the step time, raised for plans that do not fit."""
    overflow = np.maximum(prices[:, 1], 0.0)
    risen: Floats = np.log(prices[:, 0]) + np.where(overflow > 0.0, MISFIT + PER_OVERFLOW * overflow, 0.0)
    return risen


def run_mcmc(
    space: PlanSpace, incumbent: Incumbent, *, seed: int, known: Ints, prices: Floats, cooling: Cooling = ANNEALING
) -> Ints:
    """Searches until the incumbent's budget ends.

    Args:
        space: of the problem.
        incumbent: takes every plan.
        seed: of moves, acceptance and restarts.
        known: [m, slots] plans to begin from, such as templates.
        prices: [m, 2] their prices.
        cooling: the schedule.

    Returns:
        [n, slots] the best plans found or known, the best first.
    """
    rng = np.random.default_rng(seed)
    order = np.argsort(energies(prices), kind="stable")
    known = known[order]
    best, best_energy = known[:KEPT], energies(prices)[order][:KEPT]
    length, count = float(cooling.first_cycle), cooling.first_chains
    while not incumbent.finished:
        # Shapes that no template has are lent by plans drawn at random.
        donors = np.concatenate([known, space.random_batch(rng, DRAWN)])
        chains = _begin(space, rng, best, known, count)[: incumbent.left]
        now = energies(incumbent.price(chains))
        found, found_energy = chains.copy(), now.copy()
        for move in range(int(length)):
            if incumbent.finished:
                break
            temperature = cooling.hot and cooling.hot * (cooling.cold / cooling.hot) ** (move / length)
            chains, now = chains[: incumbent.left], now[: incumbent.left]
            proposed = space.neighbours(rng, chains, donors)
            energy = energies(incumbent.price(proposed))
            chances = np.exp(np.minimum(0.0, (now - energy) / max(temperature, 1e-12)))
            taken = rng.random(len(chains)) < chances
            chains[taken], now[taken] = proposed[taken], energy[taken]
            better = np.flatnonzero(now < found_energy[: len(now)])
            found[better], found_energy[better] = chains[better], now[better]
        best, best_energy = _merge(best, best_energy, found, found_energy)
        length = min(length * cooling.growth, cooling.longest_cycle)
        count = min(2 * count, cooling.most_chains)
    return best


def best_of_meshes(space: PlanSpace, values: Ints, prices: Floats) -> Ints:
    """[n, slots] of [m, slots] priced plans the best `OF_A_MESH` on each mesh and number of stages, the best first."""
    taken: dict[tuple[int, ...], int] = {}
    chosen = []
    for row in np.argsort(energies(prices), kind="stable").tolist():
        shape = space.shape(values[row].tolist())
        key = (shape.pp, *space.meshes.mesh(shape))
        taken[key] = taken.get(key, 0) + 1
        if taken[key] <= OF_A_MESH:
            chosen.append(row)
    best: Ints = np.ascontiguousarray(values[chosen])
    return best


def _begin(space: PlanSpace, rng: np.random.Generator, best: Ints, known: Ints, count: int) -> Ints:
    """[count, slots] where the chains of a cycle begin; the first at the best plan there is."""
    lots = [(best, max(1, int(RESUMED * count))), (known, int(FROM_TEMPLATES * count))]
    begun = [_favour(rng, plans, size) for plans, size in lots if len(plans)]
    drawn = space.random_batch(rng, count - sum(map(len, begun)))
    return np.concatenate([*begun, drawn])


def _favour(rng: np.random.Generator, ranked: Ints, count: int) -> Ints:
    """`count` of the plans, the first one certainly and good ones more often."""
    ranks = (len(ranked) * rng.random(count) ** 2).astype(np.int64)
    ranks[:1] = 0
    return ranked[ranks]


def _merge(one: Ints, one_energy: Floats, two: Ints, two_energy: Floats) -> tuple[Ints, Floats]:
    """The `KEPT` best distinct plans of both, best first."""
    plans, energy = np.concatenate([one, two]), np.concatenate([one_energy, two_energy])
    _, first = np.unique(plans, axis=0, return_index=True)
    order = first[np.argsort(energy[first], kind="stable")][:KEPT]
    return plans[order], energy[order]


def search_mcmc(
    problem: Problem,
    budget: Budget,
    *,
    seed: int,
    on_progress: OnProgress,
    should_stop: ShouldStop,
    start: Sequence[Plan] = (),
) -> SearchResult:
    """The best plan of annealing chains that begin from `start` and from plans drawn at random; see `Searcher`."""
    return _search(problem, budget, "mcmc", ANNEALING, seed, on_progress, should_stop, start)


def search_hill_climbing(
    problem: Problem,
    budget: Budget,
    *,
    seed: int,
    on_progress: OnProgress,
    should_stop: ShouldStop,
    start: Sequence[Plan] = (),
) -> SearchResult:
    """The same chains at temperature 0: a yardstick. See `Searcher`."""
    return _search(problem, budget, "hill-climbing", CLIMBING, seed, on_progress, should_stop, start)


def _search(
    problem: Problem,
    budget: Budget,
    name: str,
    cooling: Cooling,
    seed: int,
    on_progress: OnProgress,
    should_stop: ShouldStop,
    start: Sequence[Plan],
) -> SearchResult:
    space = PlanSpace(problem)
    incumbent = Incumbent(space, budget, searcher=name, on_progress=on_progress, should_stop=should_stop)
    given = [values for values in map(space.encode, start) if values is not None][: incumbent.left]
    known = np.array(given, dtype=np.int64).reshape(len(given), len(space.slots))
    run_mcmc(space, incumbent, seed=seed, known=known, prices=incumbent.price(known), cooling=cooling)
    return incumbent.result(seed=seed)

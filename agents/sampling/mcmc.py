"""MCMC: Metropolis search over neighbours of plans (FlexFlow, arXiv 1807.05358, section 6.2), with many chains at once.

All chains propose one neighbour each, and all proposals are priced in one call. The chains cool down in cycles; each
cycle is twice as long as the last and has twice as many chains, up to a limit. The first cycle is one chain of some
dozens of plans, and the schedule does not depend on the budget, so that the search can be stopped at any time. A cycle
begins with the best plans known, with templates and with random plans. With temperature 0 the same chains climb.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agents.incumbent import Incumbent
from agents.searcher import SearchResult, SearchTask
from automap.space.space import Ints, PlanSpace, Values

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cooling:
    """Schedule of the annealing. Temperatures are differences of logarithms of the step time: 0.01 is one percent."""

    first_chains: int = 1
    """Number of chains in the first cycle."""
    most_chains: int = 32
    """Largest number of chains. With this many plans, a compiled call takes little more than the pricing itself."""
    hot: float = 0.05
    """Temperature at the beginning of a cycle."""
    cold: float = 0.001
    """Temperature at the end of a cycle."""
    first_cycle: int = 32
    """Number of moves of each chain in the first cycle."""
    growth: float = 2.0
    """Ratio of the lengths of two successive cycles."""
    longest_cycle: int = 1024
    """Largest number of moves of each chain in a cycle."""


ANNEALING = Cooling()
CLIMBING = Cooling(hot=0.0, cold=0.0)

MISFIT = 0.5
"""Penalty of a plan that does not fit, added to the logarithm of its step time, whatever its overflow (assumed)."""
PER_OVERFLOW = 4.0
"""Further penalty, times the share of a device's memory that is missing."""
FROM_BEST, FROM_TEMPLATES = 0.25, 0.25
"""Shares of the chains that begin a cycle with the best plans known and with templates; the others begin with random
plans. With larger shares searches of VGG-19 never left the neighbourhood of the templates."""
TEMPLATES_OF_A_MESH = 2
"""Number of templates of each mesh that lend their shape and signatures to other plans."""
BEST_KEPT = 32
"""Number of best plans that are kept."""
RANDOM_DONORS = 32
"""Number of random plans that lend their shapes to other plans during a cycle."""


def energies(prices: Floats) -> Floats:
    """[n] energy that the chains lower: the logarithm of the step time, with a penalty where a plan does not fit.

    Args:
        prices: [n, 2] seconds of a step and overflow of memory, see `PlanSpace.price`.
    """
    overflow = np.maximum(prices[:, 1], 0.0)
    energy: Floats = np.log(prices[:, 0]) + np.where(overflow > 0.0, MISFIT + PER_OVERFLOW * overflow, 0.0)
    return energy


def run_mcmc(incumbent: Incumbent, *, seed: int, start: Sequence[Values] | Ints, cooling: Cooling = ANNEALING) -> Ints:
    """Searches until the budget of the incumbent ends.

    Args:
        incumbent: prices every plan that the chains visit.
        seed: seed of moves, acceptance and random plans.
        start: plans to begin with, such as templates; they are priced without being counted.
        cooling: schedule of the annealing.

    Returns:
        [n, slots] the best plans found or given, the best first.
    """
    space = incumbent.space
    known = np.array(start, dtype=np.int64).reshape(len(start), len(space.slots))
    prices = space.price(known)
    rng = np.random.default_rng(seed)
    order = np.argsort(energies(prices), kind="stable")
    known = known[order]
    best, best_energy = known[:BEST_KEPT], energies(prices)[order][:BEST_KEPT]
    length, count = float(cooling.first_cycle), cooling.first_chains
    while not incumbent.finished:
        # Random plans lend shapes that no template has.
        donors = np.concatenate([known, space.random_batch(rng, RANDOM_DONORS)])
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
            # Metropolis rule: a better plan is accepted, a worse one with probability exp(-difference / temperature).
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
    """The best plans of each mesh and number of stages, `TEMPLATES_OF_A_MESH` of each, the best first.

    Args:
        space: space of the plans.
        values: [m, slots] plans.
        prices: [m, 2] their prices, see `PlanSpace.price`.

    Returns:
        [n, slots]
    """
    taken: dict[tuple[int, ...], int] = {}
    chosen = []
    for row in np.argsort(energies(prices), kind="stable").tolist():
        shape = space.shape(values[row].tolist())
        key = (shape.pp, *space.meshes.mesh(shape))
        taken[key] = taken.get(key, 0) + 1
        if taken[key] <= TEMPLATES_OF_A_MESH:
            chosen.append(row)
    best: Ints = np.ascontiguousarray(values[chosen])
    return best


def _begin(space: PlanSpace, rng: np.random.Generator, best: Ints, known: Ints, count: int) -> Ints:
    """[count, slots] plans with which the chains of a cycle begin; the first one is the best plan, if there is one."""
    sources = [(best, max(1, int(FROM_BEST * count))), (known, int(FROM_TEMPLATES * count))]
    begun = [_choose(rng, plans, size) for plans, size in sources if len(plans)]
    drawn = space.random_batch(rng, count - sum(map(len, begun)))
    return np.concatenate([*begun, drawn])


def _choose(rng: np.random.Generator, ranked: Ints, count: int) -> Ints:
    """`count` of the plans, which are sorted: certainly the first one, and good ones more often."""
    ranks = (len(ranked) * rng.random(count) ** 2).astype(np.int64)
    ranks[:1] = 0
    return ranked[ranks]


def _merge(one: Ints, one_energy: Floats, two: Ints, two_energy: Floats) -> tuple[Ints, Floats]:
    """The `BEST_KEPT` best distinct plans of both sets with their energies, the best first."""
    plans, energy = np.concatenate([one, two]), np.concatenate([one_energy, two_energy])
    _, first = np.unique(plans, axis=0, return_index=True)
    order = first[np.argsort(energy[first], kind="stable")][:BEST_KEPT]
    return plans[order], energy[order]


def search_mcmc(task: SearchTask) -> SearchResult:
    """The best plan of annealing chains that begin with the plans given and with random plans; see `Searcher`."""
    return _search(task, "mcmc", ANNEALING)


def search_hill_climbing(task: SearchTask) -> SearchResult:
    """The best plan of the same chains at temperature 0, a yardstick for annealing; see `Searcher`."""
    return _search(task, "hill-climbing", CLIMBING)


def _search(task: SearchTask, name: str, cooling: Cooling) -> SearchResult:
    incumbent = Incumbent.begin(task, name)
    given = incumbent.price_start(task)
    run_mcmc(incumbent, seed=task.seed, start=given, cooling=cooling)
    return incumbent.result(seed=task.seed)

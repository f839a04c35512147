"""The search for a plan of distributed GNN training: packing, loads, exact enumeration or Metropolis, or the DQN.

Every placement is simulated under strict priority on the same volumes. The plan's estimate, and the simple rules that
it is compared with, are simulated on volumes that the search has not seen.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from agents.gnn.baselines import BASELINES, place_by_flows, place_gathered
from agents.gnn.effort import CLOSING_SHARE, Closing, Effort, effort_for
from agents.gnn.enumeration import MOST, count, enumerate_placements, simulation_s
from agents.gnn.metropolis import ShareLeft, search_by_loads, search_metropolis
from agents.gnn.orders import CHUNK, choose_schedule, judges_of, search_order
from agents.gnn.packing import movable, nothing_fits
from agents.searcher import Budget
from automap.arrays import Floats, Ints
from automap.errors import NothingFits, ProblemError, one_of
from automap.gnn.plan import GnnEstimate, GnnPlan, GnnSearch, ProblemRef, Schedule, digest
from automap.gnn.problem import BOUNDS, GnnProblem
from automap.gnn.simulator import Simulator

OnPlacement = Callable[[float, int, float], None]
"""(share of the budget that is spent, simulations so far, best seconds of an iteration so far) -> nothing."""
SEARCHERS = ("auto", "metropolis", "enumeration", "dqn")
ITERATIONS = 20
"""Iterations of a simulation (assumed)."""
STEP = 32
"""Most simulations between two looks at the budget, at first (assumed)."""
MOST_TRANSFERS = 20_000
"""Transfers of one simulation in the search, so that it takes some 40 ms at most; large problems get fewer
iterations."""
GATHERED = 8
"""Most machines of which each is a place to gather tasks on, where the search begins (assumed)."""
NEAR = 1.5
"""A simple rule's placement is judged too if its time, on the volumes of the search, is at most this many times that of
the placement found (assumed): slower ones do not become the faster ones on other volumes."""
ORDER_SHARE = 0.3
"""Share of the budget for the order of the flows, once the placement is found (assumed)."""
PATIENCE_S = 30.0
"""Seconds that `auto` lets an enumeration take where the budget is a number of placements (assumed)."""
TINY_S = 1e-3
"""Seconds that a search has at least, where what follows it takes all of its time."""
PROPOSALS = 20_000, 400_000
"""Least and most changes of a placement to begin with; 200 for each task (assumed)."""
LEAST_ITERATIONS = 4
"""Fewest iterations of a simulation: the first two differ from the others, since parameters are there already."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best placement of a search, and the order of the flows for it."""

    place: Ints
    searcher: str
    schedule: Schedule
    ranks: Ints
    """[flows] order of the flows, the most urgent 0."""
    evaluations: int
    is_optimal: bool = False
    """Whether every feasible placement was simulated."""


def search_iterations(problem: GnnProblem) -> int:
    """Iterations of a simulation in the search."""
    return int(np.clip(MOST_TRANSFERS // max(1, len(problem.flows)), LEAST_ITERATIONS, ITERATIONS))


def check_searcher(name: str) -> None:
    """Checks the name of a searcher.

    Raises:
        ProblemError: there is no searcher of this name.
    """
    if name not in SEARCHERS:
        raise ProblemError("unknown", field="searcher", value=name, repair=one_of(SEARCHERS, name))


def search(
    problem: GnnProblem,
    budget: Budget,
    *,
    seed: int = 0,
    searcher: str = "auto",
    on_progress: OnPlacement = lambda fraction, evaluations, best_s: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> GnnPlan:
    """Searches for the placement with the least time of an iteration.

    Args:
        problem: the problem.
        budget: seconds, or a number of simulated placements; with the latter two runs give the same plan.
        seed: seed of the volumes and of the search.
        searcher: one of `SEARCHERS`; `auto` enumerates small problems and walks through large ones.
        on_progress: called often.
        should_stop: asked often; once it returns true, the best placement so far is returned.

    Raises:
        ProblemError: there is no such searcher, or the problem is too large for it.
        NothingFits: no placement with room for all tasks was found.
    """
    check_searcher(searcher)
    begin = time.perf_counter()

    simulator, rng = Simulator(problem, iterations=search_iterations(problem), seed=seed), np.random.default_rng(seed)
    first = place_by_flows(simulator, rng, (1.0 - CLOSING_SHARE) * budget.seconds if budget.seconds else None)
    proposals = int(np.clip(200 * len(simulator.pinned), *PROPOSALS))
    effort = effort_for(simulator, first, budget, proposals, STEP)
    # What follows the search has its time too.
    limit_s = max((budget.seconds or 0.0) - effort.closing_s, TINY_S)

    def spent_s() -> float:
        return time.perf_counter() - begin

    def share_left(evaluations: int, best_s: float, most: float | None = budget.evaluations) -> float:
        spent = spent_s() / limit_s if budget.seconds else 0.0
        spent = max(spent, evaluations / most if most else 0.0)
        on_progress(min(1.0, spent), evaluations, best_s / simulator.iterations)
        return 0.0 if should_stop() else max(0.0, 1.0 - spent)

    is_all = _is_enumerated(simulator, searcher, limit_s * (1.0 - ORDER_SHARE) if budget.seconds else PATIENCE_S)
    # An enumeration is not cut off by a budget in simulations: it would no longer say which placement is the best.
    most = count(simulator) / (1.0 - ORDER_SHARE) if is_all else budget.evaluations

    def left_to_place(done: int, best_s: float) -> float:
        return max(0.0, 1.0 - (1.0 - share_left(done, best_s, most)) / (1.0 - ORDER_SHARE))

    if is_all:
        found = _enumerated(simulator, left_to_place)
    else:
        starts = _starts(simulator, first, rng, effort, lambda: spent_s() < effort.most_starts_s)
        found = _searched(simulator, searcher, starts, rng, effort.step, left_to_place)
    done = found.evaluations
    if not budget.seconds or spent_s() < limit_s:
        ranks, more = search_order(
            simulator,
            found.place,
            rng,
            share_left=lambda further, best_s: share_left(done + further, best_s),
            chunk=min(CHUNK, effort.step),
        )
        found = replace(found, ranks=ranks, evaluations=done + more)
    found = _judged(simulator, found, seed, effort.closing)
    seconds = time.perf_counter() - begin
    return make_plan(simulator, found, effort.closing, seconds=seconds, seed=seed)


def _is_enumerated(simulator: Simulator, searcher: str, limit_s: float) -> bool:
    """Whether all placements are simulated: where that is asked for, and where it is likely to end within `limit_s`.

    Raises:
        ProblemError: it is asked for, and there are too many.
    """
    number = count(simulator)
    if searcher == "enumeration" and number > MOST:
        repair = f"Use metropolis; at most {MOST:,} placements are enumerated."
        value = f"{len(simulator.room)}^{len(movable(simulator))}"
        raise ProblemError("too many placements", field="searcher", value=value, repair=repair)
    is_short = number <= MOST and number * simulation_s(simulator) <= limit_s
    return searcher == "enumeration" or (searcher == "auto" and is_short)


def _enumerated(simulator: Simulator, share_left: ShareLeft) -> Found:
    """The best of all placements, with flows by critical path."""
    place, best_s, simulated, is_all = enumerate_placements(simulator, share_left=share_left)
    if not np.isfinite(best_s):
        raise nothing_fits(simulator, is_certain=True)
    return Found(place, "enumeration", "priority", simulator.ranks(place), simulated, is_all)


def _starts(
    simulator: Simulator, first: Ints, rng: np.random.Generator, effort: Effort, is_time: Callable[[], bool]
) -> dict[str, Ints]:
    """Placements from which the search begins, by name: those that there is time for, but `first` in any case.

    Args:
        simulator: the problem.
        first: [tasks] the placement packed by flows.
        rng: where randomness comes from.
        effort: how much there is time for.
        is_time: whether there is time for another one.
    """
    starts = {"packing by flows": first}
    for name, rule in BASELINES.items():
        if name != "random" and is_time():
            starts[name] = rule(simulator, rng)
    for name, place in tuple(starts.items()):
        if is_time():
            starts[f"loads from {name}"] = search_by_loads(simulator, place, effort.proposals, rng)
    if len(simulator.room) <= GATHERED:
        # Behind an interface that is slow in one direction, tasks leave together or not at all.
        for machine in range(len(simulator.room)):
            with contextlib.suppress(NothingFits):
                name = f"gathering on {simulator.problem.machines[machine].name}"
                starts[name] = place_gathered(simulator, machine, rng)
    return starts


def _searched(
    simulator: Simulator,
    searcher: str,
    starts: Mapping[str, Ints],
    rng: np.random.Generator,
    step: int,
    share_left: ShareLeft,
) -> Found:
    """The best placement that a search from the best of `starts` finds, with flows by critical path.

    Args:
        simulator: the problem.
        searcher: dqn, or else Metropolis searches.
        starts: [tasks] placements by name.
        rng: where randomness comes from.
        step: most simulations between two looks at the budget, at first.
        share_left: what is left of the budget.
    """
    seconds = simulator.makespans(list(starts.values()))
    name, place = list(starts.items())[int(seconds.argmin())]
    if share_left(len(starts), float(seconds.min())) <= 0.0:
        return Found(place, name, "priority", simulator.ranks(place), len(starts))

    def left(further: int, best_s: float) -> float:
        return share_left(len(starts) + further, best_s)

    if searcher == "dqn":
        from agents.gnn.dqn import search_dqn

        found, found_s, evaluations = search_dqn(simulator, place, rng, share_left=left)
    else:
        found, found_s, evaluations = search_metropolis(simulator, place, rng, share_left=left, step=step)
    if found_s < seconds.min():
        name, place = searcher if searcher == "dqn" else "metropolis", found
    return Found(place, name, "priority", simulator.ranks(place), evaluations + len(starts))


def _judged(simulator: Simulator, found: Found, seed: int, closing: Closing) -> Found:
    """The best of what was found and of what simple rules give, with its schedule, on volumes that the search has not
    seen: where volumes vary much, a placement may suit those of the search alone.

    Args:
        simulator: the problem as the search saw it.
        found: the placement and the order that were searched.
        seed: seed of the search.
        closing: how much there is time for.
    """
    if not closing.judges:
        return found
    judges, rng = judges_of(simulator, seed, closing.judges), np.random.default_rng(seed)
    own = choose_schedule(simulator, judges, found.place, found.ranks, closing.schedules)
    best = replace(found, schedule=own.schedule, ranks=own.ranks)
    least_s, limit_s = own.seconds, NEAR * simulator.run(found.place, ranks=found.ranks).makespan_s
    for name in closing.rules:
        place = found.place if name == "random" else BASELINES[name](simulator, rng)
        if place is found.place or simulator.run(place).makespan_s > limit_s:
            continue
        other = choose_schedule(simulator, judges, place, simulator.ranks(place), closing.schedules)
        if other.seconds < least_s:
            least_s = other.seconds
            best = Found(place, name, other.schedule, other.ranks, found.evaluations)
    return best


def make_plan(simulator: Simulator, found: Found, closing: Closing, *, seconds: float, seed: int) -> GnnPlan:
    """The plan of a placement, with its estimate on fresh volumes and the reasons for it.

    Args:
        simulator: the problem as the search saw it.
        found: the placement.
        closing: how much there is time for.
        seconds: what the search took.
        seed: seed of the search.
    """
    problem, place = simulator.problem, found.place
    fresh = [Simulator(problem, iterations=simulator.iterations, seed=seed + 1 + n) for n in range(closing.draws)]
    iterations = simulator.iterations
    seen: Floats = np.array([one.run(place, found.schedule, found.ranks).iteration_s for one in fresh])
    bounds = np.array([one.bounds(place) for one in fresh]).mean(axis=0) / iterations
    rng = np.random.default_rng(seed)
    against = {}
    for name in closing.rules:
        other = BASELINES[name](simulator, rng)
        by_policy = {p: float(np.mean([one.run(other, p).iteration_s for one in fresh])) for p in closing.policies}
        policy = min(by_policy, key=lambda p: by_policy[p])
        against[f"{name}, {policy}"] = by_policy[policy]
    order = np.argsort(found.ranks)
    estimate = GnnEstimate(
        iteration_s=float(seen.mean()),
        low_s=float(np.percentile(seen, 5)),
        high_s=float(np.percentile(seen, 95)),
        lower_bound_s=float(bounds.max()),
        bound_by=BOUNDS[int(bounds.argmax())],
        iterations=iterations,
        draws=closing.draws,
    )
    return GnnPlan(
        problem=ProblemRef(name=problem.name, sha256=digest(problem)),
        placement={t.name: problem.machines[m].name for t, m in zip(problem.tasks, place.tolist(), strict=True)},
        schedule=found.schedule,
        priorities=tuple((problem.flows[f].source, problem.flows[f].target) for f in order.tolist()),
        estimate=estimate,
        against=against,
        search=GnnSearch(
            searcher=found.searcher,
            evaluations=found.evaluations,
            seconds=seconds,
            seed=seed,
            is_optimal=found.is_optimal,
        ),
        why=_why(simulator, place, estimate, against),
    )


def _why(simulator: Simulator, place: Ints, estimate: GnnEstimate, against: dict[str, float]) -> tuple[str, ...]:
    """The reasons for a placement, in sentences."""
    problem, arrays = simulator.problem, simulator.arrays
    far = place[arrays.source] != place[arrays.target]
    total = arrays.mean_bytes.sum() or 1.0
    load = np.zeros((2, len(problem.machines)))
    np.add.at(load[0], place[arrays.source[far]], (arrays.mean_bytes / arrays.rate_out[place[arrays.source]])[far])
    np.add.at(load[1], place[arrays.target[far]], (arrays.mean_bytes / arrays.rate_in[place[arrays.target]])[far])
    side, machine = np.unravel_index(int(load.argmax()), load.shape)
    beside = [place[s] == place[arrays.fed[at]] for s in range(len(place)) for at in _workers_of(simulator, s)]
    name, best_s = min(against.items(), key=lambda item: item[1])
    found = []
    if beside:
        found.append(
            f"{arrays.mean_bytes[~far].sum() / total:.0%} of the bytes stay on their machine; "
            f"{sum(beside)} of {len(beside)} samplers stand beside their worker"
        )
    if load.max() > 0.0:
        found.append(
            f"the busiest interface is that of {problem.machines[int(machine)].name}: "
            f"{('sending', 'receiving')[int(side)]} takes {load.max():.4g} s of an iteration"
        )
    if estimate.lower_bound_s > 0.0:
        gap = max(0.0, estimate.iteration_s / estimate.lower_bound_s - 1.0)
        found.append(
            f"no order of flows gets this placement below {estimate.lower_bound_s:.4g} s ({estimate.bound_by}); "
            f"it is {gap:.1%} above that"
        )
        ratio = best_s / estimate.iteration_s
        found.append(f"{ratio:.2f}x the best of simple rules ({name}: {best_s:.4g} s)")
    workers = [t for t, task in enumerate(problem.tasks) if task.role == "worker"]
    if workers:
        slowest = max(workers, key=lambda t: arrays.mean_time_s[t])
        found.append(
            f"training on a mini-batch takes {arrays.mean_time_s[slowest]:.4g} s on the slowest worker "
            f"({problem.tasks[slowest].name})"
        )
    return tuple(found)


def _workers_of(simulator: Simulator, sampler: int) -> range:
    begin = simulator.arrays.fed_begin
    return range(int(begin[sampler]), int(begin[sampler + 1]))

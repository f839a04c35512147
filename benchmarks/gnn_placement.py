"""Placements and schedules of distributed GNN training: ours against simple rules, the bound and the optimum.

    python benchmarks/gnn_placement.py [--seconds 3] [--cells 54] [--small 200] [--dqn 20] [--large 64]

The grid is that of arXiv 2204.11224's setting as far as it is known: 4 to 16 machines, 10 to 50 Gbit/s, 1 to 4
samplers a worker, volumes like those of Reddit and ogbn-products. Rules are {random, co-location, greedy packing} with
{FIFO, fair shares, SRPT} each; ours is the search with strict priority. All are simulated on volumes that the search
has not seen. A gain is the time of the best rule over ours, less 1. Small problems are enumerated. The last part
measures the simulator and the search on 64 machines with 256 workers.
"""

from __future__ import annotations

import argparse
import itertools
import time

import numpy as np

from agents.gnn.baselines import BASELINES, place_by_flows, place_randomly
from agents.gnn.enumeration import enumerate_placements
from agents.gnn.metropolis import search_by_loads, search_metropolis
from agents.gnn.search import search, search_iterations
from agents.searcher import Budget
from automap.arrays import Ints
from automap.gnn.made_up import Shape, make_problem
from automap.gnn.simulator import POLICIES, Simulator

SCHEDULES = ("fifo", "fair", "srpt")
FRESH = 4
"""Draws of fresh volumes that every figure is the mean of."""
SMALL = ((3, 2, 1), (4, 2, 1), (3, 3, 1), (3, 2, 2))
"""Machines, workers and samplers a worker of the small problems."""
SMALL_SIMULATIONS = 2000
"""Simulations of the search on a small problem."""


def grid(seconds: float, most: int) -> None:
    cells = list(itertools.product(("reddit", "products"), (4, 8, 16), (10.0, 25.0, 50.0), (1, 2, 4)))
    gains, gaps, schedules = {}, [], []
    for data_set, machines, nic, samplers in cells[:: max(1, len(cells) // most)][:most]:
        shape = Shape(machines=machines, nic_Gbps=nic, samplers=samplers, data_set=data_set)
        problem = make_problem(shape, seed=machines)
        iterations = search_iterations(problem)
        fresh = [Simulator(problem, iterations=iterations, seed=100 + n) for n in range(FRESH)]
        rng = np.random.default_rng(0)
        rules = {name: rule(fresh[0], rng) for name, rule in BASELINES.items()}
        timed = {
            f"{name}, {schedule}": float(np.mean([one.run(place, schedule).iteration_s for one in fresh]))
            for name, place in rules.items()
            for schedule in SCHEDULES
        }
        plan = search(problem, Budget(seconds=seconds), searcher="metropolis")
        place, ranks = plan.places(fresh[0]), plan.ranks(problem)
        ours = float(np.mean([one.run(place, plan.schedule, ranks).iteration_s for one in fresh]))
        bound = float(np.mean([one.bounds(place).max() / iterations for one in fresh]))
        best = min(timed, key=lambda name: timed[name])
        others = min(
            float(np.mean([one.run(place, s).iteration_s for one in fresh])) for s in POLICIES[1:] if s != plan.schedule
        )
        cell = f"{data_set:8} {machines:2} machines {nic:2.0f} Gbit/s {samplers} samplers"
        gains[cell] = timed[best] / ours - 1.0
        gaps.append(ours / bound - 1.0)
        schedules.append(others / ours - 1.0)
        print(
            f"{cell}  ours {ours:.4f} s  best rule {timed[best]:.4f} s ({best})  gain {gains[cell]:+.0%}  "
            f"above the bound {gaps[-1]:.1%}  {plan.schedule} against the best other schedule {schedules[-1]:+.1%}",
            flush=True,
        )
    largest = sorted(gains, key=lambda cell: -gains[cell])[:3]
    found = np.array(list(gains.values()))
    print(f"gain over the best rule: {found.mean():.0%} in the mean, {found.min():+.0%} at least; largest:")
    for cell in largest:
        print(f"  {cell}  {gains[cell]:+.0%}")
    print(f"above the bound: {np.mean(gaps):.1%} in the mean, {np.max(gaps):.1%} at most")
    print(
        f"the schedule of the plan against the best other one on our placement: {np.mean(schedules):+.1%} in the mean"
    )


def small(count: int, dqn: int) -> None:
    hits, worst, learnt = 0, 0.0, 0
    for seed in range(count):
        machines, workers, samplers = SMALL[seed % len(SMALL)]
        data_set = ("reddit", "products")[seed // len(SMALL) % 2]
        shape = Shape(machines=machines, workers=workers, samplers=samplers, nic_Gbps=10.0, data_set=data_set)
        simulator = Simulator(make_problem(shape, seed), iterations=5, seed=seed)
        best_s = enumerate_placements(simulator).makespan_s
        rng = np.random.default_rng(seed)
        start = search_by_loads(simulator, place_by_flows(simulator, rng), 2000, rng)
        found_s = search_metropolis(
            simulator, start, rng, share_left=lambda done, best_s: max(0.0, 1.0 - done / SMALL_SIMULATIONS)
        )[1]
        hits += found_s <= best_s * (1 + 1e-9)
        worst = max(worst, found_s / best_s - 1.0)
        if seed < dqn:
            from agents.gnn.dqn import search_dqn

            random = place_randomly(simulator, rng)
            found_s = search_dqn(simulator, random, rng, share_left=lambda done, best_s: max(0.0, 1.0 - done / 300))[1]
            learnt += found_s <= best_s * (1 + 1e-9)
    print(f"{count} small problems: {hits} optima by Metropolis ({hits / count:.1%}), worst {worst:.2%} above")
    if dqn:
        print(f"{dqn} of them by the DQN from a random placement, 300 episodes each: {learnt} optima")


def large(machines: int) -> None:
    for reads in (4, 2):
        problem = make_problem(Shape(machines=machines, workers=4 * machines, samplers=1, reads=reads))
        begin, cpu = time.perf_counter(), time.process_time()
        plan = search(problem, Budget(seconds=20.0 if machines == 64 else 0.2))
        wall, busy = time.perf_counter() - begin, time.process_time() - cpu
        gain = min(plan.against.values()) / plan.estimate.iteration_s - 1.0
        gap = plan.estimate.iteration_s / plan.estimate.lower_bound_s - 1.0
        print(
            f"{machines} machines, {4 * machines} workers, {len(problem.flows)} flows: search with estimate and rules "
            f"{wall:.0f} s ({busy:.0f} s of processor time); gain {gain:+.0%}, {gap:.1%} above the bound"
        )
        simulator = Simulator(problem, iterations=40, seed=1)
        random = place_randomly(simulator, np.random.default_rng(0))
        for name, place in (("searched", plan.places(simulator)), ("random", random)):
            rates = {schedule: iterations_a_second(simulator, place, schedule) for schedule in POLICIES}
            far = (place[simulator.arrays.source] != place[simulator.arrays.target]).sum()
            print(
                f"  {name}, {far} flows between machines, iterations a second of processor time: "
                + ", ".join(f"{schedule} {rate:,.0f}" for schedule, rate in rates.items()),
                flush=True,
            )


def iterations_a_second(simulator: Simulator, place: Ints, schedule: str) -> float:
    """Simulated iterations in a second of processor time, the best of five runs."""
    times = []
    for _ in range(5):
        begin = time.process_time()
        simulator.run(place, schedule)
        times.append(time.process_time() - begin)
    return simulator.iterations / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--cells", type=int, default=54)
    parser.add_argument("--small", type=int, default=200)
    parser.add_argument("--dqn", type=int, default=20)
    parser.add_argument("--large", type=int, default=64)
    args = parser.parse_args()
    if args.cells:
        grid(args.seconds, args.cells)
    if args.small:
        small(args.small, args.dqn)
    if args.large:
        large(args.large)


if __name__ == "__main__":
    main()

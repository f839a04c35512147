"""Simulations against real runs: 4 "machines" of this host send real bytes over loopback sockets at limited rates.

    python benchmarks/gnn_loopback.py [--placements 7] [--iterations 5] [--seed 0] [--by-kernel]

Placements of all kinds, from random to searched, run under every schedule. Shows the error of the simulated makespan
and Spearman's rank correlation of simulated and measured. With `--by-kernel` the machines are network namespaces, whose
interfaces `tc` limits. Transfers take from some milliseconds to some hundred milliseconds, so that the time in which a
process wakes up (about a millisecond) does not decide.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
from scipy.stats import spearmanr

from agents.gnn.baselines import BASELINES, place_by_flows
from agents.gnn.metropolis import search_metropolis
from automap.gnn.loopback.controller import hosts
from automap.gnn.made_up import Shape, make_problem
from automap.gnn.problem import Amount, GnnProblem
from automap.gnn.simulator import POLICIES, Simulator

MB_PER_S = 30.0
"""Rate of an interface: four of them load a core of this host by about a fifth."""
BATCH_BYTES = 4e6
"""Bytes of a mini-batch of one worker, so that an iteration takes some tenths of a second."""
SIMULATIONS = 2000
"""Simulations of the search for one of the placements."""


def slowed(seed: int) -> GnnProblem:
    """A made-up problem with volumes and rates for a loopback socket."""
    shape = Shape(machines=4, workers=5, samplers=2, data_set="products", nic_Gbps=MB_PER_S * 8e-3)
    problem = make_problem(shape, seed)
    part = max(flow.bytes.average for flow in problem.flows)
    scale = BATCH_BYTES / 2 / part

    def scaled(amount: Amount) -> Amount:
        return replace(amount, mean=amount.average * scale)

    flows = tuple(replace(flow, bytes=scaled(flow.bytes)) for flow in problem.flows)
    return replace(problem, flows=flows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--placements", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--by-kernel", action="store_true")
    args = parser.parse_args()
    simulator = Simulator(slowed(args.seed), iterations=args.iterations, seed=args.seed)
    rng = np.random.default_rng(args.seed)
    found = {name: rule(simulator, rng) for name, rule in BASELINES.items()}
    found["by flows"] = place_by_flows(simulator, rng)
    found["searched"] = search_metropolis(
        simulator, found["by flows"], rng, share_left=lambda done, best_s: max(0.0, 1.0 - done / SIMULATIONS)
    )[0]
    found |= {f"random {n}": BASELINES["random"](simulator, rng) for n in range(2, args.placements - len(found) + 2)}
    placements = dict(list(found.items())[: args.placements])
    simulated, measured = [], []
    with hosts(simulator.arrays, by_kernel=args.by_kernel) as machines:
        machines.run(found["random"], simulator.ranks(found["random"]), "priority")  # the first run warms up
        for name, place in placements.items():
            for schedule in POLICIES:
                simulated.append(simulator.run(place, schedule).makespan_s)
                measured.append(machines.run(place, simulator.ranks(place), schedule))
                error = simulated[-1] / measured[-1] - 1.0
                print(
                    f"{name:16} {schedule:9} simulated {simulated[-1]:.3f} s, measured {measured[-1]:.3f} s, "
                    f"{error:+.1%}",
                    flush=True,
                )
    errors = np.abs(np.array(simulated) / np.array(measured) - 1.0)
    rank = spearmanr(simulated, measured).statistic if len(simulated) > 2 else float("nan")
    print(
        f"{len(simulated)} runs: error {errors.mean():.1%} in the mean, {errors.max():.1%} at most; Spearman {rank:.3f}"
    )


if __name__ == "__main__":
    main()

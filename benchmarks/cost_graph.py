"""How well the cost graph adds up, and how long elimination takes for a skeleton.

    python benchmarks/cost_graph.py [--plans 25] [--skeletons 25] [--models NAME,NAME]

Compares the forward and backward pass of each unit of random plans in the cost graph with its cost in the price, and
prints the median and the largest relative deviation. For the skeletons of some of these plans it prints the median and
the largest processor time of one elimination, by the number of mesh axes that have more than one rank.
"""

import argparse
import statistics
import time

import numpy as np

from agents.planners.elimination import solve
from automap.cluster import parse_cluster
from automap.cost_graph.graph import CostGraph
from automap.cost_graph.sensitivities import sensitivities
from automap.price.kernels.array_types import records_of
from automap.price.kernels.cost_records import UNIT_COST_DTYPE, UNIT_COST_WIDTH
from automap.problem import Problem
from automap.space.space import PlanSpace
from ir import zoo

CASES = {
    "gpt2": ("8xA100-80GB", 64),
    "bert-large": ("2x8xV100-16GB@25Gbit", 256),
    "t5-3b": ("4x8xA100-80GB", 256),
    "mixtral-8x7b": ("8x8xH100-80GB", 256),
    "resnet50": ("2x8xV100-16GB@25Gbit", 256),
    "vgg19": ("2x4xV100@25Gbit", 256),
}
"""Model of the zoo -> cluster, global batch."""
WARM = "gpt:layers=2,hidden=64,heads=4,seq_len=32,vocab_size=128"


def passes(costs):
    """[rows, 2] seconds of the forward and the backward pass of units, all collectives counted in full."""
    rows = records_of(np.ascontiguousarray(costs[:, :UNIT_COST_WIDTH]), UNIT_COST_DTYPE)
    forward = rows["forward_s"] + rows["forward_comm_s"].sum(axis=1)
    backward = rows["backward_s"] + rows["recompute_s"]
    backward += rows["backward_comm_s"].sum(axis=1) + rows["recompute_comm_s"].sum(axis=1)
    return np.stack([forward, backward], axis=1)


def live_axes(space, values):
    """Number of mesh axes that have more than one rank."""
    shape = space.shape(values)
    return sum(size > 1 for size in (shape.dp, shape.middle, shape.tp))


def measure(space, num_plans, num_skeletons):
    """The relative deviations of all units of some plans, and by number of axes the seconds of the eliminations."""
    off: list[float] = []
    took: dict[int, list[float]] = {}
    for number, values in enumerate(space.random_batch(np.random.default_rng(0), num_plans).tolist()):
        graph = CostGraph(space, tuple(values[: space.first.signature]))
        picked = graph.picked(tuple(values))
        chosen = graph.chosen(picked)
        exact, summed = passes(graph.units.costs(chosen)), passes(graph.unit_costs(picked))
        off += np.abs(summed / exact - 1.0).reshape(-1).tolist()
        if number < num_skeletons:
            weights = sensitivities(graph.units, chosen).time
            began = time.process_time()
            solve(graph.around(picked), weights, picked)
            took.setdefault(live_axes(space, values), []).append(time.process_time() - began)
    return off, took


def main() -> None:
    """Prints one line for each model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plans", type=int, default=25)
    parser.add_argument("--skeletons", type=int, default=25)
    parser.add_argument("--models", default=",".join(CASES))
    given = parser.parse_args()
    # A first call, so that no skeleton is charged for imports and compilation.
    warm = PlanSpace(Problem.build(zoo.build(WARM), parse_cluster("4xA100"), {"global_batch": 8}))
    measure(warm, 2, 2)
    for model in given.models.split(","):
        cluster, batch = CASES[model]
        space = PlanSpace(Problem.build(zoo.build(model), parse_cluster(cluster), {"global_batch": batch}))
        off, took = measure(space, given.plans, given.skeletons)
        skeletons = ", ".join(
            f"{axes} axes: {1e3 * statistics.median(s):.0f} ms ({1e3 * max(s):.0f} at most, {len(s)} skeletons)"
            for axes, s in sorted(took.items())
        )
        print(f"{model:13} {cluster:22} off {np.median(off):.1e} ({max(off):.1%} at most)   {skeletons}", flush=True)


if __name__ == "__main__":
    main()

"""The search beside the best of all pipelines of measured layers, where there are few enough to price every one."""

import itertools

import numpy as np
import pytest
from long_cases import long_but
from small_clusters import cluster_with

from agents import Budget, search
from agents.planners.staged_plan import StageChoice, StagedPlan, lower_staged
from automap.problem import Problem
from automap.space.space import PlanSpace
from ir.profile_import import load_profile

FIX = {"schedule": "1f1b", "virtual_stages": 1, "zero": 0}
LAYERS, BATCH = 6, 24
PLENTY_GIB, SCARCE_GIB = 64.0, 2.0


def chain(seed):
    """A chain of unlike layers."""
    rng = np.random.default_rng(seed)
    nodes = [
        f"node{number} -- layer -- forward_compute_time={spent:.3f}, backward_compute_time={2 * spent:.3f}, "
        f"activation_size={kept:.0f}, parameter_size={state:.0f}"
        for number, (spent, kept, state) in enumerate(np.exp(rng.normal((1.0, 16.5, 17.5), 0.7, (LAYERS, 3))), 1)
    ]
    edges = [f"\tnode{number} -- node{number + 1}" for number in range(1, LAYERS)]
    return load_profile("\n".join([*nodes, *edges]) + "\n", name="chain", batch=4)


def best_of_all(problem):
    """The least step time that fits of all ways to give runs of layers to runs of devices, with and without
    recomputation in each stage, and with each number of micro-batches."""
    space = PlanSpace(problem)
    devices, best_s = problem.cluster.num_devices, float("inf")

    def ways(total, count):
        return [(0, *inner, total) for inner in itertools.combinations(range(1, total), count - 1)]

    for count in range(1, min(space.num_units, devices) + 1):
        modes = list(itertools.product(("none", "full"), repeat=count))
        for ends, places, again in itertools.product(ways(space.num_units, count), ways(devices, count), modes):
            stages = tuple(
                StageChoice(end=end, devices=tuple(range(a, b)), recompute=mode)
                for end, (a, b), mode in zip(ends[1:], itertools.pairwise(places), again, strict=True)
            )
            widest = max(len(stage.devices) for stage in stages)
            for number in (n for n in range(1, BATCH + 1) if BATCH % n == 0 and BATCH // n >= widest):
                plan = StagedPlan(stages=stages, num_micro_batches=number)
                outcome = space.evaluator.evaluate(lower_staged(space, plan))
                best_s = min(best_s, outcome.step_time_s if outcome.fits else float("inf"))
    return best_s


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "memory_gib"),
    long_but([(0, PLENTY_GIB), (1, SCARCE_GIB)], itertools.product([0, 1], [PLENTY_GIB, SCARCE_GIB])),
)
def test_the_search_is_at_most_one_percent_above_the_best_pipeline(seed, memory_gib):
    cluster = cluster_with(memory_gib, "4x1xV100-16GB@25Gbit")
    problem = Problem.build(chain(seed), cluster, {"global_batch": BATCH}, {"fix": FIX})
    optimum_s = best_of_all(problem)
    found_s = [search(problem, Budget(evaluations=600), seed=other).step_time_s for other in range(2)]
    assert max(found_s) <= 1.01 * optimum_s < float("inf")

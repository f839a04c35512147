"""Skeletons: the neighbours of a plan that are tried are legal."""

import numpy as np
import pytest

from agents import Budget
from agents.incumbent import Incumbent
from agents.learning.problems import generate
from agents.planners.elimination import propose
from agents.planners.skeletons import SkeletonSearch
from agents.sampling.expert import grid_of
from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.space.space import PlanSpace


@pytest.mark.parametrize(
    ("cluster", "hints"),
    [
        ("2x2xV100@10Gbit", {}),
        ("2xV100-16GB+2xP100-16GB", {}),
        ("4xA100", {"fix": {"pp": 2}}),
        ("4xA100", {"constraints": [{"scope": "h.1.*", "stage": 1}]}),
        ("4xA100", {"constraints": [{"scope": "h.0.*", "recompute": True}], "fix": {"pp": 2}}),
    ],
)
def test_neighbours_are_plans_of_the_space(gpt, cluster, hints):
    space = PlanSpace(Problem.build(gpt(layers=4), parse_cluster(cluster), {"global_batch": 8}, hints))
    search = SkeletonSearch(Incumbent(space, Budget(evaluations=100), searcher="elimination"), propose)
    count = 0
    for row in space.random_batch(np.random.default_rng(0), 12).tolist():
        for plan in map(tuple, search.neighbours(tuple(row)).tolist()):
            assert space.repair(plan) == plan
            assert plan[: space.first.signature] != tuple(row[: space.first.signature])
            count += 1
    assert count > 50


def test_what_does_not_fit_is_cut_anew():
    """A mixture of experts whose stages are nearly full: all signatures overflow on even stages of this mesh."""
    space = PlanSpace(generate(100_130).problem)
    values, prices = grid_of(space)
    mesh = [
        i for i, row in enumerate(values.tolist()) if (lambda s: (s.pp, s.tp, s.middle))(space.shape(row)) == (14, 2, 4)
    ]
    near = tuple(values[min(mesh, key=lambda i: prices[i, 1])].tolist())
    search = SkeletonSearch(Incumbent(space, Budget(evaluations=4_000), searcher="elimination"), propose)
    search.solve(near, rounds=1)
    assert search.incumbent.best is None and search.incumbent.least_overflow < 0.05
    search.descend(near)
    first, best = space.first, search.incumbent.best
    assert best is not None and best[first.cut : first.recompute] != near[first.cut : first.recompute]
    assert search.incumbent.best_s < prices[prices[:, 1] <= 0.0, 0].min() / 4

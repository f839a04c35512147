"""Promising templates: which meshes planners look at first."""

import numpy as np
import pytest

from agents.planners.promising import promises, promising_meshes
from agents.planners.recompute_less import recompute_less
from agents.sampling.expert import grid_of
from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.space.space import PlanSpace
from ir import zoo


@pytest.fixture(scope="module")
def scarce():
    """A space in which the fastest templates do not fit, and its templates."""
    space = PlanSpace(Problem.build(zoo.build("gpt2-xl"), parse_cluster("2x8xV100-16GB@25Gbit"), {"global_batch": 128}))
    return space, grid_of(space)


def test_every_mesh_is_there_once(scarce):
    space, grid = scarce
    rows = promising_meshes(space, grid)
    kinds = {tuple(row) for row in rows[:, : space.first.schedule].tolist()}
    assert len(kinds) == len(rows)
    assert kinds == {tuple(row) for row in grid.values[:, : space.first.schedule].tolist()}
    assert {tuple(row) for row in rows.tolist()} <= {tuple(row) for row in grid.values.tolist()}


def test_where_memory_is_ample_the_best_template_is_first():
    space = PlanSpace(Problem.build(zoo.build("gpt2"), parse_cluster("2x4xH100"), {"global_batch": 64}))
    grid = grid_of(space)
    fitting = grid.prices[:, 1] <= 0.0
    best = grid.values[fitting][grid.prices[fitting, 0].argmin()]
    assert tuple(promising_meshes(space, grid)[0]) == tuple(best)


def test_a_promise_lies_between_the_lightest_and_the_heaviest_template(scarce):
    space, grid = scarce
    found = promises(space, grid)
    light, heavy = grid.prices[found.light], grid.prices[found.heavy]
    assert (found.seconds >= np.minimum(light[:, 0], heavy[:, 0]) * (1 - 1e-12)).all()
    assert (found.seconds <= np.maximum(light[:, 0], heavy[:, 0]) * (1 + 1e-12)).all()
    same = light[:, 1] <= 0.0
    np.testing.assert_array_equal(found.seconds[same], light[same, 0])


def test_promises_rank_what_fits_in_the_end_better_than_prices_as_they_stand(scarce):
    """Against the exact price with as little recomputation as fits."""
    space, grid = scarce
    found = promises(space, grid)
    some = np.flatnonzero((grid.prices[found.light, 1] > 0.0) & (found.overflow <= 0.0))[::8]
    assert len(some) > 10
    exact = []
    for row in found.light[some]:
        plans = np.array(recompute_less(space, tuple(grid.values[row].tolist())))
        exact.append(space.price(plans)[:, 0].min())
    off = np.abs(np.log(found.seconds[some] / exact))
    assert np.median(off) < np.median(np.abs(np.log(grid.prices[found.light[some], 0] / exact)))
    assert np.median(off) < 0.1

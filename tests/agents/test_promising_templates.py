"""Promising templates: which meshes planners look at first."""

from dataclasses import replace

import numpy as np
import pytest

from agents import Budget
from agents.incumbent import Incumbent
from agents.learning.checkpoint import read_network
from agents.learning.problems import generate
from agents.learning.proposals import NETWORK
from agents.learning.proposed_skeletons import propose_and_solve
from agents.planners.descents import descend
from agents.planners.elimination import propose
from agents.planners.promising_templates import (
    NEARLY_FITS,
    TRANSFERRED,
    like_the_best,
    promises,
    promising_meshes,
    split_axes,
    with_other_shapes,
)
from agents.planners.recompute_less import recompute_less
from agents.planners.skeletons import SkeletonSearch
from agents.planners.template_improvement import improve_templates
from agents.sampling.expert import grid_of, price_grid
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


def test_other_meshes_take_the_signatures_of_good_plans(scarce):
    space, grid = scarce
    rows = promising_meshes(space, grid)
    donors = space.random_batch(np.random.default_rng(0), 6)
    found, prices = like_the_best(space, grid, donors)
    assert (prices == space.price(found)).all()
    assert all(space.repair(row) == tuple(row) for row in found.tolist())
    first = space.first
    shapes = set(map(tuple, found[1:, : first.schedule].tolist()))
    meshes = set(map(tuple, np.concatenate([rows[:TRANSFERRED], donors])[:, : first.schedule].tolist()))
    assert len(shapes) == len(found) - 1 and meshes < shapes
    # The others have the inner axes of one of these.
    inner = {(space.shape(mesh).tp, space.shape(mesh).middle) for mesh in meshes}
    assert {(space.shape(mesh).tp, space.shape(mesh).middle) for mesh in shapes} <= inner
    # On a mesh with other axes than those of a giver some of its signatures may not be legal.
    taken = (found[:, None, first.signature :] == donors[None, :, first.signature :]).mean(axis=2).max(axis=1)
    assert taken.min() > 0.5 and taken.mean() > 0.9


@pytest.mark.slow
def test_the_fastest_plan_that_fits_is_the_first():
    """A reserve leaves 2.5 GB of each device: no template fits, and no plan that elimination has solved."""
    problem = generate(100_121).problem
    ((name, device),) = problem.cluster.devices.items()
    less = replace(problem.cluster, devices={name: replace(device, memory_GiB=device.memory_GiB - 0.1)})
    incumbent = Incumbent(PlanSpace(replace(problem, cluster=less)), Budget(evaluations=4_000), searcher="expert")
    space, grid = incumbent.space, price_grid(incumbent, charged=False)
    opened = improve_templates(incumbent, grid)
    assert incumbent.best is None
    found = like_the_best(space, grid, opened.plans(None).values).values
    seconds, overflow = space.price(found).T
    assert overflow[0] <= 0.0 and seconds[0] <= seconds[overflow <= 0.0].min()
    # Promising are others, which are much faster, and of which none is made to fit.
    assert overflow[1] > 0.0 and seconds[1] < seconds[0] / 10
    propose_and_solve(opened, grid, read_network(NETWORK), seed=0)
    assert incumbent.best_s <= seconds[0]


def test_good_plans_are_tried_on_other_shapes_with_the_same_inner_axes(scarce):
    space, grid = scarce
    first, good = space.first, grid.values[np.where(grid.prices[:, 1] <= 0.0, grid.prices[:, 0], np.inf).argmin()]
    found = with_other_shapes(space, good[None])
    assert all(space.repair(row) == tuple(row) for row in found.tolist())
    own, shapes = space.shape(tuple(good)), [space.shape(tuple(row)) for row in found.tolist()]
    assert {(shape.tp, shape.middle) for shape in shapes} == {(own.tp, own.middle)}
    assert len({shape.pp for shape in shapes}) > 1 and len({shape.num_micro_batches for shape in shapes}) > 3
    # With fewer samples on a rank some signatures are not legal.
    assert (found[:, first.signature :] == good[first.signature :]).mean() > 0.9
    # Where no template has a number of virtual stages, plans have it all the same.
    templates = {tuple(row) for row in grid.values[:, : first.schedule].tolist()}
    assert {tuple(row) for row in found[:, : first.schedule].tolist()} - templates


def test_recomputation_and_zero_are_those_that_suit_the_signatures(scarce):
    """No template of the same mesh decides better on recomputation and ZeRO, for the plans that are looked at so."""
    space, grid = scarce
    first = space.first
    donors = grid.values[grid.prices[:, 1] <= 0.0][:40:10]
    for row in like_the_best(space, grid, donors).values[:8]:
        same = (grid.values[:, : first.cut] == row[: first.cut]).all(axis=1)
        others = grid.values[same].copy()
        others[:, first.signature :] = row[first.signature :]
        seconds, overflow = space.price(np.vstack([row[None], others])).T
        if overflow[0] <= 0.0:
            assert seconds[0] <= seconds[overflow <= 0.0].min()


def test_the_most_promising_of_good_plans_come_first(scarce):
    """They are ranked by their time with as little recomputation as fits; a plan that overflows by much is last."""
    space, grid = scarce
    rows = promising_meshes(space, grid)
    solved = SkeletonSearch(Incumbent(space, Budget(), searcher="elimination"), propose)
    descend(solved, tuple(rows[0].tolist()))
    found = like_the_best(space, grid, solved.plans().values).values
    seconds, overflow = space.price(found).T
    assert (np.diff((overflow > NEARLY_FITS).astype(int)) >= 0).all()
    fitting_s = [
        min(space.price(np.array(plans))[:, 0], default=np.inf)
        for row in found[: len(found) // 2 : 4]
        if (plans := recompute_less(space, tuple(row.tolist())))
    ]
    assert len(fitting_s) > 10
    assert min(fitting_s[:4]) == min(fitting_s)
    assert np.median(fitting_s[: len(fitting_s) // 2]) < np.median(fitting_s[len(fitting_s) // 2 :])
    shape = space.first.schedule
    before = {tuple(row[:shape]): s for row, s in zip(rows.tolist(), space.price(rows)[:, 0], strict=True)}
    axes = split_axes(space, tuple(rows[0]))
    faster = [
        s < before[tuple(row[:shape])]
        for row, s in zip(found.tolist(), seconds, strict=True)
        if split_axes(space, tuple(row)) == axes and tuple(row[:shape]) in before
    ]
    assert len(faster) > 5 and np.mean(faster) > 0.6


def test_without_good_plans_there_are_none(scarce):
    space, grid = scarce
    found = like_the_best(space, grid, np.empty((0, len(space.slots)), np.int64))
    assert found.values.shape == (0, len(space.slots)) and found.prices.shape == (0, 2)

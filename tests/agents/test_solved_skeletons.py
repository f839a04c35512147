"""Solved skeletons: what a lesson rewards."""

import numpy as np
import pytest

from agents.learning.lessons import Lesson, Taught
from agents.learning.solved_skeletons import SolvedSkeletons
from agents.sampling.expert import grid_of
from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.space.space import PlanSpace
from ir import zoo


@pytest.fixture(scope="module")
def known():
    space = PlanSpace(Problem.build(zoo.build("gpt2"), parse_cluster("2x4xV100@25Gbit"), {"global_batch": 64}))
    return space, grid_of(space)


def drawn(grid, count):
    return map(tuple, grid.values[np.random.default_rng(0).integers(0, len(grid.values), count)].tolist())


def test_what_a_skeleton_leads_to_is_legal_and_no_worse_than_its_plan(known):
    space, grid = known
    solved, gained = SolvedSkeletons(space, grid), 0
    for values in drawn(grid, 12):
        found = solved.solve(values)
        assert space.repair(found.values) == found.values
        assert (found.step_time_s, found.overflow) == tuple(space.price(np.array([found.values]))[0].tolist())
        (own,) = space.price(np.array([values])).tolist()
        assert found.worth <= (own[1] > 0.0, own[0] if own[1] <= 0.0 else own[1])
        gained += found.step_time_s < own[0]
        # It is solved once: signatures of the plan make no difference any more.
        assert solved.solve((*values[: space.first.signature], *[0] * (len(values) - space.first.signature))) is found
    assert gained


def test_a_lesson_teaches_the_best_plan_that_is_known(known):
    space, grid = known
    values = next(drawn(grid, 1))
    lesson = Lesson(seed=0, space=space, known=grid, taught=Taught(), solved=SolvedSkeletons(space, grid))
    found = lesson.solve(values)
    assert (lesson.taught.values, lesson.taught.step_time_s) == (found.values, found.step_time_s)
    # A plan of a teacher that solving does not find is the worth of its skeleton, and of no other one.
    better = Taught(values, 0.5 * found.step_time_s)
    taught = Lesson(seed=0, space=space, known=grid, taught=better, solved=SolvedSkeletons(space, grid))
    assert taught.solve(values) == (values, 0.5 * found.step_time_s, 0.0)
    other = next(row for row in drawn(grid, 20) if row[: space.first.signature] != values[: space.first.signature])
    assert taught.solve(other).step_time_s > better.step_time_s and better.values == values


def test_a_plan_that_is_hardly_faster_is_not_taught():
    taught = Taught((0,), 1.0)
    taught.improve((1,), 0.9995)
    assert taught.values == (0,)
    taught.improve((2,), 0.99)
    assert taught == Taught((2,), 0.99)

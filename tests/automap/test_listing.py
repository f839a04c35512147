"""Listing against walks over legal values, its bounds against the prices of all completions."""

import itertools

import numpy as np
import pytest
from all_plans import every_plan

from automap.bounds.enumeration import Enumeration
from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.space.space import PlanSpace
from ir import zoo


def hinted(graph, cluster, batch, constraints, **fix):
    hints = {"fix": fix, "constraints": constraints}
    return PlanSpace(Problem.build(graph, parse_cluster(cluster), {"global_batch": batch}, hints))


SPACES = {
    "shapes, cuts and signatures": lambda mlp: hinted(mlp((16, 32, 16, 8)), "2xA100", 4, [], num_micro_batches=2),
    "constraints": lambda mlp: hinted(
        mlp((16, 32, 16, 8)),
        "2x2xV100@25Gbit",
        8,
        [{"scope": "layers.0", "recompute": True}, {"scope": "layers.*", "replicate": True}],
        num_micro_batches=2,
        zero=1,
    ),
    "stages": lambda mlp: hinted(mlp((16,) * 7), "2xA100", 2, [{"scope": "layers.3", "stage": 1}], pp=2, zero=0),
    "a third axis": lambda mlp: hinted(
        zoo.build("moe:layers=2,hidden=64,heads=4,ffn=64,experts=4,seq_len=32,vocab_size=128"),
        "4xA100",
        8,
        [{"scope": "*", "replicate": True}],
        pp=1,
        num_micro_batches=2,
        recompute="none",
        zero=1,
    ),
}


@pytest.mark.parametrize("name", SPACES)
def test_a_listing_is_what_walking_over_legal_values_finds(name, mlp):
    space = SPACES[name](mlp)
    # Of a large space, the beginning.
    expected = list(itertools.islice(every_plan(space), 3000))
    found = itertools.chain.from_iterable(rows.tolist() for rows in Enumeration(space).plans())
    assert [tuple(row) for row in itertools.islice(found, 3000)] == expected


def test_a_listing_has_as_many_plans_as_are_counted(mlp):
    space = SPACES["shapes, cuts and signatures"](mlp)
    assert sum(map(len, Enumeration(space).plans())) == pytest.approx(10**space.decades)


@pytest.mark.parametrize("name", ["shapes, cuts and signatures", "constraints", "stages"])
def test_no_completion_beats_the_bound_of_its_beginning(name, mlp):
    space = SPACES[name](mlp)
    enumeration = Enumeration(space)
    level = enumeration.root()
    rng = np.random.default_rng(0)
    while not enumeration.is_done(level):
        level = enumeration.bounded(enumeration.extend(level))
        level = level.take(rng.permutation(len(level))[:20])
        for row in range(min(4, len(level))):
            one = level.take(slice(row, row + 1))
            plans = np.concatenate(list(itertools.islice(enumeration.plans(one), 5)))
            assert (space.price(plans) >= one.bounds - 1e-12).all()

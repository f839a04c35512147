"""Priced templates: in parts or at once, they are the templates of the space with the prices of the space."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from automap.bounds.priced_templates import AT_ONCE, priced_in_parts, priced_so_far, priced_templates
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.space.templates import templates
from ir import zoo


def space_of() -> PlanSpace:
    """A space with more templates than are priced at once."""
    space = PlanSpace(Problem.build(zoo.build("gpt2"), "2x8xA100-80GB", {"global_batch": 64}))
    assert len(list(templates(space))) > 2 * AT_ONCE
    return space


def test_templates_that_are_priced_in_parts_are_all_templates_with_their_prices():
    space = space_of()
    parts = list(priced_in_parts(space))
    assert max(len(values) for values, _ in parts) == AT_ONCE
    values = np.concatenate([some for some, _ in parts])
    assert [tuple(row) for row in values.tolist()] == [values for _, values in templates(space)]
    np.testing.assert_array_equal(np.concatenate([some for _, some in parts]), space.price(values))


@pytest.mark.parametrize("first", [1, 2])
def test_a_list_that_was_left_early_goes_on_where_it_ended(first):
    space, whole = space_of(), space_of()
    for _ in itertools.islice(priced_in_parts(space), first):
        pass
    values, _ = priced_so_far(space)
    assert len(values) == first * AT_ONCE
    np.testing.assert_array_equal(values, priced_templates(whole)[0][: len(values)])
    # A second list begins with the first templates again, and one that had begun before misses none.
    begun = priced_in_parts(space)
    np.testing.assert_array_equal(next(begun)[0], values[:AT_ONCE])
    for one, other in zip(priced_templates(space), priced_templates(whole), strict=True):
        np.testing.assert_array_equal(one, other)
    assert sum(len(some) for some, _ in begun) == len(priced_so_far(space)[0]) - AT_ONCE


def test_without_any_priced_before_the_templates_so_far_are_all():
    space = space_of()
    values, prices = priced_so_far(space)
    assert len(values) == len(list(templates(space)))
    np.testing.assert_array_equal(prices, space.price(values))


def test_templates_are_priced_once(monkeypatch):
    space = space_of()
    priced_templates(space)
    monkeypatch.setattr(PlanSpace, "price", lambda self, values: pytest.fail("priced again"))
    assert priced_templates(space)[0] is priced_so_far(space)[0]

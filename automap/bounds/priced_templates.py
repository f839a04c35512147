"""Priced templates: the templates of a plan space with their prices, which the space keeps.

A search needs them several times: to see which parts of the cluster are worth a search, as its first plans, and to find
the plainest plan at its end. On thousands of devices there are tens of thousands of templates, which take seconds. So
they are listed and priced a few at a time, and a search that runs out of time can stop in between. Units: seconds of a
step; memory as share of capacity.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from automap.arrays import Floats, Ints
from automap.space.space import PlanSpace
from automap.space.templates import templates

AT_ONCE = 256
"""Number of templates that are priced in one call (assumed)."""


def priced_in_parts(space: PlanSpace) -> Iterator[tuple[Ints, Floats]]:
    """The templates of a space, some at a time: [n, slots] their values, and [n, 2] their prices.

    They come in the order of `automap.space.templates.templates`, at most `AT_ONCE` at a time.
    """
    first = 0
    while True:
        if first < sum(len(prices) for _, prices in space.priced):
            values, prices = _joined(space)
            some = slice(first, first + AT_ONCE)
            yield values[some], prices[some]
            first += len(values[some])
            continue
        listed = [values for _, values in islice(templates(space, first), AT_ONCE)]
        if not listed:
            return
        values = np.array(listed, dtype=np.int64)
        space.priced.append((values, space.price(values)))
        yield space.priced[-1]
        first += len(values)


def priced_templates(space: PlanSpace) -> tuple[Ints, Floats]:
    """[n, slots] the templates of a space, and [n, 2] their prices."""
    for _ in priced_in_parts(space):
        pass
    return _joined(space)


def priced_so_far(space: PlanSpace) -> tuple[Ints, Floats]:
    """`priced_templates` of those that have been priced until now; of all templates if none has been."""
    return _joined(space) if space.priced else priced_templates(space)


def _joined(space: PlanSpace) -> tuple[Ints, Floats]:
    """The templates that have been priced, which become a single part."""
    if not space.priced:
        return np.zeros((0, len(space.slots)), dtype=np.int64), np.zeros((0, 2))
    if len(space.priced) > 1:
        values = np.concatenate([of_part for of_part, _ in space.priced])
        space.priced[:] = [(values, np.concatenate([of_part for _, of_part in space.priced]))]
    return space.priced[0]

"""Settings for planners that take the number of micro-batches and the ZeRO stage as given: those of the templates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from automap.bounds.priced_templates import priced_templates
from automap.space.space import PlanSpace, Values


class Setting(NamedTuple):
    """What the users of a planner of the literature decide themselves: micro-batches and the ZeRO stage."""

    num_micro_batches: int
    zero: int
    """ZeRO stage."""
    of_each_tp: Mapping[int, Values]
    """Size of the inner axis -> the best template with this setting, without a middle axis."""


def settings_by_templates(space: PlanSpace) -> Iterator[Setting]:
    """The distinct settings of the templates, that of the fastest template first; those that do not fit last."""
    values, prices = priced_templates(space)
    worth = np.where(prices[:, 1] <= 0.0, prices[:, 0], prices[:, 0] + prices[:, 0].max() * (1.0 + prices[:, 1]))
    found: dict[tuple[int, int], dict[int, Values]] = {}
    for row in np.argsort(worth, kind="stable").tolist():
        plan = tuple(values[row].tolist())
        shape = space.shape(plan)
        if shape.middle == shape.virtual == 1:
            found.setdefault((shape.num_micro_batches, plan[space.first.zero]), {}).setdefault(shape.tp, plan)
    for (num_micro_batches, zero), of_each_tp in found.items():
        yield Setting(num_micro_batches, zero, of_each_tp)

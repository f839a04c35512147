"""Expert: prices every template of the tuned grid and returns the fastest that fits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agents.incumbent import Incumbent
from agents.searcher import SearchResult, SearchTask
from automap.bounds.known_plans import priced_templates
from automap.space.space import Ints, PlanSpace


class Grid(NamedTuple):
    """Plans with their prices, such as the templates of a space."""

    values: Ints
    """[plans, slots] values of each plan."""
    prices: npt.NDArray[np.float64]
    """[plans, 2] seconds of a step and overflow of memory, see `PlanSpace.price`."""

    def joined(self, other: Grid) -> Grid:
        """These plans, and the other ones after them."""
        return Grid(np.concatenate([self.values, other.values]), np.concatenate([self.prices, other.prices]))


def grid_of(space: PlanSpace) -> Grid:
    """The templates of a space with their prices."""
    return Grid(*priced_templates(space))


def price_grid(incumbent: Incumbent, *, charged: bool = True) -> Grid:
    """Prices the whole grid of templates, against which every search is measured.

    `incumbent.baselines` is written: the step time of pure data parallelism, `dp`, and of the best template, `expert`;
    None if none fits. There is no `dp` where the batch or the hints leave no such plan.

    Args:
        incumbent: takes the templates.
        charged: whether a budget in evaluations is charged for it, at most a quarter.
    """
    space, before = incumbent.space, incumbent.charged
    baselines = {"expert": float("inf")}
    values: list[Ints] = []
    prices: list[npt.NDArray[np.float64]] = []
    for some, found in incumbent.priced_templates():
        values.append(np.array([plan for _, plan in some]))
        prices.append(found)
        for (shape, _), (seconds, overflow) in zip(some, found.tolist(), strict=True):
            step_s = seconds if overflow <= 0.0 else float("inf")
            names = ("dp", "expert") if shape.dp == space.meshes.devices else ("expert",)
            baselines |= {name: min(step_s, baselines.get(name, float("inf"))) for name in names}
        if incumbent.should_stop():
            break
    if incumbent.budget.evaluations is not None:
        most = incumbent.budget.evaluations // 4 if charged else 0
        incumbent.charged = min(incumbent.charged, before + most)
    incumbent.baselines = {name: None if s == float("inf") else s for name, s in baselines.items()}
    return Grid(np.concatenate(values), np.concatenate(prices))


def search_expert(task: SearchTask) -> SearchResult:
    """The best template; see `Searcher`."""
    incumbent = Incumbent.begin(task, "expert")
    price_grid(incumbent)
    return incumbent.result(seed=task.seed)

"""Expert: prices every template of the tuned grid and returns the fastest that fits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agents.incumbent import Incumbent
from agents.searcher import SearchResult, SearchTask
from automap.bounds.priced_templates import priced_so_far, priced_templates
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
    None if none fits. There is no `dp` where the batch or the hints leave no such plan. If the time of the search ends
    before, the templates until then are all, as soon as one of them fits.

    Args:
        incumbent: takes the templates.
        charged: whether a budget in evaluations is charged for it, at most a quarter.
    """
    before = incumbent.charged
    for _ in incumbent.price_templates():
        if incumbent.should_stop() or (incumbent.left_s == 0.0 and incumbent.best is not None):
            break
    grid = Grid(*priced_so_far(incumbent.space))
    if incumbent.budget.evaluations is not None:
        most = incumbent.budget.evaluations // 4 if charged else 0
        incumbent.charged = min(incumbent.charged, before + most)
    incumbent.baselines = _baselines(incumbent.space, grid)
    return grid


def _baselines(space: PlanSpace, grid: Grid) -> dict[str, float | None]:
    """Step times of the best template, and of pure data parallelism where the templates have it; None if none fits."""
    seconds = np.where(grid.prices[:, 1] <= 0.0, grid.prices[:, 0], np.inf)
    is_dp = [shape.dp == space.meshes.devices for shape, _ in space.listed[: len(seconds)]]
    found = {"expert": float(seconds.min())} | ({"dp": float(seconds[is_dp].min())} if any(is_dp) else {})
    return {name: None if step_s == float("inf") else step_s for name, step_s in found.items()}


def search_expert(task: SearchTask) -> SearchResult:
    """The best template; see `Searcher`."""
    incumbent = Incumbent.begin(task, "expert")
    price_grid(incumbent)
    return incumbent.result(seed=task.seed)

"""Expert: prices every template of the tuned grid and returns the fastest that fits."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agents.incumbent import TEMPLATES, Incumbent
from agents.searcher import Budget, OnProgress, SearchResult, ShouldStop
from automap.plan import Plan
from automap.problem import Problem
from automap.space.space import Ints, PlanSpace
from automap.space.templates import templates


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The priced templates."""

    values: Ints
    """[templates, slots]"""
    prices: npt.NDArray[np.float64]
    """[templates, 2] see `PlanSpace.price`."""
    baselines: Mapping[str, float | None]
    """Step times: `dp` = pure data parallelism, `expert` = best template; None if none fits. No `dp` where the batch or
    the hints leave no such plan."""


def grid(space: PlanSpace, incumbent: Incumbent) -> Grid:
    """Prices the whole grid: every search is measured against it. At most a quarter of a budget is charged for it.

    Args:
        space: of the problem.
        incumbent: counts and keeps the best.
    """
    before = incumbent.charged
    baselines = {"expert": float("inf")}
    values: list[Ints] = []
    prices: list[npt.NDArray[np.float64]] = []
    listed = templates(space)
    while some := list(itertools.islice(listed, TEMPLATES)):
        values.append(np.array([plan for _, plan in some]))
        prices.append(incumbent.price(values[-1]))
        for (shape, _), (seconds, overflow) in zip(some, prices[-1].tolist(), strict=True):
            step_s = seconds if overflow <= 0.0 else float("inf")
            names = ("dp", "expert") if shape.dp == space.meshes.devices else ("expert",)
            baselines |= {name: min(step_s, baselines.get(name, float("inf"))) for name in names}
        if incumbent.stopped:
            break
    if incumbent.budget.evaluations is not None:
        incumbent.charged = min(incumbent.charged, before + incumbent.budget.evaluations // 4)
    return Grid(
        values=np.concatenate(values),
        prices=np.concatenate(prices),
        baselines={k: None if v == float("inf") else v for k, v in baselines.items()},
    )


def search_expert(
    problem: Problem,
    budget: Budget,
    *,
    seed: int,
    on_progress: OnProgress,
    should_stop: ShouldStop,
    start: Sequence[Plan] = (),
) -> SearchResult:
    """The best expert template; see `Searcher`."""
    space = PlanSpace(problem)
    incumbent = Incumbent(space, budget, searcher="expert", on_progress=on_progress, should_stop=should_stop)
    return incumbent.result(seed=seed, baselines=grid(space, incumbent).baselines)

"""The order in which skeletons are solved, and a searcher that only solves skeletons.

A skeleton is all decisions of a plan but its signatures (`agents.planners.skeletons`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np

from agents.incumbent import Incumbent
from agents.planners.descents import descend
from agents.planners.linearization import Propose
from agents.planners.promising_templates import promising_meshes
from agents.planners.skeletons import Mesh, SkeletonSearch
from agents.sampling.expert import price_grid
from agents.searcher import SearchResult, SearchTask
from automap.space.space import Values

TURNS = 3
"""In one of so many turns the best skeleton so far is improved further (assumed); in the others the next skeleton of
the list is solved for the first time."""


def search_skeletons(task: SearchTask, name: str, propose: Propose) -> SearchResult:
    """Searches with one planner alone: the skeletons of the plans to start from, then those of all templates.

    Args:
        task: what to search, see `agents.searcher.Searcher`.
        name: name of the planner, to which the plans are credited.
        propose: the planner.
    """
    incumbent = Incumbent.begin(task, name)
    given = incumbent.price_start(task)
    grid = price_grid(incumbent)
    fitting = np.flatnonzero(grid.prices[:, 1] <= 0.0)
    ranked = grid.values[fitting[np.argsort(grid.prices[fitting, 0], kind="stable")]]
    start = [*given, *map(tuple, np.concatenate([promising_meshes(incumbent.space, grid), ranked]).tolist())]
    if not start and incumbent.nearest is not None:
        start = [incumbent.nearest]
    run_skeletons(SkeletonSearch(incumbent, propose), start)
    return incumbent.result(seed=task.seed)


def run_skeletons(search: SkeletonSearch, start: Sequence[Values], in_breadth: int = 0) -> None:
    """Solves skeletons until the budget ends or nothing is left to try.

    Args:
        search: solves the skeletons and keeps the plans that it finds.
        start: plans whose skeletons are solved, the best first.
        in_breadth: number of these skeletons that are solved before the best one is improved further.
    """
    waiting = _by_mesh(search, start)
    for values in _cheap_first(search, waiting[:in_breadth]):
        if search.finished:
            return
        descend(search, values)
    del waiting[:in_breadth]
    for turn in itertools.count():
        if search.finished:
            return
        if waiting and turn % TURNS:
            descend(search, waiting.pop(0))
        elif not search.work_out_best() and not waiting:
            return


def _cheap_first(search: SkeletonSearch, plans: Sequence[Values]) -> list[Values]:
    """Sorts plans: the first one stays first, then come those without a middle axis.

    A middle axis multiplies the number of joint signatures, so such a solve takes as long as several others: on a
    mixture of experts 0.18 s of 0.29 s.
    """
    return [*plans[:1], *sorted(plans[1:], key=lambda values: search.space.shape(values).middle > 1)]


def _by_mesh(search: SkeletonSearch, plans: Sequence[Values]) -> list[Values]:
    """One plan of each skeleton, taking meshes in turn: the first skeleton of every mesh, then their second ones, and
    so on."""
    skeletons: dict[Values, Values] = {}
    for values in plans:
        skeletons.setdefault(values[: search.space.first.signature], values)
    turns: Counter[Mesh] = Counter()
    ranked = []
    for number, (skeleton, values) in enumerate(skeletons.items()):
        mesh = search.mesh(skeleton)
        # Meshes with stages of unlike size come a turn later: there are many, and for each all costs are computed anew.
        late = len(set(mesh[2:])) > 1
        ranked.append((turns[mesh] + late, number, values))
        turns[mesh] += 1
    return [values for _, _, values in sorted(ranked)]

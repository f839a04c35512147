"""The order in which skeletons are solved, and a searcher that only solves skeletons."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np

from agents.incumbent import Incumbent
from agents.planners.descents import descend
from agents.planners.linearization import Propose
from agents.planners.promising import promising_meshes
from agents.planners.skeletons import Mesh, SkeletonSearch
from agents.sampling.expert import price_grid
from agents.searcher import SearchResult, SearchTask
from automap.space.space import Values

TURNS = 3
"""One in this number of turns works out the best skeleton; the others solve a skeleton that is waiting."""


def search_skeletons(task: SearchTask, name: str, propose: Propose) -> SearchResult:
    """The best plan of a planner alone: skeletons of the plans given, then those of all templates; see `Searcher`."""
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
        search: what it finds.
        start: plans whose skeletons are solved, the best first.
        in_breadth: number of these skeletons that are solved before the best one is worked out further.
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
    """The same plans: the first one, then those without a middle axis. With one there are many joint signatures, so
    that a solve takes as long as several others: on a mixture of experts 0.18 s of 0.29 s."""
    return [*plans[:1], *sorted(plans[1:], key=lambda values: search.space.shape(values).middle > 1)]


def _by_mesh(search: SkeletonSearch, plans: Sequence[Values]) -> list[Values]:
    """The first plan of each skeleton: first the first skeletons of all meshes, then their second ones, and so on."""
    skeletons: dict[Values, Values] = {}
    for values in plans:
        skeletons.setdefault(values[: search.space.first.signature], values)
    turns: Counter[Mesh] = Counter()
    ranked = []
    for number, (skeleton, values) in enumerate(skeletons.items()):
        mesh = search.mesh(skeleton)
        # Stages of unlike size come a turn later: there are many such meshes, and each has costs of its own to compute.
        late = len(set(mesh[2:])) > 1
        ranked.append((turns[mesh] + late, number, values))
        turns[mesh] += 1
    return [values for _, _, values in sorted(ranked)]

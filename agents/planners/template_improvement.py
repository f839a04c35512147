"""Template improvement: the first phase of a portfolio search, before anything learns or anneals.

A template shards all models by one pattern and cuts them evenly, without virtual stages. `improve_templates` finds much
better plans within a fraction of a second, in two steps:

1. Changes of single decisions: around the best template of each mesh, it prices each other value of the cuts, the
   devices of a stage, virtual stages, micro-batches, batch shares, recomputation and ZeRO. Then it combines the changes
   that gain alone.
2. Signatures: elimination (`agents.planners.elimination`) solves the skeletons of the best plans so far, one mesh after
   the other. A skeleton is all decisions of a plan but the signatures.

Templates that fit and templates that nearly fit take turns (`ranked_in_turn`).

`refine` is a later phase, after the plans that the network proposes. It improves the best plans of some meshes further.
It uses no random numbers, so that searches with other seeds end at the same plan more often.

All plans that are priced count as evaluations of the budget. The network starts its proposals from the plans found and
from the templates (`agents.learning.proposals`), and annealing starts from the plans found. The search of skeletons
that is returned goes on with the skeletons that the network proposes (`agents.learning.proposed_skeletons`).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import numpy as np

from agents.incumbent import Incumbent
from agents.planners.chunk_moves import best_cuts
from agents.planners.elimination import propose
from agents.planners.skeleton_turns import run_skeletons
from agents.planners.skeletons import SkeletonSearch
from agents.sampling.expert import Grid
from automap.arrays import Floats
from automap.space.space import Ints, PlanSpace

SECONDS = 0.36
"""Seconds after which no further solve is begun, where the budget is not in evaluations alone (assumed)."""
SHARE = 0.25
"""Largest share of a budget that `improve_templates` takes."""
LOOKED_AROUND = 0.2
"""Largest part of this share for changes of single decisions (assumed); elimination has the rest."""
NEARLY_FITS = 0.2
"""Largest overflow, as a share of a device's memory, with which a template counts as promising; where none fits, it is
added to the least overflow of all. On problems of `benchmarks/network_gap.py` with scarce memory, templates with an
overflow of 0.08 and 0.17 led to the best plan, those with 0.5 and more did not. On a problem without a template that
fits, a GPT on 256 devices, the least overflow is 0.09, and a template with 0.27 led to the best plan."""
FITTING = 2.0
"""A plan that overflows by the share x of a device's memory is assumed to become slower by the share `FITTING` * x of
its step time when it is made to fit."""
FIRST_MESHES = 8
"""Number of meshes of which a skeleton is solved before the best one is improved further. With 4, searches of VGG-19
on 12 devices with random bandwidths ended 31 % slower: the templates of its best mesh are not among the four fastest.
"""
MESHES = 32
"""Largest number of meshes whose best templates are changed one decision at a time (assumed)."""
REFINED_LEAST = 100
"""Least number of evaluations that a budget must have left for `refine` (assumed). The annealing that would price these
plans instead changed none of the results of eight generated problems with 500 evaluations."""
REFINED_LEAST_IN_ORDERS = 500
"""The same where every pair of devices has its own bandwidth (assumed). The order of the devices in a pipeline decides
most there, and small budgets are left to the planners that search for it, which run later: after further solves and
refinement within 800 evaluations, GPT-2 XL on 7 A100 ended 2 % above what `spp` finds alone."""
REFINED_LEAST_S = 5.0
"""Least number of seconds that a budget must have left for `refine` (assumed)."""
REFINED_SHARE, REFINED_SHARE_S = 0.4, 0.1
"""Largest shares of the rest of a budget, in evaluations and in seconds, that `refine` takes. With 0.6 of the
evaluations, searches of 500 had too few left to divide pipelines (`agents.planners.pipeline_division`). When it took
0.6 seconds of any budget, searches of 16 seconds on a busy host found plans up to 1.6 % slower on two of five problems
(Llama-7B on devices of three kinds, Llama-3 8B with 32,768 tokens on 16 H100), and equally fast ones on the others."""
REFINED_SECONDS = 0.6
"""Seconds that `refine` may take in any case (assumed)."""
REFINED_MESHES = 8
"""Number of meshes whose best plans are solved again and whose neighbours are priced (assumed)."""
REFINED_PLANS = 6
"""Number of plans that are refined (assumed)."""
POLISHED_PLANS = 3
"""Number of refined plans whose joint signatures are polished (assumed)."""
OTHER_CUTS = 12
"""Number of other cuts with which the best plan is solved (assumed)."""
REFINED_NUMBERS = 6
"""Number of plans, each the best of its mesh with a number of virtual stages, that are refined where they are near the
best plan (assumed)."""


def improve_templates(incumbent: Incumbent, grid: Grid) -> SkeletonSearch:
    """Changes single decisions of the best templates, then solves the skeletons of the best plans.

    Args:
        incumbent: takes the plans, credited to `elimination`.
        grid: the templates with their prices.

    Returns:
        The search of skeletons, with the best plan of each skeleton that it has found.
    """
    incumbent.searcher = "elimination"
    left, left_s = incumbent.left, incumbent.left_s
    most = None if left is None else SHARE * left
    most_s = SECONDS if left is None else math.inf
    if left_s is not None:
        most_s = min(most_s, SHARE * left_s)

    def share(of: float) -> AbstractContextManager[None]:
        """A part of the budget of this phase."""
        evaluations = None if most is None else int(of * most)
        return incumbent.share(evaluations=evaluations, seconds=of * most_s if math.isfinite(most_s) else None)

    search = SkeletonSearch(incumbent, propose)
    with share(LOOKED_AROUND):
        meshes = _best_of_meshes(incumbent.space, grid)[:MESHES]
        for row in meshes.tolist():
            if incumbent.finished:
                break
            values, (seconds, overflow) = grid.values[row], grid.prices[row].tolist()
            search.look_around(tuple(values.tolist()), seconds, overflow)
    # Elimination has its own part of the budget, so that a template that takes long leaves it as much time.
    with share(1.0 - LOOKED_AROUND):
        # The budget may have ended before a mesh had its turn; its template is solved as it is.
        around = search.plans(None).joined(Grid(grid.values[meshes], grid.prices[meshes]))
        ranked = ranked_in_turn(around.prices)
        run_skeletons(search, list(map(tuple, around.values[ranked].tolist())), FIRST_MESHES)
    return search


def refine(search: SkeletonSearch, plans: Ints) -> Grid:
    """Improves the best plans of some meshes further, without random numbers; does nothing in small budgets.

    The best plan of each of the best meshes is solved again, and its neighbours are priced. Then plans near the best
    one are refined (`SkeletonSearch.refine`): first those with another number of virtual stages than the best plan of
    their mesh, then the best plans of the meshes.

    Args:
        search: the search of skeletons that `improve_templates` began.
        plans: [n, slots] further plans that are known, such as proposals.

    Returns:
        The best plans of the best skeletons, with their prices.
    """
    incumbent = search.incumbent
    left, left_s = incumbent.left, incumbent.left_s
    if is_too_short_to_refine(incumbent):
        return search.plans()
    incumbent.searcher = "elimination"
    with incumbent.share(
        evaluations=None if left is None else int(REFINED_SHARE * left),
        seconds=None if left_s is None else max(REFINED_SECONDS, REFINED_SHARE_S * left_s),
    ):
        search.begin_with(plans)
        for values in search.best_of_kinds()[:MESHES]:
            if search.finished:
                break
            search.share_out(values)
        for values in search.best_of_kinds()[:REFINED_MESHES]:
            if search.finished:
                break
            search.try_around(values)
        _refine_numbers(search)
        for polishes, count in ((True, 1), (False, REFINED_PLANS), (True, POLISHED_PLANS)):
            for values in search.best_of_kinds()[:count]:
                if search.finished:
                    break
                if not search.is_refined(values, polishes=polishes):
                    search.refine(values, polishes=polishes)
            if polishes:
                _solve_other_cuts(search)
    return search.plans()


def is_too_short_to_refine(incumbent: Incumbent) -> bool:
    """Whether the rest of the budget is too short for `refine`, and for skeletons beside those that are proposed."""
    left, left_s = incumbent.left, incumbent.left_s
    has_orders = incumbent.space.problem.cluster.bandwidth_GBps is not None
    least = REFINED_LEAST_IN_ORDERS if has_orders else REFINED_LEAST
    return (left is not None and left < least) or (left_s is not None and left_s < REFINED_LEAST_S)


def _solve_other_cuts(search: SkeletonSearch) -> None:
    """Solves the skeletons of the best plan with other cuts, those first that are fastest with its signatures.

    Another cut may gain only with other signatures: a rank with fewer units may shard its tensors in another way.
    """
    best = search.incumbent.best
    if best is None or search.space.shape(best).pp == 1:
        return
    search.allow(2 * OTHER_CUTS)
    for values in best_cuts(search.space, best, OTHER_CUTS):
        if search.finished:
            return
        # Two rounds: the first starts from the signatures of the old cut, which may suit the new one badly.
        search.solve(values, rounds=2)
    found = search.incumbent.best
    if found is not None and found != best and not search.finished:
        search.refine(found, polishes=True)


def _refine_numbers(search: SkeletonSearch) -> None:
    """Refines plans near the best one, with every number of virtual stages that such plans have."""
    for values in search.best_of_kinds(each_number=True)[:REFINED_NUMBERS]:
        if search.finished:
            break
        if search.is_near(values) and not search.is_refined(values, polishes=False):
            search.refine(values, polishes=False, each_number=True)


def ranked_in_turn(prices: Floats) -> Ints:
    """Ranks plans by taking turns between two rankings: the fastest that fits, and the most promising.

    Where memory is scarce, a plan that overflows a little often leads to a faster plan than those that fit, when other
    cuts, recomputation or signatures make it fit. Often this fails, so the two rankings alternate. Promising plans
    overflow by at most `NEARLY_FITS` more than the plan with the least overflow, and are sorted by their step time,
    which counts as longer the more they overflow (`FITTING`).

    Args:
        prices: [n, 2] step time in seconds and overflow of memory.

    Returns:
        [n] numbers of the plans, the best first.
    """
    seconds, overflow = prices[:, 0], np.maximum(prices[:, 1], 0.0)
    fits, hopeless = overflow <= 0.0, overflow > overflow.min(initial=np.inf) + NEARLY_FITS
    fastest = np.lexsort((np.where(fits, seconds, overflow), ~fits))
    promising = np.lexsort((np.where(hopeless, overflow, seconds * (1.0 + FITTING * overflow)), hopeless))
    in_turn = np.stack([fastest, promising], axis=1).ravel()
    return np.array(list(dict.fromkeys(in_turn.tolist())), dtype=np.int64)


def _best_of_meshes(space: PlanSpace, grid: Grid) -> Ints:
    """Rows of the best template of each mesh and number of stages, the best first."""
    order = ranked_in_turn(grid.prices)
    _, first = np.unique(grid.values[order, : space.first.micro_batches], axis=0, return_index=True)
    ranked: Ints = order[np.sort(first)]
    return ranked

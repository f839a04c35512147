"""Proposed skeletons: the network decides the skeletons of plans, and elimination finds the best signatures of each.

A plan of a real model has hundreds of decisions, and most of them are signatures. The decisions before the signatures
are its *skeleton*. Given a skeleton, elimination finds all signatures together in some hundredths of a second, a
*solve* (`agents.planners.elimination`), so the network need not decide them one by one. It only decides what
elimination cannot: the mesh, micro-batches, cuts, levels of recomputation and ZeRO stage.

The proposed skeletons take turns with skeletons of other meshes that are promising with the signatures of the best
plans so far (`agents.planners.promising_templates`). Where memory is scarce, the best mesh is often one whose templates
do not fit; where templates do not suit the model, it is often one that is good only with other signatures.

If few numbers divide the devices of a cluster or the batch, the best pipelines are also divided among unlike stages,
which the network cannot propose (`agents.planners.pipeline_division`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np

from agents.incumbent import Incumbent
from agents.learning.network import ProposalNetwork
from agents.learning.proposals import PROPOSALS, SIDE_BY_SIDE, Proposals, Proposed, fitting, note_first
from agents.learning.search_tree import SearchTree
from agents.planners.descents import descend
from agents.planners.pipeline_division import MOVED_S, divide_quickly, is_short
from agents.planners.promising_templates import FITTING, like_the_best, promising_meshes, split_axes
from agents.planners.skeletons import SkeletonSearch
from agents.planners.submeshes import has_few_pipelines
from agents.planners.template_improvement import is_too_short_to_refine
from agents.sampling.expert import Grid
from automap.arrays import Ints, Mask
from automap.bounds.known_plans import best_known
from automap.space.space import Values
from envs.decision import REFERENCE, Episodes
from envs.hybrid import HybridDecisions

SKELETONS = 24
"""Number of skeletons that the network proposes before whole plans (assumed)."""
SOLVED = 16
"""Largest number of these skeletons that are solved, and of those of `like_the_best`, the best first (assumed)."""
SHARE = 0.125
"""Largest share of a budget for skeletons, and the same for whole plans (assumed)."""
SKELETON_SECONDS, PLAN_SECONDS = 0.52, 0.05
"""Largest numbers of seconds for skeletons and for whole plans, so that a search spends less than a second on average
on all that follows the templates (`benchmarks/network_gap.py`). Where pipelines are divided, skeletons leave them the
seconds in which units and devices move."""
DIVIDED_SECONDS = 0.25
"""Seconds after which no further division of pipelines among unlike stages begins (assumed)."""
PROPOSED = 0.15
"""Largest share of the seconds for skeletons in which the network proposes them; the rest is for solves (assumed)."""
UNLIKE = 1.6
"""A template that splits work over a new set of axes is solved if it takes at most this many times the step time of the
best plan so far (assumed)."""
REACH = 1.6
"""The skeleton of a plan is solved if its promised step time is at most this many times that of the best plan so far.
Proposals of the network are also solved if no descent has begun with their shape. On the problems of
`benchmarks/network_gap.py`, 620 of 2,456 descents from known shapes began with slower plans: they took 11 of 64
seconds, and none found a better plan."""
FURTHER = 0.1
"""Share of the rest of the budget for further promising skeletons (assumed)."""
MOST_FURTHER = 64
"""Largest number of further skeletons with the signatures of good plans, and of those with templates' (assumed)."""


def propose_and_solve(search: SkeletonSearch, templates: Grid, network: ProposalNetwork, *, seed: int) -> list[Values]:
    """Lets a network propose skeletons, solves the best of them, and lets it propose whole plans.

    Args:
        search: the search of skeletons. Its incumbent takes every plan: proposals of the network, and the plans found
            by solving them, are credited to `dqn`, other plans to `elimination`.
        templates: the templates with their prices.
        network: rates the decisions.
        seed: seed of the noise on its ratings.

    Returns:
        The distinct plans that fit among the proposed whole plans and their completions, the best last.
    """
    incumbent, slots = search.incumbent, search.space.slots
    divides = has_few_pipelines(search.space) and not is_short(incumbent)
    promising = promising_meshes(search.space, templates)
    with _share(incumbent, SKELETON_SECONDS):
        _solve_unlike(search, promising)
    if incumbent.finished:
        return []
    alike = like_the_best(search.space, templates, search.plans(None).values, lambda: incumbent.finished)
    if incumbent.finished:
        return []
    known = known_before(search, templates, alike)
    with _share(incumbent, SKELETON_SECONDS - (MOVED_S if divides else 0.0)):
        if not incumbent.finished:
            skeletons = _proposed(search, known, network, seed)
            begun = {values[: search.space.first.schedule] for values in search.begun}
            near = alike.values[_within_reach(search, alike)]
            _solve(search, SOLVED, _near_or_new(search, skeletons, begun), _plans(near), templates=templates)
    if divides and not incumbent.finished:
        with _share(incumbent, math.inf):
            divide_quickly(incumbent, search.plans(None), math.inf if incumbent.left is not None else DIVIDED_SECONDS)
    with _share(incumbent, PLAN_SECONDS):
        if incumbent.finished:
            return []
        whole = proposals(incumbent, known.joined(search.plans()), network, seed, len(slots))
        # This is the network's first plan only if no skeleton has led to one that fits.
        note_first(incumbent, whole.go_on(1))
        whole.go_on(PROPOSALS - 1)
        incumbent.look_aheads += whole.look_aheads
        return fitting(whole.found)


def _proposed(search: SkeletonSearch, known: Grid, network: ProposalNetwork, seed: int) -> list[Values]:
    """Skeletons that a network proposes, those with the shortest expected step time first. The first one that the
    network decides is solved here."""
    incumbent = search.incumbent
    skeletons = proposals(incumbent, known, network, seed, search.space.first.signature)
    skeletons.go_on(1)
    solve_first(search, skeletons)
    left_s = incumbent.left_s
    with incumbent.share(seconds=None if left_s is None else PROPOSED * left_s):
        skeletons.go_on(SKELETONS - 1)
    incumbent.look_aheads += skeletons.look_aheads
    return by_promise(skeletons)


def known_before(search: SkeletonSearch, templates: Grid, alike: Grid) -> Grid:
    """The plans that are known when a network proposes skeletons: from these, completions take their decisions.

    Args:
        search: skeletons that have been solved.
        templates: the templates with their prices.
        alike: the plans of `like_the_best`.

    Returns:
        The best templates (`best_known`), `alike`, and the best solved plans, all with their prices.
    """
    space = search.space
    chosen = best_known(space, *templates, search.incumbent.table.first.time_s * REFERENCE)
    best = Grid(templates.values[chosen], templates.prices[chosen])
    return best.joined(alike).joined(search.plans())


def _share(incumbent: Incumbent, seconds: float) -> AbstractContextManager[None]:
    """`SHARE` of the budget; of a budget in seconds alone at most `seconds`."""
    left, left_s = incumbent.left, incumbent.left_s
    if left is not None:
        return incumbent.share(evaluations=int(SHARE * left), seconds=None if left_s is None else SHARE * left_s)
    return incumbent.share(evaluations=None, seconds=seconds if left_s is None else min(seconds, SHARE * left_s))


def solve_further(search: SkeletonSearch, templates: Grid) -> None:
    """Solves further promising skeletons within the share `FURTHER` of the budget; does nothing in small budgets.

    Skeletons with the signatures of the best plans so far, and those with the signatures of templates, take turns.

    Args:
        search: the skeletons that were solved; its incumbent takes the plans, credited to `elimination`.
        templates: the templates with their prices.
    """
    incumbent = search.incumbent
    left, left_s = incumbent.left, incumbent.left_s
    if is_too_short_to_refine(incumbent):
        return
    with incumbent.share(
        evaluations=None if left is None else int(FURTHER * left),
        seconds=None if left_s is None else FURTHER * left_s,
    ):
        alike = like_the_best(search.space, templates, search.plans(None).values, lambda: incumbent.finished)
        promising = promising_meshes(search.space, templates)
        _solve(search, MOST_FURTHER, (), _plans(alike.values), _plans(promising), templates=templates)


def _solve(
    search: SkeletonSearch,
    most: int,
    proposed: Iterable[Values],
    *others: Iterable[Values],
    templates: Grid,
) -> None:
    """Solves the skeletons of several lists of plans, taking the lists in turn, until the budget ends.

    No skeleton is solved twice. Every second proposal is the first one with its mesh, micro-batches and virtual stages,
    because proposals that have these in common often lead to almost the same plan. After each solve, the template of
    the best plan is solved too, see `_template_of_best`.

    Args:
        search: the search of skeletons.
        most: largest number of skeletons of each list.
        proposed: plans that a network has proposed, the best first.
        others: further lists of plans, the best first.
        templates: templates with their prices.
    """
    search.allow((1 + len(others)) * most)
    plans = [_in_turn(search, list(proposed)), *map(iter, others)]
    for _ in range(most):
        for number, some in enumerate(plans):
            if search.finished:
                return
            values = next((one for one in some if _is_open(search, one)), None)
            if values is not None:
                search.taken.add(values[: search.space.first.signature])
                search.incumbent.searcher = "elimination" if number else "dqn"
                descend(search, values)
            template = _template_of_best(search, templates)
            if template is not None and not search.finished:
                search.incumbent.searcher = "elimination"
                search.grant(1)
                descend(search, template)


def _template_of_best(search: SkeletonSearch, templates: Grid) -> Values | None:
    """The most promising template with the shape and the ZeRO stage of the best plan; None if a descent began with it.

    A descent uses costs that are linear at its first plan, so another first plan may lead to another result. The
    descent to the best plan may have begun with signatures of another shape, or with a template with another ZeRO
    stage.
    """
    best, values, first = search.incumbent.best, templates.values, search.space.first
    if best is None:
        return None
    of_shape = (values[:, : first.schedule] == best[: first.schedule]).all(axis=1)
    rows = np.flatnonzero(of_shape & (values[:, first.zero] == best[first.zero]))
    if not len(rows):
        return None
    seconds, overflow = templates.prices[rows].T
    best_row = rows[np.argmin(seconds * (1.0 + FITTING * np.maximum(overflow, 0.0)))]
    template: Values = tuple(values[best_row].tolist())
    return None if template in search.begun else template


def _within_reach(search: SkeletonSearch, plans: Grid) -> Mask:
    """[n] whether plans promise a step time of at most `REACH` times that of the best plan so far."""
    seconds, overflow = plans.prices.T
    found: Mask = seconds * (1.0 + FITTING * np.maximum(overflow, 0.0)) <= REACH * search.incumbent.best_s
    return found


def _near_or_new(search: SkeletonSearch, proposed: Sequence[Values], begun: Collection[Values]) -> list[Values]:
    """The proposals that are within reach, and the first proposal of each shape with which no descent has begun.

    Args:
        search: the search of skeletons.
        proposed: the proposals, the best first.
        begun: values of the slots of the shape of all plans from which descents have begun.
    """
    rows = np.array(proposed, dtype=np.int64).reshape(len(proposed), len(search.space.slots))
    near = _within_reach(search, Grid(rows, search.space.price(rows)))
    found, shapes = [], set(begun)
    for values, is_near in zip(proposed, near.tolist(), strict=True):
        shape = values[: search.space.first.schedule]
        if is_near or shape not in shapes:
            found.append(values)
        shapes.add(shape)
    return found


def _is_open(search: SkeletonSearch, values: Values) -> bool:
    """Whether the skeleton of a plan was not taken before, and no descent has ended with this plan."""
    return values[: search.space.first.signature] not in search.taken and values not in search.ended


def _in_turn(search: SkeletonSearch, plans: Sequence[Values]) -> Iterator[Values]:
    """The open plans: alternately the first one, and the first one with a shape that no taken skeleton has."""
    shape = slice(search.space.first.schedule)
    for wants_new in itertools.cycle((False, True)):
        taken = {skeleton[shape] for skeleton in search.taken} if wants_new else ()
        left = [one for one in plans if _is_open(search, one)]
        if not left:
            return
        yield next((one for one in left if one[shape] not in taken), left[0])


def _solve_unlike(search: SkeletonSearch, promising: Ints) -> None:
    """Solves the most promising skeleton that splits work over a new set of axes, if it is near the best plan.

    All templates with these axes may be slow although other signatures are fast. The signatures found here are then
    tried on all other meshes with these axes.

    Args:
        search: the skeletons that are solved.
        promising: [n, slots] templates, most promising first.
    """
    incumbent = search.incumbent
    incumbent.searcher = "elimination"
    for values in _plans(promising):
        if search.finished:
            return
        if split_axes(search.space, values) not in search.split:
            seconds, overflow = search.space.price(np.array([values]))[0].tolist()
            if seconds * (1.0 + FITTING * max(overflow, 0.0)) <= UNLIKE * incumbent.best_s:
                search.allow(1)
                descend(search, values)
            return


def _plans(rows: Ints) -> Iterator[Values]:
    """The plans of [n, slots] rows, one by one: there may be tens of thousands, of which only the first are needed."""
    return (tuple(row.tolist()) for row in rows)


def proposals(incumbent: Incumbent, known: Grid, network: ProposalNetwork, seed: int, decided: int) -> Proposals:
    """Proposals of a network that decides the first `decided` slots.

    Args:
        incumbent: takes every plan that is found, credited to `dqn`.
        known: plans that are known at first, with their prices.
        network: rates the decisions.
        seed: seed of the noise on its ratings.
        decided: number of slots that the network decides; the others follow the best known plan.
    """
    incumbent.searcher = "dqn"
    episodes = Episodes(HybridDecisions(incumbent.space), SIDE_BY_SIDE, incumbent.table, known=known)
    for number in range(episodes.count):
        episodes.confine(number, None, (0, decided))
    episodes.begin(np.ones(episodes.count, dtype=np.bool_))
    tree = SearchTree(episodes, lambda: incumbent.best_s)
    return Proposals(incumbent, episodes, tree, network, seed=seed)


def by_promise(skeletons: Proposals) -> list[Values]:
    """The distinct plans, those first with the shortest step time that the network expects."""
    return list(dict.fromkeys(one.values for one in sorted(skeletons.found, key=lambda one: one.expected_s)))


def solve_first(search: SkeletonSearch, skeletons: Proposals) -> None:
    """Solves the first skeleton and notes the result as the network's first plan; later proposals know this plan.

    If no time is left for the solve, or for all decisions of the skeleton, the first plan is the best completion of the
    decisions that were taken.
    """
    if not skeletons.found or search.finished:
        found, is_begun = list(skeletons.found), bool(skeletons.episodes.num_decisions[0])
        if not found and is_begun and (seen := skeletons.episodes.best_completion(0)) is not None:
            values, seconds = seen
            search.incumbent.add_from("dqn", values, seconds, 0.0)
            found.append(Proposed(values, seconds, 0.0, seconds))
        note_first(search.incumbent, found)
        return
    search.allow(1)
    decided = skeletons.found[0].values
    search.taken.add(decided[: search.space.first.signature])
    values = descend(search, decided)
    seconds, overflow = search.space.price(np.array([values]))[0].tolist()
    skeletons.episodes.known.add(values, (seconds, overflow))
    note_first(search.incumbent, [*skeletons.found, Proposed(values, seconds, overflow, seconds)])

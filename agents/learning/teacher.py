"""Teacher: the portfolio finds the plans from which the network learns, one for each generated problem.

Many decisions of a plan that a search has found do not matter: they were drawn at random, and no later step changed
them. The network should learn only from decisions that matter. So decisions that hardly change the step time are put
back to those of a template (`simplify`). Units: seconds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from agents.incumbent import Incumbent
from agents.learning.checkpoint import network_digest, read_network
from agents.learning.labels import Label, drawn_version, is_better
from agents.learning.network import ProposalNetwork
from agents.learning.preparation import opened
from agents.learning.problems import GeneratedProblem
from agents.learning.proposals import PROPOSALS, SIDE_BY_SIDE, fitting, propose
from agents.learning.search_tree import SearchTree
from agents.sampling.expert import Grid, price_grid
from agents.searcher import Budget, search
from automap.errors import NothingFits
from automap.space.space import Ints, PlanSpace, Values
from envs.decision import Episodes
from envs.hybrid import HybridDecisions

MAX_SLOWER = 0.001
"""How much slower a plan may become while it is simplified, as a share of its step time. The price itself is off by
several per cent, and searches with other seeds end further apart than this (chosen by hand)."""
SHOWN = 16
"""Number of a network's best proposals with which a search begins, as in the portfolio itself."""


@dataclass(frozen=True, slots=True)
class Proposer:
    """A network, other than the shipped one, from whose proposals searches begin."""

    network: ProposalNetwork
    """The network."""
    digest: str
    """What tells it from others, see `agents.learning.checkpoint.network_digest`."""

    @staticmethod
    def read(folder: Path) -> Proposer:
        """The network of a checkpoint.

        Raises:
            ProblemError: it cannot be read.
        """
        return Proposer(read_network(folder), network_digest(folder))

    def plans(self, space: PlanSpace, budget: Budget, seed: int, known: Sequence[Values]) -> list[Values]:
        """The best plans that the network proposes, the best first.

        Args:
            space: plan space of the problem.
            budget: limit on seconds or evaluations.
            seed: seed of the noise on its ratings.
            known: plans that are known beside the templates.
        """
        incumbent = Incumbent(space, budget, searcher="dqn")
        episodes = Episodes(HybridDecisions(space), SIDE_BY_SIDE, incumbent.table, known=opened(space))
        for values in known:
            seconds, overflow = space.price(np.array([values]))[0].tolist()
            episodes.known.add(values, (seconds, overflow))
        tree = SearchTree(episodes, lambda: incumbent.best_s)
        found = propose(incumbent, episodes, tree, self.network, seed=seed, most=PROPOSALS)
        return fitting(found)[::-1][:SHOWN]


def label(
    generated: GeneratedProblem,
    budget: Budget,
    seed: int,
    proposer: Proposer | None = None,
    before: Label | None = None,
) -> Label:
    """Searches a problem with the portfolio and simplifies the plan found.

    Args:
        generated: the problem.
        budget: seconds or evaluations of the search.
        seed: seed of the search.
        proposer: network from whose proposals, too, the search begins.
        before: what is known of the problem; the search begins from its plan, and it is kept where no better is found.
    """
    began = time.monotonic()
    space = PlanSpace(generated.problem)
    if before is not None and not before.is_of(generated):
        before = None
    known = [before.values] if before is not None and before.values is not None else []
    digest = None
    if proposer is not None:
        known += proposer.plans(space, budget, seed, known)
        digest = proposer.digest
    found = Label(
        seed=generated.seed,
        version=drawn_version(generated.seed),
        digest=generated.digest,
        fits=False,
        seconds=0.0,
        network=digest,
    )
    with contextlib.suppress(NothingFits):
        found = _searched(space, found, budget, seed, known)
    if before is not None and not is_better(found, before):
        found = replace(before, network=digest)
    return replace(found, seconds=time.monotonic() - began)


def _searched(space: PlanSpace, empty: Label, budget: Budget, seed: int, start: Sequence[Values]) -> Label:
    """The label of what the portfolio finds in the space, from the plans `start`; `empty` where that is nothing.

    Raises:
        NothingFits: it finds nothing that fits.
    """
    found = search(space.problem, budget, seed=seed, start=[space.decode(values) for values in start])
    plans = found.unlike(2)
    values = space.encode(plans[0])
    is_outside = values is None
    if is_outside and len(plans) > 1:
        # A planner's plan may lie outside the space. The next one is of the space.
        values = space.encode(plans[1])
    if values is None:
        return empty
    values = simplify(space, values, price_grid(Incumbent(space, Budget(), searcher="expert")))
    by = found.record.found_by
    return replace(
        empty,
        fits=True,
        values=values,
        step_time_s=float(space.price(np.array([values]))[0, 0]),
        expert_s=found.record.baselines["expert"],
        lower_bound_s=found.record.lower_bound_s,
        # The plan of a label begins the list, and is no better than itself.
        found_by=None if is_outside else "dqn" if by == "start" else by,
        proven=found.proven and not is_outside,
    )


def simplify(space: PlanSpace, values: Values, grid: Grid, max_slower: float = MAX_SLOWER) -> Values:
    """A plan that differs from a template in those decisions only that matter.

    The template is the one that fits and agrees with the plan in most decisions. Where the plan differs, its decision
    is put back to the template's as long as the plan fits and becomes no slower than allowed, those that cost least
    first.

    Args:
        space: space of the plan.
        values: the plan.
        grid: templates with their prices.
        max_slower: how much slower the result may be in total, as a share of the plan's step time.

    Returns:
        the values of the simplified plan; `values` where no template fits.
    """
    fits = np.flatnonzero(grid.prices[:, 1] <= 0.0)
    if not len(fits):
        return values
    current = np.array(values)
    limit_s = (1.0 + max_slower) * space.price(current[None])[0, 0]
    ordered = fits[np.argsort(grid.prices[fits, 0], kind="stable")]
    template = grid.values[ordered[(grid.values[ordered] != current).sum(axis=1).argmin()]]
    while True:
        differing = np.flatnonzero(current != template)
        singles = _put_back(space, current, template, [[slot] for slot in differing.tolist()])
        costs = _seconds(space, singles, limit_s)
        cheap = np.flatnonzero(costs <= limit_s)
        if not len(cheap):
            return tuple(current.tolist())
        # Several at once, as long as they are cheap together too; the first is, alone.
        slots = [int(differing[i]) for i in cheap[np.argsort(costs[cheap], kind="stable")]]
        several = _put_back(space, current, template, [slots[:count] for count in range(1, len(slots) + 1)])
        current = several[np.flatnonzero(_seconds(space, several, limit_s) <= limit_s)[-1]]


def _put_back(space: PlanSpace, current: Ints, template: Ints, choices: Sequence[Sequence[int]]) -> Ints:
    """[choices, slots] the legal plans near to `current` with the template's values in the slots of each choice.

    A choice that brings the plan no nearer to the template gives `current` with a value of -1, which marks it as not to
    be priced.
    """
    distance = (current != template).sum()
    rows = np.repeat(current[None], len(choices), axis=0)
    for row, slots in zip(rows, choices, strict=True):
        row[list(slots)] = template[list(slots)]
        row[:] = space.repair(row.tolist())
        if (row != template).sum() >= distance:
            row[0] = -1
    return rows


def _seconds(space: PlanSpace, rows: Ints, limit_s: float) -> np.ndarray:
    """[plans] step times; infinite where a plan does not fit or has a value of -1."""
    found = np.full(len(rows), np.inf)
    legal = np.flatnonzero(rows[:, 0] >= 0)
    if len(legal):
        prices = space.price(rows[legal])
        found[legal] = np.where(prices[:, 1] <= 0.0, prices[:, 0], np.inf)
    return found

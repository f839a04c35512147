"""Teacher: the portfolio labels generated problems with the best plan that it finds.

Many decisions of a plan that a search found do not matter: they were drawn at random and nothing corrected them. A
label should teach only what matters, so decisions without influence are put back to those of a template (`simplify`).
Units: seconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from agents.incumbent import Incumbent
from agents.learning.labels import Label, drawn_version
from agents.learning.problems import GeneratedProblem
from agents.sampling.expert import Grid, price_grid
from agents.searcher import Budget, search
from automap.errors import NothingFits
from automap.plan import Plan
from automap.space.space import Ints, PlanSpace, Values

MAX_SLOWER = 0.001
"""How much slower a plan may become while it is simplified, as a share of its step time. The price itself is off by
several per cent, and searches with other seeds end further apart than this (chosen by hand)."""


def label(generated: GeneratedProblem, budget: Budget, seed: int, start: Sequence[Plan] = ()) -> Label:
    """Searches a problem with the portfolio and simplifies the plan found.

    Args:
        generated: the problem.
        budget: seconds or evaluations of the search.
        seed: seed of the search.
        start: plans from which the search begins, such as those that a network found.
    """
    began = time.monotonic()
    nothing = Label(
        seed=generated.seed, version=drawn_version(generated.seed), digest=generated.digest, fits=False, seconds=0.0
    )
    try:
        found = search(generated.problem, budget, seed=seed, start=start)
    except NothingFits:
        return replace(nothing, seconds=time.monotonic() - began)
    space = PlanSpace(generated.problem)
    values = space.encode(found.plan)
    assert values is not None, "generated problems allow synchronous plans only"
    grid = price_grid(Incumbent(space, Budget(), searcher="expert"))
    values = simplify(space, values, grid)
    return replace(
        nothing,
        fits=True,
        values=values,
        step_time_s=float(space.price(np.array([values]))[0, 0]),
        expert_s=found.record.baselines["expert"],
        lower_bound_s=found.record.lower_bound_s,
        found_by=found.record.found_by,
        proven=found.proven,
        seconds=time.monotonic() - began,
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

    A choice that brings the plan no nearer to the template gives `current` with a value of -1, which nobody prices.
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

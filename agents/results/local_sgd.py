"""Synced: the best plans of a search, each with the best of the sync modes that the user allows.

The space decides nothing of these: what a mode saves follows in closed form (`automap.price.local_sgd`), and which
one is
best from the plan alone. No mode goes with ZeRO, so every plan is looked at without it as well. And since plans with
many replicas may be good only if their gradients need not be reduced, the templates that are best then are looked at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from agents.results.diverse_top_k import MOST, Candidate, Found, Ranked, candidate
from automap.plan import Sync
from automap.price.local_sgd import Silent, best_sync, evaluate_plan
from automap.space.space import PlanSpace
from automap.space.templates import templates

TEMPLATES = 256
"""That are priced at a time."""

Synced = tuple[Found, Sync]
"""A plan of a space, who found it, and how its replicas stay together."""


def with_modes(space: PlanSpace, found: Iterable[Found]) -> list[Candidate[Synced]]:
    """Plans that fit, each with its best mode, the fastest first.

    Args:
        space: of the plans.
        found: the best ones as if they were synchronous, the first of which fits.
    """
    names = dict(_with_and_without_zero(space, found))
    for values, found_by in _best_silent(space):
        names.setdefault(values, found_by)
    candidates = []
    for values, found_by in names.items():
        plan, lowered = space.decode(values), space.lowered(values)
        sync = best_sync(plan, lowered, space.evaluator)
        outcome = evaluate_plan(replace(plan, sync=sync), lowered, space.evaluator)
        step_s = outcome.step_time_s if outcome.fits else math.inf
        candidates.append(candidate(plan, step_s, ((values, found_by), sync)))
    return sorted((c for c in candidates if c.step_time_s < math.inf), key=lambda c: c.step_time_s)


def _with_and_without_zero(space: PlanSpace, found: Iterable[Found]) -> Iterator[Found]:
    plans = list(found)
    yield from plans
    given = {values for values, _ in plans}
    for values, found_by in plans:
        bare = space.repair([0 if slot.kind == "zero" else v for slot, v in zip(space.slots, values, strict=True)])
        if bare not in given:
            yield bare, found_by


def _best_silent(space: PlanSpace) -> list[Found]:
    """The best unlike templates of several replicas without ZeRO, if no gradients had to be reduced."""
    silent = PlanSpace(space.problem, Silent(space.problem, space.evaluator.tables), limits=space.limits)
    ranked, best, best_s = Ranked(silent), None, math.inf
    listed = (v for shape, v in templates(silent) if shape.replicas > 1 and v[silent.zero_slot] == 0)
    while some := list(itertools.islice(listed, TEMPLATES)):
        values = np.array(some, dtype=np.int64)
        priced = silent.price(values)
        times = np.where(priced[:, 1] <= 0.0, priced[:, 0], np.inf)
        ranked.take(values, times, "expert")
        if times.min() < best_s:
            best, best_s = some[int(times.argmin())], float(times.min())
    return [] if best is None else ranked.best(MOST, best)

"""Local SGD: the best plans of a search, each with the best of the sync modes that the user allows.

The plan space holds synchronous plans only: what another mode saves follows in closed form
(`automap.price.local_sgd`), and the best mode follows from the plan alone. No mode goes with ZeRO, so every plan is
also considered without it. Plans with many replicas may be good only if their gradients need not be reduced, so the
templates that are best in this case are considered as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from agents.results.diverse_top_k import MOST, Candidate, DiverseTopK, Found, candidate
from automap.plan import Sync
from automap.price.local_sgd import Silent, best_sync, evaluate_plan
from automap.space.space import PlanSpace
from automap.space.templates import templates

TEMPLATES = 256
"""Number of templates that are priced in one call (assumed)."""

PlanWithSync = tuple[Found, Sync]
"""A plan, the searcher that found it, and how its replicas are kept together."""


def with_sync_modes(space: PlanSpace, found: Iterable[Found]) -> list[Candidate[PlanWithSync]]:
    """The plans that fit, each with its best sync mode, the fastest first.

    Args:
        space: space of the plans.
        found: the best synchronous plans; the first one fits.
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
    """The plans, and each without ZeRO."""
    plans = list(found)
    yield from plans
    given = {values for values, _ in plans}
    for values, found_by in plans:
        bare = space.repair([0 if slot.kind == "zero" else v for slot, v in zip(space.slots, values, strict=True)])
        if bare not in given:
            yield bare, found_by


def _best_silent(space: PlanSpace) -> list[Found]:
    """The best unlike templates with replicas and without ZeRO, if gradients were never reduced."""
    silent = PlanSpace(space.problem, Silent(space.problem, space.evaluator.tables), limits=space.limits)
    diverse, best, best_s = DiverseTopK(silent), None, math.inf
    listed = (v for shape, v in templates(silent) if shape.replicas > 1 and v[silent.first.zero] == 0)
    while some := list(itertools.islice(listed, TEMPLATES)):
        values = np.array(some, dtype=np.int64)
        priced = silent.price(values)
        times = np.where(priced[:, 1] <= 0.0, priced[:, 0], np.inf)
        diverse.add(values, times, "expert")
        if times.min() < best_s:
            best, best_s = some[int(times.argmin())], float(times.min())
    return [] if best is None else diverse.best(MOST, best)

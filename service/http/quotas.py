"""What a tenant may still submit, as RateLimit headers (draft-ietf-httpapi-ratelimit-headers) and as refusals.

Units: seconds.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from fastapi import HTTPException

from agents.searcher import Budget
from automap.errors import ProblemError
from service.jobs.job_changes import DAY_S
from service.jobs.store import Store
from service.problems import limit
from service.settings import Settings

RETRY_S = 30
"""Seconds after which a client should try again when the queue is full (assumed)."""
PACE = 100
"""Evaluations a second with which the reserved time of a budget in evaluations is computed. The portfolio prices 100 to
6,000 (measured on two cores: Llama-2 70B where it fits nowhere, GPT-2 XL). At the end of a job the time that it has
really used is charged."""

KEPT_SHARE = 0.25
"""Share of the places for uploads that is kept for tenants that send none (assumed)."""


class Places:
    """Places for uploads, which tenants share so that slow uploads of one do not take all of them. Not for threads.

    Args:
        total: number of places.
        kept: of these, the number that only a tenant gets which has no other.
    """

    def __init__(self, total: int, kept: int) -> None:
        self._total, self._kept = total, kept
        self._taken = Counter[str]()

    @contextlib.contextmanager
    def one(self, tenant: str) -> Iterator[None]:
        """A context in which one upload of a tenant takes place.

        Raises:
            HTTPException: 503, there is none for this tenant.
        """
        own, free = self._taken[tenant], self._total - self._taken.total()
        if free <= (self._kept if own else 0):
            value = f"{own} of this tenant" if free else f"{self._total} at a time"
            repair = "Send it again shortly; nothing was stored."
            document = limit(503, "Too many uploads at a time", field="uploads", value=value, repair=repair)
            raise HTTPException(503, document, {"Retry-After": "5"})
        self._taken[tenant] += 1
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            self._taken += Counter()  # forgets tenants that have none


def search_s(budget: Budget, settings: Settings) -> float:
    """Seconds that a search takes from the tenant's day when it is accepted; at its end its own time counts.

    Raises:
        ProblemError: no search may take so long.
    """
    if budget.evaluations is not None:
        return min(settings.max_budget_s, budget.evaluations / PACE)
    assert budget.seconds is not None
    if budget.seconds > settings.max_budget_s:
        repair = f"Give at most {settings.max_budget_s:g}s, or ask the operator to raise AUTOMAP_MAX_BUDGET_S."
        raise ProblemError("too long", field="budget", value=str(budget), repair=repair)
    return budget.seconds


def check(store: Store, settings: Settings, reserve_s: float, *, num_jobs: int) -> None:
    """Refuses a job that the tenant may not submit now.

    Args:
        store: the tenant's store.
        settings: limits.
        reserve_s: seconds that the job and its members will search.
        num_jobs: how many they are.

    Raises:
        ProblemError: the job takes more than the tenant may have at all, so that waiting does not help.
        HTTPException: 429, with the seconds after which another request may be admitted; 507, nothing more may be
            stored.
    """
    if num_jobs > settings.max_queued_jobs:
        repair = f"Give at most {settings.max_queued_jobs}, or ask the operator to raise AUTOMAP_MAX_QUEUED_JOBS."
        raise ProblemError("more workers than jobs that may wait", field="workers", value=num_jobs, repair=repair)
    if reserve_s > settings.max_search_s_per_day:
        most = f"{settings.max_search_s_per_day:g}"
        repair = f"Take at most {most} s in all, or ask the operator to raise AUTOMAP_MAX_SEARCH_S_PER_DAY."
        raise ProblemError(
            "more seconds of search than a tenant has in a day", field="budget", value=f"{reserve_s:g} s", repair=repair
        )
    waiting = store.num_waiting()
    if waiting + num_jobs > settings.max_queued_jobs:
        document = limit(
            429,
            "Too many jobs are waiting",
            f"{waiting} wait, this one is {num_jobs}, and {settings.max_queued_jobs} may.",
            field="workers" if num_jobs > 1 else "jobs",
            value=f"{num_jobs} beside {waiting} that wait",
            repair="Send it again when some have begun, or cancel some.",
        )
        raise _refusal(document, RETRY_S, headers(store, settings))
    searched_s = store.searched_s()
    if searched_s + reserve_s > settings.max_search_s_per_day:
        left = max(0, math.floor(settings.max_search_s_per_day - searched_s))
        document = limit(
            429,
            "The day's searches are used up",
            f"{left} of {settings.max_search_s_per_day:g} seconds of search are left today (UTC), and this job takes "
            f"{reserve_s:g}. Jobs that end give back what they did not use.",
            field="budget",
            value=f"{reserve_s:g} s",
            repair=f"Give it at most {left} s in all, or send it tomorrow." if left else "Send it tomorrow.",
        )
        raise _refusal(document, _to_midnight_s(), headers(store, settings))
    if store.stored_bytes() >= settings.max_stored_bytes:
        raise full(store, settings)


def full(store: Store, settings: Settings) -> HTTPException:
    """The error of a tenant who has stored as much as it may, to be raised by the caller."""
    document = limit(
        507,
        "Nothing more can be stored",
        field="stored_bytes",
        value=f"{store.stored_bytes()} of {settings.max_stored_bytes} bytes",
        repair="Delete models or jobs, or ask the operator to raise AUTOMAP_MAX_STORED_BYTES.",
    )
    return HTTPException(507, document)


def headers(store: Store, settings: Settings) -> dict[str, str]:
    """The RateLimit headers of an answer to a submission."""
    jobs, seconds = settings.max_queued_jobs, math.floor(settings.max_search_s_per_day)
    jobs_left = max(0, jobs - store.num_waiting())
    seconds_left = max(0, math.floor(seconds - store.searched_s()))
    return {
        "RateLimit-Policy": f'"queued-jobs";q={jobs}, "search-seconds";q={seconds};w={DAY_S}',
        "RateLimit": f'"queued-jobs";r={jobs_left}, "search-seconds";r={seconds_left};t={_to_midnight_s()}',
    }


def _to_midnight_s() -> int:
    return math.ceil(DAY_S - time.time() % DAY_S)


def _refusal(document: dict[str, Any], retry_s: int, limits: dict[str, str]) -> HTTPException:
    return HTTPException(429, document, {"Retry-After": str(retry_s), **limits})

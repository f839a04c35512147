"""The order of jobs: which one a delivery of RQ begins.

The tenant with the fewest runs under way comes first, then the one whose last job began longest ago; within a tenant
high priorities come first, then the oldest. This is decided from the records in the store, so the order of deliveries
does not matter. Knows nothing of what a job does. Units: seconds.
"""

from __future__ import annotations

import math
from typing import Any

from rq.job import Job as Delivery

from agents.searcher import Budget
from service.jobs import delivery as deliveries
from service.jobs.delivery import Run
from service.jobs.job_changes import TURNS
from service.jobs.run_job import JobRequest
from service.jobs.store import Store

OVERHEAD_S = 120
"""Seconds for import, set-up and writing, beside search and trials."""


def time_limit_s(request: JobRequest, max_budget_s: float) -> int:
    """Seconds that a run may take: budget (`max_budget_s` if it is in evaluations), trials and `OVERHEAD_S`."""
    seconds = Budget.parse(request.budget).seconds
    trials_s = 0.0 if request.trials is None else request.trials.seconds
    return math.ceil((max_budget_s if seconds is None else seconds) + trials_s) + OVERHEAD_S


def begin_next(store: Store, delivery: Delivery) -> Run | None:
    """Begins the next job for a delivery, which notes that in the same transaction; None where no job waits.

    Args:
        store: the store of any tenant.
        delivery: what RQ has brought.
    """
    while (tenant := _next(store)) is not None and (job_id := tenant.next_waiting()) is not None:
        name = tenant.tenant

        def note(pipe: object, token: int, name: str = name, job_id: str = job_id) -> None:
            deliveries.note(pipe, delivery, Run(tenant=name, job_id=job_id, token=token))

        tenant.begin(job_id, note)
        # What the delivery says counts: a lost answer of Redis may have looked like another worker that was faster.
        if (run := deliveries.noted(delivery)) is not None:
            return run
    return None


def _next(store: Store) -> Store | None:
    """The tenant whose turn it is, of those with jobs that wait."""
    client: Any = store.client  # redis-py types its replies too widely
    turns = [(store.of(name.decode()), at) for name, at in client.zrange(TURNS, 0, -1, withscores=True)]
    with client.pipeline(transaction=False) as pipe:
        for tenant, _ in turns:
            tenant.count(pipe)
        counts = pipe.execute()
    ready = [
        (active - waiting, at, tenant)
        for (tenant, at), waiting, active in zip(turns, counts[::2], counts[1::2], strict=True)
        if waiting
    ]
    return min(ready, key=lambda turn: turn[:2])[2] if ready else None


def num_missing(store: Store) -> int:
    """Number of jobs that wait without a delivery in the queue.

    A delivery that a worker has just taken counts as missing too. So deliveries are really lost, for instance by the
    death of a worker, only if two calls in a row find them missing.
    """
    waiting = sum(store.of(tenant).num_waiting() for tenant in store.tenants())
    return max(0, waiting - len(deliveries.queue(store.client)))


def recover(store: Store) -> int:
    """Puts every job whose run was under way back into the queue, after a restart of the whole service.

    It ends runs of workers that are alive, so it is only for a Redis whose workers are all gone (the private one). A
    job whose record cannot be read has failed.

    Returns:
        Number of jobs that wait then.
    """
    count = 0
    for tenant in store.tenants():
        own = store.of(tenant)
        for job in own.active():
            if job.request is None:
                own.fail(job.id, None, job.problem or {})
                continue
            count += 1
            if job.state == "running":
                own.requeue(job.id, None)
    return count

"""The queue: which job is begun next, and whose runs have lost their worker.

It is part of the store: a job is begun in the transaction that takes it out of the queue, and belongs to its worker for
`LEASE_S` seconds after each sign of life, so that there is no moment in which a death could lose it. The tenant with
the fewest runs under way comes first, then the one whose last job began longest ago; within a tenant high priorities
come first, then the oldest. Times of leases are Redis's, whose clock is one for all. Knows nothing of what a job does.
Units: seconds.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import redis

from agents.searcher import Budget
from service.jobs.run_job import JobRequest
from service.jobs.store import BELL, LEASES, TURNS, Store, Superseded

LEASE_S = 12.0
"""Time without a sign of life of its worker after which a run counts as dead."""
HEARTBEAT_S = 3.0
REAP_S = 4.0
"""Time between two looks for dead runs. A run is dead where two looks in a row find its lease over, so that a Redis
that was away does not end the runs that could not speak to it."""
OVERHEAD_S = 120
"""Seconds for import, set-up and writing, beside search and trials."""
WORKERS = "automap:workers"
"""Name of each worker -> its last sign of life."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A run that has begun."""

    tenant: str
    job_id: str
    token: int


def time_limit_s(request: JobRequest, max_budget_s: float) -> int:
    """Seconds that a run may take: budget (`max_budget_s` if it is in evaluations), trials and `OVERHEAD_S`."""
    seconds = Budget.parse(request.budget).seconds
    trials_s = 0.0 if request.trials is None else request.trials.seconds
    return math.ceil((max_budget_s if seconds is None else seconds) + trials_s) + OVERHEAD_S


class Queue:
    """The queue of a Redis, as one worker sees it.

    Args:
        client: connection to it.
        worker: name of the worker.
        lease_s: see `LEASE_S`.
    """

    def __init__(self, client: redis.Redis, worker: str, *, lease_s: float = LEASE_S) -> None:
        self._redis: Any = client
        self._store = Store(client)
        self._worker = worker
        self._lease_s = lease_s
        self._expired: dict[bytes, float] = {}

    def claim(self) -> Claim | None:
        """Begins the next job, if one waits."""
        while True:
            store = self._next()
            if store is None or (job_id := store.next_waiting()) is None:
                return None
            token = store.begin(job_id, self._now() + self._lease_s)
            if token is not None:
                return Claim(tenant=store.tenant, job_id=job_id, token=token)
            # Another worker was faster, or the job was cancelled.

    def wait(self, seconds: float) -> None:
        """Waits until a job may have come, or for some seconds."""
        self._redis.blpop([BELL], seconds)

    def renew(self, claim: Claim | None) -> None:
        """Gives a sign of life of this worker, and of the run that it has under way."""
        now = self._now()
        with self._redis.pipeline() as pipe:
            pipe.zadd(WORKERS, {self._worker: now})
            if claim is not None:
                pipe.zadd(LEASES, {f"{claim.tenant}/{claim.job_id}": now + self._lease_s}, xx=True)
            pipe.execute()

    def leave(self) -> None:
        """Takes this worker out of the list."""
        self._redis.zrem(WORKERS, self._worker)

    def reap(self) -> int:
        """Ends runs whose workers have died, to be called every `REAP_S`; returns their number."""
        now = self._now()
        self._redis.zremrangebyscore(WORKERS, "-inf", now - 60)
        expired = dict(self._redis.zrangebyscore(LEASES, "-inf", now, withscores=True))
        again = [name for name, end in expired.items() if self._expired.get(name) == end]
        self._expired = expired
        for name in again:
            tenant, _, job_id = name.decode().partition("/")
            store = self._store.of(tenant)
            job = store.job(job_id)
            if job is None or job.state != "running":
                self._redis.zrem(LEASES, name)
                continue
            with suppress(Superseded):
                store.died(job_id, job.attempt)
        return len(again)

    def _next(self) -> Store | None:
        """The tenant whose turn it is, of those with jobs that wait."""
        running = Counter(name.partition(b"/")[0] for name in self._redis.zrange(LEASES, 0, -1))
        turns = self._redis.zrange(TURNS, 0, -1, withscores=True)
        with self._redis.pipeline(transaction=False) as pipe:
            stores = [self._store.of(tenant.decode()) for tenant, _ in turns]
            for store in stores:
                store.count_waiting(pipe)
            waiting = pipe.execute()
        ready = [
            (running[tenant], at, store) for (tenant, at), store, num in zip(turns, stores, waiting, strict=True) if num
        ]
        return min(ready, key=lambda turn: turn[:2])[2] if ready else None

    def _now(self) -> float:
        seconds, micros = self._redis.time()
        return float(seconds + micros * 1e-6)


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


def paced(action: Callable[[], object], *, every_s: float) -> Callable[[], None]:
    """`action`, done at most every `every_s` seconds; without Redis it is left out."""
    last = -math.inf

    def act() -> None:
        nonlocal last
        if time.monotonic() - last >= every_s:
            last = time.monotonic()
            with suppress(redis.ConnectionError, redis.TimeoutError):
                action()

    return act

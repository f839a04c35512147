"""Runs jobs in the process of a test."""

from __future__ import annotations

from typing import Any

import redis
import rq
from rq.job import Job as Delivery
from rq.serializers import JSONSerializer

from service.jobs import delivery, job_queue, one_run
from service.jobs.delivery import Run
from service.jobs.store import Store


def run(job_id: str, client: redis.Redis, *, search: Any = None, tenant: str = "default") -> None:
    """Runs a job as a worker does; one that is not queued is left alone."""
    token = Store(client, tenant).begin(job_id)
    if token is not None:
        one_run.run(Run(tenant=tenant, job_id=job_id, token=token), client, search=search)


def delivered(client: redis.Redis) -> Delivery | None:
    """Takes the next delivery out of RQ's queue, as a worker does that dies at once."""
    found = rq.Queue.dequeue_any([delivery.queue(client)], None, connection=client, serializer=JSONSerializer)
    return found and found[0]


def take(client: redis.Redis) -> Run | None:
    """Takes a delivery and begins the job that is next."""
    found = delivered(client)
    return None if found is None else job_queue.begin_next(Store(client), found)


def taken(client: redis.Redis) -> Run:
    """The run that `take` begins, where a job waits."""
    found = take(client)
    assert found is not None
    return found

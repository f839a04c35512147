"""The queue: RQ on the store's Redis, with JSON in place of pickle.

RQ holds nothing but job ids; the store holds the truth. Knows nothing of what a job does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import redis
from redis.client import Pipeline
from rq import Queue, Retry
from rq.command import send_stop_job_command
from rq.exceptions import InvalidJobOperation, NoSuchJobError
from rq.job import Job
from rq.serializers import JSONSerializer

from agents.searcher import Budget
from service.jobs.run_job import JobRequest
from service.jobs.store import Store

NAME = "automap"
ENTRY = "service.jobs.worker.perform"
NUM_RETRIES = 2
"""Largest number of further runs of a job whose worker dies."""
OVERHEAD_S = 120
"""Seconds for import, set-up and writing, beside search and trials."""
_KEEP_S = 600


def queue(client: redis.Redis) -> Queue:
    """The queue of `client`'s Redis."""
    return Queue(NAME, connection=client, serializer=JSONSerializer)


def time_limit_s(request: JobRequest, max_budget_s: float) -> int:
    """Seconds that a run may take: budget (`max_budget_s` if it is in evaluations), trials and `OVERHEAD_S`."""
    seconds = Budget.parse(request.budget).seconds
    trials_s = 0.0 if request.trials is None else request.trials.seconds
    return math.ceil((max_budget_s if seconds is None else seconds) + trials_s) + OVERHEAD_S


def enqueuer(client: redis.Redis, limit_s: int) -> Callable[[Pipeline, str], None]:
    """The function that `Store.create` calls inside its transaction."""

    def enqueue(pipe: Pipeline, job_id: str) -> None:
        queue(client).enqueue_call(
            ENTRY,
            args=(job_id,),
            timeout=limit_s,
            result_ttl=_KEEP_S,
            failure_ttl=_KEEP_S,
            retry=Retry(max=NUM_RETRIES),
            job_id=job_id,
            description=job_id,
            pipeline=pipe,
        )

    return enqueue


def stop(client: redis.Redis, job_id: str) -> None:
    """Takes a cancelled job out of the queue, or kills the process that runs it."""
    try:
        job = Job.fetch(job_id, connection=client, serializer=JSONSerializer)
        queue(client).remove(job)
        send_stop_job_command(client, job_id, serializer=JSONSerializer)
    except (NoSuchJobError, InvalidJobOperation):
        return  # RQ has forgotten it, or nobody has begun: `Store.begin` will refuse


def recover(client: redis.Redis, store: Store, max_budget_s: float) -> int:
    """Queues every job that has not ended, after a restart of the whole service.

    It drops RQ's own state, so it is only for a Redis whose workers are all gone (the private one). A job whose record
    cannot be read has failed.

    Returns:
        Number of jobs queued.
    """
    for key in client.scan_iter("rq:*"):
        client.delete(key)
    jobs = []
    for job in store.active():
        if job.request is None:
            store.fail(job.id, None, job.problem or {})
            continue
        jobs.append(job)
        store.requeue(job.id, None)
        with client.pipeline() as pipe:
            enqueuer(client, time_limit_s(job.request, max_budget_s))(pipe, job.id)
            pipe.execute()
    return len(jobs)

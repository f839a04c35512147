"""Deliveries: the entries of RQ's queue. Each of them means "run the next job" and names no job.

RQ hands a delivery to a worker, supervises the child process that runs it, and notices when the worker is gone. Which
job is the next one is decided from the store when the delivery arrives (`service.jobs.job_queue`). So a lost delivery
loses no job, and a superfluous one does nothing. The run that a delivery has begun is noted in it. Nothing of RQ that
needs Lua is used. Units: seconds.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import redis
import rq
from rq.serializers import JSONSerializer
from rq.utils import utcparse
from rq.worker_registration import get_keys

FUNCTION = "service.jobs.worker.run_next"
"""Path of the function that a worker calls for a delivery."""
_QUEUE = "automap"
_KEPT_S = 60
"""Seconds for which RQ keeps a delivery whose worker or process has died; it is not read again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run that a delivery has begun."""

    tenant: str
    job_id: str
    token: int
    """Its fencing token."""


def queue(client: redis.Redis) -> rq.Queue:
    """RQ's queue in a Redis."""
    return rq.Queue(_QUEUE, connection=client, serializer=JSONSerializer)


def put(client: redis.Redis, pipe: Any) -> None:
    """Puts a delivery into the queue, in a transaction.

    Args:
        client: connection to the Redis.
        pipe: the transaction.
    """
    queue(client).enqueue_call(FUNCTION, description="the next job", result_ttl=0, failure_ttl=_KEPT_S, pipeline=pipe)


def note(pipe: Any, delivery: rq.job.Job, run: Run) -> None:
    """Writes into a delivery which run it has begun, in the transaction that begins it."""
    pipe.hset(delivery.key, "meta", json.dumps(asdict(run)))


def noted(delivery: rq.job.Job) -> Run | None:
    """The run that a delivery has begun, if any."""
    meta = delivery.get_meta()
    return Run(**meta) if meta else None


def workers(client: redis.Redis) -> dict[str, float]:
    """Name of each worker that has sent a heartbeat in the last minute -> when that was, seconds since 1970."""
    keys = sorted(get_keys(queue(client)))
    with client.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.hget(key, "last_heartbeat")
        beats = pipe.execute()
    prefix = rq.Worker.redis_worker_namespace_prefix
    return {
        key.removeprefix(prefix): utcparse(beat.decode()).timestamp()
        for key, beat in zip(keys, beats, strict=True)
        if beat
    }

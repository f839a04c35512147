"""Runs jobs in the process of a test."""

from __future__ import annotations

from typing import Any

import redis

from service.jobs import worker
from service.jobs.job_queue import Claim
from service.jobs.store import Store


def run(job_id: str, client: redis.Redis, *, search: Any = None, tenant: str = "default") -> None:
    """Runs a job as a worker does; one that is not queued is left alone."""
    token = Store(client, tenant).begin(job_id)
    if token is not None:
        worker.run(Claim(tenant=tenant, job_id=job_id, token=token), client, search=search)

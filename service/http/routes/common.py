"""Functions that all routes share."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, cast

import anyio.to_thread
from anyio import CapacityLimiter
from fastapi import Header, HTTPException, Request

from automap.documents import read_document
from automap.records import Record, from_json, to_json
from service.http.feed import Feed
from service.http.side_processes import SideProcesses
from service.jobs.records import ACTIVE, Job
from service.jobs.store import Once, Store
from service.problems import problem
from service.settings import Settings

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=255,
        pattern="^[!-~]+$",
        description="For a day, a request with the same key and body gets the job of the first one.",
    ),
]


def settings_of(request: Request) -> Settings:
    """The service's settings."""
    return cast("Settings", request.app.state.settings)


def store_of(request: Request) -> Store:
    """The store of the tenant whose request it is."""
    return cast("Store", request.app.state.store).of(request.state.tenant)


def address(request: Request, path: str) -> str:
    """The path under which clients reach a resource of the service."""
    return settings_of(request).root_path + path


def feed_of(request: Request) -> Feed:
    """The events of the service's jobs."""
    return cast("Feed", request.app.state.feed)


def side_processes_of(request: Request) -> SideProcesses:
    """The children that price and draw plans."""
    return cast("SideProcesses", request.app.state.side_processes)


def checks_of(request: Request) -> SideProcesses:
    """The children that check submissions."""
    return cast("SideProcesses", request.app.state.checks)


def find_job(store: Store, job_id: str) -> Job:
    """The record of a job.

    Raises:
        HTTPException: there is none.
    """
    job = store.job(job_id)
    if job is None:
        raise no_job(job_id)
    return job


def no_job(job_id: str) -> HTTPException:
    """The error for a job that is not there, to be raised by the caller."""
    repair = "`automap status` and GET /v1/jobs list the jobs that there are."
    return refusal(404, "No such job", field="job_id", value=job_id[:80], repair=repair)


def plan_of(store: Store, job: Job, *, so_far: bool = False) -> dict[str, Any]:
    """The plan of a job; with `so_far` also the best so far of one that has not succeeded.

    Raises:
        HTTPException: it has none.
    """
    document = store.plan(job.id, so_far=so_far)
    if document is None:
        wait = f"Wait for it: GET /v1/jobs/{job.id}?wait=30, or `automap watch {job.id}`."
        repair = wait if job.state in ACTIVE else "Submit the job again."
        if job.problem:
            repair = f"`automap watch {job.id}`, and `problem` of GET /v1/jobs/{job.id}, say why."
        if not so_far and store.plan(job.id, so_far=True) is not None:
            best = f"GET /v1/jobs/{job.id}/plan?best=so-far, or `automap plan {job.id} --so-far`"
            repair = f"{repair} The best plan that it has found: {best}."
        raise refusal(
            409, f"The job has no plan: its state is {job.state}", field="state", value=job.state, repair=repair
        )
    return document


def once_of(key: str | None, body: Record) -> Once | None:
    """What makes a request with an Idempotency-Key a single one; bodies that mean the same have the same digest."""
    if not key:
        return None
    text = json.dumps(to_json(body), sort_keys=True)
    return Once(key=key, request_sha256=hashlib.sha256(text.encode()).hexdigest())


def another_request(key: str | None) -> HTTPException:
    """The error for an Idempotency-Key that came before with another body, to be raised by the caller."""
    repair = "Send the same body again, or another key."
    title = "The key came before with another request"
    return refusal(422, title, field="Idempotency-Key", value=key, repair=repair)


def refusal(status: int, title: str, detail: str = "", **more: object) -> HTTPException:
    """The error that answers with a problem document, to be raised by the caller; see `service.problems.problem`."""
    return HTTPException(status, problem(status, title, detail, **more))


B = TypeVar("B", bound=Record)
T = TypeVar("T")
LARGE_BYTES = 64 * 1024
"""Larger bodies are worked on one at a time: a megabyte takes half a second, and all threads share a processor."""


async def in_thread(request: Request, work: Callable[..., T], *given: Any, **more: Any) -> T:
    """What `work` returns, done in a thread, where others are served meanwhile."""
    limiter: CapacityLimiter | None = getattr(request.state, "limiter", None)
    return await anyio.to_thread.run_sync(functools.partial(work, *given, **more), limiter=limiter)


async def read_body(request: Request, kind: type[B]) -> B:
    """The record in the body of a request.

    Raises:
        UserError: names what is wrong with it.
        HTTPException: the Content-Type is not JSON. Other web pages cannot set it without a preflight request.
    """
    media_type = request.headers.get("content-type", "nothing").partition(";")[0].strip().lower()
    if media_type != "application/json":
        repair = "Send the header Content-Type: application/json."
        raise refusal(415, "The body is not JSON", field="Content-Type", value=media_type, repair=repair)
    data = await request.body()
    if len(data) > LARGE_BYTES:
        request.state.limiter = request.app.state.large_bodies
    return await in_thread(request, lambda: from_json(kind, read_document(data), path=""))

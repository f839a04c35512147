"""Jobs: submit, watch, cancel, and fetch the plan.

A request is checked as far as it can be without searching before it is accepted; an accepted job is in the store and
in the queue, or in neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, HTTPException, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from automap.errors import ProblemError
from automap.records import to_json
from service.http import openapi
from service.http.etag import etag, matches
from service.http.feed import FeedFull
from service.http.requested import check_cluster, model_name
from service.http.routes.common import feed_of, find_job, plan_of, read_body, settings_of, store_of
from service.http.schemas import ExportView, JobBody, JobList, JobView
from service.jobs import graphs, job_queue
from service.jobs.run_job import JobRequest, build_problem, check_search
from service.jobs.store import ACTIVE, Job, Store, events_key
from service.problems import problem
from service.settings import Settings

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_NO_JOB = openapi.refusals(s404="No such job.")
_BAD_QUERY = openapi.refusals(s422="A parameter is out of range.")
_LOOK_S = 2.0
"""Seconds after which a long poll looks again even if it was told nothing, as behind an event that was missed."""


async def job_body(request: Request) -> JobBody:
    """The job in the body of a request, see `read_body`."""
    return await read_body(request, JobBody)


@router.post(
    "",
    status_code=202,
    openapi_extra=openapi.problem_body(JobBody),
    responses=openapi.refusals(
        s404="No such model.",
        s415="The body does not say that it is JSON.",
        s422="The request cannot be met as it is.",
        s429="Too many jobs are waiting.",
    ),
)
def submit(request: Request, response: Response, body: Annotated[JobBody, Depends(job_body)]) -> JobView:
    """Accepts a job."""
    job = _submit(body.model_id, body.request(), store_of(request), settings_of(request))
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return JobView.of(job)


@router.get("", responses=_BAD_QUERY)
def latest(request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> JobList:
    """The latest jobs, newest first."""
    return JobList(jobs=[JobView.of(job) for job in store_of(request).jobs(limit)])


@router.get(
    "/{job_id}",
    response_model=JobView,
    responses=_BAD_QUERY | _NO_JOB | {304: {"description": "The job is still as If-None-Match says."}},
)
async def show(
    request: Request,
    response: Response,
    job_id: str,
    wait: Annotated[float, Query(ge=0, description="seconds to wait")] = 0,
    if_none_match: Annotated[str, Header(description="ETag of the job that the client has.")] = "",
) -> Any:
    """A job. With `wait`, as soon as it has ended or after that many seconds; with If-None-Match too, as soon as it is
    another than the client has."""
    store = store_of(request)
    job = await run_in_threadpool(find_job, store, job_id)
    deadline = time.monotonic() + min(wait, settings_of(request).max_wait_s)
    if _lasts(job, if_none_match) and wait > 0:
        with contextlib.suppress(FeedFull):
            async with feed_of(request).listen(events_key(job_id)) as news:
                job = await run_in_threadpool(find_job, store, job_id)
                while _lasts(job, if_none_match) and (left := deadline - time.monotonic()) > 0:
                    with contextlib.suppress(TimeoutError):
                        batch = await asyncio.wait_for(news.get(), min(left, _LOOK_S))
                        if batch and not if_none_match and not batch[-1].ends:
                            continue
                    if await request.is_disconnected():
                        break
                    job = await run_in_threadpool(find_job, store, job_id)
    view = JobView.of(job)
    tag = etag(view)
    if matches(if_none_match, tag):
        return Response(status_code=304, headers={"ETag": tag})
    response.headers["ETag"] = tag
    return view


def _lasts(job: Job, if_none_match: str) -> bool:
    """Whether a long poll goes on: the job has not ended, and is as the client knows it if it says what it knows."""
    return job.state in ACTIVE and (not if_none_match or matches(if_none_match, etag(JobView.of(job))))


@router.post("/{job_id}/cancel", responses=_NO_JOB)
def cancel(request: Request, job_id: str) -> JobView:
    """Ends a job that is queued or running; one that has ended stays as it is."""
    store = store_of(request)
    find_job(store, job_id)
    if store.cancel(job_id):
        job_queue.stop(store.client, job_id)
    return JobView.of(find_job(store, job_id))


@router.get(
    "/{job_id}/plan",
    responses=_NO_JOB | openapi.refusals(s409="The job has no plan, or none yet.") | {200: openapi.plan_body()},
)
def plan(request: Request, job_id: str) -> dict[str, Any]:
    """The plan of a job that succeeded."""
    store = store_of(request)
    return plan_of(store, find_job(store, job_id))


@router.get(
    "/{job_id}/exports/{target}",
    responses=_NO_JOB
    | openapi.refusals(
        s409="The job has no plan, or none yet.", s422="There is no such target, or it cannot express the plan."
    ),
)
def export(request: Request, job_id: str, target: str) -> ExportView:
    """The plan of a job that succeeded as the configuration of a trainer."""
    # It loads the kernels of the price.
    from automap.export.export import export as exported
    from automap.plan import Plan

    store = store_of(request)
    job = find_job(store, job_id)
    plan = Plan.from_json(plan_of(store, job))
    assert job.request is not None  # a job with a plan was read when it ran
    own = replace(job.request, cluster=plan.cluster, training=to_json(plan.training))
    return ExportView.of(exported(plan, build_problem(graphs.load(store, job.model_id, job.request), own), target))


def _submit(model_id: str, request: JobRequest, store: Store, settings: Settings) -> Job:
    name = model_name(model_id, request, store)
    budget = check_search(request)
    if (budget.seconds or 0) > settings.max_budget_s:
        repair = f"Give at most {settings.max_budget_s:g}s, or ask the operator to raise AUTOMAP_MAX_BUDGET_S."
        raise ProblemError("too long", field="budget", value=request.budget, repair=repair)
    if request.trials is not None and request.trials.seconds > settings.max_budget_s:
        value = f"{request.trials.top_k} x {request.trials.time_limit_s:g} s"
        repair = f"Give at most {settings.max_budget_s:g} s in all, or ask the operator to raise AUTOMAP_MAX_BUDGET_S."
        raise ProblemError("too long for all trials together", field="trials.time_limit_s", value=value, repair=repair)
    check_cluster(request)
    if not request.model.name:
        request = replace(request, model=replace(request.model, name=name))
    build_problem(graphs.load(store, model_id, request), request)
    if len(job_queue.queue(store.client)) >= settings.max_queued_jobs:
        raise HTTPException(429, problem(429, "Too many jobs are waiting", "Try again later."), {"Retry-After": "30"})
    limit_s = job_queue.time_limit_s(request, settings.max_budget_s)
    return store.create(model_id, request, job_queue.enqueuer(store.client, limit_s))

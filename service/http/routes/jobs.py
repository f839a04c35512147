"""Jobs: submit, watch, cancel, and fetch the plan.

A request is checked as far as it can be without searching before it is accepted; an accepted job is in the store and
in the queue, or in neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from automap.errors import ProblemError
from service.http import openapi, quotas
from service.http.access import authorize
from service.http.etag import UNCHANGED, IfNoneMatch, answer, matches
from service.http.feed import FeedFull
from service.http.requested import check_cluster, model_name
from service.http.routes.common import (
    IdempotencyKey,
    address,
    another_request,
    checks_of,
    feed_of,
    find_job,
    in_thread,
    no_job,
    once_of,
    plan_of,
    read_body,
    settings_of,
    side_processes_of,
    store_of,
)
from service.http.routes.views import View, Views
from service.http.schemas import ExportView, JobBody, JobList, JobView
from service.jobs import graphs
from service.jobs.records import State
from service.jobs.run_job import JobRequest, check_search
from service.jobs.store import AnotherRequest, Store
from service.settings import Settings

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_NO_JOB = openapi.refusals(s404="No such job.")
_BAD_QUERY = openapi.refusals(s422="A parameter is out of range.")
_LOOK_S = 1.0
"""Seconds after which a long poll looks again even if it was told nothing, as behind an event that was missed, and at
its key, which may have been revoked."""


async def job_body(request: Request) -> JobBody:
    """The job in the body of a request, see `read_body`."""
    return await read_body(request, JobBody)


@router.post(
    "",
    status_code=202,
    response_model=JobView,
    openapi_extra=openapi.record_body(JobBody),
    responses=openapi.refusals(
        s404="No such model.",
        s415="The body does not say that it is JSON.",
        s422="The request cannot be met as it is, or its Idempotency-Key came before with another one.",
        s429="Too many jobs are waiting, or the day's searches are used up.",
        s507="The tenant has stored as much as it may.",
    ),
)
async def submit_job(
    request: Request, body: Annotated[JobBody, Depends(job_body)], idempotency_key: IdempotencyKey = None
) -> Response:
    """Accepts a job."""
    store, settings = store_of(request), settings_of(request)
    once = await in_thread(request, once_of, idempotency_key, body)
    try:
        job = await in_thread(request, store.replayed, once)
        if job is None:
            asked, reserve_s, admit, graph = await in_thread(request, _admit, body, store, settings)
            # What may take long is done elsewhere, so that others are answered meanwhile.
            await checks_of(request).ask("check", {"request": asked, "model_id": body.model_id}, graph)
            # Admitted once more: others may have come meanwhile.
            limits = {"reserve_s": reserve_s, "once": once, "admit": admit}
            job = await in_thread(request, store.create, body.model_id, asked, **limits)
    except AnotherRequest:
        raise another_request(idempotency_key) from None
    left = await run_in_threadpool(quotas.headers, store, settings)
    headers = {"Location": address(request, f"/v1/jobs/{job.id}"), **left}
    view = await in_thread(request, lambda: JobView.of(job, settings.root_path).model_dump_json())
    return Response(view, status_code=202, media_type="application/json", headers=headers)


@router.get("", response_model=JobList, responses=_BAD_QUERY | UNCHANGED)
def list_jobs(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[
        str | None,
        Query(pattern="^[0-9]{1,12}(\\.[0-9]{1,9})?_[0-9a-f]{1,40}$", description="`next` of the page before"),
    ] = None,
    state: Annotated[list[State] | None, Query(description="only jobs in one of these states; repeatable")] = None,
    model_id: Annotated[str | None, Query(min_length=1, max_length=80, description="only jobs of this model")] = None,
    if_none_match: IfNoneMatch = "",
) -> Response:
    """Jobs, newest first. A page of large jobs may have fewer jobs than its limit."""
    at, _, last = (cursor or "").partition("_")
    place = (float(at), last) if cursor else None
    found, after = store_of(request).jobs(limit, cursor=place, states=state or (), model_id=model_id)
    views = [JobView.of(job, settings_of(request).root_path) for job in found]
    page = JobList(jobs=views, next=after and f"{after[0]!r}_{after[1]}")
    # As text: the framework would check and convert the views of a thousand jobs once more.
    return answer(page.model_dump_json(), if_none_match)


@router.get(
    "/{job_id}",
    response_model=JobView,
    responses=_BAD_QUERY | _NO_JOB | UNCHANGED,
)
async def get_job(
    request: Request,
    job_id: str,
    wait: Annotated[float, Query(ge=0, allow_inf_nan=False, description="seconds to wait")] = 0,
    if_none_match: IfNoneMatch = "",
) -> Response:
    """A job. With `wait`, as soon as it has ended or after that many seconds; with If-None-Match too, as soon as it is
    another than the client has."""
    store, views = store_of(request), cast("Views", request.app.state.views)
    view = await views.of(store, job_id)
    deadline = time.monotonic() + min(wait, settings_of(request).max_wait_s)
    if _lasts(view, if_none_match) and wait > 0:
        with contextlib.suppress(FeedFull):
            async with feed_of(request).listen(store.events_key(job_id)) as news:
                view = await views.of(store, job_id)
                while _lasts(view, if_none_match) and (left := deadline - time.monotonic()) > 0:
                    with contextlib.suppress(TimeoutError):
                        batch = await asyncio.wait_for(news.get(), min(left, _LOOK_S))
                        if batch and not if_none_match and not batch[-1].ends:
                            continue
                    if await request.is_disconnected():
                        break
                    await authorize(request)
                    view = await views.of(store, job_id)
    return answer(view.body, if_none_match, view.tag)


def _lasts(view: View, if_none_match: str) -> bool:
    """Whether a long poll goes on: the job has not ended, and is as the client knows it if it says what it knows."""
    return view.is_active and (not if_none_match or matches(if_none_match, view.tag))


@router.post("/{job_id}/cancel", responses=_NO_JOB)
def cancel_job(request: Request, job_id: str) -> JobView:
    """Ends a job that is queued or running; a job that has ended stays unchanged."""
    store = store_of(request)
    find_job(store, job_id)
    store.cancel(job_id)
    return JobView.of(find_job(store, job_id), settings_of(request).root_path)


@router.delete("/{job_id}", status_code=204, responses=_NO_JOB)
def delete_job(request: Request, job_id: str) -> None:
    """Ends a job and removes all of it, its plan too."""
    if not store_of(request).delete(job_id):
        raise no_job(job_id)


@router.get(
    "/{job_id}/plan",
    responses=_BAD_QUERY
    | _NO_JOB
    | openapi.refusals(s409="The job has no plan, or none yet.")
    | UNCHANGED
    | {200: openapi.plan_body()},
)
def get_plan(
    request: Request,
    job_id: str,
    best: Annotated[
        Literal["final", "so-far"],
        Query(description="so-far: the best plan that a job has found, also if it has not succeeded"),
    ] = "final",
    if_none_match: IfNoneMatch = "",
) -> Response:
    """The plan of a job that succeeded; with `best=so-far`, the best plan so far of another job."""
    store = store_of(request)
    return answer(json.dumps(plan_of(store, find_job(store, job_id), so_far=best == "so-far")), if_none_match)


@router.get(
    "/{job_id}/exports/{target}",
    responses=_NO_JOB
    | openapi.refusals(
        s409="The job has no plan, or none yet.", s422="There is no such target, or it cannot express the plan."
    ),
)
async def export_plan(request: Request, job_id: str, target: str) -> ExportView:
    """The plan of a job that succeeded as the configuration of a trainer."""
    store = store_of(request)
    document, graph = await run_in_threadpool(_to_export, store, job_id)
    return ExportView(**await side_processes_of(request).ask("export", {**document, "target": target}, graph))


def _to_export(store: Store, job_id: str) -> tuple[dict[str, Any], bytes]:
    job = find_job(store, job_id)
    plan = plan_of(store, job)
    assert job.request is not None  # a job with a plan was read when it ran
    told = {"request": job.request, "model_id": job.model_id, "plan": plan}
    return told, graphs.load_bytes(store, job.model_id, job.request)


def _admit(body: JobBody, store: Store, settings: Settings) -> tuple[JobRequest, float, Callable[[], None], bytes]:
    """The request of a body that is admitted, the seconds that it takes from the tenant's day, what admits it, and its
    model's graph."""
    request = body.request()
    name = model_name(body.model_id, request, store)
    budget = check_search(request)
    search_s = quotas.search_s(budget, settings)
    if request.trials is not None and request.trials.seconds > settings.max_budget_s:
        value = f"{request.trials.top_k} x {request.trials.time_limit_s:g} s"
        repair = f"Give at most {settings.max_budget_s:g} s in all, or ask the operator to raise AUTOMAP_MAX_BUDGET_S."
        raise ProblemError("too long for all trials together", field="trials.time_limit_s", value=value, repair=repair)
    check_cluster(request)
    if not request.model.name:
        request = replace(request, model=replace(request.model, name=name))
    reserve_s = search_s + (0.0 if request.trials is None else request.trials.seconds)
    members = request.workers - 1
    taken_s = reserve_s + members * search_s

    def admit() -> None:
        model_name(body.model_id, request, store)  # it may have been deleted meanwhile
        quotas.check(store, settings, taken_s, num_jobs=1 + members)

    admit()
    return request, reserve_s, admit, graphs.load_bytes(store, body.model_id, request)

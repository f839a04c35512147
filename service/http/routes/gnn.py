"""Jobs of the kind `gnn`: placements of distributed GNN training. Once accepted they are jobs like any other."""

from __future__ import annotations

import functools
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from service.http import openapi, quotas
from service.http.routes.common import (
    IdempotencyKey,
    address,
    another_request,
    once_of,
    read_body,
    settings_of,
    store_of,
)
from service.http.schemas import GnnJobBody, JobView
from service.jobs.gnn_job import check_gnn
from service.jobs.records import Job
from service.jobs.store import AnotherRequest, Once, Store
from service.settings import Settings

router = APIRouter(prefix="/v1/gnn", tags=["jobs"])


async def gnn_job_body(request: Request) -> GnnJobBody:
    """The job in the body of a request, see `read_body`."""
    return await read_body(request, GnnJobBody)


@router.post(
    "/jobs",
    status_code=202,
    openapi_extra=openapi.record_body(GnnJobBody),
    responses=openapi.refusals(
        s415="The body does not say that it is JSON.",
        s422="The request cannot be met as it is, or its Idempotency-Key came before with another one.",
        s429="Too many jobs are waiting, or the day's searches are used up.",
        s507="The tenant has stored as much as it may.",
    ),
)
def submit_gnn_job(
    request: Request,
    response: Response,
    body: Annotated[GnnJobBody, Depends(gnn_job_body)],
    idempotency_key: IdempotencyKey = None,
) -> JobView:
    """Accepts a search for a placement; its plan is an `automap.gnn-plan/1`."""
    store, settings, once = store_of(request), settings_of(request), once_of(idempotency_key, body)
    try:
        job = store.replayed(once) or _accept(body, store, settings, once)
    except AnotherRequest:
        raise another_request(idempotency_key) from None
    response.headers["Location"] = address(request, f"/v1/jobs/{job.id}")
    response.headers.update(quotas.headers(store, settings))
    return JobView.of(job, settings.root_path)


def _accept(body: GnnJobBody, store: Store, settings: Settings, once: Once | None) -> Job:
    asked = body.request()
    _, budget = check_gnn(asked)
    reserve_s = quotas.search_s(budget, settings)
    admit = functools.partial(quotas.check, store, settings, reserve_s, num_jobs=1)
    return store.create("", asked, reserve_s=reserve_s, once=once, admit=admit)

"""Plans of jobs in pictures: a page to keep, and the pictures of the dashboard. They are drawn in another process."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse

from service.http import openapi
from service.http.routes.common import find_job, plan_of, side_processes_of, store_of
from service.http.schemas import Drawing
from service.jobs import graphs

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_REFUSALS = openapi.refusals(
    s404="No such job.",
    s409="The job has no plan, or none yet.",
    s422="The plan is too large to be drawn.",
    s501="The service lacks a library.",
)


@router.get("/{job_id}/report", response_class=HTMLResponse, responses=_REFUSALS)
async def get_report(request: Request, job_id: str) -> Response:
    """The plan of a job that succeeded as one page with words and pictures, to keep or to send."""
    drawn = await _drawn("report", request, job_id)
    headers = {
        "Content-Disposition": f'attachment; filename="report-{job_id[:12]}.html"',
        "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox",
    }
    return HTMLResponse(drawn["html"], headers=headers)


@router.get("/{job_id}/pictures", responses=_REFUSALS)
async def get_pictures(request: Request, job_id: str) -> Drawing:
    """The plan of a job that succeeded in words and pictures."""
    return Drawing.model_validate(await _drawn("draw", request, job_id))


async def _drawn(task: str, request: Request, job_id: str) -> dict[str, Any]:
    store = store_of(request)
    job = await run_in_threadpool(find_job, store, job_id)
    plan = await run_in_threadpool(plan_of, store, job)
    assert job.request is not None  # a job with a plan was read when it ran
    graph = await run_in_threadpool(graphs.load_bytes, store, job.model_id, job.request)
    document = {"request": job.request, "model_id": job.model_id, "plan": plan}
    return await side_processes_of(request).ask(task, document, graph)

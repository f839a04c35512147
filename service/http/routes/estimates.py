"""Estimates: a plan that somebody has made by hand is priced at once, without a job, in another process."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool

from automap.errors import PlanError
from service.http import openapi
from service.http.requested import check_cluster, model_name
from service.http.routes.common import read_body, side_processes_of, store_of
from service.http.schemas import DegreesBody, EstimateBody
from service.jobs import graphs

router = APIRouter(prefix="/v1/estimates", tags=["estimates"])


async def estimate_body(request: Request) -> EstimateBody:
    """What is to be priced, see `read_body`."""
    return await read_body(request, EstimateBody)


@router.post(
    "",
    openapi_extra=openapi.record_body(EstimateBody),
    responses=openapi.refusals(
        s404="No such model.",
        s415="The body does not say that it is JSON.",
        s422="The request cannot be met as it is.",
        s501="The service lacks a library.",
    )
    | {200: openapi.plan_body()},
)
async def estimate(request: Request, body: Annotated[EstimateBody, Depends(estimate_body)]) -> dict[str, Any]:
    """Prices a plan, or the plan of the stated degrees, on all devices of the cluster; searches nothing."""
    store, asked = store_of(request), body.request()
    check_cluster(asked)
    if body.plan is not None and body.degrees != DegreesBody():
        raise PlanError("the plan says it already", field="degrees", value="...", repair="Leave degrees or plan out.")
    name = await run_in_threadpool(model_name, body.model_id, asked, store)
    asked = replace(asked, model=replace(asked.model, name=asked.model.name or name))
    graph = await run_in_threadpool(graphs.load_bytes, store, body.model_id, asked)
    told = {"request": asked, "model_id": body.model_id, "plan": body.plan, "degrees": body.degrees}
    return await side_processes_of(request).ask("estimate", told, graph)

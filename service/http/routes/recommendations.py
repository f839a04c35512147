"""Recommendations: which of some clusters to train on, by the best template on each, in another process."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.concurrency import run_in_threadpool

from automap.errors import ClusterError, ProblemError
from service.http import openapi
from service.http.requested import model_name
from service.http.routes.common import read_body, side_processes_of, store_of
from service.http.schemas import RecommendationBody, RecommendationView
from service.jobs import graphs

router = APIRouter(prefix="/v1/recommendations", tags=["estimates"])

_GOALS = ("target_step_s", "max_cost_per_hour", "prices", "steps")


async def recommendation_body(request: Request) -> RecommendationBody:
    """What is to be compared, see `read_body`."""
    return await read_body(request, RecommendationBody)


@router.post(
    "",
    response_model=RecommendationView,
    openapi_extra=openapi.record_body(RecommendationBody),
    responses=openapi.refusals(
        s404="No such model.",
        s415="The body does not say that it is JSON.",
        s422="The request cannot be met as it is, or no cluster meets the goals.",
        s501="The service lacks a library.",
    ),
)
async def recommend(request: Request, body: Annotated[RecommendationBody, Depends(recommendation_body)]) -> Any:
    """Compares clusters: those that no other one beats in both time and price, the fewest, cheapest and fastest."""
    store, asked = store_of(request), body.request()
    if not body.clusters:
        raise ClusterError("no cluster", field="clusters", value="[]", repair="Name at least one, as 4x8xA100-80GB.")
    for number, cluster in enumerate(body.clusters):
        if cluster.endswith(".json"):
            repair = "Name presets such as 4x8xA100-80GB."
            raise ClusterError("files are not read here", field=f"clusters[{number}]", value=cluster, repair=repair)
    if body.max_cost_per_hour is not None and body.prices is None:
        repair = "Give prices of the devices."
        raise ProblemError("no prices", field="max_cost_per_hour", value=body.max_cost_per_hour, repair=repair)
    name = await run_in_threadpool(model_name, body.model_id, asked, store)
    asked = replace(asked, model=replace(asked.model, name=asked.model.name or name))
    graph = await run_in_threadpool(graphs.load_bytes, store, body.model_id, asked)
    goals = {name: getattr(body, name) for name in _GOALS}
    told = {"request": asked, "model_id": body.model_id, "clusters": list(body.clusters), "goals": goals}
    return await side_processes_of(request).ask("recommend", told, graph)

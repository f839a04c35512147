"""Clusters, schemas, the health and version of the service, and a tenant as a whole."""

from __future__ import annotations

import json
from typing import Any

import redis
from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import PlainTextResponse

from automap.plan import plan_schema
from automap.targets import targets
from ir import zoo
from service.about import version
from service.clusters import describe_clusters
from service.http import openapi
from service.http.access import access
from service.http.etag import UNCHANGED, IfNoneMatch, answer
from service.http.metrics import MEDIA_TYPE, Metrics
from service.http.routes.common import store_of
from service.http.schemas import Health, NamedModels, Readiness, Targets, Version
from service.jobs import delivery
from service.jobs.connection import PROBE
from service.problems import limit

router = APIRouter(tags=["meta"])


@router.get("/v1/clusters", response_model=dict[str, Any], responses=UNCHANGED)
def list_clusters(if_none_match: IfNoneMatch = "") -> Response:
    """Presets to copy from, and every device that has a data file."""
    return answer(json.dumps(describe_clusters()), if_none_match)


@router.get("/v1/zoo", response_model=NamedModels, responses=UNCHANGED)
def list_zoo(if_none_match: IfNoneMatch = "") -> Response:
    """The models that need no upload."""
    return answer(NamedModels(models=list(zoo.names())).model_dump_json(), if_none_match)


@router.get("/v1/targets", response_model=Targets, responses=UNCHANGED)
def list_targets(if_none_match: IfNoneMatch = "") -> Response:
    """The trainers for whose configuration a plan can be searched and exported."""
    found = Targets(targets={name: target.about for name, target in targets().items()})
    return answer(found.model_dump_json(), if_none_match)


@router.get("/v1/schemas/plan", response_model=dict[str, Any], responses=UNCHANGED)
def get_plan_schema(if_none_match: IfNoneMatch = "") -> Response:
    """The JSON Schema of plans."""
    return answer(json.dumps(plan_schema()), if_none_match)


@router.get("/healthz")
@access("anybody")
async def get_health() -> Health:
    """Whether this process answers. The state of Redis and of workers is at `/readyz`."""
    # In no thread: those may all wait for the store.
    return Health(status="ok")


@router.get("/readyz", responses=openapi.refusals(s503="The store cannot be written."))
@access("anybody")
def get_readiness(request: Request) -> Readiness:
    """Whether the service can accept a job now, and how many workers there are to run it."""
    client = request.app.state.store.client
    try:
        client.set(PROBE, "", ex=60)
        workers = len(delivery.workers(client))
    except redis.ResponseError as fault:  # as of a memory that is full, or a copy that is read only
        repair = "Make room in it, or let it be written."
        document = limit(503, "The store cannot be written", f"{fault}.", field="store", value=fault, repair=repair)
        raise HTTPException(503, document, {"Retry-After": "5"}) from None
    return Readiness(status="ok", workers=workers)


@router.get("/metrics", response_class=PlainTextResponse)
@access("admin")
def get_metrics(request: Request) -> Response:
    """The metrics of the service, for Prometheus."""
    found: Metrics = request.app.state.metrics
    return PlainTextResponse(found.text(), media_type=MEDIA_TYPE)


@router.get("/version")
@access("anybody")
def get_version() -> Version:
    """The version of the installed package."""
    return Version(version=version())


@router.delete("/v1/tenant", status_code=204)
@access("admin")
def delete_tenant(request: Request) -> None:
    """Ends all jobs of the key's tenant and removes them, its models and its plans; keys stay."""
    store_of(request).delete_all()

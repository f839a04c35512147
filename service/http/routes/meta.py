"""Clusters, schemas, and the health and version of the service."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from automap.plan import plan_schema
from automap.targets import targets
from ir import zoo
from service.about import version
from service.clusters import describe_clusters
from service.http.routes.common import store_of
from service.http.schemas import Health, NamedModels, Targets, Version

router = APIRouter(tags=["meta"])


@router.get("/v1/clusters")
def clusters() -> dict[str, Any]:
    """Presets to copy from, and every device that has a data file."""
    return describe_clusters()


@router.get("/v1/zoo")
def named_models() -> NamedModels:
    """The models that need no upload."""
    return NamedModels(models=list(zoo.names()))


@router.get("/v1/targets")
def named_targets() -> Targets:
    """The trainers for whose configuration a plan can be searched and exported."""
    return Targets(targets={name: target.about for name, target in targets().items()})


@router.get("/v1/schemas/plan")
def schema() -> dict[str, Any]:
    """The JSON Schema of plans."""
    return plan_schema()


@router.get("/healthz")
def health(request: Request) -> Health:
    """Whether the service and its store answer."""
    store_of(request).client.ping()
    return Health(status="ok")


@router.get("/version")
def about() -> Version:
    """The version of the installed package."""
    return Version(version=version())

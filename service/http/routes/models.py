"""Models: upload and look up.

A model arrives as the raw bytes of an ONNX file; it is read in a child process with limits and refused when it cannot
be used. No archives, no forms, no URLs.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from service.dims import parse_batch_dims, parse_dims
from service.http import openapi
from service.http.routes.common import refusal, settings_of, store_of
from service.http.schemas import ModelView
from service.jobs import graphs
from service.jobs.run_job import JobRequest, ModelOptions
from service.jobs.store import Model, Store, StoreFull
from service.settings import Settings

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.post(
    "",
    status_code=201,
    responses=openapi.refusals(
        s408="The upload took too long.",
        s422="The model cannot be used, or what is said about it does not fit it.",
        s507="The model store is full.",
    ),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def upload(
    request: Request,
    response: Response,
    dim: Annotated[list[str], Query(default_factory=list, description="name=size of a symbolic dim; repeatable")],
    batch_dim: Annotated[
        list[str],
        Query(
            default_factory=list,
            description="input=dim that is its batch where that is not the leading one; repeatable",
        ),
    ],
    parameters: Annotated[list[str], Query(default_factory=list, description="glob over parameter inputs; repeatable")],
    name: Annotated[str, Query(max_length=200)] = "",
) -> ModelView:
    """Stores a model; the same bytes get the same id."""
    settings, store = settings_of(request), store_of(request)
    options = ModelOptions(
        name=name, dims=parse_dims(dim), parameters=tuple(parameters), batch_dims=parse_batch_dims(batch_dim)
    )
    try:
        async with asyncio.timeout(settings.upload_timeout_s):
            data = bytearray()
            async for chunk in request.stream():
                data += chunk
    except TimeoutError:
        raise refusal(408, "The upload took too long") from None
    try:
        model = await run_in_threadpool(_import_and_store, bytes(data), options, store, settings)
    except StoreFull:
        detail = "Ask the operator to raise AUTOMAP_MAX_STORED_BYTES."
        raise refusal(507, "The model store is full", detail) from None
    response.headers["Location"] = f"/v1/models/{model.id}"
    return ModelView.of(model)


@router.get("/{model_id}", responses=openapi.refusals(s404="No such model."))
def show(request: Request, model_id: str) -> ModelView:
    """The record of a model."""
    model = store_of(request).model(model_id)
    if model is None:
        raise refusal(404, "No such model", field="model_id", value=model_id[:80])
    return ModelView.of(model)


def _import_and_store(data: bytes, options: ModelOptions, store: Store, settings: Settings) -> Model:
    from ir.summary import summarize

    request = JobRequest(cluster="", training={}, model=options)
    graph = graphs.read(data, request)
    model = store.add_model(
        data, name=options.name or graph.name, summary=summarize(graph), capacity=settings.max_stored_bytes
    )
    graphs.keep(store, model.id, request, graph)
    return model

"""Models: upload and look up.

A model arrives as the raw bytes of an ONNX file; it is read in a child process with limits and refused when it cannot
be used. No archives, no forms, no URLs.
"""

from __future__ import annotations

import errno
import hashlib
import tempfile
import threading
from dataclasses import replace
from typing import IO, Annotated

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from ir.onnx.sandbox import needs_strip, strip_upload
from service.dims import parse_batch_dims, parse_dims
from service.http import openapi, quotas
from service.http.etag import UNCHANGED, IfNoneMatch, answer
from service.http.routes.common import address, refusal, settings_of, store_of
from service.http.schemas import ModelList, ModelView
from service.jobs import graphs
from service.jobs.model_store import StoreFull
from service.jobs.records import Model
from service.jobs.run_job import JobRequest, ModelOptions, import_file
from service.jobs.store import Store
from service.problems import limit
from service.settings import Settings

STRIPS = threading.BoundedSemaphore(1)
"""To be held while weights are taken out of an upload: this takes several times the memory of the file."""

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.post(
    "",
    status_code=201,
    responses=openapi.refusals(
        s422="The model cannot be used, or what is said about it does not fit it.",
        s507="The tenant has stored as much as it may, or the disk is full.",
    ),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def upload_model(
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
    # To a file, so that uploads that arrive slowly take no memory; without a name, so that no kill leaves it; without a
    # buffer, so that a full disk is noticed here and not when the file is read or closed.
    places: quotas.Places = request.app.state.uploads
    with places.one(request.state.tenant), tempfile.TemporaryFile(buffering=0) as file:
        await _receive(request, file)
        try:
            model = await run_in_threadpool(_import_and_store, file, options, store, settings)
        except StoreFull:
            raise (await run_in_threadpool(quotas.full, store, settings)) from None
    response.headers["Location"] = address(request, f"/v1/models/{model.id}")
    return ModelView.of(model)


@router.get("", response_model=ModelList, responses=UNCHANGED)
def list_models(request: Request, if_none_match: IfNoneMatch = "") -> Response:
    """All models, by name."""
    found = ModelList(models=[ModelView.of(model) for model in store_of(request).models()])
    return answer(found.model_dump_json(), if_none_match)


@router.get("/{model_id}", responses=openapi.refusals(s404="No such model."))
def get_model(request: Request, model_id: str) -> ModelView:
    """The record of a model."""
    model = store_of(request).model(model_id)
    if model is None:
        raise _no_model(model_id)
    return ModelView.of(model)


@router.delete(
    "/{model_id}",
    status_code=204,
    responses=openapi.refusals(s404="No such model.", s409="Jobs that have not ended need it."),
)
def delete_model(request: Request, model_id: str) -> None:
    """Removes a model; jobs that have ended keep their plans."""
    store = store_of(request)

    def admit() -> None:
        users = [job.id for job in store.active() if job.model_id == model_id]
        if users:
            title, repair = "A job that has not ended needs the model", "Cancel it first, or wait for its end."
            raise refusal(409, title, field="job_id", value=users[0], repair=repair)

    if not store.delete_model(model_id, admit=admit):
        raise _no_model(model_id)


def _no_model(model_id: str) -> HTTPException:
    repair = "GET /v1/models lists the models that there are; POST /v1/models uploads one."
    return refusal(404, "No such model", field="model_id", value=model_id[:80], repair=repair)


async def _receive(request: Request, file: IO[bytes]) -> None:
    def write(chunk: bytes) -> None:
        rest = memoryview(chunk)
        while rest:
            rest = rest[file.write(rest) :]

    try:
        async for chunk in request.stream():
            await run_in_threadpool(write, chunk)
    except OSError as fault:
        if fault.errno != errno.ENOSPC:
            raise
        repair = "Ask the operator for room in the temporary folder; nothing was stored."
        document = limit(507, "The disk is full", field="disk", value="full", repair=repair)
        raise HTTPException(507, document) from None


def _import_and_store(file: IO[bytes], options: ModelOptions, store: Store, settings: Settings) -> Model:
    request = JobRequest(cluster="", training={}, model=options)

    def named(name: str) -> JobRequest:
        """The request under the name that jobs give the model."""
        return replace(request, model=replace(options, name=name))

    stripped = b""
    if needs_strip(file):
        with STRIPS:
            stripped = strip_upload(file, parameters=options.parameters)
    # A few at a time: each takes a few hundred MB, here and in a process of its own.
    with graphs.IMPORTS:
        file.seek(0)
        data = stripped or file.read()
        known = store.model(hashlib.sha256(data).hexdigest())
        if known is not None and options.name in ("", known.name):
            # The same file again, as of someone who submits it again and again.
            summary = graphs.kept_summary(store, known.id, named(known.name))
            if summary is not None:
                return replace(known, summary=summary)
        found = import_file(data, request)
        name = options.name or found.summary["name"]
        model = store.add_model(data, name=name, summary=found.summary, capacity=settings.max_stored_bytes)
    if model.name == name:
        graphs.keep(store, model.id, named(name), found)
    return model

"""Functions that all routes share."""

from __future__ import annotations

from typing import cast

from fastapi import HTTPException, Request
from fastapi.concurrency import run_in_threadpool

from automap.documents import read_document
from automap.records import from_json
from service.http.schemas import JobBody
from service.jobs.store import Store
from service.problems import problem
from service.settings import Settings


def settings_of(request: Request) -> Settings:
    """The service's settings."""
    return cast("Settings", request.app.state.settings)


def store_of(request: Request) -> Store:
    """The store of the tenant whose request it is."""
    return cast("Store", request.app.state.store).of(request.state.tenant)


def refusal(status: int, title: str, detail: str = "", **more: object) -> HTTPException:
    """The error that answers with a problem document, to be raised by the caller; see `service.problems.problem`."""
    return HTTPException(status, problem(status, title, detail, **more))


async def job_body(request: Request) -> JobBody:
    """The job in the body of a request.

    Raises:
        UserError: names what is wrong with it.
        HTTPException: the Content-Type is not JSON. Other web pages cannot set it without a preflight request.
    """
    kind = request.headers.get("content-type", "nothing").partition(";")[0].strip().lower()
    if kind != "application/json":
        repair = "Send the header Content-Type: application/json."
        raise refusal(415, "The body is not JSON", field="Content-Type", value=kind, repair=repair)
    data = await request.body()
    # Some megabytes take a second, in which others must be served.
    return await run_in_threadpool(lambda: from_json(JobBody, read_document(data), path=""))

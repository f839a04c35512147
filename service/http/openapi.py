"""The OpenAPI document: what FastAPI gathers from the routes, with what FastAPI cannot know.

Every error is a problem document; what clients send and plans are records with schemas of their own. Knows no route by
name: what a route may answer beside the common faults stands at the route.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from automap.plan import Plan
from automap.records import definition
from service.http.schemas import EstimateBody, Fault, JobBody, ProblemBody
from service.problems import MEDIA_TYPE

AT = "#/components/schemas/"
ALWAYS = {
    "400": "The Host header is not this service's.",
    "413": "The body is too large.",
    "500": "A fault of the service; its log has the request id.",
    "503": "The store does not answer; nothing was accepted.",
}
"""Status -> the cause of an error that any request may get."""
EVENTS = """\
event: state
data: {"state": "running", "attempt": 1, "at": 1763876543.21}
id: 1763876543210-0

"""
"""What a stream of events looks like."""
RETRY = ("429", "503")
"""Statuses with Retry-After."""
_HEADERS = {
    "X-Request-Id": {"description": "Names the request in the service's log.", "schema": {"type": "string"}},
    "Retry-After": {
        "description": "Seconds to wait before the request is sent again.",
        "schema": {"type": "integer", "minimum": 1},
    },
    "Location": {"description": "Address of the new resource.", "schema": {"type": "string"}},
}


def refusals(**when: str) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route: `refusals(s404="No such job.")`."""
    return {int(status.removeprefix("s")): {"description": text} for status, text in when.items()}


def problem_body(kind: type[ProblemBody]) -> dict[str, Any]:
    """`openapi_extra` of a route that takes a problem: exactly one of `model_id` and `zoo`."""
    body = {
        "allOf": [{"$ref": f"{AT}{kind.__name__}"}],
        "oneOf": [{"required": ["model_id"]}, {"required": ["zoo"]}],
    }
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}}


def event_stream() -> dict[int | str, dict[str, Any]]:
    """The answer of a route that sends events."""
    text = {"schema": {"type": "string"}, "example": EVENTS}
    return {
        200: {"description": "Events, until the one that says how it ended.", "content": {"text/event-stream": text}}
    }


def plan_body() -> dict[str, Any]:
    """The content of an answer that is a plan."""
    return {"content": {"application/json": {"schema": {"$ref": f"{AT}{Plan.__name__}"}}}}


def describe(app: FastAPI) -> dict[str, Any]:
    """The document of an application."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas: dict[str, Any] = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for kind in (JobBody, EstimateBody, Plan):
        definition(kind, schemas, at=AT)
    fault = Fault.model_json_schema(ref_template=AT + "{model}")
    schemas[Fault.__name__] = fault
    for operation in chain.from_iterable(path.values() for path in document["paths"].values()):
        responses: dict[str, Any] = operation["responses"]
        for status, text in ALWAYS.items():
            responses.setdefault(status, {"description": text})
        for status, response in responses.items():
            response.setdefault("headers", {}).update(_headers(status))
            if status >= "400":
                response["content"] = {MEDIA_TYPE: {"schema": {"$ref": f"{AT}{Fault.__name__}"}}}
        operation["responses"] = dict(sorted(responses.items()))
    return document


def _headers(status: str) -> dict[str, Any]:
    names = ["X-Request-Id", *(["Retry-After"] if status in RETRY else [])]
    names += ["Location"] if status in ("201", "202") else []
    return {name: {**_HEADERS[name], "required": True} for name in names}

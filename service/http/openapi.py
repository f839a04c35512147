"""The OpenAPI document: FastAPI makes it from the routes, and this module adds what FastAPI cannot know.

Every error is a problem document; what clients send and plans are records with schemas of their own. Knows no route by
name: errors that only some routes answer with are declared at these routes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from automap.plan import Plan
from automap.records import definition
from service.http.access import access_of
from service.http.parameters import API
from service.http.schemas import EstimateBody, Fault, GnnJobBody, JobBody, ModelBody, RecommendationBody
from service.problems import MEDIA_TYPE

AT = "#/components/schemas/"
ALWAYS = {
    "400": "The Host header is not this service's, a header came twice, or what came is not HTTP/1.1.",
    "408": "The body took too long.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "431": "The headers are too large.",
    "500": "A fault of the service; its log has the request id.",
    "503": "The store does not answer; nothing was accepted.",
}
"""Status -> the cause of an error that any request may get."""
CHECKED = {"422": "There is no such parameter, or it is given more often than it may be."}
"""Status -> the cause of an error of requests of the API."""
LOCKED = {
    "401": "No key, or one that may not be used.",
    "403": "The key has not the scope, or a web page that is not of the service has sent the request.",
}
"""Status -> the cause of an error of requests that need a key."""
_EXAMPLES = Path(__file__).with_name("examples.json")
RETRY = ("429", "503")
"""Statuses with Retry-After."""
_HEADERS = {
    "X-Request-Id": {"description": "Names the request in the service's log.", "schema": {"type": "string"}},
    "Retry-After": {
        "description": "Seconds to wait before the request is sent again.",
        "schema": {"type": "integer", "minimum": 1},
    },
    "RateLimit-Policy": {
        "description": "Limits of the tenant: jobs that wait, and seconds of search in a day.",
        "schema": {"type": "string"},
    },
    "RateLimit": {"description": "What is left of them.", "schema": {"type": "string"}},
    "WWW-Authenticate": {"description": "Bearer.", "schema": {"type": "string"}},
    "Location": {"description": "Address of the new resource.", "schema": {"type": "string"}},
    "ETag": {"description": "Names this answer; for If-None-Match.", "schema": {"type": "string"}},
    "Cache-Control": {"description": "private, no-cache.", "schema": {"type": "string"}},
}


def refusals(**when: str) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route: `refusals(s404="No such job.")`."""
    return {int(status.removeprefix("s")): {"description": text} for status, text in when.items()}


def record_body(kind: type[Any]) -> dict[str, Any]:
    """`openapi_extra` of a route that takes a record."""
    schema = {"$ref": f"{AT}{kind.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def event_stream() -> dict[int | str, dict[str, Any]]:
    """The answer of a route that sends events, whose schema is that of one event."""
    text = {"type": "string"}
    data = {**text, "contentMediaType": "application/json", "contentSchema": {"type": "object"}}
    event = {
        "type": "object",
        "properties": {"id": text, "event": {"enum": ["state", "progress"]}, "data": data},
        "required": ["id", "event", "data"],
    }
    return {
        200: {
            "description": "Events, until the one that says how it ended.",
            "content": {"text/event-stream": {"schema": event}},
        }
    }


def plan_body() -> dict[str, Any]:
    """The content of an answer that is a plan."""
    return {"content": {"application/json": {"schema": {"$ref": f"{AT}{Plan.__name__}"}}}}


def describe(app: FastAPI, routes: Iterable[APIRoute], root_path: str) -> dict[str, Any]:
    """The document of an application with these routes, which clients reach below a path."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    if root_path:
        document["servers"] = [{"url": root_path}]
    schemas: dict[str, Any] = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for kind in (JobBody, GnnJobBody, EstimateBody, RecommendationBody, Plan):
        definition(kind, schemas, at=AT)
        if issubclass(kind, ModelBody):
            # Inside `allOf`, in which generators of clients still see one class and not two.
            schemas[kind.__name__]["allOf"] = [{"oneOf": [{"required": ["model_id"]}, {"required": ["zoo"]}]}]
    fault = Fault.model_json_schema(ref_template=AT + "{model}")
    schemas[Fault.__name__] = fault
    document["components"]["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "Needed unless only this host reaches the service."}
    }
    needed = {(route.path, method.lower()): access_of(route) for route in routes for method in route.methods or ()}
    for (path, method), scope in needed.items():
        operation = document["paths"].get(path, {}).get(method)
        if operation is None:
            continue  # a page, which is not an operation
        # Where keys are not needed, everybody may call: hence the empty alternative.
        operation["security"] = [{}] if scope == "anybody" else [{}, {"key": [scope]}]
        responses: dict[str, Any] = operation["responses"]
        checked = CHECKED if path.startswith(API) else {}
        for status, text in {**ALWAYS, **checked, **({} if scope == "anybody" else LOCKED)}.items():
            responses.setdefault(status, {"description": text})
        for status, response in responses.items():
            response.setdefault("headers", {}).update(_headers(status))
            if "429" in responses and status in ("202", "429"):
                response["headers"].update({name: _HEADERS[name] for name in ("RateLimit-Policy", "RateLimit")})
            if "304" in responses and status in ("200", "304"):
                tagged = {name: {**_HEADERS[name], "required": True} for name in ("ETag", "Cache-Control")}
                response["headers"].update(tagged)
            if status >= "400":
                response["content"] = {MEDIA_TYPE: {"schema": {"$ref": f"{AT}{Fault.__name__}"}}}
        operation["responses"] = dict(sorted(responses.items()))
        for content, example in _examples(f"{method} {path}", operation):
            content["example"] = example
    return document


@functools.cache
def examples() -> dict[str, dict[str, Any]]:
    """`method path` -> {request, answer}: real exchanges, cut short where they are lists."""
    found: dict[str, dict[str, Any]] = json.loads(_EXAMPLES.read_text("utf-8"))
    return found


def _examples(name: str, operation: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Any]]:
    """The contents of an operation that have an example, and the example."""
    example = examples().get(name, {})
    for content in operation.get("requestBody", {}).get("content", {}).values():
        if "request" in example:
            yield content, example["request"]
    for status, response in operation["responses"].items():
        for content in response.get("content", {}).values():
            if status < "300" and "answer" in example:
                yield content, example["answer"]


def _headers(status: str) -> dict[str, Any]:
    names = ["X-Request-Id", *(["Retry-After"] if status in RETRY else [])]
    names += ["WWW-Authenticate"] if status == "401" else []
    names += ["Location"] if status in ("201", "202") else []
    return {name: {**_HEADERS[name], "required": True} for name in names}

"""The REST application: middleware, errors, routes.

Every error leaves as an RFC 9457 problem document, none with a traceback; what was not expected is logged with the
request id that the client got. Knows nothing of how processes are started.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import time
import uuid
from http import HTTPStatus
from itertools import chain
from typing import Any

import anyio
import redis
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from automap.errors import UserError
from service.about import version
from service.http import openapi, quotas
from service.http.access import SAFE, audit, authorize
from service.http.feed import Feed
from service.http.metrics import Metrics
from service.http.parameters import check_parameters
from service.http.reader import Reader
from service.http.routes import dashboard, drawings, estimates, events, gnn, jobs, meta, models, recommendations
from service.http.routes.views import Views
from service.http.side_processes import SideProcesses
from service.jobs.keys import Keys
from service.jobs.store import Store
from service.logs import REQUEST
from service.problems import MEDIA_TYPE, limit, problem, problem_of, wanted
from service.settings import MIB, Settings

LOG = logging.getLogger("automap.api")
ACCESS = logging.getLogger("automap.access")
ONCE = ("Host", "Authorization", "Content-Type", "Idempotency-Key", "Last-Event-ID")
"""Headers that a request has once at most: of two, the framework would take one and say nothing."""
OWN_PAGES = ("same-origin", "none")
"""Values of Sec-Fetch-Site, which every browser sends, for what the service's own page or a person has sent. Another
web page can send uploads and cancellations to 127.0.0.1 without permission, where no key is needed."""
MOST_WAITING = 16
"""Requests that wait for a child that prices and draws plans, which may take it seconds."""
ROUTERS = (
    models.router, jobs.router, gnn.router, events.router, drawings.router, estimates.router, recommendations.router,
    meta.router, dashboard.router,
)  # fmt: skip


def create_app(settings: Settings, client: redis.Redis) -> FastAPI:
    """The application.

    Args:
        settings: limits and allowed hosts.
        client: the service's Redis.
    """
    # No pages that load scripts from elsewhere; /openapi.json is there for every tool.
    admitted = [Depends(authorize), Depends(check_parameters)]
    app = FastAPI(
        title="AutoMAP",
        version=version(),
        docs_url=None,
        redoc_url=None,
        dependencies=admitted,
        # Names of functions are those of operations: generators of clients make methods of them.
        generate_unique_id_function=lambda route: route.name,
    )
    # A path with a slash too many is not there. A redirection would be an answer without a body, which leads away from
    # TLS behind a proxy.
    app.router.redirect_slashes = False
    app.state.settings = settings
    app.state.store = Store(client)
    app.state.large_bodies = anyio.CapacityLimiter(1)
    kept = int(settings.max_uploads * quotas.KEPT_SHARE) if settings.require_keys else 0
    app.state.uploads = quotas.Places(settings.max_uploads, kept)
    app.state.keys = Keys(client) if settings.require_keys else None
    app.state.reader = Reader(client)
    app.state.views = Views(app.state.reader, settings.root_path)
    app.state.feed = Feed(client)
    app.state.metrics = Metrics(client, app.state.feed)
    app.state.side_processes = SideProcesses(MOST_WAITING)
    # Children of their own: who submits a job does not wait for pictures.
    app.state.checks = SideProcesses(settings.max_connections)
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(UserError, _on_user_error)
    app.add_exception_handler(StarletteHTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(redis.RedisError, _on_redis_error)
    app.add_exception_handler(ClientDisconnect, _on_left)
    app.add_middleware(_Guard, settings=settings)
    document = functools.cache(lambda: openapi.describe(app, _routes(), settings.root_path))
    app.openapi = document  # type: ignore[method-assign]
    return app


def close(app: FastAPI) -> None:
    """Ends the children, threads and connections of an application that answers no more."""
    for part in (app.state.feed, app.state.reader, app.state.metrics):
        part.close()
    app.state.side_processes.close()
    app.state.checks.close()


class _Guard:
    """Middleware around every request: it gives an id, checks Host and size, and answers for what nobody caught."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            # A GET whose body the server leaves out, as probes and proxies ask.
            scope = {**scope, "method": "GET"}
        root_path = self.settings.root_path
        if root_path and scope["path"].startswith(f"{root_path}/"):
            # Proxies may take the prefix away, or leave it.
            scope = {**scope, "path": scope["path"].removeprefix(root_path)}
        request = Request(scope)
        request_id = request.state.request_id = uuid.uuid4().hex
        began, started = time.perf_counter(), False
        REQUEST.set(request_id)

        async def tagged(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                _note(request, message["status"], time.perf_counter() - began)
                audit(request, message["status"])
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            answer = self._refusal(request)
            if answer is None and root_path and scope["path"] == root_path:
                # Addresses in the page are relative to its own: without the slash, they would not be below this path.
                answer = RedirectResponse(f"{root_path}/", 308)
            if answer is not None:
                await answer(scope, receive, tagged)
                return
            await self.app(scope, _capped(receive, self._limit(request), self._within_s(request)), tagged)
        except Exception:
            LOG.exception("request %s: %s %s", request_id, request.method, request.url.path)
            if started:
                raise
            fault = problem(500, "Internal error", f"It is in the service's log as request {request_id}.")
            await _respond(request, fault)(scope, receive, tagged)

    def _refusal(self, request: Request) -> Response | None:
        allowed = self.settings.allowed_hosts
        for name in ONCE:
            if len(values := request.headers.getlist(name)) > 1:
                # What identifies somebody is not repeated.
                value = f"{len(values)} values" if name == "Authorization" else ", ".join(values)
                document = problem(400, "A header came twice", field=name, value=value, repair=f"Send {name} once.")
                return _respond(request, document)
        host = re.sub(r":\d*$", "", request.headers.get("host", "")).strip("[]").lower()
        if "*" not in allowed and host not in allowed:
            repair = "Call the service by its own name, or add this one to AUTOMAP_ALLOWED_HOSTS."
            return _respond(request, problem(400, "Unknown host", field="Host", value=host, repair=repair))
        sent_by = request.headers.get("sec-fetch-site", "none").lower()
        if request.method not in SAFE and sent_by not in OWN_PAGES:
            repair = "Use the service's own page, or a program that is not a web page."
            document = problem(403, "Another web page sent this", field="Sec-Fetch-Site", value=sent_by, repair=repair)
            return _respond(request, document)
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        if coding != "identity":
            repair = "Send the body as it is, without the header Content-Encoding."
            document = problem(415, "The body is compressed", field="Content-Encoding", value=coding, repair=repair)
            return _respond(request, document)
        length = request.headers.get("content-length", "0")
        limit = self._limit(request)
        if not length.isdigit() or int(length) > limit:
            return _respond(request, _too_large(request, length, limit))
        return None

    def _limit(self, request: Request) -> int:
        """Most bytes of the body."""
        return self.settings.max_model_bytes if _is_upload(request) else self.settings.max_request_bytes

    def _within_s(self, request: Request) -> float:
        """Longest time in which the body arrives, in seconds."""
        return self.settings.upload_timeout_s if _is_upload(request) else self.settings.body_timeout_s


def _is_upload(request: Request) -> bool:
    return bool(request.url.path == "/v1/models")


def _note(request: Request, status: int, seconds: float) -> None:
    """Counts an answer that begins now, and writes a line about it."""
    route = getattr(request.scope.get("route"), "path", "other")
    request.app.state.metrics.answered(request.method, route, status, seconds)
    # Without the query, which names files and models.
    told = {"method": request.method, "route": route, "status": status, "seconds": round(seconds, 6)}
    told |= {name: value for name, value in request.path_params.items() if name == "job_id"}
    ACCESS.info("%s %s -> %d", request.method, route, status, extra={"fields": told})


class _TooLarge(HTTPException):
    def __init__(self, limit: int) -> None:
        super().__init__(413)
        self.limit = limit


def _capped(receive: Receive, limit: int, within_s: float) -> Receive:
    """`receive` with a count of the bytes, because the length header may be missing or wrong, and of the time."""
    seen, ends_at, is_whole = 0, time.monotonic() + within_s, False

    async def counted() -> Message:
        nonlocal seen, is_whole
        if is_whole:
            return await receive()  # which waits for the client to leave
        try:
            message = await asyncio.wait_for(receive(), max(0.0, ends_at - time.monotonic()))
        except TimeoutError:
            repair = "Send it faster, or in a smaller form."
            document = problem(408, "The body took too long", field="body", value=f"{within_s:g} s", repair=repair)
            raise HTTPException(408, document, {"Connection": "close"}) from None
        is_whole = not message.get("more_body", False)
        seen += len(message.get("body", b""))
        if seen > limit:
            raise _TooLarge(limit)
        return message

    return counted


def _too_large(request: Request, value: str, limit: int) -> dict[str, Any]:
    if _is_upload(request):
        advice = "`automap strip` takes the weights out of a file, `automap export-onnx` writes files without them."
    else:
        advice = "the operator can raise AUTOMAP_MAX_REQUEST_BYTES."
    repair = f"Send at most {limit} bytes{f' ({limit >> 20} MiB)' if limit % MIB == 0 else ''}; {advice}"
    return problem(413, "The body is too large", field="body", value=f"{value} bytes", repair=repair)


def _respond(request: Request, document: dict[str, Any], headers: dict[str, str] | None = None) -> JSONResponse:
    document = {**document, "instance": f"urn:automap:request:{request.state.request_id}"}
    return JSONResponse(document, document["status"], headers=headers, media_type=MEDIA_TYPE)


def _on_user_error(request: Request, fault: Exception) -> Response:
    assert isinstance(fault, UserError)
    return _respond(request, problem_of(fault))


def _on_http_error(request: Request, fault: Exception) -> Response:
    assert isinstance(fault, StarletteHTTPException)
    headers = dict(fault.headers or {})
    named: dict[str, str] = {}
    if fault.status_code == 405:
        headers["Allow"] = ", ".join(sorted(_methods(request)))
        named = {"field": "method", "value": request.method, "repair": f"Use one of {headers['Allow']}."}
    elif fault.status_code == 404:
        named = {"field": "path", "value": request.url.path[:200], "repair": "GET /openapi.json lists all paths."}
    if isinstance(fault, _TooLarge):
        return _respond(request, _too_large(request, f"more than {fault.limit}", fault.limit))
    if isinstance(fault.detail, dict):
        return _respond(request, fault.detail, headers)
    title = HTTPStatus(fault.status_code).phrase
    detail = fault.detail if fault.detail != title else f"{request.method} {request.url.path}"
    return _respond(request, problem(fault.status_code, title, detail, **named), headers)


def _routes() -> list[APIRoute]:
    return [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]


def _methods(request: Request) -> set[str]:
    """The methods of all routes that have the request's path; the router itself reports only the first route's."""
    found = set[str]()
    for route in chain(request.app.routes, *(router.routes for router in ROUTERS)):
        if route.matches(request.scope)[0] != Match.NONE:
            found |= getattr(route, "methods", None) or set()
    return found | ({"HEAD"} if "GET" in found else set())


def _on_redis_error(request: Request, fault: Exception) -> Response:
    LOG.error("request %s: store: %s", request.state.request_id, fault)
    if isinstance(fault, redis.exceptions.OutOfMemoryError):
        repair = "Delete models and jobs that have ended, or tell the operator."
        detail = "Nothing was changed or accepted."
        return _respond(request, limit(507, "The store is full", detail, field="store", value="full", repair=repair))
    repair = "Send it again shortly, with the same Idempotency-Key."
    title, value = "The store does not answer", "no answer"
    if isinstance(fault, redis.ResponseError):  # as one that is read only for a while, or that refuses its user
        title, value = "The store refuses a command", "refused"
        repair += " Tell the operator if it goes on: the log says what it refuses."
    document = limit(503, title, field="store", value=value, repair=repair)
    return _respond(request, document, {"Retry-After": "5"})


def _on_left(request: Request, fault: Exception) -> Response:
    # Nobody hears the answer. It makes metrics and the audit say that the client, and not the service, is at fault.
    return _respond(request, problem(400, "The client left before its body had ended"))


def _on_invalid(request: Request, fault: Exception) -> Response:
    # Of parameters: bodies are read by `automap.documents` and `automap.records`.
    assert isinstance(fault, RequestValidationError)
    first = fault.errors()[0]
    # Behind its name a parameter that is given several times has a number, which says nothing to its sender.
    place = str(first["loc"][1]) if len(first["loc"]) > 1 else "request"
    if first["type"] in ("string_pattern_mismatch", "string_too_short") and place in FORMS:
        said = "not understood", FORMS[place]
    else:
        said = wanted(str(first["type"]), first.get("ctx", {})) or (str(first["msg"]), "See docs/api.md.")
    message, repair = said
    return _respond(request, problem_of(UserError(message, field=place, value=first.get("input"), repair=repair)))


FORMS = {
    "cursor": "Give `next` of the page before, unchanged.",
    "last-event-id": "Give the id of an event of this job, unchanged.",
    "idempotency-key": "Give 1 to 255 ASCII letters, digits and signs, without blanks.",
}
"""Parameter that has a form of its own -> how to write it."""

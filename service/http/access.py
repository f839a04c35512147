"""Who may call which route.

A route is open to keys with the scope `read` if it is a GET, else `submit`; `access` states otherwise. Where no keys
are needed everybody is the tenant `DEFAULT_TENANT`. Every refusal, and every admitted request that may change
something, is one line of the logger `automap.audit`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import redis
from fastapi import HTTPException, Request
from fastapi.concurrency import run_in_threadpool

from service.http.reader import Reader
from service.jobs.keys import BadKey, Key, Keys, Scope, place_of
from service.jobs.model_store import DEFAULT_TENANT
from service.problems import problem

AUDIT = logging.getLogger("automap.audit")
Access = Literal["anybody", Scope]
SAFE = ("GET", "HEAD")
F = TypeVar("F", bound=Callable[..., Any])


def access(needed: Access) -> Callable[[F], F]:
    """Decorates the function of a route with the scope that it needs, `anybody` = no key."""

    def mark(function: F) -> F:
        function.access = needed  # type: ignore[attr-defined]
        return function

    return mark


def access_of(route: Any) -> Access:
    """The scope that a route needs."""
    stated = getattr(route.endpoint, "access", None)
    return cast("Access", stated or ("read" if route.methods <= set(SAFE) else "submit"))


async def authorize(request: Request) -> None:
    """Admits a request, and notes whose it is; a dependency of every route.

    Raises:
        HTTPException: 401 without a key that may be used, 403 where it has not the scope.
    """
    keys: Keys | None = request.app.state.keys
    request.state.tenant, request.state.key_id = DEFAULT_TENANT if keys is None else "-", "-"
    needed = access_of(request.scope["route"])
    if keys is None or needed == "anybody":
        return
    kind, _, text = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not text:
        raise _unauthorized("There is none.", "nothing")
    try:
        reader: Reader = request.app.state.reader
        key: Key = keys.checked(text.strip(), await reader.hget(*place_of(text.strip())))
    except BadKey as fault:
        if fault.key is not None:
            request.state.tenant, request.state.key_id = fault.key.tenant, fault.key.id
        raise _unauthorized(str(fault), "a key that may not be used") from None
    if not keys.is_noted(key):
        await run_in_threadpool(keys.note, key)
    request.state.tenant, request.state.key_id = key.tenant, key.id
    if needed not in key.scopes:
        repair = f"Use a key with the scope {needed}."
        document = problem(
            403, "The key does not allow this", field="scopes", value=" ".join(key.scopes), repair=repair
        )
        raise HTTPException(403, document)


async def is_admitted(request: Request) -> bool:
    """Whether a request that was admitted still would be: its key may have been revoked, or its time be over, while the
    answer goes on. Where the store does not answer, it would."""
    try:
        await authorize(request)
    except HTTPException:
        return False
    except redis.RedisError:
        return True
    return True


def audit(request: Request, status: int) -> None:
    """Writes a line for a request that was refused for its key, or that may have changed something."""
    if request.app.state.keys is None or (request.method in SAFE and status not in (401, 403)):
        return
    state = request.state
    AUDIT.info(
        "tenant=%s key=%s %s %s -> %d",
        getattr(state, "tenant", "-"),
        getattr(state, "key_id", "-"),
        request.method,
        # Without the query, which names files; quoted, so that nobody writes lines of his own.
        request.scope["path"].encode("unicode_escape").decode()[:200],
        status,
    )


def _unauthorized(why: str, value: str) -> HTTPException:
    """The error that asks for a key; `value` says what came in its place, and never repeats it: it may be a secret."""
    repair = (
        "Send the header Authorization: Bearer with a key, which the command line takes from AUTOMAP_KEY; "
        "`automap keys create` makes one."
    )
    document = problem(
        401, "A valid key is needed", f"{why} {repair}", field="Authorization", value=value, repair=repair
    )
    return HTTPException(401, document, {"WWW-Authenticate": 'Bearer realm="automap"'})

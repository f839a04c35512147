"""Query parameters that a route does not take are refused. One that is misspelt would otherwise be left out without a
word: an upload with `batch_dims` in place of `batch_dim` would be read with another batch than its sender means.

Only routes of the API look, so that probes and pages may be asked for with whatever their callers add.
"""

from __future__ import annotations

from fastapi import Request
from fastapi.routing import APIRoute

from automap.errors import UserError, one_of

API = "/v1/"
"""Start of the paths whose parameters are looked at."""


async def check_parameters(request: Request) -> None:
    """Refuses a request with a parameter that its route does not take; a dependency of every route.

    Raises:
        UserError: names the parameter, and those that there are.
    """
    route = request.scope["route"]
    if not request.url.query or not isinstance(route, APIRoute) or not route.path.startswith(API):
        return
    known = sorted(field.alias for field in route.dependant.query_params)
    unknown = next((name for name in request.query_params if name not in known), None)
    if unknown is not None:
        repair = one_of(known, unknown) if known else "Leave it out: this request takes no parameters."
        raise UserError("there is no such parameter", field="query", value=unknown, repair=repair)

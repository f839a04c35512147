"""Refuses query parameters that a route does not take, and those that are given twice where a route takes them once.

The framework ignores unknown parameters: an upload with `batch_dims` in place of `batch_dim` would be read with another
batch than its sender means. Of a parameter that is given twice it takes the last value. Only routes of the API are
checked, since callers of probes and pages may add parameters of their own.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args, get_origin

from fastapi import Request
from fastapi.routing import APIRoute

from automap.errors import UserError, one_of

API = "/v1/"
"""Start of the paths whose parameters are looked at."""


async def check_parameters(request: Request) -> None:
    """Refuses a request with a parameter that its route does not take, or not twice; a dependency of every route.

    Raises:
        UserError: names the parameter, and those that there are or the values that it has.
    """
    route = request.scope["route"]
    if not request.url.query or not isinstance(route, APIRoute) or not route.path.startswith(API):
        return
    known = {field.alias: _is_repeatable(field.field_info.annotation) for field in route.dependant.query_params}
    for name, count in Counter(name for name, _ in request.query_params.multi_items()).items():
        if name not in known:
            repair = one_of(sorted(known), name) if known else "Leave it out: this request takes no parameters."
            raise UserError("there is no such parameter", field="query", value=name, repair=repair)
        if count > 1 and not known[name]:
            values = ", ".join(request.query_params.getlist(name))
            raise UserError("given more than once", field=name, value=values, repair="Give it once.")


def _is_repeatable(annotation: Any) -> bool:
    """Whether a parameter of this type is a list, or a list or nothing."""
    return any(get_origin(kind) is list for kind in (annotation, *get_args(annotation)))

"""Errors as RFC 9457 problem documents, and back.

The one place that knows which exception has which `type` and which HTTP status. Knows nothing of HTTP frameworks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from automap.errors import ClusterError, ModelError, ModelTooExpensive, NothingFits, PlanError, ProblemError, UserError

MEDIA_TYPE = "application/problem+json"
_PREFIX = "urn:automap:problem:"

_LATER = 75
"""EX_TEMPFAIL of sysexits.h: the same command may succeed later."""

_KINDS: Mapping[str, tuple[type[UserError], str]] = {
    "model": (ModelError, "The model cannot be used"),
    "model-too-expensive": (ModelTooExpensive, "Reading the model ran into a limit"),
    "cluster": (ClusterError, "The cluster is not understood"),
    "problem": (ProblemError, "The settings cannot be used"),
    "plan": (PlanError, "The plan cannot be used"),
    "nothing-fits": (NothingFits, "No plan fits into device memory"),
    "invalid": (UserError, "The request is invalid"),
}


class RemoteError(Exception):
    """The service could not do what was asked, for a reason that is not in the request's documents."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        title, detail = str(document.get("title", "error")), str(document.get("detail", ""))
        # A detail may say no more than the title.
        told = (title if detail.rstrip(".") == title else f"{title}: {detail}").strip(": ")
        if "value" in document and (repair := str(document.get("repair", ""))) not in told:
            told = f"{told.rstrip('.')} (got {document['value']}). {repair}"
        super().__init__(told)
        self.document = document
        self.status = int(document.get("status", 0))

    @property
    def exit_code(self) -> int:
        """The exit code of a command that ends with it, see `service.command.main`."""
        if self.status in (429, 503):
            return _LATER
        # Of what a client is told, only these say nothing against the request: the body was slow, the job is not there
        # yet (or was cancelled).
        return 2 if 400 <= self.status < 500 and self.status not in (408, 409) else 1


def problem_of(fault: UserError) -> dict[str, Any]:
    """The document of an error that the user can repair."""
    kind = next((kind for kind, (cls, _) in _KINDS.items() if type(fault) is cls), "invalid")
    return {"type": _PREFIX + kind, "title": _KINDS[kind][1], "status": 422, "detail": str(fault), **fault.texts} | (
        {"nearest": fault.nearest, "changes": list(fault.changes)} if isinstance(fault, NothingFits) else {}
    )


def problem(status: int, title: str, detail: str = "", **more: object) -> dict[str, Any]:
    """A document without a type of its own."""
    return {"type": "about:blank", "title": title, "status": status, "detail": detail or title, **more}


def limit(status: int, title: str, detail: str = "", *, field: str, value: object, repair: str) -> dict[str, Any]:
    """The document for a limit that is reached: its field, the value, and the repair; `detail` comes before the
    repair."""
    return problem(status, title, f"{detail} {repair}".strip(), field=field, value=str(value), repair=repair)


def error_of(document: Mapping[str, Any]) -> UserError | RemoteError:
    """The exception that a document stands for."""
    kind = str(document.get("type", ""))
    entry = _KINDS.get(kind.removeprefix(_PREFIX)) if kind.startswith(_PREFIX) else None
    if entry is None:
        return RemoteError(document)
    fault = entry[0](
        str(document.get("message") or document.get("detail", "")),
        field=str(document.get("field", "")),
        value=str(document.get("value", "")),
        repair=str(document.get("repair", "")),
    )
    if isinstance(fault, NothingFits):
        fault.nearest, fault.changes = document.get("nearest"), tuple(document.get("changes", ()))
    return fault


def wanted(kind: str, bounds: Mapping[str, Any]) -> tuple[str, str] | None:
    """What is wrong with a parameter that pydantic refuses, and what to write instead.

    Args:
        kind: the type of pydantic's error.
        bounds: its context.

    Returns:
        Message and repair; None = only pydantic's own words say it.
    """
    match kind:
        case "int_parsing" | "int_from_float":
            return "expected an integer", "Give an integer."
        case "float_parsing":
            return "expected a number", "Give a number."
        case "finite_number":
            return "expected a finite number", "Give a finite number."
        case "greater_than_equal":
            return "out of range", f"Give a number of at least {bounds['ge']:.12g}."
        case "greater_than":
            return "out of range", f"Give a number above {bounds['gt']:.12g}."
        case "less_than_equal":
            return "out of range", f"Give a number of at most {bounds['le']:.12g}."
        case "literal_error" | "enum":
            return "unknown value", f"Use {bounds['expected']}."
        case "string_too_short":
            least = bounds["min_length"]
            return "too short", f"Leave it out, or give at least {least} character{'s' if least > 1 else ''}."
        case "string_too_long":
            return "too long", f"Give at most {bounds['max_length']} characters."
        case _:
            return None

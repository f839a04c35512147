"""What the store keeps of a model and of a job, and how a job is read back.

Independent of Redis commands. Units: seconds since 1970, bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from automap.documents import read_document
from automap.errors import UserError
from service.jobs.run_job import JobRequest
from service.problems import problem

State = Literal["queued", "running", "succeeded", "failed", "cancelled"]
STATES: tuple[State, ...] = get_args(State)
ACTIVE: tuple[State, ...] = ("queued", "running")

FIELDS = (
    "state", "model_id", "request", "progress", "problem", "attempt", "created_at", "started_at", "finished_at",
    "step_time_s",
)  # fmt: skip
"""Fields of a job's hash that `job_of` reads, in its order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A stored model file."""

    id: str
    name: str
    num_bytes: int
    summary: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job's record, without its plan."""

    id: str
    state: State = "queued"
    model_id: str
    request: JobRequest | None
    """None where the record cannot be read, as after a change of the format; `problem` then says so."""
    attempt: int = 0
    """Number of runs so far, which is the fencing token of the latest run."""
    progress: Mapping[str, Any] | None = None
    problem: Mapping[str, Any] | None = None
    created_at: float
    """Seconds since 1970, like the other two."""
    started_at: float | None = None
    finished_at: float | None = None
    step_time_s: float | None = None
    """Predicted seconds of a step of the plan, of a job that has one; the search may have found a faster plan of which
    the estimate cannot tell that it is faster."""


def members_of(job_id: str, workers: int) -> list[str]:
    """Ids of the members of a job that is searched by several workers, see `service.jobs.team`."""
    return [f"{job_id}-{number}" for number in range(1, workers)]


def parent_of(job_id: str) -> str | None:
    """Id of the job that a job is a member of, if it is one."""
    parent, _, number = job_id.partition("-")
    return parent if number else None


def dumps(value: object) -> str:
    """`value` as the JSON that is stored."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def job_of(job_id: str, row: list[bytes | None]) -> Job:
    """The record of a row. One that cannot be read has no request and says why: it must not hide the others.

    Args:
        job_id: id of the job.
        row: values of `FIELDS`; of a member its job's request.
    """
    field = {name: (value or b"").decode(errors="replace") for name, value in zip(FIELDS, row, strict=True)}
    faults = []

    def read(name: str, parse: Callable[[str], Any], *, otherwise: Any = None) -> Any:
        if not field[name]:
            return otherwise
        try:
            return parse(field[name])
        except (ValueError, UserError) as fault:
            faults.append(f"{name}: {fault}")
            return otherwise

    request = read("request", lambda text: JobRequest.from_json(read_document(text)))
    if request is not None and parent_of(job_id) is not None:
        request = request.of_member(int(job_id.partition("-")[2]))
    found = Job(
        id=job_id,
        state=read("state", _state, otherwise="failed"),
        model_id=field["model_id"],
        request=request,
        attempt=read("attempt", int, otherwise=0),
        progress=read("progress", read_document),
        problem=read("problem", read_document),
        created_at=read("created_at", read_document, otherwise=0.0),
        started_at=read("started_at", read_document),
        finished_at=read("finished_at", read_document),
        step_time_s=read("step_time_s", read_document),
    )
    if request is not None and not faults:
        return found
    detail = "; ".join(faults) or "request: missing"
    return replace(found, request=None, problem=problem(500, "The stored record cannot be read", detail))


def state_of(text: bytes) -> State:
    """The state of a job that a record names; one that cannot be read counts as failed."""
    try:
        return _state(text.decode(errors="replace"))
    except ValueError:
        return "failed"


def _state(text: str) -> State:
    if text not in STATES:
        raise ValueError(f"no state: {text!r}")
    return text

"""The common part of the Python clients: requests as data, the reading of answers, and rules for sending again.

Knows the addresses and documents of the REST API, and makes no connection.
"""

from __future__ import annotations

import json
import re
import ssl
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import httpx
from httpx_retries import Retry, RetryTransport
from httpx_sse import ServerSentEvent

from automap.errors import UserError
from automap.gnn.problem import GnnProblem
from service.problems import MEDIA_TYPE, RemoteError, error_of, problem

Document = dict[str, Any]
ENDED = ("succeeded", "failed", "cancelled")
PATIENCE_S = 120.0
"""Seconds for which `watch` tries to reach a service that has gone away (assumed: a restart takes a few seconds)."""
SILENCE_S = 45.0
"""Seconds without a byte after which a stream of events is dead: the service sends a comment every 15."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEvent:
    """Something that happened to a job."""

    id: str
    """Rises with time; `watch(job, after=id)` continues with the next event."""
    kind: Literal["state", "progress"]
    """`state`: the job has another state; `progress`: its search has made progress."""
    data: Mapping[str, Any]
    """Of `state`: state, attempt, at, problem. Of `progress`: searcher, evaluations, seconds, best_step_time_s,
    lower_bound_s, fraction, members (name -> evaluations, best_step_time_s), attempt."""

    @property
    def ends(self) -> bool:
        """Whether it is the last event of its job."""
        return self.kind == "state" and self.data["state"] in ENDED


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A request."""

    method: str
    path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `httpx.Client.request`."""


def get(path: str, **query: Any) -> Call:
    """A GET request; query parameters that are None are left out."""
    return Call(method="GET", path=path, options={"params": {k: v for k, v in query.items() if v is not None}})


MOST_ON_A_PAGE = 1000
"""Jobs that the service lists at once at most."""


class Listing:
    """Reads pages of a list of jobs until enough jobs are found: a page with large jobs has fewer of them.

    Args:
        limit: most jobs; None = all.
        states: only jobs in one of these states; none = all.
        model_id: only jobs of this model; None = all.
    """

    def __init__(self, limit: int | None, states: Sequence[str], model_id: str | None) -> None:
        self.jobs: list[Document] = []
        self._limit, self._states, self._model_id = limit, list(states) or None, model_id
        self._cursor: str | None = None
        self.is_whole = False
        """Whether no further page is needed."""

    def call(self) -> Call:
        """Asks for the next page."""
        left = MOST_ON_A_PAGE if self._limit is None else self._limit - len(self.jobs)
        page = {"limit": min(left, MOST_ON_A_PAGE), "cursor": self._cursor}
        return get("/v1/jobs", **page, state=self._states, model_id=self._model_id)

    def add(self, page: Document) -> None:
        """Adds the jobs of a page, which is the answer to `call`."""
        self.jobs += page["jobs"]
        self._cursor = page["next"]
        self.is_whole = self._cursor is None or len(self.jobs) == self._limit


def job_path(job_id: str, rest: str = "") -> str:
    """The path of a job, or of `rest` below it; the id is quoted, so that any text is one part of the path."""
    return f"/v1/jobs/{quote(job_id, safe='')}{rest}"


def plan(job_id: str, *, so_far: bool) -> Call:
    """Asks for the plan of a job."""
    return get(job_path(job_id, "/plan"), best="so-far" if so_far else None)


def export(job_id: str, target: str) -> Call:
    """Asks for the plan of a job as the configuration of a trainer."""
    return get(job_path(job_id, f"/exports/{quote(target, safe='')}"))


def _file(path: Path, parameters: tuple[str, ...]) -> bytes:
    # Here, for most calls send no file.
    from service.model_files import read_model_file

    return read_model_file(path, parameters)


def upload_model(
    model: bytes | Path,
    *,
    name: str,
    dims: Mapping[str, int] | None,
    parameters: Sequence[str],
    batch_dims: Mapping[str, int | None] | None,
) -> Call:
    """See `AutomapClient.upload_model`."""
    data = model if isinstance(model, bytes) else _file(model, tuple(parameters))
    query: list[tuple[str, str]] = [("name", name)]
    query += [("dim", f"{key}={size}") for key, size in (dims or {}).items()]
    query += [("parameters", glob) for glob in parameters]
    places = {name: "none" if place is None else place for name, place in (batch_dims or {}).items()}
    query += [("batch_dim", f"{name}={place}") for name, place in places.items()]
    headers = {"Content-Type": "application/octet-stream"}
    return Call(method="POST", path="/v1/models", options={"params": query, "content": data, "headers": headers})


def _about(model: str) -> Document:
    return {"zoo": model.removeprefix("zoo:")} if model.startswith("zoo:") else {"model_id": model}


def submit(
    model: str, cluster: str | Mapping[str, Any], training: Mapping[str, Any], options: Mapping[str, Any]
) -> Call:
    """See `AutomapClient.submit`. Its key makes it safe to send again: one key is one job."""
    body = {**_about(model), "cluster": cluster, "training": training, **options}
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    return Call(method="POST", path="/v1/jobs", options={"json": body, "headers": headers})


def submit_gnn(problem: GnnProblem | Mapping[str, Any], options: Mapping[str, Any]) -> Call:
    """See `AutomapClient.submit_gnn`. Its key makes it safe to send again: one key is one job."""
    document = problem.to_json() if isinstance(problem, GnnProblem) else problem
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    return Call(
        method="POST", path="/v1/gnn/jobs", options={"json": {"problem": document, **options}, "headers": headers}
    )


def estimate(
    model: str, cluster: str | Mapping[str, Any], training: Mapping[str, Any], options: Mapping[str, Any]
) -> Call:
    """See `AutomapClient.estimate`."""
    body = {**_about(model), "cluster": cluster, "training": training, **options}
    return Call(method="POST", path="/v1/estimates", options={"json": body})


def read(response: httpx.Response, url: str) -> Document:
    """The document of an answer.

    Raises:
        UserError: what was asked can be repaired.
        RemoteError: it was refused otherwise, or no AutoMAP service has answered.
    """
    if response.status_code == 204:
        return {}
    kind = response.headers.get("content-type", "")
    try:
        document = response.json()
    except ValueError:
        document = None
    if not isinstance(document, dict) or (response.is_error and not kind.startswith(MEDIA_TYPE)):
        said = f"{url} answered {response.status_code}, and not as AutoMAP does. Is the address right?"
        raise RemoteError(problem(response.status_code, "Not an AutoMAP service", said))
    if response.is_error:
        if response.status_code == 404 and document.get("field") == "path":
            repair = "Give its address as `automap serve` prints it, without /v1, as in http://127.0.0.1:8080."
            raise UserError("the service is there, and has no such path", field="url", value=url, repair=repair)
        raise error_of(document)
    return document


def fault_of(fault: Exception, url: str) -> Exception:
    """The error for a request that got no answer."""
    if isinstance(fault, httpx.InvalidURL | httpx.UnsupportedProtocol):
        repair = "Write it as in http://127.0.0.1:8080."
        return UserError(f"not a URL ({fault})", field="url", value=url, repair=repair)
    text = f"{url} does not answer ({fault}). Is `automap serve` running there?"
    return RemoteError(problem(0, "No answer", text))


def check_end(job: Mapping[str, Any]) -> None:
    """Raises the error of a job that has ended without a plan, see `AutomapClient.wait`."""
    if job["state"] == "failed":
        raise error_of(job["problem"])
    if job["state"] == "cancelled":
        raise RemoteError(problem(409, "The job was cancelled"))


def headers(key: str | None) -> dict[str, str]:
    """Headers of every request.

    Args:
        key: the user's key, or None where the service asks for none.

    Raises:
        UserError: the key cannot be one.
    """
    if key is not None and not re.fullmatch(r"[!-~]+", key):
        # Without the value, which is a secret all the same.
        repair = (
            "Give it as `automap keys create` prints it, in letters, digits and signs, without blanks or line ends."
        )
        raise UserError("this is not a key", field="key", value=f"{len(key)} characters", repair=repair)
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def trusted(url: str) -> ssl.SSLContext | bool:
    """Whose certificates a transport to a service trusts: `verify` of httpx.

    To read those of all authorities takes 20 ms, a seventh of a short command, and over http none is asked for.
    """
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if url.lower().startswith("http://") else True


def patient(transport: httpx.BaseTransport | httpx.AsyncBaseTransport) -> RetryTransport:
    """A transport that sends a request again if nobody answered, or if the service asks to try again later.

    All requests of the clients may safely arrive twice: the id of a model is the digest of its bytes, a job is
    submitted with an Idempotency-Key, and a cancelled job stays cancelled.
    """
    again = Retry(
        total=3,
        backoff_factor=0.05,
        max_backoff_wait=2.0,
        allowed_methods=("GET", "POST", "DELETE"),
        status_forcelist=(502, 503, 504),
        retry_on_exceptions=(httpx.NetworkError, httpx.RemoteProtocolError),
    )
    return RetryTransport(transport=transport, retry=again)


class Reconnecting:
    """What `watch` remembers between two connections.

    Attributes:
        last: the id of the last event.
        connected: whether the service has answered once; before, it is not waited for.
    """

    def __init__(self, after: str) -> None:
        self.last = after
        self.connected = False
        self._tries = 0
        self._waited_s = 0.0

    def heard(self, sent: ServerSentEvent) -> JobEvent | None:
        """The event that has arrived; None if it was a comment, which the service sends when nothing happens.

        By the standard, an event without data is ignored; httpx-sse returns it after an event with an id has come.
        """
        self._tries, self._waited_s = 0, 0.0
        if not sent.data:
            return None
        self.last = sent.id
        return JobEvent(id=sent.id, kind="state" if sent.event == "state" else "progress", data=json.loads(sent.data))

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the request."""
        return {
            "headers": {"Last-Event-ID": self.last} if self.last else {},
            "timeout": httpx.Timeout(10.0, read=SILENCE_S),
        }

    def pause_s(self, fault: Exception) -> float:
        """Seconds to wait after a fault, before the next attempt.

        Raises:
            Exception: the fault, if waiting does not help, or has not helped within `PATIENCE_S`.
        """
        if not self.connected or (isinstance(fault, RemoteError) and fault.status not in (0, 502, 503, 504)):
            raise fault
        pause_s: float = min(5.0, 0.1 * 2**self._tries)
        if self._waited_s + pause_s > PATIENCE_S:
            raise fault
        self._tries += 1
        self._waited_s += pause_s
        return pause_s

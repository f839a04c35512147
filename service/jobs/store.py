"""The record of models and jobs, in Redis.

A job is a hash; its transitions are optimistic transactions (WATCH/MULTI, no scripts). Each run of a job takes a rising
number, its fencing token: a writer with an older one, or to a job that has ended, is refused with `Superseded`,
so that a worker which was thought dead cannot overwrite anything. Models are kept by the sha256 of their bytes and
are in Redis too, so that workers on other machines reach them. Knows nothing of HTTP or of who runs jobs.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.client import Pipeline
from redis.retry import Retry

from automap.documents import read_document
from automap.errors import UserError
from service.jobs import events
from service.jobs.run_job import JobRequest
from service.problems import problem

State = Literal["queued", "running", "succeeded", "failed", "cancelled"]
ACTIVE: tuple[State, ...] = ("queued", "running")
GRAPH_TTL_S = 3600
"""Seconds that imported models are kept; they can always be made again from the file."""

LONGEST_PAUSE_S = 1.0
"""Longest time between two attempts of a patient client, so that work goes on soon after Redis is back."""

_MODELS, _JOBS, _ACTIVE = "automap:models", "automap:jobs", "automap:active"
_FIELDS = (
    "state", "model_id", "request", "progress", "problem", "attempt", "created_at", "started_at", "finished_at",
)  # fmt: skip


class Superseded(Exception):
    """Another run of the job has begun, or the job has ended: the run must stop and write nothing."""


class StoreFull(Exception):
    """The limit on stored models is reached."""


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


def connect(url: str, *, patient: bool = False) -> redis.Redis:
    """A client for `url`.

    Args:
        url: address of a Redis.
        patient: whether commands wait for a Redis that is away, however long; else they fail at once.

    Raises:
        UserError: not such a URL.
    """
    more = {"retry": Retry(ExponentialBackoff(cap=LONGEST_PAUSE_S, base=0.05), retries=-1)} if patient else {}
    try:
        return redis.Redis.from_url(url, socket_connect_timeout=5, **more)
    except ValueError:
        repair = "Write it as in redis://host:6379/0."
        # Without what is before the host: it may be a password.
        shown = re.sub(r"//[^/]*@", "//...@", url)
        raise UserError("not a Redis URL", field="redis_url", value=shown, repair=repair) from None


def impatient(client: redis.Redis) -> redis.Redis:
    """A client of the same Redis whose commands fail at once where it is away."""
    pool = client.connection_pool
    given = {**pool.connection_kwargs, "retry": Retry(NoBackoff(), 0)}
    return redis.Redis(connection_pool=redis.ConnectionPool(connection_class=pool.connection_class, **given))


class Store:
    """Models and jobs of one Redis.

    What a run writes raises `Superseded` if the run is not the latest of its job, or the job has ended.

    Args:
        client: connection to it.
        clock: seconds since 1970.
    """

    def __init__(self, client: redis.Redis, *, clock: Callable[[], float] = time.time) -> None:
        self.client = client
        self._redis: Any = client  # redis-py types every reply as bytes or text; this connection never decodes
        self._clock = clock

    # Models

    def add_model(self, data: bytes, *, name: str, summary: Mapping[str, Any], capacity: int) -> Model:
        """Stores a model file; the same bytes have the same id and are stored once, with the name they had first.

        Raises:
            StoreFull: all files together would exceed `capacity` bytes.
        """
        model_id = hashlib.sha256(data).hexdigest()
        known = self.model(model_id)
        if known is not None:
            # What is said about its dims may differ.
            return replace(known, summary=summary)
        sizes = self._redis.hgetall(_MODELS)
        if sum(map(int, sizes.values())) + len(data) > capacity:
            raise StoreFull
        with self._redis.pipeline() as pipe:
            pipe.hset(_MODELS, model_id, str(len(data)))
            about = {"name": name, "summary": _dumps(summary), "data": data}
            pipe.hset(f"automap:model:{model_id}", mapping=about)
            pipe.execute()
        return Model(id=model_id, name=name, num_bytes=len(data), summary=summary)

    def model(self, model_id: str) -> Model | None:
        """The record of a model, or None."""
        name, summary = self._redis.hmget(f"automap:model:{model_id}", ["name", "summary"])
        size = self._redis.hget(_MODELS, model_id)
        if name is None or summary is None or size is None:
            return None
        return Model(id=model_id, name=name.decode(), num_bytes=int(size), summary=json.loads(summary))

    def model_bytes(self, model_id: str) -> bytes | None:
        """The bytes of a model's file, or None."""
        return cast("bytes | None", self._redis.hget(f"automap:model:{model_id}", "data"))

    def add_graph(self, key: str, data: bytes) -> None:
        """Keeps an imported model for a while."""
        self._redis.set(f"automap:graph:{key}", data, ex=GRAPH_TTL_S)

    def graph(self, key: str) -> bytes | None:
        """An imported model, or None."""
        return cast("bytes | None", self._redis.get(f"automap:graph:{key}"))

    def forget_graphs(self) -> None:
        """Drops all imported models: another version of the importer may read them differently."""
        for key in self._redis.scan_iter("automap:graph:*"):
            self._redis.delete(key)

    # Jobs

    def create(self, model_id: str, request: JobRequest, enqueue: Callable[[Pipeline, str], None]) -> Job:
        """Records a job and puts it into the queue, both or neither.

        Args:
            model_id: id of a stored model.
            request: the request of the job.
            enqueue: adds the queue's own commands to the transaction.
        """
        job_id, now = uuid.uuid4().hex, self._clock()
        with self._redis.pipeline() as pipe:
            fields = {"state": "queued", "model_id": model_id, "request": _dumps(request.to_json())}
            fields |= {"attempt": "0", "created_at": repr(now)}
            pipe.multi()  # RQ opens the transaction itself unless it is open
            pipe.hset(_key(job_id), mapping=fields)
            pipe.zadd(_JOBS, {job_id: now})
            pipe.sadd(_ACTIVE, job_id)
            events.add(pipe, events_key(job_id), "state", self._state_event("queued", 0))
            enqueue(pipe, job_id)
            pipe.execute()
        return Job(id=job_id, model_id=model_id, request=request, created_at=now)

    def job(self, job_id: str) -> Job | None:
        """A job's record, or None."""
        return next(iter(self._read([job_id])), None)

    def state(self, job_id: str) -> State | None:
        """A job's state, or None."""
        found = self._redis.hget(_key(job_id), "state")
        return None if found is None else cast("State", found.decode())

    def jobs(self, limit: int) -> list[Job]:
        """The latest jobs, newest first."""
        return self._read(name.decode() for name in self._redis.zrevrange(_JOBS, 0, limit - 1))

    def active(self) -> list[Job]:
        """Jobs that have not ended, oldest first."""
        found = self._read(name.decode() for name in self._redis.smembers(_ACTIVE))
        return sorted((job for job in found if job.state in ACTIVE), key=lambda job: (job.created_at, job.id))

    def plan(self, job_id: str) -> dict[str, Any] | None:
        """The plan of a job that succeeded, or None."""
        found = self._redis.hget(_key(job_id), "plan")
        return None if found is None else json.loads(found)

    def begin(self, job_id: str) -> int | None:
        """Starts a run of a job that is queued.

        Returns:
            The run's fencing token; None when there is nothing to run: the job is unknown, has ended, or another run of
            it is under way.
        """
        token = 0

        def change(pipe: Any) -> None:
            nonlocal token
            state, attempt = pipe.hmget(_key(job_id), ["state", "attempt"])
            pipe.multi()
            if state != b"queued":
                raise Superseded
            token = int(attempt) + 1
            started = {"state": "running", "attempt": str(token), "started_at": repr(self._clock())}
            pipe.hset(_key(job_id), mapping=started)
            pipe.hdel(_key(job_id), "progress")
            events.add(pipe, events_key(job_id), "state", self._state_event("running", token))

        try:
            self._redis.transaction(change, _key(job_id))
        except Superseded:
            return None
        return token

    def set_progress(self, job_id: str, token: int, progress: Mapping[str, Any], *, is_event: bool = True) -> None:
        """Writes the progress of a run; `is_event` = those who listen to the job are told too."""
        told = {**progress, "attempt": token} if is_event else None
        self._write(job_id, token, {"progress": _dumps(progress)}, progress=told)

    def check(self, job_id: str, token: int) -> bool:
        """Whether the run is still the one that counts."""
        state, attempt = self._redis.hmget(_key(job_id), ["state", "attempt"])
        return state == b"running" and attempt is not None and int(attempt) == token

    def succeed(self, job_id: str, token: int, plan: Mapping[str, Any]) -> None:
        """Ends a job with its plan."""
        self._write(job_id, token, {"state": "succeeded", "plan": _dumps(plan)}, ends=True)

    def fail(self, job_id: str, token: int | None, problem: Mapping[str, Any]) -> None:
        """Ends a job with a problem document; `token` None = whatever run is the latest."""
        self._write(job_id, token, {"state": "failed", "problem": _dumps(problem)}, ends=True)

    def requeue(self, job_id: str, token: int | None) -> None:
        """Puts a job back into the queue whose run has died, so that another run follows; `token` as in `fail`."""
        self._write(job_id, token, {"state": "queued"})

    def cancel(self, job_id: str) -> bool:
        """Ends a job as cancelled; returns whether it had not ended before."""
        try:
            self._write(job_id, None, {"state": "cancelled"}, ends=True)
        except Superseded:
            return False
        return True

    def events(self, job_id: str, after: str = "") -> list[events.Event]:
        """The events of a job in order; those behind the event `after`, or all."""
        return events.read(self.client, events_key(job_id), after)

    def _state_event(self, state: str, attempt: int, problem: str | None = None) -> dict[str, Any]:
        told = {"state": state, "attempt": attempt, "at": self._clock()}
        return told if problem is None else {**told, "problem": json.loads(problem)}

    def _write(
        self,
        job_id: str,
        token: int | None,
        fields: dict[str, str],
        *,
        ends: bool = False,
        progress: Mapping[str, Any] | None = None,
    ) -> None:
        if ends:
            fields["finished_at"] = repr(self._clock())

        def change(pipe: Any) -> None:
            state, attempt = pipe.hmget(_key(job_id), ["state", "attempt"])
            pipe.multi()
            if state is None or state.decode() not in ACTIVE:
                raise Superseded
            if token is not None and (state != b"running" or int(attempt) != token):
                raise Superseded
            pipe.hset(_key(job_id), mapping=fields)
            if progress is not None:
                events.add(pipe, events_key(job_id), "progress", progress)
            if "state" in fields:
                told = self._state_event(fields["state"], int(attempt), fields.get("problem"))
                events.add(pipe, events_key(job_id), "state", told)
            if ends:
                pipe.srem(_ACTIVE, job_id)

        self._redis.transaction(change, _key(job_id))

    def _read(self, ids: Iterable[str]) -> list[Job]:
        names = list(ids)
        with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hmget(_key(name), list(_FIELDS))
            rows = pipe.execute()
        return [_job(name, row) for name, row in zip(names, rows, strict=True) if row[0] is not None]


def _key(job_id: str) -> str:
    return f"automap:job:{job_id}"


def events_key(job_id: str) -> str:
    """Key of the stream of a job's events."""
    return f"{_key(job_id)}:events"


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _job(job_id: str, row: list[bytes | None]) -> Job:
    """The record of a row. One that cannot be read has no request and says why: it must not hide the others."""
    field = {name: (value or b"").decode(errors="replace") for name, value in zip(_FIELDS, row, strict=True)}
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
    )
    if request is not None and not faults:
        return found
    detail = "; ".join(faults) or "request: missing"
    return replace(found, request=None, problem=problem(500, "The stored record cannot be read", detail))


def _state(text: str) -> State:
    if text not in get_args(State):
        raise ValueError(f"no state: {text!r}")
    return cast("State", text)

"""The record of models and jobs, in Redis.

A job is a hash; its transitions are optimistic transactions (WATCH/MULTI, no scripts). A job that comes to wait puts a
delivery into RQ's queue in the same transaction. Each run of a job takes a rising number, its fencing token: a writer
with an older one, or to a job that has ended, is refused with `Superseded`, so that a worker which was thought dead
cannot overwrite anything. Models are kept by the sha256 of their bytes, in Redis too, so that workers on other machines
reach them. Every key of a model or job contains its tenant, so that no tenant can name what belongs to another.
Independent of HTTP and of how jobs are run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from service.jobs import counts, events
from service.jobs.job_changes import TURNS, JobChanges
from service.jobs.job_reader import BATCH, batches
from service.jobs.model_store import TENANTS
from service.jobs.records import STATES, Job, dumps, members_of, parent_of
from service.jobs.run_job import JobRequest
from service.problems import problem

NUM_RETRIES = 2
"""Largest number of further runs of a job whose process or worker dies."""
REPLAY_TTL_S = 24 * 3600
"""Seconds for which an Idempotency-Key is remembered."""
_TABLES = ("jobs", "sizes", "waiting", "active", "models", "searched")
"""Kinds of keys that are of all jobs or models of a tenant."""
_LISTENED_S = 10
"""Seconds for which the events of a deleted job are kept, so that those who listen hear of its end."""


class AnotherRequest(Exception):
    """The Idempotency-Key came before, with another request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Once:
    """An Idempotency-Key and what it stands for."""

    key: str
    request_sha256: str


class Store(JobChanges):
    """Models and jobs of one tenant in one Redis.

    What a run writes raises `Superseded` if the run is not the latest of its job, or the job has ended.
    """

    def of(self, tenant: str) -> Store:
        """The store of another tenant."""
        return Store(self.client, tenant, clock=self._clock)

    def create(
        self,
        model_id: str,
        request: JobRequest,
        *,
        reserve_s: float = 0.0,
        once: Once | None = None,
        admit: Callable[[], object] = lambda: None,
    ) -> Job:
        """Records a job with its members and puts them into the queue, all or none.

        Args:
            model_id: id of a stored model.
            request: the request of the job.
            reserve_s: seconds of search and trials that count against the tenant's day from now on; what a job does not
                use is given back at its end. Each member takes those of its search beside.
            once: the Idempotency-Key of the request, if it has one.
            admit: raises where the tenant may not submit the job. Between this look and the record no other job of the
                tenant comes to wait, none takes time of its day, and its model is not removed.

        Returns:
            The job as it was when it was created, also where its key has come before.

        Raises:
            AnotherRequest: the key came with another request.
        """
        job_id, now, text = uuid.uuid4().hex, self._clock(), dumps(request.to_json())
        fields = {"state": "queued", "model_id": model_id, "request": text, "attempt": "0", "deaths": "0"}
        fields |= {"created_at": repr(now), "reserved_s": repr(reserve_s), "workers": str(request.workers)}
        members = members_of(job_id, request.workers)
        search_s = reserve_s if request.trials is None else max(0.0, reserve_s - request.trials.seconds)
        replay = self._replay_key(once)
        before: Job | None = None

        def change(pipe: Any) -> None:
            nonlocal before
            before = self.replayed(once)
            if before is None:
                admit()
            pipe.multi()
            if before is not None:
                return
            if once is not None:
                pipe.hset(replay, mapping={"request": once.request_sha256, "job": job_id})
                pipe.expire(replay, REPLAY_TTL_S)
            pipe.sadd(TENANTS, self.tenant)
            pipe.hset(self.job_key(job_id), mapping=fields)
            for member in members:
                own = {"request": "", "workers": "1", "reserved_s": repr(search_s)}
                pipe.hset(self.job_key(member), mapping=fields | own)
            pipe.hset(f"{self._at}sizes", job_id, str(len(text)))
            pipe.zadd(f"{self._at}jobs", {job_id: now})
            self._list(pipe, job_id, model_id, now, "queued")
            for name in (job_id, *members):
                pipe.sadd(f"{self._at}active", name)
                self._wait(pipe, name, request.priority, now)
                self._tell(pipe, name, "queued", 0)
            if reserve_s:
                self._charge(pipe, self._day_key(now), reserve_s + len(members) * search_s)

        self._redis.transaction(change, replay, f"{self._at}waiting", self._day_key(now), self.model_key(model_id))
        return before or Job(id=job_id, model_id=model_id, request=request, created_at=now)

    def replayed(self, once: Once | None) -> Job | None:
        """The job that came of a request with the same Idempotency-Key, as it was when it was created; else None.

        Raises:
            AnotherRequest: the key came with another request.
        """
        if once is None:
            return None
        request, job_id = self._redis.hmget(self._replay_key(once), ["request", "job"])
        job = None if job_id is None else self.job(job_id.decode())
        if job is None:
            return None
        if request.decode() != once.request_sha256:
            raise AnotherRequest
        return Job(id=job.id, model_id=job.model_id, request=job.request, created_at=job.created_at)

    def begin(self, job_id: str, note: Callable[[Any, int], object] = lambda pipe, token: None) -> int | None:
        """Starts a run of a job that is queued.

        Args:
            job_id: id of the job.
            note: writes in the same transaction who runs it, given the transaction and the token.

        Returns:
            The run's fencing token; None when there is nothing to run: the job is unknown, has ended, or another run of
            it is under way.
        """
        token = 0

        def change(pipe: Any) -> None:
            nonlocal token
            token = 0
            read = ("state", "attempt", "created_at", "model_id")
            state, attempt, created_at, model_id = pipe.hmget(self.job_key(job_id), read)
            pipe.multi()
            if state != b"queued":
                # A leftover entry of a deleted job among the waiting ones would be chosen again and again.
                pipe.zrem(f"{self._at}waiting", job_id)
                if state is None:
                    pipe.srem(f"{self._at}active", job_id)
                return
            token = int(attempt) + 1
            now = self._clock()
            started = {"state": "running", "attempt": str(token), "started_at": repr(now)}
            pipe.hset(self.job_key(job_id), mapping=started)
            pipe.hdel(self.job_key(job_id), "progress")
            pipe.zrem(f"{self._at}waiting", job_id)
            self._list(pipe, job_id, model_id.decode(), float(created_at), "running", before="queued")
            pipe.zadd(TURNS, {self.tenant: now})
            note(pipe, token)
            self._tell(pipe, job_id, "running", token)
            if token == 1 and parent_of(job_id) is None:
                counts.took(pipe, "wait", now - float(created_at))

        self._redis.transaction(change, self.job_key(job_id))
        return token or None

    def set_progress(self, job_id: str, token: int, progress: Mapping[str, Any], *, is_event: bool = True) -> None:
        """Writes the progress of a run; `is_event` = those who listen to the job are told too."""
        told = {**progress, "attempt": token} if is_event else None
        self._write(job_id, token, {"progress": dumps(progress)}, told=told)

    def set_best(self, job_id: str, token: int, plan: Mapping[str, Any]) -> None:
        """Keeps the best plan of a run so far."""
        self._write(job_id, token, {"best": dumps(plan)})

    def check(self, job_id: str, token: int) -> bool:
        """Whether the run is still the one that counts."""
        state, attempt = self._redis.hmget(self.job_key(job_id), ["state", "attempt"])
        return state == b"running" and attempt is not None and int(attempt) == token

    def succeed(
        self, job_id: str, token: int, plan: Mapping[str, Any], progress: Mapping[str, Any] | None = None
    ) -> None:
        """Ends a job with its plan, and with a last progress that was not written yet, if there is one."""
        last = {} if progress is None else {"progress": dumps(progress)}
        step_time_s = (plan.get("estimate") or {}).get("step_time_s")  # a placement of GNN training has none
        last |= {} if step_time_s is None else {"step_time_s": dumps(step_time_s)}
        told = None if progress is None else {**progress, "attempt": token}
        self._write(job_id, token, {"state": "succeeded", "plan": dumps(plan), **last}, told=told)

    def fail(self, job_id: str, token: int | None, problem: Mapping[str, Any]) -> None:
        """Ends a job with a problem document; `token` None = whatever run is the latest."""
        self._write(job_id, token, {"state": "failed", "problem": dumps(problem)})

    def requeue(self, job_id: str, token: int | None) -> None:
        """Puts a job back into the queue whose run has ended early, so that another follows; `token` as in `fail`."""
        self._write(job_id, token, {"state": "queued"})

    def died(self, job_id: str, token: int) -> None:
        """Puts a job back into the queue whose run has died, or ends it after too many deaths."""
        deaths = int(self._redis.hget(self.job_key(job_id), "deaths") or 0) + 1
        if deaths <= NUM_RETRIES:
            self._write(job_id, token, {"state": "queued", "deaths": str(deaths)})
        else:
            self.fail(job_id, token, problem(500, "The job's process died", f"It died {deaths} times."))

    def delete(self, job_id: str) -> bool:
        """Ends a job and removes all of it; returns whether there was one. A run of it writes nothing more."""
        return bool(self._delete([job_id]))

    def _delete(self, ids: Iterable[str]) -> int:
        """Ends jobs and removes all of them; returns how many there were."""
        return sum(self._delete_batch(several) for several in batches(ids))

    def _delete_batch(self, ids: Sequence[str]) -> int:
        read = ("workers", "model_id", "state")
        with self._redis.pipeline(transaction=False) as pipe:
            for job_id in ids:
                pipe.hmget(self.job_key(job_id), read)
            rows = dict(zip(ids, pipe.execute(), strict=True))
            members = [name for job_id in ids for name in members_of(job_id, int(rows[job_id][0] or 1))]
            for name in members:
                pipe.hget(self.job_key(name), "state")
            states = dict(zip(members, pipe.execute(), strict=True)) | {job_id: rows[job_id][2] for job_id in ids}
        models = {(model_id or b"").decode() for _, model_id, _ in rows.values()}
        lists = sorted({key for model_id in models for state in STATES for key in self.list_keys(state, model_id)})
        waiting = [name for name in states if states[name] == b"queued"]
        gone = set[str]().union(*(self._delete_waiting(several, lists) for several in batches(waiting)))
        left = [name for name in states if name not in gone]
        ended_now = {name for name in left if states[name] in (b"queued", b"running") and self.cancel(name)}
        self._removed(lambda pipe: self._remove(pipe, left, lists, told=ended_now))
        return sum(rows[job_id][2] is not None for job_id in ids)

    def _delete_waiting(self, names: Sequence[str], lists: Sequence[str]) -> set[str]:
        """Ends those of several jobs that wait as cancelled and removes them, in one transaction; returns them.

        Args:
            names: the jobs.
            lists: see `_remove`.
        """
        chosen = set[str]()

        def change(pipe: Any) -> None:
            chosen.clear()
            with self._redis.pipeline(transaction=False) as look:
                for name in names:
                    look.hmget(self.job_key(name), "state", "attempt", "created_at", "reserved_s")
                rows = dict(zip(names, look.execute(), strict=True))
            chosen.update(name for name, row in rows.items() if row[0] == b"queued")
            given_back = dict[str, float]()
            pipe.multi()
            if not chosen:
                return
            for name in chosen:
                _, attempt, created_at, reserved_s = rows[name]
                self._tell(pipe, name, "cancelled", int(attempt))
                day = self._day_key(float(created_at))
                given_back[day] = given_back.get(day, 0.0) + float(reserved_s or 0)
            for day, seconds in given_back.items():
                self._charge(pipe, day, -seconds)
            counts.took(pipe, "run:cancelled", 0.0, times=sum(parent_of(name) is None for name in chosen))
            pipe.zrem(f"{self._at}waiting", *chosen)
            pipe.srem(f"{self._at}active", *chosen)
            self._remove(pipe, sorted(chosen), lists, told=chosen)

        self._redis.transaction(change, *map(self.job_key, names))
        return chosen

    def _remove(self, pipe: Any, names: Sequence[str], lists: Sequence[str], *, told: Collection[str]) -> None:
        """Adds the removal of jobs that have ended to a pipeline.

        Args:
            pipe: the pipeline.
            names: the jobs.
            lists: keys of the lists in which they may be.
            told: those that have ended only now, so that somebody may still listen to their events.
        """
        if not names:
            return
        for key in (*lists, f"{self._at}jobs"):
            pipe.zrem(key, *names)
        pipe.hdel(f"{self._at}sizes", *names)
        for name in names:
            pipe.expire(self.events_key(name), _LISTENED_S if name in told else 0)
        pipe.unlink(*map(self.job_key, names))  # last: a deletion that was cut off can then be repeated

    def delete_all(self) -> None:
        """Removes everything of the tenant but what it has used up of its day; jobs that come meanwhile stay whole."""
        self._delete(name.decode() for name in self._redis.zrange(f"{self._at}jobs", 0, -1))
        for models in batches(self._redis.hkeys(f"{self._at}models")):
            self._removed(functools.partial(self._drop_models, [name.decode() for name in models]))
        for keys in batches(self._redis.scan_iter(f"{self._at}*", count=10 * BATCH)):
            self._removed(functools.partial(self._drop_ownerless, keys), *keys)
        tables = [f"{self._at}{name}" for name in ("jobs", "active", "models")]

        def change(pipe: Any) -> None:
            is_there = pipe.exists(*tables)
            pipe.multi()
            if not is_there:
                pipe.zrem(TURNS, self.tenant)
                pipe.srem(TENANTS, self.tenant)

        # Where memory is full, only a name is left.
        with contextlib.suppress(redis.exceptions.OutOfMemoryError):
            self._redis.transaction(change, *tables)

    def _drop_ownerless(self, keys: Sequence[bytes], pipe: Any) -> None:
        """Adds the removal of those of several keys to a pipeline that belong to nothing that the tenant has."""
        parts = {key: key.decode().removeprefix(self._at).partition(":")[::2] for key in keys}
        requests = [key for key, (kind, _) in parts.items() if kind == "once"]
        with self._redis.pipeline(transaction=False) as look:
            for key in requests:
                look.hget(key, "job")
            jobs = {key: (job or b"").decode() for key, job in zip(requests, look.execute(), strict=True)}
            jobs |= {key: name.partition(":")[0] for key, (kind, name) in parts.items() if kind == "job"}
            for key, (_, name) in parts.items():
                look.zscore(f"{self._at}jobs", parent_of(jobs.get(key, "")) or jobs.get(key, ""))
                look.hexists(f"{self._at}models", name)
            found = look.execute()
        for key, place, is_model in zip(parts, found[::2], found[1::2], strict=True):
            # Tables are empty by now, but for what has come meanwhile.
            if place is None and not is_model and parts[key][0] not in _TABLES:
                pipe.unlink(key)

    def events(self, job_id: str, after: str = "") -> list[events.Event]:
        """The events of a job in order; those after the event `after`, or all."""
        return events.read(self.client, self.events_key(job_id), after)

    # What a tenant uses

    def num_waiting(self) -> int:
        """Number of jobs that wait."""
        return int(self._redis.zcard(f"{self._at}waiting"))

    def count(self, pipe: Any) -> None:
        """Asks in a pipeline for the number of jobs that wait, and of those that wait or run."""
        pipe.zcard(f"{self._at}waiting")
        pipe.scard(f"{self._at}active")

    def next_waiting(self) -> str | None:
        """The job that the tenant has begun next."""
        found = self._redis.zrange(f"{self._at}waiting", 0, 0)
        return found[0].decode() if found else None

    def searched_s(self) -> float:
        """Seconds of search that the tenant has used or reserved today (UTC)."""
        return float(self._redis.get(self._day_key(self._clock())) or 0.0)

    def trim(self, *, oldest_s: float, most_bytes: int) -> int:
        """Removes jobs that ended too long ago, and the oldest ended ones while all jobs take too many bytes.

        Args:
            oldest_s: seconds for which a job is kept after its creation.
            most_bytes: bytes of requests and plans that are kept.

        Returns:
            Number of jobs removed.
        """
        sizes = {name.decode(): int(size) for name, size in self._redis.hgetall(f"{self._at}sizes").items()}
        total, oldest, chosen = sum(sizes.values()), self._clock() - oldest_s, list[str]()
        active = {name.decode() for name in self._redis.smembers(f"{self._at}active")}
        for name, created_at in self._redis.zrange(f"{self._at}jobs", 0, -1, withscores=True):
            if created_at >= oldest and total <= most_bytes:
                break
            if (job_id := name.decode()) not in active:
                chosen.append(job_id)
                total -= sizes.get(job_id, 0)
        return self._delete(chosen)

    def _replay_key(self, once: Once | None) -> str:
        return f"{self._at}once:{hashlib.sha256(once.key.encode()).hexdigest()}" if once else f"{self._at}once"

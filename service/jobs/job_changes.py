"""The transactions with which a job changes in Redis.

When the state of a job changes, one transaction moves it between the lists of jobs by state, adds it to or removes it
from the waiting and the active jobs, adds an event, updates the counters, and charges the time to the tenant's day.
Knows nothing of why a job changes (`service.jobs.store`). Units: seconds since 1970, bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from service.jobs import counts, delivery, events
from service.jobs.job_reader import JobReader
from service.jobs.records import ACTIVE, members_of, parent_of

DAY_S = 24 * 3600
TURNS = "automap:turns"
"""Tenant -> when a job of it was begun last."""
_PRIORITY_S = 1e11
"""Seconds of age that one step of priority outweighs: more than any clock shows."""
_READ = ("state", "model_id", "attempt", "created_at", "started_at", "reserved_s", "workers", "progress")
"""Fields of a job's hash that every change looks at."""
_READ_OF_STATE = ("request", "best")
"""Fields that only a change of the state looks at: they are large."""


class Superseded(Exception):
    """Another run of the job has begun, or the job has ended: the run must stop and write nothing."""


class JobChanges(JobReader):
    """Changes of the jobs of one tenant in one Redis."""

    def cancel(self, job_id: str) -> bool:
        """Ends a job as cancelled; returns whether it had not ended before."""
        try:
            self._write(job_id, None, {"state": "cancelled"})
        except Superseded:
            return False
        return True

    def _write(
        self, job_id: str, token: int | None, fields: dict[str, str], *, told: Mapping[str, Any] | None = None
    ) -> None:
        """Changes a job that has not ended; the end of a job is the end of its members.

        Args:
            job_id: id of the job.
            token: the run that writes; None = whatever run is the latest.
            fields: what is written.
            told: progress that becomes an event for listeners.

        Raises:
            Superseded: the run is not the latest, or the job has ended.
        """
        state_after, parent = fields.get("state"), parent_of(job_id)
        names = _READ if state_after is None else (*_READ, *_READ_OF_STATE)
        row: dict[str, bytes | None] = {}

        def change(pipe: Any) -> None:
            row.update(zip(names, pipe.hmget(self.job_key(job_id), names), strict=True))
            if state_after == "queued" and parent is not None:
                row["request"] = pipe.hget(self.job_key(parent), "request")
            pipe.multi()
            if row["state"] is None or row["state"].decode() not in ACTIVE:
                raise Superseded
            if token is not None and (row["state"] != b"running" or int(row["attempt"] or 0) != token):
                raise Superseded
            self._change(pipe, job_id, row, fields, told)

        self._redis.transaction(change, self.job_key(job_id))
        if state_after not in (None, *ACTIVE):
            for member in members_of(job_id, int(row["workers"] or 1)):
                self.cancel(member)

    def _change(
        self,
        pipe: Any,
        job_id: str,
        row: Mapping[str, Any],
        fields: dict[str, str],
        told: Mapping[str, Any] | None = None,
    ) -> None:
        """Adds the change of a job that has not ended to a transaction.

        Args:
            pipe: the transaction, which watches the job.
            job_id: id of the job.
            row: the values of `_READ` before the change, and of `_READ_OF_STATE` where the state changes.
            fields: see `_write`.
            told: see `_write`.
        """
        key, now, state_after, parent = self.job_key(job_id), self._clock(), fields.get("state"), parent_of(job_id)
        ends = state_after not in (None, *ACTIVE)
        pipe.hset(key, mapping={**fields, "finished_at": repr(now)} if ends else fields)
        if told is not None:
            events.add(pipe, self.events_key(job_id), "progress", told)
        if "progress" in fields and parent is None:  # the progress of a job includes that of its members
            counts.priced(pipe, row["progress"], fields["progress"])
        if state_after is None:
            return
        model_id, created_at, used = row["model_id"].decode(), float(row["created_at"]), 0.0
        reserved_s = float(row["reserved_s"] or 0)
        self._tell(pipe, job_id, state_after, int(row["attempt"]), fields.get("problem"))
        self._list(pipe, job_id, model_id, created_at, state_after, before=row["state"].decode())
        if row["state"] == b"running":
            # Each run is charged the time that it has used, from the reserved time; the rest is returned at the end.
            # If the clock was set back, the time used counts as 0.
            used = max(0.0, now - float(row["started_at"]))
            pipe.hincrbyfloat(key, "reserved_s", -used)
            reserved_s -= used
        if not ends:
            priority = json.loads(row["request"] or "{}").get("priority", 0)
            self._wait(pipe, job_id, priority, created_at)
            return
        if parent is None:
            counts.took(pipe, f"run:{state_after}", used)
        pipe.zrem(f"{self._at}waiting", job_id)
        pipe.srem(f"{self._at}active", job_id)
        best = row["best"]
        if "plan" in fields:
            pipe.hdel(key, "best")
            best = None
        kept = (row["request"], best, fields.get("plan"), fields.get("problem"))
        pipe.hset(f"{self._at}sizes", job_id, str(sum(len(value or "") for value in kept)))
        self._charge(pipe, self._day_key(created_at), -reserved_s)

    def _list(
        self, pipe: Any, job_id: str, model_id: str, created_at: float, state: str, *, before: str | None = None
    ) -> None:
        """Puts a job into the lists of those in its new state, and takes it out of those of its old one, if any.
        Members of a job are in no list."""
        if parent_of(job_id) is not None:
            return
        for key in self.list_keys(before, model_id) if before is not None else ():
            pipe.zrem(key, job_id)
        for key in self.list_keys(state, model_id):
            pipe.zadd(key, {job_id: created_at})

    def _tell(self, pipe: Any, job_id: str, state: str, attempt: int, problem: str | None = None) -> None:
        """Tells those who listen of a job's new state."""
        about = {} if problem is None else {"problem": json.loads(problem)}
        told = {"state": state, "attempt": attempt, "at": self._clock(), **about}
        events.add(pipe, self.events_key(job_id), "state", told)

    def _wait(self, pipe: Any, job_id: str, priority: int, created_at: float) -> None:
        """Puts a job among those that wait: high priorities first, then the oldest."""
        pipe.zadd(f"{self._at}waiting", {job_id: created_at - priority * _PRIORITY_S})
        pipe.zadd(TURNS, {self.tenant: 0.0}, nx=True)
        delivery.put(self.client, pipe)

    def _charge(self, pipe: Any, day: str, seconds: float) -> None:
        """Charges the day of a key, see `_day_key`, with seconds of search."""
        pipe.incrbyfloat(day, seconds)
        pipe.expire(day, 2 * DAY_S)

    def _day_key(self, at: float) -> str:
        return f"{self._at}searched:{int(at // DAY_S)}"

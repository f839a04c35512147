"""Reading the records of jobs, in Redis: one, pages of them, those under way, and their plans.

Knows nothing of how a record comes to be or changes (`service.jobs.store`). Units: seconds since 1970, bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, cast

from service.jobs.model_store import ModelStore
from service.jobs.records import ACTIVE, FIELDS, Job, State, job_of, parent_of, state_of

PAGE_BYTES = 4 << 20
"""Largest size of the requests on one page of a list, so that no list is larger than memory."""
_CHUNK = 100
"""Jobs that are read at once while a list is filtered."""
_GROUP_BYTES = 1 << 20
"""About how many bytes are read at once (assumed)."""
_MOST_READ = 5000
"""Jobs that one page reads at most; a rare filter takes several pages."""


class JobReader(ModelStore):
    """Jobs of one tenant in one Redis, to be read."""

    def job_key(self, job_id: str) -> str:
        """Key of a job's hash."""
        return f"{self._at}job:{job_id}"

    def events_key(self, job_id: str) -> str:
        """Key of the stream of a job's events."""
        return f"{self.job_key(job_id)}:events"

    def job(self, job_id: str) -> Job | None:
        """A job's record, or None."""
        return next(iter(self._read([job_id])), None)

    def state(self, job_id: str) -> State | None:
        """A job's state, or None."""
        found = self._redis.hget(self.job_key(job_id), "state")
        return None if found is None else cast("State", found.decode())

    def jobs(
        self,
        limit: int,
        *,
        cursor: tuple[float, str] | None = None,
        states: Collection[State] = (),
        model_id: str | None = None,
    ) -> tuple[list[Job], tuple[float, str] | None]:
        """A page of jobs, newest first, and the cursor of the next page, None at the end.

        Args:
            limit: most jobs on the page; large requests end it earlier.
            cursor: (created_at, id) of the job after which the page begins; None = the newest.
            states: only jobs in one of these states; none = all.
            model_id: only jobs of this model; None = all.
        """
        found: list[Job] = []
        num_bytes = 0

        def is_wanted(state: bytes, model: bytes | None) -> bool:
            return (not states or state_of(state) in states) and model_id in (None, (model or b"").decode())

        for num_read, (job, place, size) in enumerate(self._newest(cursor, is_wanted), 1):
            if job is not None:
                found.append(job)
                num_bytes += size
            if len(found) == limit or num_bytes >= PAGE_BYTES or num_read == _MOST_READ:
                return found, place
        return found, None

    def _newest(
        self, cursor: tuple[float, str] | None, is_wanted: Callable[[bytes, bytes | None], bool]
    ) -> Iterator[tuple[Job | None, tuple[float, str], int]]:
        """Each job after a cursor, None if its state and model are not wanted; its place in the list and the bytes of
        its request. Records that are not wanted are not read: of many jobs a few may be running."""
        count = _CHUNK
        while True:
            highest = "+inf" if cursor is None else repr(cursor[0])
            rows = self._redis.zrevrangebyscore(f"{self._at}jobs", highest, "-inf", 0, count, withscores=True)
            places = [(at, name.decode()) for name, at in rows]
            if cursor is not None:
                places = [place for place in places if place < cursor]
            with self._redis.pipeline(transaction=False) as pipe:
                for _, job_id in places:
                    pipe.hmget(self.job_key(job_id), ["state", "model_id"])
                    pipe.hstrlen(self.job_key(job_id), "request")
                answers = pipe.execute()
            sizes = answers[1::2]
            states = {job_id: row for (_, job_id), row in zip(places, answers[::2], strict=True) if row[0] is not None}
            chosen = {job_id for job_id, row in states.items() if is_wanted(*row)}
            # Large requests are read a few at a time: nobody may want the whole chunk.
            group = max(1, _GROUP_BYTES // max(1, *sizes, 1))
            for begin in range(0, len(places), group):
                several = places[begin : begin + group]
                read = {job.id: job for job in self._read(job_id for _, job_id in several if job_id in chosen)}
                for place, size in zip(several, sizes[begin:], strict=False):
                    if place[1] in states and (place[1] in read or place[1] not in chosen):
                        yield read.get(place[1]), place, size
            cursor = places[-1] if places else cursor
            if len(rows) < count:
                return
            # Jobs of one moment may fill a chunk.
            count = _CHUNK if places else 2 * count

    def active(self) -> list[Job]:
        """Jobs that have not ended, oldest first."""
        found = self._read(name.decode() for name in self._redis.smembers(f"{self._at}active"))
        return sorted((job for job in found if job.state in ACTIVE), key=lambda job: (job.created_at, job.id))

    def progress_of(self, ids: Iterable[str]) -> list[Mapping[str, Any] | None]:
        """The progress of each job; None where it has not begun."""
        with self._redis.pipeline(transaction=False) as pipe:
            for job_id in ids:
                pipe.hget(self.job_key(job_id), "progress")
            return [found and json.loads(found) for found in pipe.execute()]

    def plan(self, job_id: str, *, so_far: bool = False) -> dict[str, Any] | None:
        """The plan of a job that succeeded; with `so_far` else the best one that a run of it has found; or None."""
        found, best = self._redis.hmget(self.job_key(job_id), ["plan", "best"])
        found = found or (best if so_far else None)
        return None if found is None else json.loads(found)

    def running(self) -> list[str]:
        """The jobs whose runs are under way."""
        with self._redis.pipeline() as pipe:
            pipe.smembers(f"{self._at}active")
            pipe.zrange(f"{self._at}waiting", 0, -1)
            active, waiting = pipe.execute()
        return sorted(name.decode() for name in active - set(waiting))

    def _read(self, ids: Iterable[str]) -> list[Job]:
        names = list(ids)
        with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hmget(self.job_key(name), list(FIELDS))
            rows = pipe.execute()
        for name, row in zip(names, rows, strict=True):
            if (parent := parent_of(name)) is not None:
                row[FIELDS.index("request")] = self._redis.hget(self.job_key(parent), "request")
        return [job_of(name, row) for name, row in zip(names, rows, strict=True) if row[0] is not None]

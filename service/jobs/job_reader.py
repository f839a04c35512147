"""Reading the records of jobs, in Redis: one, pages of them, those under way, and their plans.

Knows nothing of how a record comes to be or changes (`service.jobs.store`). Units: seconds since 1970, bytes.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any, TypeVar, cast

from service.jobs.model_store import ModelStore
from service.jobs.records import ACTIVE, FIELDS, STATES, Job, State, job_of, parent_of, state_of

PAGE_BYTES = 4 << 20
"""Largest size of the requests on one page of a list, so that no list is larger than memory."""
_CHUNK = 100
"""Jobs that are read at once while a list is filtered."""
_GROUP_BYTES = 1 << 20
"""About how many bytes are read at once (assumed)."""
BATCH = 100
"""Jobs that are changed or removed at once: Redis does nothing else meanwhile."""
Place = tuple[float, str]
"""Place of a job in a list: its (created_at, id)."""
T = TypeVar("T")


class JobReader(ModelStore):
    """Jobs of one tenant in one Redis, to be read."""

    def job_key(self, job_id: str) -> str:
        """Key of a job's hash."""
        return f"{self._at}job:{job_id}"

    def events_key(self, job_id: str) -> str:
        """Key of the stream of a job's events."""
        return f"{self.job_key(job_id)}:events"

    def list_keys(self, state: str, model_id: str) -> list[str]:
        """Keys of the lists of a job in a state: of all jobs in the state, and of those of its model, if it has one."""
        every = f"{self._at}jobs:{state}"
        return [every, f"{every}:{model_id}"] if model_id else [every]

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
        cursor: Place | None = None,
        states: Collection[State] = (),
        model_id: str | None = None,
    ) -> tuple[list[Job], Place | None]:
        """A page of jobs, newest first, and the cursor of the next page, None at the end.

        Args:
            limit: most jobs on the page; large requests end it earlier.
            cursor: (created_at, id) of the job after which the page begins; None = the newest.
            states: only jobs in one of these states; none = all.
            model_id: only jobs of this model; None = all.
        """
        found: list[Job] = []
        num_bytes = 0
        keys = [f"{self._at}jobs"]
        if states or model_id:
            keys = [self.list_keys(state, model_id or "")[-1] for state in dict.fromkeys(states or STATES)]
        last: Place | None = None
        for job, place, size in self._newest(keys, cursor, states or STATES):
            if len(found) == limit or num_bytes >= PAGE_BYTES:
                return found, last  # only where a job follows
            found.append(job)
            num_bytes += size
            last = place
        return found, None

    def _newest(
        self, keys: Sequence[str], cursor: Place | None, states: Collection[State]
    ) -> Iterator[tuple[Job, Place, int]]:
        """Each job of some lists after a cursor with its place and the bytes of its request; not those that are in
        none of some states any more."""
        merged = heapq.merge(*(self._places(key, cursor) for key in keys), reverse=True)
        # A job that changes meanwhile may be found in two lists.
        rest = (place for place, _ in groupby(merged))
        while places := list(islice(rest, _CHUNK)):
            with self._redis.pipeline(transaction=False) as pipe:
                for _, job_id in places:
                    pipe.hget(self.job_key(job_id), "state")
                    pipe.hstrlen(self.job_key(job_id), "request")
                answers = pipe.execute()
            sized = [
                (place, size)
                for place, state, size in zip(places, answers[::2], answers[1::2], strict=True)
                if state is not None and state_of(state) in states
            ]
            # Large requests are read a few at a time: nobody may want the whole chunk.
            group = max(1, _GROUP_BYTES // max(1, *(size for _, size in sized), 1))
            for begin in range(0, len(sized), group):
                several = sized[begin : begin + group]
                read = {job.id: job for job in self._read(job_id for (_, job_id), _ in several)}
                yield from ((read[place[1]], place, size) for place, size in several if place[1] in read)

    def _places(self, key: str, cursor: Place | None) -> Iterator[Place]:
        """The places of a list after a cursor, newest first."""
        count = _CHUNK
        while True:
            highest = "+inf" if cursor is None else repr(cursor[0])
            rows = self._redis.zrevrangebyscore(key, highest, "-inf", 0, count, withscores=True)
            places = [(at, name.decode()) for name, at in rows]
            if cursor is not None:
                places = [place for place in places if place < cursor]
            yield from places
            if len(rows) < count:
                return
            cursor = places[-1] if places else cursor
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


def batches(values: Iterable[T]) -> Iterator[list[T]]:
    """Values in lists of `BATCH`; the last one may be shorter."""
    rest = iter(values)
    return iter(lambda: list(islice(rest, BATCH)), [])

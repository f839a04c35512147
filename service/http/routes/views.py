"""Cached answers about jobs, as bytes. An answer is made again only after its job has changed.

Clients usually ask for a job many times before it changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastapi.concurrency import run_in_threadpool

from service.http.etag import etag
from service.http.reader import Reader
from service.http.routes.common import find_job, no_job
from service.http.schemas import JobView
from service.jobs.records import ACTIVE, FIELDS
from service.jobs.store import Store

_CHANGING = tuple(name for name in FIELDS if name not in ("request", "model_id", "created_at"))
_MOST_KEPT = 1000
"""Largest number of answers that are kept (assumed)."""
_LARGEST_KEPT = 64 * 1024
"""Bytes of an answer that is kept; with `_MOST_KEPT` it bounds the memory."""


@dataclass(frozen=True, slots=True)
class View:
    """An answer about a job."""

    is_active: bool
    """Whether the job has not ended."""
    body: bytes
    tag: str
    """Entity tag, see `service.http.etag`."""


class Views:
    """Answers about the jobs of one Redis.

    Args:
        reader: reads it.
        root_path: path below which clients reach the service.
    """

    def __init__(self, reader: Reader, root_path: str) -> None:
        self._reader, self._root_path = reader, root_path
        self._kept: dict[str, tuple[list[bytes | None], View]] = {}

    async def of(self, store: Store, job_id: str) -> View:
        """The answer about a job as it is now.

        Raises:
            HTTPException: there is no such job.
            redis.RedisError: the store does not answer.
        """
        key = store.job_key(job_id)
        row = await self._reader.hmget(key, _CHANGING)
        if row[0] is None:
            self._kept.pop(key, None)
            raise no_job(job_id)
        kept = self._kept.get(key)
        if kept is not None and kept[0] == row:
            return kept[1]
        view = await run_in_threadpool(_view, store, job_id, self._root_path)
        self._kept.pop(key, None)
        if len(view.body) <= _LARGEST_KEPT:
            while len(self._kept) >= _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = row, view
        return view


def _view(store: Store, job_id: str, root_path: str) -> View:
    job = find_job(store, job_id)
    view = JobView.of(job, root_path)
    body = view.model_dump_json().encode()
    return View(is_active=job.state in ACTIVE, body=body, tag=etag(body))

"""Events of a job, sent as they happen (Server-Sent Events).

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Header, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from service.http import openapi
from service.http.access import is_admitted
from service.http.feed import MOST_LISTENERS, Batch, FeedFull
from service.http.routes.common import feed_of, find_job, settings_of, store_of
from service.jobs.events import Event, place_of
from service.jobs.records import ACTIVE, Job
from service.problems import limit

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

KEY_S = 5.0
"""Seconds between two checks of the key of a stream (assumed): for so long a revoked key still receives events."""
PING_S = 15.0
"""Seconds without an event after which a comment is sent, so that no proxy closes the connection as dead."""


@router.get(
    "/{job_id}/events",
    response_class=StreamingResponse,
    responses=openapi.refusals(s404="No such job.", s422="`Last-Event-ID` is not the id of an event.")
    | openapi.event_stream()
    | {204: {"description": "The job has ended, and there is nothing after that event."}},
)
async def watch_job(
    request: Request,
    job_id: str,
    last_event_id: Annotated[
        str,
        Header(
            pattern=r"^([0-9]{1,18}(-[0-9]{1,18})?)?$",
            description="Id of the last event that the client has; the stream begins with the next one.",
        ),
    ] = "",
) -> Response:
    """The events of a job from its beginning, or those after `Last-Event-ID`, until the one that says how it ended."""
    store = store_of(request)
    job = await run_in_threadpool(find_job, store, job_id)
    # nginx holds answers back otherwise.
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    if job.state not in ACTIVE:
        events = await run_in_threadpool(store.events, job_id, last_event_id)
        if last_event_id and not events:
            return Response(status_code=204)
        text = b"".join(map(_line, events or [_told_late(job)]))
        return Response(text, media_type="text/event-stream", headers=headers)
    lines = _lines(request, job_id, last_event_id)
    try:
        first = await anext(lines)  # here, where a fault still becomes an answer
    except FeedFull:
        listening, repair = f"{MOST_LISTENERS} at a time", "Ask for the job with ?wait= in place of its events."
        fault = limit(503, "Too many event streams are open", field="events", value=listening, repair=repair)
        raise HTTPException(503, fault, {"Retry-After": "5"}) from None

    async def all_lines() -> AsyncIterator[bytes]:
        yield first
        async for line in lines:
            yield line

    return StreamingResponse(all_lines(), media_type="text/event-stream", headers=headers)


async def _lines(request: Request, job_id: str, after: str) -> AsyncIterator[bytes]:
    store, ends_at = store_of(request), time.monotonic() + settings_of(request).max_stream_s
    async with feed_of(request).listen(store.events_key(job_id)) as news:
        batch: Batch = await run_in_threadpool(store.events, job_id, after)
        yield KEEPALIVE_COMMENT
        sent, looked_at = place_of(after or "0-0"), time.monotonic()
        while True:
            if time.monotonic() - looked_at >= KEY_S:
                if not await is_admitted(request):
                    return
                looked_at = time.monotonic()
            for event in batch:
                if event.place > sent:
                    sent = event.place
                    yield _line(event)
                    if event.ends:
                        return
            left = ends_at - time.monotonic()
            if left <= 0:
                return
            try:
                batch = await asyncio.wait_for(news.get(), min(PING_S, left))
            except TimeoutError:
                batch = ()
                yield KEEPALIVE_COMMENT
            else:
                if not batch:
                    return


def _told_late(job: Job) -> Event:
    """The end of a job whose events are no longer there."""
    data = {"state": job.state, "attempt": job.attempt, "at": job.finished_at, "problem": job.problem}
    return Event("0-1", "state", data)


def _line(event: Event) -> bytes:
    return format_sse_event(data_str=json.dumps(event.data), event=event.kind, id=event.id)

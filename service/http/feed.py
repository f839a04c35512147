"""Delivers events of jobs from Redis to all listeners of this process; a single thread reads them.

The thread runs while there are listeners. It reads the stream of changes, and the stream of each changed job once. A
listener that is too slow is disconnected, and can continue with the id of the last event that it has received.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import redis
from fastapi.concurrency import run_in_threadpool

from service.jobs import events
from service.jobs.connection import impatient
from service.jobs.events import CHANGES, Event

LOG = logging.getLogger("automap.api")
MOST_LISTENERS = 2000
"""Listeners of all jobs together (assumed: two connections for each of a thousand people)."""
_BLOCK_MS = 500
"""Longest time that a read waits for changes; after it, the thread checks whether there are still listeners."""
_PAUSE_S = 0.5
"""Seconds between two attempts while Redis is away."""
_WAITING = 256
"""Largest number of batches of events that wait for one listener."""

Batch = Sequence[Event]
"""Events in order; an empty batch means that the listener is disconnected."""


class FeedFull(Exception):
    """The largest number of listeners is reached."""


@dataclass(slots=True)
class _Topic:
    """A stream that somebody listens to."""

    last: str
    """Id of the last event that was handed on."""
    listeners: set[_Listener] = field(default_factory=set)


class _Listener:
    """The queue of a client that listens, with the event loop on which it waits."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[Batch] = asyncio.Queue()


def _give(listeners: Iterable[_Listener], batch: Batch) -> None:
    """Hands events on, from any thread: a loop is woken once, however many listen on it."""
    on_loop: dict[asyncio.AbstractEventLoop, list[_Listener]] = {}
    for listener in listeners:
        on_loop.setdefault(listener.loop, []).append(listener)
    for loop, several in on_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(_put, several, batch)


def _put(listeners: Sequence[_Listener], batch: Batch) -> None:
    for listener in listeners:
        listener.queue.put_nowait(batch if listener.queue.qsize() < _WAITING else ())


class Feed:
    """The events of all jobs of one Redis."""

    def __init__(self, client: redis.Redis) -> None:
        # Connections of its own, because the thread may run a little longer than the application.
        self._client = impatient(client)
        self._topics: dict[str, _Topic] = {}
        self._lock = threading.Lock()
        self._changed: str | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    @contextlib.asynccontextmanager
    async def listen(self, stream: str) -> AsyncIterator[asyncio.Queue[Batch]]:
        """Gives a queue with everything that is added to a stream from now on.

        Args:
            stream: key of the stream.

        Raises:
            FeedFull: the largest number of clients listens already.
            redis.RedisError: the store does not answer.
        """
        listener = _Listener()
        await run_in_threadpool(self._add, stream, listener)
        try:
            yield listener.queue
        finally:
            self._remove(stream, listener)

    @property
    def num_listeners(self) -> int:
        """Number of open streams of events."""
        with self._lock:
            return sum(len(topic.listeners) for topic in self._topics.values())

    def let_go(self) -> None:
        """Disconnects all listeners."""
        self._closed.set()
        with self._lock:
            for topic in self._topics.values():
                _give(topic.listeners, ())

    def close(self) -> None:
        """Disconnects all listeners, and ends the thread and its connections."""
        self.let_go()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(_BLOCK_MS / 1000 + 1)  # not for a Redis that is away
        self._client.close()

    def _add(self, stream: str, listener: _Listener) -> None:
        if self.num_listeners >= MOST_LISTENERS or self._closed.is_set():
            raise FeedFull
        last, changed = events.latest(self._client, stream), events.latest(self._client, CHANGES)
        with self._lock:
            self._topics.setdefault(stream, _Topic(last)).listeners.add(listener)
            if self._thread is None:
                self._changed = changed
                self._thread = threading.Thread(target=self._run, name="events", daemon=True)
                self._thread.start()

    def _remove(self, stream: str, listener: _Listener) -> None:
        with self._lock:
            topic = self._topics[stream]
            topic.listeners.discard(listener)
            if not topic.listeners:
                del self._topics[stream]

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._topics or self._closed.is_set():
                    self._thread = None
                    self._client.connection_pool.disconnect(inuse_connections=False)
                    return
            try:
                self._hand_on()
            except Exception as fault:  # where this thread ended, nobody would hear anything any more
                is_expected = isinstance(fault, redis.RedisError)
                LOG.log(logging.DEBUG if is_expected else logging.ERROR, "events: %s", fault, exc_info=not is_expected)
                self._closed.wait(_PAUSE_S)

    def _hand_on(self) -> None:
        """Waits for changes and hands the new events on."""
        assert self._changed is not None
        found = cast("list[Any]", self._client.xread({CHANGES: self._changed}, block=_BLOCK_MS))
        rows = found[0][1] if found else ()
        for stream in dict.fromkeys(row[b"stream"].decode() for _, row in rows):
            with self._lock:
                topic = self._topics.get(stream)
            if topic is None:
                continue
            batch = events.read(self._client, stream, topic.last)
            if batch:
                topic.last = batch[-1].id
                with self._lock:
                    _give(topic.listeners, batch)
        if rows:
            self._changed = rows[-1][0].decode()

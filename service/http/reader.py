"""Reads Redis for many requests at once: waiting reads are sent together, by a single thread.

The framework would use one thread for each read, which costs more than the read itself. While Redis does not answer,
only this one thread waits.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import redis

from service.jobs.connection import impatient

_MOST = 128
"""Largest number of reads that are sent together."""


class Reader:
    """Reads of one Redis, by requests of one event loop.

    Args:
        client: connection to it.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client: Any = impatient(client)
        self._waiting: deque[tuple[tuple[str, ...], asyncio.Future[Any]]] = deque()
        self._lock = threading.Lock()
        self._is_reading = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reader")

    def close(self) -> None:
        """Ends the thread and its connection."""
        self._thread.shutdown()
        self._client.close()

    async def hget(self, key: str, name: str) -> bytes | None:
        """A field of a hash, or None."""
        found: bytes | None = await self._ask("HGET", key, name)
        return found

    async def hmget(self, key: str, names: Sequence[str]) -> list[bytes | None]:
        """Several fields of a hash, each or None."""
        found: list[bytes | None] = await self._ask("HMGET", key, *names)
        return found

    async def _ask(self, *command: str) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.append((command, future))
            begins, self._is_reading = not self._is_reading, True
        if begins:
            self._thread.submit(self._read)
        return await future

    def _read(self) -> None:
        """Reads until nobody waits."""
        while True:
            with self._lock:
                batch = [self._waiting.popleft() for _ in range(min(_MOST, len(self._waiting)))]
                self._is_reading = bool(batch)
            if not batch:
                return
            try:
                with self._client.pipeline(transaction=False) as pipe:
                    for command, _ in batch:
                        pipe.execute_command(*command)
                    answers = pipe.execute(raise_on_error=False)
            except Exception as fault:  # for those who asked, as this thread serves others too
                answers = [fault] * len(batch)
            futures = [future for _, future in batch]
            try:
                futures[0].get_loop().call_soon_threadsafe(_settle, futures, answers)
            except RuntimeError:  # the loop has ended, and nobody waits any more
                continue


def _settle(futures: Sequence[asyncio.Future[Any]], answers: Sequence[Any]) -> None:
    for future, answer in zip(futures, answers, strict=True):
        if future.done():
            continue  # the client has left
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

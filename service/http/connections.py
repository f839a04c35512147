"""Limits on connections, below the application: how many there are, and how long one may take to send a request's head.

uvicorn closes a connection that is idle behind an answer, and no other one: a client that never sends a request, or one
byte of it at a time, would be kept for ever. Bodies have their time limit in `service.http.api`. Units: seconds.
"""

from __future__ import annotations

import asyncio
import json

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from service.problems import MEDIA_TYPE, problem
from service.settings import Settings

_GRACE_S = 5


def server_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """The configuration of the server of an application."""
    return uvicorn.Config(
        app,
        http=bounded(settings.max_connections, settings.body_timeout_s),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_S,
        h11_max_incomplete_event_size=64 * 1024,
    )


def bounded(most: int, head_s: float) -> type[H11Protocol]:
    """The protocol of a server with limits.

    Args:
        most: open connections.
        head_s: longest time for the head of a request, from its first byte or from the beginning of the connection;
            and for what a client goes on sending behind an answer that did not wait for it.
    """
    document = problem(503, "Too many connections", "Try again shortly; nothing was read.")
    body = json.dumps({**document, "instance": "urn:automap:connection"}).encode()
    head = f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\n"
    refusal = head.encode() + b"retry-after: 5\r\nconnection: close\r\n\r\n" + body

    class Bounded(H11Protocol):
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > most:
                transport.write(refusal)
                transport.close()
            else:
                self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def _watch(self) -> None:
            unread = self.conn.our_state in (h11.DONE, h11.MUST_CLOSE) and self.conn.their_state is h11.SEND_BODY
            if self.conn.their_state is not h11.IDLE and not unread:
                self._forget()
            elif self._late is None:
                self._late = self.loop.call_later(head_s, self.transport.close)

        def _forget(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Bounded

"""Limits on connections, below the application: their number, the time for the head of a request, and the bytes that
are still read of a body after it has been refused.

uvicorn closes a connection only if it is idle after an answer. Without these limits, a client that never sends a
request, or sends it byte by byte, would stay connected forever, and a refused body would be read to its end. The limits
on bodies are in `service.http.api`. Units: seconds, bytes.
"""

from __future__ import annotations

import asyncio
import json
import sys
from http import HTTPStatus
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.problems import MEDIA_TYPE, limit
from service.settings import Settings

HEAD_BYTES = 64 * 1024
"""Largest head of a request that arrives in parts."""
UNREAD_BYTES = 1024 * 1024
"""Most that is read of a body after its refusal: a client that is still sending sees the answer, and one that sends
without end is cut off (assumed)."""
_SAID = 200
"""Characters that are repeated of what a client sent, which may be a long address."""
_GRACE_S = 5
"""Seconds that open requests have to end when the service stops (assumed)."""


def server_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """The configuration of the server of an application."""
    return uvicorn.Config(
        app,
        http=bounded(settings.max_connections, settings.body_timeout_s),
        loop="uvloop",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_S,
    )


def bounded(most: int, head_s: float) -> type[HttpToolsProtocol]:
    """The protocol of a server with limits.

    Args:
        most: open connections.
        head_s: longest time for the head of a request, from its first byte or from the beginning of the connection;
            and for what a client goes on sending after an answer that did not wait for it.
    """
    again = "Connect again shortly; nothing was read."
    too_many = _refusal(limit(503, "Too many connections", field="connections", value=most, repair=again), retry_s=5)
    value, repair = f"more than {HEAD_BYTES} bytes", f"Send at most {HEAD_BYTES} bytes before the body."
    too_large = _refusal(limit(431, "The head is too large", field="head", value=value, repair=repair))

    class Bounded(HttpToolsProtocol):
        _late: asyncio.TimerHandle | None = None
        _at: Literal["head", "body", "end"] = "head"
        """The part of a request that comes next."""
        _head_bytes = 0
        _unread_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > most:
                self._refuse(too_many)
            else:
                self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._at == "head":
                self._head_bytes += len(data)
                if self._head_bytes > HEAD_BYTES:
                    self._refuse(too_large)
            elif self._is_unread():
                self._unread_bytes += len(data)
                if self._unread_bytes > UNREAD_BYTES:
                    self.transport.close()
            self._watch()

        def on_message_begin(self) -> None:
            self._at, self._head_bytes, self._unread_bytes = "head", 0, 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            super().on_headers_complete()  # which refuses addresses that are none; then there is no cycle
            self._at = "body"

        def on_message_complete(self) -> None:
            self._at = "end"
            super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            """Refuses what is not HTTP; uvicorn calls it while it handles the error of its parser."""
            self._refuse(_no_http(sys.exception(), msg))

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def _watch(self) -> None:
            if self._at != "head" and not self._is_unread():
                self._forget()
            elif self._late is None:
                self._late = self.loop.call_later(head_s, self.transport.close)

        def _is_unread(self) -> bool:
            """Whether a body comes that nobody waits for any more."""
            return self._at == "body" and bool(self.cycle.response_complete)

        def _forget(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

        def _refuse(self, answer: bytes) -> None:
            if not self.transport.is_closing():
                self.transport.write(answer)
                self.transport.close()

    return Bounded


def _no_http(fault: BaseException | None, said: str) -> bytes:
    """The answer to what is not a request; `said` = what is wrong, where the parser's error does not say it."""
    # The error of a callback says nothing itself; the one behind it does.
    value = str((fault and fault.__context__) or fault or said)[:_SAID]
    repair = "Send HTTP/1.1. A body has either Content-Length, one whole number, or Transfer-Encoding: chunked."
    return _refusal(limit(400, "The request is not HTTP/1.1", field="request", value=value, repair=repair))


def _refusal(document: dict[str, Any], *, retry_s: int | None = None) -> bytes:
    """A whole answer that closes the connection, with a problem document."""
    status = document["status"]
    body = json.dumps({**document, "instance": "urn:automap:connection"}).encode()
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {MEDIA_TYPE}\r\n"
    again = "" if retry_s is None else f"retry-after: {retry_s}\r\n"
    return f"{head}content-length: {len(body)}\r\n{again}connection: close\r\n\r\n".encode() + body

"""Clients that are slow, silent or many, as plain sockets."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import redis

from service.settings import Settings

HEAD_S = 0.3
MOST = 12
MIB = 1 << 20


@pytest.fixture
def api(settings: Settings, client: redis.Redis, serve_app: Any) -> Iterator[httpx.Client]:
    limits = {"body_timeout_s": HEAD_S, "upload_timeout_s": 2 * HEAD_S, "max_connections": MOST}
    with serve_app(settings.model_copy(update=limits), client) as found:
        yield found


@pytest.fixture
def patient(settings: Settings, client: redis.Redis, serve_app: Any) -> Iterator[httpx.Client]:
    """A service that nobody is too slow for."""
    with serve_app(settings.model_copy(update={"max_model_bytes": 4 * MIB}), client) as found:
        yield found


def dial(api: httpx.Client) -> socket.socket:
    return socket.create_connection(("127.0.0.1", api.base_url.port), timeout=60)


def answer(connection: socket.socket) -> bytes:
    """Everything that comes until the other side closes."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            found += part
    return found


HEAD = b"POST /v1/%s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


def test_a_connection_that_sends_nothing_is_closed(api: httpx.Client) -> None:
    began = time.monotonic()
    with dial(api) as silent:
        assert answer(silent) == b""
    assert time.monotonic() - began > HEAD_S * 0.9


def drip(connection: socket.socket, data: bytes) -> int:
    """Sends a byte at a time until the other side has closed; returns how many left."""
    connection.settimeout(0.02)
    for number, byte in enumerate(data):
        try:
            connection.send(bytes([byte]))
            if not connection.recv(1):
                return number
        except TimeoutError:
            continue
        except OSError:
            return number
        return number  # an answer has begun
    return len(data)


@pytest.mark.parametrize("behind_an_answer", [False, True])
def test_a_head_of_one_byte_at_a_time(api: httpx.Client, behind_an_answer: bool) -> None:
    with dial(api) as slow:
        if behind_an_answer:
            slow.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in slow.recv(65536)
        assert drip(slow, b"GET /version HTTP/1.1\r\nX: " + b"x" * 10_000) < 1000


def test_a_head_without_end(api: httpx.Client) -> None:
    with dial(api) as endless:
        for part in (b"GET /version HTTP/1.1\r\nHost: localhost\r\n", b"A: " + b"x" * 40_000, b"x" * 40_000):
            endless.sendall(part)
        text = answer(endless)
        assert text == b"" or text.startswith(b"HTTP/1.1 431 ")
    assert api.get("/version").status_code == 200


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"GET\r\n\r\n", "method"),
        (b"\x16\x03\x01\x02\x00\x01", "method"),
        (b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", "header"),
        (b"GET / HTTP/2.5\r\n\r\n", "version"),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n", "a:1"),
        (b"GET /" + b"x" * 65600 + b" HTTP/1.1\r\n\r\n", "too long"),
        (b"POST /v1/jobs HTTP/1.1\r\nContent-Length: two\r\n\r\n", "Content-Length"),
        (b"POST /v1/jobs HTTP/1.1\r\nContent-Length: -2\r\n\r\n", "Content-Length"),
        (b"POST /v1/jobs HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", "Transfer-Encoding"),
        (HEAD.partition(b"Content-Length")[0] % b"jobs" + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "chunk size"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_is_no_request(api: httpx.Client, caplog: pytest.LogCaptureFixture, text: bytes, said: str) -> None:
    with dial(api) as odd:
        odd.sendall(text)
        head, _, body = answer(odd).partition(b"\r\n\r\n")
    found = json.loads(body)
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n") and b"application/problem+json" in head
    assert said in found["value"] and len(found["value"]) <= 200 and "HTTP/1.1" in found["repair"]
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("place", [b"jobs", b"models", b"estimates"])
def test_a_client_that_leaves_within_its_body_is_no_fault_of_the_service(
    patient: httpx.Client, caplog: pytest.LogCaptureFixture, place: bytes, until: Callable[..., Any]
) -> None:
    def told() -> list[str]:
        return [text for text in caplog.messages if text.startswith("POST")]

    with caplog.at_level("INFO", logger="automap.access"), dial(patient) as hasty:
        hasty.sendall(HEAD % (place, 100) + b"{")
        hasty.shutdown(socket.SHUT_WR)
        assert answer(hasty) == b""
        assert until(told)[0].endswith("-> 400")
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("place", [b"jobs", b"models", b"estimates"])
def test_a_body_of_one_byte_at_a_time(api: httpx.Client, place: bytes) -> None:
    with dial(api) as slow:
        slow.sendall(HEAD % (place, 10_000))
        assert drip(slow, b" " * 10_000) < 1000
        slow.settimeout(60)
        rest = answer(slow)
    assert b"The body took too long" in rest or rest == b""


def test_a_body_that_goes_on_behind_its_refusal(api: httpx.Client) -> None:
    with dial(api) as slow:
        slow.sendall(HEAD % (b"jobs", 1 << 40))
        assert b"413" in slow.recv(65536)
        assert drip(slow, b" " * 10_000) < 1000


WHOLE = 10 << 30
"""Bytes of an upload without end."""


@pytest.mark.parametrize("length", [b"Transfer-Encoding: chunked", b"Content-Length: %d" % WHOLE])
def test_ten_gigabytes_are_cut_off_at_the_limit(patient: httpx.Client, length: bytes) -> None:
    part = bytes(64 * 1024)
    if b"chunked" in length:
        part = b"%x\r\n%s\r\n" % (len(part), part)
    sent, text = 0, b""
    with dial(patient) as endless:
        with contextlib.suppress(ConnectionError):
            endless.sendall(b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\n%s\r\n\r\n" % length)
            while sent < WHOLE:
                endless.sendall(part)
                sent += len(part)
        with contextlib.suppress(ConnectionError):
            text = answer(endless)
    # The limit, what is read behind it, and what the sockets hold on both sides.
    assert sent < 32 * MIB
    assert text.startswith(b"HTTP/1.1 413 ") and b"application/problem+json" in text
    assert patient.get("/version").status_code == 200


def test_a_client_that_sends_too_much_reads_why(patient: httpx.Client) -> None:
    parts = (bytes(MIB) for _ in range(64))
    found = patient.post("/v1/models", content=parts)
    assert found.status_code == 413
    assert found.json()["field"] == "body"


def test_more_connections_than_there_may_be(api: httpx.Client) -> None:
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(dial(api)) for _ in range(MOST)]
        late = stack.enter_context(dial(api))
        text = answer(late)
        assert text.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 5" in text
        assert b"application/problem+json" in text
        document = json.loads(text.partition(b"\r\n\r\n")[2])
        assert (document["field"], document["value"]) == ("connections", str(MOST)) and document["repair"]
        for one in idle:
            answer(one)
    assert api.get("/version").status_code == 200


def test_a_long_poll_is_no_slow_client(api: httpx.Client) -> None:
    body = {"zoo": "gpt2:layers=2", "cluster": "8xV100-16GB", "training": {"global_batch": 64}, "budget": "1s"}
    job = api.post("/v1/jobs", json=body, timeout=60).json()
    assert api.get(f"/v1/jobs/{job['id']}?wait={3 * HEAD_S}").json()["state"] == "queued"


@pytest.mark.parametrize("name", ["Idempotency-Key", "Authorization", "Content-Type", "Last-Event-ID"])
def test_a_header_that_decides_something_comes_once(api: httpx.Client, name: str) -> None:
    """Of two, one would be taken and the other left out without a word."""
    answer = api.post("/v1/jobs", json={}, headers=[(name, "first"), (name.lower(), "second")])
    found = answer.json()
    assert (answer.status_code, found["field"], found["repair"]) == (400, name, f"Send {name} once.")
    assert ("second" in found["value"]) == (name != "Authorization")


def test_a_request_has_one_host(api: httpx.Client) -> None:
    """Otherwise a proxy may look at another one than the service."""
    with dial(api) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        found = connection.recv(4096)
    assert found.startswith(b"HTTP/1.1 400 ") and b"Send Host once." in found

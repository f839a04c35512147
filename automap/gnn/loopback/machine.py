"""One "machine": a process that sends and receives real bytes, no faster than its network interface would.

    python -m automap.gnn.loopback.machine SOCKET NUMBER ADDRESS

It connects to the controller's Unix socket, listens at ADDRESS for the other machines, and then reads lines of JSON:
first `{"peers": [[address, port]], "out": bytes a second, "in": bytes a second}`, then
`{"id": transfer, "to": machine, "bytes": left, "rate": bytes a second}` for every change of a rate. It answers
`{"arrived": id}` when it has received the last byte of a transfer. Both directions have a token bucket; without "out"
and "in" the kernel limits them.
"""

from __future__ import annotations

import json
import math
import select
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass

HEADER = struct.Struct("!qqi")
"""Header of each chunk: number of the transfer, bytes of the transfer after this chunk, bytes of the chunk."""
TICK_S = 0.001
"""Seconds between two rounds of sending."""
CHUNK = 1 << 17
"""Largest number of bytes of a chunk."""
LEAST = 1 << 13
"""Least number of bytes of a chunk, unless it is the last one of its transfer."""
BURST_S = 0.01
"""Capacity of a token bucket in seconds of its rate: several ticks, so that a late tick loses no tokens. The capacity
is at least `LEAST`, so that a chunk does not wait for the bucket once more."""


class Bucket:
    """A token bucket: taking tokens waits until there are enough."""

    def __init__(self, rate: float) -> None:
        """A bucket that is filled with `rate` bytes a second."""
        self.rate, self.most, self.at = rate, max(rate * BURST_S, LEAST), time.perf_counter()
        self.tokens = self.most
        self.lock = threading.Lock()

    def take(self, count: int) -> None:
        """Waits for the tokens of `count` bytes."""
        if self.rate == math.inf:
            return
        with self.lock:
            now = time.perf_counter()
            self.tokens = min(self.tokens + (now - self.at) * self.rate, self.most) - count
            self.at = now
            missing = -self.tokens
        if missing > 0:
            time.sleep(missing / self.rate)


@dataclass(slots=True)
class Sending:
    """A transfer that is being sent."""

    to: int
    left: int
    rate: float
    credit: float
    at: float


class Lines:
    """Lines of JSON over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        """Lines over a connected socket."""
        self.connection, self.lock, self.rest = connection, threading.Lock(), b""

    def send(self, *documents: object) -> None:
        """Sends documents."""
        with self.lock:
            self.connection.sendall(b"".join(json.dumps(document).encode() + b"\n" for document in documents))

    def receive(self) -> list[dict[str, float]]:
        """The documents that have come, at least one.

        Raises:
            EOFError: the other side has gone.
        """
        while True:
            data = self.connection.recv(1 << 16)
            if not data:
                raise EOFError
            *lines, self.rest = (self.rest + data).split(b"\n")
            if lines:
                return [json.loads(line) for line in lines]


def _read(connection: socket.socket, into: memoryview) -> bool:
    """Fills a buffer; returns whether the other side is still connected."""
    while len(into):
        count = connection.recv_into(into)
        if count == 0:
            return False
        into = into[count:]
    return True


def receive(connection: socket.socket, bucket: Bucket, control: Lines) -> None:
    """Receives chunks until the other side disconnects."""
    head, body = bytearray(HEADER.size), bytearray(CHUNK)
    while _read(connection, memoryview(head)):
        number, following, count = HEADER.unpack(head)
        if not _read(connection, memoryview(body)[:count]):
            return
        bucket.take(count)
        if following == 0:
            control.send({"arrived": number})


def send_due(sendings: dict[int, Sending], peers: dict[int, socket.socket], bucket: Bucket) -> None:
    """Sends the bytes that the rates of the transfers allow since the last call."""
    payload = memoryview(bytes(CHUNK))
    for number, sending in list(sendings.items()):
        now = time.perf_counter()
        sending.credit += sending.rate * (now - sending.at)
        sending.at = now
        while sending.credit >= min(LEAST, sending.left):
            count = int(min(sending.credit, sending.left, CHUNK))
            bucket.take(count)
            sending.left -= count
            sending.credit -= count
            peers[sending.to].sendall(HEADER.pack(number, sending.left, count) + payload[:count])
            if sending.left == 0:
                del sendings[number]
                break


def obey(control: Lines, sendings: dict[int, Sending]) -> None:
    """Reads new transfers and changes of rates from the controller."""
    for told in control.receive():
        number, rate, now = int(told["id"]), told["rate"], time.perf_counter()
        if number not in sendings:
            if "bytes" in told:
                sendings[number] = Sending(int(told["to"]), int(told["bytes"]), rate, 0.0, now)
            continue
        sending = sendings[number]
        sending.credit += sending.rate * (now - sending.at)
        sending.rate, sending.at = rate, now


def main(path: str, number: int, own: str) -> None:
    """Connects to the controller, and sends and receives until the controller disconnects."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        control = Lines(connection)
        listener = socket.create_server((own, 0))
        control.send({"machine": number, "port": listener.getsockname()[1]})
        (told,) = control.receive()
        addresses: list[tuple[str, int]] = told["peers"]  # type: ignore[assignment]
        outgoing, incoming = (Bucket(told.get(side, math.inf)) for side in ("out", "in"))
        peers = {
            other: socket.create_connection((host, port))
            for other, (host, port) in enumerate(addresses)
            if other != number
        }
        for _ in peers:
            peer, _address = listener.accept()
            threading.Thread(target=receive, args=(peer, incoming, control), daemon=True).start()
        control.send({"ready": number})
        sendings: dict[int, Sending] = {}
        while True:
            if select.select([connection], [], [], TICK_S if sendings else None)[0]:
                try:
                    obey(control, sendings)
                except EOFError:
                    return
            send_due(sendings, peers, outgoing)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])

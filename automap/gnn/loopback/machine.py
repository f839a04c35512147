"""One "machine": sends and receives real bytes, no faster than its network interface would.

    python -m automap.gnn.loopback.machine SOCKET NUMBER ADDRESS

It connects to the controller's Unix socket, listens at ADDRESS for the other machines, and then obeys lines of JSON:
`{"peers": [[address, port]], "out": bytes a second, "in": bytes a second}` at first, then
`{"id": transfer, "to": machine, "bytes": left, "rate": bytes a second}` for every change of a rate. It answers
`{"arrived": id}` when the last byte of a transfer has come. Both directions have a token bucket; without "out" and "in"
the kernel limits them.
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
"""Of each chunk: number of the transfer, bytes that follow it within the transfer, bytes of the chunk."""
TICK_S = 0.001
"""Seconds between two looks at the transfers that are sent."""
CHUNK = 1 << 17
"""Most bytes of a chunk."""
LEAST = 1 << 13
"""Bytes that a transfer saves up before a chunk is sent, unless it is the last one."""
BURST_S = 0.01
"""Seconds of its rate that a token bucket holds: some ticks, so that a late tick loses nothing. It holds no less than
`LEAST`, so that what a transfer has saved up does not wait once more for the bucket."""


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
    """Fills a buffer; whether the other side is still there."""
    while len(into):
        count = connection.recv_into(into)
        if count == 0:
            return False
        into = into[count:]
    return True


def receive(connection: socket.socket, bucket: Bucket, control: Lines) -> None:
    """Receives chunks until the other side has gone."""
    head, body = bytearray(HEADER.size), bytearray(CHUNK)
    while _read(connection, memoryview(head)):
        number, following, count = HEADER.unpack(head)
        if not _read(connection, memoryview(body)[:count]):
            return
        bucket.take(count)
        if following == 0:
            control.send({"arrived": number})


def send_due(sendings: dict[int, Sending], peers: dict[int, socket.socket], bucket: Bucket) -> None:
    """Sends what the rates of the transfers have allowed since the last time."""
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
    """Takes new transfers and changes of rates."""
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
    """Connects to the controller and works until it hangs up."""
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

"""Starts the "machines" of a real run: as processes of this host, or in network namespaces with limited interfaces.

    unshare --map-root-user --net python -m automap.gnn.loopback.network SOCKET OUT,… IN,…

creates the namespaces: one for each machine, connected to a bridge. If the host allows unprivileged namespaces, this
needs no special rights. `tc` limits each interface in both directions with the kernel's token bucket filter (tbf).
"""

from __future__ import annotations

import contextlib
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from automap.errors import ProblemError
from automap.gnn.loopback.machine import BURST_S

TOOLS = ("unshare", "nsenter", "ip", "tc")
HEADERS = 1.07
"""Bytes that an interface counts for each byte of data: 66 of 1,514 bytes are headers, and acknowledgements take 2 % of
the other direction."""
LEAST_BURST = 1 << 17
"""Least capacity of a token bucket of the kernel, in bytes: two segments of 64 KiB, as TCP sends them."""
QUEUE = 1 << 24
"""Bytes that may wait at an interface before the kernel drops packets; with the controller's rates few bytes wait."""


@dataclass(frozen=True, slots=True)
class Network:
    """Started machines."""

    connect: Callable[[], list[str]]
    """Called when all of them run; returns the address of each."""
    limit_themselves: bool


@contextlib.contextmanager
def _ended(started: list[subprocess.Popen[str]]) -> Iterator[None]:
    """Waits for processes, which end when their controller disconnects."""
    try:
        yield
    finally:
        for process in started:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _machine(path: str, number: int, address: str) -> list[str]:
    return [sys.executable, "-m", "automap.gnn.loopback.machine", path, str(number), address]


@contextlib.contextmanager
def processes(path: str, out: Sequence[float], into: Sequence[float]) -> Iterator[Network]:
    """Starts a process for each machine, which limits its own rate.

    Args:
        path: the controller's socket.
        out: [machines] bytes a second that each may send.
        into: [machines] bytes a second that each may receive.
    """
    started = [subprocess.Popen(_machine(path, number, "127.0.0.1"), text=True) for number in range(len(out))]
    with _ended(started):
        yield Network(lambda: ["127.0.0.1"] * len(out), True)


@contextlib.contextmanager
def namespaces(path: str, out: Sequence[float], into: Sequence[float]) -> Iterator[Network]:
    """Starts a namespace with a process for each machine; arguments as in `processes`.

    Raises:
        ProblemError: this host allows no network namespaces, or lacks a tool.
    """
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    unshare = ["unshare", "--map-root-user", "--net"]
    if missing or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        raise ProblemError(
            "cannot be used on this host",
            field="by_kernel",
            value=f"no {missing[0]}" if missing else "network namespaces are not allowed",
            repair="Leave the option out: each machine then limits its own rate with a token bucket.",
        )
    rates = [",".join(map(repr, side)) for side in (out, into)]
    command = [*unshare, sys.executable, "-m", "automap.gnn.loopback.network", path, *rates]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def connect() -> list[str]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("connect\n")
        process.stdin.flush()
        if process.stdout.readline() != "connected\n":
            raise ProblemError(
                "the network between machines could not be made",
                field="by_kernel",
                value="`ip` or `tc` has failed",
                repair="Its message is above. Leave the option out.",
            )
        return [_address(number) for number in range(len(out))]

    with _ended([process]):
        yield Network(connect, False)


def _address(number: int) -> str:
    return f"10.77.{number // 250}.{number % 250 + 1}"


def _run(*words: str | int) -> None:
    subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL)


def _limit(device: str, rate: float, *prefix: str | int) -> None:
    """Limits what leaves a device; `rate` in bytes of data a second."""
    burst = max(LEAST_BURST, math.ceil(rate * BURST_S))
    bits = math.ceil(8 * rate * HEADERS)
    queue: list[str | int] = ["root", "tbf", "rate", f"{bits}bit", "burst", burst, "limit", QUEUE]
    _run(*prefix, "tc", "qdisc", "add", "dev", device, *queue)


def _connect(number: int, pid: int, out: float, into: float) -> None:
    """Connects the namespace of a process to the bridge."""
    inside: tuple[str | int, ...] = ("nsenter", "--target", pid, "--net")
    _run("ip", "link", "add", f"m{number}", "type", "veth", "peer", "name", "eth0", "netns", pid)
    _run("ip", "link", "set", f"m{number}", "master", "bridge", "up")
    _run(*inside, "ip", "addr", "add", f"{_address(number)}/16", "dev", "eth0")
    _run(*inside, "ip", "link", "set", "eth0", "up")
    _limit(f"m{number}", into)
    _limit("eth0", out, *inside)


def main(path: str, out: Sequence[float], into: Sequence[float]) -> None:
    """Makes the namespaces, connects them when it is told to, and waits for the end of its input."""
    anywhere = "0.0.0.0"  # noqa: S104 - in a namespace of its own, before it has an address
    command = ["unshare", "--net"]
    started = [
        subprocess.Popen([*command, *_machine(path, number, anywhere)], text=True, stdin=subprocess.DEVNULL)
        for number in range(len(out))
    ]
    with _ended(started):
        if not sys.stdin.readline():
            return
        _run("ip", "link", "add", "bridge", "type", "bridge")
        _run("ip", "link", "set", "bridge", "up")
        for number, process in enumerate(started):
            _connect(number, process.pid, out[number], into[number])
        print("connected", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], *([float(rate) for rate in text.split(",")] for text in sys.argv[2:4]))

"""A real redis-server on a port of the loopback, beside the one that the service brings along."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import redis

from ir import lifetime

# Not the one that the embedded Redis brings along into a virtual environment: that one knows no TLS.
_FOLDERS = [folder for folder in os.get_exec_path() if not Path(folder, os.pardir, "pyvenv.cfg").exists()]
BINARY = shutil.which("redis-server", path=os.pathsep.join(_FOLDERS))
NOT_RUN = "not run: the service on a real redis-server (apt-get install redis-server)"
START_S = 20.0

ON_EVERY_REDIS = [
    pytest.mark.usefixtures("redis_url"),
    pytest.mark.parametrize(
        "redis_url",
        ["embedded", pytest.param("server", marks=pytest.mark.skipif(BINARY is None, reason=NOT_RUN))],
        indirect=True,
    ),
]
"""Runs the tests of a module on the service's own Redis and on a redis-server over TCP."""


def free_port() -> int:
    """A port that nobody listens on, below those that systems give to connections, so that no connection takes it."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class RedisServer:
    """A redis-server that can be stopped, killed and started again with what it had.

    Args:
        folder: its files.
        options: further ones, as in its configuration file.
        sentinel: whether it is a sentinel, which has a configuration file of its own.
    """

    def __init__(self, folder: Path, *, port: int = 0, sentinel: str = "", **options: object) -> None:
        if BINARY is None:
            pytest.skip(NOT_RUN)
        self.port = port or free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        given: dict[str, Any] = {"port": self.port, "bind": "127.0.0.1", "dir": folder, "save": '""', **options}
        if not sentinel:
            given = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"} | given
        else:
            del given["save"]
        lines = [f"{name.replace('_', '-')} {value}" for name, value in given.items()]
        self._file = folder / f"redis-{self.port}.conf"
        self._file.write_text("\n".join([*lines, sentinel]) + "\n")
        self._log = folder / f"redis-{self.port}.log"
        self._words = [BINARY, str(self._file), *(["--sentinel"] if sentinel else [])]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.kill()

    def start(self) -> None:
        """Starts it and waits until it takes connections."""
        with self._log.open("ab") as log:
            before = log.tell()
            self._process = subprocess.Popen(
                lifetime.command(signal.SIGKILL, self._words),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        ends = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as one:
                one.sendall(b"PING\r\n")
                answer = one.recv(64)
                # Who is not known is refused also while it loads; then its log says when it is ready. A sentinel loads
                # nothing.
                is_known = "--sentinel" in self._words or not answer.startswith(b"-NOAUTH")
                is_ready = is_known or b"Ready to accept" in self._log.read_bytes()[before:]
                if answer and not answer.startswith(b"-LOADING") and is_ready:
                    return
            assert self._process.poll() is None and time.monotonic() < ends, self._log.read_text()
            time.sleep(0.01)

    def kill(self) -> None:
        """Ends it at once; what it has written stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stops it: connections stay open, and nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Ends a pause."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> redis.Redis:
        """A connection of the test's own."""
        return redis.Redis(port=self.port, socket_timeout=5)

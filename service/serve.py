"""`automap serve`: the store, the workers and the REST service, started and stopped together.

Supervises what it starts: a worker or private Redis that dies is started again. Leaves no process behind, also when it
is killed. Knows nothing of jobs.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import redis
import uvicorn

from automap.errors import UserError
from ir.onnx.sandbox import fork_server
from service import processes
from service.embedded_redis import EmbeddedRedis
from service.http.api import close, create_app
from service.http.connections import server_config
from service.http.feed import Feed
from service.jobs import job_queue
from service.jobs.connection import check, connect
from service.jobs.keys import Keys
from service.jobs.store import Store
from service.settings import Settings

LOG = logging.getLogger("automap.serve")
_LOOK_S = 0.25
"""Seconds between two looks at the processes that were started."""
_OWN_FILES = 128
"""Open files beside connections: of Redis, uploads, children and libraries (assumed)."""
_MAX_PAUSE_S = 10.0
"""Longest pause, in seconds, before a process that keeps ending is started again (assumed)."""


def serve(
    settings: Settings,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Runs the service until SIGTERM or Ctrl-C.

    Args:
        settings: see `Settings`.
        host: address to bind. Where others reach it, every request needs a key.
        port: 0 = any free one.
        on_ready: called with the URL once the port is bound.

    Raises:
        UserError: the address is refused or taken, or the store cannot be used.
    """
    if not _is_loopback(host):
        settings = settings.model_copy(update={"require_keys": True})
    most = min(settings.max_connections, _raise_open_files() - _OWN_FILES)
    settings = settings.model_copy(update={"max_connections": most})
    with contextlib.ExitStack() as stack:
        signal.signal(
            signal.SIGTERM, lambda *_: sys.exit(0)
        )  # so that what follows is undone also before uvicorn listens
        bound = stack.enter_context(contextlib.closing(bind(host, port)))
        embedded = None
        if settings.redis_url is None:
            embedded = stack.enter_context(EmbeddedRedis(settings.data_dir))
        url = settings.redis_url or (embedded.url if embedded else "")
        client = connect(url)
        stack.callback(client.close)
        try:
            check(url)
            is_open = settings.require_keys and not Keys(client).any_usable()
        except redis.RedisError as fault:
            if settings.require_keys:
                repair = "Start it, or set AUTOMAP_REDIS_URL: whether there is a key is known to Redis alone."
                raise UserError(
                    f"Redis does not answer ({fault})", field="redis_url", value="...", repair=repair
                ) from None
            LOG.warning("Redis does not answer (%s); requests get 503 until it does", fault)
            is_open = False
        if is_open:
            repair = "Make one: `automap keys create --tenant NAME`. Or bind 127.0.0.1 without AUTOMAP_REQUIRE_KEYS, "
            repair += "where none is needed."
            raise UserError("requests need a key, and there is none yet", field="keys", value="none", repair=repair)
        if embedded is not None:
            store = Store(client)
            store.forget_graphs()
            job_queue.recover(store)
        stack.enter_context(_supervised(url, settings.num_workers, embedded))
        fork_server().start()
        stack.callback(fork_server().close)
        app = create_app(settings, client)
        stack.callback(close, app)
        name = f"[{host}]" if ":" in host else host
        # After its own shutdown uvicorn raises the signal again; ours then unwinds the stack.
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            on_ready(f"http://{name}:{bound.getsockname()[1]}")
            Server(server_config(app, settings), app.state.feed).run(sockets=[bound])


class Server(uvicorn.Server):
    """The server; when it ends it lets those go who listen to events, who would otherwise be waited for."""

    def __init__(self, config: uvicorn.Config, feed: Feed) -> None:
        super().__init__(config)
        self._feed = feed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends all connections."""
        self._feed.let_go()
        await super().shutdown(sockets)


def _raise_open_files() -> int:
    """Allows this process as many open files as its user may have; returns their number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens for the service; port 0 = any free one.

    Raises:
        UserError: the address is refused or taken.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # With its protocol named, asyncio sends small answers at once (TCP_NODELAY): 44 ms sooner on Linux.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(2048)
    except OSError as fault:
        repair = "Name another address or port; --port 0 takes any free one."
        raise UserError(
            f"cannot be bound ({fault.strerror})", field="port", value=f"{host}:{port}", repair=repair
        ) from None
    return bound


@contextlib.contextmanager
def _supervised(redis_url: str, num_workers: int, embedded: EmbeddedRedis | None) -> Iterator[None]:
    """Keeps `num_workers` workers, and the private Redis, alive until the end of the block.

    What cannot be started is told in the log and tried again, whatever the error is.
    """
    workers: list[subprocess.Popen[bytes] | None] = [None] * num_workers
    ending = threading.Event()

    def look() -> bool:
        """Starts what does not run; returns whether something had died."""
        is_lost = False
        if embedded is not None and not embedded.is_alive():
            LOG.error("the private redis-server died; starting it again")
            is_lost = True
            with _told("the private redis-server"):
                embedded.start()
        for index, worker in enumerate(workers):
            if worker is not None and worker.poll() is None:
                continue
            if worker is not None:
                LOG.error("worker %d died (%d); starting another", worker.pid, worker.returncode)
                is_lost = True
            with _told("a worker"):
                workers[index] = _start_worker(redis_url)
        return is_lost or None in workers

    def watch() -> None:
        pause_s = 0.0
        try:
            while not ending.wait(pause_s):
                pause_s = max(_LOOK_S, pause_s / 2)
                if look():
                    pause_s = min(4 * pause_s, _MAX_PAUSE_S)  # what dies at once is not started in a circle
        finally:
            # Here, not in the main thread: the kernel ends a worker when the thread that started it ends.
            started = [worker for worker in workers if worker is not None]
            for worker in started:
                worker.terminate()
            for worker in started:
                processes.stop(worker)

    watcher = threading.Thread(target=watch, name="supervisor", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ending.set()
        watcher.join()


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Logs the failure of a start, so that the supervisor goes on: nobody else would try again, or end the workers."""
    try:
        yield
    except Exception as fault:
        is_expected = isinstance(fault, UserError | OSError)  # as where the system has no memory or process to give
        LOG.error("%s could not be started, the next attempt follows: %s", what, fault, exc_info=not is_expected)


def _start_worker(redis_url: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "service.command", "worker", "--parent", str(os.getpid())],
        env={**os.environ, "AUTOMAP_REDIS_URL": redis_url},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        process_group=0,
    )

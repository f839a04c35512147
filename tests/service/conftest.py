"""A real private Redis, a real service, and a search that takes no time."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis
from child_processes import called, living
from redis_servers import RedisServer

from agents.searcher import Progress, SearchResult
from automap.plan import DeviceMemory, Estimate, Plan, Schedule, Stage, model_ref
from automap.problem import Problem
from automap.search_record import SearchRecord
from ir import lifetime
from service.client import AutomapClient
from service.embedded_redis import EmbeddedRedis
from service.http.api import close, create_app
from service.http.connections import server_config
from service.jobs.connection import connect
from service.jobs.store import Store
from service.serve import Server, bind
from service.settings import Settings

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DEADLINE_S = 90.0


def light_model(name: str) -> bytes:
    """A model from the onnx wheel."""
    spec = importlib.util.find_spec("onnx")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0]) / "backend/test/data/light" / f"light_{name}.onnx"
    return path.read_bytes()


def until(done: Callable[[], Any], *, deadline_s: float = DEADLINE_S) -> Any:
    """Polls `done` until it returns something true, and returns that."""
    end = time.monotonic() + deadline_s
    while not (found := done()):
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)
    return found


def made_up_plan(problem: Problem) -> Plan:
    """A plan of the right form; its figures mean nothing."""
    count = problem.cluster.num_devices
    devices = f"0-{count - 1}"
    operators = problem.graph.operators
    memory = DeviceMemory(
        devices=devices, parameters=1e9, gradients=1e9, optimizer=1e9, activations=1e9, buffers=1e9, capacity=16e9
    )
    return Plan(
        model=model_ref(problem.graph),
        cluster=problem.cluster.to_json(),
        training=problem.training,
        num_micro_batches=1,
        samples_per_micro_batch=problem.training.global_batch,
        schedule=Schedule(),
        stages=(
            Stage(
                operators=(operators[0].name, operators[-1].name),
                devices=devices,
                mesh=(("dp", count),),
                batch_axes=("dp",),
            ),
        ),
        estimate=Estimate(
            step_time_s=0.5,
            error_band_s=(0.4, 0.6),
            samples_per_s=128.0,
            tokens_per_s_per_device=None,
            mfu=0.3,
            memory_bytes=(memory,),
            breakdown_s={"compute": 0.5},
            lower_bound_s=0.1,
        ),
        search=SearchRecord(found_by="fake", seed=0, evaluations=7, baselines={"dp": 1.0, "expert": 0.6}),
    )


def instant_search(problem: Problem, budget: Any, *, on_progress: Any, **rest: Any) -> SearchResult:
    """In place of `agents.search`."""
    for fraction in (0.5, 1.0):
        on_progress(
            Progress(
                searcher="fake",
                evaluations=7,
                seconds=0.0,
                best_step_time_s=0.5,
                lower_bound_s=0.1,
                fraction=fraction,
            )
        )
    plan = made_up_plan(problem)
    return SearchResult(plan=plan, unlike=lambda count: (plan,), others=lambda count: (), evaluations=7, seconds=0.0)


@pytest.fixture(scope="session")
def light() -> Callable[[str], bytes]:
    return light_model


@pytest.fixture(scope="session", name="until")
def _until() -> Callable[..., Any]:
    return until


@pytest.fixture(scope="session")
def search() -> Callable[..., SearchResult]:
    return instant_search


@pytest.fixture(scope="session")
def redis_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The service's own Redis, or a redis-server where `redis_servers.ON_EVERY_REDIS` asks for it."""
    folder = tmp_path_factory.mktemp("data")
    if getattr(request, "param", "embedded") == "server":
        with RedisServer(folder) as server:
            yield server.url
        return
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", str(folder))  # that of the wheel, also where another is installed
            own = stack.enter_context(EmbeddedRedis(folder))
        yield own.url


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with connect(redis_url) as connection:
        connection.flushall()
        yield connection


@pytest.fixture
def store(client: redis.Redis) -> Store:
    return Store(client)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path)


@contextlib.contextmanager
def listening(settings: Settings, connection: redis.Redis) -> Iterator[httpx.Client]:
    """The application on a free port, served by a thread of this process."""
    app = create_app(settings, connection)
    server = Server(server_config(app, settings), app.state.feed)
    with bind("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, name="server", daemon=True)
        thread.start()
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{bound.getsockname()[1]}", timeout=60) as found:
                until(lambda: server.started)
                yield found
        finally:
            server.should_exit = True
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "the application does not end"
            close(app)


@pytest.fixture
def serve_app() -> Callable[..., Any]:
    return listening


@pytest.fixture(scope="module")
def _shared_api(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    settings = Settings(data_dir=tmp_path_factory.mktemp("api"))
    with connect(redis_url) as connection, listening(settings, connection) as found:
        yield found


@pytest.fixture
def api(_shared_api: httpx.Client, client: redis.Redis) -> httpx.Client:
    """The application with an empty store."""
    return _shared_api


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium without a window, whose configuration folder is a temporary one."""
    if CHROMIUM is None:
        pytest.skip("not run: pages and pictures in a browser (apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="not run: pages in a browser (playwright)")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu"],
            env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path_factory.mktemp("chromium"))},
        )
        yield started
        started.close()


class Service:
    """`automap serve` as a process, with its children."""

    def __init__(self, data_dir: Path, *words: str, **environment: str) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        serve = [sys.executable, "-m", "service.command", "serve", "--port", "0", "--json"]
        self.process = subprocess.Popen(
            lifetime.command(signal.SIGTERM, [*serve, *words]),
            env={**os.environ, "AUTOMAP_DATA_DIR": str(data_dir), "AUTOMAP_LOG_LEVEL": "INFO"} | environment,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        assert self.process.stdout is not None
        late = threading.Timer(DEADLINE_S, self.process.kill)
        late.start()
        line = self.process.stdout.readline()
        late.cancel()
        if not line.startswith(b'{"url"'):  # an error, or nothing
            told = line + self.process.stdout.read()
            self.process.wait()
            pytest.fail(f"{told.decode()}\n{self.log()}")
        self.process.stdout.close()
        self.url = json.loads(line)["url"]
        self.client = AutomapClient(self.url)

    def log(self) -> str:
        """What it wrote."""
        self._log.seek(0)
        return self._log.read().decode()

    def children(self) -> list[psutil.Process]:
        """All processes below it."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def worker(self) -> psutil.Process:
        """The worker process."""
        return called("worker", psutil.Process(self.process.pid).children())[0]

    def stop(self, sig: signal.Signals = signal.SIGTERM) -> None:
        """Ends it and checks that nothing of it is left."""
        family = self.children() if self.process.poll() is None else []
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            self.process.wait(30)
            until(lambda: not living(family), deadline_s=10)
        finally:
            for left in living(family):
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()
            self.process.kill()
            self.process.wait()
            self._log.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Starts services that end with the test."""
    started: list[Service] = []

    def begin(*words: str, data_dir: Path | None = None, **environment: str) -> Service:
        service = Service(data_dir or tmp_path, *words, **environment)
        started.append(service)
        return service

    yield begin
    for service in started:
        if service.process.poll() is None:
            service.stop()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for the tests that leave it as they found it."""
    service = Service(tmp_path_factory.mktemp("running"))
    yield service
    print(service.log())  # shown when a test failed
    service.stop()


@pytest.fixture(scope="module")
def on_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, EmbeddedRedis]]:
    """A service on a Redis that the test may stop, kill and fill; one that says nothing for two seconds is away."""
    with EmbeddedRedis(tmp_path_factory.mktemp("store")) as server:
        more = {"AUTOMAP_REDIS_URL": f"{server.url}?socket_timeout=2", "AUTOMAP_LOG_LEVEL": "WARNING"}
        service = Service(tmp_path_factory.mktemp("service"), **more)
        try:
            yield service, server
        finally:
            print(service.log())  # shown when a test failed
            service.stop()
